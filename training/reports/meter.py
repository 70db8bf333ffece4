"""The means of the steps since the last report, and the guard that stops a diverged run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from seq2seq_serve.training.ranks import Ranks

_MAX_SKIPPED_STEPS = 10
_DIVERGED_NATS = 1.0
_DIVERGED_STEPS = 1000
_HOPELESS_STEPS = 100


@dataclass(frozen=True)
class StepMeans:
    """Means over the steps of a report with finite gradients, and the tokens per second.

    Attributes:
        num_steps: All steps of the report.
        num_skipped: Steps that changed no weight, because their gradients were not finite.
        num_skipped_now: How many of the last steps in a row were skipped.
    """

    loss: float
    gradient_norm: float
    tokens_per_second: float
    num_steps: int
    num_skipped: int
    num_skipped_now: int


class Meter:
    """Collects the values of each step since the last report. They stay on the device until they are read."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._gradient_norms: list[Tensor] = []
        self._num_tokens = 0
        self._start = time.monotonic()

    def add(self, loss: Tensor, gradient_norm: Tensor, num_tokens: int) -> None:
        """Add a step: this process' part of the loss, and the gradient norm and tokens of all processes."""
        self._losses.append(loss)
        self._gradient_norms.append(gradient_norm)
        self._num_tokens += num_tokens

    def leave_out(self, seconds: float) -> None:
        """Do not count time that was not spent on training."""
        self._start += seconds

    def read(self, ranks: Ranks) -> StepMeans:
        """Return the means, the same in all processes, which must call this at the same step."""
        losses = ranks.total(torch.stack(self._losses).tolist())
        norms = torch.stack(self._gradient_norms).tolist()
        finite = [math.isfinite(norm) for norm in norms]
        num_finite = sum(finite)
        last_finite = max((step for step, is_finite in enumerate(finite) if is_finite), default=-1)

        def mean(values: list[float]) -> float:
            kept = [value for value, is_finite in zip(values, finite, strict=True) if is_finite]
            return sum(kept) / num_finite if kept else math.nan

        return StepMeans(
            loss=mean(losses),
            gradient_norm=mean(norms),
            tokens_per_second=self._num_tokens / (time.monotonic() - self._start),
            num_steps=len(norms),
            num_skipped=len(norms) - num_finite,
            num_skipped_now=len(norms) - 1 - last_finite,
        )


class DivergenceGuard:
    """Stops a run whose loss rises far above its best or is far worse than guessing. Owned by the trainer.

    Guessing has a loss of log(`vocab_size`). Losses before `first_step` are not judged.

    Attributes:
        best_loss: The lowest mean training loss of a report.
        num_steps_above: For how many steps the loss has been far too high.
    """

    def __init__(
        self, vocab_size: int, best_loss: float = math.inf, num_steps_above: int = 0, *, first_step: int = 1
    ) -> None:
        self._first_step = first_step
        self._hopeless_loss = 2 * math.log(vocab_size)
        self.best_loss = best_loss
        self.num_steps_above = num_steps_above
        self._loss = math.nan

    def check(self, step: int, means: StepMeans) -> None:
        """Raise ValueError if gradients were not finite, or the loss was far too high, for too many steps."""
        if means.num_skipped_now >= _MAX_SKIPPED_STEPS:
            raise ValueError(
                f"the gradients of the last {means.num_skipped_now} steps until step {step} were not finite"
            )
        if step < self._first_step:
            return
        self._loss = means.loss
        self.best_loss = min(self.best_loss, self._loss)
        is_above = self._is_hopeless or self._loss > self.best_loss + _DIVERGED_NATS
        self.num_steps_above = self.num_steps_above + means.num_steps if is_above else 0
        if self.num_steps_above >= (_HOPELESS_STEPS if self._is_hopeless else _DIVERGED_STEPS):
            raise ValueError(f"{self.judgement} until step {step}")

    @property
    def _is_hopeless(self) -> bool:
        return self._loss > self._hopeless_loss

    @property
    def judgement(self) -> str:
        """One line about a loss that is far too high."""
        if self._is_hopeless:
            above = f"above {self._hopeless_loss:.1f}, twice that of guessing,"
        else:
            above = f"{_DIVERGED_NATS:.0f} nat above its best, {self.best_loss:.3f},"
        return f"the training loss has been {above} for {self.num_steps_above} steps"
