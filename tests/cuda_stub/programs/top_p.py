"""Draws a token of 64 rows by `top_p`, twice: the second time is the section `again` of the log."""

import numpy as np

from seq2seq_serve.bundle import names
from seq2seq_serve.server.engine.request import Sampling
from seq2seq_serve.server.runner.device import CUDA, OnnxDevice
from seq2seq_serve.server.runner.selection import _drawing
from tests.cuda_stub.programs.common import mark

_NUM_ROWS, _VOCAB_SIZE = 64, 32_000
_SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=0.9, min_p=0.0, seed=0)


def main() -> None:
    device = OnnxDevice(CUDA, num_threads=1)
    kind = _drawing(_SAMPLING, _VOCAB_SIZE)
    session = device.weightless(kind.graph)
    logits = device.value(np.zeros((_NUM_ROWS, _VOCAB_SIZE), np.float32))
    column = np.ones((_NUM_ROWS, 1), np.float32)
    feeds = {
        names.NUM_CANDIDATES: np.array([kind.num_candidates]),
        names.TEMPERATURES: column,
        names.TOP_PS: column * np.float32(_SAMPLING.top_p),
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
