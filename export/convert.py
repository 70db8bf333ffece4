"""Conversion of torch modules to ONNX files that share one file of weights."""

from __future__ import annotations

import hashlib
import itertools
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
import torch
from torch.export import Dim

from seq2seq_serve.bundle.names import Axis, Verb
from seq2seq_serve.export.graphs.base import Graph
from seq2seq_serve.export.graphs.functions import define
from seq2seq_serve.export.graphs.fusion import fuse_norms

OPSET = 24  # the first with TensorScatter
WEIGHTS_FILE = "weights.bin"
# ONNX Runtime reads the weights of a convolution to merge it with its neighbours, and cannot read those given
# from memory. CudaLowRank reads the parts of outputs on the host, and a server places weights on the device.
_READERS = ("Conv", "CudaLowRank")
_ALIGNMENT_BYTES = 4096  # so that every tensor can be mapped straight from the file

# All sizes differ, so that an error shows at once if the exporter takes an axis for a constant, or two for
# one.
_EXAMPLE_SIZES: dict[str, int] = {
    Axis.BATCH: 3,
    Axis.SOURCE_LENGTH: 5,
    Axis.CLIP_LENGTH: 6,
    Axis.FEATURE_LENGTH: 9,
    Axis.TARGET_LENGTH: 7,
    Axis.LABEL_LENGTH: 2,
    Axis.CACHE_CAPACITY: 11,
    Axis.MEMORY_CAPACITY: 13,
    Axis.NUM_ADAPTERS: 17,
}
_FIRST_FURTHER_SIZE = 19


def _example_sizes(graph: Graph) -> dict[str, int]:
    """The size of each named axis; axes that only one family's sources have get odd numbers from 19 on."""
    named = dict.fromkeys(axis for spec in graph.inputs for axis in spec.axes if isinstance(axis, str))
    further = [axis for axis in named if axis not in _EXAMPLE_SIZES]
    return _EXAMPLE_SIZES | dict(zip(further, itertools.count(_FIRST_FURTHER_SIZE, 2), strict=False))


def convert(graph: Graph) -> ir.Model:
    """Trace one graph with its named dynamic axes."""
    graph.eval()
    sizes = _example_sizes(graph)
    inputs = tuple(torch.ones(spec.shape(sizes), dtype=getattr(torch, spec.dtype)) for spec in graph.inputs)
    dims = {axis: Dim(str(axis)) for axis in sizes}
    shapes = tuple(
        {i: dims[axis] for i, axis in enumerate(spec.axes) if isinstance(axis, str)} for spec in graph.inputs
    )
    num_named = graph.forward.__code__.co_argcount - 1  # without self; the other inputs are in *buffers
    rest = shapes[num_named:]
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    with warnings.catch_warnings(), torch.no_grad():
        # The exporter itself uses a deprecated torch call, and reports that torchvision is missing.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
        exporter_log.setLevel(logging.ERROR)
        try:
            program = torch.onnx.export(
                graph,
                inputs,
                input_names=[spec.name for spec in graph.inputs],
                output_names=[spec.name for spec in graph.outputs],
                dynamic_shapes=(*shapes[:num_named], *([rest] if rest else [])),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
        finally:
            exporter_log.setLevel(level)
    assert program is not None
    for value, spec in zip(program.model.graph.outputs, graph.outputs, strict=True):
        if Axis.CANDIDATES in spec.axes:  # torch does not know how many there will be
            value.shape = ir.Shape(spec.axes)
    _strip_traces(program.model)
    if graph.has_few_rows:
        fuse_norms(program.model)
    define(program.model)
    return program.model


def _strip_traces(model: ir.Model) -> None:
    """Remove the source paths of the exporting machine, which the exporter writes into the graph."""
    model.metadata_props.clear()
    for graph in (model.graph, *model.graph.subgraphs()):
        graph.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            value.metadata_props.clear()


def save(models: Mapping[Verb, ir.Model], folder: Path) -> dict[Verb, Path]:
    """Write the graphs of one precision, and each weight that they share once; return the graph files."""
    offsets: dict[bytes, int] = {}
    with (folder / WEIGHTS_FILE).open("wb") as stream:
        for model in models.values():
            for value in model.graph.initializers.values():
                tensor = value.const_value
                assert tensor is not None
                raw = tensor.tobytes()
                if len(raw) < 1024 or any(use.node.op_type in _READERS for use in value.uses()):
                    # Small constants stay readable in the graph.
                    continue
                key = str(tensor.dtype).encode() + hashlib.sha256(raw).digest()
                if key not in offsets:
                    stream.write(b"\0" * (-stream.tell() % _ALIGNMENT_BYTES))
                    offsets[key] = stream.tell()
                    stream.write(raw)
                value.const_value = ir.ExternalTensor(
                    WEIGHTS_FILE,
                    offsets[key],
                    len(raw),
                    tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()),
                    name=value.name or "",
                    base_dir=folder,
                )
    paths = {}
    for verb, model in models.items():
        paths[verb] = folder / f"{verb}.onnx"
        ir.save(model, paths[verb])
    return paths
