"""The command `python -m export huggingface`."""

import re
import sys

import pytest

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.__main__ import main
from seq2seq_serve.export.huggingface import exporter
from tests.export.huggingface.checkpoints import SHALLOW, edit


def test_one_command_makes_a_bundle(quick_checkpoint, tmp_path, capsys):
    folder, bundle = quick_checkpoint("marian-separate"), tmp_path / "bundle"
    capsys.readouterr()
    command = ["huggingface", str(folder), str(bundle), "--precision", "fp32"]
    flags = ["--max-target-length", "40", "--source-language", "ko", "--target-language", "en"]
    assert main([*command, *flags]) == 0
    told = capsys.readouterr()
    assert told.out == f"{bundle}\n"
    lines = [line for line in told.err.splitlines() if line]
    assert "MarianTokenizer" in lines[0]
    assert "(marian)" in lines[1]
    assert lines[-1].startswith("fp32: ")
    manifest = load_bundle(bundle).manifest
    assert manifest.max_target_length == 40
    assert (manifest.source_language, manifest.target_language) == ("ko", "en")
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(bundle) in line
    assert "--overwrite" in line


def test_a_refusal_is_one_line(copied, tmp_path, capsys):
    folder = copied("nllb", SHALLOW)
    command = ["huggingface", str(folder), str(tmp_path / "bundle")]
    assert main([*command, "--source-language", "ko"]) == 1
    assert capsys.readouterr().err.startswith("error: every request chooses the source_language")
    edit(folder / "config.json", model_type="gpt2", architectures=["GPT2LMHeadModel"])
    assert main(command) == 1
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert str(folder) in line
    assert "GPT2LMHeadModel" in line


def test_a_precision_whose_proof_fails_is_left_out(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(exporter.MAX_MEAN_DIFFERENCE, Precision.INT8, 1e-9)
    folder, bundle = checkpoint("bart", SHALLOW)[0], tmp_path / "bundle"
    assert main(["huggingface", str(folder), str(bundle), "--strict"]) == 1
    assert not bundle.exists()
    *_, line = capsys.readouterr().err.splitlines()
    assert re.match(r"error: int8 .*mean difference.*\(tolerance 1e-09\), \d+\.\d% equal tokens", line)
    assert main(["huggingface", str(folder), str(bundle)]) == 3
    told = capsys.readouterr()
    assert told.out == f"{bundle}\n"
    assert line.removeprefix("error: ") in told.err
    assert list(load_bundle(bundle).manifest.variants) == [Precision.FP32]
    assert not (bundle / "int8").exists()


@pytest.mark.parametrize("given", ["1", "many", "-5"])
def test_a_length_is_a_number_of_tokens(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["huggingface", "a", "b", f"--max-source-length={given}"])
    assert f"'{given}'" in capsys.readouterr().err


def test_help_does_not_import_torch(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for arguments in (["--help"], ["huggingface", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert "python -m export huggingface" in capsys.readouterr().out
