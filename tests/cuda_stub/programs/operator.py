"""Runs a graph of one operator, captured: `MODEL.onnx HAS_KERNELS FEEDS`.

`FEEDS` is JSON: for each input, its type and its shape.
"""

import json
import sys

import numpy as np
import onnxruntime as ort

from seq2seq_serve import kernels
from tests.cuda_stub.programs.common import mark


def main() -> None:
    path, has_kernels, feeds = sys.argv[1:]
    options = ort.SessionOptions()
    options.log_severity_level = 3
    assert has_kernels == "False" or not kernels.add(options, is_cuda=True)
    provider = "CUDAExecutionProvider", {"enable_cuda_graph": "1"}
    session = ort.InferenceSession(path, options, providers=[provider])
    binding = session.io_binding()
    values = []  # a binding does not keep them
    for name, (dtype, shape) in json.loads(feeds).items():
        values.append(ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype), "cuda", 0))
        binding.bind_ortvalue_input(name, values[-1])
    for output in session.get_outputs():
        binding.bind_output(output.name, "cuda")
    for section in ("warm_up", "capture", "again", "end"):
        mark(section)
        session.run_with_iobinding(binding)


if __name__ == "__main__":
    main()
