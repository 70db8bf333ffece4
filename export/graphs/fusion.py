"""Joins nodes of a step for CUDA into operators of the project, which launch fewer kernels for few rows."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.functions import DOMAIN

_NORMS = {"SkipLayerNormalization": "CudaNormLinear", "SkipSimplifiedLayerNormalization": "CudaRmsNormLinear"}
_ACTIVATIONS = ("Relu", "Gelu")


def fuse_norms(model: ir.Model) -> None:
    """Replace each norm of a sum, the map that reads it, and the activation of that by one node.

    The norm's own output stays, for a residual or an adapter. Norms that several maps read stay as they are.
    """
    for norm in list(model.graph):
        if norm.op_type not in _NORMS:
            continue
        maps = [node for node in norm.outputs[0].consumers() if node.op_type == "Gemm"]
        if len(maps) != 1 or not _is_plain(maps[0]):
            continue
        x, residual, scale, *rest = norm.inputs
        shift, x_bias = [*([None] if "Simplified" in norm.op_type else []), *rest, None][:2]
        _, weight, *bias = maps[0].inputs
        last, name = maps[0], _NORMS[norm.op_type]
        readers = last.outputs[0].consumers()
        if len(readers) == 1 and readers[0].op_type in _ACTIVATIONS:
            last = readers[0]
            name += last.op_type
        fused = ir.Node(
            DOMAIN,
            name,
            [x, residual, weight, scale, shift, x_bias, *bias],
            {"epsilon": norm.attributes["epsilon"]},
            num_outputs=3,
            version=1,
        )
        replaced = [last.outputs[0], norm.outputs[0], norm.outputs[3]]
        nodes = list(dict.fromkeys([norm, maps[0], last]))
        replace_nodes_and_values(model.graph, norm, nodes, [fused], replaced, fused.outputs)


def _is_plain(node: ir.Node) -> bool:
    """Whether a Gemm multiplies by a matrix `(I, O)` of widths that the kernels take; it may add a bias."""
    weight = node.inputs[1]
    transposed, alpha = node.attributes.get("transB"), node.attributes.get("alpha")
    return (
        weight is not None
        and weight.shape is not None
        and all(isinstance(size, int) and operators.takes(size) for size in weight.shape)
        and (transposed is None or transposed.value == 0)
        and (alpha is None or alpha.value == 1)
    )
