"""What the machine allows: bytes read and multiply-adds a second, and the least time of a step by both."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from bundle.names import Precision
from training.config import TransformerConfig

_REPETITIONS = 9
_M, _K, _N = 512, 2048, 2048  # of the product whose speed is the peak


@dataclass(frozen=True)
class Machine:
    """The best of several tries, on the cores that everything runs on.

    Attributes:
        bytes_per_second: Read from memory.
        multiply_adds_per_second: By precision, in ONNX Runtime's largest products.
    """

    bytes_per_second: float
    multiply_adds_per_second: dict[Precision, float]


@dataclass(frozen=True)
class Floor:
    """The least time of a step: what it must read, and what it must multiply; the larger one holds."""

    read_seconds: float
    multiply_seconds: float

    @property
    def seconds(self) -> float:
        """No step can be faster, except for what the caches keep from one step to the next."""
        return max(self.read_seconds, self.multiply_seconds)


def measure_machine(num_threads: int) -> Machine:
    """Measure bandwidth and peaks; some seconds."""
    peaks = {precision: _peak(precision, num_threads) for precision in (Precision.FP32, Precision.INT8)}
    return Machine(_read_bandwidth(num_threads), peaks)


def step_floor(
    config: TransformerConfig,
    precision: Precision,
    num_requests: int,
    beam_size: int,
    source_tokens: float,
    target_tokens: float,
    machine: Machine,
) -> Floor:
    """The floor of a step of the decoder.

    Every weight is read once, and so is every live position of cache and memory, float32 in both precisions;
    the memory of a request once, whatever its beam. Every row is multiplied by every weight, and attends to
    every live position; embedding and norms count nothing.

    Args:
        config: The model's sizes.
        precision: Of the weights and their products.
        num_requests: In the step.
        beam_size: Rows of a request.
        source_tokens: Positions of each memory.
        target_tokens: Mean positions of each cache.
        machine: What was measured.
    """
    D, F, L, V = config.d_model, config.d_ff, config.num_decoder_layers, config.vocab_size
    num_rows = num_requests * beam_size
    num_weights = L * (6 * D * D + 2 * D * F) + V * D
    weight_bytes = num_weights * (1 if precision is Precision.INT8 else 4)
    live_positions = num_rows * target_tokens + num_requests * source_tokens
    live_bytes = 2 * L * live_positions * D * 4  # keys and values
    attended = 2 * L * num_rows * (target_tokens + source_tokens) * D
    return Floor(
        (weight_bytes + live_bytes) / machine.bytes_per_second,
        num_rows * num_weights / machine.multiply_adds_per_second[precision]
        + attended / machine.multiply_adds_per_second[Precision.FP32],
    )


def _read_bandwidth(num_threads: int) -> float:
    """Bytes a second read from arrays far larger than any cache, by as many threads."""
    arrays = [np.ones(1 << 26, np.float32) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = _least_seconds(lambda: list(pool.map(lambda array: np.dot(array, array), arrays)))
    return sum(array.nbytes for array in arrays) / seconds


def _peak(precision: Precision, num_threads: int) -> float:
    """Multiply-adds a second of one product large enough to keep the units busy, small enough for a cache."""
    operator, dtypes = {
        Precision.FP32: ("MatMul", ("float32", "float32", "float32")),
        Precision.INT8: ("MatMulInteger", ("uint8", "int8", "int32")),
    }[precision]
    left_type, right_type, product_type = map(np.dtype, dtypes)
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [helper.make_node(operator, ["left", "right"], ["product"])],
        "peak",
        [helper.make_tensor_value_info("left", helper.np_dtype_to_tensor_dtype(left_type), (_M, _K))],
        [helper.make_tensor_value_info("product", helper.np_dtype_to_tensor_dtype(product_type), (_M, _N))],
        [onnx.numpy_helper.from_array(rng.integers(-100, 100, (_K, _N)).astype(right_type), "right")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = num_threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = {"left": rng.integers(0, 100, (_M, _K)).astype(left_type)}
    return _M * _K * _N / _least_seconds(lambda: session.run(None, feed))


def _least_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
