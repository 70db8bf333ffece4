"""The characters that are white space, those that are invisible, and those of scripts without spaces."""

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

# Scripts without white space between words, as parts of the sets of regular expressions
# SOUTH_EAST_ASIAN: Thai, Lao, Burmese and Khmer; HAN has Bopomofo, too
HAN = "\u3005-\u3007\u3105-\u312f\u31a0-\u31bf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001aff0-\U0001b16f"
SOUTH_EAST_ASIAN = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\ua9e0-\ua9ff\uaa60-\uaa7f"
TIBETAN = "\u0f00-\u0fff"
UNSPACED = HAN + KANA + SOUTH_EAST_ASIAN + TIBETAN


def is_blank(text: str) -> bool:
    """Whether a text is empty, or has only white space and invisible characters."""
    return not text.strip(WHITE_SPACE + INVISIBLE + _JOINERS)
