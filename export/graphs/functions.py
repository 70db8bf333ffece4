"""The project's own operators, defined as functions of ONNX in terms of ONNX Runtime's.

A graph that uses them contains their definitions. ONNX Runtime runs the definition of an operator if it does
not have its kernel (`kernels/operators.cpp`), so a graph runs everywhere, and faster with the kernels.
"""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir

DOMAIN = "seq2seq_serve"

# T = 1: GroupQueryAttention has an axis of positions, and the queries, keys and values of a row are packed.
_CACHE_ATTENTION = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
CacheAttention <num_heads, kv_num_heads, scale, softcap>
    (packed, past_key, past_value, last_positions, capacity) => (attended, key, value)
{{
    position = Constant <value_ints = [1]> ()
    row = Unsqueeze (packed, position)
    output, key, value = com.microsoft.GroupQueryAttention <num_heads: int = @num_heads,
        kv_num_heads: int = @kv_num_heads, scale: float = @scale, softcap: float = @softcap>
        (row, , , past_key, past_value, last_positions, capacity)
    attended = Squeeze (output, position)
}}
"""

# With keys and values of no positions the operator only reads the memory. Each row reads its own copy of it,
# so `owners` is not used.
_MEMORY_ATTENTION = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
MemoryAttention <num_heads, kv_num_heads, scale, softcap>
    (query, key, value, last_positions, owners, capacity) => (attended)
{{
    position = Constant <value_ints = [1]> ()
    row = Unsqueeze (query, position)
    starts = Constant <value_ints = [0, 0]> ()
    ends = Constant <value_ints = [0, {key_width}]> ()
    axes = Constant <value_ints = [1, 2]> ()
    nothing = Slice (row, starts, ends, axes)
    output = com.microsoft.GroupQueryAttention <num_heads: int = @num_heads,
        kv_num_heads: int = @kv_num_heads, scale: float = @scale, softcap: float = @softcap>
        (row, nothing, nothing, key, value, last_positions, capacity)
    attended = Squeeze (output, position)
}}
"""
_ADD_NORM_QUANTIZE = """
<domain: "{domain}", opset_import: ["": {opset}]>
AddNormQuantize <epsilon> (x, residual, weight, bias, scale, zero_point) => (total, normalized, hidden)
{{
    total = Add (x, residual)
    normalized = LayerNormalization <axis = -1, epsilon: float = @epsilon> (total, weight, bias)
    hidden = QuantizeLinear (normalized, scale, zero_point)
}}
"""
_TEXTS = {
    "CacheAttention": _CACHE_ATTENTION,
    "MemoryAttention": _MEMORY_ATTENTION,
    "AddNormQuantize": _ADD_NORM_QUANTIZE,
}


def define(model: ir.Model) -> None:
    """Add the definitions of the project's operators that a model uses; drop outputs that nothing reads.

    All layers must have keys of the same G and K, as in a Transformer's decoder.
    """
    nodes: dict[str, ir.Node] = {}
    for node in model.graph:
        if node.domain == DOMAIN:
            nodes[node.op_type] = node
            for output in node.outputs:
                if not output.uses() and not output.is_graph_output():
                    output.name = ""
    for name, node in nodes.items():
        keys = node.inputs[1]
        assert keys is not None
        assert keys.shape is not None
        key_width = keys.shape[1] * keys.shape[-1]  # (B, G, C, K)
        text = _TEXTS[name].format(domain=DOMAIN, opset=model.opset_imports[""], key_width=key_width)
        function = ir.from_proto(onnx.parser.parse_function(text))
        model.functions[function.identifier()] = function
