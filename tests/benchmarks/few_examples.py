"""Runs a command with few built-in examples: `python -m tests.benchmarks.few_examples training train ...`."""

import runpy
import sys

from seq2seq_serve.training.data import built_in

_SIZES = {"train": 40, "dev": 4, "test": 6}


def _few_translations() -> built_in.Parts:
    return {split: pairs[: _SIZES[split]] for split, pairs in _translations().items()}


if __name__ == "__main__":
    for sizes in (built_in._NUM_STORIES, built_in._NUM_PICTURES, built_in._NUM_CLIPS):
        sizes.update(_SIZES)
    _translations, built_in._translations = built_in._translations, _few_translations
    command = sys.argv.pop(1)
    runpy.run_module(command, run_name="__main__", alter_sys=True)
