import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.quality import lengths
from benchmarks.quality.corpora import ScoredSet, Task
from benchmarks.quality.lengths import System, bins_of, main, read_system, score_by_length, table, translate
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.evaluation.comparison import MetricSettings

METRIC = MetricSettings(tokenization="none", num_resamples=20)


@pytest.fixture
def test_set() -> ScoredSet:
    """Sources of 8 to 17 words, four of each length."""
    texts = [
        " ".join(f"w{length}{row}{place}" for place in range(length))
        for length in range(8, 18)
        for row in range(4)
    ]
    return ScoredSet("test2016", [SentencePair(text, text.upper()) for text in texts])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """What `benchmarks.quality` wrote of a model, as far as it is read."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmark": "quality", "task": "Multi30k de-en", "search": {"alpha": 2.0}}))
    return path


def test_bins_hold_every_sentence_once() -> None:
    lengths = [17, 9, 1, 10, 40, 11, 12, 13, 14, 16]
    assert [(each.label, each.rows) for each in bins_of(lengths)] == [
        ("1–9", [1, 2]),
        ("10–11", [3, 5]),
        ("12–13", [6, 7]),
        ("14–16", [8, 9]),
        ("17+", [0, 4]),
    ]


def test_a_test_set_without_long_sources_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^no source of the test set has 14–16 or 17\+ tokens$"):
        bins_of([5, 10, 12])


def test_a_model_that_fails_on_long_sources_has_low_bleu_in_those_bins_only(test_set: ScoredSet) -> None:
    systems = [System(name, Path(name), "Multi30k de-en", 1.0) for name in ("perfect", "short")]
    references = [pair.target for pair in test_set.pairs]
    short = [text if len(text.split()) < 14 else "W0" for text in references]

    report = score_by_length(systems, [references, short], test_set, METRIC)

    assert report["bins"] == [
        {"source_tokens": label, "sentences": number}
        for label, number in (("1–9", 8), ("10–11", 8), ("12–13", 8), ("14–16", 12), ("17+", 4))
    ]
    perfect, fails = report["systems"]
    assert [round(bleu["score"]) for bleu in perfect["by_bin"]] == [100] * 5
    assert [round(bleu["score"]) for bleu in fails["by_bin"]] == [100, 100, 100, 0, 0]
    assert fails["all"]["score"] < perfect["all"]["score"]
    report |= {"task": "Multi30k de-en", "test_set": "test2016"}
    assert table(report).splitlines()[2:5:2] == [
        "| | 1–9 (8) | 10–11 (8) | 12–13 (8) | 14–16 (12) | 17+ (4) | all |",
        "| perfect | 100.0 ± 0.0 | 100.0 ± 0.0 | 100.0 ± 0.0 | 100.0 ± 0.0 | 100.0 ± 0.0 | 100.00 |",
    ]


def test_the_command_writes_table_plot_and_results_without_paths(
    tmp_path: Path,
    results: Path,
    test_set: ScoredSet,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directions = []

    def corpus(_data: Path, direction: str) -> Task:
        directions.append(direction)
        return Task(f"Multi30k {direction}", CorpusFiles(), METRIC, [test_set])

    monkeypatch.setattr(lengths, "multi30k", corpus)
    monkeypatch.setattr(lengths, "translate", lambda *_: [pair.target for pair in test_set.pairs])
    plot, out = tmp_path / "lengths.png", tmp_path / "lengths.json"
    flags = ["--data", str(tmp_path), "--plot", str(plot), "--out", str(out)]
    for name in ("dot", "additive"):
        flags += ["--system", name, str(tmp_path / name), str(results)]

    assert main(flags) == 0

    assert directions == ["de-en"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    assert [(system["name"], system["alpha"]) for system in report["systems"]] == [
        ("dot", 2.0),
        ("additive", 2.0),
    ]
    assert str(tmp_path) not in json.dumps({**report, "hardware": None})


def test_results_of_something_else_are_refused(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "quality", "task": "Korean-English"}')
    with pytest.raises(ValueError, match=r"is not a result of `benchmarks\.quality multi30k`"):
        read_system("korean", "bundle", str(other))
    other.write_text(results.read_text(encoding="utf-8").replace("de-en", "en-de"))
    flags = ["--system", "a", "bundle", str(results), "--system", "b", "bundle", str(other)]
    assert main([*flags, "--data", "."]) == 1
    expected = "error: all systems need the same task, but these have Multi30k de-en, Multi30k en-de\n"
    assert capsys.readouterr().err == expected


@pytest.mark.slow  # an export and a server, which have tests of their own
def test_translations_come_from_a_served_bundle_in_order(bundle_path: Path) -> None:
    test = ScoredSet("test", [SentencePair(text, "") for text in ("하나 둘", "다섯", "하나 둘")])
    texts = translate(System("random", bundle_path, "Multi30k de-en", 1.0), test, Console(file=StringIO()))
    assert len(texts) == 3
    assert texts[0] == texts[2]
