"""Times one graph in a separate process, with a given set of attention kernels of ONNX Runtime.

    python -m benchmarks.gpu_check.kernels FOLDER/encode.onnx --sdpa-kernel 19 --shapes 1x5,64x20
    ORT_ENABLE_XQA=0 python -m benchmarks.gpu_check.kernels FOLDER/step.onnx --shapes 1x20,256x20

`encode` runs twice at each shape (rows x source length), after runs at a larger shape. The time of `step` is
the median of many consecutive runs, with captured graphs and without. The buffers are on the device, and the
server's work around a run is not measured. Each choice needs its own process, because ONNX Runtime reads its
environment once and cuDNN keeps its plans. This module does not import torch, so it starts quickly. The line
on standard output is one JSON array with an object for each shape.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.cuda_libraries import load_cuda_libraries
from seq2seq_serve.bundle.names import Axis, Verb

_PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}
_CAPACITY = 256  # capacity of caches and memories in the base preset
_CACHE_LENGTH = 16  # length of the caches at the first timed step
_SOURCES = (names.SOURCE_IDS, names.SOURCE_LENGTHS)
_SOURCE_ID = 5
_WARM_UP_RUNS, _TIMED_RUNS = 3, 50
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
}

_Shape = tuple[int, int]  # rows, source length


class Graph:
    """A session and its buffers, whose addresses are fixed.

    Args:
        path: The ONNX file; its weights are in the same folder.
        device: `cuda` or `cpu`.
        options: Options of the provider.
        num_rows: Most rows of a run.
        given: Initial content of some buffers; the others have the same random numbers in every process.
    """

    def __init__(
        self,
        path: Path,
        device: str,
        options: dict[str, str],
        num_rows: int,
        given: dict[str, np.ndarray],
    ) -> None:
        session_options = ort.SessionOptions()
        session_options.enable_mem_pattern = False  # as in the server
        session_options.log_severity_level = 3
        provider = _PROVIDERS[device]
        self._session = ort.InferenceSession(path, session_options, providers=[(provider, options)])
        if self._session.get_providers()[0] != provider:
            raise RuntimeError(f"{path.name} does not run on {provider}")
        self._device = device
        self._given = given
        self._values: dict[str, ort.OrtValue] = {}
        self._sizes = sizes = {
            Axis.BATCH: num_rows,
            Axis.CACHE_CAPACITY: _CAPACITY,
            Axis.MEMORY_CAPACITY: _CAPACITY,
        }
        for spec in (*self._session.get_inputs(), *self._session.get_outputs()):
            name = names.buffer_of(spec.name)
            fed = (*_SOURCES, names.OWNERS, names.CACHE_ROWS)
            is_fed = not spec.shape or (name in fed and name not in given)
            if is_fed or name in self._values:
                continue
            shape = tuple(sizes.get(axis, axis) for axis in spec.shape)
            dtype = _DTYPES[spec.type]
            array = given[name].astype(dtype) if name in given else _random(shape, dtype)
            self._values[name] = ort.OrtValue.ortvalue_from_numpy(array, device, 0)

    def bind(self, num_rows: int, source_length: int) -> Any:
        """Bind the first rows; sources without a buffer are copied from the host."""
        fed = {
            names.SOURCE_IDS: np.full((num_rows, source_length), _SOURCE_ID),
            names.SOURCE_LENGTHS: np.full(num_rows, source_length, np.int32),
            names.OWNERS: np.arange(num_rows),
            names.CACHE_ROWS: np.arange(num_rows),
        }
        binding = self._session.io_binding()
        for spec in self._session.get_inputs():
            if spec.name in self._values:
                binding.bind_input(spec.name, *self._place(spec, num_rows))
            else:
                binding.bind_cpu_input(spec.name, fed.get(spec.name, np.array(_CAPACITY, np.int32)))
        for spec in self._session.get_outputs():
            binding.bind_output(spec.name, *self._place(spec, num_rows))
        return binding

    def _place(self, spec: Any, num_rows: int) -> tuple[Any, ...]:
        value = self._values[names.buffer_of(spec.name)]
        shape = (num_rows, *(self._sizes.get(axis, axis) for axis in spec.shape[1:]))
        return self._device, 0, _DTYPES[value.data_type()], shape, value.data_ptr()

    def reset(self) -> None:
        """Restore the initial content of the buffers, since a step may write the inputs of the next one."""
        for name, array in self._given.items():
            if name in self._values:
                value = self._values[name]
                value.update_inplace(array.astype(_DTYPES[value.data_type()]))

    def run_seconds(self, binding: Any, graph_id: int = -1) -> float:
        """Run the graph until the device has finished; returns the duration."""
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        started = time.perf_counter()
        self._session.run_with_iobinding(binding, options)
        return time.perf_counter() - started

    def most_probable(self) -> list[int]:
        """Returns the token id with the largest logit of each row in the last run."""
        token_ids: list[int] = self._values[names.LOGITS].numpy().argmax(1).tolist()
        return token_ids


@functools.cache
def _random(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)


def encode(path: Path, device: str, options: dict[str, str], shapes: list[_Shape]) -> list[dict[str, Any]]:
    """Measure the milliseconds of the first and the second run at each shape."""
    max_rows, max_length = (max(sizes) for sizes in zip(*shapes, strict=True))
    graph = Graph(path, device, options, max_rows, {})
    results = []
    # The first shape is the largest, so that no other shape allocates memory.
    for rows, length in [(max_rows, max_length + 1), *shapes]:
        binding = graph.bind(rows, length)
        first, second = (1e3 * graph.run_seconds(binding) for _ in range(2))
        results.append({"rows": rows, "source_length": length, "first_ms": first, "second_ms": second})
    return results[1:]


def step(path: Path, device: str, options: dict[str, str], shapes: list[_Shape]) -> list[dict[str, Any]]:
    """Measure the milliseconds of a step, on a GPU also captured, and return them with its tokens."""
    max_rows = max(rows for rows, _ in shapes)
    results: list[dict[str, Any]] = [{"rows": rows, "source_length": length} for rows, length in shapes]
    given = {
        names.TOKEN_IDS: np.arange(max_rows) % 100 + 4,
        names.PREVIOUS_LENGTHS: np.full(max_rows, _CACHE_LENGTH - 1),
        names.CACHE_LENGTHS: np.full(max_rows, _CACHE_LENGTH),
        names.LAST_SOURCE_POSITIONS: np.full(max_rows, shapes[0][1] - 1),
    }
    for key, is_captured in {"ms": False, "captured_ms": True}.items():
        if is_captured and device == "cpu":
            continue
        captures = {"enable_cuda_graph": "1"} if is_captured else {}
        graph = Graph(path, device, options | captures, max_rows, given)
        for result in results:
            rows = result["rows"]
            binding = graph.bind(rows, result["source_length"])
            run = functools.partial(graph.run_seconds, binding, rows if is_captured else -1)
            graph.reset()
            for _ in range(_WARM_UP_RUNS):
                run()
            graph.reset()
            run()
            result[key.replace("ms", "token_ids")] = graph.most_probable()[:rows]
            result[key] = 1e3 * statistics.median(run() for _ in range(_TIMED_RUNS))
    return results


def _shapes(text: str) -> list[_Shape]:
    pairs = [tuple(map(int, pair.split("x"))) for pair in text.split(",")]
    return [(rows, length) for rows, length in pairs]


def main() -> int:
    """Time the graph; returns 0 if done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check.kernels",
        allow_abbrev=False,
        description="Time one graph with a given set of attention kernels.",
        epilog="example:\n  python -m benchmarks.gpu_check.kernels encode.onnx --sdpa-kernel 19 --shapes 1x5",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("graph", type=Path, help="encode.onnx or step.onnx of a bundle; for CUDA in fp16")
    parser.add_argument("--device", choices=tuple(_PROVIDERS), default="cuda", help="(default: %(default)s)")
    parser.add_argument(
        "--sdpa-kernel",
        help="sum of ONNX Runtime's bits: flash 1, efficient 2, cuDNN 8, math 16 (default: its own choice)",
    )
    parser.add_argument("--shapes", type=_shapes, required=True, help="comma-separated rows x source length")
    flags = parser.parse_args()
    if flags.device == "cuda":
        load_cuda_libraries(None)
    options = {"sdpa_kernel": flags.sdpa_kernel} if flags.sdpa_kernel and flags.device == "cuda" else {}
    measure = encode if flags.graph.stem == Verb.ENCODE else step
    print(json.dumps(measure(flags.graph, flags.device, options, flags.shapes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
