"""Commands in processes of their own, which are copies of one that has imported torch."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from seq2seq_serve.training.__main__ import main

_COPIES = multiprocessing.get_context("forkserver")
_IMPORTED = (
    "torch._dynamo",
    "torch.onnx",
    "seq2seq_serve.export.__main__",
    "seq2seq_serve.training.reports.curves",
)


def start_copy(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call a function in a new process."""
    _COPIES.set_forkserver_preload([__name__, *_IMPORTED])
    process = _COPIES.Process(target=function, args=arguments)
    process.start()
    return process


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
    return Rank(start_copy(_train, environment, folder, arguments), folder)


def _train(environment: dict[str, str], folder: Path, arguments: tuple[str, ...]) -> None:
    os.environ.update(environment)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.exit(main(["train", *arguments]))
