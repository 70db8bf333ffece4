"""The options of a generation, described once: `OPTIONS` has each field of `GenerateOptions`.

The client's flags, the parameters of the Open Inference Protocol, the ranges that the server checks, and a
table in docs/protocols.md come from here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SPLIT_ALWAYS,
    LONG_SOURCE_TRUNCATE,
    GenerateOptions,
    LengthPenaltyFormula,
    LongSource,
    Target,
)

Options = GenerateOptions | Mapping[str, Any]

_FIELDS = GenerateOptions.DESCRIPTOR.fields_by_name
_LONG_SOURCES = {
    name.removeprefix("LONG_SOURCE_").lower(): number for name, number in LongSource.items() if number
}
_FORMULAS = {
    name.removeprefix("LENGTH_PENALTY_FORMULA_").lower(): number
    for name, number in LengthPenaltyFormula.items()
    if number
}


@dataclass(frozen=True)
class _Form:
    """How a value is written as text.

    Attributes:
        metavar: Stands for the value in a command's help.
        expected: A description of a right value, for errors.
        read: Returns the value of the protobuf field.
    """

    metavar: str
    expected: str
    read: Callable[[str], Any]


def _ids(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("[") else list(map(int, text.split(",")))


def _biases(text: str) -> dict[int, float]:
    if text.lstrip().startswith("{"):
        return {int(token_id): bias for token_id, bias in json.loads(text).items()}
    pairs = [pair.split("=") for pair in text.split(",")]
    return {int(token_id): float(bias) for token_id, bias in pairs}


def _texts(text: str) -> Any:
    return json.loads(text) if text.lstrip().startswith("[") else text.split("\n")


def _terms(text: str) -> Any:
    if text.lstrip().startswith("["):
        return json.loads(text)
    if text.lstrip().startswith("{"):
        pairs = json.loads(text, object_pairs_hook=list)  # a term may be there twice
        return [{"source": source, "target": target} for source, target in pairs]
    pairs = [line.partition("=") for line in text.split("\n") if line.strip()]
    if not pairs or not all(sign for _, sign, _ in pairs):
        raise ValueError
    return [{"source": source.strip(), "target": target.strip()} for source, _, target in pairs]


def terms_of(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Returns the terms that are translated by the same words everywhere, from sources with their targets."""
    return [{"source": source, "target": target} for source, target in pairs]


def _word(words: dict[str, int]) -> _Form:
    return _Form("WHAT", " or ".join(", ".join(words).rsplit(", ", 1)), words.__getitem__)


_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: _Form("N", "a 32-bit integer", int),
    FieldDescriptor.CPPTYPE_INT64: _Form("N", "a 64-bit integer", int),
    FieldDescriptor.CPPTYPE_UINT64: _Form("N", "a non-negative 64-bit integer", int),
}
_SCALARS = _INTEGERS | {
    FieldDescriptor.CPPTYPE_BOOL: _Form("BOOL", "true or false", {"true": True, "false": False}.__getitem__),
    FieldDescriptor.CPPTYPE_FLOAT: _Form("X", "a number", float),
    FieldDescriptor.CPPTYPE_STRING: _Form("NAME", "a string", str),
}
# Options that are not a single number or word. They are text in every interface.
_WRITTEN = {
    "suppressed_token_ids": _Form("ID,ID", "a string of token ids, such as 5,17 or [5, 17]", _ids),
    "logit_bias": _Form(
        "ID=X,ID=X", 'a string of biases by token id, such as 5=-1.5,17=2 or {"5": -1.5}', _biases
    ),
    "stop_sequences": _Form("TEXT", "a text, texts on lines of their own, or a JSON list of texts", _texts),
    "terms": _Form(
        "SOURCE=TARGET",
        "a term such as machine=Maschine, terms on lines of their own, or JSON such as "
        '{"machine": "Maschine"} or [{"source": "US", "target": "USA", "case_sensitive": true}]',
        _terms,
    ),
    "target_prefix": _Form("TEXT", "a text", lambda text: Target(text=text)),
    "long_source": _word(_LONG_SOURCES),
    "length_penalty_formula": _word(_FORMULAS),
}


@dataclass(frozen=True)
class Option:
    """One option of a generation.

    Attributes:
        name: The field of `GenerateOptions`.
        effect: What the option does. Names of other options are between backticks.
        default: What happens without the option; empty where `effect` says it.
        bounds: The smallest and the largest number that is accepted, for a map the bounds of its values. The
            largest may depend on the model, and is infinite here.
        max_items: The most elements of a list or map; None for other options.
        needs: Another option, without which this one is refused; empty for most.
        above: The value that it must exceed.
    """

    name: str
    effect: str
    default: str = ""
    bounds: tuple[float, float] | None = None
    max_items: int | None = None
    needs: str = ""
    above: int = 0

    @property
    def form(self) -> _Form:
        """How a value is written."""
        return _WRITTEN.get(self.name) or _SCALARS[_FIELDS[self.name].cpp_type]

    @property
    def flag(self) -> str:
        """The flag of the commands."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def need(self) -> str:
        """What the option needs, for errors; empty if it does not need another one."""
        if self.needs == "long_source":
            return f"the long_source {self._ways}"
        return self.needs and f"a {self.needs} above {self.above}"

    @property
    def _ways(self) -> str:
        """The values of `long_source` that the option goes with."""
        *names, last = [name for name, number in _LONG_SOURCES.items() if number > self.above]
        return f"{', '.join(names)} or {last}" if names else last

    @property
    def is_switch(self) -> bool:
        """Whether the option is off or on, and off by default."""
        field = _FIELDS[self.name]
        return field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and not field.has_presence

    @property
    def help(self) -> str:
        """Returns the effect, the range and the default."""
        limits = [f"{least:g} to {most:g}" for least, most in [self.bounds or (0, inf)] if most < inf]
        limits += [f"at most {self.max_items} of them"] if self.max_items else []
        notes = "; ".join(limits + [f"default: {self.default}"] * bool(self.default))
        value = f" {self._ways}" if self.needs == "long_source" else ""
        effect = f"with `{self.needs}`{value}: {self.effect}" if self.needs else self.effect
        return f"{effect} ({notes})" if notes else effect

    def read(self, value: bool | int | float | str, *, is_text: bool = False) -> GenerateOptions:
        """Returns options in which only this one is set.

        Args:
            value: Of the field's own type; the text of a list, a map, a message or an enum.
            is_text: Whether `value` is text, whatever the field's type.

        Raises:
            ValueError: The value does not fit. The message states what is expected.
        """
        kind = _FIELDS[self.name].cpp_type
        given: Any = value
        try:
            if is_text or self.name in _WRITTEN:
                given = self.form.read(given)
            elif isinstance(value, bool) != (kind == FieldDescriptor.CPPTYPE_BOOL):
                raise TypeError
            elif kind in _INTEGERS and isinstance(value, float) and value.is_integer():
                given = int(value)
            options = GenerateOptions(**{self.name: given})
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError, RecursionError) as error:
            raise ValueError(f"must be {self.form.expected}") from error
        if self.bounds is not None and not options.ListFields() and self.bounds[0] > 0:
            raise ValueError(f"must be from {self.bounds[0]:g} to {self.bounds[1]:g}")  # 0 would be unset
        return options


_ALL = (
    Option("max_new_tokens", "the maximum number of target tokens", "the limit of `max_length_ratio`"),
    Option(
        "max_length_ratio",
        "limit a target to X times the tokens of its source, plus a constant of the model; 0: only to the "
        "model's own limit",
        "the model's own ratio; with `max_new_tokens`: 0",
        (0, 1000),
    ),
    Option("priority", "lower is more urgent; below 0 needs the role admin", "0", (-10, 10)),
    Option("min_new_tokens", "the minimum number of target tokens", "the model's, or 0", (0, inf)),
    Option(
        "repetition_penalty",
        "above 1: make tokens of the target less likely to repeat",
        "the model's, or 1",
        (0.01, 100),
    ),
    Option(
        "no_repeat_ngram_size", "never repeat a sequence of N tokens; 0: off", "the model's, or 0", (0, inf)
    ),
    Option(
        "encoder_no_repeat_ngram_size",
        "never repeat a sequence of N tokens of the source; 0: off",
        "the model's, or 0",
        (0, inf),
    ),
    Option("suppressed_token_ids", "never select these tokens", max_items=1024),
    Option("logit_bias", "add X to the logit of token ID", "", (-1000, 1000), max_items=1024),
    Option("stop_sequences", "end the target before TEXT; several on separate lines", max_items=16),
    Option("target_prefix", "start the target with TEXT"),
    Option(
        "terms",
        "translate SOURCE by TARGET, wherever it occurs in the source as whole words",
        max_items=1000,
    ),
    Option(
        "keep_placeholders",
        "keep URLs, e-mail addresses, tags, and variables such as {name}, ${name}, %s and %(name)s",
    ),
    Option(
        "beam_size",
        "search with N hypotheses at once; 1: take the most probable token",
        "the model's, or 1",
        (1, 16),
    ),
    Option(
        "length_penalty",
        "the exponent alpha; 0: none",
        "the model's, or 0.6",
        (-10, 10),
        needs="beam_size",
        above=1,
    ),
    Option(
        "length_penalty_formula",
        "wu: divide by ((5 + n) / 6)^alpha (Wu et al. 2016); power: by n^alpha",
        "the model's, or wu",
        needs="beam_size",
        above=1,
    ),
    Option(
        "early_stopping",
        "true: stop at as many complete hypotheses as beams; false: only if the best running one is worse",
        "the model's, or true",
        needs="beam_size",
        above=1,
    ),
    Option(
        "exhaustive_search",
        "stop only when no running hypothesis can improve",
        needs="beam_size",
        above=1,
    ),
    Option(
        "num_hypotheses",
        "return N hypotheses for each text: with a `beam_size` above 1 the best of the beam, with a "
        "`temperature` N samples, otherwise one for each of the N most probable first tokens",
        "1",
        (1, 16),
    ),
    Option("temperature", "divide logits by X and sample tokens; 0: off", "0", (0.01, 100)),
    Option("top_k", "sample from the N most probable tokens", "all", (0, inf), needs="temperature"),
    Option(
        "top_p",
        "sample from the fewest most probable tokens whose probabilities add up to X",
        "1",
        (1e-6, 1),
        needs="temperature",
    ),
    Option(
        "min_p",
        "sample from tokens that are at least X times as probable as the best",
        "0",
        (0, 1),
        needs="temperature",
    ),
    Option("seed", "sample the same tokens each time", "the server chooses a seed", needs="temperature"),
    Option("log_probabilities", "return the log-probability of every token"),
    Option("num_alternatives", "return the N most probable tokens at every position", "0", (0, 32)),
    Option("attention", "return the attention of every target token over the source tokens"),
    Option("word_alignment", "return the pairs of source and target words that belong together"),
    Option(
        "long_source",
        "refuse: a text or sound that is too long for the model is an error; truncate: leave out its end; "
        "split: translate each line separately (each sentence of a line that is too long), and cut a sound "
        "at quiet places; split_always: translate each sentence separately, even of a short text; "
        "sequential: read a sound in windows, each from where the times of the previous one end",
        "refuse; for models that learned from single sentences split_always, except with `target_prefix`, "
        "`stop_sequences` or several `num_hypotheses`",
    ),
    Option(
        "source_language",
        "the language of the source; its rules decide where sentences end",
        "the model's, or the one detected in a sound",
    ),
    Option("target_language", "the language of the target, for models that write several", "the model's"),
    Option("task", "the task, for models with several", "the model's"),
    Option("timestamps", "return segments with their times, for models that read sounds"),
    Option("word_timestamps", "return the times of every word, for models that read sounds"),
    Option(
        "voice_activity",
        "read only the speech of a sound, joined without gaps",
    ),
    Option(
        "prompt",
        "text that the model reads before the sound, such as names that are hard to spell",
        "none",
    ),
    Option(
        "condition_on_previous",
        "read each window with the text of the previous ones",
        "true",
        needs="long_source",
        above=LONG_SOURCE_SPLIT_ALWAYS,
    ),
    Option(
        "compression_ratio_threshold",
        "read a window again at a higher temperature if its text compresses better than X: it repeats itself",
        "2.4",
        (0, 1000),
        needs="long_source",
        above=LONG_SOURCE_TRUNCATE,
    ),
    Option(
        "log_probability_threshold",
        "read a window again at a higher temperature if the mean log-probability of its tokens is below X",
        "-1",
        (-1000, 0),
        needs="long_source",
        above=LONG_SOURCE_TRUNCATE,
    ),
    Option(
        "no_speech_threshold",
        "give a window an empty text if its mean log-probability is below `log_probability_threshold` and "
        "its probability of no speech is above X",
        "0.6",
        (0, 1),
        needs="long_source",
        above=LONG_SOURCE_TRUNCATE,
    ),
)
OPTIONS = {option.name: option for option in _ALL}


def _of_another_type(values: Mapping[str, Any]) -> TypeError | None:
    """Returns the error for the first value that its option does not take."""
    for name, value in values.items():
        try:
            GenerateOptions(**{name: value})
        except TypeError:
            return TypeError(f"{name} is {value!r:.100}, and must be {OPTIONS[name].form.expected}")
    return None


def options_of(given: Options | None) -> GenerateOptions:
    """Returns the options of a program as a message. Texts are parsed like the values of the command's flags.

    Raises:
        TypeError: There is no such option, or its value is of another type.
        ValueError: A value does not fit. The message names the option and states what is expected.
    """
    if not isinstance(given, Mapping):
        return given or GenerateOptions()
    if unknown := given.keys() - OPTIONS.keys():
        raise TypeError(f"there is no option {min(unknown)}")
    values = {name: value for name, value in given.items() if not isinstance(value, str)}
    terms = values.get("terms")
    if isinstance(terms, Mapping):
        values["terms"] = terms_of(terms.items())
    elif isinstance(terms, list) and all(isinstance(one, tuple) and len(one) == 2 for one in terms):
        values["terms"] = terms_of(terms)  # of `read_glossary`
    try:
        options = GenerateOptions(**values)
    except TypeError as error:
        raise _of_another_type(values) or error from error
    for name, value in given.items():
        if isinstance(value, str) or (value == 0 and OPTIONS[name].bounds is not None):
            try:
                options.MergeFrom(OPTIONS[name].read(value, is_text=isinstance(value, str)))
            except ValueError as error:
                raise ValueError(f"{name} is {value!r}, and {error}") from error
    return options
