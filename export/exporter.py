"""Writes the bundle of a trained model, all or nothing: graphs, weights, tokenizer, manifest and proof."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import onnxruntime as ort
import torch

from seq2seq_serve.bundle.cuda_libraries import load_cuda_libraries
from seq2seq_serve.bundle.manifest import (
    FileSpec,
    Generation,
    GraphSpec,
    Manifest,
    Parity,
    SpecialIds,
    TokenTemplate,
    Variant,
    file_spec,
    load_bundle,
    write_manifest,
)
from seq2seq_serve.bundle.names import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Precision,
    Verb,
)
from seq2seq_serve.export import convert, parity
from seq2seq_serve.export.graphs.adapted import AdaptedFactory, AdaptedMaps, checksum_of, with_adapters
from seq2seq_serve.export.graphs.base import Graph, sizes_of
from seq2seq_serve.export.graphs.families import make_modules
from seq2seq_serve.export.graphs.linear import FloatFactory, LinearFactory, QuantizedFactory
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID
from seq2seq_serve.training.data.lengths import target_limits
from seq2seq_serve.training.data.sources import Inputs
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.evaluation.comparison import MetricSettings, metric_for
from seq2seq_serve.training.evaluation.scoring import by_source, score
from seq2seq_serve.training.evaluation.search import greedy_search
from seq2seq_serve.training.models.base import EncoderDecoder, Metric
from seq2seq_serve.training.models.registry import kind_of
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.run import TrainedModel

TOLERANCES = {  # differences of a log-probability
    Precision.FP32: 1e-4,  # float32 sums have another order
    Precision.FP16: 0.1,  # 11 significant bits in logits of about ±30
    Precision.BF16: 0.8,  # 8 bits
    # Random tokens are unlike what a trained model reads: measured 2.5 and 4.1 with published weights, and
    # at most 0.35 with those of the tests.
    Precision.INT8: 10.0,
    Precision.INT4: 10.0,
}
# The bits of a quantised weight, and limits on real pairs
BITS = {Precision.INT8: 8, Precision.INT4: 4}
MAX_LOSS = {Precision.INT8: 1.0, Precision.INT4: 2.0}  # of the model's metric, in points
# In the log-probability of a reference's token; measured in int8 below 0.03 in the tests, 0.06 with Whisper's
# published weights, and 0.12 for a Russian model on an import's samples in 28 languages (0.16 without zero
# points).
MAX_DIFFERENCE = {Precision.INT8: 0.2, Precision.INT4: 0.4}
_LEAST_SCORE = 5.0  # of the trained model; below it, a loss proves nothing
_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
_PROOF_SOURCES = 200
MOST_ROUNDING = 2e-3  # of log-probabilities in float32; memory networks for bAbI have 2e-4
_BATCH_SENTENCES = 32
_METRIC_NAMES = {"bleu": "BLEU", "chrf": "chrF", "accuracy": "% accuracy"}
_ADVICE = {
    Precision.INT8: "Export fp32 only (--precision fp32)",
    Precision.INT4: "Export int8 or fp32 (--precision fp32,int8)",
}

_Read = TypeVar("_Read")
_NO_SCALES: Mapping[str, float] = {}
_Prove = Callable[[TrainedModel, Graphs, Precision], Parity]


class ExportError(ValueError):
    """The bundle was not written; the message says why."""


class ProofError(ExportError):
    """The graphs of a precision do not compute what the model computes."""


def export_bundle(
    trained: TrainedModel,
    path: Path,
    precisions: Sequence[Precision],
    *,
    overwrite: bool = False,
    is_strict: bool = False,
    proves: bool = True,
    adapters: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Export a model in some precisions, prove that each computes the same, and write the bundle at once.

    Args:
        trained: The model.
        path: The bundle.
        precisions: Those of the bundle.
        overwrite: Whether an older bundle is replaced.
        is_strict: Whether no bundle is written if the proof of any precision fails; by default the bundle has
            the other precisions.
        proves: False leaves out the proof, for a device that this machine does not have: the manifest then
            says that no shapes were compared.
        adapters: Whether rows of the graphs may name adapters.
        report: Called with a line about each step, as it begins or ends.

    Raises:
        ExportError: `path` exists or cannot be written, or proofs failed. No bundle is written.
    """
    if not trained.model.source_kind.forms:
        raise ExportError("a language model cannot be served: train a captioner that starts --from it")
    proving, maps = prove if proves else None, maps_for_adapters(trained.model, is_wanted=adapters)
    return write_bundle(
        path,
        lambda folder: _write(trained, folder, precisions, proving, maps, report, is_strict=is_strict),
        overwrite=overwrite,
    )


def write_bundle(path: Path, write: Callable[[Path], Manifest], *, overwrite: bool = False) -> Manifest:
    """Write a bundle in a temporary folder, and give the folder its name when it is complete.

    Raises:
        ExportError: `path` exists or cannot be written. No bundle is written.
    """
    manifests = list[Manifest]()
    write_folder(path, lambda folder: manifests.append(write(folder)), _read_back, overwrite=overwrite)
    return manifests[0]


def write_folder(
    path: Path,
    write: Callable[[Path], object],
    read_back: Callable[[Path], _Read],
    *,
    overwrite: bool,
    file: str = MANIFEST_FILE,
) -> _Read:
    """Write a folder under another name, read it back, and give it its name when it is complete.

    Returns:
        What `read_back` returned.

    Raises:
        ExportError: `path` exists, and is not to be replaced, or lacks the `file` that all such folders have;
            or it cannot be written.
    """
    check_path(path, overwrite=overwrite, file=file)
    path = path.resolve()  # a link stays, and points to the new folder
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ExportError(f"cannot write into {path.parent}: {error.strerror}") from error
    try:
        write(folder)
        found = read_back(folder)
        folder.chmod(0o755)  # only its owner can read a temporary folder
        _replace(path, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _read_back(folder: Path) -> None:
    """Raise ExportError if the server would refuse the bundle."""
    try:
        load_bundle(folder)
    except ValueError as error:
        raise ExportError(f"a server would refuse this bundle: {error}") from error


def check_path(path: Path, *, overwrite: bool, file: str = MANIFEST_FILE) -> None:
    """Raise ExportError unless a bundle, or a folder that has another file, may be written to the path."""
    if path.exists() and not overwrite:
        raise ExportError(f"{path} already exists; give another folder, or --overwrite")
    is_replaceable = (path / file).is_file() or (path.is_dir() and not any(path.iterdir()))
    if path.exists() and not is_replaceable:
        kind = "a bundle" if file == MANIFEST_FILE else "an adapter"
        raise ExportError(f"{path} is not {kind}, so it is not replaced; give another folder")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ExportError(f"cannot write into {folder}: give another folder")


def _replace(path: Path, folder: Path) -> None:
    """Replace the old folder by the new one; at every moment one of them is complete."""
    old = folder.with_name(f"{folder.name}-old")
    try:
        if path.exists():
            path.rename(old)
        folder.rename(path)
    finally:
        if old.exists() and not path.exists():  # interrupted between the two renames
            old.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def _write(
    trained: TrainedModel,
    folder: Path,
    precisions: Sequence[Precision],
    prove: _Prove | None,
    maps: AdaptedMaps | None,
    report: Callable[[str], None],
    *,
    is_strict: bool,
) -> Manifest:
    config, kind = trained.config, trained.model.source_kind
    trained.tokenizer.save(folder / TOKENIZER_FILE)
    tokenizer = file_spec(folder, TOKENIZER_FILE)
    variants = write_variants(
        folder,
        precisions,
        lambda precision: _export_variant(trained, folder, precision, prove, maps, report),
        report,
        is_strict=is_strict,
    )
    score = {} if trained.dev_score is None else {"dev_score": f"{trained.dev_score:.2f}"}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kind=kind_of(config),
        sizes=sizes_of(config),
        source_vocab_size=config.vocab_size,
        target_vocab_size=config.vocab_size,
        special_ids=SpecialIds(PAD_ID, (EOS_ID,)),
        template=TokenTemplate(start=(BOS_ID,), source_suffix=(EOS_ID,)),
        sources=dict(kind.forms),
        memory=kind.memory,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        variants=variants,
        generation=Generation(splits_sentences=trained.has_single_sentences),
        source_language=trained.source_language,
        target_language=trained.target_language,
        length_bound=trained.length_bound,
        provenance=trained.provenance | score,
        **adapted_fields(trained.model, maps),
    )
    write_manifest(folder, manifest)
    return manifest


def write_variants(
    folder: Path,
    precisions: Sequence[Precision],
    write: Callable[[Precision], Variant],
    report: Callable[[str], None],
    *,
    is_strict: bool,
) -> dict[Precision, Variant]:
    """Write the precisions whose proof holds, and report the others.

    Raises:
        ProofError: The proof of every precision fails, or with `is_strict` of any.
    """
    variants: dict[Precision, Variant] = {}
    failures: dict[Precision, ProofError] = {}
    for precision in precisions:
        try:
            variants[precision] = write(precision)
        except ProofError as error:
            if is_strict:
                raise
            failures[precision] = error
            shutil.rmtree(folder / precision)
    for precision, failure in failures.items():
        if not variants:
            raise failure
        report(f"{precision} is left out: {failure}")
    return variants


def _export_variant(
    trained: TrainedModel,
    folder: Path,
    precision: Precision,
    prove: _Prove | None,
    maps: AdaptedMaps | None,
    report: Callable[[str], None],
) -> Variant:
    modules = make_graphs(trained, precision, maps)
    variant = write_variant(
        folder,
        precision,
        modules,
        trained.model,
        None if prove is None else lambda graphs: prove(trained, graphs, precision),
        report,
        {} if maps is None else maps.scales,
    )
    if prove is not None:
        report(f"{precision}: {describe(variant.parity, precision, trained.dev)}")
    return variant


def write_variant(
    folder: Path,
    precision: Precision,
    modules: dict[Verb, Graph],
    model: EncoderDecoder,
    prove: Callable[[Graphs], Parity] | None,
    report: Callable[[str], None],
    adapter_scales: Mapping[str, float] = _NO_SCALES,
) -> Variant:
    """Write the graphs of one precision into a bundle's folder, and prove that they compute the same."""
    provider = provider_of(precision) if prove else ""
    report(f"{precision}: converting")
    models = {verb: convert.convert(module) for verb, module in modules.items()}
    subfolder = folder / precision
    subfolder.mkdir()
    paths = convert.save(models, subfolder)
    del models
    for module in modules.values():
        module.to("meta")  # the sessions read the files, and need this memory
    proof = Parity(0.0, None, ())
    if prove:
        report(f"{precision}: comparing with the {model.origin} model")
        adapted = modules[Verb.STEP].adapted
        maps = () if adapted is None else adapted.maps
        proof = prove(Graphs(paths, modules, provider, model.source_kind, maps))
    return Variant(
        graphs={
            verb: GraphSpec(_spec(folder, path), modules[verb].inputs, modules[verb].outputs)
            for verb, path in paths.items()
        },
        weights=_spec(folder, subfolder / convert.WEIGHTS_FILE),
        parity=proof,
        adapter_scales=dict(adapter_scales),
    )


def maps_for_adapters(model: EncoderDecoder, *, is_wanted: bool) -> AdaptedMaps | None:
    """The maps of a model that adapters may change, if that is wanted.

    Raises:
        ExportError: The model is not a Transformer.
    """
    if not is_wanted:
        return None
    if not isinstance(model, Transformer):
        raise ExportError(
            f"a model of the kind {kind_of(model.config)} takes no adapters, only a Transformer does: leave "
            "--adapters out"
        )
    return AdaptedMaps(model)


def adapted_fields(model: EncoderDecoder, maps: AdaptedMaps | None) -> dict[str, Any]:
    """The fields of a manifest that say which maps of a model adapters may change."""
    if maps is None:
        return {}
    return {"adapted_maps": tuple(maps.maps), "adapted_checksum": checksum_of(model)}


def make_graphs(
    trained: TrainedModel, precision: Precision, maps: AdaptedMaps | None = None
) -> dict[Verb, Graph]:
    """The torch modules of a model's graphs in one precision, with the maps that adapters may change."""
    return with_adapters(make_modules(trained.model, factory_of(precision, maps)), maps)


def factory_of(precision: Precision, maps: AdaptedMaps | None = None) -> LinearFactory:
    """Creates the maps of a precision, with those that adapters may change."""
    linear: LinearFactory = (
        QuantizedFactory(BITS[precision])
        if precision in BITS
        else FloatFactory(_DTYPES[precision], is_fused=precision is not Precision.FP32)
    )
    if maps is None:
        return linear
    maps.scales.clear()
    return AdaptedFactory(linear, maps)


def describe(proof: Parity, precision: Precision, dev: Sequence[tuple[str, str]]) -> str:
    """The proof in one line; `dev` are all dev pairs."""
    text = describe_differences(proof, precision)
    if proof.score is not None and proof.reference_score is not None:
        text += (
            f", {_METRIC_NAMES[proof.metric]} {proof.score:.2f} on {len(_proof_targets(dev))} dev sources "
        )
        text += f"(trained model {proof.reference_score:.2f}"
        text += ", too low to prove anything)" if proof.reference_score < _LEAST_SCORE else ")"
    return text


def describe_differences(proof: Parity, precision: Precision) -> str:
    """The differences of log-probabilities, with the limit of the one that decides."""
    worst, mean = proof.max_log_probability_difference, proof.mean_log_probability_difference
    if mean is None:
        return f"worst difference of log-probabilities {worst:.1e} (tolerance {proof.tolerance:.0e})"
    return (
        f"mean difference of log-probabilities {mean:.1e} (tolerance {MAX_DIFFERENCE[precision]}), "
        f"worst for random tokens {worst:.1e}"
    )


def prove(trained: TrainedModel, graphs: Graphs, precision: Precision) -> Parity:
    """Compare the graphs of a precision with the model; ProofError if they differ more than is allowed."""
    proof = compare(trained.model, graphs, precision)
    if precision not in BITS:
        return proof
    targets = _proof_targets(trained.dev)
    mean = parity.mean_difference(trained.model, graphs, _encoded(trained, targets))
    if not mean <= MAX_DIFFERENCE[precision]:
        raise ProofError(
            f"{precision} differs from the {trained.model.origin} model by {mean:.2f} on average in the "
            f"log-probability of a token of dev, and {MAX_DIFFERENCE[precision]} is allowed. "
            f"{_ADVICE[precision]}"
        )
    references = [text for texts in targets.values() for text in texts]
    metric = metric_for(trained.model.metric, references, MetricSettings())
    ours, reference = _scores(trained, graphs, targets, metric)
    if reference >= _LEAST_SCORE and ours < reference - MAX_LOSS[precision]:
        raise ProofError(
            f"{precision} scores {ours:.2f} {_METRIC_NAMES[metric]} on dev where the trained model scores "
            f"{reference:.2f}; a loss of {MAX_LOSS[precision]} is allowed. {_ADVICE[precision]}"
        )
    return replace(
        proof,
        score=ours,
        reference_score=reference,
        metric=metric,
        mean_log_probability_difference=mean,
    )


def compare(
    model: EncoderDecoder,
    graphs: Graphs,
    precision: Precision,
    shapes: parity.Shapes = parity.SHAPES,
    tolerance: float | None = None,
) -> Parity:
    """Compare log-probabilities for random tokens; raise ProofError if one differs by too much."""
    difference = parity.worst_difference(model, graphs, shapes)
    is_given, tolerance = tolerance is not None, TOLERANCES[precision] if tolerance is None else tolerance
    if precision is Precision.FP32 and not is_given and not difference <= tolerance:
        # The sources are random, and some models answer them with sums of far larger numbers than others do.
        tolerance = min(max(tolerance, 2 * parity.rounding(model, shapes)), MOST_ROUNDING)
    if not difference <= tolerance:
        raise ProofError(
            f"{precision} differs from the {model.origin} model by {difference:.1e} in a log-probability, "
            f"and {tolerance:.0e} is allowed"
        )
    return Parity(difference, tolerance, tuple(shapes))


def _proof_targets(dev: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """The first sources of dev, each once, with all its targets: a picture may have five captions."""
    return dict(islice(by_source([SentencePair(*pair) for pair in dev]).items(), _PROOF_SOURCES))


def _scores(
    trained: TrainedModel, graphs: Graphs, targets: dict[str, list[str]], metric: Metric
) -> tuple[float, float]:
    """The scores of the graphs and of the trained model on the sources, both with greedy search."""
    kind = trained.model.source_kind
    sources, references = kind.encode(list(targets), trained.tokenizer), list(targets.values())
    lengths = list(map(kind.length, sources))
    limits = target_limits(lengths, trained.config, trained.length_bound)
    theirs = greedy_search(trained.model, sources, bos_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=limits)
    ours: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lengths.__getitem__)
    for start in range(0, len(order), _BATCH_SENTENCES):
        chosen = order[start : start + _BATCH_SENTENCES]
        batch = [sources[i] for i in chosen]
        found = graphs.greedy(
            batch, start_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=[limits[i] for i in chosen]
        )
        for i, target in zip(chosen, found, strict=True):
            ours[i] = target
    decode = trained.tokenizer.decode_batch
    return score(decode(ours), references).by(metric), score(decode(theirs), references).by(metric)


def _encoded(trained: TrainedModel, targets: dict[str, list[str]]) -> list[tuple[Inputs, list[int]]]:
    """The sources, and the ids of the first target of each with bos and eos, cut at the limit."""
    kind = trained.model.source_kind
    sources = map(kind.inputs, kind.encode(list(targets), trained.tokenizer))
    first_targets = trained.tokenizer.encode_batch([first for first, *_ in targets.values()])
    return [
        (source, [BOS_ID, *target, EOS_ID][: trained.config.max_target_length + 1])
        for source, target in zip(sources, first_targets, strict=True)
    ]


def provider_of(precision: Precision) -> str:
    """The provider of the proof: CUDA's for its precisions; without CUDA, fp16 is proved on the CPU."""
    cuda = "CUDAExecutionProvider"
    if precision not in (Precision.FP16, Precision.BF16):
        return "CPUExecutionProvider"
    if cuda in ort.get_available_providers():
        load_cuda_libraries(None)
        return cuda
    if precision is Precision.BF16:
        raise ExportError(
            "bf16 graphs can only be proved on a CUDA device, and this ONNX Runtime has no CUDA: export them "
            "on a machine with CUDA, or export fp16"
        )
    return "CPUExecutionProvider"


def _spec(folder: Path, path: Path) -> FileSpec:
    return file_spec(folder, path.relative_to(folder).as_posix())
