"""The characters that are white space, and those that are invisible."""

from __future__ import annotations


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


def is_blank(text: str) -> bool:
    """Whether a text is empty, or has only white space and invisible characters."""
    return not text.strip(WHITE_SPACE + INVISIBLE + _JOINERS)
