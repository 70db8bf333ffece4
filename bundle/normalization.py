"""Normalisation of a text before it is cut into tokens, by the `tokenizers` library's own normalisers.

The normaliser is part of a tokenizer's file, so that training and serving read the same text. It has three
steps:

1. Characters that are invisible and do not change a word are dropped (`bundle.characters.INVISIBLE`).
2. Equal texts get equal code points: NFC of Unicode Standard Annex 15, or NFKC, which also replaces
   full-width letters, ligatures and the like by ordinary letters.
3. Each run of white space becomes one space, and both ends are stripped.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, normalizers

from seq2seq_serve.bundle.characters import INVISIBLE, WHITE_SPACE

Normalization = Literal["nfc", "nfkc", "none"]

_FORMS: dict[Normalization, type[Any]] = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}


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
