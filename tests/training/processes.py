"""Trainings in processes of their own, which are copies of one that has imported torch."""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from seq2seq_serve.training.__main__ import main

_COPIES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Rank:
    """One process of a training.

    Attributes:
        folder: Where it writes what it prints.
    """

    process: BaseProcess
    folder: Path

    def wait(self) -> int:
        """The exit code."""
        self.process.join(300)
        assert self.process.exitcode is not None, self.stderr
        return self.process.exitcode

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()


def start_rank(environment: dict[str, str], folder: Path, *arguments: str) -> Rank:
    """Start `python -m training train` with more variables, and with its output in a folder."""
    _COPIES.set_forkserver_preload([__name__, "torch._dynamo", "seq2seq_serve.training.reports.curves"])
    process = _COPIES.Process(target=_train, args=(environment, folder, arguments))
    process.start()
    return Rank(process, folder)


def _train(environment: dict[str, str], folder: Path, arguments: tuple[str, ...]) -> None:
    os.environ.update(environment)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.exit(main(["train", *arguments]))
