import json
from pathlib import Path

import pytest

from benchmarks.quality.lengths import main
from seq2seq_serve.training.data.text_files import write_lines


def test_a_model_that_fails_on_long_sources_has_low_bleu_in_those_bins_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [
        " ".join(f"w{length}{row}{place}" for place in range(length))
        for length in range(8, 18)
        for row in range(4)
    ]
    references = [source.upper() for source in sources]
    short = [text if len(text.split()) < 14 else "W0" for text in references]
    for name, texts in (("source", sources), ("reference", references), ("short", short)):
        write_lines(tmp_path / name, texts)
    plot, out = tmp_path / "lengths.png", tmp_path / "lengths.json"
    flags = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]
    flags += [
        "--system",
        "perfect",
        str(tmp_path / "reference"),
        "--system",
        "short",
        str(tmp_path / "short"),
    ]
    assert main([*flags, "--plot", str(plot), "--out", str(out)]) == 0

    report = json.loads(out.read_text(encoding="utf-8"))
    assert [each["sentences"] for each in report["bins"]] == [8, 8, 8, 12, 4]
    perfect, fails = report["systems"]
    assert [round(bleu["score"]) for bleu in perfect["by_bin"]] == [100] * 5
    assert [round(bleu["score"]) for bleu in fails["by_bin"]] == [100, 100, 100, 0, 0]
    assert fails["all"]["score"] < perfect["all"]["score"]
    *_, first, _, line = capsys.readouterr().out.splitlines()
    assert first.startswith("| perfect | 100.0 ± 0.0 |")
    assert json.loads(line) == report
    assert plot.read_bytes().startswith(b"\x89PNG")
