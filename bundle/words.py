"""Tells where words begin and end in texts and in tokens, in scripts that have white space between words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from seq2seq_serve.bundle.characters import HAN, INVISIBLE, KANA, SOUTH_EAST_ASIAN

# Beside these, a word begins or ends without white space or a mark. Korean is among them, whose particles
# follow nouns directly; Tibetan, which is in `characters.UNSPACED`, is not: it has marks between words.
BREAKLESS = f"{HAN}{KANA}\u3008-\u303f{SOUTH_EAST_ASIAN}\u1100-\u11ff\u3130-\u318f\uac00-\ud7af"
MAX_TERM_LENGTH = 256  # characters of a term, and of its translation
CLOSING, OPENING = tuple(".,;:!?)]}>"), tuple("([")
_WITHOUT_INVISIBLE = dict.fromkeys(map(ord, INVISIBLE))
_IS_BREAKLESS = re.compile(f"[{BREAKLESS}]")


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


_MARKS = "".join(
    filter(_is_mark, map(chr, range(0x300, 0x10000)))
)  # accents, and vowel signs of Indic scripts
# Letters of scripts without white space, also decomposed: syllables of Korean, and kana with their marks
_LETTER = rf"[\u1100-\u1112][\u1161-\u1175][\u11a8-\u11c2]?|[{KANA}][\u3099\u309a]"
_WORD = re.compile(rf"{_LETTER}|(?:(?![{BREAKLESS}])[^\W_]|[{_MARKS}])+|\S")


def words(text: str) -> list[str]:
    """Returns the words and the other visible characters of a text, in their order.

    In scripts without white space between words, each character is one.
    """
    return _WORD.findall(unicodedata.normalize("NFC", text.translate(_WITHOUT_INVISIBLE)))


def placed_words(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns what `words` does, and where each word begins and ends in the text."""
    shown = [place for place, character in enumerate(text) if ord(character) not in _WITHOUT_INVISIBLE]
    found = list(_WORD.finditer(text.translate(_WITHOUT_INVISIBLE)))
    places = [(shown[word.start()], shown[word.end() - 1] + 1) for word in found]
    return [unicodedata.normalize("NFC", word[0]) for word in found], places


def phrase(its_words: Iterable[str]) -> str:
    """Returns some words with a line break behind each: equal for two terms that are one in the same case."""
    return "".join(f"{word}\n" for word in its_words)


def is_inside(character: str) -> bool:
    """Returns whether a character is one of a word, so that the word goes on beside it; "" is not."""
    if not character or _IS_BREAKLESS.match(character):
        return False
    return character.isalnum() or _is_mark(character)


def needs_space(text: str) -> bool:
    """Returns whether white space stands before a text inside a sentence: not before a tag, for example."""
    first = text.lstrip()[:1]
    return bool(first) and first != "<" and not _IS_BREAKLESS.match(first)


@lru_cache(maxsize=2**16)
def begins_inside(token: bytes) -> bool:
    """Returns whether a token continues a word that ends directly before it.

    Args:
        token: Its bytes. The first part of a character continues a word if a letter probably begins so; a
            later part belongs to no word.
    """
    first = token[:1]
    if len(token) == 1 and first >= b"\x80":
        return b"\xc3" <= first <= b"\xe1"  # up to U+1FFF, but not the marks of Latin-1
    if first >= b"\xe0" and len(token) < (3 if first < b"\xf0" else 4):
        token += b"\xa9\xa9"  # a letter in all blocks of letters
    return is_inside(token.decode(errors="replace")[:1])


@lru_cache(maxsize=2**16)
def begins_with_mark(token: bytes) -> bool:
    """Returns whether a token begins neither with white space nor with a character of a word."""
    first = token.decode(errors="replace")[:1]
    return bool(first) and not first.isspace() and first != "_" and not first.isalnum()


@lru_cache(maxsize=2**16)
def marked_beginning(token: bytes) -> str:
    """Returns what a token has before its first white space, if it begins with a whole mark; otherwise ""."""
    text = token.decode(errors="replace")
    return text.split()[0] if begins_with_mark(token) and text[0] != "\ufffd" else ""


@lru_cache(maxsize=2**16)
def opens(token: bytes) -> bool:
    """Returns whether a word may stand directly after a token: not after a letter, a digit or `.,;!?`.

    It may stand after a script without white space between words, after a token without bytes, and after a
    part of a character, because most of these are marks.
    """
    last = token.decode(errors="replace")[-1:]
    return not is_inside(last) and last not in tuple(".,;!?")


@lru_cache(maxsize=2**16)
def admits_placeholder(token: bytes) -> bool:
    """Returns whether a placeholder may stand directly after a token if it needs a break before it.

    It may where a word may, but not after `_`, the end of a clause, a bracket or another placeholder.
    """
    return opens(token) and token.decode(errors="replace")[-1:] not in (*CLOSING, "_")


@lru_cache(maxsize=2**16)
def ends_with_bracket(token: bytes) -> bool:
    """Returns whether a token ends with an opening bracket, after which no space is written."""
    return token.decode(errors="replace")[-1:] in OPENING
