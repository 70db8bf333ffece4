"""When the words of a target were said: its tokens are aligned with the sound, and joined.

The method is that of Whisper's code (Radford et al. 2022, arXiv:2212.04356; `timing.py`): the attention of
some heads, normalised, smoothed and averaged, and the path of dynamic time warping through it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.bundle.characters import UNSPACED
from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.bundle.tokenizer import Tokenizer

# T target length   H alignment heads   S positions of the sound

_SMOOTHED = 7  # positions whose median replaces the one in the middle
_ROWS_AT_ONCE = 16  # of which all of them are in a processor's cache
_IS_UNSPACED = re.compile(f"[{UNSPACED}]")
# Of marks that belong to the word after them, the categories and those that do not have one of their own
_OPENING, _INVERTED = ("Ps", "Pi"), "¿¡"

Times = Mapping[int, tuple[float, float]]


class Word(NamedTuple):
    """A word, with the marks beside it.

    Attributes:
        text: Its text.
        first: The place of the first token of its letters.
        last: The place of the last token of its letters.
        end: The place after its last token, where the next word's tokens begin.
    """

    text: str
    first: int
    last: int
    end: int


def token_times(
    attention: NDArray[Any],
    token_ids: Sequence[int],
    times: Timestamps,
    sound_seconds: float,
    step: float,
    checkpoint: Callable[[], None],
) -> Times:
    """Returns when each token of a target that is not a time begins and ends, in seconds, by its place.

    Args:
        attention: `(T, H, S)` of all tokens, and of the end of sequence if the target has one.
        token_ids: The target, without the end of sequence.
        times: The tokens of times.
        sound_seconds: The length of the sound; padding follows it.
        step: The seconds of a position.
        checkpoint: Is called for each head; an error that it raises ends the work.
    """
    places = [place for place, token_id in enumerate(token_ids) if not times.has(token_id)]
    if not places:
        return {}
    num_positions = min(max(math.ceil(sound_seconds / step), 1), attention.shape[2])
    rows = [*places, *range(len(token_ids), len(attention))]
    starts = [start * step for start in token_starts(attention[rows], num_positions, checkpoint)]
    ends = [*starts[1:], *[sound_seconds] * (len(starts) == len(places))]
    return {
        place: (begin, min(end, sound_seconds))
        for place, begin, end in zip(places, starts, ends, strict=False)
    }


def token_starts(attention: NDArray[Any], num_positions: int, checkpoint: Callable[[], None]) -> list[int]:
    """Returns the position of a sound at which each token of a target begins; none is before the one before.

    Args:
        attention: `(T, H, S)`, not negative.
        num_positions: Those of the sound; padding follows it.
        checkpoint: As for `token_times`.
    """
    num_heads = attention.shape[1]
    smooth = np.zeros((len(attention), num_positions), np.float32)
    for head in range(num_heads):
        checkpoint()
        smooth += _smoothed(_normal(attention[:, head, :num_positions]))
    return _cheapest_path(np.asarray(smooth, np.float64) / -num_heads)


def _normal(heard: NDArray[Any]) -> NDArray[np.float32]:
    """Returns the attention `(T, S)` of a head, each position beside its mean, in its standard deviations."""
    shares = heard.astype(np.float32)
    shares /= np.maximum(shares.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny)
    deviation = shares.std(axis=0)
    normal: NDArray[np.float32] = (shares - shares.mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    return normal


def _smoothed(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the median of the positions around each one; the rows `(T, S)` are mirrored at their ends."""
    num_positions = rows.shape[1]
    beside = min(_SMOOTHED // 2, num_positions - 1)
    padded = np.pad(rows, ((0, 0), (beside, beside)), mode="reflect")
    smooth = np.empty_like(rows)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = padded[first : first + _ROWS_AT_ONCE]
        near = [some[:, begin : begin + num_positions] for begin in range(2 * beside + 1)]
        smooth[first : first + _ROWS_AT_ONCE] = _median(near, beside)
    return smooth


def _median(values: list[NDArray[np.float32]], number: int) -> NDArray[np.float32]:
    """Returns the median, by place, of 2 * `number` + 1 arrays.

    The least and the most of `number` + 2 values are not their median: they are dropped, and one more is
    compared with the others. It takes a fifth of the time of `np.partition`, which sorts each place alone.
    """
    kept, waiting = values[: number + 2], values[number + 2 :]
    while True:
        least, *others = kept
        for place, value in enumerate(others):
            least, others[place] = np.minimum(least, value), np.maximum(least, value)
        if not others:
            return least
        most, *kept = others
        for place, value in enumerate(kept):
            most, kept[place] = np.maximum(most, value), np.minimum(most, value)
        if not waiting:
            return kept[0]
        kept.append(waiting.pop())


def _cheapest_path(costs: NDArray[np.float64]) -> list[int]:
    """Returns where the cheapest path through costs `(T, S)` enters each row (dynamic time warping).

    The path goes from the first to the last place, and each step to the next row, the next column, or both.
    """
    totals = np.empty_like(costs)  # of the cheapest path to each place
    totals[0] = costs[0].cumsum()
    for row in range(1, len(costs)):
        from_above = totals[row - 1].copy()
        np.minimum(from_above[1:], totals[row - 1, :-1], out=from_above[1:])
        along = costs[row].cumsum()  # a path that enters at k costs along[j] - along[k - 1] up to j
        totals[row] = along + np.minimum.accumulate(from_above - along + costs[row])
    row, column = len(costs) - 1, costs.shape[1] - 1
    starts = [0] * len(costs)
    while row:
        above = totals[row - 1, column]
        if column:
            diagonal, beside = totals[row - 1, column - 1], totals[row, column - 1]
            if beside <= diagonal and beside <= above:
                column -= 1
                continue
        starts[row] = column
        if column and diagonal <= above:
            column -= 1
        row -= 1
    return starts


def words_of(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[Word]:
    """Returns the words of a target: what is between white space, or a token in scripts without it.

    Marks belong to the word beside them. The joined texts are the text of the target.
    """
    stream, words = tokenizer.stream(), list[Word]()
    pieces = [stream.push([token_id]) for token_id in token_ids]
    if pieces:
        pieces[-1] += stream.finish()
    first, before = 0, ""
    for place, piece in enumerate(pieces):
        if not piece:
            continue  # the next token completes its character
        said = "".join(filter(_is_letter, piece))
        if not words or (_is_said(words[-1]) and _begins(piece, said, before)):
            words.append(Word(piece, first, place if said else first - 1, place + 1))
        else:
            word = words[-1]
            begin = word.first if _is_said(word) else first
            words[-1] = Word(word.text + piece, begin, place if said else word.last, place + 1)
        first, before = place + 1, said[-1:] or before
    if len(words) > 1 and not _is_said(words[-1]):
        rest = words.pop()
        words[-1] = words[-1]._replace(text=words[-1].text + rest.text, end=rest.end)
    return [word if _is_said(word) else word._replace(first=0, last=len(pieces) - 1) for word in words]


def _begins(piece: str, said: str, before: str) -> bool:
    """Returns whether a word begins with a token's text, after a word that ends with the letter `before`."""
    mark = piece.strip()[:1]
    opens = mark in _INVERTED or unicodedata.category(mark) in _OPENING if mark else False
    if piece[0].isspace():
        return True
    if said and unicodedata.category(said[0])[0] == "M":
        return False
    return bool(_IS_UNSPACED.match(said) or (_IS_UNSPACED.match(before) and (said or opens)))


def _is_said(word: Word) -> bool:
    return word.last >= word.first


def _is_letter(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"
