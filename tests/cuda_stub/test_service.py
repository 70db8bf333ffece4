"""A whole server process on the stub: its start, calls of every kind, reloads beside traffic, and its end."""

import re
import shutil
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.serving import RunningServer, serving
from seq2seq_serve.client import Client, ClientError
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, Target, TokenIds
from tests.cuda_stub.log import Log, read_log
from tests.cuda_stub.run import Stub

pytestmark = pytest.mark.cuda_stub

SOURCE = "오늘은 금요일입니다"
PREFIX_IDS = list(range(5, 75))
PREFIX = Target(token_ids=TokenIds(values=PREFIX_IDS))
OPTIONS = {
    "greedy": GenerateOptions(),
    "beam": GenerateOptions(beam_size=4, num_hypotheses=4),
    "sample": GenerateOptions(temperature=1, seed=1, num_hypotheses=3),
    "top_k": GenerateOptions(temperature=1, top_k=5, seed=1),
    "top_p": GenerateOptions(temperature=1, top_p=0.9, min_p=0.1, seed=1),
    "bias": GenerateOptions(logit_bias={5: 2.0}, suppressed_token_ids=[7, 8]),
    "repetition": GenerateOptions(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=4),
    "alternatives": GenerateOptions(log_probabilities=True, num_alternatives=5),
    "prefix": GenerateOptions(target_prefix=PREFIX),
    "prefix of a beam": GenerateOptions(target_prefix=PREFIX, beam_size=4, attention=True),
    "attention": GenerateOptions(attention=True),
    "attention in pieces": GenerateOptions(attention=True, max_length_ratio=0, max_new_tokens=150),
}
TRAFFIC = ("greedy", "beam", "top_k", "attention")
VERSIONS = ("1", "2", "1", "2")
LONG = GenerateOptions(max_length_ratio=0, max_new_tokens=150)


@dataclass(frozen=True)
class Life:
    """The record of one server process and its callers.

    Attributes:
        provider: That the model runs on, as the server reports it.
        answers: Number of hypotheses of each kind of call.
        num_scores: Log-probabilities of a target of 70 tokens.
        has_attention: Kinds of call whose every hypothesis had its attention.
        traffic: What the calls beside reloads ended with.
        loaded: Versions that took each other's place.
        last_answer: Hypotheses of a stream that was running when the server was asked to end.
    """

    provider: str
    answers: dict[str, int]
    num_scores: int
    has_attention: set[str]
    traffic: Counter[str]
    loaded: list[str]
    last_answer: int
    exit_code: int
    stderr: str
    log: Log


@pytest.fixture(scope="module")
def life(stub: Stub, cuda_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("service")
    for version in set(VERSIONS):
        shutil.copytree(cuda_bundle, folder / "model" / version)
    log, stderr = folder / "log", folder / "stderr"
    flags = ["--provider", "require", "--open-repository", "--max-slots", "8", "--log-level", "info"]
    with (
        stderr.open("wb") as file,
        serving(folder / "model", flags, stderr=file, environment=stub.environment(log)) as server,
        Client(server.address, timeout_seconds=60) as client,
    ):
        [model] = client.models()
        answers = {name: client.generate(SOURCE, options=options) for name, options in OPTIONS.items()}
        num_scores = len(client.score(SOURCE, PREFIX_IDS).log_probabilities)
        traffic, loaded = reload_beside_traffic(client)
        last_answer, exit_code = end_beside_a_stream(server, client)
    has_attention = {
        name
        for name, answer in answers.items()
        if all(hypothesis.attention.weights for hypothesis in answer.hypotheses)
    }
    return Life(
        provider=model.provider,
        answers={name: len(answer.hypotheses) for name, answer in answers.items()},
        num_scores=num_scores,
        has_attention=has_attention,
        traffic=traffic,
        loaded=loaded,
        last_answer=last_answer,
        exit_code=exit_code,
        stderr=stderr.read_text(),
        log=read_log(log.read_text()),
    )


def reload_beside_traffic(client: Client) -> tuple[Counter[str], list[str]]:
    """Returns the outcomes of the calls, and the versions that were loaded beside them."""
    traffic, stopping = Counter[str](), threading.Event()

    def call(options: GenerateOptions) -> None:
        while not stopping.is_set():
            try:
                client.generate(SOURCE, options=options)
                traffic["answered"] += 1
            except ClientError as error:
                traffic[str(error)] += 1

    callers = [threading.Thread(target=call, args=(OPTIONS[kind],)) for kind in TRAFFIC]
    for caller in callers:
        caller.start()
    try:
        loaded = [client.load("model", version, timeout_seconds=60).version for version in VERSIONS]
    finally:
        stopping.set()
        for caller in callers:
            caller.join()
    return traffic, loaded


def end_beside_a_stream(server: RunningServer, client: Client) -> tuple[int, int]:
    """The hypotheses of a stream's answer, and the exit code."""
    pieces = client.stream(SOURCE, options=LONG)
    next(pieces)
    server.process.send_signal(signal.SIGTERM)
    *_, last = pieces
    return len(last.result.hypotheses), server.wait()


def test_the_log_names_the_device_and_its_memory(life):
    assert re.search(r"fp16 on cuda \(Stub of an H100, \d+ GiB\), 8 slots", life.stderr)


def test_the_model_runs_on_cuda_and_steps_are_captured(life):
    assert life.provider == "cuda"
    assert life.log.whole.captures
    assert "not captured" not in life.stderr


def test_calls_of_every_kind_are_answered(life):
    wanted = {name: options.num_hypotheses or 1 for name, options in OPTIONS.items()}
    assert life.answers == wanted
    assert life.num_scores == len(PREFIX_IDS) + 1
    assert life.has_attention == {name for name, options in OPTIONS.items() if options.attention}


def test_reloads_beside_traffic_fail_no_call(life):
    assert life.loaded == list(VERSIONS)
    assert list(life.traffic) == ["answered"]
    assert life.traffic["answered"] >= len(TRAFFIC)


def test_the_server_finishes_a_stream_and_exits_with_0(life):
    assert life.last_answer == 1
    assert life.exit_code == 0


def test_nothing_that_cuda_refuses_is_asked_of_it(life):
    assert life.log.whole.errors == []
