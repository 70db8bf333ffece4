"""Helpers of the programs on the stub: marks in its log, a runner, requests. They do not import torch."""

import ctypes
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.runner.runner import OnnxRunner

SOURCES = ([5, 2], [5, 6, 2], [5, 6, 7, 2])
NUM_SLOTS = 8


def mark(name: str) -> None:
    """Begin a section of the log."""
    ctypes.CDLL(None).cuda_stub_mark(name.encode())


def make_runner(bundle: Path, precision: Precision = Precision.FP16) -> OnnxRunner:
    config = RunnerConfig(
        provider=ProviderPolicy.REQUIRE,
        precision=precision,
        max_slots_size_bytes=1 << 40,  # the number of slots alone bounds the buffers
        max_slots=NUM_SLOTS,
    )
    return OnnxRunner(load_bundle(bundle), config)


def requests_for(sources: Iterable[list[int]]) -> list[Request]:
    arrival = time.monotonic()
    return [
        Request(str(i), {SOURCE_IDS: np.array(ids)}, len(ids), 8, arrival) for i, ids in enumerate(sources)
    ]


def rows_for(runner: OnnxRunner, requests: list[Request]) -> tuple[Sequence, ...]:
    """Rows that have no token yet."""
    return tuple(
        Sequence(
            Search(request, runner.start_ids),
            runner.start_ids[-1],
            row=row,
            num_branches=request.beam.size if request.beam else 1,
            is_plain=request.is_plain,
        )
        for row, request in enumerate(requests)
    )
