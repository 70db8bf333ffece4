"""Silero's model of voice activity (github.com/snakers4/silero-vad), arranged for many chunks at once.

In the model's own graph, ONNX Runtime multiplies each convolution chunk by chunk, over one to five places at
a time. Here each is one product of all chunks of a run, and only places that count are computed. The weights
are inputs; the server makes them those of the model's file (`server.runner.voice_activity`).

Shapes: N chunks of 512 samples, after 64 that are read again.
"""

from __future__ import annotations

import onnx
import onnx.parser

from seq2seq_serve.export.convert import OPSET

# The last two convolutions have two places and one; the weights for the zeros beside them are left out.
_TEXT = """
<ir_version: 10, opset_import: ["": {opset}], producer_name: "seq2seq-serve">
voice_activity (
    float[N, 576] input, float[1, 1, 128] h, float[1, 1, 128] c,
    float[258, 1, 256] basis,
    float[128, 129, 3] weight_0, float[128] bias_0, float[64, 128, 3] weight_1, float[64] bias_1,
    float[64, 64, 3] weight_2, float[64] bias_2, float[128, 64, 3] weight_3, float[128] bias_3,
    float[1, 512, 128] input_weights, float[1, 512, 128] state_weights, float[1, 1024] gate_biases,
    float[1, 128, 1] output_weight, float[1] output_bias
) => (float[N] speech_probs, float[1, 1, 128] hn, float[1, 1, 128] cn)
{{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    three = Constant <value_ints = [3]> ()
    four = Constant <value_ints = [4]> ()
    five = Constant <value_ints = [5]> ()
    six = Constant <value_ints = [6]> ()
    rest = Constant <value_ints = [-1]> ()
    around_places = Constant <value_ints = [0, 1, 0, 0, 1, 0]> ()

    around_samples = Constant <value_ints = [0, 128, 0, 128]> ()
    mirrored = Pad <mode = "reflect"> (input, around_samples)
    half = Constant <value_ints = [128]> ()
    whole = Constant <value_ints = [256]> ()
    end_of_left = Constant <value_ints = [640]> ()
    end_of_right = Constant <value_ints = [768]> ()
    left_halves = Slice (mirrored, half, end_of_left, one)
    right_halves = Slice (mirrored, whole, end_of_right, one)
    shape_of_halves = Constant <value_ints = [-1, 128]> ()
    left = Reshape (left_halves, shape_of_halves)
    right = Reshape (right_halves, shape_of_halves)
    windows = Concat <axis = 1> (left, right)
    by_wave = Squeeze (basis, one)
    by_sample = Transpose <perm = [1, 0]> (by_wave)
    spectrum = MatMul (windows, by_sample)
    real, imaginary = Split <axis = 1, num_outputs = 2> (spectrum)
    real_squares = Mul (real, real)
    imaginary_squares = Mul (imaginary, imaginary)
    power = Add (real_squares, imaginary_squares)
    all_magnitudes = Sqrt (power)
    shape_of_magnitudes = Constant <value_ints = [-1, 4, 129]> ()
    magnitudes = Reshape (all_magnitudes, shape_of_magnitudes)

    padded_magnitudes = Pad (magnitudes, around_places)
    before_0 = Slice (padded_magnitudes, zero, four, one)
    here_0 = Slice (padded_magnitudes, one, five, one)
    after_0 = Slice (padded_magnitudes, two, six, one)
    neighbours_0 = Concat <axis = 2> (before_0, here_0, after_0)
    shape_0 = Constant <value_ints = [-1, 387]> ()
    x_0 = Reshape (neighbours_0, shape_0)
    by_place_0 = Transpose <perm = [2, 1, 0]> (weight_0)
    shape_of_weight_0 = Constant <value_ints = [387, 128]> ()
    matrix_0 = Reshape (by_place_0, shape_of_weight_0)
    sum_0 = Gemm (x_0, matrix_0, bias_0)
    flat_0 = Relu (sum_0)
    shape_of_y_0 = Constant <value_ints = [-1, 4, 128]> ()
    y_0 = Reshape (flat_0, shape_of_y_0)

    padded_1 = Pad (y_0, around_places)
    before_1 = Slice (padded_1, zero, four, one, two)
    here_1 = Slice (padded_1, one, five, one, two)
    after_1 = Slice (padded_1, two, six, one, two)
    neighbours_1 = Concat <axis = 2> (before_1, here_1, after_1)
    shape_1 = Constant <value_ints = [-1, 384]> ()
    x_1 = Reshape (neighbours_1, shape_1)
    by_place_1 = Transpose <perm = [2, 1, 0]> (weight_1)
    shape_of_weight_1 = Constant <value_ints = [384, 64]> ()
    matrix_1 = Reshape (by_place_1, shape_of_weight_1)
    sum_1 = Gemm (x_1, matrix_1, bias_1)
    y_1 = Relu (sum_1)

    shape_2 = Constant <value_ints = [-1, 128]> ()
    x_2 = Reshape (y_1, shape_2)
    by_place_2 = Transpose <perm = [2, 1, 0]> (weight_2)
    places_2 = Slice (by_place_2, one, three)
    shape_of_weight_2 = Constant <value_ints = [128, 64]> ()
    matrix_2 = Reshape (places_2, shape_of_weight_2)
    sum_2 = Gemm (x_2, matrix_2, bias_2)
    y_2 = Relu (sum_2)

    by_place_3 = Transpose <perm = [2, 1, 0]> (weight_3)
    places_3 = Slice (by_place_3, one, two)
    matrix_3 = Squeeze (places_3, zero)
    sum_3 = Gemm (y_2, matrix_3, bias_3)
    y_3 = Relu (sum_3)

    features = Unsqueeze (y_3, one)
    states, hn, cn = LSTM <hidden_size = 128> (features, input_weights, state_weights, gate_biases, , h, c)
    shape_of_states = Constant <value_ints = [-1, 128]> ()
    flat_states = Reshape (states, shape_of_states)
    positive_states = Relu (flat_states)
    by_state = Squeeze (output_weight, zero)
    products = MatMul (positive_states, by_state)
    logits = Add (products, output_bias)
    probabilities = Sigmoid (logits)
    speech_probs = Reshape (probabilities, rest)
}}
"""


def voice_activity() -> onnx.ModelProto:
    """The model without weights: the probability of speech in each chunk."""
    model = onnx.parser.parse_model(_TEXT.format(opset=OPSET))
    onnx.checker.check_model(model, full_check=True)
    return model
