"""Draws a token of 64 rows with `sample_top_p`, twice: the second time is the section `again` of the log."""

import numpy as np

from bundle import names
from server.device import CUDA, OnnxDevice
from tests.cuda_stub.programs.common import mark

_NUM_ROWS, _VOCAB_SIZE, _NUM_CANDIDATES = 64, 32_000, 1024


def main() -> None:
    device = OnnxDevice(CUDA, num_threads=1)
    session = device.weightless("sample_top_p")
    logits = device.value(np.zeros((_NUM_ROWS, _VOCAB_SIZE), np.float32))
    column = np.ones((_NUM_ROWS, 1), np.float32)
    feeds = {
        names.NUM_CANDIDATES: np.array([_NUM_CANDIDATES]),
        names.TEMPERATURES: column,
        names.TOP_PS: column * np.float32(0.9),
        names.MIN_PS: column * 0,
        names.UNIFORMS: np.zeros((_NUM_ROWS, 1)),
    }
    for section in ("first", "again", "end"):
        mark(section)
        binding = session.io_binding()
        binding.bind_ortvalue_input(names.LOGITS, logits)
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for output in session.get_outputs():
            binding.bind_output(output.name, "cpu")
        session.run_with_iobinding(binding)


if __name__ == "__main__":
    main()
