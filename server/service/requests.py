"""Checks a `GenerateRequest` and makes it the engine's record. What does not fit is refused, never cut."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from bundle.manifest import LengthBound
from bundle.names import SOURCE_IDS
from protos.seq2seq_v1_pb2 import (
    GenerateOptions,
    GenerateRequest,
    LongSource,
    ScoreRequest,
    Target,
)
from server.backlog import LEAST_URGENT, MOST_URGENT
from server.errors import Forbidden, InvalidRequest
from server.models import ServedModel
from server.records import Beam, Constraints, Request, Sampling
from server.service.calls import Call
from server.service.sentences import DEFAULT_LANGUAGE, known_language
from server.service.sources import SPLITTING, Part, check_bytes, check_ids, source_parts
from server.service.text_threads import Checkpoint
from server.stopping import StoppedText, StopSequences

MAX_ALTERNATIVES = 32
MAX_BEAM_SIZE = 16
MAX_HYPOTHESES = 16  # drawn ones, or those that go on greedily
_MAX_ADJUSTED_IDS = 1024  # of a request, suppressed and biased ones each
_MAX_STOP_SEQUENCES, _MAX_STOP_LENGTH = 16, 256
_MAX_PENALTY, _MAX_BIAS = 100.0, 1000.0
_MAX_ALPHA = 10.0
_MAX_LENGTH_RATIO = 1000.0
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 100.0

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Job:
    """A part of a call's source, and the engine's record of it."""

    part: Part
    request: Request


def engine_jobs(
    message: GenerateRequest, model: ServedModel, call: Call, checkpoint: Checkpoint, *, stream: bool
) -> list[Job]:
    """Returns the engine's requests for a call: more than one where its source is split.

    Args:
        message: From the caller.
        model: That it names.
        call: That it came with.
        checkpoint: Is called every few milliseconds; what it raises ends the work.
        stream: Whether the caller gets pieces.

    Raises:
        InvalidRequest: What is wrong, in which field, and what would be right.
        Forbidden: The caller may not be so urgent.
    """
    options = message.options
    _check_stop_sequences(options, model)
    _check_split(options)
    language = _source_language(options, model)
    prefix_ids = _target_ids(options.target_prefix, model, "options.target_prefix")
    max_new_tokens = _max_new_tokens(options, model, len(prefix_ids))
    bound = _length_bound(options, model)
    parts = source_parts(
        message.sources, model, checkpoint, long_source=options.long_source, language=language
    )
    whole = Request(
        request_id=call.request_id,
        sources={SOURCE_IDS: parts[0].source_ids},
        max_new_tokens=max_new_tokens,
        arrival=call.arrival,
        deadline=call.deadline,
        attention=options.attention or options.word_alignment,
        stream=stream,
        priority=_priority(options.priority, call, "options.priority"),
        caller=call.caller.name,
        constraints=_constraints(options, model, max_new_tokens),
        sampling=_sampling(options),
        beam=_beam(options, model),
        num_hypotheses=_num_hypotheses(options, model),
        prefix_ids=prefix_ids,
        stops=_stop_sequences(options, model),
        log_probabilities=options.log_probabilities,
        num_alternatives=_in_range("num_alternatives", options.num_alternatives, 0, MAX_ALTERNATIVES),
    )
    return [Job(part, _of_part(part, whole, bound, model)) for part in parts]


def target_text(request: Request, model: ServedModel) -> StoppedText:
    """Creates the decoder of a target's text, which ends before the first stop sequence of the request."""
    return StoppedText(model.target_tokenizer.stream(), request.stops, len(request.prefix_ids))


def _stop_sequences(options: GenerateOptions, model: ServedModel) -> StopSequences | None:
    if not options.stop_sequences:
        return None
    tokenizer = model.target_tokenizer
    return StopSequences(map(tokenizer.normalize_inside, options.stop_sequences), tokenizer.token_bytes)


def score_request(message: ScoreRequest, model: ServedModel, call: Call, checkpoint: Checkpoint) -> Request:
    """The engine's record of a target to be scored.

    Args:
        message: From the caller.
        model: That it names.
        call: That it came with.
        checkpoint: As of `engine_jobs`.

    Raises:
        InvalidRequest: What is wrong, in which field, and what would be right.
        Forbidden: The caller may not be so urgent.
    """
    if message.target.WhichOneof("value") is None:
        raise InvalidRequest("the target is missing: give it a text or token ids", field="target")
    return Request(
        request_id=call.request_id,
        sources={SOURCE_IDS: source_parts(message.sources, model, checkpoint)[0].source_ids},
        max_new_tokens=1,
        arrival=call.arrival,
        deadline=call.deadline,
        priority=_priority(message.priority, call, "priority"),
        caller=call.caller.name,
        prefix_ids=_target_ids(message.target, model, "target"),
        is_score=True,
    )


def _target_ids(target: Target, model: ServedModel, field: str) -> tuple[int, ...]:
    """A given target, or the beginning of one, which leaves room for one token at least."""
    limit = model.max_target_length
    if target.WhichOneof("value") == "text":
        check_bytes(target.text, limit, model, f"{field}.text")
        token_ids: Sequence[int] = model.target_tokenizer.encode(target.text)
    else:
        token_ids = target.token_ids.values
    if len(token_ids) >= limit:
        raise InvalidRequest(
            f"the given target has {len(token_ids)} tokens, and {model.name} takes at most {limit - 1}: "
            "send a shorter one",
            field=field,
        )
    check_ids(token_ids, model, f"{field}.token_ids.values")
    if model.eos_id in token_ids:
        raise InvalidRequest("the given target has the end of sequence in it: leave it out", field=field)
    return tuple(token_ids)


def _max_new_tokens(options: GenerateOptions, model: ServedModel, prefix_length: int) -> int:
    limit = model.max_target_length - prefix_length
    if not options.HasField("max_new_tokens"):
        return limit
    if not 1 <= options.max_new_tokens <= limit:
        raise InvalidRequest(
            f"max_new_tokens is {options.max_new_tokens}, and {model.name} takes 1 to {limit}",
            field="options.max_new_tokens",
        )
    return options.max_new_tokens


def _priority(priority: int, call: Call, field: str) -> int:
    """The priority, in the range that the caller's role allows."""
    _in_range("priority", priority, MOST_URGENT, LEAST_URGENT, field=field)
    if priority < 0 and not call.caller.is_admin:
        raise Forbidden(
            f"priority is {priority}, and below 0 it needs the role admin: send 0 to {LEAST_URGENT}"
        )
    return priority


def _length_bound(options: GenerateOptions, model: ServedModel) -> LengthBound | None:
    """Returns the bound of a request's targets by their sources, if there is one."""
    if not options.HasField("max_length_ratio"):
        return None if options.HasField("max_new_tokens") else model.length_bound
    ratio = _in_range("max_length_ratio", options.max_length_ratio, 0.0, _MAX_LENGTH_RATIO)
    return LengthBound(ratio, model.length_bound.constant if model.length_bound else 0) if ratio else None


def _of_part(part: Part, whole: Request, bound: LengthBound | None, model: ServedModel) -> Request:
    """Returns the request for one part of the source, whose own length bounds its target."""
    request = replace(whole, sources={SOURCE_IDS: part.source_ids})
    if bound is None:
        return request
    # A caller who forbids a short target wants the room of an ordinary one after it.
    longest = whole.constraints.min_new_tokens + bound.max_new_tokens(request.source_length)
    if longest >= whole.max_new_tokens:
        return request
    return replace(request, max_new_tokens=longest, is_bounded=bound is model.length_bound)


def _check_stop_sequences(options: GenerateOptions, model: ServedModel) -> None:
    field, stops = "options.stop_sequences", options.stop_sequences
    _in_range("the number of stop_sequences", len(stops), 0, _MAX_STOP_SEQUENCES, field=field)
    for index, stop in enumerate(stops):
        name = f"the length of stop_sequences[{index}]"
        _in_range(name, len(stop), 1, _MAX_STOP_LENGTH, field=f"{field}[{index}]")
        # Targets are compared as they are written, normalised. White space that is not written would have to
        # become a space, or nothing, and stop elsewhere than was asked for.
        normalised = model.target_tokenizer.normalize_inside(stop)
        if not normalised or _white_space(normalised) != _white_space(stop):
            raise InvalidRequest(
                f"stop_sequences[{index}] is {stop!r}, which {model.name} never writes: between words it "
                "writes single spaces, no line breaks, tabs or characters that are not seen",
                field=f"{field}[{index}]",
            )


def _white_space(text: str) -> list[str]:
    return [character for character in text if character.isspace()]


def _check_split(options: GenerateOptions) -> None:
    if options.long_source not in LongSource.values():
        raise InvalidRequest(
            f"long_source is {options.long_source}, which is none of {', '.join(LongSource.keys())}",
            field="options.long_source",
        )
    if options.long_source not in SPLITTING:
        return
    for name in ("target_prefix", "stop_sequences"):
        if options.HasField(name) if name == "target_prefix" else getattr(options, name):
            raise InvalidRequest(
                f"{name} is for one target, and a source that is split has several", field=f"options.{name}"
            )


def _source_language(options: GenerateOptions, model: ServedModel) -> str:
    """Returns the language for splitting: the request's, or the bundle's where the splitter knows it."""
    if not options.source_language:
        return known_language(model.source_language) or DEFAULT_LANGUAGE
    language = known_language(options.source_language)
    if language is None:
        raise InvalidRequest(
            f"source_language is {options.source_language[:100]!r}, by whose rules sentences cannot be "
            "split: send a BCP 47 tag such as en, ko or pt-BR, or leave it out",
            field="options.source_language",
        )
    return language


def _constraints(options: GenerateOptions, model: ServedModel, max_new_tokens: int) -> Constraints:
    """What is done to the logits, checked."""
    suppressed, biases = options.suppressed_token_ids, options.logit_bias
    for name, ids in (("suppressed_token_ids", suppressed), ("logit_bias", biases)):
        _in_range(f"the number of {name}", len(ids), 0, _MAX_ADJUSTED_IDS, field=f"options.{name}")
        check_ids(ids, model, f"options.{name}")
    if len(set(suppressed)) >= model.vocab_size:
        raise InvalidRequest(
            "every token is suppressed: leave at least one", field="options.suppressed_token_ids"
        )
    for bias in biases.values():
        _in_range("a logit_bias", bias, -_MAX_BIAS, _MAX_BIAS, field="options.logit_bias")
    penalty = options.repetition_penalty if options.HasField("repetition_penalty") else 1.0
    return Constraints(
        min_new_tokens=_in_range("min_new_tokens", options.min_new_tokens, 0, max_new_tokens),
        repetition_penalty=_in_range("repetition_penalty", penalty, 1 / _MAX_PENALTY, _MAX_PENALTY),
        no_repeat_ngram_size=_in_range(
            "no_repeat_ngram_size", options.no_repeat_ngram_size, 0, model.max_target_length
        ),
        suppressed_token_ids=frozenset(suppressed),
        logit_bias=dict(biases),
    )


def _sampling(options: GenerateOptions) -> Sampling | None:
    if not options.temperature:
        for name in ("top_k", "top_p", "min_p", "seed"):
            is_set = options.HasField(name) if name in ("top_p", "seed") else bool(getattr(options, name))
            if is_set:
                raise InvalidRequest(
                    f"{name} is for drawn tokens, and needs a temperature above 0",
                    field=f"options.{name}",
                )
        return None
    return Sampling(
        temperature=_in_range("temperature", options.temperature, _MIN_TEMPERATURE, _MAX_TEMPERATURE),
        top_k=_in_range("top_k", options.top_k, 0, 2**31),
        top_p=_in_range("top_p", options.top_p, 1e-6, 1.0) if options.HasField("top_p") else 1.0,
        min_p=_in_range("min_p", options.min_p, 0.0, 1.0),
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
    )


def _beam(options: GenerateOptions, model: ServedModel) -> Beam | None:
    most = min(MAX_BEAM_SIZE, model.max_request_slots)
    size = _in_range("beam_size", options.beam_size, 0, most)
    if size <= 1:
        for name in ("length_penalty", "early_stopping"):
            if options.HasField(name):
                raise InvalidRequest(
                    f"{name} is for beam search, and needs a beam_size of 2 or more", field=f"options.{name}"
                )
        return None
    if options.temperature:
        raise InvalidRequest(
            "beam_size and temperature are both set: search or draw", field="options.temperature"
        )
    alpha = options.length_penalty if options.HasField("length_penalty") else Beam.alpha
    return Beam(
        size=size,
        alpha=_in_range("length_penalty", alpha, -_MAX_ALPHA, _MAX_ALPHA),
        early_stopping=not options.HasField("early_stopping") or options.early_stopping,
    )


def _num_hypotheses(options: GenerateOptions, model: ServedModel) -> int:
    if options.beam_size > 1:
        most = options.beam_size
    else:
        most = min(MAX_HYPOTHESES, model.max_request_slots, model.vocab_size)
    return max(_in_range("num_hypotheses", options.num_hypotheses, 0, most), 1)


def _in_range(name: str, value: Number, least: Number, most: Number, *, field: str = "") -> Number:
    """The value; not a number is out of every range."""
    if not least <= value <= most:
        raise InvalidRequest(
            f"{name} is {value:g}, and must be from {least:g} to {most:g}", field=field or f"options.{name}"
        )
    return value
