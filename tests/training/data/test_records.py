"""Records train as lines of text do: the same corpus in each format, through the command.

`saved/` is what `save_to_disk` of datasets 5.2 wrote: `texts` a `DatasetDict`, `pictures` a `Dataset`.
"""

import gzip
import io
import json
import shutil
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.data.corpus import Corpus
from seq2seq_serve.training.data.records import Records
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.models.captioner import CaptionerConfig
from seq2seq_serve.training.presets import PRESETS, Preset
from seq2seq_serve.training.run import RunFolder, load_run

SAVED = Path(__file__).parent / "saved"
OF_TRANSLATION = ["--source-field", "translation.ko", "--target-field", "translation.en"]


@pytest.fixture(autouse=True)
def _toy_presets(monkeypatch: pytest.MonkeyPatch, preset: Preset) -> None:
    sizes = {"vocab_size": 300, "d_model": 16, "d_hidden": 16, "d_annotation": 16, "max_target_length": 16}
    captioner = CaptionerConfig(**sizes, size=16, max_source_length=16)
    features = CaptionerConfig(**sizes, source="features", feature_width=3, max_source_length=16)
    monkeypatch.setitem(PRESETS, "toy", lambda: preset)
    for name, model in (("toy-captioner", captioner), ("toy-features", features)):
        monkeypatch.setitem(
            PRESETS, name, lambda name=name, model=model: Preset(name, model, preset.training)
        )


Train = Callable[..., RunFolder]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Trains two steps, and returns the run's folder."""

    def train(*flags: str, preset: str = "toy", name: str = "run") -> RunFolder:
        out = tmp_path / name
        recipe = ["--threads", "1", "--device", "cpu", "--max-steps", "2"]
        assert main(["train", preset, "--out", str(out), *recipe, *flags]) == 0
        return RunFolder(out)

    return train


def write_json_lines(path: Path, pairs: tuple[SentencePair, ...]) -> list[str]:
    lines = [json.dumps({"n": n, "source": a, "target": b}) for n, (a, b) in enumerate(pairs)]
    content = ("\n".join(lines) + "\n\n").encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return []


def write_translations(path: Path, pairs: tuple[SentencePair, ...]) -> list[str]:
    lines = [json.dumps({"translation": {"en": b, "ko": a}}, ensure_ascii=False) for a, b in pairs]
    path.write_text("\n".join(lines), encoding="utf-8")
    return OF_TRANSLATION


def write_parquet(path: Path, pairs: tuple[SentencePair, ...]) -> list[str]:
    columns = {"target": [b for _, b in pairs], "n": range(len(pairs)), "source": [a for a, _ in pairs]}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return []


def write_shards(path: Path, pairs: tuple[SentencePair, ...]) -> list[str]:
    path.mkdir()
    for number in range(2):
        half = pairs[number * len(pairs) // 2 : (number + 1) * len(pairs) // 2]
        table = pyarrow.table({"translation": [{"ko": a, "en": b} for a, b in half]})
        parquet.write_table(table, path / f"train-{number:05}-of-00002.parquet")
    return OF_TRANSLATION


@pytest.mark.parametrize(
    ("write", "ending"),
    [
        (write_json_lines, ".jsonl"),
        (write_json_lines, ".jsonl.gz"),
        (write_translations, ".json"),
        (write_parquet, ".parquet"),
        (write_shards, ""),
    ],
)
def test_records_are_the_same_corpus_as_lines(
    train: Train, tmp_path: Path, corpus: Corpus, corpus_files: list[str], write: Callable, ending: str
) -> None:
    of_lines = train(*corpus_files, name="lines")
    files = tmp_path / f"given{ending}", tmp_path / f"dev{ending}"
    fields = write(files[0], corpus.train)
    write(files[1], corpus.dev)
    flags = ["--data", str(files[0]), "--dev-data", str(files[1]), *fields]
    run = train(*flags)
    assert run.read_config().corpus_sha256 == of_lines.read_config().corpus_sha256
    assert run.read_pairs("dev") == of_lines.read_pairs("dev")
    assert load_run(run.path).dev_score == load_run(of_lines.path).dev_score
    # With the same flags and with none, it goes on; with a changed corpus it does not.
    resume = ["train", "toy", "--out", str(run.path), "--resume", "--max-steps"]
    assert main([*resume, "3", *flags]) == 0
    assert main([*resume, "4"]) == 0
    shutil.rmtree(files[0]) if files[0].is_dir() else files[0].unlink()
    write(files[0], corpus.train[1:])
    assert main([*resume, "5", *flags]) == 1


def test_a_data_set_that_was_saved_to_disk(train: Train) -> None:
    run = train("--data", f"{SAVED}/texts/train", "--dev-data", f"{SAVED}/texts/validation", *OF_TRANSLATION)
    assert run.read_pairs("dev")[0] == ("하나 하나 하나 둘", "one one one two")
    assert len(list(Records(f"{SAVED}/texts/train", *OF_TRANSLATION[1::2]).pairs())) == 32
    held_out = train("--data", f"{SAVED}/texts/train", *OF_TRANSLATION, name="held-out")
    assert held_out.read_config().corpus.startswith("train, 1 pairs held out")


def test_pictures_in_a_saved_data_set_move_with_the_run(train: Train, tmp_path: Path) -> None:
    fields = ["--source-field", "image", "--target-field", "captions"]
    run = train("--data", f"{SAVED}/pictures", *fields, preset="toy-captioner")
    assert len(list((run.pictures / "train").iterdir())) == 24
    # A picture is held out with both of its captions.
    dev = run.read_pairs("dev")
    assert len(dev) == 2
    assert dev[0].source == dev[1].source
    assert Path(dev[0].source).is_relative_to(run.path)
    moved = run.path.rename(tmp_path / "moved")
    assert main(["train", "toy-captioner", "--out", str(moved), "--resume", "--max-steps", "3"]) == 0
    assert Path(RunFolder(moved).read_pairs("dev")[0].source).read_bytes().startswith(b"\x89PNG")


def test_features_in_a_table_train_a_captioner(train: Train, tmp_path: Path) -> None:
    matrices = [np.full((2 + row % 3, 3), row, np.float32).tolist() for row in range(40)]
    table = pyarrow.table({"features": matrices, "caption": [f"row {row % 3}" for row in range(40)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    flags = ["--data", f"{tmp_path}/a.parquet", "--source-field", "features", "--target-field", "caption"]
    run = train(*flags, preset="toy-features")
    (source, target), *_ = run.read_pairs("dev")
    assert target == f"row {int(np.load(source)[0, 0]) % 3}"


def test_sounds_as_data_sets_have_them(tmp_path: Path) -> None:
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(320))
    values = [
        {"bytes": content.getvalue(), "path": "a/one.wav"},
        {"bytes": None, "path": "two.wav"},
        {"bytes": content.getvalue(), "path": None},
    ]
    parquet.write_table(pyarrow.table({"audio": values, "text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    records = Records(f"{tmp_path}/a.parquet", "audio", "text", tmp_path / "media" / "train")
    assert records.has_media
    (one, _), (two, _), (three, _) = records.pairs()
    assert (tmp_path / "media" / one).read_bytes() == content.getvalue()
    assert one.endswith(".wav")
    assert two == str(tmp_path / "two.wav")
    assert (tmp_path / "media" / three).read_bytes() == content.getvalue()


def test_texts_lists_and_null_become_pairs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"a.b": "x\\r\\ny", "t": ["1", "2\\n"]}\n{"a.b": null, "t": "3"}\n{"a.b": "z", "t": []}\n'
    )
    assert list(Records(str(path), "a.b", "t").pairs()) == [("x y", "1"), ("x y", "2 "), ("", "3")]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('{"source": "a", "target": "b"', r"not JSON \(Expecting ',' delimiter"),
        ("[" * 100_000, "not JSON"),
        ('["a", "b"]', r'a list, and must be an object \(`jq -c "\.\[\]"` writes a list as lines\)'),
        ('"a"', "a text, and must be an object"),
        (
            '{"translation": {"de": "a", "en": "b"}, "id": 1}',
            r"no field source; there are translation\.de, translation\.en, id "
            r"\(--source-field and --target-field name the fields\)",
        ),
        ('{"source": 1, "target": "b"}', "source is a number, and must be a text"),
        (
            '{"source": "a", "target": {"en": "b"}}',
            r"target is an object, and must be a text: name one of its fields, such as target\.en",
        ),
        ('{"source": ["a"], "target": "b"}', "source is a list, and must be a text"),
        ('{"source": "\\ud800", "target": "b"}', r"source has half a character of UTF-16 \(\\ud800\)"),
    ],
)
def test_a_wrong_line_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str, error: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"^{path}, line 2: {error}"):
        list(Records(str(path), "source", "target").pairs())
    assert main(["train", "toy", "--out", str(tmp_path / "run"), "--data", str(path)]) == 1
    assert f"{path}, line 2: " in caplog.text


def test_a_wrong_row_and_a_wrong_file_are_named(tmp_path: Path) -> None:
    path, columns = tmp_path / "a.parquet", ("source", "target")

    def fails(name: Path, error: str, fields: tuple[str, str] = columns, media: Path | None = None) -> None:
        with pytest.raises(ValueError, match=error):
            list(Records(str(name), *fields, media).pairs())

    parquet.write_table(pyarrow.table({"source": ["a"] * 99, "target": [["b"]] * 98 + [[None, 3][:1]]}), path)
    assert list(Records(str(path), *columns).pairs())[-1] == ("a", "")
    parquet.write_table(pyarrow.table({"source": ["a"] * 99, "target": list(range(99))}), path)
    fails(path, rf"^{path}, row 1: target is a number")
    fails(path, rf"^{path}: no field text; there are source, target \(", ("text", "target"))
    fails(
        path, rf"^{path}, row 1: target is a number, and must be a text, bytes", columns[::-1], tmp_path / "m"
    )
    parquet.write_table(pyarrow.table({"source": ["a"], "target": ["b"]}), path)
    path.write_bytes(path.read_bytes()[:-9])
    fails(path, rf"^{path}: not a whole file of Parquet \(")
    arrow = tmp_path / "a.arrow"
    whole = (SAVED / "texts/train/data-00000-of-00002.arrow").read_bytes()
    arrow.write_bytes(whole[: len(whole) // 2])
    fails(arrow, rf"^{arrow}(, after row \d+)?: not a whole file of Arrow stream", ("translation.ko",) * 2)
    parquet.write_table(pyarrow.table({"source": [], "target": []}), path)
    fails(path, rf"^{path} has 0 records")
    fails(SAVED / "texts", r"has the parts train, validation: give the folder of one, .*/texts/train$")
    fails(tmp_path / "..", "is a folder without Parquet files")
    for part in ("train", "test"):
        shutil.copy(path, tmp_path / f"{part}-00000-of-00001.parquet")
    path.unlink()
    fails(tmp_path, "has the parts test, train: give the files of one, '.*/test-\\*.parquet'")
    fails(tmp_path / "test-*.parquet", "has 0 records")
    with pytest.raises(FileNotFoundError):
        list(Records(str(tmp_path / "dev-*.parquet"), *columns).pairs())
