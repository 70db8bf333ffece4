"""Shared by the parts of `benchmarks.gpu_check`: sizes, bundles, findings, and decoding without an engine."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.mix import VOCAB_SIZE
from benchmarks.random_models import random_trained
from benchmarks.report import write
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.config import EOS_ID, UNK_ID, TransformerConfig
from seq2seq_serve.training.presets import base
from seq2seq_serve.training.run import TrainedModel

BASE = "base"
ENCODED_AT_ONCE = 64
_MAX_SLOTS_SIZE_BYTES = 1 << 40  # so large that only the number of slots limits the buffers


@dataclass(frozen=True)
class Scale:
    """The model and the sizes of the check.

    Attributes:
        device: torch's name of the device.
        model: Of the bundle `base`.
        precisions: Precisions to serve on the device; speed is measured in the first one.
        rows: Numbers of requests at once whose steps are timed.
        in_flight: Numbers of requests at once through gRPC.
        num_tokens: Target tokens of every timed request.
        num_requests: Number of requests in the memory check.
        num_rounds: Number of timed rounds.
        open_seconds: Duration of the arrivals in an open loop.
    """

    device: str
    model: TransformerConfig
    precisions: tuple[Precision, ...]
    rows: tuple[int, ...]
    in_flight: tuple[int, ...]
    num_tokens: int
    num_requests: int
    num_rounds: int
    open_seconds: float
    source_length: int = 20

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device == "cuda"

    @property
    def policy(self) -> ProviderPolicy:
        """The provider policy of the runners."""
        return ProviderPolicy.REQUIRE if self.on_cuda else ProviderPolicy.CPU


_BASE = base().model
assert isinstance(_BASE, TransformerConfig)
CUDA_SCALE = Scale(
    device="cuda",
    model=dataclasses.replace(_BASE, vocab_size=VOCAB_SIZE),
    precisions=(Precision.FP16, Precision.BF16),
    rows=(1, 8, 64, 256),
    in_flight=(64, 256),
    num_tokens=32,
    num_requests=5_000,
    num_rounds=3,
    open_seconds=5.0,
)
CPU_SCALE = Scale(
    device="cpu",
    model=TransformerConfig(VOCAB_SIZE, 32, 64, 4, 1, 1, max_source_length=64, max_target_length=160),
    precisions=(Precision.FP32,),
    rows=(1, 3),
    in_flight=(8,),
    num_tokens=6,
    num_requests=60,
    num_rounds=1,
    open_seconds=0.5,
)
SCALES = {scale.device: scale for scale in (CUDA_SCALE, CPU_SCALE)}


class Findings(dict[str, Any]):
    """The findings of a part; each change is written to a file at once, because a part may hang or crash."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        write(self, self._path)


@dataclass(frozen=True)
class Place:
    """The sizes and the folder of the bundles, which every part has in a process of its own."""

    scale: Scale
    folder: Path

    @cached_property
    def trained(self) -> TrainedModel:
        """The model of the bundle `base`."""
        return random_trained(self.scale.model)

    def config(
        self, precision: Precision, num_slots: int, policy: ProviderPolicy | None = None
    ) -> RunnerConfig:
        """Returns the settings of a runner; without a policy, it runs on the device."""
        return RunnerConfig(
            provider=policy or self.scale.policy,
            precision=precision,
            max_slots_size_bytes=_MAX_SLOTS_SIZE_BYTES,
            max_slots=num_slots,
        )

    def runner(
        self, precision: Precision, num_slots: int, name: str = BASE, policy: ProviderPolicy | None = None
    ) -> OnnxRunner:
        """Create a runner and warm it up."""
        runner = OnnxRunner(load_bundle(self.folder / name), self.config(precision, num_slots, policy))
        runner.warm_up()
        return runner

    def sources(self, count: int, length: int | None = None) -> list[list[int]]:
        """Returns random sources, always the same; the default is random lengths up to `source_length`."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, self.scale.source_length + 1, count) if length is None else [length] * count
        low, high = UNK_ID + 1, self.scale.model.vocab_size
        return [[*rng.integers(low, high, int(n) - 1).tolist(), EOS_ID] for n in lengths]


def requests_for(sources: list[list[int]], num_tokens: int) -> list[Request]:
    """Returns greedy requests without options."""
    return [
        Request(str(i), {SOURCE_IDS: np.array(source)}, len(source), num_tokens, arrival=time.monotonic())
        for i, source in enumerate(sources)
    ]


def encoded_rows(runner: OnnxRunner, requests: list[Request]) -> tuple[Sequence, ...]:
    """Encode requests, some at once; returns their rows, which have no token yet."""
    for start in range(0, len(requests), ENCODED_AT_ONCE):
        runner.encode(start, requests[start : start + ENCODED_AT_ONCE])
    return tuple(
        Sequence(Search(request, runner.start_ids), runner.start_ids[-1], row=row)
        for row, request in enumerate(requests)
    )


def step(runner: OnnxRunner, rows: tuple[Sequence, ...]) -> None:
    """Give each row the token that a step selects, which its next step is fed."""
    for sequence, token_id in zip(rows, runner.step(rows).token_ids, strict=True):
        sequence.token_ids.append(token_id)
        sequence.next_token_id = token_id
