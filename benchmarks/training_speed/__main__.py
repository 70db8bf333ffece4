"""Compares the training loop's speed with a plain loop over `torch.nn.Transformer` of the same sizes.

    taskset -c 0,1 python -m benchmarks.training_speed --threads 2 --out benchmarks/results/X.json

Both loops have the same batches, optimizer, schedule and precision. They alternate: in each
round, every loop runs some steps on the same batches. On a CPU, the plain loop runs with torch's default
matrix products and with oneDNN's, and the faster one counts. The time to make the batches is included.
Measured: source and target tokens per second as medians over rounds, and the median of the rounds' ratios,
with the preset's dropout and without dropout (torch's layers have dropout in two more places). Also measured:
the model FLOPs utilisation, which is the FLOPs that the real tokens need over the FLOPs of one large matrix
product in the same round; on a GPU, over the manufacturer's peak. Not measured: evaluation, checkpoints, and
several devices.
"""

from __future__ import annotations

import seq2seq_serve.training.spin  # noqa: F401  # isort: skip

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.flags import positive
from benchmarks.hardware import describe_hardware
from benchmarks.report import command, markdown, median, publish
from benchmarks.training_speed.plain_trainer import PlainTrainer
from seq2seq_serve.training.config import EOS_ID, UNK_ID, ModelConfig, TrainingPrecision, TransformerConfig
from seq2seq_serve.training.data.batches import Batch, BatchShare, BatchStream
from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.encoded import EncodedPair
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.loop import Trainer, compute_dtype, fast_matmul
from seq2seq_serve.training.presets import PRESETS, Preset, preset_named
from seq2seq_serve.training.run import RunConfig, RunFolder

_BAR = 1.0  # at least as fast as the plain loop
_CPU_BATCH_TOKENS = 2000
_PRECISIONS: dict[str, TrainingPrecision] = {"float32": "fp32", "bfloat16": "bf16"}  # by torch's names
_PEAK_SIZE = {"cpu": 2048, "cuda": 8192}
# Dense bf16 FLOPs per second in the manufacturer's data sheets, in units of 1e12, by torch's device name.
_NOMINAL_TERAFLOPS = {
    "NVIDIA H200": 989.4,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
}


@dataclass(frozen=True)
class Work:
    """Settings of the training steps in a round."""

    preset: Preset
    steps: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """The data type that our training loop computes in."""
        return compute_dtype(self.preset.training.precision, self.device)


def random_pairs(vocab_size: int) -> list[EncodedPair]:
    """Returns 4000 random pairs with lengths as in Multi30k: 14 tokens on average, targets like sources."""
    chance = random.Random(0)

    def ids(length: float) -> list[int]:
        return chance.choices(range(UNK_ID + 1, vocab_size), k=min(max(round(length), 4), 60))

    pairs = []
    for _ in range(4000):
        length = chance.gauss(14, 5)
        pairs.append(EncodedPair([*ids(length), EOS_ID], ids(length + chance.gauss(0, 2))))
    return pairs


def our_trainer(work: Work, folder: Path) -> Trainer:
    """Creates the trainer of `training` on random pairs."""
    preset, pairs = work.preset, random_pairs(work.preset.model.vocab_size)
    config = RunConfig(preset.name, preset.model, preset.training, "random", CorpusFiles(), "", "", {})
    tokenizer = train_tokenizer([], 260)
    trainer = Trainer(config, RunFolder(folder), tokenizer, lambda _: pairs, [], work.device)
    trainer.model.train()
    return trainer


@dataclass(frozen=True)
class Contender:
    """A training loop with its own stream of batches; all streams yield the same batches.

    Attributes:
        products: Precision of float32 matrix products, by torch's name; None means our loop's setting.
    """

    step: Callable[[BatchShare], object]
    stream: BatchStream
    products: str | None = None

    def run(self, work: Work) -> tuple[float, float]:
        """Run the steps of one round; returns tokens and FLOPs per second."""
        with fast_matmul(work.device):
            if self.products:
                torch.set_float32_matmul_precision(self.products)
            num_tokens, flops = 0, 0
            start = time.perf_counter()
            for _ in range(work.steps):
                share = self.stream.next_batch()
                self.step(share)
                num_tokens += share.num_tokens
                flops += sum(model_flops(work.preset.model, piece) for piece in share.pieces)
            if work.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        return num_tokens / seconds, flops / seconds


def model_flops(model: ModelConfig, batch: Batch) -> int:
    """Returns the FLOPs that the real tokens of a batch need in the forward and the backward pass.

    Each weight costs 6 FLOPs for each token that passes through it, and each pair of a query and a key costs
    12 d_model; all pairs are counted, masked ones included (Chowdhery et al. 2022, appendix B,
    arXiv:2204.02311).
    """
    assert isinstance(model, TransformerConfig)
    d = model.d_model
    sources = batch.source[-1].sum(1)  # (B,)
    targets = torch.bincount(batch.label_places // batch.target_ids.shape[1], minlength=len(sources))  # (B,)
    feed_forward = 2 * d * model.d_ff
    encoder_weights = model.num_encoder_layers * (4 * d * d + feed_forward)
    memory_weights = model.num_decoder_layers * 2 * d * d
    decoder_weights = model.num_decoder_layers * (6 * d * d + feed_forward) + model.vocab_size * d
    weights = sources * (encoder_weights + memory_weights) + targets * decoder_weights
    pairs = model.num_encoder_layers * sources**2 + model.num_decoder_layers * targets * (targets + sources)
    return int((6 * weights + 12 * d * pairs).sum())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measures the FLOPs per second of one large matrix product, the best of ten runs."""
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


def contenders(work: Work, folder: Path) -> dict[str, Contender]:
    """Returns our loop, and the plain loop with each kind of matrix product on this device, by name."""
    recipe, pairs = work.preset.training, random_pairs(work.preset.model.vocab_size)
    trainer = our_trainer(work, folder)
    found = {"ours": Contender(trainer.train_step, trainer.batches)}
    all_products = {"plain": "highest", "plain, oneDNN": "medium"}
    for name, products in all_products.items() if work.device.type == "cpu" else [("plain", "highest")]:
        plain = PlainTrainer(work.preset.model, recipe, work.device, work.dtype)
        stream = BatchStream(lambda _: pairs, recipe.batch_tokens, recipe.seed)
        found[name] = Contender(plain.train_step, stream, products)
    return found


def measure(work: Work, num_rounds: int) -> dict[str, object]:
    """Measure one row of the table."""
    nominal = None
    if work.device.type == "cuda":
        nominal = _NOMINAL_TERAFLOPS.get(torch.cuda.get_device_name(work.device))
    rounds, utilisations = [], []
    with tempfile.TemporaryDirectory() as folder:
        all_contenders = contenders(work, Path(folder))
        for contender in all_contenders.values():
            contender.run(work)  # warm-up
        for number in range(num_rounds):
            names = sorted(all_contenders, reverse=number % 2 == 1)
            speeds = {name: all_contenders[name].run(work) for name in names}
            with fast_matmul(work.device):
                peak = peak_flops(work.device, work.dtype)
            rounds.append({name: tokens for name, (tokens, _) in speeds.items()})
            utilisations.append(speeds["ours"][1] / (1e12 * nominal if nominal else peak))
    medians = {name: median(turn[name] for turn in rounds) for name in all_contenders}
    best = max(medians.keys() - {"ours"}, key=medians.__getitem__)
    return {
        "preset": work.preset.name,
        "dropout": work.preset.model.dropout,
        "batch_tokens": work.preset.training.batch_tokens,
        "dtype": str(work.dtype).removeprefix("torch."),
        "tokens_per_second": round(medians["ours"]),
        "plain_tokens_per_second": round(medians[best]),
        "plain": best,
        "ratio": round(median(turn["ours"] / turn[best] for turn in rounds), 3),
        "model_flops_utilisation": round(median(utilisations), 3),
        "utilisation_of": "the maker's number" if nominal else "one large product",
        "rounds": [{name: round(tokens) for name, tokens in turn.items()} for turn in rounds],
    }


def table(rows: list[dict[str, object]]) -> str:
    """Returns the rows as a Markdown table for `benchmarks/README.md`."""
    columns = {
        "preset": "preset",
        "precision": "dtype",
        "dropout": "dropout",
        "tokens a batch": "batch_tokens",
        "tokens/s": "tokens_per_second",
        "plain loop": "plain_tokens_per_second",
        "ratio": "ratio",
    }
    shown = []
    for row in rows:
        cells = [_PRECISIONS[str(row[key])] if key == "dtype" else row[key] for key in columns.values()]
        shown.append([*cells, f"{row['model_flops_utilisation']:.0%}"])
    return markdown((*columns, "FLOPs used"), shown, num_left=2)


def main() -> int:
    """Measure, print and write the results; returns 0 if every ratio meets the bar, otherwise 1."""
    parser = command("training_speed", __doc__, "--presets tiny --threads 2")
    add = parser.add_argument
    presets = tuple(PRESETS)
    add("--presets", nargs="+", choices=presets, default=["tiny", "base"], help="(default: tiny base)")
    add("--rounds", type=positive, default=7, help="rounds of every loop (default: 7)")
    add("--steps", type=positive, default=3, help="steps per round (default: 3)")
    add(
        "--batch-tokens",
        type=positive,
        help=f"tokens per batch (default: the preset's, on a CPU at most {_CPU_BATCH_TOKENS})",
    )
    add(
        "--precision",
        choices=tuple(_PRECISIONS.values()),
        help="precision of the matrix products (default: bf16 on CUDA, fp32 on a CPU)",
    )
    add("--threads", type=positive, help="threads of torch on a CPU")
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
            recipe = {"batch_tokens": batch_tokens, "precision": options.precision}
            changed = preset.changed({**recipe, "dropout": dropout})
            rows.append(measure(Work(changed, options.steps, device), options.rounds))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    print(table(rows))
    report = {
        "benchmark": "training_speed",
        "hardware": describe_hardware(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        # The speed of small operations depends on how threads wait, and on the memory allocator.
        "environment": {name: os.environ.get(name, "") for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        | {"preloaded": [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split()]},
        "bar": _BAR,
        "rows": rows,
    }
    publish(report, options.out)
    return int(any(float(str(row["ratio"])) < _BAR for row in rows))


if __name__ == "__main__":
    sys.exit(main())
