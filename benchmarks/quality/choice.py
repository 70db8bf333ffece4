"""Chooses, on dev, the checkpoints to average and the length penalty for `benchmarks.quality`.

Every candidate is scored in the same way as the test sets: it is exported and served, and the dev sentences
are translated with beam search through gRPC.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.demo import translate_all
from benchmarks.serving import serving
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.client import GenerateOptions
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.checkpoint import checkpoint_step, list_checkpoints, load_checkpoint
from seq2seq_serve.training.evaluation.comparison import MetricSettings, compare
from seq2seq_serve.training.run import RunFolder, load_checkpoints

BEAM_SIZE = 5
NUM_AVERAGED = 1, 5, 10
# Exponents of the length penalty of Wu et al. 2016, ((5 + |Y|) / 6)^alpha: 0 is none, a large one prefers
# long targets.
ALPHAS = 0.0, 1.0, 2.0, 3.0, 4.0


@dataclass(frozen=True)
class Choice:
    """A candidate and its BLEU on dev.

    Attributes:
        steps: Training steps of the averaged checkpoints.
        alpha: Exponent of the length penalty.
    """

    steps: tuple[int, ...]
    alpha: float
    bleu: float


def choose(path: Path, metric: MetricSettings, console: Console) -> tuple[Choice, list[Choice]]:
    """Score every candidate on a finished run's dev pairs.

    Returns:
        The best candidate, the first one among equals; and all candidates.
    """
    dev = RunFolder(path).read_pairs("dev")
    sources, references = [pair.source for pair in dev], [pair.target for pair in dev]
    settings = dataclasses.replace(metric, num_resamples=0)
    candidates = []
    for steps in step_choices(path):
        with tempfile.TemporaryDirectory() as folder:
            bundle = Path(folder) / "bundle"
            name = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} averaged"
            console.log(f"{name}, exporting")
            export_bundle(load_checkpoints(path, steps), bundle, [Precision.FP32])
            with serving(bundle, server_flags(Precision.FP32)) as server:
                for alpha in ALPHAS:
                    label = f"dev, {name}, alpha {alpha}"
                    texts = translate_all(server, sources, label, console, search_options(alpha))
                    bleu = compare([texts], [references], settings)[0][0].score
                    console.log(f"{label}: BLEU {bleu:.2f}", highlight=False)
                    candidates.append(Choice(steps, alpha, bleu))
    return max(candidates, key=lambda candidate: candidate.bleu), candidates


def step_choices(path: Path) -> list[tuple[int, ...]]:
    """Returns the candidates' steps: the checkpoint with training's best dev score, and the newest ones."""
    paths = list_checkpoints(RunFolder(path).checkpoints)
    steps = [checkpoint_step(path) for path in paths]
    best = load_checkpoint(paths[-1]).best
    newest = [tuple(steps[-number:]) for number in NUM_AVERAGED]
    return list(dict.fromkeys([(best.step,), *newest] if best else newest))


def search_options(alpha: float) -> GenerateOptions:
    """Returns the search options of every translation."""
    return GenerateOptions(beam_size=BEAM_SIZE, length_penalty=alpha)


def server_flags(precision: Precision) -> Sequence[str]:
    """Returns the server's flags for a precision; every translation is made on the CPU."""
    return ["--provider", "cpu", "--precision", precision]
