"""The times of one engine that the model is built of."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class EngineTimes:
    """Seconds that the parts of an engine's turn take; their sum is the time of the turn.

    Attributes:
        rows_seconds: A turn by its number of rows: pairs of rows and seconds, rising, with straight lines
            between and beyond them. A curve, because kernels work on blocks of rows: a row more may be free,
            or cost a block.
        sampling_row_seconds: What a row of sampling takes more than one of greedy search.
        beam_row_seconds: What a row of beam search takes more than one of greedy search.
        position_seconds: One position of memory or cache that a row of a step reads.
        encode_seconds: An encode call, whatever its sources.
        token_seconds: One source token in an encode call.
        call_seconds: Processor time that gRPC takes for a call, on the engine's core.
        wire_seconds: Time of a call outside of the engine: client, gRPC, and the ways between threads.
    """

    rows_seconds: Curve
    sampling_row_seconds: float = 0.0
    beam_row_seconds: float = 0.0
    position_seconds: float = 0.0
    encode_seconds: float = 0.0
    token_seconds: float = 0.0
    call_seconds: float = 0.0
    wire_seconds: float = 0.0

    def turn_seconds(self, num_rows: int) -> float:
        """Returns the time of a turn of some rows, without their positions and modes."""
        places = blend(num_rows, [rows for rows, _ in self.rows_seconds])
        return sum(share * self.rows_seconds[place][1] for place, share in places.items())

    @classmethod
    def of(cls, figures: Mapping[str, Any]) -> EngineTimes:
        """Returns the times of a result file.

        Raises:
            ValueError: They are not those of this version.
        """
        if set(figures) != {field.name for field in dataclasses.fields(cls)}:
            raise ValueError("the times are not those of this version: measure them with `fit` again")
        curve = tuple((int(rows), float(seconds)) for rows, seconds in figures["rows_seconds"])
        return cls(**{**figures, "rows_seconds": curve})


def blend(num_rows: int, knots: Sequence[int]) -> dict[int, float]:
    """Returns the places of the two knots beside a number of rows, with their shares; a lone knot has 1.

    Beyond the ends one share is negative, which continues the straight line.
    """
    if len(knots) == 1:
        return {0: 1.0}
    place = min(max(bisect_right(knots, num_rows), 1), len(knots) - 1)
    share = (num_rows - knots[place - 1]) / (knots[place] - knots[place - 1])
    return {place - 1: 1 - share, place: share}
