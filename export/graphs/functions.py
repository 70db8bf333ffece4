"""The project's own operators, defined as functions of ONNX in terms of ONNX Runtime's.

A graph that uses them contains their definitions. ONNX Runtime runs the definition of an operator if it does
not have its kernel (`kernels/operators.cpp`), so a graph runs everywhere, and faster with the kernels.
"""

from __future__ import annotations

import math
import re

import onnx
import onnx.parser
import onnx_ir as ir

DOMAIN = "seq2seq_serve"

# T = 1: GroupQueryAttention has an axis of positions, and the queries, keys and values of a row are packed.
# An operator of two providers would need one list of types, so that of CUDA has another name. The definition
# takes one position for each row of the cache, in the order of the rows, so it does not use `owners`.
_ATTENTION_OVER_CACHE = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
{name} <num_heads, kv_num_heads, scale, softcap>
    (packed, past_key, past_value, last_positions, OWNERS capacity) => (attended, key, value)
{{
    position = Constant <value_ints = [1]> ()
    row = Unsqueeze (packed, position)
    output, key, value = com.microsoft.GroupQueryAttention <num_heads: int = @num_heads,
        kv_num_heads: int = @kv_num_heads, scale: float = @scale, softcap: float = @softcap>
        (row, , , past_key, past_value, last_positions, capacity)
    attended = Squeeze (output, position)
}}
"""
_CACHE_ATTENTION = _ATTENTION_OVER_CACHE.replace("OWNERS", "owners,")
_CUDA_CACHE_ATTENTION = _ATTENTION_OVER_CACHE.replace("OWNERS ", "")

# With keys and values of no positions the operator only reads the memory. Each row reads its own copy of it,
# so `owners` is not used.
_MEMORY_ATTENTION = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
{name} <num_heads, kv_num_heads, scale, softcap>
    (query, key, value, last_positions, owners, capacity) => (attended)
{{
    position = Constant <value_ints = [1]> ()
    row = Unsqueeze (query, position)
    starts = Constant <value_ints = [0, 0]> ()
    ends = Constant <value_ints = [0, {width}]> ()
    axes = Constant <value_ints = [1, 2]> ()
    nothing = Slice (row, starts, ends, axes)
    output = com.microsoft.GroupQueryAttention <num_heads: int = @num_heads,
        kv_num_heads: int = @kv_num_heads, scale: float = @scale, softcap: float = @softcap>
        (row, nothing, nothing, key, value, last_positions, capacity)
    attended = Squeeze (output, position)
}}
"""
# CUDA's operator always appends a position, so it gets the last one again, and rewrites it in place.
_CUDA_MEMORY_ATTENTION = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
CudaMemoryAttention <num_heads, kv_num_heads, scale, softcap>
    (query, last_key, last_value, past_key, past_value, last_positions, capacity) => (attended, key, value)
{{
    position = Constant <value_ints = [1]> ()
    row = Unsqueeze (query, position)
    output, key, value = com.microsoft.GroupQueryAttention <num_heads: int = @num_heads,
        kv_num_heads: int = @kv_num_heads, scale: float = @scale, softcap: float = @softcap>
        (row, last_key, last_value, past_key, past_value, last_positions, capacity)
    attended = Squeeze (output, position)
}}
"""
# No node reads `added` alone: ONNX Runtime would run that one when it loads the graph, and would look for the
# values in the file of weights, which the server does not keep.
_MOST_PROBABLE = """
<domain: "{domain}", opset_import: ["": {opset}]>
MostProbable (scores, added) => (logits, token_ids)
{{
    logits = Cast <to = 1> (scores)
    allowed_scores = Add (scores, added)
    allowed = Cast <to = 1> (allowed_scores)
    one = Constant <value_ints = [1]> ()
    best, token_ids = TopK <axis = 1> (allowed, one)
}}
"""
# The tokens are first laid out with padding, which repeats the last token of its source.
_SOURCE_ATTENTION = """
<domain: "{domain}", opset_import: ["": {opset}]>
SourceAttention <num_heads, scale, softcap> (packed, lengths, row_numbers, indices) => (attended)
{{
    shape = Constant <value_ints = [-1, {width}]> ()
    parts = Reshape (packed, shape)
    one = Constant <value_int = 1> ()
    three = Constant <value_int = 3> ()
    queries = Mul (row_numbers, three)
    keys = Add (queries, one)
    values = Add (keys, one)
    query = Gather (parts, queries)
    key = Gather (parts, keys)
    value = Gather (parts, values)
    padded = Attention <q_num_heads: int = @num_heads, kv_num_heads: int = @num_heads,
        scale: float = @scale, softcap: float = @softcap>
        (query, key, value, , , , lengths)
    attended = GatherND (padded, indices)
}}
"""

_ADD_NORM = """
<domain: "{domain}", opset_import: ["": {opset}]>
AddNorm <epsilon> (x, residual, weight, bias) => (total, normalized)
{{
    total = Add (x, residual)
    normalized = LayerNormalization <axis = -1, epsilon: float = @epsilon> (total, weight, bias)
}}
"""
# The weights are (O, I), as a table of embeddings that is also the output's matrix.
_LINEAR = """
<domain: "{domain}", opset_import: ["": {opset}]>
Linear <factor> (x, weight, bias) => (output)
{{
    output = Gemm <transB = 1, alpha: float = @factor> (x, weight, bias)
}}
"""
_LINEAR_RELU = """
<domain: "{domain}", opset_import: ["": {opset}]>
LinearRelu <factor> (x, weight, bias) => (output)
{{
    summed = Gemm <transB = 1, alpha: float = @factor> (x, weight, bias)
    output = Relu (summed)
}}
"""
_EMBEDDING = """
<domain: "{domain}", opset_import: ["": {opset}]>
Embedding (ids, table) => (embedded)
{{
    embedded = Gather (table, ids)
}}
"""
# The levels 0 to 255 of a row reach from its smallest number to its largest, and 0 has a whole level. Numbers
# below `least_input`, which is 0 or minus infinity, count as it. Products of unsigned by unsigned levels are
# exact on every processor: with signed weights ONNX Runtime saturates on those without VNNI. The zero that is
# added is NaN in a row with a NaN, most of which ReduceMax passes over; their levels would be any number.
_PRODUCTS = """
    least = Constant <value_float: float = @least_input> ()
    counted = Max (x, least)
    last_axis = Constant <value_ints = [1]> ()
    nothing = Constant <value_float = 0.0> ()
    largest = ReduceMax (counted, last_axis)
    high = Max (largest, nothing)
    smallest = ReduceMin (counted, last_axis)
    low = Min (smallest, nothing)
    range = Sub (high, low)
    tiny = Constant <value_float = 7.8886090522101181e-31> ()
    positive = Max (range, tiny)
    zeros = Sub (counted, counted)
    zero_of_row = ReduceSum (zeros, last_axis)
    divided = Add (positive, zero_of_row)
    most = Constant <value_float = 255.0> ()
    levels_per_unit = Div (most, divided)
    scale = Div (divided, most)
    steps_below = Mul (low, levels_per_unit)
    rounded_below = Round (steps_below)
    zero_point = Neg (rounded_below)
    steps = Mul (counted, levels_per_unit)
    rounded = Round (steps)
    shifted = Add (rounded, zero_point)
    clamped = Min (shifted, most)
    levels = Cast <to = 2> (clamped)
    middle = Constant <value_float = 128.0> ()
    weight_zero_point = Cast <to = 2> (middle)
    all_sums = MatMulInteger (levels, weight, , weight_zero_point)
    whole_zero_point = Cast <to = 6> (zero_point)
    of_zero_points = Mul (whole_zero_point, weight_sum)
    sums = Sub (all_sums, of_zero_points)
    float_sums = Cast <to = 1> (sums)
    of_levels = Mul (float_sums, scale)
    of_columns = Mul (of_levels, weight_scale)"""
_QUANTIZED_LINEAR = (
    """
<domain: "{domain}", opset_import: ["": {opset}]>
QuantizedLinear <least_input> (x, weight, weight_scale, weight_sum, bias) => (output)
{{"""
    + _PRODUCTS
    + """
    output = Add (of_columns, bias)
}}
"""
)
_CANDIDATES = """
<domain: "{domain}", opset_import: ["": {opset}]>
Candidates (logits, num_candidates) => (token_ids, log_probabilities)
{{
    best, token_ids = TopK <axis = 1> (logits, num_candidates)
    all_log_probabilities = LogSoftmax <axis = 1> (logits)
    log_probabilities = GatherElements <axis = 1> (all_log_probabilities, token_ids)
}}
"""
_QUANTIZED_CHOICE = (
    """
<domain: "{domain}", opset_import: ["": {opset}]>
QuantizedChoice <least_input> (x, weight, weight_scale, weight_sum, bias, added, num_candidates)
    => (logits, token_ids, log_probabilities)
{{"""
    + _PRODUCTS
    + """
    logits = Add (of_columns, bias)
    zero = Constant <value_ints = [0]> ()
    are_wanted = Greater (num_candidates, zero)
    is_choice = Squeeze (are_wanted)
    token_ids, log_probabilities = If (is_choice) <
        then_branch = choose () => (best_ids, best_log_probabilities) {{
            allowed = Add (logits, added)
            best, best_ids = TopK <axis = 1> (allowed, num_candidates)
            all_log_probabilities = LogSoftmax <axis = 1> (allowed)
            best_log_probabilities = GatherElements <axis = 1> (all_log_probabilities, best_ids)
        }},
        else_branch = skip () => (no_ids, no_log_probabilities) {{
            num_rows = Shape <start = 0, end = 1> (x)
            shape = Concat <axis = 0> (num_rows, zero)
            no_log_probabilities = ConstantOfShape (shape)
            no_ids = Cast <to = 7> (no_log_probabilities)
        }}
    >
}}
"""
)


def _of_half(text: str) -> str:
    """The definition of the same attention of float32 queries, over keys and values in float16."""
    text = re.sub("row = (Unsqueeze .*)", r"whole = \1\n    row = Cast <to = 10> (whole)", text)
    return re.sub("attended = (Squeeze .*)", r"half = \1\n    attended = Cast <to = 1> (half)", text)


_TEXTS = {
    "CacheAttention": _CACHE_ATTENTION,
    "HalfCacheAttention": _of_half(_CACHE_ATTENTION),
    "CudaCacheAttention": _CUDA_CACHE_ATTENTION,
    "MemoryAttention": _MEMORY_ATTENTION,
    "HalfMemoryAttention": _of_half(_MEMORY_ATTENTION),
    "CudaMemoryAttention": _CUDA_MEMORY_ATTENTION,
    "SourceAttention": _SOURCE_ATTENTION,
    "AddNorm": _ADD_NORM,
    "Linear": _LINEAR,
    "LinearRelu": _LINEAR_RELU,
    "Embedding": _EMBEDDING,
    "QuantizedLinear": _QUANTIZED_LINEAR,
    "QuantizedChoice": _QUANTIZED_CHOICE,
    "Candidates": _CANDIDATES,
    "MostProbable": _MOST_PROBABLE,
}


# Operators whose definitions have a constant of it
_WITH_WIDTH = ("MemoryAttention", "HalfMemoryAttention", "SourceAttention")


def definition(name: str, opset: int, width: int = 0) -> onnx.FunctionProto:
    """The definition of an operator; some have the width of all keys of a position as a constant."""
    return onnx.parser.parse_function(_TEXTS[name].format(domain=DOMAIN, name=name, opset=opset, width=width))


def define(model: ir.Model) -> None:
    """Add the definitions of the project's operators that a model uses; drop outputs that nothing reads.

    All nodes of such an attention must have keys of the same width.
    """
    widths: dict[str, int] = {}
    for node in model.graph:
        if node.domain == DOMAIN:
            width = _width(node) if node.op_type in _WITH_WIDTH else 0
            assert widths.setdefault(node.op_type, width) == width
            for output in node.outputs:
                if not output.uses() and not output.is_graph_output():
                    output.name = ""
    for name, width in widths.items():
        function = ir.from_proto(definition(name, model.opset_imports[""], width))
        model.functions[function.identifier()] = function


def _width(node: ir.Node) -> int:
    """The width of all keys of a position, which is a constant of the definitions."""
    is_packed = node.op_type == "SourceAttention"
    keys = node.inputs[0 if is_packed else 1]  # (N, 3HK), or (B, G, C, K)
    assert keys is not None
    assert keys.shape is not None
    width = math.prod(size for size in keys.shape if isinstance(size, int))
    return width // 3 if is_packed else width
