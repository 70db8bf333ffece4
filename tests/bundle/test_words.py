import unicodedata

import pytest

from seq2seq_serve.bundle.words import (
    admits_placeholder,
    begins_inside,
    ends_with_bracket,
    is_inside,
    needs_space,
    opens,
    placed_words,
    words,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Die Maschinen-Teile, 12.5 %", ["Die", "Maschinen", "-", "Teile", ",", "12", ".", "5", "%"]),
        ("e\u0301te\u0301 a_b {x}", ["\u00e9t\u00e9", "a", "_", "b", "{", "x", "}"]),
        ("कि की", ["कि", "की"]),
        ("GPU模型 모델은 ไทย", ["GPU", "模", "型", "모", "델", "은", "ไ", "ท", "ย"]),
        (unicodedata.normalize("NFD", "사과는 맛, がき"), ["사", "과", "는", "맛", ",", "が", "き"]),
        (" \n", []),
    ],
)
def test_a_text_has_words_and_marks_and_the_characters_of_other_scripts(text, expected):
    assert words(text) == expected
    found, places = placed_words(f"\u200b {text}\u00ad")
    assert found == expected
    shown = [f"\u200b {text}"[begin:end] for begin, end in places]
    assert [unicodedata.normalize("NFC", word) for word in shown] == expected


def test_a_token_continues_a_word_if_it_begins_with_a_letter_of_a_script_with_spaces():
    assert begins_inside(b"en")
    assert begins_inside("é".encode())
    for token in (b" en", b"-", b"", "은".encode(), "模".encode(), "é".encode()[1:]):
        assert not begins_inside(token)
    assert is_inside("a")
    assert not is_inside("")


def test_the_first_byte_of_a_letter_continues_a_word():
    """A term before it counted as a whole word: Saturday in Saturdayé, where é is two tokens."""
    for letter in ("é", "ß", "я", "ע", "ي", "ж", "\u0301", "ế"):
        assert begins_inside(letter.encode()[:1])
    for part in ("ế".encode()[:2], "कि".encode()[:2], "𐐀".encode()[:3]):
        assert begins_inside(part)
    for part in ("“".encode()[:1], "¿".encode()[:1], "은".encode()[:2], "模".encode()[:1], "ไ".encode()[:2]):
        assert not begins_inside(part)


def test_a_word_stands_directly_after_all_but_letters_digits_and_ends_of_clauses():
    for token in ("en ", "(", "", '"', "a-", "„", "模", "<b>", "。", ":", "l’", "¿", "$", "}", "_", "**"):
        assert opens(token.encode())
    assert opens("“".encode()[2:])  # a part of a character
    for token in (" Maschine", "é", "e\u0301", "7", "a.", ",", ";", "!", "?"):
        assert not opens(token.encode())
        assert not admits_placeholder(token.encode())


def test_a_placeholder_does_not_stand_directly_after_what_closes_something():
    assert all(map(admits_placeholder, [b"", b"a ", b"(", b'"', "은".encode()]))
    assert not any(map(admits_placeholder, [b"a.", b"{a}", b"</b>", b")", b",", b"_"]))


def test_a_token_ends_with_an_opening_bracket():
    assert all(map(ends_with_bracket, [b"(", b" a[", b"{a}("]))
    assert not any(map(ends_with_bracket, [b"", b"( ", b")", b"{", b"(a"]))


def test_a_word_and_a_variable_need_a_space_before_them_and_a_tag_does_not():
    assert all(map(needs_space, ["Auto", "{name}", "%s", " a"]))
    assert not any(map(needs_space, ["<b>", "模型", "은", ""]))
