"""Bundles whose checksums fit and whose weights are not numbers."""

from dataclasses import replace
from pathlib import Path

import onnx
from onnx import TensorProto, numpy_helper

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import Manifest, file_spec, load_bundle, write_manifest
from seq2seq_serve.bundle.names import Verb

_FLOATS = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16  # NaN has all bits set in each


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


def _replace_file(path: Path, content: bytes) -> None:
    """Replace a file without writing to it, since other bundles may link to it."""
    path.unlink()
    path.write_bytes(content)


def _replace_manifest(bundle: Path, manifest: Manifest) -> None:
    for name in (names.MANIFEST_FILE, names.CHECKSUM_FILE):
        (bundle / name).unlink()
    write_manifest(bundle, manifest)
