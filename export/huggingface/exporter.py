"""Writes the bundle of a checkpoint, all or nothing, as `export.exporter` does that of a training run."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from seq2seq_serve.bundle.manifest import (
    FileSpec,
    Generation,
    Manifest,
    Parity,
    SpecialIds,
    Variant,
    file_spec,
    write_manifest,
)
from seq2seq_serve.bundle.names import (
    FORMAT_VERSION,
    SOURCE_LANGUAGE,
    TARGET_LANGUAGE,
    TOKENIZER_FILE,
    Precision,
    Verb,
)
from seq2seq_serve.export import parity
from seq2seq_serve.export.exporter import (
    BITS,
    TOLERANCES,
    ExportError,
    ProofError,
    adapted_fields,
    check_path,
    compare,
    describe_differences,
    factory_of,
    maps_for_adapters,
    provider_of,
    write_bundle,
    write_variant,
    write_variants,
)
from seq2seq_serve.export.graphs.adapted import AdaptedFactory, AdaptedMaps, with_adapters
from seq2seq_serve.export.graphs.base import Graph, in_type
from seq2seq_serve.export.graphs.linear import FloatFactory
from seq2seq_serve.export.graphs.merged import make_merged_graphs
from seq2seq_serve.export.graphs.transformer import EncodeGraph, make_graphs
from seq2seq_serve.export.huggingface.agreement import compare_tokenizers
from seq2seq_serve.export.huggingface.generation import generation_of, left_out, unknown_parts
from seq2seq_serve.export.huggingface.reference import (
    NUM_GENERATED,
    RandomBatch,
    agrees,
    largest_rounding,
    random_batches,
    reference,
    worst_difference,
)
from seq2seq_serve.export.huggingface.samples import largest_channel, make_pairs, sample_texts
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.training.data.sources import TOKENS, Inputs
from seq2seq_serve.training.huggingface.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    eos_ids,
    open_checkpoint,
)
from seq2seq_serve.training.huggingface.dialect import Limits, PublishedFamily
from seq2seq_serve.training.huggingface.families import config_of, family_of
from seq2seq_serve.training.huggingface.pictures import Patches
from seq2seq_serve.training.huggingface.tokenizers import ImportedTokenizers, read_tokenizers
from seq2seq_serve.training.huggingface.tuning import write_published
from seq2seq_serve.training.huggingface.weights import read_model
from seq2seq_serve.training.models.options import PublishedConfig
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.run import TrainedModel

# Quantised weights have fewer, unless the encoder stays in float32.
_BYTES_PER_WEIGHT = {
    Precision.FP32: 4,
    Precision.FP16: 2,
    Precision.BF16: 2,
    Precision.INT8: 3,
    Precision.INT4: 3,
}
_MEMORY_PER_WEIGHT = 10  # bytes: 2.5 times the weights in float32; measured with 300 million weights: 2.3
_MEMORY_PER_CONVERTED_WEIGHT = 4  # bytes, for files in another type, whose weights are not mapped but copied
_SPARE_BYTES = 1 << 30  # of the libraries
_MEMORY_FILE = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (  # the limit, what is used, and of what it consists, in versions 2 and 1
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_RECLAIMABLE = "active_file", "inactive_file", "slab_reclaimable"  # the kernel frees it when others need it
_FAR = (1, 150, 140)  # a comparison beyond the last distance of published relative positions
_MEDIA_SHAPES = ((1, 1, 6), (2, 1, 5))  # a sound or picture takes a second to encode
_NUM_MEASURED = 4  # sources whose memory is measured; a sound has 1,500 positions
_MAX_MARKS = 5  # that a line of the report names
_DEFAULT_LIMITS = Limits()
_NO_PROVENANCE: Mapping[str, str] = {}
# For a model's own targets. Trained models, Whisper tiny.en and a Marian for Russian, have means of 0.06 and
# 0.11 in int8, with 90% and 95% equal tokens, and 0.001 and 0.008 in fp16, with 100% and 99.6%.
MAX_MEAN_DIFFERENCE = {
    Precision.FP16: 0.05,
    Precision.BF16: 0.2,
    Precision.INT8: 0.2,
    Precision.INT4: 0.4,
}
LEAST_EQUAL_TOKENS = {
    Precision.FP16: 0.95,
    Precision.BF16: 0.85,
    Precision.INT8: 0.85,
    Precision.INT4: 0.75,
}
# Of the encoder's output, in median channels. A row's 255 levels span about 6 deviations of its largest
# channel, so that rounding moves each channel by 6 / 255 / √12 of that one: 11% of a median channel where it
# is 16 times as large. Whisper tiny.en has 13, and a Marian for Russian 126.
_LARGEST_CHANNEL = 16.0

_Pairs = list[tuple[Inputs, list[int]]]


@dataclass(frozen=True)
class _Imported:
    """A checkpoint ready to be exported.

    Attributes:
        tolerance: The largest difference of log-probabilities that float32 explains.
        maps: Those that adapters may change; None if the graphs take no adapters.
    """

    family: PublishedFamily
    config: PublishedConfig
    model: Transformer
    tokenizers: ImportedTokenizers
    eos_ids: tuple[int, ...]
    generation: Generation
    checkpoint: CheckpointFolder
    tolerance: float
    maps: AdaptedMaps | None


def export_checkpoint(
    folder: Path,
    path: Path,
    precisions: Sequence[Precision],
    *,
    limits: Limits = _DEFAULT_LIMITS,
    overwrite: bool = False,
    is_strict: bool = False,
    provenance: Mapping[str, str] = _NO_PROVENANCE,
    splits_sentences: bool | None = None,
    source_language: str = "",
    target_language: str = "",
    adapters: bool = False,
    tuned_languages: tuple[str, str] = ("", ""),
    report: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Import a checkpoint, prove each precision against `transformers`, and write the bundle at once.

    Args:
        folder: As `save_pretrained` writes it.
        path: The bundle.
        precisions: Those of the bundle.
        limits: The most tokens of sources and targets.
        overwrite: Whether an older bundle is replaced.
        is_strict: Whether no bundle is written if the proof of any precision fails; by default the bundle has
            the other precisions.
        provenance: Further facts for people about how the model was made.
        splits_sentences: Whether a text is translated sentence by sentence by default; None for what the
            family was trained on.
        source_language: The BCP 47 tag of the sources' language, for a model that is not asked for one.
        target_language: The same of the targets' language.
        adapters: Whether rows of the graphs may name adapters.
        tuned_languages: Both of the run that tuned the model, where no other is given.
        report: Called with a line about each step, as it begins or ends.

    Raises:
        CheckpointError: The checkpoint cannot be imported.
        ExportError: `path` exists or cannot be written, or proofs failed. No bundle is written.
    """
    check_path(path, overwrite=overwrite)
    for precision in precisions:
        provider_of(precision)  # refuses a precision that cannot be proved here
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint)
    config = config_of(family, checkpoint, limits)
    settings = {**checkpoint.config, "vocab_size": config.source_vocab_size or config.vocab_size}
    tokenizers = read_tokenizers(folder, family.name, settings, checkpoint.generation)
    for name, language in ((SOURCE_LANGUAGE, source_language), (TARGET_LANGUAGE, target_language)):
        if language and name in tokenizers.choices:
            raise CheckpointError(f"every request chooses the {name} of this model: leave it out")
    tokenizers = replace(
        tokenizers,
        source_language=source_language or tuned_languages[0] or tokenizers.source_language,
        target_language=target_language or tuned_languages[1] or tokenizers.target_language,
    )
    if config.media is None and not 0 <= tokenizers.pad_id < config.source_vocab_size:
        raise CheckpointError(
            f"pad_token_id is {tokenizers.pad_id}, and sources have {config.source_vocab_size} tokens"
        )
    ends = eos_ids(checkpoint.generation, config.vocab_size)
    num_start = len(tokenizers.template.start)
    generation = generation_of(checkpoint.generation, num_start, config.max_target_length, config.vocab_size)
    if splits_sentences is None:
        splits_sentences = family.translates_sentences
    generation = replace(generation, splits_sentences=splits_sentences)
    _check_room(checkpoint, path, precisions)
    if names := left_out(checkpoint.generation):
        report(f"not taken over from the settings of generate: {', '.join(names)}")
    for line in unknown_parts(checkpoint.generation, config, tokenizers.choices):
        report(line)
    if config.media is None and (marks := tokenizers.own_marks):
        shown = ", ".join(marks[:_MAX_MARKS]) + (", …" if len(marks) > _MAX_MARKS else "")
        report(f"special tokens in a text are text; a request sends these as token_ids: {shown}")
    num_rows = config.source_vocab_size or config.vocab_size
    if num_rows > tokenizers.num_tokens:
        report(f"{num_rows - tokenizers.num_tokens} of {num_rows} rows of the vocabulary have no token")
    compare_tokenizers(folder, family.name, tokenizers, report, reads_texts=config.media is None)
    report(f"reading {checkpoint.num_weights / 1e6:.1f} million weights ({family.name})")
    model = read_model(checkpoint, family, config)
    sources = _samples(config, tokenizers)
    if {*precisions} - {Precision.FP32}:
        report(f"decoding {len(sources)} sources for the proof")
    else:
        sources = sources[:1]
    pairs = make_pairs(model, tokenizers, ends, sources)
    tolerance = _compare_with_transformers(checkpoint, config, model, tokenizers, ends, pairs[0], report)
    if splits_sentences:
        report("a text is translated sentence by sentence, unless a request says otherwise (long_source)")
    maps = maps_for_adapters(model, is_wanted=adapters)
    imported = _Imported(family, config, model, tokenizers, ends, generation, checkpoint, tolerance, maps)
    return write_bundle(
        path,
        lambda folder: _write(
            imported, folder, precisions, pairs, report, is_strict=is_strict, provenance=provenance
        ),
        overwrite=overwrite,
    )


def export_tuned(
    trained: TrainedModel,
    path: Path,
    precisions: Sequence[Precision],
    *,
    overwrite: bool = False,
    **options: Any,
) -> Manifest:
    """Export a published model that a run tuned, by way of a folder as it was published with the new weights.

    So `transformers` proves it, too. The options are those of `export_checkpoint`.
    """
    check_path(path, overwrite=overwrite)
    config = trained.config
    assert trained.published is not None
    assert isinstance(config, PublishedConfig)
    score = {} if trained.dev_score is None else {"dev_score": f"{abs(trained.dev_score):.2f}"}
    with tempfile.TemporaryDirectory(prefix="tuned-") as temporary:
        folder = Path(temporary) / trained.published.parent.resolve().name
        write_published(trained.published, trained.model.state_dict(), config, folder)
        longest_source = 0 if config.media else config.max_source_length  # a limit is for texts
        limits = Limits(longest_source, config.max_target_length)
        provenance = trained.provenance | score
        return export_checkpoint(
            folder,
            path,
            precisions,
            limits=limits,
            overwrite=overwrite,
            provenance=provenance,
            splits_sentences=trained.has_single_sentences,
            tuned_languages=(trained.source_language, trained.target_language),
            **options,
        )


def _samples(config: PublishedConfig, tokenizers: ImportedTokenizers) -> list[Inputs]:
    """The sources of the proof."""
    if config.media is None:
        return list(map(TOKENS.inputs, sample_texts(tokenizers, config.max_source_length)))
    return config.media.make()


def _compare_with_transformers(
    checkpoint: CheckpointFolder,
    config: PublishedConfig,
    model: Transformer,
    tokenizers: ImportedTokenizers,
    ends: Sequence[int],
    pair: tuple[Inputs, list[int]],
    report: Callable[[str], None],
) -> float:
    """Returns the largest difference that graphs in float32 may have; ExportError if the model has more."""
    batches = random_batches(config, tokenizers.pad_id)
    *source, mask = model.source_kind.tensors([pair[0]])
    num_start = len(tokenizers.template.start)
    sample, target = RandomBatch(source[0], mask, torch.zeros(1, 0, dtype=torch.int64)), pair[1]
    target = target[: num_start + NUM_GENERATED]
    starts: dict[str, int | list[int]] = {"eos_token_id": list(ends)}
    if TARGET_LANGUAGE in tokenizers.template.start:
        starts["decoder_start_token_id"] = target[0]
    if TARGET_LANGUAGE in tokenizers.template.forced:
        starts["forced_bos_token_id"] = target[num_start]
    # Whisper's `generate` has a prompt and fallbacks of its own.
    is_asked = model.architecture.media is None or tokenizers.timestamps is None
    theirs = reference(
        checkpoint.path, model.architecture.media, batches, sample if is_asked else None, starts
    )
    expected = theirs.log_probabilities
    difference = worst_difference(model, batches, expected)
    tolerance = max(TOLERANCES[Precision.FP32], largest_rounding(config, expected))
    if not difference <= tolerance:
        raise ExportError(
            f"the imported model differs from transformers by {difference:.1e} in a log-probability, and "
            f"{tolerance:.0e} is allowed"
        )
    if is_asked and not agrees(model, sample, target, theirs.target, 2 * tolerance):
        raise ExportError(
            f"greedy generate of transformers gives {theirs.target} with the checkpoint's settings, and the "
            f"imported model gives {target}"
        )
    report(
        f"the model equals transformers: worst difference of log-probabilities {difference:.1e} "
        f"(tolerance {tolerance:.0e})"
    )
    return tolerance


def _write(
    imported: _Imported,
    folder: Path,
    precisions: Sequence[Precision],
    pairs: _Pairs,
    report: Callable[[str], None],
    *,
    is_strict: bool,
    provenance: Mapping[str, str],
) -> Manifest:
    config, tokenizers = imported.config, imported.tokenizers
    source, target = _save_tokenizers(tokenizers, folder)
    variants = write_variants(
        folder,
        precisions,
        lambda precision: _write_variant(imported, folder, precision, pairs, report),
        report,
        is_strict=is_strict,
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kind=imported.family.name,
        sizes=config.sizes,
        source_vocab_size=config.source_vocab_size,
        target_vocab_size=config.vocab_size,
        special_ids=SpecialIds(tokenizers.pad_id, imported.eos_ids),
        template=tokenizers.template,
        choices=tokenizers.choices,
        generation=imported.generation,
        timestamps=tokenizers.timestamps,
        sources=dict(imported.model.source_kind.forms),
        memory=imported.model.source_kind.memory,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        source_tokenizer=source,
        target_tokenizer=target,
        variants=variants,
        provenance=_provenance(imported.checkpoint) | dict(provenance),
        source_language="" if SOURCE_LANGUAGE in tokenizers.choices else tokenizers.source_language,
        target_language="" if TARGET_LANGUAGE in tokenizers.choices else tokenizers.target_language,
        **adapted_fields(imported.model, imported.maps),
    )
    if isinstance(config.media, Patches):
        manifest = replace(manifest, resampling=config.media.resampling)
    write_manifest(folder, manifest)
    return manifest


def _write_variant(
    imported: _Imported,
    folder: Path,
    precision: Precision,
    pairs: _Pairs,
    report: Callable[[str], None],
) -> Variant:
    model = imported.model
    modules = _modules(imported, precision, pairs, report)

    def prove(graphs: Graphs) -> Parity:
        shapes: parity.Shapes = _MEDIA_SHAPES if model.architecture.media else parity.SHAPES
        if model.architecture.encoder.buckets is not None:
            shapes = (*shapes, _FAR)
        if precision is Precision.FP32:
            return compare(model, graphs, precision, shapes, imported.tolerance)
        return _judge(imported, graphs, precision, pairs, shapes)

    scales = {} if imported.maps is None else imported.maps.scales
    variant = write_variant(folder, precision, modules, model, prove, report, scales)
    report(f"{precision}: {_described(variant.parity, precision)}")
    return variant


def _modules(
    imported: _Imported, precision: Precision, pairs: _Pairs, report: Callable[[str], None]
) -> dict[Verb, Graph]:
    """The graphs of a precision.

    If one channel of the encoder's output is too large for levels, `encode` is in float32.
    """
    maps, model = imported.maps, imported.model
    linear = factory_of(precision, maps)
    make = make_merged_graphs if model.architecture.is_merged else make_graphs
    modules = in_type(make(model, linear, imported.generation.suppressed_token_ids), linear.dtype)
    if precision in BITS:
        ratio = largest_channel(model, [source for source, _ in pairs[:_NUM_MEASURED]])
        if not ratio <= _LARGEST_CHANNEL:  # also where it is not a number
            report(
                f"{precision}: the encoder stays in float32, because one channel of its output is "
                f"{ratio:.0f} times as large as the median one (at most {_LARGEST_CHANNEL:.0f})"
            )
            plain = FloatFactory(torch.float32, is_beside_quantized=True)
            modules[Verb.ENCODE] = EncodeGraph(model, plain if maps is None else AdaptedFactory(plain, maps))
    return with_adapters(modules, maps)


def _judge(
    imported: _Imported, graphs: Graphs, precision: Precision, pairs: _Pairs, shapes: parity.Shapes
) -> Parity:
    """Compare graphs with fewer bits for the model's own targets; raise ProofError if they are too far off.

    Random tokens, which no trained model reads, are only measured.
    """
    model, template = imported.model, imported.tokenizers.template
    worst = parity.worst_difference(model, graphs, shapes)
    proof = Parity(
        worst,
        None,
        tuple(shapes),
        mean_log_probability_difference=parity.mean_difference(model, graphs, pairs),
        equal_tokens=parity.equal_tokens(graphs, pairs, len(template.start) + len(template.forced)),
    )
    assert proof.mean_log_probability_difference is not None
    assert proof.equal_tokens is not None
    limits = {
        "the mean difference": proof.mean_log_probability_difference <= MAX_MEAN_DIFFERENCE[precision],
        "the share of equal tokens": proof.equal_tokens >= LEAST_EQUAL_TOKENS[precision],
        "the worst difference": math.isfinite(worst),
    }
    if failed := [name for name, holds in limits.items() if not holds]:
        raise ProofError(
            f"{precision} differs from the imported model in {' and '.join(failed)}: "
            f"{_described(proof, precision)}"
        )
    return proof


def _described(proof: Parity, precision: Precision) -> str:
    """The differences in one line, with their limits."""
    if proof.mean_log_probability_difference is None or proof.equal_tokens is None:
        return describe_differences(proof, precision)
    least = 100 * LEAST_EQUAL_TOKENS[precision]
    return (
        "for its own targets, mean difference of log-probabilities "
        f"{proof.mean_log_probability_difference:.1e} (tolerance {MAX_MEAN_DIFFERENCE[precision]}), "
        f"{100 * proof.equal_tokens:.1f}% equal tokens (at least {least:.0f}%); worst "
        f"difference for random tokens {proof.max_log_probability_difference:.1e}"
    )


def _save_tokenizers(tokenizers: ImportedTokenizers, folder: Path) -> tuple[FileSpec, FileSpec]:
    if tokenizers.source is tokenizers.target:
        tokenizers.source.save(folder / TOKENIZER_FILE)
        return (file_spec(folder, TOKENIZER_FILE),) * 2
    names = f"source-{TOKENIZER_FILE}", f"target-{TOKENIZER_FILE}"
    tokenizers.source.save(folder / names[0])
    tokenizers.target.save(folder / names[1])
    return file_spec(folder, names[0]), file_spec(folder, names[1])


def _provenance(checkpoint: CheckpointFolder) -> dict[str, str]:
    import transformers

    return {
        "checkpoint": checkpoint.path.resolve().name,
        "architecture": ", ".join(
            checkpoint.config.get("architectures") or [checkpoint.config["model_type"]]
        ),
        "transformers": transformers.__version__,
    }


def _check_room(checkpoint: CheckpointFolder, path: Path, precisions: Sequence[Precision]) -> None:
    """Raise CheckpointError if the memory or the disk is too small for the export."""
    num_weights = checkpoint.num_weights
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    needed, free = (
        num_weights * sum(map(_BYTES_PER_WEIGHT.__getitem__, precisions)),
        shutil.disk_usage(folder).free,
    )
    if free < needed:
        raise CheckpointError(
            f"the bundle takes about {_gigabytes(needed)} on disk, and {folder} has {_gigabytes(free)} free"
        )
    per_weight = _MEMORY_PER_WEIGHT
    if sum(file.stat().st_size for file in checkpoint.files) < 4 * num_weights:
        per_weight += _MEMORY_PER_CONVERTED_WEIGHT
    needed, available = num_weights * per_weight + _SPARE_BYTES, available_memory()
    if available is not None and available < needed:
        raise CheckpointError(
            f"the export takes about {_gigabytes(needed)} of memory, and {_gigabytes(available)} are free"
        )


def _gigabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"


def available_memory(memory_file: Path = _MEMORY_FILE, cgroup: Path = _CGROUP) -> int | None:
    """The bytes that this process may still take, by the system and by its control group; None if unknown."""
    sizes = []
    if memory_file.is_file():
        fields = dict(line.split(":", 1) for line in memory_file.read_text().splitlines())
        sizes.append(int(fields["MemAvailable"].split()[0]) << 10)
    for names in _CGROUP_FILES:
        try:
            limit, used, described = ((cgroup / name).read_text() for name in names)
            free = int(limit) - int(used)
        except (OSError, ValueError):
            continue  # it does not exist, or contains "max"
        parts = dict(line.split() for line in described.splitlines())
        # In version 1, the names without "total_" leave out the groups below.
        free += sum(int(parts.get(f"total_{name}", parts.get(name, 0))) for name in _RECLAIMABLE)
        sizes.append(free)
    return min(sizes, default=None)
