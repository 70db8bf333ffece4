"""A trained model to a bundle: graphs, weights, tokenizer, manifest and proof, written all or nothing."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime as ort
import torch

from bundle.manifest import (
    FileSpec,
    GraphSpec,
    Manifest,
    Parity,
    SpecialIds,
    Variant,
    file_spec,
    write_manifest,
)
from bundle.names import FORMAT_VERSION, MANIFEST_FILE, TOKENIZER_FILE, Precision, Verb
from export import convert, parity
from export.calibration import calibrate
from export.graphs import DecodeGraph, EncodeGraph, Graph, StepGraph
from export.linear import FloatFactory, Int8Factory, LinearFactory
from export.runtime import Graphs
from training.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from training.lengths import target_limits
from training.run import TrainedModel
from training.scoring import score
from training.search import greedy_search
from training.transformer import Transformer, alignment_layer

TOLERANCES = {  # of a log-probability
    Precision.FP32: 1e-4,  # float32 sums in another order
    Precision.FP16: 0.1,  # 11 significant bits in logits of about ±30
    Precision.BF16: 0.8,  # 8 bits
    Precision.INT8: 10.0,  # random tokens lie far from those calibrated on; measured 0.3 to 0.7
}
# Of int8, on real pairs that it was not calibrated on
MAX_INT8_BLEU_LOSS = 1.0
MAX_INT8_MEAN_DIFFERENCE = 0.2  # of a reference's log-probability per token
_LEAST_BLEU = 5.0  # of the trained model, for a loss of BLEU to say anything
_DTYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
_CALIBRATION_PAIRS = 200
_PROOF_PAIRS = 200
_FEWEST_PAIRS_TO_SPLIT = 100
_BATCH_SENTENCES = 32
_INT8_ADVICE = "Export fp32 only, or calibrate on more dev pairs"

_Pairs = Sequence[tuple[str, str]]


class ExportError(ValueError):
    """The bundle was not written, and why."""


def export_bundle(
    trained: TrainedModel,
    path: Path,
    precisions: Sequence[Precision],
    *,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Export, prove, and write the bundle in one move.

    Args:
        trained: The model, its tokenizer and its dev pairs.
        path: The folder to make.
        precisions: At least one.
        overwrite: Whether a bundle that is there already is replaced.
        report: Is told each step as it begins or ends.

    Raises:
        ExportError: `path` is taken or cannot be written, or a proof failed; then there is no new bundle.
    """
    if path.exists() and not overwrite:
        raise ExportError(f"{path} is there already; give another folder, or --overwrite")
    if path.exists() and not _may_be_replaced(path):
        raise ExportError(f"{path} is no bundle, and is not replaced; give another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ExportError(f"cannot write into {path.parent}: {error.strerror}") from error
    try:
        manifest = _write(trained, folder, precisions, report)
        folder.chmod(0o755)  # a temporary folder is its owner's alone
        _replace(path, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return manifest


def _replace(path: Path, folder: Path) -> None:
    """Put the new folder in the old one's place; at every moment one of them is whole."""
    old = folder.with_name(f"{folder.name}-old")
    try:
        if path.exists():
            path.rename(old)
        folder.rename(path)
    finally:
        if old.exists() and not path.exists():  # interrupted between the two
            old.rename(path)
        shutil.rmtree(old, ignore_errors=True)


def _may_be_replaced(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file() or (path.is_dir() and not any(path.iterdir()))


def _write(
    trained: TrainedModel, folder: Path, precisions: Sequence[Precision], report: Callable[[str], None]
) -> Manifest:
    config = trained.config
    trained.tokenizer.save(folder / TOKENIZER_FILE)
    tokenizer = file_spec(folder, TOKENIZER_FILE)
    variants = {precision: _export_variant(trained, folder, precision, report) for precision in precisions}
    score = {} if trained.dev_score is None else {"dev_score": f"{trained.dev_score:.2f}"}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kind="transformer",
        sizes={
            "vocab_size": config.vocab_size,
            "d_model": config.d_model,
            "d_ff": config.d_ff,
            "d_head": config.d_head,
            "num_heads": config.num_heads,
            "num_encoder_layers": config.num_encoder_layers,
            "num_decoder_layers": config.num_decoder_layers,
        },
        special_ids=SpecialIds(PAD_ID, BOS_ID, EOS_ID, UNK_ID, decoder_start_id=BOS_ID),
        attention_scale=1 / math.sqrt(config.d_head),
        alignment_layer=alignment_layer(config.num_decoder_layers),
        has_logits_bias=False,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        variants=variants,
        source_language=trained.source_language,
        length_bound=trained.length_bound,
        provenance=trained.provenance | score,
    )
    write_manifest(folder, manifest)
    return manifest


def _export_variant(
    trained: TrainedModel, folder: Path, precision: Precision, report: Callable[[str], None]
) -> Variant:
    provider = _provider(precision)
    report(f"{precision}: converting")
    modules = make_graphs(trained, precision)
    models = {verb: convert.convert(module) for verb, module in modules.items()}
    subfolder = folder / precision
    subfolder.mkdir()
    paths = convert.save(models, subfolder)
    report(f"{precision}: comparing with the trained model")
    graphs = Graphs(paths, modules, provider)
    decode = modules[Verb.DECODE]
    assert isinstance(decode, DecodeGraph)
    proof = _prove(trained, graphs, decode, precision)
    report(f"{precision}: {describe(proof, trained.dev)}")
    return Variant(
        graphs={
            verb: GraphSpec(_spec(folder, path), modules[verb].inputs, modules[verb].outputs)
            for verb, path in paths.items()
        },
        weights=_spec(folder, subfolder / convert.WEIGHTS_FILE),
        parity=proof,
    )


def make_graphs(trained: TrainedModel, precision: Precision) -> dict[Verb, Graph]:
    """The torch modules of the three graphs in one precision."""
    linear: LinearFactory
    if precision is Precision.INT8:
        calibration, _ = _split(trained.dev)
        fed = [(source, target[:-1]) for source, target in _encoded(trained, calibration)]
        linear = Int8Factory(calibrate(trained.model, fed))
    else:
        linear = FloatFactory(_DTYPES[precision], is_fused=precision is not Precision.FP32)
    return make_modules(trained.model, linear)


def make_modules(model: Transformer, linear: LinearFactory) -> dict[Verb, Graph]:
    """The torch modules of the three graphs with maps of one kind."""
    layer = alignment_layer(model.config.num_decoder_layers)
    return {
        Verb.ENCODE: EncodeGraph(model, linear),
        Verb.STEP: StepGraph(model, linear),
        Verb.DECODE: DecodeGraph(model, linear, alignment_layer=layer),
    }


def describe(proof: Parity, dev: Sequence[tuple[str, str]]) -> str:
    """The proof in one line; `dev` are all dev pairs."""
    text = f"worst difference of log-probabilities {proof.max_log_probability_difference:.1e}"
    text += f" (tolerance {proof.tolerance:.0e})"
    if proof.bleu is not None and proof.reference_bleu is not None:
        pairs = _split(dev)[1]
        text += f", mean {proof.mean_log_probability_difference:.1e}"
        text += f", BLEU {proof.bleu:.2f} on {len(pairs)} dev pairs (trained model {proof.reference_bleu:.2f}"
        text += ", too low to prove anything)" if proof.reference_bleu < _LEAST_BLEU else ")"
        if len(dev) < _FEWEST_PAIRS_TO_SPLIT:
            text += "; they are too few to split, so it was calibrated on them, too"
    return text


def _prove(trained: TrainedModel, graphs: Graphs, decode: DecodeGraph, precision: Precision) -> Parity:
    difference, tolerance = parity.worst_difference(trained.model, graphs, decode), TOLERANCES[precision]
    if not difference <= tolerance:
        raise ExportError(
            f"{precision} differs from the trained model by {difference:.1e} in a log-probability, "
            f"and {tolerance:.0e} is allowed"
        )
    if precision is not Precision.INT8:
        return Parity(difference, tolerance, parity.SHAPES)
    _, pairs = _split(trained.dev)
    mean = parity.mean_difference(trained.model, graphs, decode, _encoded(trained, pairs))
    if not mean <= MAX_INT8_MEAN_DIFFERENCE:
        raise ExportError(
            f"int8 differs from the trained model by {mean:.2f} on average in the log-probability of a token "
            f"of dev, and {MAX_INT8_MEAN_DIFFERENCE} is allowed. {_INT8_ADVICE}"
        )
    bleu, reference = _bleu(trained, graphs, pairs)
    if reference >= _LEAST_BLEU and bleu < reference - MAX_INT8_BLEU_LOSS:
        raise ExportError(
            f"int8 scores {bleu:.2f} BLEU on dev where the trained model scores {reference:.2f}; a loss "
            f"of {MAX_INT8_BLEU_LOSS} is allowed. {_INT8_ADVICE}"
        )
    return Parity(difference, tolerance, parity.SHAPES, bleu, reference, mean)


def _split(dev: _Pairs) -> tuple[_Pairs, _Pairs]:
    """Dev pairs to calibrate on, and others for the proof; where there are few, all of them for both."""
    if len(dev) < _FEWEST_PAIRS_TO_SPLIT:
        return dev, dev
    return dev[0::2][:_CALIBRATION_PAIRS], dev[1::2][:_PROOF_PAIRS]


def _bleu(trained: TrainedModel, graphs: Graphs, pairs: _Pairs) -> tuple[float, float]:
    """SacreBLEU on the pairs of the graphs and of the trained model, both greedy."""
    sources = trained.tokenizer.encode_sources([source for source, _ in pairs])
    references = [target for _, target in pairs]
    limits = target_limits(sources, trained.config, trained.length_bound)
    theirs = greedy_search(trained.model, sources, bos_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=limits)
    ours: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), _BATCH_SENTENCES):
        chosen = order[start : start + _BATCH_SENTENCES]
        batch = [sources[i] for i in chosen]
        targets = graphs.greedy(
            batch, start_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=[limits[i] for i in chosen]
        )
        for i, target in zip(chosen, targets, strict=True):
            ours[i] = target
    decode = trained.tokenizer.decode_batch
    return score(decode(ours), references).bleu, score(decode(theirs), references).bleu


def _encoded(trained: TrainedModel, pairs: _Pairs) -> list[tuple[list[int], list[int]]]:
    """Source token ids, and target token ids with the start and the end, of each pair, cut at the limits."""
    sources = trained.tokenizer.encode_sources([source for source, _ in pairs])
    targets = trained.tokenizer.encode_batch([target for _, target in pairs])
    max_source, max_target = trained.config.max_source_length, trained.config.max_target_length
    return [
        (source[:max_source], [BOS_ID, *target, EOS_ID][: max_target + 1])
        for source, target in zip(sources, targets, strict=True)
    ]


def _provider(precision: Precision) -> str:
    """Where graphs are proved: those for CUDA there, or fp16 on the CPU where there is no device."""
    cuda = "CUDAExecutionProvider"
    if precision not in (Precision.FP16, Precision.BF16):
        return "CPUExecutionProvider"
    if cuda in ort.get_available_providers():
        ort.preload_dlls()  # the CUDA and cuDNN libraries that pip installed
        return cuda
    if precision is Precision.BF16:
        raise ExportError(
            "bf16 graphs can only be proved on a CUDA device, and this ONNX Runtime has no CUDA: export them "
            "where there is one, or export fp16"
        )
    return "CPUExecutionProvider"


def _spec(folder: Path, path: Path) -> FileSpec:
    return file_spec(folder, path.relative_to(folder).as_posix())
