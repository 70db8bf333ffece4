"""An interpreter for scripts that train: `python -m tests.benchmarks.few_examples -m MODULE ARGUMENTS`.

It runs a module with few built-in examples, in one thread.
"""

import runpy
import sys

import torch

from seq2seq_serve.training.data import built_in

_SIZES = {"train": 40, "dev": 4, "test": 6}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for sizes in (built_in._NUM_PICTURES, built_in._NUM_CLIPS):
        sizes.update(_SIZES)
    read = built_in._read
    built_in._read = lambda name: {split: pairs[: _SIZES[split]] for split, pairs in read(name).items()}
    _, _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
