"""Finds where somebody speaks in a sound, with Silero's small model (github.com/snakers4/silero-vad, MIT).

The model's file comes with packages that are not imported: they need torch, or an engine of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import numpy as np

from seq2seq_serve.bundle.audio import SAMPLE_RATE, SPEECH_MARGIN, Samples, Span
from seq2seq_serve.protos.onnx_weights_pb2 import Model
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.runner.device import Session, small_session, weightless

_FILES = (
    ("faster_whisper", "assets/silero_vad_v6.onnx"),
    ("silero_vad", "data/silero_vad_16k_sequence.onnx"),
)
# The SHA-256 of the version for which the server has a graph that is 3.5 times as fast as its own
# (`export.graphs.voice_activity`), and the names of its weights by those of the graph's inputs
_KNOWN = "4cbf549b8326f60f80f2536d9eefeb450a9abe83365a098031c89719f1be17d2"
_WEIGHTS = {
    "basis": "encoder.feature_extractor.forward_basis_buffer",
    **{f"weight_{i}": f"encoder.conv_layers.{i}.weight" for i in range(4)},
    **{f"bias_{i}": f"encoder.conv_layers.{i}.bias" for i in range(4)},
    "input_weights": "onnx::LSTM_209",
    "state_weights": "onnx::LSTM_210",
    "gate_biases": "onnx::LSTM_211",
    "output_weight": "decoder.conv1d.weight",
    "output_bias": "decoder.conv1d.bias",
}
_CHUNK, _CONTEXT = 512, 64  # samples whose probability is computed, and those before them that are read, too
_STATE = (1, 1, 128)
_BLOCK = 512  # chunks of one run
# Of one run of a stream: after a run, the threads that all graphs share wait busily for some 40 milliseconds.
_LEAST_CHUNKS = 8
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
    for begin, end in _speech(samples, rules, after_block):
        first = max(begin - margin, 0)
        if spans and first < spans[-1][1]:  # both margins are in one pause: each gets half of it
            first = (before + begin) // 2
            spans[-1] = spans[-1][0], first
        spans.append((first, min(end + SPEECH_MARGIN, len(samples))))
        before = end
    return spans


class _Pauses:
    """Finds where speech begins and ends, by the probability of each chunk.

    Args:
        rules: Where speech begins and ends.

    Attributes:
        begin: Where the present speech began, in samples, without a margin; None while nobody speaks.
    """

    def __init__(self, rules: SpeechRules) -> None:
        self._probability = rules.probability
        self._ends = max(rules.probability - _ENDS_BELOW, _LEAST_END)
        self._least_pause = int(rules.least_pause_seconds * SAMPLE_RATE)
        self._num_read = 0  # samples
        self._end = 0  # where speech may have ended; 0 while it goes on
        self.begin: int | None = None

    @property
    def latest(self) -> int:
        """Where the present speech ends so far."""
        return self._end or self._num_read

    def read(self, probability: float) -> Span | None:
        """Read the next chunk; returns the speech after which a pause is complete with it."""
        here, self._num_read = self._num_read, self._num_read + _CHUNK
        if probability >= self._probability:
            self.begin, self._end = here if self.begin is None else self.begin, 0
        elif self.begin is not None and probability < self._ends:
            self._end = self._end or here
            if here - self._end >= self._least_pause:
                return self.finish()
        return None

    def finish(self) -> Span | None:
        """Returns the present speech, which ends here."""
        if self.begin is None:
            return None
        span = self.begin, self._end or self._num_read
        self.begin, self._end = None, 0
        return span


def _speech(samples: Samples, rules: SpeechRules, after_block: Callable[[], None]) -> Iterator[Span]:
    """Yields the spans of speech without a margin, in samples; silence follows the last chunk."""
    stream, block = SpeechStream(rules), _BLOCK * _CHUNK
    for first in range(0, len(samples), block):
        yield from (ended for ended, _ in stream.push(samples[first : first + block]) if ended is not None)
        after_block()
    changes = chain(stream.push(np.zeros(-len(samples) % _CHUNK, np.float32)), stream.finish())
    yield from (ended for ended, _ in changes if ended is not None)


class SpeechStream:
    """Finds speech in a sound that comes piece by piece; the pieces do not change what is found.

    Owned by the stream of a caller.

    Args:
        rules: Where speech begins and ends.

    Raises:
        MissingVoiceActivityError: The model's file is not installed.
    """

    def __init__(self, rules: SpeechRules) -> None:
        _session()
        self._pauses = _Pauses(rules)
        self._rest = np.zeros(
            _CONTEXT, np.float32
        )  # the last samples that were read, and those of no chunk yet
        self._state = _first_state()

    @property
    def begin(self) -> int | None:
        """Where the present speech began, in samples, without a margin; None while nobody speaks."""
        return self._pauses.begin

    @property
    def latest(self) -> int:
        """Where the present speech ends so far, in samples."""
        return self._pauses.latest

    def push(self, samples: Samples) -> Iterator[tuple[Span | None, int | None]]:
        """Yields each change, after the samples that show it.

        Args:
            samples: The next ones, of any number.

        Yields:
            The speech that has ended, if any, and where the present one began, if somebody speaks; in samples
            of the whole sound, without margins.
        """
        heard = np.concatenate([self._rest, samples])
        num_chunks = (len(heard) - _CONTEXT) // _CHUNK
        if num_chunks < _LEAST_CHUNKS:
            self._rest = heard
            return
        yield from self._read(heard, num_chunks)

    def _read(self, heard: Samples, num_chunks: int) -> Iterator[tuple[Span | None, int | None]]:
        self._rest = heard[num_chunks * _CHUNK :]
        if not num_chunks:
            return
        chunks = np.lib.stride_tricks.sliding_window_view(heard, _CONTEXT + _CHUNK)[::_CHUNK]
        for first in range(0, num_chunks, _BLOCK):
            probabilities = _run(chunks[first : min(first + _BLOCK, num_chunks)], self._state)
            for probability in probabilities.tolist():
                before = self._pauses.begin
                span = self._pauses.read(probability)
                if span is not None or before != self._pauses.begin:
                    yield span, self._pauses.begin

    def flush(self) -> Iterator[tuple[Span | None, int | None]]:
        """Yields the changes that the samples so far show; some wait for more, as that takes less time."""
        yield from self._read(self._rest, (len(self._rest) - _CONTEXT) // _CHUNK)

    def finish(self) -> Iterator[tuple[Span | None, int | None]]:
        """Yields the last changes; present speech ends with the sound."""
        yield from self.flush()
        if (span := self._pauses.finish()) is not None:
            yield span, None


def _first_state() -> dict[str, Array]:
    return {"h": np.zeros(_STATE, np.float32), "c": np.zeros(_STATE, np.float32)}


def _run(chunks: Array, state: dict[str, Array]) -> Array:
    """Returns the probability of speech in each chunk, and changes the state to that after them."""
    block = np.ascontiguousarray(chunks)
    probabilities: Array
    probabilities, state["h"], state["c"] = _session().run(None, {"input": block} | state)
    return probabilities.ravel()


@cache
def _session() -> Session:
    """Returns the session of the model, read once; threads may share it."""
    for package, name in _FILES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            file = Path(spec.origin).parent / name
            if file.is_file():
                return small_session(_arranged(file.read_bytes()))
    raise MissingVoiceActivityError


def _arranged(model: bytes) -> bytes:
    """Returns the server's own graph with the weights of a model; one of another version as it is."""
    if sha256(model).hexdigest() != _KNOWN:
        return model
    given = {tensor.name: tensor for tensor in Model.FromString(model).graph.initializer}
    arranged = Model.FromString(weightless("voice_activity"))
    graph = arranged.graph
    for name, given_name in _WEIGHTS.items():
        weight = graph.initializer.add()
        weight.CopyFrom(given[given_name])
        weight.name = name
    others = [value for value in graph.input if value.name not in _WEIGHTS]
    del graph.input[:]
    graph.input.extend(others)
    return arranged.SerializeToString()
