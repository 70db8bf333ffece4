"""The three splits of a generator, and its source of randomness."""

import random
from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

Split = Literal["train", "dev", "test"]
_Combination = TypeVar("_Combination")


def random_of(seed: int, split: Split) -> random.Random:
    """Returns the source of randomness of a split, the same on every machine."""
    if split not in get_args(Split):
        raise ValueError(f"a split is one of {', '.join(get_args(Split))}, got {split!r}")
    return random.Random(f"{seed} {split}")


def own_combinations(held_out: Mapping[_Combination, Split], split: Split) -> list[_Combination]:
    """Returns the combinations that only this split may have; "train" has none."""
    return [combination for combination, owner in held_out.items() if owner == split]
