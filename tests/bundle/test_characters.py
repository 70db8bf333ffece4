"""The scripts without white space between words, by the names of their letters."""

import re
import sys
import unicodedata

from seq2seq_serve.bundle.characters import HAN, KANA, SOUTH_EAST_ASIAN, TIBETAN

_NAMES = {
    HAN: ("CJK", "IDEOGRAPHIC", "BOPOMOFO"),
    KANA: ("HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "HENTAIGANA"),
    SOUTH_EAST_ASIAN: ("THAI", "LAO", "KHMER", "MYANMAR"),
    TIBETAN: ("TIBETAN",),
}


def test_the_scripts_have_the_letters_that_unicode_names_after_them():
    letters = "".join(
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(character)[0] == "L"
    )
    for script, names in _NAMES.items():
        found = "".join(re.findall(f"[{script}]", letters))
        assert found == "".join(one for one in letters if unicodedata.name(one, "").startswith(names))
