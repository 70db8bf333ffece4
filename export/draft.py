"""Cuts the output of a bundle to the tokens of some texts, for a model that only drafts for another one.

Where a vocabulary is large, a step of a small model mostly reads its output's weights, a row of them for each
token, and texts of one language use few of these. A draft is checked, so it may be chosen among them alone
(Zhao et al. 2025, arXiv:2502.14856). What is left of the weights stays as it was, and was proved when it was
exported.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import (
    Bundle,
    GraphSpec,
    Manifest,
    TensorSpec,
    Variant,
    file_spec,
    load_bundle,
    write_manifest,
)
from seq2seq_serve.bundle.names import Precision, Role, Verb
from seq2seq_serve.export import convert
from seq2seq_serve.export.exporter import ExportError, check_path, write_bundle

_PANEL = 32  # tokens of int4 weights that lie together
_TEXTS_AT_ONCE = 1000

_Array = NDArray[Any]


def cut_bundle(
    path: Path,
    to: Path,
    texts: Iterable[str],
    *,
    most: int | None = None,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Write a bundle without a `decode` graph; its steps choose among the tokens of some texts.

    Args:
        path: The bundle to cut, in int8 or int4.
        to: The bundle to write.
        texts: Texts in the language of the targets.
        most: The number of tokens to keep, the most frequent ones, beside those that end a target; None keeps
            all of the texts.
        overwrite: Whether an older bundle is replaced.
        report: Called with a line about each step as it begins, and about what is kept.

    Raises:
        BundleError: `path` is not a bundle.
        ExportError: `path` has no step that chooses tokens, the texts have no tokens, or `to` is `path`,
            exists or cannot be written.
    """
    check_path(to, overwrite=overwrite)
    if to.resolve() == path.resolve():
        raise ExportError(f"{path} is the bundle to cut, which is kept: give another folder")
    texts = list(texts)  # before the bundle: that is the longer work
    bundle = load_bundle(path)
    manifest = bundle.manifest
    if manifest.drafts_only:
        raise ExportError(f"{path} is cut already")
    precisions = [
        precision
        for precision, variant in manifest.variants.items()
        if names.CANDIDATE_IDS in [spec.name for spec in variant.graphs[Verb.STEP].outputs]
    ]
    if not precisions:
        raise ExportError(
            f"{path} has {', '.join(manifest.variants)}, and no step that chooses tokens: export a "
            "Transformer without capped logits in int8 or int4, with this version"
        )
    report("counting the tokens of the texts")
    counts = Counter[int]()
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        for token_ids in bundle.target_tokenizer.encode_batch(texts[start : start + _TEXTS_AT_ONCE]):
            counts.update(token_ids)
    if not counts:
        raise ExportError("the texts have no tokens")
    frequent = counts.most_common(most)
    share = sum(count for _, count in frequent) / counts.total()
    kept = np.array(sorted({token_id for token_id, _ in frequent} | {*manifest.special_ids.eos_ids}))
    of_texts = "" if most is None else f", {share:.2%} of those in the texts"
    report(f"{len(kept):,} of {manifest.target_vocab_size:,} tokens are kept{of_texts}")
    return write_bundle(
        to, lambda folder: _write(bundle, folder, precisions, kept, report), overwrite=overwrite
    )


def _write(
    bundle: Bundle,
    folder: Path,
    precisions: Sequence[Precision],
    kept: _Array,
    report: Callable[[str], None],
) -> Manifest:
    manifest = bundle.manifest
    for file in {manifest.source_tokenizer.file, manifest.target_tokenizer.file}:
        shutil.copyfile(bundle.path / file, folder / file)
    variants = {}
    for precision in precisions:
        report(f"{precision}: cutting the weights")
        variant = manifest.variants[precision]
        specs = {verb: variant.graphs[verb] for verb in (Verb.ENCODE, Verb.STEP)}
        models = {verb: ir.load(bundle.path / spec.file.file) for verb, spec in specs.items()}
        _cut(models[Verb.STEP], kept)
        (folder / precision).mkdir()
        paths = convert.save(models, folder / precision)
        graphs = {
            verb: GraphSpec(
                file_spec(folder, paths[verb].relative_to(folder).as_posix()),
                spec.inputs,
                tuple(_cut_spec(each, len(kept)) for each in spec.outputs),
            )
            for verb, spec in specs.items()
        }
        weights = file_spec(folder, f"{precision}/{convert.WEIGHTS_FILE}")
        variants[precision] = Variant(graphs, weights, variant.parity)
    cut = replace(manifest, variants=variants, drafts_only=True)
    write_manifest(folder, cut)
    return cut


def _cut_spec(spec: TensorSpec, num_tokens: int) -> TensorSpec:
    return replace(spec, axes=(*spec.axes[:-1], num_tokens)) if spec.role is Role.LOGITS else spec


def _cut(step: ir.Model, kept: _Array) -> None:
    """Let a step choose among these ids, which are in order; it answers with an id, or as before with -1."""
    graph = step.graph
    [node] = [node for node in graph if node.op_type in _CHOICES]
    for place, select in enumerate(_CHOICES[node.op_type], start=1):
        whole = node.inputs[place]
        assert whole is not None
        assert whole.name is not None
        assert whole.const_value is not None
        values = select(whole.const_value.numpy(), kept)
        node.replace_input_with(place, _initializer(graph, f"kept_{place}", values))
        if not whole.uses():
            del graph.initializers[whole.name]
    ids = _initializer(graph, "kept_ids", np.append(kept, -1))  # Gather counts a place of -1 from the end
    logits, places = node.outputs[:2]
    gather = ir.node("Gather", [ids, places])
    chosen = gather.outputs[0]
    chosen.name, chosen.type, chosen.shape = places.name, places.type, places.shape
    graph.outputs[graph.outputs.index(places)] = chosen
    places.name = "kept_places"
    graph.insert_after(node, gather)
    logits.shape = ir.Shape((names.Axis.BATCH, len(kept)))


def _initializer(graph: ir.Graph, name: str, values: _Array) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(values), name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(values.shape), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _columns(values: _Array, kept: _Array) -> _Array:
    """The numbers `(…, V)` of some tokens."""
    return values[..., kept]


def _int4_levels(octets: _Array, kept: _Array) -> _Array:
    """The levels of some tokens of `(panels, blocks, 8, 16, 4)`, two tokens of a panel in each byte."""
    B = octets.shape[1]
    panels, halves, columns = kept // _PANEL, kept // 16 % 2, kept % 16
    of_tokens = octets[panels, :, :, columns] >> 4 * halves[:, None, None, None] & 15  # (n, B, 8, 4)
    padded = _padded(of_tokens.astype(np.uint8), 8)  # the level of 0
    low, high = padded.reshape(-1, 2, 16, B, 8, 4).transpose(1, 0, 3, 4, 2, 5)
    cut: _Array = low | high << 4
    return cut


def _int4_scales(scales: _Array, kept: _Array) -> _Array:
    """The scales of some tokens of `(panels, blocks, 32)`."""
    P, B, _ = scales.shape
    of_tokens = scales.transpose(0, 2, 1).reshape(P * _PANEL, B)[kept]
    return _padded(of_tokens, 0).reshape(-1, _PANEL, B).transpose(0, 2, 1)


def _padded(of_tokens: _Array, value: int) -> _Array:
    """Tokens up to a whole panel."""
    padding = [(0, -len(of_tokens) % _PANEL), *[(0, 0)] * (of_tokens.ndim - 1)]
    return np.pad(of_tokens, padding, constant_values=value)


# What is kept of the inputs by token, from the second one on, of an operator that chooses tokens
_CHOICES: Mapping[str, Sequence[Callable[[_Array, _Array], _Array]]] = {
    "QuantizedChoice": (_columns,) * 5,
    "Int4Choice": (_int4_levels, _int4_scales, _columns, _columns),
}
