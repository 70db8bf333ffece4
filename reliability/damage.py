"""Bundles that a server must refuse, and one whose step raises on demand."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import Manifest, file_spec, load_bundle, write_manifest
from seq2seq_serve.bundle.names import Precision, Verb

RAISING_ID = 31  # a step with this token as its input raises

_FLOATS = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16  # NaN has all bits set in each

Damage = Callable[[Path], None]


def linked_copy(bundle: Path, path: Path) -> Path:
    """Create a bundle of hard links to the same files; they are never written to, only replaced."""
    shutil.copytree(bundle, path, copy_function=os.link)
    return path


def damages() -> list[Damage]:
    """Returns functions that break a bundle, one for each kind of damage."""
    return [_cut_manifest, _cut_graph, _no_graph, _no_tokenizer, _newer_format, _no_onnx, make_weights_nan]


def make_step_raise(bundle: Path) -> None:
    """Change the step graph of a bundle so that it raises if its input contains `RAISING_ID`.

    Before the graph, a `Gather` looks up a zero for every token in a table of one place, and adds it to the
    token id. For `RAISING_ID` the place is out of range, and the operator raises.
    """
    model = onnx.load(_step(bundle), load_external_data=False)
    checked = f"{names.TOKEN_IDS}_checked"
    for node in model.graph.node:
        node.input[:] = [checked if name == names.TOKEN_IDS else name for name in node.input]
    int64 = TensorProto.INT64
    model.graph.initializer.extend(
        [
            helper.make_tensor("raising_id", int64, [], [RAISING_ID]),
            helper.make_tensor("only_place", int64, [1], [0]),
        ]
    )
    nodes = [
        helper.make_node("Equal", [names.TOKEN_IDS, "raising_id"], ["is_raising"]),
        helper.make_node("Cast", ["is_raising"], ["place"], to=int64),
        helper.make_node("Gather", ["only_place", "place"], ["nothing"]),
        helper.make_node("Add", [names.TOKEN_IDS, "nothing"], [checked]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    _replace_step(bundle, model.SerializeToString())


def make_weights_nan(bundle: Path) -> None:
    """Replace the floating-point numbers in the files of weights by NaN; their checksums fit."""
    manifest = load_bundle(bundle).manifest
    variants = {}
    for precision, variant in manifest.variants.items():
        path = bundle / variant.weights.file
        content = bytearray(path.read_bytes())
        for spec in variant.graphs.values():
            for weight in onnx.load(bundle / spec.file.file, load_external_data=False).graph.initializer:
                place = {entry.key: entry.value for entry in weight.external_data}
                if place and weight.data_type in _FLOATS:
                    start, length = int(place["offset"]), int(place["length"])
                    content[start : start + length] = b"\xff" * length
        _replace_file(path, bytes(content))
        variants[precision] = replace(variant, weights=file_spec(bundle, variant.weights.file))
    _replace_manifest(bundle, replace(manifest, variants=variants))


def make_graph_nan(bundle: Path, verb: Verb) -> None:
    """Replace the vectors of floating-point numbers in the files of a graph by NaN; their checksums fit."""
    manifest = load_bundle(bundle).manifest
    variants = {}
    for precision, variant in manifest.variants.items():
        spec = variant.graphs[verb]
        model = onnx.load(bundle / spec.file.file, load_external_data=False)
        for weight in model.graph.initializer:
            if weight.data_type in _FLOATS and weight.dims and not weight.external_data:
                content = b"\xff" * numpy_helper.to_array(weight).nbytes
                for field in ("float_data", "int32_data"):
                    weight.ClearField(field)
                weight.raw_data = content
        _replace_file(bundle / spec.file.file, model.SerializeToString())
        new = replace(spec, file=file_spec(bundle, spec.file.file))
        variants[precision] = replace(variant, graphs=variant.graphs | {verb: new})
    _replace_manifest(bundle, replace(manifest, variants=variants))


def _cut_manifest(bundle: Path) -> None:
    path = bundle / names.MANIFEST_FILE
    _replace_file(path, path.read_bytes()[:1000])


def _cut_graph(bundle: Path) -> None:
    path = _step(bundle)
    _replace_file(path, path.read_bytes()[:-1000])


def _no_graph(bundle: Path) -> None:
    _step(bundle).unlink()


def _no_tokenizer(bundle: Path) -> None:
    (bundle / names.TOKENIZER_FILE).unlink()


def _newer_format(bundle: Path) -> None:
    path = bundle / names.MANIFEST_FILE
    newer = json.loads(path.read_text()) | {"format_version": names.FORMAT_VERSION + 1}
    _replace_file(path, json.dumps(newer).encode())


def _no_onnx(bundle: Path) -> None:
    """Replace a graph by other bytes that match the manifest."""
    _replace_step(bundle, b"no graph at all")


def _step(bundle: Path) -> Path:
    variant = load_bundle(bundle).manifest.variants[Precision.INT8]
    return bundle / variant.graphs[Verb.STEP].file.file


def _replace_file(path: Path, content: bytes) -> None:
    """Replace a file without writing to it, since other bundles may link to it."""
    path.unlink()
    path.write_bytes(content)


def _replace_step(bundle: Path, content: bytes) -> None:
    """Replace the step graph, and write a manifest that describes the new one."""
    manifest = load_bundle(bundle).manifest
    variant = manifest.variants[Precision.INT8]
    spec = variant.graphs[Verb.STEP]
    _replace_file(bundle / spec.file.file, content)
    new = replace(spec, file=file_spec(bundle, spec.file.file))
    variants = {Precision.INT8: replace(variant, graphs=variant.graphs | {Verb.STEP: new})}
    _replace_manifest(bundle, replace(manifest, variants=variants))


def _replace_manifest(bundle: Path, manifest: Manifest) -> None:
    for name in (names.MANIFEST_FILE, names.CHECKSUM_FILE):
        (bundle / name).unlink()
    write_manifest(bundle, manifest)
