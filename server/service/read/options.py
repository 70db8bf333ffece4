"""Reads the options of a message: the model's defaults, the checks, and one record for all of its sources."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from seq2seq_serve.bundle.manifest import Choice, EarlyStopping, LengthBound, LengthPenalty
from seq2seq_serve.bundle.names import CHOICES, SOURCE_LANGUAGE, TARGET_LANGUAGE
from seq2seq_serve.protos.languages import (
    LIKELY_SCRIPTS,
    MAX_TAG_LENGTH,
    is_known,
    is_other_language,
    subtags,
    tag_of,
)
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LENGTH_PENALTY_FORMULA_POWER,
    LENGTH_PENALTY_FORMULA_WU,
    LONG_SOURCE_REFUSE,
    LONG_SOURCE_SEQUENTIAL,
    LONG_SOURCE_SPLIT,
    LONG_SOURCE_SPLIT_ALWAYS,
    GenerateOptions,
    LengthPenaltyFormula,
    ScoreRequest,
    Target,
)
from seq2seq_serve.server.engine.request import NO_CONSTRAINTS, Array, Beam, Constraints, Request, Sampling
from seq2seq_serve.server.engine.stops import StopSequences
from seq2seq_serve.server.errors import Forbidden, InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.runner.voice_activity import SpeechRules
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.read.inputs import check_bytes, check_ids
from seq2seq_serve.server.service.read.sentences import DEFAULT_LANGUAGE, known_language
from seq2seq_serve.server.service.read.terms import Glossary
from seq2seq_serve.server.service.read.windows import (
    WindowRules,
    after_text,
    speech_rules,
    text_ids,
    window_rules,
)
from seq2seq_serve.server.telemetry.record import ADMIN, Caller

SPLITTING = (LONG_SOURCE_SPLIT, LONG_SOURCE_SPLIT_ALWAYS)

_MARK = re.compile(rf">>([^<>]{{1,{MAX_TAG_LENGTH}}})<<")
_MAX_STOP_LENGTH = 256
_MEMORY_PER_BYTE = 16  # of options without terms, if most of them are token ids, which become objects
_MAX_NEAR = 10  # names that an error lists as near
_MAX_ITEMS = {name: option.max_items for name, option in OPTIONS.items() if option.max_items is not None}
_FORMULAS: dict[LengthPenalty, LengthPenaltyFormula] = {
    "wu": LENGTH_PENALTY_FORMULA_WU,
    "power": LENGTH_PENALTY_FORMULA_POWER,
}
# Options that have the model's own value where the message does not set any, and the values that do nothing
_OF_THE_MODEL = {
    "min_new_tokens": 0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
}


_Case = Callable[[GenerateOptions, ServedModel], bool]
_NO_ATTENTION = "{model.name} is a model without attention: leave {name} out"
_SEVERAL_TARGETS = "{name} applies to one target, and a source that is split has several: leave it out"
_FOR_TEXTS = "{name} applies to a text, and {model.name} reads {sources}: leave it out"
_NEEDS_SEARCH = "{name} needs a beam search, and a temperature samples tokens: leave one of them out"
_SEVERAL_WINDOWS = (
    "{name} applies to one target, and a sound that is decoded in windows has several: leave it out"
)
# Which option is refused if a message sets it, beyond the ranges and needs of `OPTIONS`; when; and the error.
_REFUSALS: tuple[tuple[str, _Case, str], ...] = (
    (
        "num_hypotheses",
        lambda options, _: 1 < options.beam_size < options.num_hypotheses,
        "{name} is {options.num_hypotheses}, and a beam of size {options.beam_size} has no more",
    ),
    (
        "temperature",
        lambda options, _: options.beam_size > 1,
        "beam_size and {name} are both set: leave one of them out",
    ),
    (
        "timestamps",
        lambda _, model: model.manifest.timestamps is None,
        "{model.name} does not write {name}: leave them out",
    ),
    (
        "voice_activity",
        lambda _, model: not model.reads_sound,
        "{name} is for sounds, and {model.name} reads {sources}: leave it out",
    ),
    (
        "word_timestamps",
        lambda _, model: not model.sizing.num_alignment_heads,
        "{model.name} does not report the attention of single heads, by which words get their times: leave "
        "{name} out, or export the model again if it reads sounds",
    ),
    (
        "word_timestamps",
        lambda options, _: options.num_hypotheses > 1,
        "{name} apply to one target: leave num_hypotheses out",
    ),
    ("attention", lambda _, model: not model.sizing.num_hops, _NO_ATTENTION),
    ("word_alignment", lambda _, model: not model.sizing.num_hops, _NO_ATTENTION),
    (
        "word_alignment",
        lambda _, model: not model.reads_text,
        "{name} needs the words of a text, and {model.name} reads {sources}: leave it out, "
        "or ask for attention",
    ),
    (
        "long_source",
        lambda options, model: (
            options.long_source > LONG_SOURCE_REFUSE and not (model.reads_text or model.reads_sound)
        ),
        "{name} applies to a text or a sound, and {model.name} reads {sources}: leave it out",
    ),
    (
        "long_source",
        lambda options, model: _has_windows(options) and model.manifest.timestamps is None,
        "the {name} sequential is for sounds and a model that writes times, and {model.name} does not: "
        "choose another one",
    ),
    *(
        refusal
        for name in ("terms", "keep_placeholders")
        for refusal in (
            (name, lambda _, model: not model.reads_text, _FOR_TEXTS),
            (name, lambda options, _: options.temperature > 0, _NEEDS_SEARCH),
        )
    ),
    ("attention", lambda options, _: _has_windows(options), _SEVERAL_WINDOWS),
    ("target_prefix", lambda options, _: _has_windows(options), _SEVERAL_WINDOWS),
    ("stop_sequences", lambda options, _: _has_windows(options), _SEVERAL_WINDOWS),
    (
        "num_hypotheses",
        lambda options, _: _has_windows(options) and options.num_hypotheses > 1,
        _SEVERAL_WINDOWS,
    ),
    *(
        (
            name,
            lambda _, model: model.manifest.timestamps is None,
            "a {name} is for sounds and a model that writes times, and {model.name} does not: leave it out",
        )
        for name in (
            "prompt",
            "compression_ratio_threshold",
            "log_probability_threshold",
            "no_speech_threshold",
        )
    ),
    ("target_prefix", lambda options, _: options.long_source in SPLITTING, _SEVERAL_TARGETS),
    ("stop_sequences", lambda options, _: options.long_source in SPLITTING, _SEVERAL_TARGETS),
    (
        "encoder_no_repeat_ngram_size",
        lambda _, model: not model.reads_text,
        "{name} applies to a text, which {model.name} does not read: leave it out",
    ),
)


@dataclass(frozen=True)
class Decoding:
    """How the targets of a message are decoded or scored: its options, read once for all of its sources.

    Attributes:
        model: The model that the message names.
        request: The engine's request, without what depends on a source.
        options: Those of the message, with the model's defaults and without terms, which the glossary has.
        frame: The tokens before and after those of a source text.
        marks: The languages that a text may name at its beginning, as `>>fra<<`; None if the message names
            one, or the model reads none there.
        language: The language by whose rules sentences are split.
        bound: The bound on the length of targets relative to their sources, if there is one.
        windows: How the windows of a sound are decoded; None decodes sources at once.
        speech: Where speech begins and ends in a sound; None for all of the sound.
        num_prompt: The number of the prompt's tokens; the model may have room for the last ones only.
        glossary: The terms and placeholders that targets must have; None for none.
        num_bytes: The memory that it takes, as far as it grows with the options.
    """

    model: ServedModel
    request: Request
    options: GenerateOptions
    frame: tuple[tuple[int, ...], tuple[int, ...]]
    marks: Choice | None = None
    language: str = DEFAULT_LANGUAGE
    bound: LengthBound | None = None
    windows: WindowRules | None = None
    speech: SpeechRules | None = None
    num_prompt: int = 0
    glossary: Glossary | None = None
    num_bytes: int = 0


def read_options(
    given: GenerateOptions,
    model: ServedModel,
    caller: Caller,
    *,
    stream: bool,
    checkpoint: YieldPoint = lambda: None,
    glossary: Glossary | None = None,
) -> Decoding:
    """Reads and checks the options of a message.

    Args:
        given: The options of the message.
        model: The model that it names.
        caller: Its sender.
        stream: Whether the caller gets pieces.
        checkpoint: Is called before some of its terms; an error that it raises ends the work.
        glossary: That of options that differ from these in neither terms, placeholders nor the number of
            hypotheses, if it has been read.

    Raises:
        InvalidRequest: An option does not fit; the error names the field and what it must be.
        Forbidden: The role of the caller does not allow its priority.
    """
    for name, most in _MAX_ITEMS.items():
        if (number := len(getattr(given, name))) > most:  # before any items are copied
            _in_range(f"the number of {name}", number, 0, most, f"options.{name}")
    options = _with_defaults(given, model)
    chosen, template, language = _chosen(options, model), model.manifest.template, DEFAULT_LANGUAGE
    has_marks = TARGET_LANGUAGE in template.source_prefix and not options.target_language
    prefix_ids = forced_ids = _placed(template.forced, chosen)
    if options.HasField("target_prefix"):
        prefix_ids = _target_ids(options.target_prefix, forced_ids, model, "options.target_prefix")
    prompt, before = list[int](), tuple[int, ...]()
    if options.prompt and model.manifest.timestamps:
        prompt = text_ids(options.prompt, model, "options.prompt", "the prompt")
        before = after_text(prompt, model)
    max_new_tokens = _max_new_tokens(options, model, len(before) + len(prefix_ids), len(forced_ids))
    if options.min_new_tokens > max_new_tokens and not given.HasField("min_new_tokens"):
        options.min_new_tokens = max_new_tokens
    _check(options, model, max_new_tokens)
    is_sequential = options.long_source == LONG_SOURCE_SEQUENTIAL
    is_split = options.long_source in SPLITTING and model.manifest.timestamps is not None
    options.timestamps |= is_sequential or options.word_timestamps
    if options.source_language or options.long_source in SPLITTING:
        language = _source_language(options, model)
    bound = None if options.HasField("max_new_tokens") else model.manifest.length_bound
    if options.HasField("max_length_ratio"):
        constant = model.manifest.length_bound.constant if model.manifest.length_bound else 0
        bound = LengthBound(options.max_length_ratio, constant) if options.max_length_ratio else None
    start = (*before, *(template.start[:-1] if options.timestamps else template.start))
    detects = SOURCE_LANGUAGE in start and SOURCE_LANGUAGE not in chosen
    request = Request(
        request_id="",
        sources={},
        memory_length=0,
        max_new_tokens=max_new_tokens,
        arrival=0.0,
        attention=options.attention or options.word_alignment or options.word_timestamps,
        stream=stream,
        priority=_priority(options.priority, caller) if options.priority else 0,
        caller=caller.name,
        constraints=_constraints(options, model),
        sampling=_sampling(options) if options.temperature else None,
        beam=_beam(options) if options.beam_size > 1 else None,
        num_hypotheses=max(options.num_hypotheses, 1),
        prefix_ids=prefix_ids,
        start_ids=tuple(chosen.get(place) if isinstance(place, str) else place for place in start),
        detected_ids=tuple(sorted(model.manifest.choices[SOURCE_LANGUAGE].ids.values())) if detects else (),
        num_counted=len(forced_ids),
        begin_suppressed_ids=frozenset(model.manifest.generation.begin_suppressed_token_ids),
        ends_forced=model.manifest.generation.forced_eos_id is not None,
        stops=_stop_sequences(options, model) if options.stop_sequences else None,
        log_probabilities=options.log_probabilities,
        num_alternatives=options.num_alternatives,
        adapter=model.adapter,
    )
    if options.terms or options.keep_placeholders:
        glossary = glossary or Glossary(options, model, checkpoint)
        del options.terms[:]
        its, options = options, GenerateOptions()
        options.CopyFrom(its)  # the memory of a field is freed with that of its message
    return Decoding(
        model=model,
        request=request,
        options=options,
        frame=(_placed(template.source_prefix, chosen), _placed(template.source_suffix, chosen)),
        marks=model.manifest.choices[TARGET_LANGUAGE] if has_marks else None,
        language=language,
        bound=bound,
        windows=window_rules(options) if is_sequential or is_split else None,
        speech=speech_rules(options) if options.voice_activity else None,
        num_prompt=len(prompt),
        glossary=glossary,
        num_bytes=_MEMORY_PER_BYTE * options.ByteSize() + (glossary.num_bytes if glossary is not None else 0),
    )


def read_target(message: ScoreRequest, model: ServedModel, caller: Caller) -> Decoding:
    """Reads and checks the target of a message that wants its score; raises as `read_options`."""
    if message.target.WhichOneof("value") is None:
        raise InvalidRequest("the target is missing: give it a text or token ids", field="target")
    bounds = OPTIONS["priority"].bounds
    assert bounds is not None
    _in_range("priority", message.priority, *bounds, "priority")
    chosen, template = _chosen(message, model), model.manifest.template
    request = Request(
        request_id="",
        sources={},
        memory_length=0,
        max_new_tokens=1,
        arrival=0.0,
        priority=_priority(message.priority, caller),
        caller=caller.name,
        prefix_ids=_target_ids(message.target, _placed(template.forced, chosen), model, "target"),
        start_ids=_placed(template.start, chosen),
        is_score=True,
        adapter=model.adapter,
    )
    frame = _placed(template.source_prefix, chosen), _placed(template.source_suffix, chosen)
    has_marks = TARGET_LANGUAGE in template.source_prefix and not message.target_language
    marks = model.manifest.choices[TARGET_LANGUAGE] if has_marks else None
    return Decoding(model, request, GenerateOptions(), frame, marks)


def _has_windows(options: GenerateOptions) -> bool:
    return options.long_source == LONG_SOURCE_SEQUENTIAL


def _target_ids(
    target: Target, forced_ids: tuple[int, ...], model: ServedModel, field: str
) -> tuple[int, ...]:
    """Returns the forced ids, and those of a given target or of its beginning.

    Ids that begin with the forced ones, as those of an answer do, are the whole. They leave room for one more
    token.
    """
    limit = model.max_target_length - len(forced_ids)
    if target.WhichOneof("value") == "text":
        check_bytes(target.text, limit, model, f"{field}.text")
        given: Sequence[int] = model.target_tokenizer.encode(target.text)
    else:
        given = target.token_ids.values
    is_whole = bool(target.token_ids.values) and tuple(given[: len(forced_ids)]) == forced_ids
    token_ids = given[len(forced_ids) :] if is_whole else given
    if len(token_ids) >= limit:
        raise InvalidRequest(
            f"the given target has {len(token_ids)} tokens, and {model.name} takes at most {limit - 1}: "
            "send a shorter one",
            field=field,
        )
    check_ids(given, model, f"{field}.token_ids.values")
    if model.eos_id in token_ids:
        raise InvalidRequest("the given target contains the end of sequence: leave it out", field=field)
    return *forced_ids, *token_ids


def _with_defaults(options: GenerateOptions, model: ServedModel) -> GenerateOptions:
    """Returns the options with the model's own where the request does not set any."""
    defaults = model.manifest.generation
    result = GenerateOptions()
    result.CopyFrom(options)
    if not options.beam_size and not options.temperature and defaults.beam_size > 1:
        result.beam_size = defaults.beam_size
    if result.beam_size > 1:
        if not options.HasField("length_penalty"):
            result.length_penalty = defaults.length_penalty
        if not options.length_penalty_formula:
            result.length_penalty_formula = _FORMULAS[defaults.length_penalty_formula]
        if not options.HasField("early_stopping"):
            result.early_stopping = defaults.early_stopping is True
            result.exhaustive_search |= defaults.early_stopping == "never"
    for name, off in _OF_THE_MODEL.items():
        value = getattr(defaults, name)
        if value != off and not options.HasField(name):
            setattr(result, name, value)
    is_whole = options.num_hypotheses > 1 or options.stop_sequences or options.HasField("target_prefix")
    if defaults.splits_sentences and not options.long_source and not is_whole:
        result.long_source = LONG_SOURCE_SPLIT_ALWAYS
    return result


def _chosen(options: GenerateOptions | ScoreRequest, model: ServedModel) -> dict[str, int]:
    """Returns the token of each of the model's choices, by the name of its option."""
    chosen = {}
    for name in CHOICES:
        given, field = (
            getattr(options, name),
            name if isinstance(options, ScoreRequest) else f"options.{name}",
        )
        if len(given) > MAX_TAG_LENGTH:
            raise InvalidRequest(
                f"{name} has {len(given)} characters: send at most {MAX_TAG_LENGTH}", field=field
            )
        choice = model.manifest.choices.get(name)
        if choice is None:
            if given:
                _check_only(name, given, model, field)
            continue
        if not given and not choice.default:
            if name == SOURCE_LANGUAGE and model.reads_sound and not isinstance(options, ScoreRequest):
                continue  # it is detected
            if name in model.manifest.template.source_prefix and name == TARGET_LANGUAGE:
                continue  # a text may name it
            raise InvalidRequest(f"{model.name} needs a {name}: {_names(choice)}", field=field)
        found = named_choice(given or choice.default, choice)
        if found is None:
            near = _near(given, choice)
            hint = f" (near it: {', '.join(near)})" if near else ""
            raise InvalidRequest(
                f"{name} is {given[:100]!r}{hint}, and {model.name} has {_names(choice)}", field=field
            )
        chosen[name] = choice.ids[found]
    return chosen


def _check_only(name: str, given: str, model: ServedModel, field: str) -> None:
    """Refuses names if the model does not have a choice; its own languages may be named.

    If the languages of a model of texts are not known, any may be.
    """
    manifest = model.manifest
    own = {SOURCE_LANGUAGE: manifest.source_language, TARGET_LANGUAGE: manifest.target_language}
    if model.reads_sound:
        own[SOURCE_LANGUAGE] = model.only_language
    if name not in own or (name == TARGET_LANGUAGE and not (own[name] or model.reads_text)):
        raise InvalidRequest(f"{model.name} does not have a {name} to choose: leave it out", field=field)
    if is_known(own[name]) and is_other_language(tag_of(given), own[name]):
        raise InvalidRequest(
            f"{name} is {given[:100]!r}, and {model.name} has only {own[name]}: leave it out, or choose "
            "another model",
            field=field,
        )


def named_choice(given: str, choice: Choice) -> str | None:
    """Returns the name of a choice that a caller means; None if there is none, or several.

    That is the given name itself; the same tag in another spelling, such as ko_KR for ko-kr or kor_Hang for
    ko-Hang; the tag without its last parts, such as ko for ko-KR (RFC 4647, section 3.4); or, of a language
    given alone, the only name, such as ko_KR for ko, or that in the usual script, such as zho_Hans for zh.
    """
    if given in choice.ids:
        return given
    if len(given) > MAX_TAG_LENGTH:
        return None
    tags, wanted = {name: subtags(name) for name in choice.ids}, subtags(given)
    likely = [wanted[0], LIKELY_SCRIPTS.get("-".join(wanted))]
    found = [name for name, tag in tags.items() if tag == likely] or [
        name for name, tag in tags.items() if tag[:1] == wanted
    ]
    longest = max(map(len, tags.values()), default=0)
    for length in range(min(len(wanted), longest), 0, -1):
        found = [name for name, tag in tags.items() if tag == wanted[:length]] or found
        if len(found) == 1:
            return found[0]
    return None


def _near(given: str, choice: Choice) -> list[str]:
    """Returns the first of the names that begin like a given one."""
    beginning = given.replace("_", "-").split("-")[0].casefold()
    if not beginning:
        return []
    return sorted(name for name in choice.ids if name.casefold().startswith(beginning))[:_MAX_NEAR]


def _names(choice: Choice) -> str:
    return ", ".join(sorted(choice.ids))


def _placed(places: Iterable[int | str], chosen: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ids of a frame's places, without a language that the text has to name."""
    ids = (chosen.get(place) if isinstance(place, str) else place for place in places)
    return tuple(one for one in ids if one is not None)


def with_mark(text: str, decoding: Decoding, marks: Choice, field: str) -> tuple[str, Decoding]:
    """Returns a text without the language that it names at its beginning, and the decoding into that one.

    Args:
        text: Such as `>>fra<< Good morning`; with another name between the brackets it stays as it is.
        decoding: How its target is decoded, by the model's default if the text names no language.
        marks: The model's languages.
        field: The path of the text in the request.

    Raises:
        InvalidRequest: The text does not name a language, and the model has no default.
    """
    found = _MARK.match(text)
    if found is None or found[1] not in marks.ids:
        if not marks.default:
            raise InvalidRequest(
                f"{decoding.model.name} needs a target_language, or a text that begins with it, such as "
                f">>{next(iter(marks.ids))}<<: {_names(marks)}",
                field=field,
            )
        return text, decoding
    prefix = _placed(decoding.model.manifest.template.source_prefix, {TARGET_LANGUAGE: marks.ids[found[1]]})
    return text[found.end() :], replace(decoding, frame=(prefix, decoding.frame[1]))


def _max_new_tokens(options: GenerateOptions, model: ServedModel, num_prefix: int, num_forced: int) -> int:
    """Returns the limit after the prefix. The forced tokens at its beginning count for a given limit."""
    limit = model.max_target_length - num_prefix
    if not options.HasField("max_new_tokens"):
        default = model.manifest.generation.max_new_tokens
        return limit if default is None else max(min(limit, default - num_forced), 1)
    if not 1 + num_forced <= options.max_new_tokens <= limit + num_forced:
        raise InvalidRequest(
            f"max_new_tokens is {options.max_new_tokens}, and {model.name} takes {1 + num_forced} to "
            f"{limit + num_forced}",
            field="options.max_new_tokens",
        )
    return options.max_new_tokens - num_forced


def _priority(priority: int, caller: Caller) -> int:
    """Returns the priority, if the role of the caller allows it."""
    if priority < 0 and ADMIN not in caller.roles:
        raise Forbidden(f"priority is {priority}, and below 0 it needs the role admin: send 0 or more")
    return priority


def _stop_sequences(options: GenerateOptions, model: ServedModel) -> StopSequences:
    """Returns the rule that ends targets at the stop sequences.

    Stop sequences are compared with normalised text. White space that the model never writes would have to
    become a space or nothing, and would then stop at a place that the caller did not ask for.
    """
    texts = []
    for index, stop in enumerate(options.stop_sequences):
        field = f"options.stop_sequences[{index}]"
        _in_range(f"the length of stop_sequences[{index}]", len(stop), 1, _MAX_STOP_LENGTH, field)
        normalised = model.target_tokenizer.normalize_inside(stop)
        if not normalised or _white_space(normalised) != _white_space(stop):
            raise InvalidRequest(
                f"stop_sequences[{index}] is {stop!r}, which {model.name} never writes: between words it "
                "writes single spaces, no line breaks, tabs or invisible characters",
                field=field,
            )
        texts.append(normalised)
    return StopSequences(texts, model.target_tokenizer.token_bytes)


def _white_space(text: str) -> list[str]:
    return [character for character in text if character.isspace()]


def _source_language(options: GenerateOptions, model: ServedModel) -> str:
    """Returns the language for splitting: the request's, or the bundle's if the splitter knows it."""
    if not options.source_language:
        return known_language(model.manifest.source_language) or DEFAULT_LANGUAGE
    language = known_language(options.source_language)
    own = model.manifest.source_language
    if language is None and (SOURCE_LANGUAGE in model.manifest.choices or is_known(own)):
        return DEFAULT_LANGUAGE
    if language is None:
        raise InvalidRequest(
            f"source_language is {options.source_language[:100]!r}, and the server cannot split its "
            "sentences: send a BCP 47 tag such as en, ko or pt-BR, or leave it out",
            field="options.source_language",
        )
    return language


def _check(options: GenerateOptions, model: ServedModel, max_new_tokens: int) -> None:
    """Refuses options that are out of their range, or do not go with the model or with other options."""
    limits = {
        "min_new_tokens": max_new_tokens,
        "no_repeat_ngram_size": model.max_target_length,
        "top_k": 2**31,
        "beam_size": model.sizing.num_slots,
        "num_hypotheses": min(model.sizing.num_slots, model.sizing.vocab_size),
    }
    fields = options.ListFields()
    for descriptor, value in fields:
        name, option, field = descriptor.name, OPTIONS[descriptor.name], f"options.{descriptor.name}"
        if option.needs and getattr(options, option.needs) <= option.above:
            raise InvalidRequest(f"{name} needs {option.need}", field=field)
        if (enum := descriptor.enum_type) is not None and value not in enum.values_by_number:
            raise InvalidRequest(
                f"{name} is {value}, and must be one of {', '.join(enum.values_by_name)}", field=field
            )
        if option.bounds is not None and (value or name != "temperature"):  # 0 turns sampling off
            least, most = option.bounds
            for number in value.values() if name == "logit_bias" else [value]:
                number = round(number, 6)  # the bounds are not exact in float32
                _in_range(name, number, least, min(most, limits.get(name, most)), field)
    given = {descriptor.name for descriptor, value in fields if value}
    for name, is_case, message in _REFUSALS:
        if name in given and is_case(options, model):
            sources = ", ".join(model.sources)
            text = message.format(name=name, options=options, model=model, sources=sources)
            raise InvalidRequest(text, field=f"options.{name}")


def _constraints(options: GenerateOptions, model: ServedModel) -> Constraints:
    """Returns the adjustments of the logits."""
    suppressed, biases = options.suppressed_token_ids, options.logit_bias
    for name, ids in (("suppressed_token_ids", suppressed), ("logit_bias", biases)):
        if ids:
            check_ids(ids, model, f"options.{name}")
    defaults, times = model.manifest.generation, model.manifest.timestamps if options.timestamps else None
    if len({*suppressed, *defaults.suppressed_token_ids}) >= model.sizing.vocab_size:
        raise InvalidRequest(
            "every token is suppressed: leave at least one", field="options.suppressed_token_ids"
        )
    constraints = Constraints(
        min_new_tokens=options.min_new_tokens,
        repetition_penalty=options.repetition_penalty or 1.0,
        no_repeat_ngram_size=options.no_repeat_ngram_size,
        suppressed_token_ids=frozenset(suppressed) | (frozenset() if times is None else {times.off_id}),
        logit_bias=dict(biases),
        forbidden_after=_forbidden_after(defaults.forbidden_sequences)
        if defaults.forbidden_sequences
        else {},
        repeats_start=defaults.repeats_start,
        is_renormalized=defaults.is_renormalized,
        times=times,
        penalizes_log_probabilities=defaults.penalizes_log_probabilities,
    )
    forbidden = (*defaults.suppressed_token_ids, *defaults.begin_suppressed_token_ids)
    # If no logit ever changes, it does not matter how changes are made.
    is_kept = constraints.change_logits or forbidden or options.encoder_no_repeat_ngram_size
    return constraints if is_kept else NO_CONSTRAINTS


def without_ngrams(constraints: Constraints, size: int, token_ids: Array) -> Constraints:
    """Returns the constraints without the n-grams of a source."""
    ids = token_ids.tolist()
    ngrams = [tuple(ids[end - size : end]) for end in range(size, len(ids) + 1)]
    after = dict(constraints.forbidden_after)
    for before, lasts in _forbidden_after(ngrams).items():
        after[before] = after.get(before, frozenset()) | lasts
    return replace(constraints, forbidden_after=after)


def _forbidden_after(sequences: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], frozenset[int]]:
    """Returns the last tokens of forbidden sequences, by the tokens before them."""
    after: dict[tuple[int, ...], set[int]] = {}
    for *before, last in sequences:
        after.setdefault(tuple(before), set()).add(last)
    return {before: frozenset(lasts) for before, lasts in after.items()}


def _sampling(options: GenerateOptions) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p if options.HasField("top_p") else 1.0,
        min_p=options.min_p,
        seed=options.seed,
    )


def _beam(options: GenerateOptions) -> Beam:
    # `_with_defaults` has set the options.
    (formula,) = (name for name, number in _FORMULAS.items() if number == options.length_penalty_formula)
    early_stopping: EarlyStopping = "never" if options.exhaustive_search else options.early_stopping
    alpha = round(options.length_penalty, 6)  # the message has float32
    return Beam(options.beam_size, alpha, formula, early_stopping)


def _in_range(name: str, value: float, least: float, most: float, field: str) -> None:
    """Refuses a value out of its range. NaN is out of every range."""
    if not least <= value <= most:
        raise InvalidRequest(f"{name} is {value:g}, and must be from {least:g} to {most:g}", field=field)
