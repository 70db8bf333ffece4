"""The whole way with real processes: a trained bundle, `python -m server`, `python -m client`."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.serving import RunningServer, serving
from seq2seq_serve.training.evaluation.scoring import translate

TEXTS = ["하나 둘 셋", "넷", "다섯 다섯 하나 둘", "둘 하나", " 셋  셋 "]


@pytest.fixture(scope="module")
def server(trained_run) -> Iterator[RunningServer]:
    with serving(
        trained_run.bundle, ["--precision", "fp32", "--threads", "2", "--max-slots", "3"]
    ) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(trained_run) -> dict[str, str]:
    """What greedy search by definition makes of the texts."""
    trained = trained_run.trained
    bound = trained.length_bound
    return dict(
        zip(TEXTS, translate(trained.model, trained.tokenizer, TEXTS, length_bound=bound), strict=True)
    )


def run_client(
    server: RunningServer, *arguments: str, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "client", "translate", *arguments, "--address", server.address]
    return subprocess.run(
        command, input=stdin, capture_output=True, encoding="utf-8", timeout=60, check=False
    )


def output(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_oracle_translates(oracle):
    assert oracle["하나 둘 셋"] == "one two three"
    assert oracle["넷"] == "four"


def test_texts_are_translated_as_the_oracle_does(server, oracle):
    assert output(run_client(server, *TEXTS)) == [oracle[text] for text in TEXTS]


def test_a_stream_shows_the_same_text(server, oracle):
    assert output(run_client(server, *TEXTS, "--stream")) == [oracle[text] for text in TEXTS]
