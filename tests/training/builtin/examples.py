"""What the tests of all generators need: examples of every split, and captions of them."""

import random
from types import ModuleType
from typing import Any


def by_split(module: ModuleType, train: int, dev: int, test: int) -> dict[str, list[Any]]:
    """Returns so many examples of each split."""
    counts = {"train": train, "dev": dev, "test": test}
    return {split: list(module.generate(count, 0, split)) for split, count in counts.items()}


def with_captions(module: ModuleType, examples: dict[str, list[Any]], each: int) -> list[tuple[Any, str]]:
    """Returns every example, with `each` captions one after the other."""
    rng = random.Random(0)
    return [
        (example, module.caption(example, rng))
        for of_split in examples.values()
        for example in of_split
        for _ in range(each)
    ]
