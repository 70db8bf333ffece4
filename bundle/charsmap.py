"""Normalisation of texts as SentencePiece does it, and the names of pieces that no text is cut into.

A SentencePiece model has a table of character sequences and their replacements, its "precompiled charsmap"
(Kudo and Richardson 2018, arXiv:1808.06226, section 3.2). The `tokenizers` library reads the same table by
grapheme clusters: it leaves decomposed Hangul as it is and drops accents behind others. `Charsmap` replaces
the longest sequence at each place, as SentencePiece does.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer, normalizers

# A noncharacter: a piece that begins with it never matches, because `GUARD` takes it out of all texts.
HIDDEN = "\ufdd0"
GUARD = normalizers.Replace(HIDDEN, "\ufdd1")

_CACHED_SEQUENCES, _CACHED_LENGTH = 1 << 16, 16  # a caller chooses how long a sequence is


class Charsmap:
    """The table of a SentencePiece model.

    The table is a trie over UTF-8 bytes as a double array (Darts-clone). The replacements follow it, each
    ended by a zero byte.

    Args:
        blob: The content of the model's field `precompiled_charsmap`.

    Attributes:
        described: The library's description of a normaliser with this table.
    """

    def __init__(self, blob: bytes) -> None:
        (size,) = struct.unpack_from("<I", blob)
        if len(blob) < 4 + size or size % 4 or not size:
            raise ValueError("the charsmap of the tokenizer is damaged")
        self.described = json.loads(normalizers.Precompiled(blob).__getstate__())
        units = np.frombuffer(blob, dtype="<u4", count=size // 4, offset=4)
        self._units = units.tolist()
        self._replacements = blob[4 + size :]
        self._affected = re.compile(_affected(units), re.DOTALL)
        self._replaced = lru_cache(_CACHED_SEQUENCES)(self._replace)

    def normalize(self, text: str) -> str:
        """Replace the longest sequence of the table at each place of the text, from left to right."""

        def replace(match: re.Match[str]) -> str:
            sequence = match[0]
            return (self._replaced if len(sequence) <= _CACHED_LENGTH else self._replace)(sequence)

        return self._affected.sub(replace, text)

    def _replace(self, text: str) -> str:
        data, place, parts = text.encode(), 0, []
        while place < len(data):
            length, replacement = self._longest(data, place)
            if not length:
                length = _num_bytes(data[place])
                replacement = data[place : place + length]
            parts.append(replacement)
            place += length
        return b"".join(parts).decode()

    def _longest(self, data: bytes, place: int) -> tuple[int, bytes]:
        """The length of the longest sequence at a place, and its replacement; 0 if there is none."""
        units, begin = self._units, place
        node, found = _offset(units[0]), (0, b"")
        for place in range(begin, len(data)):
            node ^= data[place]
            unit = units[node] if node < len(units) else 0
            if unit & _LABEL != data[place]:
                break
            node ^= _offset(unit)
            if unit >> 8 & 1:
                start = units[node] & _VALUE
                found = place + 1 - begin, self._replacements[start : self._replacements.index(0, start)]
        return found


_LABEL, _VALUE = 0x800000FF, 0x7FFFFFFF


def _offset(unit: int) -> int:
    return unit >> 10 << ((unit & 0x200) >> 6)


def _num_bytes(first: int) -> int:
    """The length of a character whose UTF-8 bytes begin with `first`."""
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _affected(units: Any) -> str:
    """The pattern of what a table can change: characters that others may join, and single characters."""
    root = np.array([_offset(int(units[0]))])
    single, nodes = _characters(units, root, only_ends=True)
    joining, visited = set[str](), nodes
    while len(nodes):
        more, nodes = _characters(units, nodes, only_ends=False)
        joining |= more
        nodes = np.setdiff1d(nodes, visited)
        visited = np.union1d(nodes, visited)
    classes = [f".[{_escaped(joining)}]+"] * bool(joining) + [f"[{_escaped(single)}]"] * bool(single)
    return "|".join(classes) or r"(?!)"


def _characters(units: Any, nodes: Any, *, only_ends: bool) -> tuple[set[str], Any]:
    """The characters that follow any of the nodes, and the nodes after them.

    With `only_ends` only those characters are returned that end a sequence.
    """
    found: set[str] = set()
    after = []
    labels = np.arange(1, 256)
    codes, lengths = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
    for num_read in range(1, 5):
        children = nodes[:, None] ^ labels  # (nodes, 255)
        children[children >= len(units)] = 0
        parents, columns = np.nonzero((units[children] & _LABEL) == labels)
        children, labels_read = children[parents, columns], labels[columns]
        child_units = units[children].astype(np.int64)
        codes = codes[parents] << 8 | labels_read
        lengths = (
            np.vectorize(_num_bytes, otypes=[np.int64])(labels_read) if num_read == 1 else lengths[parents]
        )
        nodes = children ^ (child_units >> 10 << ((child_units & 0x200) >> 6))
        is_whole, is_end = lengths == num_read, (child_units >> 8 & 1).astype(bool)
        chosen = codes[is_whole & is_end if only_ends else is_whole]
        found |= {int(code).to_bytes(num_read, "big").decode() for code in np.unique(chosen)}
        after.append(nodes[is_whole])
        nodes, codes, lengths = nodes[~is_whole], codes[~is_whole], lengths[~is_whole]
    return found, np.unique(np.concatenate(after))


def _escaped(characters: set[str]) -> str:
    """The characters as ranges of a regular expression's class."""
    codes = np.sort(np.array([ord(character) for character in characters]))
    runs = np.split(codes, np.flatnonzero(np.diff(codes) > 1) + 1)
    return "".join(f"\\U{run[0]:08x}-\\U{run[-1]:08x}" for run in runs)


def spm_normalizer(charsmap: bytes, steps: list[Any]) -> Any:
    """The normaliser of a file that is normalised as SentencePiece does it: `take_charsmap` recognises it."""
    return normalizers.Sequence([normalizers.Precompiled(charsmap), GUARD, *steps])


def take_charsmap(inner: Tokenizer) -> Charsmap | None:
    """Take the table out of a tokenizer whose normaliser `spm_normalizer` created; None for any other."""
    if inner.normalizer is None:
        return None
    steps = json.loads(inner.normalizer.__getstate__()).get("normalizers", [])
    if len(steps) < 2 or steps[0]["type"] != "Precompiled" or steps[1] != json.loads(GUARD.__getstate__()):
        return None
    rest = normalizers.Sequence([])
    rest.__setstate__(json.dumps({"type": "Sequence", "normalizers": steps[1:]}).encode())
    inner.normalizer = rest
    return Charsmap(base64.b64decode(steps[0]["precompiled_charsmap"]))
