"""The bundle: a folder with everything needed to serve one model, and the manifest that describes it.

Export writes the manifest with `write_manifest`. The server reads a bundle with `load_bundle`, which checks
everything and reports all problems at once. The checked bytes are the bytes that are used: tokenizers are
created from them, and `Bundle.read_variant` reads graphs and weights into memory, so that a later change of a
file has no effect. How graphs are created or run is not known here.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from seq2seq_serve.bundle.files import read_small_file
from seq2seq_serve.bundle.names import (
    CHECKSUM_FILE,
    CHOICES,
    FORMAT_VERSION,
    MANIFEST_FILE,
    SOURCE_LANGUAGE,
    Form,
    Precision,
    Role,
    Verb,
    buffer_of,
    lengths_of,
)
from seq2seq_serve.bundle.pictures import Resampling
from seq2seq_serve.bundle.tokenizer import Tokenizer

_BFLOAT16 = "bfloat16"
_ONNX_BFLOAT16 = 16  # TensorProto.DataType
# The element type and the number of axes of each form of source, without the batch
_FORMS = {
    Form.TEXT: ("int64", 1),
    Form.SENTENCES: ("int64", 2),
    Form.PICTURE: ("uint8", 3),
    Form.CLIP: ("uint8", 4),
    Form.FEATURES: ("float32", 2),
    Form.SOUND: ("float32", 2),
}
_D_HEAD_MULTIPLE = 8  # GroupQueryAttention refuses others
# Larger files are refused before they are parsed, which takes many times as much memory.
MAX_MANIFEST_BYTES = 4 << 20  # the manifest of a Transformer-base in two precisions has 80 KB
MAX_TOKENIZER_BYTES = 64 << 20  # tokenizers of 250,000 tokens have 20 MB


class BundleError(ValueError):
    """A folder is not a usable bundle.

    Args:
        path: The folder.
        problems: One message per problem.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        listing = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{path} is not a usable bundle: {listing}")
        self.path = path
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, list(self.problems))


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
        metric: "bleu" or "accuracy".
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
class Variant(_Record):
    """The graphs in one precision, which share one file of weights."""

    graphs: dict[Verb, GraphSpec]
    weights: FileSpec
    parity: Parity


@dataclass(frozen=True)
class SpecialIds(_Record):
    """The special tokens' ids.

    Attributes:
        pad_id: Pads sources.
        eos_ids: Each of these tokens ends a target; the first one ends a target that is scored.
    """

    pad_id: int
    eos_ids: tuple[int, ...]


Places = tuple[int | str, ...]
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
class Frames(_Record):
    """The tokens around each source text and before each target.

    Attributes:
        start: The tokens that the decoder reads before a target; they are not part of it. Exactly one for a
            model without a `decode` graph.
        forced: The first tokens of every target. They are part of it, and its length counts them.
        source_prefix: The tokens before those of a source text.
        source_suffix: The tokens after them, end of sequence included.
    """

    start: Places
    forced: Places = ()
    source_prefix: Places = ()
    source_suffix: Places = ()

    @property
    def num_read_first(self) -> int:
        """The number of tokens that the decoder reads before it writes a token of its own."""
        return len(self.start) + len(self.forced)


@dataclass(frozen=True)
class Timestamps(_Record):
    """The tokens of times within a sound (Radford et al. 2022, arXiv:2212.04356, section 2.3).

    Attributes:
        first_id: The token of 0 seconds. It and all ids after it are times.
        step_seconds: From the time of one token to that of the next.
        off_id: The last token of `Frames.start`; a request for timestamps leaves it out.
        max_first: The most steps before the first time of a target; None for no limit.
    """

    first_id: int
    step_seconds: float
    off_id: int
    max_first: int | None = None

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
    forbidden_sequences: tuple[tuple[int, ...], ...] = ()
    begin_suppressed_token_ids: tuple[int, ...] = ()
    forced_eos_id: int | None = None
    is_renormalized: bool = True
    penalizes_log_probabilities: bool = False
    repeats_start: bool = False


@dataclass(frozen=True)
class LengthBound(_Record):
    """The limit of a target's tokens if its request sets none: ratio * source tokens + constant.

    It stops a model that begins to repeat itself, long before the model's own limit.
    """

    ratio: float
    constant: int

    def max_new_tokens(self, source_length: int) -> int:
        """The bound for a source of this length, with eos."""
        return max(math.floor(self.ratio * source_length) + self.constant, 1)


@dataclass(frozen=True)
class LengthRule(_Record):
    """The memory positions of a request: `constant`, or its source length / `stride`, rounded up.

    Attributes:
        source: The name of the source whose length counts.
    """

    source: str
    stride: int = 1
    constant: int | None = None

    def memory_length(self, source_lengths: Mapping[str, int]) -> int:
        """The positions for sources of these lengths, by name."""
        return self.constant or -(-source_lengths[self.source] // self.stride)

    def memory_length_of(self, sources: Mapping[str, Sized]) -> int:
        """The positions for these sources, without the batch axis, by name."""
        return self.memory_length({name: len(source) for name, source in sources.items()})


@dataclass(frozen=True)
class Manifest(_Record):
    """Everything that the server must know about a model.

    Attributes:
        kind: The architecture, for people; the engine does not use it.
        sizes: The architecture's sizes, for people; the engine does not use them.
        source_vocab_size: The number of token ids of sources; 0 if no source has tokens.
        target_vocab_size: The number of token ids of targets.
        frames: The tokens around texts.
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
    """

    format_version: int
    kind: str
    sizes: dict[str, int]
    source_vocab_size: int
    target_vocab_size: int
    special_ids: SpecialIds
    frames: Frames
    sources: dict[str, Form]
    memory: LengthRule
    max_source_length: int
    max_target_length: int
    source_tokenizer: FileSpec
    target_tokenizer: FileSpec
    variants: dict[Precision, Variant]
    choices: dict[str, Choice] = field(default_factory=dict)
    generation: Generation = field(default_factory=Generation)
    timestamps: Timestamps | None = None
    resampling: Resampling = "bicubic"
    source_language: str = ""
    target_language: str = ""
    length_bound: LengthBound | None = None
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def detects_language(self) -> bool:
        """Whether the model hears the language of a sound if a request does not name it."""
        choice = self.choices.get(SOURCE_LANGUAGE)
        return Form.SOUND in self.sources.values() and choice is not None and not choice.default


@dataclass(frozen=True)
class VariantFiles:
    """The checked content of one variant's files in memory; the weights begin at a page boundary."""

    graphs: dict[Verb, bytes]
    weights: memoryview


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files have all been checked.

    Attributes:
        version: The first characters of the manifest's sha256, so that other weights have another version.
    """

    path: Path
    manifest: Manifest
    version: str
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer

    def read_variant(self, precision: Precision) -> VariantFiles:
        """Read the files of a precision, each once; raise BundleError if one changed since `load_bundle`."""
        variant = self.manifest.variants[precision]
        return VariantFiles(
            {verb: bytes(_read(self.path, graph.file)) for verb, graph in variant.graphs.items()},
            _read(self.path, variant.weights),
        )


_VERSION_DIGITS = 12
_MANIFEST = TypeAdapter(Manifest)


def file_spec(folder: Path, file: str) -> FileSpec:
    """Describe a file in a bundle's folder."""
    path = folder / file
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileSpec(file, digest, path.stat().st_size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, last of all files, and its checksum in the format of `sha256sum`."""
    raw = _MANIFEST.dump_json(manifest, indent=2) + b"\n"
    (folder / MANIFEST_FILE).write_bytes(raw)
    (folder / CHECKSUM_FILE).write_text(f"{hashlib.sha256(raw).hexdigest()}  {MANIFEST_FILE}\n")


def bundle_version(path: Path) -> str:
    """The version of the bundle in a folder, without a check of its files; empty without a bundle."""
    try:
        raw = _read_manifest(path)
    except (OSError, BundleError):
        return ""
    return hashlib.sha256(raw).hexdigest()[:_VERSION_DIGITS]


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a `config.json` of Hugging Face, which names the type of a model."""
    try:
        content = json.loads(read_small_file(path / "config.json", MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def load_bundle(path: Path) -> Bundle:
    """Read a bundle and check all of its files.

    Raises:
        BundleError: Something is missing, changed or contradictory; one message reports all problems.
    """
    if not (path / MANIFEST_FILE).is_file():
        command = "python -m export huggingface" if is_checkpoint(path) else "python -m export"
        raise BundleError(path, [f"there is no {MANIFEST_FILE} (make one with `{command}`)"])
    raw = _read_manifest(path)
    manifest = _parse(path, raw)
    digest = hashlib.sha256(raw).hexdigest()
    problems = _checksum_problems(path, digest) + _contradictions(manifest)
    for spec in _graph_files(manifest):
        problems += _file_problems(path, spec)
    tokenizers: dict[FileSpec, Tokenizer] = {}
    users = (
        (manifest.source_tokenizer, manifest.source_vocab_size),
        (manifest.target_tokenizer, manifest.target_vocab_size),
    )
    for spec, vocab_size in users:
        try:
            tokenizer = tokenizers[spec] = tokenizers.get(spec) or _read_tokenizer(path, spec)
        except BundleError as error:
            problems += error.problems
            continue
        if vocab_size and tokenizer.max_text_id >= vocab_size:
            problems.append(
                f"{spec.file} has tokens up to the id {tokenizer.max_text_id}, beyond the model's vocabulary "
                f"of {vocab_size}"
            )
    if problems:
        raise BundleError(path, list(dict.fromkeys(problems)))
    source_tokenizer = tokenizers[manifest.source_tokenizer]
    target_tokenizer = tokenizers[manifest.target_tokenizer]
    return Bundle(path, manifest, digest[:_VERSION_DIGITS], source_tokenizer, target_tokenizer)


def _read_manifest(folder: Path) -> bytes:
    try:
        return read_small_file(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise BundleError(folder, [str(error)]) from error


def _read_tokenizer(folder: Path, spec: FileSpec) -> Tokenizer:
    if spec.size_bytes > MAX_TOKENIZER_BYTES:
        problem = f"{spec.file} has {spec.size_bytes} bytes, and {MAX_TOKENIZER_BYTES} is the limit"
        raise BundleError(folder, [problem])
    content = bytes(_read(folder, spec))
    try:
        return Tokenizer.from_bytes(content, spec.file)
    except ValueError as error:
        raise BundleError(folder, [str(error)]) from error


def _read(folder: Path, spec: FileSpec) -> memoryview:
    """Read a file, and check the checksum of the bytes that are returned."""
    if problems := _place_problems(folder, spec):
        raise BundleError(folder, problems)
    # The system gets the memory of an anonymous mapping back as soon as its last user is gone.
    content = memoryview(mmap.mmap(-1, max(spec.size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    with (folder / spec.file).open("rb") as stream:
        content = content[: stream.readinto(content[: spec.size_bytes])]
    digest = hashlib.sha256(content).hexdigest()
    if digest != spec.sha256:
        raise BundleError(folder, [_changed(spec.file, digest, spec.sha256)])
    return content


def _parse(path: Path, raw: bytes) -> Manifest:
    try:
        content: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(path, [f"{MANIFEST_FILE} is not JSON: {error}"]) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            path,
            [
                f"format_version is {version!r}, and this program reads format_version {FORMAT_VERSION}: "
                "export the run again with this version of `python -m export`"
            ],
        )
    try:
        return _MANIFEST.validate_json(raw)
    except ValidationError as error:
        problems = [
            f"{MANIFEST_FILE}: {'.'.join(map(str, item['loc'])) or 'top level'}: {item['msg']}"
            for item in error.errors()
        ]
        raise BundleError(path, problems) from error


def _checksum_problems(folder: Path, digest: str) -> list[str]:
    path = folder / CHECKSUM_FILE
    if not path.is_file():
        return [f"{CHECKSUM_FILE} is missing"]
    with path.open(encoding="ascii", errors="replace") as stream:
        expected = stream.read(len(digest))
    return [] if digest == expected else [_changed(MANIFEST_FILE, digest, expected)]


def _changed(file: str, found: str, expected: str) -> str:
    return f"{file} was changed: its sha256 is {found[:12]}…, not {expected[:12]}…"


def _contradictions(manifest: Manifest) -> list[str]:
    problems = []
    d_head = manifest.sizes.get("d_head", _D_HEAD_MULTIPLE)
    if d_head < 1 or d_head % _D_HEAD_MULTIPLE:
        problems.append(f"sizes.d_head is {d_head}, and must be a multiple of {_D_HEAD_MULTIPLE}")
    if any(len(sequence) < 2 for sequence in manifest.generation.forbidden_sequences):
        problems.append("generation.forbidden_sequences has a sequence of fewer than two tokens")
    if manifest.target_vocab_size < 1:
        problems.append(f"target_vocab_size is {manifest.target_vocab_size}, and must be at least 1")
    if not manifest.frames.start:
        problems.append("frames.start is empty: the decoder needs a first token")
    ids = manifest.special_ids
    if not ids.eos_ids:
        problems.append("special_ids.eos_ids is empty: no token would end a target")
    elif set(ids.eos_ids) <= set(manifest.generation.suppressed_token_ids):
        problems.append("generation.suppressed_token_ids has all eos_ids: no token would end a target")
    if ids.pad_id and Form.SENTENCES in manifest.sources.values():
        problems.append(f"special_ids.pad_id is {ids.pad_id}, and sentences are padded with 0: it must be 0")
    for name, (limit, places) in _id_fields(manifest).items():
        for place in places:
            if isinstance(place, str):
                if place not in manifest.choices:
                    problems.append(f"{name} has the place {place!r}, which is none of choices")
            elif not 0 <= place < limit:
                problems.append(f"{name} has the id {place}, outside the vocabulary of {limit}")
    for name, choice in manifest.choices.items():
        if not choice.ids or (choice.default and choice.default not in choice.ids):
            problems.append(f"choices.{name} has the default {choice.default!r}, and the names {choice.ids}")
        if name not in CHOICES:
            problems.append(f"choices has {name!r}, and a request may choose {', '.join(CHOICES)}")
    if Form.SOUND in manifest.sources.values() and len(manifest.sources) > 1:
        problems.append(f"sources are {', '.join(manifest.sources)}, and a sound must be the only source")
    if manifest.detects_language:
        problems += _detection_problems(manifest.frames)
    times = manifest.timestamps
    if times is not None and times.off_id not in manifest.frames.start[1:][-1:]:
        problems.append(f"timestamps.off_id is {times.off_id}, and must be the last of several frames.start")
    if times is not None and not 0 < times.step_seconds < math.inf:
        problems.append(f"timestamps.step_seconds is {times.step_seconds}, and must be above 0")
    for name, least in (
        ("max_source_length", 1),
        ("max_target_length", max(manifest.frames.num_read_first, 1)),
    ):
        if getattr(manifest, name) < least:
            reason = ", the tokens of frames.start and frames.forced" if least > 1 else ""
            problems.append(f"{name} is {getattr(manifest, name)}, and must be at least {least}{reason}")
    bound = manifest.length_bound
    if bound is not None and not (0 < bound.ratio < math.inf and bound.constant >= 0):
        problems.append(
            f"length_bound has the ratio {bound.ratio} and the constant {bound.constant}, "
            "and must have a ratio above 0 and a constant of at least 0"
        )
    if not manifest.variants:
        problems.append("variants is empty: there is no graph to run")
    for precision, variant in manifest.variants.items():
        missing = [verb.value for verb in (Verb.ENCODE, Verb.STEP) if verb not in variant.graphs]
        if missing:
            problems.append(f"{precision} lacks the graphs {', '.join(missing)}")
        else:
            problems += [f"{precision}: {problem}" for problem in _graph_problems(manifest, variant)]
    return problems


def _detection_problems(frames: Frames) -> list[str]:
    """The places in which a language would have to be detected, and cannot be."""
    problems = [
        f"frames.{name} has the place {SOURCE_LANGUAGE!r}, and the model detects a language only among "
        "frames.start: give the choice a default"
        for name in ("forced", "source_prefix", "source_suffix")
        if SOURCE_LANGUAGE in getattr(frames, name)
    ]
    if SOURCE_LANGUAGE in frames.start[:1] or frames.start.count(SOURCE_LANGUAGE) > 1:
        problems.append(
            f"frames.start is {frames.start}, and a language is detected once, after the first token: "
            "give the choice a default"
        )
    return problems


def _id_fields(manifest: Manifest) -> dict[str, tuple[int, Places]]:
    """The vocabulary size and the ids of each field that has ids, by its name."""
    source, target = manifest.source_vocab_size or manifest.target_vocab_size, manifest.target_vocab_size
    frames, generation = manifest.frames, manifest.generation
    forced_eos = () if generation.forced_eos_id is None else (generation.forced_eos_id,)
    times = () if manifest.timestamps is None else (manifest.timestamps.first_id,)
    return {
        "special_ids.pad_id": (source, (manifest.special_ids.pad_id,)),
        "special_ids.eos_ids": (target, manifest.special_ids.eos_ids),
        "frames.start": (target, frames.start),
        "frames.forced": (target, frames.forced),
        "frames.source_prefix": (source, frames.source_prefix),
        "frames.source_suffix": (source, frames.source_suffix),
        "generation.suppressed_token_ids": (target, generation.suppressed_token_ids),
        "generation.forbidden_sequences": (target, tuple(chain(*generation.forbidden_sequences))),
        "generation.begin_suppressed_token_ids": (target, generation.begin_suppressed_token_ids),
        "generation.forced_eos_id": (target, forced_eos),
        "timestamps.first_id": (target, times),
        **{
            f"choices.{name}": (max(source, target), tuple(choice.ids.values()))
            for name, choice in manifest.choices.items()
        },
    }


def _graph_problems(manifest: Manifest, variant: Variant) -> list[str]:
    """The contradictions between a variant's graphs and the rules of roles."""
    encode, step = variant.graphs[Verb.ENCODE], variant.graphs[Verb.STEP]
    problems = []
    sources = {spec.name: spec for spec in encode.inputs if spec.role is Role.SOURCE}
    for name in {
        lengths_of(axis) for spec in sources.values() for axis in spec.axes[1:] if isinstance(axis, str)
    }:
        sources.pop(name, None)
    if manifest.memory.source not in sources:
        problems.append(f"memory.source is {manifest.memory.source!r}, and encode reads {', '.join(sources)}")
    if sources.keys() != manifest.sources.keys():
        problems.append(f"sources are {', '.join(manifest.sources)}, and encode reads {', '.join(sources)}")
    for name in sources.keys() & manifest.sources.keys():
        form, spec = manifest.sources[name], sources[name]
        dtype, num_axes = _FORMS[form]
        if (spec.dtype, len(spec.axes) - 1) != (dtype, num_axes):
            problems.append(
                f"sources.{name} is {form}, which is {dtype} of {num_axes} axes, and encode reads "
                f"{spec.dtype} of {len(spec.axes) - 1}"
            )
        if form is Form.SOUND and not all(isinstance(axis, int) for axis in spec.axes[1:]):
            problems.append(f"sources.{name} is a sound of {spec.axes[1:]}, and both axes need a fixed size")
    for name in ("stride", "constant"):
        value = getattr(manifest.memory, name)
        if value is not None and value < 1:
            problems.append(f"memory.{name} is {value}, and must be at least 1")
    if len(manifest.frames.start) > 1 and Verb.DECODE not in variant.graphs:
        problems.append(
            f"frames.start has {len(manifest.frames.start)} tokens, and must have one without a decode graph"
        )
    state = {spec.name for spec in step.inputs if spec.role is Role.STATE}
    for verb, graph in ((Verb.ENCODE, encode), (Verb.STEP, step)):
        written = {buffer_of(spec.name) for spec in graph.outputs if spec.role is Role.STATE}
        if written != state:
            problems.append(f"{verb} writes the state {sorted(written)}, and step reads {sorted(state)}")
    has_cache = any(spec.role is Role.CACHE for spec in step.inputs)
    if has_cache and Verb.DECODE not in variant.graphs:
        problems.append("step has a cache, and there is no decode graph to fill it")
    if state and Verb.DECODE in variant.graphs:
        problems.append("step has state, which a decode graph cannot follow: leave decode out")
    return problems


def _graph_files(manifest: Manifest) -> list[FileSpec]:
    files = []
    for variant in manifest.variants.values():
        files.append(variant.weights)
        files += [graph.file for graph in variant.graphs.values()]
    return list(dict.fromkeys(files))


def _place_problems(folder: Path, spec: FileSpec) -> list[str]:
    """The problems of a file that can be found without reading it."""
    path = folder / spec.file
    if not path.resolve().is_relative_to(folder.resolve()):
        return [f"{spec.file} lies outside the bundle"]
    if not path.is_file():
        return [f"{spec.file} is missing"]
    size_bytes = path.stat().st_size
    if size_bytes != spec.size_bytes:
        return [f"{spec.file} has {size_bytes} bytes, and the manifest says {spec.size_bytes}"]
    return []


def _file_problems(folder: Path, spec: FileSpec) -> list[str]:
    if problems := _place_problems(folder, spec):
        return problems
    found = file_spec(folder, spec.file)
    return [] if found.sha256 == spec.sha256 else [_changed(spec.file, found.sha256, spec.sha256)]
