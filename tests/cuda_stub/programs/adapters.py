"""Runs a graph of one CudaLowRank, captured: `MODEL.onnx HAS_KERNELS N I O K R UNITS PARTS`."""

import sys

import numpy as np
import onnxruntime as ort

from seq2seq_serve import kernels
from tests.cuda_stub.programs.common import mark


def main() -> None:
    path, has_kernels, *sizes = sys.argv[1:]
    N, I, O, K, R, num_units, num_parts = map(int, sizes)  # noqa: E741
    options = ort.SessionOptions()
    options.log_severity_level = 3
    assert has_kernels == "False" or not kernels.add(options, is_cuda=True)
    provider = "CUDAExecutionProvider", {"enable_cuda_graph": "1"}
    session = ort.InferenceSession(path, options, providers=[provider])
    feeds = {
        "x": np.zeros((N, I), np.float16),
        "y": np.zeros((N, O), np.float16),
        "adapters": np.zeros((K, R * num_units), np.float16),
        "ranks": np.full((K, num_parts), R, np.int32),
        "adapter_ids": np.arange(N) % K,
    }
    values = {name: ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0) for name, array in feeds.items()}
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_ortvalue_output(output.name, ort.OrtValue.ortvalue_from_numpy(feeds["y"], "cuda", 0))
    for section in ("warm_up", "capture", "again", "end"):
        mark(section)
        session.run_with_iobinding(binding)


if __name__ == "__main__":
    main()
