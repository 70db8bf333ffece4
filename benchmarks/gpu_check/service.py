"""The parts of `benchmarks.gpu_check` that run a real server on the device: its protocol, and its speed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import Progress

from benchmarks.gpu_check.place import BASE, Findings, Place
from benchmarks.load.engine import DrivenEngine, server_engine
from benchmarks.load.figures import Bench, measure_closed_loops, measure_sweep
from benchmarks.load.generator import Generator
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.client import Client, ClientError
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, Target, TokenIds

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
_SLOTS = 256


@contextmanager
def _server(place: Place, bundle: Path, flags: list[str], log: str) -> Iterator[RunningServer]:
    provider = "require" if place.scale.on_cuda else "cpu"
    precision = place.scale.precisions[0].value
    flags = ["--provider", provider, "--precision", precision, *flags, "--log-level", "info"]
    # Without torch and its CUDA libraries in the way, like in the container.
    with (place.folder / log).open("wb") as stderr, serving(bundle, flags, stderr=stderr) as server:
        yield server


def server(place: Place, found: Findings) -> str:
    """Call a real server in every mode, cancel, reload it under traffic, and drain it by SIGTERM."""
    folder = place.folder / "repository"
    for version in ("1", "2"):
        shutil.copytree(place.folder / BASE, folder / "model" / version)
    problems: list[str] = []
    source, *others = place.sources(9)
    started = time.perf_counter()
    try:
        with (
            _server(
                place, folder / "model", ["--open-repository", "--max-slots", "64"], "server.log"
            ) as running,
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
        log = (place.folder / "server.log").read_text(errors="replace")
        found["log"] = log.splitlines()[-60:]
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


def _reload_beside_traffic(client: Client, sources: list[list[int]]) -> Counter[str]:
    """Returns how often calls beside reloads ended in each way."""
    outcomes = Counter[str]()
    stopping = threading.Event()

    def call(source: list[int]) -> None:
        while not stopping.is_set():
            try:
                client.generate(source, options=_LONG)
                outcome = "answered"
            except ClientError as error:
                outcome = str(error)
            outcomes[outcome] += 1

    callers = [threading.Thread(target=call, args=(source,)) for source in sources]
    for caller in callers:
        caller.start()
    try:
        for version in ("1", "2"):
            loaded = client.load("model", version, timeout_seconds=40)
            outcomes["loaded"] += loaded.version == version
    finally:
        stopping.set()
        for caller in callers:
            caller.join()
    return outcomes


def load(place: Place, found: Findings) -> str:
    """Measure closed loops and an open loop as `benchmarks.load` does, without CTranslate2."""
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    config = place.config(place.scale.precisions[0], _SLOTS)
    with (
        _server(place, place.folder / BASE, ["--max-slots", str(_SLOTS)], "load.log") as server,
        Generator(cores[half:] or cores) as generator,
        Progress(disable=True) as progress,
    ):
        bench = Bench(place.scale.plan, server, generator, progress)
        engine = DrivenEngine(server_engine(place.folder / BASE, config))
        found["closed loops"] = measure_closed_loops(bench, engine)
        engine.stop()
        found["open loop"] = measure_sweep(bench)
    return ""
