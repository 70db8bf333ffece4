"""The parts of `benchmarks.gpu_check` that run a real server on the device: its protocol, and its speed."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_check.place import BASE, Findings, Place
from benchmarks.load.generator import Generator
from benchmarks.load.inprocess import InProcessEngine
from benchmarks.load.mix import MIX, ONLY_GREEDY, VOCAB_SIZE, Job, Mode, draw_jobs, quantile, throughput
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.client import Client, ClientError
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, Target, TokenIds
from seq2seq_serve.server.runner.runner import OnnxRunner

_PREFIX = Target(token_ids=TokenIds(values=range(5, 25)))
_OPTIONS = {
    "greedy": GenerateOptions(),
    "beam of 5": GenerateOptions(beam_size=5, num_hypotheses=5),
    "sampling": GenerateOptions(temperature=1, seed=1, num_hypotheses=3),
    "top_p": GenerateOptions(temperature=1, top_p=0.9, top_k=50, seed=1),
    "constraints": GenerateOptions(logit_bias={5: 2.0}, suppressed_token_ids=[7, 8], no_repeat_ngram_size=2),
    "alternatives": GenerateOptions(log_probabilities=True, num_alternatives=5),
    "prefix": GenerateOptions(target_prefix=_PREFIX, attention=True),
    "prefix of a beam": GenerateOptions(target_prefix=_PREFIX, beam_size=4, attention=True),
}
_NUM_TOKENS = 24
_LONG = GenerateOptions(max_length_ratio=0, max_new_tokens=60)
_SERVICE_LOAD = 0.7
_SLOTS = 256


@contextmanager
def _server(place: Place, bundle: Path, flags: list[str], log: Path) -> Iterator[RunningServer]:
    provider = "require" if place.scale.on_cuda else "cpu"
    precision = place.scale.precisions[0].value
    flags = ["--provider", provider, "--precision", precision, *flags, "--log-level", "info"]
    # Without torch and its CUDA libraries in the way, like in the container.
    with log.open("wb") as stderr, serving(bundle, flags, stderr=stderr) as server:
        yield server


def server(place: Place, found: Findings) -> str:
    """Call a real server in every mode, cancel, reload it under traffic, and drain it by SIGTERM."""
    folder = place.folder / "repository"
    for version in ("1", "2"):
        shutil.copytree(place.folder / BASE, folder / "model" / version)
    log = place.folder / "server.log"
    problems: list[str] = []
    source, *others = place.sources(9)
    started = time.perf_counter()
    try:
        with (
            _server(place, folder / "model", ["--open-repository", "--max-slots", "64"], log) as running,
            Client(running.address, timeout_seconds=30) as client,
        ):
            found["seconds until ready"] = round(time.perf_counter() - started, 1)
            [model] = client.models()
            found["model"] = {"provider": model.provider, "precision": model.precision}
            if place.scale.on_cuda and model.provider != "cuda":
                problems.append(f"the model runs on {model.provider}")
            found["answers"] = answers = _answers(client, source)
            problems += [f"no answer: {name}" for name, ids in answers.items() if not ids or not ids[0]]
            if answers["stream"][0] != answers["greedy"][0]:
                problems.append("a stream has other tokens than an answer")
            found["cancelled"] = _cancel(client, source)
            found["reloads"] = reloads = _reload_beside_traffic(client, others)
            problems += [f"beside reloads: {text}" for text in reloads if text not in ("answered", "loaded")]
            names = {"seq2seq_model_info", "seq2seq_slots_in_use", "seq2seq_slots", "seq2seq_cache_bytes"}
            found["metrics"] = metrics = [
                {"name": sample.name, "value": sample.value} | sample.labels
                for sample in running.samples()
                if sample.name in names
            ]
            if place.scale.on_cuda and not any(one.get("provider") == "cuda" for one in metrics):
                problems.append("/metrics does not name the provider")
            pieces = client.stream(source, options=_LONG)
            next(pieces)
            running.process.send_signal(signal.SIGTERM)
            *_, last = pieces
            found["exit code after a stream"] = code = running.wait()
            if code or not last.result.hypotheses:
                problems.append(f"SIGTERM beside a stream: exit code {code}")
    finally:
        found["log"] = log.read_text(errors="replace").splitlines()[-60:]
    problems += [line for line in found["log"] if "Traceback" in line or "not captured" in line]
    return "; ".join(problems)


def _answers(client: Client, source: list[int]) -> dict[str, list[list[int]]]:
    """Returns the targets by mode."""
    limits = GenerateOptions(max_new_tokens=_NUM_TOKENS)
    answers = {}
    for name, given in _OPTIONS.items():
        options = GenerateOptions()
        options.MergeFrom(limits)
        options.MergeFrom(given)
        answer = client.generate(source, options=options)
        answers[name] = [list(hypothesis.token_ids) for hypothesis in answer.hypotheses]
    *_, last = client.stream(source, options=limits)
    answers["stream"] = [list(last.result.hypotheses[0].token_ids)]
    scored = client.score(source, answers["greedy"][0])
    answers["score"] = [[len(scored.log_probabilities)]]
    return answers


def _cancel(client: Client, source: list[int]) -> str:
    pending = client.submit(source, options=_LONG)
    pending.cancel()
    outcome = pending.outcome()
    return outcome.code if isinstance(outcome, ClientError) else "it was complete"


def _reload_beside_traffic(client: Client, sources: list[list[int]]) -> dict[str, int]:
    """Returns how often calls beside reloads ended in each way."""
    outcomes: dict[str, int] = {}
    stopping = threading.Event()

    def call(source: list[int]) -> None:
        while not stopping.is_set():
            try:
                client.generate(source, options=_LONG)
                outcome = "answered"
            except ClientError as error:
                outcome = str(error)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1

    callers = [threading.Thread(target=call, args=(source,)) for source in sources]
    for caller in callers:
        caller.start()
    try:
        for version in ("1", "2"):
            loaded = client.load("model", version, timeout_seconds=40)
            outcomes["loaded"] = outcomes.get("loaded", 0) + (loaded.version == version)
    finally:
        stopping.set()
        for caller in callers:
            caller.join()
    return outcomes


def load(place: Place, found: Findings) -> str:
    """Measure tokens per second through gRPC beside the engine's, and latencies at 70 % of the capacity."""
    scale = place.scale
    in_flight = 64 if scale.on_cuda else 4
    jobs = _jobs(scale.num_jobs, scale.model.vocab_size)
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    config = place.config(scale.precisions[0], _SLOTS)
    engine = InProcessEngine(OnnxRunner(load_bundle(place.folder / BASE), config))
    for mix_name, mix in (("greedy", ONLY_GREEDY), ("mix", MIX)):
        chosen = _jobs(scale.num_jobs // 2, scale.model.vocab_size, mix)
        for _ in range(2):  # the first one is warm-up
            engine.totals.clear()
            started = time.perf_counter()
            outcomes = engine.closed_loop(chosen, in_flight)
            seconds = time.perf_counter() - started
        num_tokens = sum(one.num_tokens for one in outcomes)
        found[f"engine, {mix_name}"] = dict(engine.totals) | {
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "turn_ms": 1e3 * seconds / engine.totals["turns"],
            "encode_ms": 1e3 * engine.totals["encode_seconds"] / max(1, engine.totals["encodes"]),
            "step_ms": 1e3 * engine.totals["step_seconds"] / engine.totals["turns"],
        }
    log = place.folder / "load.log"
    with (
        _server(place, place.folder / BASE, ["--max-slots", str(_SLOTS)], log) as running,
        Generator(cores[half:] or cores) as generator,
    ):
        rates: dict[str, list[float]] = {"engine": [], "unary": [], "stream": []}
        for number in range(scale.num_rounds):
            measured = {"engine": engine.closed_loop(jobs, in_flight)}
            for name in ("unary", "stream"):
                run = generator.closed_loop(
                    running.address, jobs, in_flight=in_flight, stream=name == "stream"
                )
                measured[name] = run.outcomes
                found[f"{name}: client's cores, lag p99"] = [run.cpu_share, run.lag_seconds]
            for name, outcomes in measured.items():
                failed = [one.code for one in outcomes if one.code != "OK"]
                if failed:
                    return f"{name}: {failed[:3]} failed"
                if number or scale.num_rounds == 1:  # the first one is warm-up
                    rates[name].append(throughput(outcomes, in_flight).tokens_per_second)
            found["rates"] = rates
        found["tokens per second"] = medians = {name: statistics.median(of) for name, of in rates.items()}
        found["of the engine's"] = {name: rate / medians["engine"] for name, rate in medians.items()}
        mean_tokens = sum(job.num_tokens for job in jobs) / len(jobs)
        capacity = medians["stream"] / mean_tokens
        for mix_name, mix in (("greedy", ONLY_GREEDY), ("mix", MIX)):
            share = found["engine, mix"]["tokens_per_second"] / found["engine, greedy"]["tokens_per_second"]
            rate = _SERVICE_LOAD * capacity * (1 if mix is ONLY_GREEDY else share)
            count = max(4, round(rate * scale.load_seconds))
            run = generator.open_loop(
                running.address, _jobs(count, scale.model.vocab_size, mix), rate=rate, stream=True
            )
            done = [one for one in run.outcomes if one.code == "OK"]
            found[f"open loop, {mix_name}"] = {
                "requests_per_second": rate,
                "requests": len(run.outcomes),
                "not_ok": len(run.outcomes) - len(done),
                "client_cpu_share": run.cpu_share,
                "client_lag_p99_ms": 1e3 * run.lag_seconds,
            } | {
                f"{kind}_p{round(100 * q)}_ms": 1e3 * quantile(values, q)
                for kind, values in {
                    "latency": [one.end - one.arrival for one in done],
                    "first_token": [one.first - one.arrival for one in done],
                    "inter_token": [gap for one in done for gap in one.gaps],
                }.items()
                for q in (0.5, 0.99)
            }
        steps = running.histogram("seq2seq_decode_step_seconds")
        rows = running.histogram("seq2seq_step_batch_size")
        found["server's median step ms, rows"] = [1e3 * steps.quantile(0.5), rows.quantile(0.5)]
    engine.stop()
    return ""


def _jobs(count: int, vocab_size: int, mix: Mapping[Mode, float] = ONLY_GREEDY) -> list[Job]:
    """Returns jobs of the load benchmark; a smaller vocabulary keeps its own ids."""
    jobs = draw_jobs(count, mix, seed=1)
    if vocab_size >= VOCAB_SIZE:
        return jobs
    return [
        replace(
            job, source_ids=(*(4 + i % (vocab_size - 4) for i in job.source_ids[:-1]), job.source_ids[-1])
        )
        for job in jobs
    ]
