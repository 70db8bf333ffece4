"""How fast the training loop is, beside a plain loop over `torch.nn.Transformer` of the same sizes.

    taskset -c 0,1 python -m benchmarks.training_speed --threads 2 --out benchmarks/results/X.json

Both take the same batches, optimizer, schedule, precision and matrix products (oneDNN's on a CPU), and take
turns within the run: a round is some steps of one, then the same batches in the other. Making the batches
counts for both. Measured: tokens of both sides a second, medians over rounds, and the median of the rounds'
ratios, with the preset's dropout and without any (torch's layers have dropout in two more places). Also what
share of one large product's speed the model's own products reach; on a GPU of the maker's number: the model
FLOPs utilisation. Not measured: evaluation, checkpoints, more than one device.
"""

from __future__ import annotations

import training.spin  # noqa: F401  # isort: skip

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hardware import describe_hardware
from benchmarks.plain_trainer import PlainTrainer
from training.batches import BatchShare, BatchStream
from training.config import EOS_ID, UNK_ID
from training.corpus import CorpusFiles
from training.encoded import EncodedPair
from training.loop import Trainer, fast_matmul
from training.presets import PRESETS, Preset, preset_named
from training.run import RunConfig, RunFolder
from training.tokenizer import train_tokenizer

_BAR = 1.0  # at least as fast as the plain loop
_CPU_BATCH_TOKENS = 2000
_PEAK_SIZE = {"cpu": 2048, "cuda": 8192}
# Dense bf16 products a second by the makers' data sheets, in units of 1e12.
_NOMINAL_TERAFLOPS = {"H100": 989.4, "H200": 989.4, "A100": 312.0}


@dataclass(frozen=True)
class Work:
    """What is trained in a round."""

    preset: Preset
    steps: int
    device: torch.device
    is_compiled: bool

    @property
    def dtype(self) -> torch.dtype:
        """As the loop chooses it."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def random_pairs(vocab_size: int, num_pairs: int = 4000) -> list[EncodedPair]:
    """Sentences as long as those of Multi30k: 14 tokens on average, and the target about like the source."""
    chance = random.Random(0)

    def ids(length: float) -> list[int]:
        return chance.choices(range(UNK_ID + 1, vocab_size), k=min(max(round(length), 4), 60))

    pairs = []
    for _ in range(num_pairs):
        length = chance.gauss(14, 5)
        pairs.append(EncodedPair([*ids(length), EOS_ID], ids(length + chance.gauss(0, 2))))
    return pairs


def our_trainer(work: Work, folder: Path) -> Trainer:
    """The loop of `training`, on random pairs."""
    preset, pairs = work.preset, random_pairs(work.preset.model.vocab_size)
    config = RunConfig(preset.name, preset.model, preset.training, "random", CorpusFiles(), "", "", {})
    trainer = Trainer(
        config,
        RunFolder(folder),
        train_tokenizer([], 260),
        lambda _: pairs,
        [],
        work.device,
        is_compiled=work.is_compiled,
    )
    trainer.model.train()
    return trainer


def timed(step: Callable[[BatchShare], object], stream: BatchStream, work: Work) -> tuple[float, int]:
    """Seconds and tokens of a round."""
    num_tokens = 0
    start = time.perf_counter()
    for _ in range(work.steps):
        share = stream.next_batch()
        step(share)
        num_tokens += share.num_tokens
    if work.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, num_tokens


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """What one large product reaches, the best of ten."""
    size = _PEAK_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def measure(work: Work, num_rounds: int) -> dict[str, object]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder, fast_matmul(work.device):
        ours = our_trainer(work, Path(folder))
        recipe = work.preset.training
        plain = PlainTrainer(work.preset.model, recipe, work.device, work.dtype)
        pairs = random_pairs(work.preset.model.vocab_size)
        plain_stream = BatchStream(lambda _: pairs, recipe.batch_tokens, recipe.seed)
        with FlopCounterMode(display=False) as counter:  # also the warm-up
            _, num_tokens = timed(ours.train_step, ours.batches, work)
        flops_per_token = counter.get_total_flops() / num_tokens
        timed(plain.train_step, plain_stream, work)
        peak = peak_flops(work.device, work.dtype)
        rounds = []
        for number in range(num_rounds):
            turns = {"ours": (ours.train_step, ours.batches), "plain": (plain.train_step, plain_stream)}
            speeds = {}
            for name in sorted(turns, reverse=number % 2 == 1):
                seconds, num_tokens = timed(*turns[name], work)
                speeds[name] = num_tokens / seconds
            rounds.append(speeds)
    ours_median = statistics.median(speeds["ours"] for speeds in rounds)
    achieved = ours_median * flops_per_token
    nominal = _nominal_flops(work.device)
    return {
        "preset": work.preset.name,
        "dropout": work.preset.model.dropout,
        "batch_tokens": recipe.batch_tokens,
        "dtype": str(work.dtype).removeprefix("torch."),
        "compiled": work.is_compiled,
        "tokens_per_second": round(ours_median),
        "plain_tokens_per_second": round(statistics.median(speeds["plain"] for speeds in rounds)),
        "ratio": round(statistics.median(speeds["ours"] / speeds["plain"] for speeds in rounds), 3),
        "share_of_measured_peak": round(achieved / peak, 3),
        "model_flops_utilisation": round(achieved / nominal, 3) if nominal else None,
        "rounds": [{name: round(speed) for name, speed in speeds.items()} for speeds in rounds],
    }


def _nominal_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops * 1e12 for key, flops in _NOMINAL_TERAFLOPS.items() if key in name), None)


def table(rows: list[dict[str, object]]) -> str:
    """For `benchmarks/README.md`."""
    lines = [
        "| preset | dropout | tokens a batch | tokens/s | plain loop | ratio | of the peak product |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        share = row["model_flops_utilisation"] or row["share_of_measured_peak"]
        lines.append(
            f"| {row['preset']} | {row['dropout']} | {row['batch_tokens']} | {row['tokens_per_second']} | "
            f"{row['plain_tokens_per_second']} | {row['ratio']} | {share:.0%} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write; the exit code says whether each ratio meets the bar."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_speed",
        allow_abbrev=False,
        description=(__doc__ or "").splitlines()[0],
        epilog="example: taskset -c 0,1 python -m benchmarks.training_speed --presets tiny --threads 2",
    )
    parser.add_argument(
        "--presets",
        nargs="+",
        choices=tuple(PRESETS),
        default=["tiny", "base"],
        help="which sizes (default: tiny base)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: 7)")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn (default: 3)")
    parser.add_argument(
        "--batch-tokens", type=int, help=f"(default: the preset's, on a CPU at most {_CPU_BATCH_TOKENS})"
    )
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--compile", action="store_true", help="with torch.compile in our loop")
    parser.add_argument("--out", type=Path, help="the JSON result")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for name in options.presets:
        preset = preset_named(name)
        own = preset.training.batch_tokens
        batch_tokens = options.batch_tokens or (own if device.type == "cuda" else min(own, _CPU_BATCH_TOKENS))
        for dropout in sorted({0.0, preset.model.dropout}):
            changed = preset.changed({"batch_tokens": batch_tokens, "dropout": dropout})
            rows.append(measure(Work(changed, options.steps, device, options.compile), options.rounds))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    result = {
        "benchmark": "training_speed",
        "hardware": describe_hardware(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        # What decides how fast small operations are: how threads wait, and who allocates.
        "environment": {name: os.environ.get(name, "") for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        | {"preloaded": [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split()]},
        "bar": _BAR,
        "rows": rows,
    }
    print(table(rows))
    print(json.dumps(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(float(str(row["ratio"])) < _BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
