"""Turns an adapter of low rank, as the library `peft` saves it, into one that is served beside its base."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from seq2seq_serve.bundle.adapters import ADAPTER_FILE as OUR_FILE
from seq2seq_serve.bundle.adapters import (
    ADAPTER_VERSION,
    MAX_RANK,
    WEIGHTS_FILE,
    AdaptedShape,
    AdapterManifest,
    Weights,
    load_adapter,
    shape_problems,
    write_adapter,
)
from seq2seq_serve.bundle.errors import first_line
from seq2seq_serve.bundle.manifest import Bundle, FileSpec, Parity, is_checkpoint, load_bundle
from seq2seq_serve.bundle.names import Form, Precision
from seq2seq_serve.export import parity
from seq2seq_serve.export.exporter import (
    BITS,
    TOLERANCES,
    ExportError,
    ProofError,
    check_path,
    provider_of,
    write_folder,
)
from seq2seq_serve.export.graphs.adapted import checksum_of
from seq2seq_serve.export.huggingface.exporter import MAX_MEAN_DIFFERENCE
from seq2seq_serve.export.huggingface.reference import (
    RandomBatch,
    adapter_settings,
    largest_rounding,
    random_batches,
    read_theirs,
    their_log_probabilities,
    with_adapter,
    worst_difference,
)
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.training.huggingface.checkpoint import (
    ADAPTER_FILE,
    CheckpointError,
    open_checkpoint,
)
from seq2seq_serve.training.huggingface.dialect import Limits
from seq2seq_serve.training.huggingface.families import config_of, family_of
from seq2seq_serve.training.huggingface.weights import has_projection, read_model, renamed_by
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.run import load_run

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MERGED = "python -m export huggingface CHECKPOINT BUNDLE --merge ADAPTER puts it into a bundle of its own"
# Settings that change the model by more than low-rank terms of its maps, and what they are called
_FURTHER = {
    "use_dora": "DoRA",
    "modules_to_save": "trained modules",
    "trainable_token_indices": "new tokens",
    "lora_bias": "biases of its own",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "an adapter that begins at a token",
    "target_parameters": "parameters outside of maps",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "a router",
}
_OF_RUN = "adapter"  # the folder of a run in which its adapter is
_READS_PROJECTION = re.compile(r"\.cross_attention\.(key|value)\.")
_PROOF_SHAPES = ((1, 9, 6), (3, 17, 4))
_MEDIA_SHAPES = ((2, 1, 5),)


@dataclass(frozen=True)
class _Terms:
    """The low-rank terms of one map: A `(r, I)` and B `(O, r)`, with the scale of both."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """A `(r, I)` and B `(r, O)` in half precision; B has the scale."""
        return self.a.half(), (self.b.t() * self.scale).half().contiguous()


def export_adapter(
    folder: Path,
    bundle_path: Path,
    path: Path,
    *,
    checkpoint_path: Path | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> AdapterManifest:
    """Write an adapter for the bundles of its base, and prove that their graphs compute what peft does.

    Args:
        folder: As `save_pretrained` of peft writes it, or a run that trained one.
        bundle_path: A bundle of the base, exported with adapters.
        path: The adapter to write.
        checkpoint_path: The base, a checkpoint or a run; None for the one that the adapter names.
        overwrite: Whether an older adapter is replaced.
        report: Called with a line about each step.

    Raises:
        BundleError: `bundle_path` is not a bundle.
        CheckpointError: The adapter cannot be read, is of another kind, or changes another model.
        ExportError: `path` exists or cannot be written, the bundle takes no adapters, or the proof failed.
            Nothing is written.
    """
    check_path(path, overwrite=overwrite, file=OUR_FILE)
    if (folder / _OF_RUN / ADAPTER_FILE).is_file():
        folder = folder / _OF_RUN
    settings = _settings(folder)
    bundle = load_bundle(bundle_path)
    if not bundle.manifest.adapted_maps:
        raise ExportError(f"{bundle_path} takes no adapters: export it with --adapters")
    base_path = _base(settings, folder, checkpoint_path, report)
    report(f"reading {base_path}")
    base = _Published(base_path, bundle) if is_checkpoint(base_path) else _Run(base_path)
    model = base.model
    _check_base(base, bundle)
    terms = _read_terms(folder, settings, base)
    parts = {name: AdaptedShape(len(one.a), one.a.shape[1], len(one.b)) for name, one in terms.items()}
    if problems := shape_problems(parts, bundle.manifest.adapted_maps):
        raise CheckpointError(f"{folder} is not an adapter of {base.path}: {'; '.join(problems[:5])}")
    halves = {name: one.weights for name, one in terms.items()}
    weights: Weights = {name: (a.numpy(), b.numpy()) for name, (a, b) in halves.items()}
    rounded_terms = {name: b.float().t() @ a.float() for name, (a, b) in halves.items()}
    report(f"comparing {len(terms)} adapted layers with peft")
    with _Added(model, {name: one.scale * one.b @ one.a for name, one in terms.items()}):
        proof = base.compare(folder)
    with _Added(model, rounded_terms):
        rounded = base.compare(folder).max_log_probability_difference
    if not proof.max_log_probability_difference <= (proof.tolerance or 0.0):
        raise ProofError(
            f"the model with the adapter differs from that of peft: {_described(proof)}. If its terms are so "
            f"large that numbers in float32 differ, {_MERGED}"
        )
    report(f"the model equals peft's: {_described(proof)}; {rounded:.1e} with terms in half precision")
    _prove_graphs(bundle, model, rounded_terms, weights, proof, report)
    import peft

    manifest = AdapterManifest(
        format_version=ADAPTER_VERSION,
        base=base.path.resolve().name,
        base_checksum=bundle.manifest.adapted_checksum,
        parts=parts,
        weights=FileSpec(WEIGHTS_FILE, "", 0),
        parity=proof,
        provenance={"adapter": folder.resolve().name, "peft": peft.__version__},
    )
    written = write_folder(
        path,
        lambda to: write_adapter(to, manifest, weights),
        load_adapter,
        overwrite=overwrite,
        file=OUR_FILE,
    )
    report(f"rank {manifest.rank}: a server takes it with --max-rank {manifest.rank} or more (default 64)")
    return written.manifest


def _settings(folder: Path) -> Mapping[str, Any]:
    """Returns the settings of an adapter of low rank; CheckpointError if it changes the model otherwise."""
    settings = adapter_settings(folder)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{folder} is an adapter of the kind {kind}, and LORA is served: {_MERGED}")
    further = [text for name, text in _FURTHER.items() if settings.get(name)]
    if settings.get("bias", "none") != "none":
        further.append("trained biases")
    if further:
        raise CheckpointError(
            f"{folder} has {' and '.join(further)} beside its low-rank terms, which are not served: {_MERGED}"
        )
    return settings


def _base(
    settings: Mapping[str, Any], folder: Path, given: Path | None, report: Callable[[str], None]
) -> Path:
    """Returns the folder of the checkpoint that an adapter changes."""
    named = settings.get("base_model_name_or_path") or ""
    if given is not None:
        if named and Path(named).resolve() != given.resolve():
            report(f"the adapter names the checkpoint {named}, and {given} is taken")
        return given
    if named and Path(named).is_dir():
        return Path(named)
    raise CheckpointError(
        f"{folder} is for the checkpoint {named!r}, which is not a folder here: give --checkpoint FOLDER"
    )


class _Published:
    """A checkpoint of transformers."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        self.path = path
        self._checkpoint = open_checkpoint(path)
        self._family = family_of(self._checkpoint)
        reads_texts = Form.TEXT in bundle.manifest.sources.values()
        longest_source = bundle.manifest.max_source_length if reads_texts else 0
        limits = Limits(longest_source, bundle.manifest.max_target_length)
        self._config = config_of(self._family, self._checkpoint, limits)
        self.model = read_model(self._checkpoint, self._family, self._config)
        self._expected: list[Tensor] = []

    def name_of(self, module: str) -> str:
        """Returns this project's name of a layer; an empty one if the model does not use it."""
        dialect = self._family.dialect
        renamed = renamed_by(dialect, f"{module}.weight")
        if re.fullmatch(dialect.unused, renamed):
            return ""
        if has_projection(self._checkpoint.config) and _READS_PROJECTION.search(renamed):
            raise CheckpointError(
                f"the adapter changes {module}, whose input goes through enc_to_dec_proj, which the graphs "
                f"have in the same map: {_MERGED}"
            )
        return renamed.removesuffix(".weight")

    def compare(self, folder: Path) -> Parity:
        """Compares the model, to which the terms were added, with the one that peft makes."""
        config = self._config
        batches = random_batches(config, self._checkpoint.config.get("pad_token_id") or 0)
        if not self._expected:
            theirs = _adapted(read_theirs(self.path, config.media), folder, self.path)
            self._expected = [their_log_probabilities(theirs, config.media, batch) for batch in batches]
        expected = self._expected
        tolerance = max(TOLERANCES[Precision.FP32], largest_rounding(config, expected))
        return Parity(worst_difference(self.model, batches, expected), tolerance, tuple(map(_shape, batches)))


class _Run:
    """A finished run of `python -m training train`, to whose own model peft adds the layers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = load_run(path).model
        if not isinstance(model, Transformer):
            raise CheckpointError(f"{path} is not a Transformer, and takes no adapters")
        self.model = model
        self._alone = copy.deepcopy(model)
        self._theirs: Any = None

    def name_of(self, module: str) -> str:
        return module

    def compare(self, folder: Path) -> Parity:
        if self._theirs is None:
            self._theirs = _adapted(self._alone, folder, self.path)
        difference = parity.between(self.model, self._theirs.get_base_model().eval())
        return Parity(difference, TOLERANCES[Precision.FP32], tuple(parity.SHAPES))


def _adapted(model: Any, folder: Path, base: Path) -> Any:
    """Returns the model that peft makes of both; raises CheckpointError if it cannot."""
    try:
        return with_adapter(model, folder)
    except Exception as error:  # peft's errors do not have a common class
        raise CheckpointError(f"peft cannot use {folder} with {base}: {first_line(error)}") from error


def _described(proof: Parity) -> str:
    return (
        f"worst difference of log-probabilities {proof.max_log_probability_difference:.1e} "
        f"(tolerance {proof.tolerance:.0e})"
    )


def _check_base(base: _Published | _Run, bundle: Bundle) -> None:
    found = checksum_of(base.model)
    if found != bundle.manifest.adapted_checksum:
        its = bundle.manifest.provenance.get("checkpoint") or bundle.manifest.provenance.get("preset", "")
        raise CheckpointError(
            f"{bundle.path} is not a bundle of {base.path}: it was exported from {its!r} with the "
            f"checksum {bundle.manifest.adapted_checksum[:12]}, and {base.path.name} has {found[:12]}: "
            "export that one with --adapters, or give the adapter's own checkpoint by --checkpoint"
        )


def _read_terms(folder: Path, settings: Mapping[str, Any], base: _Published | _Run) -> dict[str, _Terms]:
    """Returns the terms by the names of this project's layers."""
    import peft
    from peft.utils.other import get_pattern_key

    try:
        tensors = peft.load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # peft's errors do not have a common class
        raise CheckpointError(f"{folder}: the weights cannot be read: {first_line(error)}") from error
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{folder} has {name}, which is not a low-rank term of a linear layer: {_MERGED}"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{folder}: {name} has numbers that are NaN or infinite")
        found.setdefault(match[1], {})[match[2]] = tensor.float()
    terms: dict[str, _Terms] = {}
    alphas = settings.get("alpha_pattern") or {}
    for module, pair in sorted(found.items()):
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(f"{folder} has only one of the two matrices of {module}")
        name = base.name_of(module)
        if not name:
            continue
        rank = len(pair["A"])
        if not 1 <= rank <= MAX_RANK or pair["B"].shape[1:] != (rank,):
            raise CheckpointError(
                f"{folder}: the matrices of {module} have the shapes {list(pair['A'].shape)} and "
                f"{list(pair['B'].shape)}, and must have one rank of at most {MAX_RANK}"
            )
        alpha = alphas.get(get_pattern_key(alphas.keys(), module), settings["lora_alpha"])
        terms[name] = _Terms(
            pair["A"], pair["B"], alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        )
        if not all(each.isfinite().all() for each in terms[name].weights):
            raise CheckpointError(f"{folder}: {module} has terms beyond half precision: {_MERGED}")
    if not terms:
        raise CheckpointError(f"{folder} changes no layer that the model uses")
    return terms


class _Added:
    """The model with the terms added to its weights, until the block ends."""

    def __init__(self, model: Transformer, changes: Mapping[str, Tensor]) -> None:
        self._model, self._changes = model, changes
        self._before: dict[str, Tensor] = {}

    def __enter__(self) -> Transformer:
        for name, change in self._changes.items():
            layer = self._model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            self._before[name] = layer.weight.detach().clone()
            layer.weight.data = layer.weight.data + change
        return self._model

    def __exit__(self, *_: object) -> None:
        for name, weight in self._before.items():
            self._model.get_submodule(name).weight.data = weight


def _shape(batch: RandomBatch) -> tuple[int, int, int]:
    return len(batch.target_ids), batch.source_mask.shape[1], batch.target_ids.shape[1]


def _prove_graphs(
    bundle: Bundle,
    model: Transformer,
    rounded_terms: Mapping[str, Tensor],
    weights: Weights,
    proof: Parity,
    report: Callable[[str], None],
) -> None:
    """Compares all graphs for a CPU, with the adapter, with the model that has its terms in half precision.

    In float32 they must be equal. Levels may differ about as much as without the adapter.
    """
    precisions = [one for one in bundle.manifest.variants if one is Precision.FP32 or one in BITS]
    if not precisions:
        report("the bundle has no graphs for a CPU, so they are not compared")
    maps = bundle.manifest.adapted_maps
    shapes = _PROOF_SHAPES if model.architecture.media is None else _MEDIA_SHAPES
    pairs = parity.random_pairs(model, shapes)
    for precision in precisions:
        variant = bundle.manifest.variants[precision]
        paths = {verb: bundle.path / graph.file.file for verb, graph in variant.graphs.items()}
        graphs = Graphs(paths, variant.graphs, provider_of(precision), model.source_kind, maps)
        alone = parity.mean_difference(model, graphs, pairs) if precision in BITS else 0.0
        graphs.use_adapters([weights], (0,), variant.adapter_scales)
        with _Added(model, rounded_terms) as ours:
            if precision in BITS:
                found = parity.mean_difference(ours, graphs, pairs)
                limit = max(2 * alone, MAX_MEAN_DIFFERENCE[precision])
            else:
                found = parity.worst_difference(ours, graphs, shapes)
                limit = max(TOLERANCES[precision], proof.tolerance or 0.0)
        what = "mean" if precision in BITS else "worst"
        text = f"{what} difference of log-probabilities {found:.1e} (at most {limit:.0e}"
        text += f"; {alone:.1e} without the adapter)" if precision in BITS else ")"
        if not found <= limit:
            raise ProofError(f"the graphs in {precision} with the adapter differ from the model: {text}")
        report(f"{precision}: {text}")
