"""optimum's models on ONNX Runtime, in a Python environment of their own for an older transformers.

    python -m venv .venv-optimum
    .venv-optimum/bin/pip install torch==2.13.0 onnxruntime==1.31.1 'optimum-onnx[onnxruntime]==0.1.0'

The benchmark runs this module there as a process, which answers on standard output, a line for each line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from benchmarks.peers.work import Search

PYTHON = Path(__file__).parents[2] / ".venv-optimum/bin/python"


class OptimumPeer:
    """A process with an `ORTModelForSeq2SeqLM`. Owned by the benchmark.

    Args:
        checkpoint: A folder as `save_pretrained` writes it; optimum exports it.
        num_threads: Number of threads that ONNX Runtime may use.
    """

    def __init__(self, checkpoint: Path, num_threads: int) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", __name__, checkpoint, str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=PYTHON.parents[2],
            text=True,
        )
        self._read()  # the model has been exported and loaded

    def translate(self, sources: Sequence[Any], search: Search) -> list[list[int]]:
        """Returns the best target of each source.

        Raises:
            EOFError: The process failed; run its command to see why.
        """
        assert self._process.stdin is not None
        print(json.dumps([sources, vars(search)]), file=self._process.stdin, flush=True)
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> list[list[int]]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise EOFError(f"the process of optimum has ended: {self._process.args!r}")
        answer: list[list[int]] = json.loads(line)
        return answer


def _serve(checkpoint: str, num_threads: int) -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the libraries print
    warnings.simplefilter("ignore")
    import onnxruntime
    import torch
    from optimum.onnxruntime import ORTModelForSeq2SeqLM  # type: ignore[import-not-found]

    from benchmarks.peers.transformers_peer import TransformersPeer

    torch.set_num_threads(num_threads)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    model = ORTModelForSeq2SeqLM.from_pretrained(checkpoint, export=True, session_options=options)
    peer = TransformersPeer(model)
    print("[]", file=answers)
    for line in sys.stdin:
        sources, search = json.loads(line)
        targets = peer.translate(sources, cast("Search", SimpleNamespace(**search)))
        print(json.dumps(targets), file=answers)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
