import unicodedata
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.bundle.characters import is_blank
from seq2seq_serve.bundle.normalization import Normalization
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import check_special_ids
from seq2seq_serve.training.data.tokenizer import train_tokenizer

TEXTS = ["나는 학생이다", "I am a student.", "오늘은 금요일입니다", "Today is Friday."] * 3
TOKENIZER = train_tokenizer(TEXTS, 320)


FORMS = {form: train_tokenizer(TEXTS, 320, form) for form in get_args(Normalization)}


@pytest.mark.parametrize("form", FORMS)
@given(text=st.text())
def test_any_text_comes_back_as_it_is_normalised(form: Normalization, text: str) -> None:
    tokenizer = FORMS[form]
    normalised = tokenizer.normalize(text)
    assert tokenizer.normalize(normalised) == normalised
    assert tokenizer.decode(tokenizer.encode(text)) == normalised
    assert tokenizer.decode(tokenizer.encode_source(text)) == normalised
    assert (not normalised) <= is_blank(text)


@pytest.mark.parametrize("form", FORMS)
def test_the_normaliser_is_in_the_file(form: Normalization, tmp_path: Path) -> None:
    FORMS[form].save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path / "tokenizer.json")
    assert loaded.normalization == form
    text = " e\u0301\u200b\t\uff21 "
    assert loaded.encode(text) == FORMS[form].encode(text)
    assert loaded.normalize(text) == {"nfc": "é \uff21", "nfkc": "é A", "none": text}[form]


@pytest.mark.parametrize(
    "change",
    [
        partial(unicodedata.normalize, "NFD"),
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: text.replace(" ", "\u3000"),
        lambda text: text.replace(" ", "\t"),
        lambda text: text.replace(" ", " \n "),
        lambda text: " " + text + "  ",
        lambda text: "\ufeff" + text.replace(" ", "\ufeff "),
        lambda text: text + "\u200f",
        lambda text: "\u200b".join(text),
    ],
)
def test_a_text_has_the_same_tokens_however_it_is_written(change: Callable[[str], str]) -> None:
    for text in ("오늘은 금요일 입니다", "Ça va déjà, Ångström?"):
        assert change(text) != text
        assert TOKENIZER.encode_source(change(text)) == TOKENIZER.encode_source(text)


@pytest.mark.parametrize("text", ["👨\u200d👩\u200d👧", "می\u200cخواهم", "क्\u200dष", "❤\ufe0f", "ᠠ\u180eᠠ"])
def test_characters_that_words_are_spelled_with_stay(text: str) -> None:
    assert TOKENIZER.normalize(text) == text


def test_the_same_texts_give_the_same_file(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        train_tokenizer(TEXTS, 320).save(file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_vocabulary_holds_what_was_asked_and_frequent_words_are_one_token() -> None:
    assert TOKENIZER.vocab_size <= 320
    assert len(TOKENIZER.encode("나는")) == 1


def test_a_tokenizer_with_other_special_ids_is_refused() -> None:
    import tokenizers

    other = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"<bos>": 0, "<pad>": 1})))
    with pytest.raises(ValueError, match="gives <pad> the id 1, not 0"):
        check_special_ids(other)
