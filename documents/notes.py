"""Numbers of notes in pages: elements without words that stay beside the text before them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from seq2seq_serve.documents.segments import LETTER

MAX_TAGS, MAX_CHARACTERS = 16, 32  # of the number of a note
WORD = re.compile(r"[^\W\d_]{2}")  # which no number of a note has
_KINDS = frozenset(["noteref", "doc-noteref", "backlink", "doc-backlink"])
_LETTER = re.compile(r"[\[(]?[^\W\d_](?:\s?\d+)?[\])]?")  # in place of a number
_POWER = re.compile(r"[-+−]?\d+")
_HAS_POWER = re.compile(r"(?:\d|(?<![^\W_])[a-zA-Z]{1,3})\Z")  # 10², m² and km², and no word
_BEFORE_WORDS = frozenset(["Ps", "Pi", "Pd", "Pc", "Sm", "Sc"])  # Unicode's categories of marks
_MARKS = ".!?…。．！？।؟"
_AT_END, _END = re.compile(rf"[{_MARKS}][\W_]*\Z"), re.compile(rf"\s*[{_MARKS}](?!\w)")
END_MARKS = re.compile(rf"[{_MARKS}]+[^\w\s]*")
_BEFORE_NUMBERS = "#§№"


def is_after_end(before: str, after: str) -> bool | None:
    """Whether a note between texts is after the end of a sentence, or before its mark; None if neither."""
    if _AT_END.search(before):
        return True
    return False if _END.match(after) else None


def stays(text: str, before: str, after: str) -> bool:
    """Whether an element has no letter and is not a part of a word, as the 2 of H₂O is."""
    is_part = (text[:1].isalnum() and before[-1:].isalnum()) or (text[-1:].isalnum() and after[:1].isalnum())
    return bool(text.strip()) and not LETTER.search(text) and not is_part


def is_note(elements: Sequence[tuple[str, str, str]], text: str, before: str, after: str) -> bool:
    """Whether an element with those inside of it is the number of a note, and not a word of a sentence.

    Such a number is raised or links to a place of a page, and stands right after a text or before all of it.
    A raised mark such as ® is like one.

    Args:
        elements: The name of each, the target of its link, its `role` and `epub:type`, from the outer one.
        text: What they show.
        before: The last characters before them in the sentence; empty at its beginning.
        after: The text that follows.
    """
    text, (name, target, kinds) = text.strip(), elements[0]
    if not text or WORD.search(text):
        return False
    if not _KINDS.isdisjoint(kinds.split()):
        return True
    is_link = any("#" in target for _, target, _ in elements)
    is_raised = any(name == "sup" for name, _, _ in elements)
    has_letter = LETTER.search(text) and not (is_link and is_raised and _LETTER.fullmatch(text))
    if not (name == "sup" or "#" in target) or has_letter:
        return False
    if not before:
        is_word = after[:1].isalnum() and (is_link or not after[0].isascii())  # and not ¹⁴C
        return is_word or after[:1].isspace() or (is_link and not after)
    is_number, last = any(map(str.isalnum, text)), before[-1]
    if is_link and not is_number:
        return True
    if last.isspace() or last in _BEFORE_NUMBERS or unicodedata.category(last) in _BEFORE_WORDS:
        return False
    return is_link or not (_HAS_POWER.search(before) if _POWER.fullmatch(text) else last.isdigit())
