"""The whole way with real processes: a trained bundle, `python -m server`, `python -m client`."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.serving import RunningServer, serving
from seq2seq_serve.server.__main__ import main as server_main
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


def test_attention_is_written_as_numbers_and_as_a_picture(server, oracle, tmp_path):
    text = TEXTS[0]
    assert output(run_client(server, text, "--attention", str(tmp_path / "a.json"))) == [oracle[text]]
    attention = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    weights = np.array(attention["weights"])
    assert weights.shape == (len(attention["target_tokens"]), len(attention["source_tokens"]))
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-4)
    assert "".join(attention["source_tokens"]) == f"{text}<eos>"
    assert "".join(attention["target_tokens"]) == f"{oracle[text]}<eos>"
    run = run_client(server, text, "--stream", "--attention", str(tmp_path / "a.png"))
    assert output(run) == [oracle[text]]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_all_that_is_wrong_with_a_bundle_is_listed(trained_run, tmp_path, capsys):
    path = Path(shutil.copytree(trained_run.bundle, tmp_path / "damaged"))
    (path / "fp32" / "step.onnx").unlink()
    (path / "tokenizer.json").write_text("{}")
    flags = ["--host", "127.0.0.1", "--port", "0", "--metrics-port", "0", "--log-level", "warning"]
    with pytest.raises(SystemExit, match=r"^1$"):
        server_main([str(path), *flags])
    out, errors = capsys.readouterr()
    assert out == ""
    first, *problems = errors.splitlines()
    assert first == f"error: {path} is not a usable bundle: "
    assert [line.split()[:2] for line in problems] == [["-", "fp32/step.onnx"], ["-", "tokenizer.json"]]
