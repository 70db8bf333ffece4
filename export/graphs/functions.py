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

# The bias (H, D) is by distance from the last position, up to `max_distance`, which is D - 1.
_CUDA_BIASED_CACHE_ATTENTION = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
CudaBiasedCacheAttention <num_heads, kv_num_heads, scale, softcap, max_distance>
    (packed, past_key, past_value, last_positions, bias, capacity) => (attended, key, value)
{{
    position = Constant <value_ints = [1]> ()
    row = Unsqueeze (packed, position)
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    farthest = Constant <value_int: int = @max_distance> ()
    num_slots = Shape <start = 2, end = 3> (past_key)
    num_positions = Squeeze (num_slots)
    slots = Range (zero, num_positions, one)
    last = Cast <to = 7> (last_positions)
    last_of_row = Unsqueeze (last, position)
    behind = Sub (last_of_row, slots)
    distances = Clip (behind, zero, farthest)
    by_head = Gather <axis = 1> (bias, distances)
    by_row = Transpose <perm = [1, 0, 2]> (by_head)
    query_axis = Constant <value_ints = [2]> ()
    added = Unsqueeze (by_row, query_axis)
    output, key, value = com.microsoft.GroupQueryAttention <num_heads: int = @num_heads,
        kv_num_heads: int = @kv_num_heads, scale: float = @scale, softcap: float = @softcap>
        (row, , , past_key, past_value, last_positions, capacity, , , , added)
    attended = Squeeze (output, position)
}}
"""

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
_CUDA_EMBEDDING = """
<domain: "{domain}", opset_import: ["": {opset}]>
CudaEmbedding (ids, previous, table, positions) => (embedded, lengths)
{{
    one = Constant <value = int32[1] {{1}}> ()
    lengths = Add (previous, one)
    tokens = Gather (table, ids)
    places = Gather (positions, lengths)
    embedded = Add (tokens, places)
}}
"""
_CUDA_GATED = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
{name} (x) => (output)
{{
    gate, numbers = Split <axis = 1, num_outputs = 2> (x)
    active = ACTIVATION (gate)
    output = Mul (active, numbers)
}}
"""
_GATES = {
    "Relu": "Relu",
    "Gelu": "com.microsoft.Gelu",
    "FastGelu": "com.microsoft.FastGelu",
    "Silu": "com.microsoft.QuickGelu <alpha = 1.0>",
}
# NORM is an operator of ONNX Runtime, whose bias an RMS norm lacks.
_NORM_LINEAR = """
<domain: "{domain}", opset_import: ["": {opset}, "com.microsoft": 1]>
{name} <epsilon> (x, residual, weight, scale, shift, x_bias, bias) => (output, normalized, total)
{{
    normalized, , , total = com.microsoft.NORM <epsilon: float = @epsilon> (x, residual, scale, SHIFT x_bias)
    ACTIVATION
}}
"""
_ACTIVATIONS = {
    "": "output = Gemm (normalized, weight, bias)",
    "Relu": "mapped = Gemm (normalized, weight, bias)\n    output = Relu (mapped)",
    "Gelu": "mapped = Gemm (normalized, weight, bias)\n    output = com.microsoft.Gelu (mapped)",
}
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
_INT8_PRODUCTS = """
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
# The levels -127 to 127 of a row reach to its largest magnitude. ONNX Runtime would run nodes that only read
# constants when it loads a graph, as for `added` above: so weights and scales are cut at a place that depends
# on x, which is their beginning.
_INT4_PRODUCTS = """
    least = Constant <value_float: float = @least_input> ()
    counted = Max (x, least)
    last_axis = Constant <value_ints = [1]> ()
    magnitudes = Abs (counted)
    largest = ReduceMax (magnitudes, last_axis)
    tiny = Constant <value_float = 7.8886090522101181e-31> ()
    positive = Max (largest, tiny)
    zeros = Sub (counted, counted)
    zero_of_row = ReduceSum (zeros, last_axis)
    divided = Add (positive, zero_of_row)
    most = Constant <value_float = 127.0> ()
    levels_per_unit = Div (most, divided)
    steps = Mul (counted, levels_per_unit)
    levels = Round (steps)
    scale = Div (divided, most)
    factor = Constant <value_float: float = @factor> ()
    scale_of_row = Mul (scale, factor)
    num_given = Shape <start = 0, end = 1> (x)
    begin = Sub (num_given, num_given)
    num_panels = Shape <start = 0, end = 1> (weight)
    num_blocks = Shape <start = 1, end = 2> (weight)
    all_bytes = Slice (weight, begin, num_panels)
    all_scales = Slice (weight_scale, begin, num_panels)
    nothing = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    rest = Constant <value_ints = [-1]> ()
    in_block = Constant <value_ints = [32]> ()
    depth = Mul (num_blocks, in_block)
    width = Shape <start = 1, end = 2> (x)
    missing = Sub (depth, width)
    pads = Concat <axis = 0> (nothing, nothing, nothing, missing)
    padded = Pad (levels, pads)
    fifteen = Constant <value_int = 15> ()
    low_bits = Cast <to = 2> (fifteen)
    four = Constant <value_int = 4> ()
    num_bits = Cast <to = 2> (four)
    low = BitwiseAnd (all_bytes, low_bits)
    high = BitShift <direction = "RIGHT"> (all_bytes, num_bits)
    shifted = Concat <axis = 3> (low, high)
    ordered = Transpose <perm = [1, 2, 4, 0, 3]> (shifted)
    shape_of_blocks = Concat <axis = 0> (num_blocks, in_block, rest)
    by_input = Reshape (ordered, shape_of_blocks)
    numbers = Cast <to = 1> (by_input)
    middle = Constant <value_float = 8.0> ()
    weights = Sub (numbers, middle)
    scales_by_block = Transpose <perm = [1, 0, 2]> (all_scales)
    shape_of_scales = Concat <axis = 0> (num_blocks, one, rest)
    half_scales = Reshape (scales_by_block, shape_of_scales)
    scales = Cast <to = 1> (half_scales)
    scaled = Mul (weights, scales)
    shape_of_matrix = Concat <axis = 0> (depth, rest)
    matrix = Reshape (scaled, shape_of_matrix)
    padded_totals = MatMul (padded, matrix)
    num_outputs = Shape <start = 0, end = 1> (bias)
    totals = Slice (padded_totals, nothing, num_outputs, one)
    of_columns = Mul (totals, scale_of_row)"""
_INT8_WEIGHTS, _INT4_WEIGHTS = "weight, weight_scale, weight_sum", "weight, weight_scale"
# `products` are int8's or int4's: they compute `of_columns`. The operator's own inputs follow its name.
_QUANTIZED = """
<domain: "{domain}", opset_import: ["": {opset}]>
NAME (x, WEIGHTS, bias) => (output)
{{PRODUCTS
    output = Add (of_columns, bias)
}}
"""
_CHOICE = """
<domain: "{domain}", opset_import: ["": {opset}]>
NAME (x, WEIGHTS, bias, added, num_candidates, places)
    => (logits, token_ids, log_probabilities, found)
{{PRODUCTS
    logits = Add (of_columns, bias)
    zero = Constant <value_ints = [0]> ()
    are_wanted = Greater (num_candidates, zero)
    is_choice = Squeeze (are_wanted)
    token_ids, log_probabilities, found = If (is_choice) <
        then_branch = choose () => (best_ids, best_log_probabilities, all_found) {{
            allowed = Add (logits, added)
            best, best_ids = TopK <axis = 1> (allowed, num_candidates)
            all_log_probabilities = LogSoftmax <axis = 1> (allowed)
            best_log_probabilities = GatherElements <axis = 1> (all_log_probabilities, best_ids)
            all_found = GatherND (all_log_probabilities, places)
        }},
        else_branch = skip () => (no_ids, no_log_probabilities, nothing_found) {{
            num_rows = Shape <start = 0, end = 1> (x)
            shape = Concat <axis = 0> (num_rows, zero)
            no_log_probabilities = ConstantOfShape (shape)
            no_ids = Cast <to = 7> (no_log_probabilities)
            nothing_found = ConstantOfShape (zero)
        }}
    >
}}
"""
# The definition multiplies each row by the A of all adapters, because a copy of an adapter's weights for each
# row may need more memory than there is. Then it sets to 0 the products with other adapters' A and the terms
# of the output's other parts, so all weights must be finite. As for `added` above, no node reads `parts`
# alone: sizes depend on the number of rows, which CUDA's provider has on the host, and choices on the rows'
# adapters, which it has on the device.
_LOW_RANK = """
<domain: "{domain}", opset_import: ["": {opset}]>
{name} <first_unit, first_part, num_units> (x, y, adapters, ranks, adapter_ids, parts) => (output)
{{
    nothing = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    no_number = Constant <value_float = 0.0> ()
    first_axis = Constant <value_ints = [0]> ()
    last_axis = Constant <value_ints = [1]> ()
    rest = Constant <value_ints = [-1]> ()
    first_unit = Constant <value_int: int = @first_unit> ()
    num_units = Constant <value_int: int = @num_units> ()
    num_rows = Shape <start = 0, end = 1> (x)
    num_inputs = Shape <start = 1, end = 2> (x)
    num_outputs = Shape <start = 1, end = 2> (y)
    num_adapters = Shape <start = 0, end = 1> (adapters)
    num_weights = Shape <start = 1, end = 2> (adapters)
    num_ranks = Div (num_weights, num_units)
    begin = Sub (num_rows, num_rows)
    given_parts = Add (parts, begin)
    last_part = ReduceMax (given_parts)
    num_parts = Add (last_part, one)
    row_inputs = Mul (num_inputs, num_parts)
    size_a = Mul (row_inputs, num_ranks)
    size_b = Mul (num_outputs, num_ranks)
    begin_a = Mul (num_ranks, first_unit)
    begin_b = Add (begin_a, size_a)
    end_b = Add (begin_b, size_b)
    half_a = Slice (adapters, begin_a, begin_b, last_axis)
    half_b = Slice (adapters, begin_b, end_b, last_axis)
    all_ranks = Mul (num_adapters, num_ranks)
    shape_a = Concat <axis = 0> (rest, num_inputs)
    shape_b = Concat <axis = 0> (rest, num_outputs)
    rows_a = Reshape (half_a, shape_a)
    rows_b = Reshape (half_b, shape_b)
    a = Cast <to = 1> (rows_a)
    b = Cast <to = 1> (rows_b)
    inputs = Cast <to = 1> (x)
    by_input = Transpose <perm = [1, 0]> (a)
    all_reduced = MatMul (inputs, by_input)
    shape_of_reduced = Concat <axis = 0> (num_rows, num_adapters, num_parts, num_ranks)
    reduced = Reshape <allowzero = 1> (all_reduced, shape_of_reduced)
    count_of_adapters = Squeeze (num_adapters)
    numbers = Range (nothing, count_of_adapters, one)
    inner_axes = Constant <value_ints = [1, 2]> ()
    number_of_adapter = Unsqueeze (numbers, inner_axes)
    outer_axes = Constant <value_ints = [1, 2, 3]> ()
    adapter_of_row = Unsqueeze (adapter_ids, outer_axes)
    is_own_adapter = Equal (adapter_of_row, number_of_adapter)
    own_reduced = Where (is_own_adapter, reduced, no_number)
    by_part = Transpose <perm = [2, 0, 1, 3]> (own_reduced)
    shape_of_part = Concat <axis = 0> (num_parts, num_rows, all_ranks)
    reduced_of_part = Reshape <allowzero = 1> (by_part, shape_of_part)
    all_terms = MatMul (reduced_of_part, b)
    count_of_parts = Squeeze (num_parts)
    part_numbers = Range (nothing, count_of_parts, one)
    number_of_part = Unsqueeze (part_numbers, inner_axes)
    zeros = Sub (adapter_ids, adapter_ids)
    zero = ReduceSum <keepdims = 0> (zeros, first_axis)
    parts_beside_rows = Add (parts, zero)
    is_own_part = Equal (number_of_part, parts_beside_rows)
    own_terms = Where (is_own_part, all_terms, no_number)
    terms = ReduceSum <keepdims = 0> (own_terms, first_axis)
    given = Cast <to = 1> (y)
    sums = Add (given, terms)
    has_adapter = GreaterOrEqual (adapter_ids, nothing)
    has_row_adapter = Unsqueeze (has_adapter, last_axis)
    chosen = Where (has_row_adapter, sums, given)
    output = CastLike (chosen, y)
}}
"""
_CANDIDATES = """
<domain: "{domain}", opset_import: ["": {opset}]>
Candidates (logits, num_candidates, places) => (token_ids, log_probabilities, found)
{{
    best, token_ids = TopK <axis = 1> (logits, num_candidates)
    all_log_probabilities = LogSoftmax <axis = 1> (logits)
    log_probabilities = GatherElements <axis = 1> (all_log_probabilities, token_ids)
    found = GatherND (all_log_probabilities, places)
}}
"""
# Relative to the best text, so that the exponents of rows without times are 0.
_TIME_RULES = """
<domain: "{domain}", opset_import: ["": {opset}]>
TimeRules (logits, first_times, last_times, least_texts, most_texts, least_times, most_times) => (allowed)
{{
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    last_axis = Constant <value_ints = [1]> ()
    nothing = Constant <value_float = -inf> ()
    as_probable = Constant <value_float = 1.0> ()
    vocab_size = Shape <start = 1> (logits)
    count = Squeeze (vocab_size)
    ids = Range (zero, count, one)
    is_after_texts = GreaterOrEqual (ids, first_times)
    is_before_others = LessOrEqual (ids, last_times)
    is_time = And (is_after_texts, is_before_others)
    is_least_text = GreaterOrEqual (ids, least_texts)
    is_most_text = LessOrEqual (ids, most_texts)
    is_allowed_text = And (is_least_text, is_most_text)
    is_late = GreaterOrEqual (ids, least_times)
    is_early = LessOrEqual (ids, most_times)
    is_within = And (is_late, is_early)
    is_allowed_time = And (is_time, is_within)
    times = Where (is_allowed_time, logits, nothing)
    bounded_texts = Where (is_allowed_text, logits, nothing)
    texts = Where (is_time, nothing, bounded_texts)
    within_bounds = Where (is_time, times, texts)
    best_text, best_text_id = TopK <axis = 1> (texts, last_axis)
    relative = Sub (times, best_text)
    relative_probabilities = Exp (relative)
    total = ReduceSum <keepdims = 1> (relative_probabilities, last_axis)
    prefers_times = Greater (total, as_probable)
    allowed = Where (prefers_times, times, within_bounds)
}}
"""
# The weights are those of a map, (D, V) and 128 above their levels.
_QUANTIZED_EMBEDDING = """
<domain: "{domain}", opset_import: ["": {opset}]>
QuantizedEmbedding (ids, weight, weight_scale) => (embedded)
{{
    all = Constant <value_ints = [-1]> ()
    flat = Reshape (ids, all)
    columns = Gather <axis = 1> (weight, flat)
    rows = Transpose <perm = [1, 0]> (columns)
    shifted = Cast <to = 1> (rows)
    middle = Constant <value_float = 128.0> ()
    levels = Sub (shifted, middle)
    scales = Gather (weight_scale, flat)
    one = Constant <value_ints = [1]> ()
    scale_of_row = Unsqueeze (scales, one)
    embeddings = Mul (levels, scale_of_row)
    shape = Shape (ids)
    width = Shape <start = 0, end = 1> (weight)
    whole_shape = Concat <axis = 0> (shape, width)
    embedded = Reshape <allowzero = 1> (embeddings, whole_shape)
}}
"""
# Panels, blocks and bytes as in kernels/int4.h.
_INT4_EMBEDDING = """
<domain: "{domain}", opset_import: ["": {opset}]>
Int4Embedding (ids, weight, weight_scale) => (embedded)
{{
    all = Constant <value_ints = [-1]> ()
    flat = Reshape (ids, all)
    num_columns = Constant <value_int = 32> ()
    panels = Div (flat, num_columns)
    columns = Mod (flat, num_columns)
    num_bytes = Constant <value_int = 16> ()
    places = Mod (columns, num_bytes)
    one = Constant <value_ints = [1]> ()
    place_of_row = Unsqueeze (places, one)
    column_of_row = Unsqueeze (columns, one)
    of_panels = Gather (weight, panels)
    by_place = Transpose <perm = [0, 3, 1, 2, 4]> (of_panels)
    bytes = GatherND <batch_dims = 1> (by_place, place_of_row)
    fifteen = Constant <value_int = 15> ()
    low_bits = Cast <to = 2> (fifteen)
    four = Constant <value_int = 4> ()
    num_bits = Cast <to = 2> (four)
    low = BitwiseAnd (bytes, low_bits)
    high = BitShift <direction = "RIGHT"> (bytes, num_bits)
    inner_axes = Constant <value_ints = [1, 2, 3]> ()
    column_of_bytes = Unsqueeze (columns, inner_axes)
    is_low = Less (column_of_bytes, num_bytes)
    shifted = Where (is_low, low, high)
    numbers = Cast <to = 1> (shifted)
    middle = Constant <value_float = 8.0> ()
    levels = Sub (numbers, middle)
    scales_of_panels = Gather (weight_scale, panels)
    by_column = Transpose <perm = [0, 2, 1]> (scales_of_panels)
    half_scales = GatherND <batch_dims = 1> (by_column, column_of_row)
    scales = Cast <to = 1> (half_scales)
    group_axes = Constant <value_ints = [2, 3]> ()
    scale_of_block = Unsqueeze (scales, group_axes)
    embeddings = Mul (levels, scale_of_block)
    shape = Shape (ids)
    num_blocks = Shape <start = 1, end = 2> (weight)
    width = Mul (num_blocks, num_columns)
    whole_shape = Concat <axis = 0> (shape, width)
    embedded = Reshape <allowzero = 1> (embeddings, whole_shape)
}}
"""


def _of_map(text: str, name: str, weights: str, products: str) -> str:
    """The definition of an operator of a quantised map, from the text of its kind."""
    filled = text.replace("NAME", name).replace("WEIGHTS", weights)
    return filled.replace("PRODUCTS", products)


def _of_half(text: str) -> str:
    """The definition of the same attention of float32 queries, over keys and values in float16."""
    text = re.sub("row = (Unsqueeze .*)", r"whole = \1\n    row = Cast <to = 10> (whole)", text)
    return re.sub("attended = (Squeeze .*)", r"half = \1\n    attended = Cast <to = 1> (half)", text)


def _norm_linear(activation: str, *, is_rms: bool) -> str:
    """The definition of a norm and a map of it."""
    text = _NORM_LINEAR.replace("ACTIVATION", _ACTIVATIONS[activation])
    text = text.replace("SHIFT ", "" if is_rms else "shift, ")
    return text.replace("NORM", "SkipSimplifiedLayerNormalization" if is_rms else "SkipLayerNormalization")


_TEXTS = {
    "CacheAttention": _CACHE_ATTENTION,
    "HalfCacheAttention": _of_half(_CACHE_ATTENTION),
    "CudaCacheAttention": _CUDA_CACHE_ATTENTION,
    "CudaBiasedCacheAttention": _CUDA_BIASED_CACHE_ATTENTION,
    "MemoryAttention": _MEMORY_ATTENTION,
    "HalfMemoryAttention": _of_half(_MEMORY_ATTENTION),
    "CudaMemoryAttention": _CUDA_MEMORY_ATTENTION,
    "SourceAttention": _SOURCE_ATTENTION,
    "CudaEmbedding": _CUDA_EMBEDDING,
    **{f"CudaGated{name}": _CUDA_GATED.replace("ACTIVATION", gate) for name, gate in _GATES.items()},
    **{f"CudaNormLinear{name}": _norm_linear(name, is_rms=False) for name in _ACTIVATIONS},
    **{f"CudaRmsNormLinear{name}": _norm_linear(name, is_rms=True) for name in _ACTIVATIONS},
    "AddNorm": _ADD_NORM,
    "Linear": _LINEAR,
    "LinearRelu": _LINEAR_RELU,
    "Embedding": _EMBEDDING,
    "QuantizedLinear": _of_map(_QUANTIZED, "QuantizedLinear <least_input>", _INT8_WEIGHTS, _INT8_PRODUCTS),
    "QuantizedChoice": _of_map(_CHOICE, "QuantizedChoice <least_input>", _INT8_WEIGHTS, _INT8_PRODUCTS),
    "QuantizedEmbedding": _QUANTIZED_EMBEDDING,
    "Int4Linear": _of_map(_QUANTIZED, "Int4Linear <least_input, factor>", _INT4_WEIGHTS, _INT4_PRODUCTS),
    "Int4Choice": _of_map(_CHOICE, "Int4Choice <least_input, factor>", _INT4_WEIGHTS, _INT4_PRODUCTS),
    "Int4Embedding": _INT4_EMBEDDING,
    "LowRank": _LOW_RANK,
    "CudaLowRank": _LOW_RANK,
    "Candidates": _CANDIDATES,
    "TimeRules": _TIME_RULES,
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
                # The maps of many rows read the norms of CudaNormLinear and the like.
                if not output.uses() and not output.is_graph_output() and "NormLinear" not in node.op_type:
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
