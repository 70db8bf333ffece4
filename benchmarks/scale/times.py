"""The times of one engine that the model is built of."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.load.mix import Mode


@dataclass(frozen=True)
class EngineTimes:
    """Seconds that the parts of an engine's turn take; their sum is the time of the turn.

    Attributes:
        turn_seconds: A turn, whatever runs in it.
        greedy_row_seconds: A row of greedy search in a step.
        sampling_row_seconds: A row of sampling in a step.
        beam_row_seconds: A row of beam search in a step.
        position_seconds: One position of memory or cache that a row of a step reads.
        encode_seconds: An encode call, whatever its sources.
        token_seconds: One source token in an encode call.
        call_seconds: Processor time that gRPC takes for a call, on the engine's core.
        wire_seconds: Time of a call outside of the engine: client, gRPC, and the ways between threads.
    """

    turn_seconds: float
    greedy_row_seconds: float = 0.0
    sampling_row_seconds: float = 0.0
    beam_row_seconds: float = 0.0
    position_seconds: float = 0.0
    encode_seconds: float = 0.0
    token_seconds: float = 0.0
    call_seconds: float = 0.0
    wire_seconds: float = 0.0

    def row_seconds(self, mode: Mode) -> float:
        """Returns the time of one row of a mode in a step."""
        if mode is Mode.GREEDY:
            return self.greedy_row_seconds
        return self.beam_row_seconds if mode is Mode.BEAM else self.sampling_row_seconds

    def scaled(self, factor: float) -> EngineTimes:
        """Returns the times of a machine on which everything takes `factor` times as long."""
        return EngineTimes(**{name: factor * value for name, value in dataclasses.asdict(self).items()})

    @classmethod
    def median(cls, times: Sequence[EngineTimes]) -> EngineTimes:
        """Returns the medians of several measurements; of two their means."""
        rows = [dataclasses.asdict(each) for each in times]
        return cls(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> EngineTimes:
        """Returns the times of a result file."""
        return cls(**figures)
