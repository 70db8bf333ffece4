"""The table of the parts of `benchmarks.gpu_check`, in the order of what they are worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu_check import answers, more, service, steps
from benchmarks.gpu_check.place import Findings, Place


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        run: Fills the findings; returns what is wrong, or an empty text.
        seconds: Its time limit.
    """

    run: Callable[[Place, Findings], str]
    seconds: float


PARTS = {
    "device": Part(answers.device, 60),
    "tokens": Part(answers.tokens, 60),
    "server": Part(service.server, 60),
    "speed": Part(steps.speed, 70),
    "load": Part(service.load, 70),
    "profile": Part(steps.profile, 40),
    "memory": Part(more.memory, 60),
    "precisions": Part(answers.other_precisions, 40),
    "families": Part(answers.families, 60),
    "alternatives": Part(more.alternatives, 60),
    "training": Part(more.training, 60),
    "static": Part(steps.static, 60),
    "tests": Part(more.tests, 120),
}
