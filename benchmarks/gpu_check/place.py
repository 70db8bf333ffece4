"""Shared by the parts of `benchmarks.gpu_check`: a model, its bundles, and decoding without an engine."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.server.engine.records import Request, Search, Sequence
from seq2seq_serve.server.runner.device import ProviderPolicy
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import RunnerConfig
from seq2seq_serve.training.config import EOS_ID, UNK_ID, TransformerConfig
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.presets import base
from seq2seq_serve.training.run import TrainedModel

DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_ENCODED_AT_ONCE = 64
_MEMORY_BUDGET_BYTES = 1 << 40  # so large that only the number of slots limits the buffers


@dataclass(frozen=True)
class Scale:
    """The model and the sizes of the check.

    Attributes:
        device: torch's name of the device.
        precisions: Precisions to serve on the device; the bars apply to the first one.
        rows: Numbers of requests at once.
        source_length: Tokens of every timed source.
        num_tokens: Target tokens of every timed request.
        num_requests: Number of requests in the memory check.
        num_rounds: Number of timed rounds.
        encode_shapes: Rows and source lengths at which the first encoding is timed.
    """

    device: str
    model: TransformerConfig
    precisions: tuple[Precision, ...]
    rows: tuple[int, ...]
    source_length: int
    num_tokens: int
    num_requests: int
    num_rounds: int
    encode_shapes: tuple[tuple[int, int], ...]

    @property
    def policy(self) -> ProviderPolicy:
        """The provider policy of the runners."""
        return ProviderPolicy.CPU if self.device == "cpu" else ProviderPolicy.REQUIRE


_BASE = base().model
assert isinstance(_BASE, TransformerConfig)
CUDA_SCALE = Scale(
    device="cuda",
    model=_BASE,
    precisions=(Precision.FP16, Precision.BF16),
    rows=(1, 8, 64, 256),
    source_length=20,
    num_tokens=32,
    num_requests=10_000,
    num_rounds=3,
    encode_shapes=(
        *((1, 5), (1, 12), (1, 33), (3, 9), (7, 17), (8, 24), (16, 11), (33, 30), (64, 20), (64, 63)),
    ),
)
CPU_SCALE = Scale(
    device="cpu",
    model=TransformerConfig(300, 32, 64, 4, 1, 1, max_source_length=32, max_target_length=32),
    precisions=(Precision.FP32,),
    rows=(1, 3),
    source_length=8,
    num_tokens=6,
    num_requests=60,
    num_rounds=1,
    encode_shapes=((1, 3), (3, 8)),
)


@dataclass
class Place:
    """Shared state of the parts; an export adds the bundle that later parts need.

    Attributes:
        folder: A temporary folder.
        trained: A model with random weights.
        bundles: Exported bundles by precision.
    """

    scale: Scale
    folder: Path
    trained: TrainedModel
    bundles: dict[Precision, Path] = field(default_factory=dict)

    @property
    def served(self) -> list[Precision]:
        """The precisions of the device with a bundle.

        Raises:
            RuntimeError: There is no bundle for the device.
        """
        served = [precision for precision in self.scale.precisions if precision in self.bundles]
        if not served:
            raise RuntimeError("there is no bundle for the device, since every export failed")
        return served

    @property
    def graphs(self) -> Path:
        """The folder of graphs that were not verified."""
        return self.folder / "graphs"

    @property
    def device(self) -> torch.device:
        """The device of torch."""
        return torch.device(self.scale.device)

    def model(self, dtype: torch.dtype = torch.float32) -> Transformer:
        """Returns a copy of the model on the device."""
        model = Transformer(self.scale.model).eval()
        model.load_state_dict(self.trained.model.state_dict())
        return model.to(self.device, dtype)

    def runner(
        self,
        precision: Precision,
        num_slots: int,
        *,
        cuda_graphs: bool = True,
        policy: ProviderPolicy | None = None,
    ) -> OnnxRunner:
        """Create a runner and warm it up; without a policy, it runs on the device."""
        if precision not in self.bundles:
            raise RuntimeError(f"there is no {precision} bundle, since its export failed")
        config = RunnerConfig(
            provider=policy or self.scale.policy,
            precision=precision,
            cuda_graphs=cuda_graphs,
            memory_budget_bytes=_MEMORY_BUDGET_BYTES,
            max_slots=num_slots,
        )
        runner = OnnxRunner(load_bundle(self.bundles[precision]), config)
        runner.warm_up()
        return runner

    def sources(self, count: int, length: int | None = None) -> list[list[int]]:
        """Returns random sources, always the same; the default is random lengths up to `source_length`."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(1, self.scale.source_length + 1, count) if length is None else [length] * count
        low, high = UNK_ID + 1, self.trained.config.vocab_size
        return [[*rng.integers(low, high, int(n) - 1).tolist(), EOS_ID] for n in lengths]


def random_model(config: TransformerConfig) -> TrainedModel:
    """Returns a model with random weights, also in biases and norms, so that each of them has an effect."""
    texts = ["the quick brown fox jumps over the lazy dog"]
    model = Transformer(config).eval()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=chance)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))
    provenance = {"preset": "base", "corpus": "none: random weights"}
    dev = [(text, text) for text in texts] * 4
    return TrainedModel(model, train_tokenizer(texts, 300), config, provenance, dev, dev_score=0.0)


def requests_for(sources: list[list[int]], num_tokens: int) -> list[Request]:
    """Returns greedy requests without options."""
    return [
        Request(str(i), {SOURCE_IDS: np.array(source)}, len(source), num_tokens, arrival=time.monotonic())
        for i, source in enumerate(sources)
    ]


def greedy(
    runner: OnnxRunner, sources: list[list[int]], num_tokens: int, step_seconds: list[float] | None = None
) -> list[list[int]]:
    """Decode exactly `num_tokens` target tokens of each source; appends step times to `step_seconds`."""
    requests = requests_for(sources, num_tokens)
    for start in range(0, len(requests), _ENCODED_AT_ONCE):
        runner.encode(start, requests[start : start + _ENCODED_AT_ONCE])
    rows = tuple(
        Sequence(Search(request, runner.start_ids), runner.start_ids[-1], row=row)
        for row, request in enumerate(requests)
    )
    for _ in range(num_tokens):
        started = time.perf_counter()
        selected = runner.step(rows)
        if step_seconds is not None:
            step_seconds.append(time.perf_counter() - started)
        for sequence, token_id in zip(rows, selected.token_ids, strict=True):
            sequence.token_ids.append(token_id)
            sequence.next_token_id = token_id
    return [sequence.token_ids for sequence in rows]
