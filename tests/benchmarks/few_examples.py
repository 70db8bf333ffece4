"""Commands with few built-in examples, in processes of their own."""

import os
import sys
from pathlib import Path

import torch

from seq2seq_serve.export.__main__ import main as export
from seq2seq_serve.training.__main__ import main as train
from seq2seq_serve.training.data import built_in
from tests.training.processes import start_copy

_COMMANDS = {"export": export, "training": train}
_SIZES = {"train": 40, "dev": 4, "test": 6}


def run(arguments: list[str], log: Path) -> None:
    """Run `python -m ARGUMENTS`; what it prints is added to a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start_copy(_run, arguments, log).join()


def _run(arguments: list[str], log: Path) -> None:
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    for sizes in (built_in._NUM_PICTURES, built_in._NUM_CLIPS):
        sizes.update(_SIZES)
    read = built_in._read
    built_in._read = lambda name: {split: pairs[: _SIZES[split]] for split, pairs in read(name).items()}
    command, *rest = arguments
    sys.exit(_COMMANDS[command](rest))
