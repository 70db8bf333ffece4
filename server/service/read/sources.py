"""Turns the sources of a request into those of its targets; long ones are refused, truncated or split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from seq2seq_serve.bundle import audio
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SEQUENTIAL,
    LONG_SOURCE_SPLIT,
    LONG_SOURCE_SPLIT_ALWAYS,
    LONG_SOURCE_TRUNCATE,
    LongSource,
)
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.fair_thread import Checkpoint
from seq2seq_serve.server.service.read.inputs import (
    MAX_BYTES_PER_TOKEN,
    MAX_TIMES_TOO_LONG,
    MAX_WINDOWS,
    Input,
    check_bytes,
    check_source_ids,
    check_visible,
    max_seconds,
    read_input,
    read_samples,
)
from seq2seq_serve.server.service.read.sentences import DEFAULT_LANGUAGE, lines, sentences

Frame = tuple[Sequence[int], Sequence[int]]  # the tokens before and after those of a text

MAX_PARTS = 256  # lines or sentences that a text is split into
SPLITTING = (LONG_SOURCE_SPLIT, LONG_SOURCE_SPLIT_ALWAYS)
_FITTING = (LONG_SOURCE_TRUNCATE, *SPLITTING)


@dataclass(frozen=True)
class Part:
    """The sources of one target: those of a request, a line or sentence of its text, or a piece of its sound.

    Attributes:
        sources: The model's inputs by name; of a sound that is decoded in windows the whole spectrogram.
        sentences: Those of a story.
        num_truncated: The number of tokens, or of a sound's positions of memory, that were left out.
        text: The line or sentence; empty for a whole source.
        separator: The white space before the next part, line breaks included; empty after the last. None if
            sentences follow each other without any.
        begin_seconds: Where a piece or window of a sound begins.
        num_seconds: The length of a sound, or of its piece or window.
    """

    sources: dict[str, Array]
    sentences: list[str] = field(default_factory=list)
    num_truncated: int = 0
    text: str = ""
    separator: str | None = ""
    begin_seconds: float = 0.0
    num_seconds: float = 0.0


def source_parts(
    inputs: Sequence[Input],
    model: ServedModel,
    checkpoint: Checkpoint,
    *,
    frame: Frame,
    long_source: LongSource | None = None,
    language: str = DEFAULT_LANGUAGE,
) -> list[Part]:
    """Returns the sources of a request: one part, or several if a text or sound is split.

    Args:
        inputs: The sources of the request.
        model: The model that the request names.
        checkpoint: Is called every few milliseconds; an error that it raises ends the work.
        frame: The tokens before and after those of a text.
        long_source: What to do with a text or sound that is too long; None refuses it, for a request
            without that option.
        language: The language by whose rules sentences are split.

    Raises:
        InvalidRequest: The source does not fit; the error names the field and what it must be.
    """
    if model.reads_sound:
        (given,) = inputs
        return _sound_parts(given, model, long_source, checkpoint)
    if not model.reads_text:
        arrays: dict[str, Array] = {}
        story: list[str] = []
        for given in inputs:
            checkpoint()
            arrays[given.name], its_sentences = read_input(given, model, checkpoint)
            story += its_sentences
        return [Part(arrays, story)]
    (given,) = inputs
    if given.kind == "text":
        return _text_parts(given, model, frame, long_source, language, checkpoint)
    return [_ids_part(given, model, frame, long_source)]


def _sound_parts(
    given: Input, model: ServedModel, long_source: LongSource | None, checkpoint: Checkpoint
) -> list[Part]:
    seconds, (num_bands, num_frames) = max_seconds(given.spec), given.spec.axes
    assert isinstance(num_bands, int)
    assert isinstance(num_frames, int)
    if given.kind == "tensor":
        spectrogram, _ = read_input(given, model, checkpoint)
        return [Part({given.name: spectrogram}, num_seconds=seconds)]
    if long_source == LONG_SOURCE_SEQUENTIAL:
        samples = read_samples(given, seconds * MAX_WINDOWS, checkpoint, hint="")
        whole = audio.log_mel(samples, num_bands, -(-len(samples) // audio.HOP), checkpoint)
        return [Part({given.name: whole}, num_seconds=len(samples) / audio.SAMPLE_RATE)]
    if long_source in _FITTING:
        samples = read_samples(given, seconds * MAX_TIMES_TOO_LONG, checkpoint, hint="")
    else:
        samples = read_samples(given, seconds, checkpoint, hint=_hint(long_source))
    longest, num_truncated = num_frames * audio.HOP, 0
    if long_source == LONG_SOURCE_TRUNCATE and len(samples) > longest:
        num_truncated = -(-(len(samples) - longest) * model.max_memory_length // longest)
        samples = samples[:longest]
    parts: list[Part] = []
    begin = 0
    for piece in audio.split_sound(samples, longest):
        checkpoint()
        array = audio.log_mel(piece, num_bands, num_frames)
        parts.append(
            Part(
                {given.name: array},
                num_truncated=num_truncated,
                begin_seconds=begin / audio.SAMPLE_RATE,
                num_seconds=len(piece) / audio.SAMPLE_RATE,
            )
        )
        begin += len(piece)
    return parts


def _text_parts(
    given: Input,
    model: ServedModel,
    frame: Frame,
    long_source: LongSource | None,
    language: str,
    checkpoint: Checkpoint,
) -> list[Part]:
    text, limit = given.source.text, model.max_source_length
    check_visible(text, given.field)
    check_bytes(text, limit * (MAX_TIMES_TOO_LONG if long_source in _FITTING else 1), model, given.field)
    if long_source in SPLITTING:
        has_long_lines = long_source == LONG_SOURCE_SPLIT
        passages = _passages(given, model, frame, language, checkpoint, has_long_lines=has_long_lines)
        parts = list(islice(passages, MAX_PARTS + 1))
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(
                f"the text has more than {MAX_PARTS} sentences and lines, the most for one request: "
                "send shorter pieces",
                field=given.field,
            )
        return parts
    token_ids, num_over = model.source_tokenizer.encode_truncated(text, limit, *frame)
    if num_over and long_source != LONG_SOURCE_TRUNCATE:
        raise _too_long("the source", limit + num_over, model, given, hint=_hint(long_source))
    return [Part({given.name: np.asarray(token_ids, np.int64)}, num_truncated=num_over)]


def _passages(
    given: Input,
    model: ServedModel,
    frame: Frame,
    language: str,
    checkpoint: Checkpoint,
    *,
    has_long_lines: bool,
) -> Iterator[Part]:
    """Yields a part for each sentence of a text.

    With `has_long_lines`, a line that fits into the model is one part. An error for one part ends the work.
    """
    limit, number = model.max_source_length, count(1)
    max_bytes = limit * MAX_BYTES_PER_TOKEN

    def before_window(num_characters: int) -> None:
        checkpoint()
        if num_characters > max_bytes:
            raise InvalidRequest(
                f"sentence {next(number)} of the source has more than {num_characters} characters, and "
                f"{model.name} takes at most {limit} tokens: send shorter pieces",
                field=given.field,
            )

    for line, after_line in lines(given.source.text):
        checkpoint()
        if has_long_lines and len(line.encode()) <= max_bytes:
            token_ids, num_over = model.source_tokenizer.encode_truncated(line, limit, *frame)
            if not num_over:
                next(number)
                ids = np.asarray(token_ids, np.int64)
                yield Part({given.name: ids}, text=line, separator=after_line)
                continue
        for sentence, separator in sentences(line, language, before_window):
            which = f"sentence {next(number)} of the source"
            check_bytes(sentence, limit, model, given.field)
            token_ids, num_over = model.source_tokenizer.encode_truncated(sentence, limit, *frame)
            if num_over:
                raise _too_long(which, limit + num_over, model, given)
            ids = np.asarray(token_ids, np.int64)
            separator = after_line if separator == "" else separator
            yield Part({given.name: ids}, text=sentence, separator=separator)


def _ids_part(given: Input, model: ServedModel, frame: Frame, long_source: LongSource | None) -> Part:
    token_ids: Sequence[int] = given.source.token_ids.values
    limit = model.max_source_length
    if not token_ids:
        raise InvalidRequest("the source has no token ids: send at least one", field=given.field)
    num_truncated = 0
    if len(token_ids) > limit:  # first, so that a long list is refused before each id is checked
        if long_source != LONG_SOURCE_TRUNCATE:
            raise _too_long("the source", len(token_ids), model, given)
        num_truncated = len(token_ids) - limit
        num_behind = len(frame[1])  # the caller's ids end with the frame's
        token_ids = [*token_ids[: limit - num_behind], *token_ids[len(token_ids) - num_behind :]]
    check_source_ids(token_ids, model, f"{given.field}.values")
    return Part({given.name: np.asarray(token_ids, np.int64)}, num_truncated=num_truncated)


def _hint(long_source: LongSource | None) -> str:
    return "" if long_source is None else " or set options.long_source"


def _too_long(
    what: str, num_tokens: int, model: ServedModel, given: Input, *, hint: str = ""
) -> InvalidRequest:
    return InvalidRequest(
        f"{what} has {num_tokens} tokens, and {model.name} takes at most {model.max_source_length}: "
        f"send shorter pieces, for example one sentence each{hint}",
        field=given.field,
    )
