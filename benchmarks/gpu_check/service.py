"""The parts of `benchmarks.gpu_check` that run a real server on the device: its protocol, and its speed."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from rich.progress import Progress

from benchmarks.gpu_check.place import BASE, Findings, Place
from benchmarks.load.engine import DrivenEngine, server_engine
from benchmarks.load.figures import Bench, measure_closed_loops, measure_sweep
from benchmarks.load.generator import Generator
from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.client import Client, ClientError
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse, Target, Term, TokenIds

_SOURCE = "오늘은 금요일입니다"
_PREFIX_IDS = range(5, 75)
_PREFIX = Target(token_ids=TokenIds(values=_PREFIX_IDS))
_LONG = GenerateOptions(max_length_ratio=0, max_new_tokens=150)
OPTIONS = {
    "greedy": GenerateOptions(),
    "beam": GenerateOptions(beam_size=4, num_hypotheses=4),
    "sample": GenerateOptions(temperature=1, seed=1, num_hypotheses=3),
    "top_k": GenerateOptions(temperature=1, top_k=5, seed=1),
    "top_p": GenerateOptions(temperature=1, top_p=0.9, min_p=0.1, seed=1),
    "bias": GenerateOptions(logit_bias={5: 2.0}, suppressed_token_ids=[7, 8]),
    "repetition": GenerateOptions(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=4),
    "alternatives": GenerateOptions(log_probabilities=True, num_alternatives=5),
    "prefix": GenerateOptions(target_prefix=_PREFIX),
    "prefix of a beam": GenerateOptions(target_prefix=_PREFIX, beam_size=4, attention=True),
    "terms": GenerateOptions(beam_size=4, num_hypotheses=4, terms=[Term(source="오늘은", target="one")]),
    "attention": GenerateOptions(attention=True),
    "attention in pieces": GenerateOptions(attention=True, max_length_ratio=0, max_new_tokens=150),
}
_TRAFFIC = ("greedy", "beam", "terms", "top_k", "attention")
VERSIONS = ("1", "2", "1", "2")
_WORDS = GenerateOptions(word_timestamps=True, max_new_tokens=24)
_SLOTS = 256
_LEAST_SHARE = 0.85  # bar of the tokens/s through gRPC
_LOADS = (0.7,)


@dataclass(frozen=True)
class Life:
    """The record of one server process and its callers.

    Attributes:
        answers: The answer to each kind of call.
        problems: Of the kinds of call, what their answers lack.
        cancelled: The status of a call that was cancelled at once.
        traffic: Outcomes of the calls beside reloads.
        loaded: Versions that took each other's place.
        last_answer: Hypotheses of a stream that was running when the server was asked to end.
    """

    answers: dict[str, GenerateResponse]
    problems: list[str]
    cancelled: str
    traffic: Counter[str]
    loaded: list[str]
    last_answer: int
    exit_code: int


def repository(bundle: Path, folder: Path) -> Path:
    """Returns a folder with the bundle as both versions of the model `BASE`."""
    for version in set(VERSIONS):
        shutil.copytree(bundle, folder / BASE / version)
    return folder / BASE


def live(server: RunningServer, client: Client) -> Life:
    """Call a server of a `repository` in every way, reload it under traffic, and drain it by SIGTERM."""
    answers = {
        name: client.generate(_SOURCE, model=BASE, options=options) for name, options in OPTIONS.items()
    }
    problems = [
        f"the call {name!r} has an answer without all that it asked for"
        for name, answer in answers.items()
        if len(answer.hypotheses) != (OPTIONS[name].num_hypotheses or 1)
        or not all(each.token_ids for each in answer.hypotheses)
        or any(bool(each.attention.weights) != OPTIONS[name].attention for each in answer.hypotheses)
    ]
    *_, last = client.stream(_SOURCE, model=BASE)
    if last.result.hypotheses[0].token_ids != answers["greedy"].hypotheses[0].token_ids:
        problems.append("a stream has other tokens than an answer")
    if len(client.score(_SOURCE, list(_PREFIX_IDS), model=BASE).log_probabilities) != len(_PREFIX_IDS) + 1:
        problems.append("a score does not have a log-probability for each token")
    pending = client.submit(_SOURCE, model=BASE, options=_LONG)
    pending.cancel()
    outcome = pending.outcome()
    traffic, loaded = _reload_beside_traffic(client)
    pieces = client.stream(_SOURCE, model=BASE, options=_LONG)
    next(pieces)
    server.process.send_signal(signal.SIGTERM)
    *_, last = pieces
    return Life(
        answers=answers,
        problems=problems,
        cancelled=outcome.code if isinstance(outcome, ClientError) else "OK",
        traffic=traffic,
        loaded=loaded,
        last_answer=len(last.result.hypotheses),
        exit_code=server.wait(),
    )


def _reload_beside_traffic(client: Client) -> tuple[Counter[str], list[str]]:
    """Returns the outcomes of the calls, and the versions that were loaded beside them."""
    traffic, stopping = Counter[str](), threading.Event()

    def call(options: GenerateOptions) -> None:
        while not stopping.is_set():
            try:
                client.generate(_SOURCE, model=BASE, options=options)
                traffic["answered"] += 1
            except ClientError as error:
                traffic[str(error)] += 1

    callers = [threading.Thread(target=call, args=(OPTIONS[kind],)) for kind in _TRAFFIC]
    for caller in callers:
        caller.start()
    try:
        loaded = [client.load(BASE, version, timeout_seconds=60).version for version in VERSIONS]
    finally:
        stopping.set()
        for caller in callers:
            caller.join()
    return traffic, loaded


@contextmanager
def _server(place: Place, bundles: Sequence[Path], *flags: str) -> Iterator[RunningServer]:
    """Runs a server without torch and its CUDA libraries in the way, like in the container."""
    precision = place.scale.precisions[0].value
    given = ["--provider", place.scale.policy, "--precision", precision, *flags, "--log-level", "info"]
    with (place.folder / "log").open("wb") as stderr, serving(bundles, given, stderr=stderr) as running:
        yield running


def server(place: Place, found: Findings) -> Iterator[str]:
    """Check the words of a Whisper, and the life of a server."""
    bundles = [repository(place.folder / BASE, place.folder / "repository"), place.folder / "whisper"]
    try:
        with (
            _server(place, bundles, "--open-repository", "--max-slots", "64") as running,
            Client(running.address, timeout_seconds=60) as client,
        ):
            found["models"] = models = {model.name: model.provider for model in client.models()}
            if place.scale.on_cuda and set(models.values()) != {"cuda"}:
                yield f"the models run on {models}"
            heard = client.generate(_sound(), model="whisper", options=_WORDS)
            segments = heard.hypotheses[0].segments
            found["words"] = words = [str(word) for segment in segments for word in segment.words]
            if not words:
                yield "no word has a time"
            life = live(running, client)
            found["cancelled"], found["traffic"] = life.cancelled, life.traffic
            yield from life.problems
            if list(life.traffic) != ["answered"] or life.loaded != list(VERSIONS):
                yield f"beside reloads to {life.loaded}: {life.traffic}"
            if life.exit_code or not life.last_answer:
                yield f"SIGTERM beside a stream: exit code {life.exit_code}"
    finally:
        found["log"] = log = (place.folder / "log").read_text(errors="replace").splitlines()[-200:]
    for line in log:
        if "Traceback" in line or "not captured" in line:
            yield line


def _sound() -> bytes:
    """Returns a WAV file of a second of noise."""
    noise = np.random.default_rng(0).uniform(-0.1, 0.1, SAMPLE_RATE)
    file = io.BytesIO()
    soundfile.write(file, noise, SAMPLE_RATE, format="WAV")
    return file.getvalue()


def load(place: Place, found: Findings) -> Iterator[str]:
    """Measure closed loops and an open loop as `benchmarks.load` does."""
    scale, cores = place.scale, sorted(os.sched_getaffinity(0))
    slots = max(_SLOTS, *scale.in_flight)
    config = place.config(scale.precisions[0], slots)
    with (
        _server(place, [place.folder / BASE], "--max-slots", str(slots)) as running,
        Generator(cores[len(cores) // 2 :]) as generator,
        Progress(disable=True) as progress,
    ):
        bench = Bench(running, generator, progress, scale.num_rounds, scale.open_seconds)
        engine = DrivenEngine(server_engine(place.folder / BASE, config))
        for in_flight in scale.in_flight:
            found[f"closed loops of {in_flight}"] = loops = measure_closed_loops(bench, engine, in_flight)
            for way in ("unary", "stream"):
                share = loops["greedy"][way]["to_engine"]
                if scale.on_cuda and share < _LEAST_SHARE:
                    yield f"{way}, {in_flight} at once: {share:.0%} of the engine's (bar {_LEAST_SHARE:.0%})"
        engine.stop()
        found["open loop"] = measure_sweep(bench, _LOADS)
