"""Finds where somebody speaks in a sound, with Silero's small model (github.com/snakers4/silero-vad, MIT).

The model's file comes with packages that are not imported: they need torch, or an engine of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from seq2seq_serve.bundle.audio import SAMPLE_RATE, SPEECH_MARGIN, Samples, Span
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.runner.device import Session, small_session

_FILES = (
    ("faster_whisper", "assets/silero_vad_v6.onnx"),
    ("silero_vad", "data/silero_vad_16k_sequence.onnx"),
)
_CHUNK, _CONTEXT = 512, 64  # samples whose probability is computed, and those before them that are read, too
_STATE = (1, 1, 128)
_BLOCK = 512  # chunks of one run
_ENDS_BELOW = 0.15  # the probability at which speech begins, as in the model's own program
_LEAST_END = 0.01


@dataclass(frozen=True)
class SpeechRules:
    """Where speech begins and ends.

    Attributes:
        least_pause_seconds: Speech goes on after a shorter pause.
        probability: Speech begins at this probability.
        margin_seconds: The length of what is kept before speech, for soft sounds.
    """

    least_pause_seconds: float
    probability: float = 0.5
    margin_seconds: float = SPEECH_MARGIN / SAMPLE_RATE


class MissingVoiceActivityError(Exception):
    """No installed package has the model's file."""


def speech(
    samples: Samples, rules: SpeechRules, after_block: Callable[[], None] = lambda: None
) -> list[Span]:
    """Returns the spans in which somebody speaks, in order, with a margin around them; they do not overlap.

    Args:
        samples: At `SAMPLE_RATE`.
        rules: Where speech begins and ends.
        after_block: Is called after each block of samples; an error that it raises ends the work.

    Raises:
        MissingVoiceActivityError: The model's file is not installed.
    """
    spans: list[Span] = []
    before = 0  # the end of the speech before, without its margin
    margin = int(rules.margin_seconds * SAMPLE_RATE)
    for begin, end in _speech(_probabilities(samples, after_block), rules):
        first = max(begin - margin, 0)
        if spans and first < spans[-1][1]:  # both margins are in one pause: each gets half of it
            first = (before + begin) // 2
            spans[-1] = spans[-1][0], first
        spans.append((first, min(end + SPEECH_MARGIN, len(samples))))
        before = end
    return spans


def _speech(probabilities: Array, rules: SpeechRules) -> Iterator[Span]:
    """Yields the spans of speech without a margin, in samples, after each of which is a pause."""
    least_pause = int(rules.least_pause_seconds * SAMPLE_RATE)
    ends = max(rules.probability - _ENDS_BELOW, _LEAST_END)
    begin: int | None = None
    end = 0  # where speech may have ended; 0 while it goes on
    for place, probability in enumerate(probabilities.tolist()):
        here = place * _CHUNK
        if probability >= rules.probability:
            begin, end = here if begin is None else begin, 0
        elif begin is not None and probability < ends:
            end = end or here
            if here - end >= least_pause:
                yield begin, end
                begin, end = None, 0
    if begin is not None:
        yield begin, end or len(probabilities) * _CHUNK


def _probabilities(samples: Samples, after_block: Callable[[], None]) -> Array:
    """Returns the probability of speech in each chunk; silence follows the last one."""
    num_chunks = -(-len(samples) // _CHUNK)
    padded = np.zeros(_CONTEXT + num_chunks * _CHUNK, np.float32)
    padded[_CONTEXT : _CONTEXT + len(samples)] = samples
    chunks = np.lib.stride_tricks.sliding_window_view(padded, _CONTEXT + _CHUNK)[::_CHUNK]
    session, pieces = _session(), [np.zeros(0, np.float32)]
    state = {"h": np.zeros(_STATE, np.float32), "c": np.zeros(_STATE, np.float32)}
    for first in range(0, num_chunks, _BLOCK):
        block = np.ascontiguousarray(chunks[first : first + _BLOCK])
        piece, state["h"], state["c"] = session.run(None, {"input": block} | state)
        pieces.append(piece.reshape(-1))
        after_block()
    return np.concatenate(pieces)


@cache
def _session() -> Session:
    """Returns the session of the model, read once; threads may share it."""
    for package, name in _FILES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            file = Path(spec.origin).parent / name
            if file.is_file():
                return small_session(file)
    raise MissingVoiceActivityError
