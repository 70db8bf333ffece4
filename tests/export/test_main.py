"""The command `python -m export`."""

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.export import convert, exporter
from seq2seq_serve.export.__main__ import main


@pytest.fixture
def run(trained_run, tmp_path: Path) -> Path:
    """A copy of a finished run, to damage."""
    return Path(shutil.copytree(trained_run.run, tmp_path / "run"))


def refusal(run: Path, capsys, *arguments: str) -> str:
    """The line that a refused export says."""
    bundle = run.parent / "bundle"
    assert main([str(run), str(bundle), *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]
    [line] = captured.err.splitlines()
    assert line.startswith("error: ")
    assert "Errno" not in line or "No space" in line
    return line


def test_stdout_has_the_folder_and_stderr_the_proof(trained_run):
    assert trained_run.stdout == f"{trained_run.bundle}\n"
    told = trained_run.stderr
    assert re.search(r"fp32: worst difference of log-probabilities \S+ \(tolerance 1e-04\)", told)
    assert re.search(
        r"int8: mean difference of log-probabilities \S+ \(tolerance 0.2\), worst for random tokens \S+, "
        r"BLEU \S+ on \d+ dev sources \(trained model \S+\)",
        told,
    )


@pytest.mark.parametrize("name", ["model.pt", "tokenizer.json", "summary.json", "dev.source.txt"])
def test_a_run_that_lacks_a_file_is_refused_by_its_name(name, run, capsys):
    (run / name).unlink()
    line = refusal(run, capsys)
    assert f"lacks {name}: training has not finished" in line
    assert "--resume" in line


def test_the_languages_of_a_run_without_any_are_named_at_its_export(run, capsys):
    """Programs for LibreTranslate could not find a model that was trained without naming them."""
    assert "must be a BCP 47 tag" in refusal(run, capsys, "--source-language", "korean to english")
    bundle, tags = run.parent / "bundle", ["--source-language", "ko", "--target-language", "pt-BR"]
    assert main([str(run), str(bundle), "--precision", "fp32", *tags]) == 0
    manifest = load_bundle(bundle).manifest
    assert (manifest.source_language, manifest.target_language) == ("ko", "pt-BR")


def test_a_full_disk_is_one_line(run, capsys, monkeypatch):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporter, "_export_variant", full)
    assert "No space left on device" in refusal(run, capsys)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(run, capsys, monkeypatch):
    def denied(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", denied)
    assert f"{run / 'summary.json'}: Permission denied" in refusal(run, capsys)


def told_when_interrupted(run: Path, capsys, by: int = signal.SIGINT) -> list[str]:
    """What an interrupted export says; it leaves the folder and Python's handlers as they were."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = *map(signal.getsignal, numbers), sys.unraisablehook
    assert main([str(run), str(run.parent / "bundle"), "--precision", "fp32"]) == 128 + by
    assert (*map(signal.getsignal, numbers), sys.unraisablehook) == before
    assert [path.name for path in run.parent.iterdir()] == ["run"]
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_whatever_becomes_of_the_exception(by, run, capsys, monkeypatch):
    """SIGTERM printed nothing, and left a part of the bundle in a hidden folder."""

    def into_another_error(_) -> None:
        try:
            signal.raise_signal(by)
        except KeyboardInterrupt as error:
            raise RuntimeError("the exporter failed") from error

    monkeypatch.setattr(convert, "convert", into_another_error)
    expected = ["fp32: converting", "error: interrupted; nothing was written"]
    assert told_when_interrupted(run, capsys, by) == expected


def test_ctrl_c_that_is_swallowed_ends_the_export_at_its_next_report(run, capsys, monkeypatch):
    class Interrupting:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    original = convert.convert

    def interrupted_in_a_finalizer(graph):
        Interrupting()
        return original(graph)

    monkeypatch.setattr(convert, "convert", interrupted_in_a_finalizer)
    expected = ["fp32: converting", "error: interrupted; nothing was written"]
    assert told_when_interrupted(run, capsys) == expected


def test_a_folder_that_cannot_be_written_is_refused_before_the_run_is_read(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "no-run"), str(tmp_path / "file" / "out")]) == 1
    assert f"{tmp_path}/file: " in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    assert "config.json" in refusal(tmp_path / "run", capsys)


def test_a_checkpoint_of_hugging_face_is_refused_with_its_command(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model_type": "marian"}')
    line = refusal(tmp_path / "run", capsys)
    assert line.endswith(f"python -m export huggingface {tmp_path}/run {tmp_path}/bundle")


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["run", "bundle", "--precision", "fp64"], ["run", "b", "--x"], ["run", "b", "--over"]],
)
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    assert capsys.readouterr().err.endswith("python -m export --help shows the usage\n")


def test_an_unknown_precision_is_named_with_those_there_are(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["run", "bundle", "--precision", "fp32, fp8"])
    assert "'fp8' is not one of fp32, fp16, bf16, int8" in capsys.readouterr().err
