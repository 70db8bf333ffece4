"""Which characters are dropped, which become a space, and which stay."""

import unicodedata

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.bundle.characters import INVISIBLE, WHITE_SPACE, is_blank
from seq2seq_serve.bundle.normalization import normalization_of, normalizer

_HARD = st.text(
    alphabet=[*"a b\u0301\u0323\u1100\u1161\u11a8\u2126\ufb01\u00a8\t\n\u3000\u200b\u200d\ufeff\x00\x1f"]
)


def test_white_space_is_what_python_takes_for_it():
    assert sorted(WHITE_SPACE) == [chr(code) for code in range(0x110000) if chr(code).isspace()]


def test_only_control_and_format_characters_are_dropped():
    assert not set(INVISIBLE) & set(WHITE_SPACE)
    assert {unicodedata.category(one) for one in INVISIBLE} <= {"Cc", "Cf", "Cn"}
    controls = {chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cc"}
    assert controls <= set(INVISIBLE + WHITE_SPACE)


@pytest.mark.parametrize("form", ["nfc", "nfkc"])
@given(text=_HARD)
def test_a_text_is_normalised_as_the_steps_say(form, text):
    """Beside Python's own database, where both know all characters."""
    shown = "".join(one for one in text if one not in INVISIBLE)
    expected = " ".join(unicodedata.normalize(form.upper(), shown).split())
    assert normalizer(form).normalize_str(text) == expected


@pytest.mark.parametrize("text", ["", " \t\u3000", "\u200b\ufeff", "\x00\x7f", "\u200d", "\xad \u202e"])
def test_invisible_characters_alone_are_blank(text):
    assert is_blank(text)
    assert not is_blank(text + "a" + text)


def test_a_normaliser_of_another_kind_is_refused():
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    assert normalization_of(inner) == "none"
    inner.normalizer = tokenizers.normalizers.Lowercase()
    with pytest.raises(ValueError, match="none of nfc, nfkc"):
        normalization_of(inner)
