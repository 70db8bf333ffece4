"""Normalisation of a text before it is cut into tokens, by the `tokenizers` library's own normalisers.

The normaliser is part of a tokenizer's file, so that training and serving read the same text. It has three
steps:

1. Characters that are invisible and do not change a word are dropped (`INVISIBLE`).
2. Equal texts get equal code points: NFC of Unicode Standard Annex 15, or NFKC, which also replaces
   full-width letters, ligatures and the like by ordinary letters.
3. Each run of white space becomes one space, and both ends are stripped.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, normalizers

Normalization = Literal["nfc", "nfkc", "none"]


def _characters(*ranges: tuple[int, int]) -> str:
    return "".join(chr(code) for first, last in ranges for code in range(first, last + 1))


# The characters of `str.isspace`; Unicode's White_Space lacks the separators U+001C to U+001F.
WHITE_SPACE = _characters(
    (0x09, 0x0D),
    (0x1C, 0x20),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
)

# Invisible characters that belong to the spelling of words are not dropped: U+200C and U+200D, which Persian,
# the scripts of India and emoji need; variation selectors; Mongolian's U+180E; the Hangul fillers.
INVISIBLE = _characters(
    (0x00, 0x08),  # control characters other than white space
    (0x0E, 0x1B),
    (0x7F, 0x84),
    (0x86, 0x9F),
    (0xAD, 0xAD),  # soft hyphen: a word may be broken here
    (0x061C, 0x061C),  # marks, embeddings and isolates of a writing direction
    (0x200E, 0x200F),
    (0x202A, 0x202E),
    (0x2066, 0x206F),
    (0x200B, 0x200B),  # zero-width space and word joiner: line breaks
    (0x2060, 0x2060),
    (0xFEFF, 0xFEFF),  # byte order mark
)

_JOINERS = "\u200c\u200d"
_FORMS: dict[Normalization, type[Any]] = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}


def is_blank(text: str) -> bool:
    """Whether a text is empty, or has only white space and invisible characters."""
    return not text.strip(WHITE_SPACE + INVISIBLE + _JOINERS)


def normalizer(form: Normalization) -> Any:
    """The library's normaliser of a form; None for "none"."""
    if form == "none":
        return None
    return normalizers.Sequence(
        [
            normalizers.Replace(Regex(f"[{_escaped(INVISIBLE)}]"), ""),
            _FORMS[form](),
            normalizers.Replace(Regex(f"[{_escaped(WHITE_SPACE)}]+"), " "),
            normalizers.Strip(),
        ]
    )


def normalization_of(inner: Tokenizer) -> Normalization:
    """The form of a tokenizer whose normaliser `normalizer` created; ValueError for any other normaliser."""
    described = json.loads(inner.to_str())["normalizer"]
    if described is None:
        return "none"
    types = _types(described)
    for form, kind in _FORMS.items():
        if kind.__name__ in types:
            return form
    if described == {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}:
        return "none"
    raise ValueError(f"the tokenizer has a normalizer that is none of {', '.join(_FORMS)}")


def _types(described: dict[str, Any]) -> set[str]:
    """The types of a normaliser's steps, also of those inside other sequences."""
    if described["type"] != "Sequence":
        return {described["type"]}
    return set().union(*map(_types, described["normalizers"]))


def _escaped(characters: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in characters)
