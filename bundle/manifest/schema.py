"""The records of a manifest, as `manifest.json` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import ConfigDict, Field

from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, Form, Precision, Role, Verb
from seq2seq_serve.bundle.pictures import Resampling

Count = Annotated[int, Field(ge=1)]

_BFLOAT16 = "bfloat16"
_ONNX_BFLOAT16 = 16  # TensorProto.DataType


@dataclass(frozen=True)
class _Record:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class TensorSpec(_Record):
    """One input or output of a graph.

    Attributes:
        dtype: numpy's name of the element type, or `bfloat16`, which numpy lacks.
        axes: The size of each axis, or its name if the size varies (`bundle.names.Axis`).
    """

    name: str
    dtype: str
    axes: tuple[int | str, ...]
    role: Role

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape, with the sizes of the named axes given."""
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)

    @property
    def storage(self) -> str:
        """The name of a numpy type for the elements; for a type that numpy lacks, one for their bits."""
        return "uint16" if self.dtype == _BFLOAT16 else self.dtype

    @property
    def element_type(self) -> str | int:
        """ONNX Runtime's element type: numpy's name, or ONNX's number of a type that numpy lacks."""
        return _ONNX_BFLOAT16 if self.dtype == _BFLOAT16 else self.dtype


@dataclass(frozen=True)
class FileSpec(_Record):
    """One file of the bundle, with its path relative to the folder."""

    file: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class GraphSpec(_Record):
    """One graph and all its tensors."""

    file: FileSpec
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class Parity(_Record):
    """The export's comparison of one precision with the trained PyTorch model.

    Attributes:
        max_log_probability_difference: The largest difference over all compared positions and tokens.
        tolerance: The largest difference that the export allowed.
        shapes: `(batch, source length, target length)` of each comparison; the export's examples had others.
        score: The metric of these graphs' greedy search on dev sources, in percent; None if it was not
            measured.
        reference_score: The same of the trained PyTorch model.
        metric: "bleu", "chrf" or "accuracy".
        mean_log_probability_difference: The mean over the references' tokens; None if it was not measured.
        equal_tokens: The share of tokens of the model's own targets that these graphs select, too; None if it
            was not measured.
    """

    max_log_probability_difference: float
    tolerance: float | None
    shapes: tuple[tuple[int, int, int], ...]
    score: float | None = None
    reference_score: float | None = None
    metric: str = "bleu"
    mean_log_probability_difference: float | None = None
    equal_tokens: float | None = None


@dataclass(frozen=True)
class AdaptedPart(_Record):
    """A trained layer that adapters may change, by its name in the trained model."""

    name: str
    num_outputs: Count


@dataclass(frozen=True)
class AdaptedMap(_Record):
    """A linear map of the graphs with low-rank terms: trained layers side by side, which read one input."""

    num_inputs: Count
    parts: Annotated[tuple[AdaptedPart, ...], Field(min_length=1)]

    @property
    def num_units(self) -> int:
        """The numbers of an adapter of rank 1: for each part the inputs' weights, and all outputs'."""
        return len(self.parts) * self.num_inputs + sum(part.num_outputs for part in self.parts)


@dataclass(frozen=True)
class Variant(_Record):
    """The graphs in one precision, which share one file of weights.

    Attributes:
        adapter_scales: By the name of an adapted part, the factor of its outputs in these graphs, if not 1.
    """

    graphs: dict[Verb, GraphSpec]
    weights: FileSpec
    parity: Parity
    adapter_scales: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SpecialIds(_Record):
    """The special tokens' ids.

    Attributes:
        pad_id: Pads sources.
        eos_ids: Each of these tokens ends a target; the first one ends a target that is scored.
    """

    pad_id: int
    eos_ids: Annotated[tuple[int, ...], Field(min_length=1)]


TemplateTokens = tuple[int | str, ...]
"""Token ids in order; a string is the name of a choice (`Manifest.choices`), and stands for the chosen id."""


@dataclass(frozen=True)
class Choice(_Record):
    """Something that a request chooses by a name, such as a language.

    Attributes:
        ids: The token of each name.
        default: The name if a request does not choose; empty if it has to.
    """

    ids: dict[str, int]
    default: str = ""


@dataclass(frozen=True)
class TokenTemplate(_Record):
    """The tokens around each source text and before each target.

    Attributes:
        start: The tokens that the decoder reads before a target; they are not part of it. Exactly one for a
            model without a `decode` graph.
        forced: The first tokens of every target. They are part of it, and its length counts them.
        source_prefix: The tokens before those of a source text.
        source_suffix: The tokens after them, end of sequence included.
    """

    start: Annotated[TemplateTokens, Field(min_length=1)]
    forced: TemplateTokens = ()
    source_prefix: TemplateTokens = ()
    source_suffix: TemplateTokens = ()

    @property
    def num_read_first(self) -> int:
        """The number of tokens that the decoder reads before it writes a token of its own."""
        return len(self.start) + len(self.forced)


@dataclass(frozen=True)
class Timestamps(_Record):
    """The tokens of times within a sound (Radford et al. 2022, arXiv:2212.04356, section 2.3).

    Attributes:
        first_id: The token of 0 seconds.
        last_id: The token of the latest time. All ids between the two are times, and those after it are words
            that were added to the vocabulary.
        step_seconds: From the time of one token to that of the next.
        off_id: The last token of `Frames.start`; a request for timestamps leaves it out.
        max_first: The most steps before the first time of a target; None for no limit.
    """

    first_id: int
    last_id: int
    step_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    off_id: int
    max_first: int | None = None

    def has(self, token_id: int) -> bool:
        """Whether a token is a time."""
        return self.first_id <= token_id <= self.last_id

    @property
    def no_speech_id(self) -> int:
        """The token directly after the first one of `Frames.start` if nobody speaks."""
        return self.off_id - 1  # in the vocabularies of all models with times

    @property
    def previous_id(self) -> int:
        """The token before a text that precedes the target."""
        return self.off_id - 2


LengthPenalty = Literal["wu", "power"]
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Generation(_Record):
    """The options of a request that does not set them, and the rules of the model's search.

    Attributes:
        beam_size: 1 selects the most probable token at each position.
        length_penalty: The exponent of the length penalty.
        length_penalty_formula: "wu" divides by ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14), "power" by
            n^alpha; n counts the tokens of `Frames.forced`.
        early_stopping: Ends a beam search once `beam_size` hypotheses are complete (true); when also the best
            running hypothesis would have a worse score at its present length (false); or when also none can
            become better ("never").
        max_new_tokens: The limit of a target, with the tokens of `Frames.forced`; None is the model's limit.
        suppressed_token_ids: Tokens that no target has; a request cannot allow them. A step graph that
            finds the next tokens itself never finds one of them; its logits contain them.
        forbidden_sequences: Sequences of two tokens or more that no target contains; a request cannot allow
            them.
        begin_suppressed_token_ids: Tokens that are not the first of a target, after `Frames.forced`.
        forced_eos_id: The token that takes the last place of a target at its limit, at no cost; None if the
            limit just ends it.
        is_renormalized: Whether the probabilities of a beam search are those among the allowed tokens;
            otherwise forbidding a token does not change the probabilities of others.
        penalizes_log_probabilities: Whether `repetition_penalty` changes the log-probabilities of a beam
            search; otherwise it changes the logits.
        repeats_start: Whether `repetition_penalty` and n-grams include the tokens of `Frames.start`.
        splits_sentences: Whether the sentences of a text are translated one by one, because the model learned
            from single sentences, and would leave out the others.
    """

    beam_size: int = 1
    length_penalty: float = 0.6
    length_penalty_formula: LengthPenalty = "wu"
    early_stopping: EarlyStopping = True
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    forbidden_sequences: tuple[Annotated[tuple[int, ...], Field(min_length=2)], ...] = ()
    begin_suppressed_token_ids: tuple[int, ...] = ()
    forced_eos_id: int | None = None
    is_renormalized: bool = True
    penalizes_log_probabilities: bool = False
    repeats_start: bool = False
    splits_sentences: bool = False


@dataclass(frozen=True)
class LengthBound(_Record):
    """The limit of a target's tokens if its request sets none: ratio * source tokens + constant.

    It stops a model that begins to repeat itself, long before the model's own limit.
    """

    ratio: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    constant: Annotated[int, Field(ge=0)]

    def max_new_tokens(self, source_length: int) -> int:
        """The bound for a source of this length, with eos."""
        return max(math.floor(self.ratio * source_length) + self.constant, 1)


class _Array(Sized, Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class LengthRule(_Record):
    """The memory positions of a request: `constant`, or its source length / `stride`, rounded up.

    Attributes:
        source: The name of the source whose length counts.
        axis: For a source that may be shorter than `stride * constant`: the axis of its length. Only arrays
            show that one is; whatever counts without them counts `constant`. None without `constant`, and if
            all sources have it.
    """

    source: str
    stride: Count = 1
    constant: Count | None = None
    axis: int | None = None

    @property
    def whole_length(self) -> int | None:
        """The length of a source that is not shorter than others; None if sources are of any length."""
        return None if self.axis is None or self.constant is None else self.stride * self.constant

    def memory_length(self, source_lengths: Mapping[str, int]) -> int:
        """The positions for sources of these lengths, by name."""
        return self.constant or -(-source_lengths[self.source] // self.stride)

    def memory_length_of(self, sources: Mapping[str, _Array]) -> int:
        """The positions for these sources, without the batch axis, by name."""
        if self.axis is not None:
            return -(-sources[self.source].shape[self.axis] // self.stride)
        return self.memory_length({name: len(source) for name, source in sources.items()})


@dataclass(frozen=True)
class Manifest(_Record):
    """Everything that the server must know about a model.

    Attributes:
        kind: The architecture, for people; the engine does not use it.
        sizes: The architecture's sizes, for people; the engine does not use them.
        source_vocab_size: The number of token ids of sources; 0 if no source has tokens.
        target_vocab_size: The number of token ids of targets.
        template: The tokens around texts; `frames` in the file.
        sources: The form of each source, by its name in the `encode` graph.
        memory: The rule for a request's memory positions.
        choices: What a request may choose by a name, by the name of its option: `source_language`,
            `target_language` or `task`.
        generation: The options of a request that does not set them.
        timestamps: The tokens of times; None for a model without them.
        resampling: How the file of a picture is scaled to the model's size.
        source_language: The BCP 47 tag of the sources' language, by whose rules they are split into
            sentences; empty if the training did not name one.
        target_language: The BCP 47 tag of the targets' language; empty if the training did not name one, or
            requests choose it.
        length_bound: The bound on target lengths learned from the training corpus; None for no bound.
        provenance: Commit, preset, corpus and its hash, seed, dev score.
        adapted_maps: The maps with low-rank terms, in the order of their places in the adapters' weights
            (`bundle.adapters.Places`); none if the graphs take no adapters.
        adapted_checksum: The checksum of the trained weights, by which adapters know their base; empty if the
            graphs take no adapters.
        drafts_only: Whether it can only draft for another model: its steps choose among some of the tokens,
            and there is no `decode` graph.
    """

    format_version: int
    kind: str
    sizes: dict[str, int]
    source_vocab_size: int
    target_vocab_size: Count
    special_ids: SpecialIds
    template: Annotated[TokenTemplate, Field(alias="frames")]
    sources: dict[str, Form]
    memory: LengthRule
    max_source_length: Count
    max_target_length: int
    source_tokenizer: FileSpec
    target_tokenizer: FileSpec
    variants: Annotated[dict[Precision, Variant], Field(min_length=1)]
    choices: dict[str, Choice] = field(default_factory=dict)
    generation: Generation = field(default_factory=Generation)
    timestamps: Timestamps | None = None
    resampling: Resampling = "bicubic"
    source_language: str = ""
    target_language: str = ""
    length_bound: LengthBound | None = None
    provenance: dict[str, str] = field(default_factory=dict)
    adapted_maps: tuple[AdaptedMap, ...] = ()
    adapted_checksum: str = ""
    drafts_only: bool = False

    @property
    def kept_tokens(self) -> str:
        """How many of the tokens the steps choose among, as a text for people."""
        step = next(iter(self.variants.values())).graphs[Verb.STEP]
        [logits] = (spec for spec in step.outputs if spec.role is Role.LOGITS)
        return f"{logits.axes[-1]:,} of {self.target_vocab_size:,} tokens"

    @property
    def detects_language(self) -> bool:
        """Whether the model hears the language of a sound if a request does not name it."""
        choice = self.choices.get(SOURCE_LANGUAGE)
        return Form.SOUND in self.sources.values() and choice is not None and not choice.default
