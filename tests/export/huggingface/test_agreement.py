"""An export proves its tokenizer against the checkpoint's own one."""

import json
from dataclasses import replace
from functools import partial

import pytest

from seq2seq_serve.export.exporter import ExportError
from seq2seq_serve.export.huggingface.agreement import compare_tokenizers
from seq2seq_serve.export.huggingface.samples import SENTENCES, sample_texts
from tests.export.huggingface.checkpoints import edit
from tests.export.huggingface.tokenizer_files import (
    FAMILIES,
    imported,
    marian,
    mbart,
    nllb,
    only_pieces,
    t5,
    whisper,
)

MODEL_TYPES = {"mbart50": "mbart", "m2m100": "m2m_100", "nllb": "m2m_100", "byt5": "t5"}
MODEL_TYPES |= {"trocr": "vision-encoder-decoder"}


def compared(files, ours):
    """The line of the report."""
    model_type = MODEL_TYPES.get(files.family, files.family)
    (files.folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    lines, reads_texts = [], files.family not in ("whisper", "trocr")
    compare_tokenizers(files.folder, files.family, ours, lines.append, reads_texts=reads_texts)
    (line,) = lines
    return line


MAKERS = {
    **FAMILIES,
    "whisper": whisper,
    "marian with languages": partial(marian, languages=("fra", "ron")),
    "marian with two vocabularies": partial(marian, separate=True, languages=("fra", "ron")),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_tokenizer_of_every_family_agrees(make, tmp_path):
    files = make(tmp_path)
    assert f": ids, texts and frames of {len(SENTENCES)} sentences; " in compared(files, imported(files))


def test_a_word_that_would_be_a_time_is_refused(tmp_path):
    files = whisper(tmp_path)
    ours = imported(files)
    assert ours.timestamps is not None
    longer = replace(ours.timestamps, last_id=ours.timestamps.last_id + 2)
    shorter = replace(ours.timestamps, last_id=ours.timestamps.last_id - 2)  # of a shorter encoder
    assert "equals transformers' WhisperTokenizer" in compared(files, replace(ours, timestamps=shorter))
    with pytest.raises(ExportError, match="would be times"):
        compared(files, replace(ours, timestamps=longer))


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "TokenizersBackend", None])
@pytest.mark.parametrize("family", ["mbart", "mbart50", "nllb"])
def test_a_general_class_has_no_frame_to_compare(family, tokenizer_class, tmp_path):
    files = FAMILIES[family](tmp_path)
    edit(tmp_path / "tokenizer_config.json", tokenizer_class=tokenizer_class)
    line = compared(files, imported(files))
    if tokenizer_class is None:  # transformers then takes a class by the type of the model, or reads nothing
        assert line.startswith("the tokenizer ")
    else:
        assert f": ids, texts of {len(SENTENCES)} sentences; " in line


def test_another_tokenizer_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    files, other = t5(tmp_path), imported(nllb(tmp_path / "other"))
    ours = imported(files)
    for wrong in ({"source": other.source, "target": other.target}, {"target": other.target}):
        with pytest.raises(ExportError, match="T5Tokenizer"):
            compared(files, replace(ours, **wrong))


@pytest.mark.parametrize("family", ["t5", "nllb", "marian", "bart", "t5gemma", "byt5", "whisper"])
def test_another_frame_is_refused(family, tmp_path):
    files = MAKERS[family](tmp_path)
    ours = imported(files)
    other = replace(ours.template, source_suffix=(), start=ours.template.start[:-1])
    with pytest.raises(ExportError, match="frame of"):
        compared(files, replace(ours, template=other))


def test_a_file_that_transformers_rebuilds_is_followed_and_named(tmp_path):
    files = mbart(tmp_path)
    edit(tmp_path / "tokenizer.json", normalizer={"type": "Lowercase"})
    line = compared(files, imported(files))
    assert line.endswith("sentences follow the file, which MBartTokenizer rebuilds")


def test_a_tokenizer_that_transformers_cannot_read_is_named(tmp_path):
    files = only_pieces(tmp_path, "t5")
    ours = imported(files)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert "compared with nothing" in compared(files, ours)


def test_samples_are_in_the_languages_of_the_model(tmp_path):
    ours = imported(nllb(tmp_path))
    languages = {token_id: name for name, token_id in ours.choices["source_language"].ids.items()}
    rows = sample_texts(ours, 1000)
    assert len(rows) == 12
    codes = {"In": "eng", "Können": "deu", "Le": "fra", "La": "spa", "Il": "ita", "O": "por", "De": "nld"}
    codes |= {"Новая": "rus", "할머니는": "kor", "A": "hun", "Kissa": "fin", "Hujan": "ind", "Stary": "pol"}
    texts = {tuple(ours.source.encode(text)): text for text in SENTENCES}
    words = [(texts[tuple(row[1:-1])].split()[0], languages[row[0]].split("_")[0]) for row in rows]
    assert sum(word in codes for word, _ in words) > 3
    assert [codes.get(word, code) for word, code in words] == [code for _, code in words]
    assert len({row[0] for row in rows}) >= 10
    korean = replace(imported(marian(tmp_path)), source_language="ko")
    first = sample_texts(korean, 1000)[0]
    assert first[:-1] == korean.source.encode(next(text for text in SENTENCES if text.startswith("할머니")))
