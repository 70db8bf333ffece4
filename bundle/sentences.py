"""Cuts a short story into its sentences, for training and for the server alike."""

from __future__ import annotations

import re

MAX_WORDS = 64  # tokens of a sentence in a story, and of a question

# A mark inside of a word, as in 3.5, does not end a sentence. Chinese and Japanese marks need no space after
# them, but a quotation may go on, as in 「はい。」と言った. A run of marks is tried once, and not from each
# of its marks, so that the time stays linear.
_END = re.compile(
    r"""(?<![.?!])[.?!]++["'”’)]*+(?=\s|$)"""
    r"""|(?<![。？！])[。？！]++(?:(?!["'”’）」』])|["'”’）」』]++(?=\s|$|[“‘（「『]))"""
    r"""|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]"""
)


def split_sentences(text: str) -> list[str]:
    """Returns the sentences of `text` in order, each with its own mark, without blank ones.

    A sentence ends at a line break, and after `.`, `?` or `!` before white space or the text's end. An
    abbreviation ends a sentence, too.
    """
    ends = [match.end() for match in _END.finditer(text)]
    pieces = [text[start:end].strip() for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    return [piece for piece in pieces if any(map(str.isalnum, piece))]
