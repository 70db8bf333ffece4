"""SentencePiece's normalisation against sentencepiece itself."""

import re
import unicodedata

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from seq2seq_serve.bundle.charsmap import GUARD, HIDDEN, Charsmap, spm_normalizer, take_charsmap
from tests.export.huggingface.tokenizer_files import HARD_TEXTS, parsed, spm

MODEL = spm("unigram")
BLOB = parsed(MODEL).normalizer_spec.precompiled_charsmap
CHARSMAP = Charsmap(BLOB)
ORACLE = sentencepiece.SentencePieceProcessor(model_proto=MODEL)
BLOCKS = (
    "Aａé\u0301\u0323\u0308 ",
    "각힣한글\u1100\u1161\u11a8",
    "かｶ\u3099ﾞ\u309a",
    "क\u093cषि",
    "شَّأ\u0654",
    "½㎏Ⅷ™ﬁ",
)
blocks = st.sampled_from(BLOCKS).flatmap(lambda characters: st.text(characters, max_size=12))


def with_spaces(text: str) -> str:
    """The rest of SentencePiece's normalisation."""
    text = re.sub(" {2,}", " ", re.sub(r"\A +|[ \u2581]+\Z", "", text))
    return f"\u2581{text}".replace(" ", "\u2581") if text else ""


@given(st.one_of(st.text(max_size=20), blocks, blocks.map(lambda text: unicodedata.normalize("NFD", text))))
@example("a\u0323\u0301")  # the tokenizers library drops the second accent
@example("각힣")
def test_it_is_that_of_sentencepiece(text):
    text = text.replace("\0", "")
    assert with_spaces(CHARSMAP.normalize(text)) == ORACLE.normalize(text)


@pytest.mark.parametrize("text", [text for text in HARD_TEXTS if "\0" not in text])
def test_hard_texts_are_normalised_as_sentencepiece_does(text):
    assert with_spaces(CHARSMAP.normalize(text)) == ORACLE.normalize(text)


def test_a_table_is_taken_only_where_it_is_marked():
    inner = Tokenizer(models.BPE())
    for normalizer in (None, normalizers.NFC(), normalizers.Precompiled(BLOB), normalizers.Sequence([GUARD])):
        inner.normalizer = normalizer
        assert take_charsmap(inner) is None
    inner.normalizer = spm_normalizer(BLOB, [normalizers.Lowercase()])
    assert take_charsmap(inner).normalize("ﬁ") == "fi"
    assert inner.normalizer.normalize_str(f"ﬁ{HIDDEN}A") == "ﬁ\ufdd1a"  # the other steps stay


@pytest.mark.parametrize("blob", [b"\x08\x00\x00\x00abc", b"\x03\x00\x00\x00abcd", b"\x00\x00\x00\x00"])
def test_a_damaged_table_is_refused(blob):
    with pytest.raises(ValueError, match="charsmap"):
        Charsmap(blob)


def test_the_longest_sequences_of_callers_are_not_kept():
    """The cache counts sequences: 65,536 texts of nothing but accents took gigabytes."""
    charsmap = Charsmap(BLOB)
    for length in (1, 15, 16, 17, 10_000):
        charsmap.normalize("a" + "\u0323\u0301" * length)
    assert charsmap._replaced.cache_info().currsize == 1
