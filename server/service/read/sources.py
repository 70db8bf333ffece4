"""Reads the sources of a request, one for each target; long ones are refused, truncated or split."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Protocol

import numpy as np

from seq2seq_serve.bundle import audio
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.commands import install_command
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SEQUENTIAL,
    LONG_SOURCE_SPLIT,
    LONG_SOURCE_TRUNCATE,
    Window,
)
from seq2seq_serve.server.engine.request import NO_CONSTRAINTS, Array, Request, Sampling
from seq2seq_serve.server.engine.terms import RequiredTerms, num_tokens
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.runner.voice_activity import (
    MissingVoiceActivityError,
    SpeechRules,
    speech,
)
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.read.inputs import (
    MAX_BYTES_PER_TOKEN,
    MAX_TIMES_TOO_LONG,
    MAX_WINDOWS,
    FileCost,
    Input,
    check_bytes,
    check_source_ids,
    check_visible,
    cost_of_pictures,
    cost_of_sound,
    max_seconds,
    read_input,
    read_samples,
)
from seq2seq_serve.server.service.read.options import SPLITTING, Decoding, with_mark, without_ngrams
from seq2seq_serve.server.service.read.sentences import lines, sentences
from seq2seq_serve.server.service.read.terms import Required
from seq2seq_serve.server.telemetry.record import CallRecord

MAX_UNKNOWN = 32  # words that an answer lists
MAX_PARTS = 256  # lines or sentences that a text is split into
_FITTING = (LONG_SOURCE_TRUNCATE, *SPLITTING)

_FLOAT_BYTES = 4
_COPIES_WITH_VOICE_ACTIVITY = 3  # of samples: the whole sound, the detector's, and its parts


class _RequestOf(Protocol):
    """`_request` for one call."""

    def __call__(self, sources: dict[str, Array], required: Required | None = None) -> Request:
        """Returns the engine's request for the sources of one target."""


@dataclass(frozen=True)
class Reading:
    """The source of one target: that of a request, a line or sentence of its text, or a piece of its sound.

    Attributes:
        request: The engine's request for it; of a sound that is decoded in windows with the whole
            spectrogram.
        sentences: Those of a story.
        unknown_words: The words of its texts that the model does not have, each once, at most `MAX_UNKNOWN`.
        num_truncated: The number of tokens, or of a sound's positions of memory, that were left out.
        text: The line or sentence; empty for a whole source.
        separator: The white space before the next part, line breaks included; empty after the last. None if
            sentences follow each other without any.
        begin_seconds: Where a piece or window of a sound begins, among the parts of the sound.
        num_seconds: The length of a sound's parts, or of a piece or window of them.
        sound_seconds: The length of the whole sound.
        parts: What is left of a sound with voice activity; none if that is all of it.
        window: Describes the target of a window.
        token_times: When the tokens of each of its targets begin and end, by their places; empty unless the
            request asks for the times of words.
        required: The terms and placeholders that its target must have; None for none.
    """

    request: Request
    sentences: list[str] = field(default_factory=list)
    unknown_words: list[str] = field(default_factory=list)
    num_truncated: int = 0
    text: str = ""
    separator: str | None = ""
    begin_seconds: float = 0.0
    num_seconds: float = 0.0
    sound_seconds: float = 0.0
    parts: tuple[audio.Part, ...] = ()
    window: Window | None = None
    token_times: tuple[Mapping[int, tuple[float, float]], ...] = ()
    required: Required | None = None

    def times_in_sound(self, begin: float, end: float, margin: float = 0.0) -> tuple[float, float]:
        """Returns the times of a piece or window as those of the sound; `margin` as for `times_in_sound`."""
        return audio.times_in_sound(self.begin_seconds + begin, self.begin_seconds + end, self.parts, margin)


def read_sources(
    decoding: Decoding, call: CallRecord, inputs: Sequence[Input], checkpoint: YieldPoint
) -> list[Reading]:
    """Reads the sources of a request: into one record, or several if a text or sound is split.

    Args:
        decoding: How their targets are decoded.
        call: The call that they came with.
        inputs: The sources.
        checkpoint: Is called every few milliseconds; an error that it raises ends the work.

    Raises:
        InvalidRequest: A source does not fit; the error names the field and what it must be.
    """
    sampling = decoding.request.sampling
    if sampling is not None and not decoding.options.HasField("seed"):
        sampling = replace(sampling, seed=secrets.randbits(64))
    request_of = partial(_request, decoding, call, sampling)
    if decoding.model.reads_sound:
        return _read_sound(inputs[0], decoding, request_of, checkpoint)
    if not decoding.model.reads_text:
        arrays: dict[str, Array] = {}
        story: list[str] = []
        unknown: list[str] = []
        for given in inputs:
            checkpoint()
            arrays[given.name], its_sentences = read_input(given, checkpoint)
            story += its_sentences
            for text in (its_sentences or [given.source.text]) if given.kind == "text" else []:
                checkpoint()
                unknown += decoding.model.source_tokenizer.unknown_words(text)
        return [Reading(request_of(arrays), story, list(dict.fromkeys(unknown))[:MAX_UNKNOWN])]
    if inputs[0].kind == "text":
        return _read_text(inputs[0], decoding, request_of, checkpoint)
    return [_read_ids(inputs[0], decoding, request_of)]


def cost_of_file(given: Input, decoding: Decoding) -> FileCost:
    """Returns what it costs to read the file of a source.

    Raises:
        InvalidRequest: The file exceeds a limit.
    """
    if given.spec.form is not Form.SOUND:
        return cost_of_pictures(given)
    options, (num_bands, num_frames) = decoding.options, given.spec.axes
    assert isinstance(num_bands, int)
    assert isinstance(num_frames, int)
    longest, hint = _longest_sound(given, decoding)
    cost = cost_of_sound(given, longest, hint=hint)
    seconds = cost.max_seconds
    frame_bytes, num_frames_of_all = num_bands * _FLOAT_BYTES, num_frames
    if options.long_source == LONG_SOURCE_SEQUENTIAL:
        num_frames_of_all = math.ceil(seconds * audio.SAMPLE_RATE / audio.HOP) + 1
    elif options.long_source in SPLITTING:
        # Spans of speech of a little more than half of a piece do not share one.
        share = 0.5 if options.voice_activity else audio.LEAST_SHARE
        num_frames_of_all *= 1 + math.ceil(seconds / (max_seconds(given.spec) * share))
    num_samples = seconds * audio.SAMPLE_RATE * (_COPIES_WITH_VOICE_ACTIVITY if options.voice_activity else 1)
    return FileCost(cost.num_pixels, int(num_samples * _FLOAT_BYTES), num_frames_of_all * frame_bytes)


def _longest_sound(given: Input, decoding: Decoding) -> tuple[float, str]:
    """Returns the seconds of the longest sound that is read, and what to do with a longer one."""
    seconds, how = max_seconds(given.spec), decoding.options.long_source
    if how == LONG_SOURCE_SEQUENTIAL or how in SPLITTING:
        return seconds * MAX_WINDOWS, ""
    if how == LONG_SOURCE_TRUNCATE:
        return seconds * MAX_TIMES_TOO_LONG, ""
    return seconds, _hint(decoding)


def _request(
    decoding: Decoding,
    call: CallRecord,
    sampling: Sampling | None,
    sources: dict[str, Array],
    required: Required | None = None,
) -> Request:
    """Returns the engine's request for the sources of one target.

    Raises:
        InvalidRequest: The target has no room for what it must have.
    """
    shared, model, bound = decoding.request, decoding.model, decoding.bound
    limit, is_bounded, constraints = shared.max_new_tokens, False, shared.constraints
    beam, terms, num_required = shared.beam, None, 0
    if required is not None and required.terms:
        assert decoding.glossary is not None
        beam = beam or decoding.glossary.beam
        room = limit - shared.ends_forced
        num_required = num_tokens(required.terms)
        # A prefix may have some; its length bounds what is built.
        if num_required <= room + len(shared.prefix_ids):
            terms = RequiredTerms(required.terms, model.target_tokenizer.token_bytes)
            num_required = terms.after(shared.prefix_ids).num_left
            terms.forget()  # it waits without what was found
        if num_required > room:
            raise InvalidRequest(
                f"what the target has to have takes {num_required} tokens, and at most {room} fit: send "
                "fewer terms and placeholders, or a shorter text",
                field="options",
            )
    if model.reads_sound:
        memory_length = model.max_memory_length  # also if the sound is cut into whole windows later
    else:
        memory_length = model.manifest.memory.memory_length_of(sources)
    if ngram_size := decoding.options.encoder_no_repeat_ngram_size:
        constraints = without_ngrams(constraints, ngram_size, sources[model.manifest.memory.source])
    if bound is not None:
        # A caller who sets min_new_tokens or terms gets the usual room after that number of tokens.
        longest = max(constraints.min_new_tokens, num_required) + bound.max_new_tokens(memory_length)
        is_bounded = longest < limit and bound is model.manifest.length_bound
        limit = min(limit, longest)
    return replace(
        shared,
        request_id=call.request_id,
        sources=sources,
        memory_length=memory_length,
        arrival=call.arrival,
        caller=call.caller.name,
        deadline=call.deadline,
        max_new_tokens=limit,
        sampling=sampling,
        constraints=constraints,
        beam=beam,
        terms=terms,
        is_bounded=is_bounded,
    )


def _read_sound(
    given: Input, decoding: Decoding, request_of: _RequestOf, checkpoint: YieldPoint
) -> list[Reading]:
    seconds, (num_bands, num_frames) = max_seconds(given.spec), given.spec.axes
    assert isinstance(num_bands, int)
    assert isinstance(num_frames, int)
    if given.kind == "tensor":
        if decoding.options.voice_activity:
            raise InvalidRequest(
                "voice_activity needs a sound file: send one, or leave the option out",
                field=given.field,
            )
        spectrogram, _ = read_input(given, checkpoint)
        return [Reading(request_of({given.name: spectrogram}), num_seconds=seconds, sound_seconds=seconds)]
    is_sequential = decoding.options.long_source == LONG_SOURCE_SEQUENTIAL
    is_split = decoding.options.long_source in SPLITTING
    is_truncated = decoding.options.long_source == LONG_SOURCE_TRUNCATE
    longest_seconds, hint = _longest_sound(given, decoding)
    samples = read_samples(given, longest_seconds, checkpoint, hint=hint)
    longest, num_truncated = num_frames * audio.HOP, 0
    if is_truncated and len(samples) > longest:
        num_truncated = -(-(len(samples) - longest) * given.model.max_memory_length // longest)
        samples = samples[:longest]
    sound_seconds = len(samples) / audio.SAMPLE_RATE
    spans, parts, is_silent = [(0, len(samples))], tuple[audio.Part, ...](), False
    if decoding.options.voice_activity:
        assert decoding.speech is not None
        spans = _speech(samples, decoding.speech, checkpoint)
        is_silent = not spans
        if is_silent:
            samples, spans = np.zeros(audio.HOP, np.float32), [(0, audio.HOP)]
        else:
            samples, spans, parts = audio.joined_spans(samples, spans)
    if is_split:
        pieces = audio.pieces_of(samples, spans, longest, checkpoint)
    else:
        pieces = [(0, len(samples) if is_sequential else min(len(samples), longest))]
    readings: list[Reading] = []
    for begin, end in pieces:
        checkpoint()
        length = -(-(end - begin) // audio.HOP) if is_sequential else num_frames
        request = request_of({given.name: audio.log_mel(samples[begin:end], num_bands, length, checkpoint)})
        if is_silent and not is_sequential:  # the target is the end of sequence
            request = replace(request, max_new_tokens=1, ends_forced=True, constraints=NO_CONSTRAINTS)
        readings.append(
            Reading(
                request,
                num_truncated=num_truncated,
                begin_seconds=begin / audio.SAMPLE_RATE,
                num_seconds=(end - begin) / audio.SAMPLE_RATE,
                sound_seconds=sound_seconds,
                parts=parts,
            )
        )
    return readings


def _speech(samples: audio.Samples, rules: SpeechRules, checkpoint: YieldPoint) -> list[audio.Span]:
    try:
        return speech(samples, rules, checkpoint)
    except MissingVoiceActivityError:
        raise InvalidRequest(
            "the server cannot detect speech: leave voice_activity out, or on the server "
            f"{install_command('speech')}",
            field="options.voice_activity",
        ) from None


def _read_text(
    given: Input, decoding: Decoding, request_of: _RequestOf, checkpoint: YieldPoint
) -> list[Reading]:
    text, model, limit = given.source.text, given.model, given.model.sizing.max_source_length
    if decoding.marks is not None:
        text, decoding = with_mark(text, decoding, decoding.marks, given.field)
    check_visible(text, given.field)
    max_tokens = limit * (MAX_TIMES_TOO_LONG if decoding.options.long_source in _FITTING else 1)
    check_bytes(text, max_tokens, model, given.field)
    if decoding.options.long_source in SPLITTING:
        readings = list(islice(_passages(text, given, decoding, request_of, checkpoint), MAX_PARTS + 1))
        if len(readings) > MAX_PARTS:
            raise InvalidRequest(
                f"the text has more than {MAX_PARTS} sentences and lines, the most for one request: "
                "send shorter pieces",
                field=given.field,
            )
        return readings
    token_ids, num_over = model.source_tokenizer.encode_truncated(text, limit, *decoding.frame, checkpoint)
    if num_over and decoding.options.long_source != LONG_SOURCE_TRUNCATE:
        raise _too_long("the source", limit + num_over, given, hint=_hint(decoding))
    if num_over and decoding.glossary is not None:
        text = model.source_tokenizer.decode(token_ids)
    required = decoding.glossary and decoding.glossary.required(text, given.field, checkpoint)
    request = request_of({given.name: np.asarray(token_ids, np.int64)}, required)
    return [Reading(request, num_truncated=num_over, required=required)]


def _passages(
    text: str, given: Input, decoding: Decoding, request_of: _RequestOf, checkpoint: YieldPoint
) -> Iterator[Reading]:
    """Yields a reading for each sentence of a text.

    With LONG_SOURCE_SPLIT, a line that fits into the model is one part. An error for one part ends the work.
    """
    model, limit, number = given.model, given.model.sizing.max_source_length, count(1)
    max_bytes = limit * MAX_BYTES_PER_TOKEN
    encode = model.source_tokenizer.encode_truncated

    def before_window(num_characters: int) -> None:
        checkpoint()
        if num_characters > max_bytes:
            raise InvalidRequest(
                f"sentence {next(number)} of the source has more than {num_characters} characters, and "
                f"{model.name} takes at most {limit} tokens: send shorter pieces",
                field=given.field,
            )

    def reading_of(
        part: str, token_ids: list[int], separator: str | None, required: Required | None
    ) -> Reading:
        request = request_of({given.name: np.asarray(token_ids, np.int64)}, required)
        return Reading(request, text=part, separator=separator, required=required)

    for line, after_line in lines(text):
        checkpoint()
        if decoding.options.long_source == LONG_SOURCE_SPLIT and len(line.encode()) <= max_bytes:
            token_ids, num_over = encode(line, limit, *decoding.frame, checkpoint)
            if not num_over:
                next(number)
                required = decoding.glossary and decoding.glossary.required(line, given.field, checkpoint)
                yield reading_of(line, token_ids, after_line, required)
                continue
        for sentence, separator in sentences(line, decoding.language, before_window):
            which = f"sentence {next(number)} of the source"
            check_bytes(sentence, limit, model, given.field)
            required = decoding.glossary and decoding.glossary.required(sentence, given.field, checkpoint)
            token_ids, num_over = encode(sentence, limit, *decoding.frame, checkpoint)
            if num_over:
                raise _too_long(which, limit + num_over, given)
            yield reading_of(sentence, token_ids, after_line if separator == "" else separator, required)


def _read_ids(given: Input, decoding: Decoding, request_of: _RequestOf) -> Reading:
    if decoding.glossary is not None:
        raise InvalidRequest(
            "terms and placeholders are found in a text, and the source has token ids: send the text",
            field=given.field,
        )
    token_ids: Sequence[int] = given.source.token_ids.values
    limit = given.model.sizing.max_source_length
    if not token_ids:
        raise InvalidRequest("the source has no token ids: send at least one", field=given.field)
    num_truncated = 0
    if len(token_ids) > limit:  # first, so that a long list is refused before each id is checked
        if decoding.options.long_source != LONG_SOURCE_TRUNCATE:
            raise _too_long("the source", len(token_ids), given)
        num_truncated = len(token_ids) - limit
        num_behind = len(decoding.frame[1])  # the caller's ids end with the frame's
        token_ids = [*token_ids[: limit - num_behind], *token_ids[len(token_ids) - num_behind :]]
    check_source_ids(token_ids, given)
    return Reading(request_of({given.name: np.asarray(token_ids, np.int64)}), num_truncated=num_truncated)


def _hint(decoding: Decoding) -> str:
    return "" if decoding.request.is_score else " or set long_source"


def _too_long(what: str, num_tokens: int, given: Input, *, hint: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"{what} has {num_tokens} tokens, and {given.model.name} takes at most "
        f"{given.model.sizing.max_source_length}: send shorter pieces, for example one sentence each{hint}",
        field=given.field,
    )
