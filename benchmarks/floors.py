"""Measures the machine's memory bandwidth and multiply-adds per second, and derives the floor of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.config import TransformerConfig

_REPETITIONS = 9
_M, _K, _N = 512, 2048, 2048  # sizes of the product whose speed is the peak
_WEIGHT_BYTES = {Precision.FP32: 4, Precision.INT8: 1, Precision.INT4: 9 / 16}  # with a scale for 32 weights


@dataclass(frozen=True)
class Machine:
    """Speed limits of the machine: the best of several measurements on the cores of the benchmark.

    Attributes:
        bytes_per_second: Bandwidth of reads from memory.
        multiply_adds_per_second: Speed of large products in ONNX Runtime, by precision.
    """

    bytes_per_second: float
    multiply_adds_per_second: dict[Precision, float]


@dataclass(frozen=True)
class StepSize:
    """The numbers that a decoder step reads, without those of the embedding and the norms.

    Attributes:
        num_weights: Numbers in the weights, each of which is read once.
        num_live: Numbers in the keys and values of all live positions of caches and memories. The hypotheses
            of a request share one memory.
        num_attended: The same, counting a shared memory once for each row.
    """

    num_weights: int
    num_live: float
    num_attended: float


def step_size(
    config: TransformerConfig, num_requests: int, beam_size: int, source_tokens: float, target_tokens: float
) -> StepSize:
    """Counts the numbers of a step.

    Args:
        config: The model's sizes.
        num_requests: Number of requests in the step.
        beam_size: Number of rows per request.
        source_tokens: Number of positions of each memory.
        target_tokens: Mean number of positions of each cache.
    """
    D, F, L, V = config.d_model, config.d_ff, config.num_decoder_layers, config.vocab_size
    num_rows = num_requests * beam_size
    return StepSize(
        L * (6 * D * D + 2 * D * F) + V * D,
        2 * L * D * (num_rows * target_tokens + num_requests * source_tokens),
        2 * L * D * num_rows * (target_tokens + source_tokens),
    )


def step_seconds(size: StepSize, num_rows: int, precision: Precision, machine: Machine) -> float:
    """Returns the least time of a step: the larger of its reading time and its multiplication time.

    Caches and memories are counted in float32 for all precisions. A step can be faster only by data that
    stays in the processor's caches between steps.
    """
    peak = machine.multiply_adds_per_second
    return max(
        (size.num_weights * _WEIGHT_BYTES[precision] + 4 * size.num_live) / machine.bytes_per_second,
        num_rows * size.num_weights / peak[precision] + size.num_attended / peak[Precision.FP32],
    )


def measure_machine(num_threads: int) -> Machine:
    """Measure bandwidth and peaks; takes some seconds."""
    fp32 = _peak("MatMul", ("float32", "float32", "float32"), num_threads)
    int8 = _peak("MatMulInteger", ("uint8", "int8", "int32"), num_threads)
    peaks = {Precision.FP32: fp32, Precision.INT8: int8, Precision.INT4: int8}
    return Machine(_read_bandwidth(num_threads), peaks)


def _read_bandwidth(num_threads: int) -> float:
    """Measures bytes per second read by the threads from arrays far larger than any processor cache."""
    arrays = [np.ones(1 << 26, np.float32) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = least_seconds(lambda: list(pool.map(lambda array: np.dot(array, array), arrays)))
    return sum(array.nbytes for array in arrays) / seconds


def _peak(operator: str, dtypes: tuple[str, str, str], num_threads: int) -> float:
    """Measures multiply-adds per second of a product that keeps the units busy and fits into a cache."""
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
    return _M * _K * _N / least_seconds(lambda: session.run(None, feed))


def least_seconds(run: Callable[[], object]) -> float:
    """Returns the shortest of several runs."""
    seconds = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
