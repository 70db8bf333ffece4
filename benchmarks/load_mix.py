"""The requests of the load benchmark, the same for every contender, and what became of them.

A `Job` knows nothing of who answers it: the wire's options and the engine's record are made here from the
same numbers. The client process imports this module, so it is light.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from client import GenerateOptions

VOCAB_SIZE = 32_000
MAX_TARGET_LENGTH = 64
_MIN_SOURCE_LENGTH, _MAX_SOURCE_LENGTH, _MIN_TARGET_LENGTH = 10, 40, 4
_EOS_ID, _FIRST_ID = 2, 4
BEAM_SIZE = 4


class Mode(enum.Enum):
    """How a request is decoded."""

    GREEDY = "greedy"
    BEAM = "beam"
    SAMPLING = "sampling"


MIX: Mapping[Mode, float] = {Mode.GREEDY: 0.7, Mode.BEAM: 0.2, Mode.SAMPLING: 0.1}
WITHOUT_SAMPLING: Mapping[Mode, float] = {Mode.GREEDY: 0.7, Mode.BEAM: 0.2}  # what every peer can do
ONLY_GREEDY: Mapping[Mode, float] = {Mode.GREEDY: 1.0}


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        source_ids: The end of sequence included.
        num_tokens: Its target's length: `max_new_tokens`, since random weights hardly ever end by themselves.
        seed: Of what is drawn.
    """

    source_ids: tuple[int, ...]
    num_tokens: int
    mode: Mode
    seed: int

    def options(self) -> GenerateOptions:
        """What the wire carries."""
        options = GenerateOptions(max_new_tokens=self.num_tokens)
        if self.mode is Mode.BEAM:
            options.beam_size = BEAM_SIZE
        elif self.mode is Mode.SAMPLING:
            options.temperature = 1.0
            options.seed = self.seed
        return options


def draw_jobs(count: int, shares: Mapping[Mode, float], seed: int) -> list[Job]:
    """Random requests: a source of 10–40 and a target of 4–64 tokens, any length as likely as any other."""
    chance = random.Random(seed)
    ids = range(_FIRST_ID, VOCAB_SIZE)
    jobs = []
    for mode in chance.choices(list(shares), list(shares.values()), k=count):
        source_length = chance.randint(_MIN_SOURCE_LENGTH, _MAX_SOURCE_LENGTH)
        source_ids = (*chance.choices(ids, k=source_length - 1), _EOS_ID)
        num_tokens = chance.randint(_MIN_TARGET_LENGTH, MAX_TARGET_LENGTH)
        jobs.append(Job(source_ids, num_tokens, mode, seed=chance.getrandbits(63)))
    return jobs


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start, for ever: gaps are exponential, and nobody waits for an answer."""
    chance = random.Random(seed)
    now = 0.0
    while True:
        now += chance.expovariate(rate)
        yield now


@dataclass(slots=True)
class Outcome:
    """What became of one job. Times are seconds since the run began.

    Attributes:
        arrival: When it was due, whether or not whoever sent it was on time.
        sent: When it was really sent.
        first: When the first token came; NaN where pieces are not watched.
        end: When the answer was whole.
        num_tokens: Of the target; 0 where it failed.
        gaps: Between the pieces of a stream.
        code: The gRPC status of what failed.
        retry_after_seconds: When who was refused may come again; None where nobody said.
    """

    job: Job
    arrival: float
    sent: float = float("nan")
    first: float = float("nan")
    end: float = float("nan")
    num_tokens: int = 0
    gaps: tuple[float, ...] = ()
    code: str = "OK"
    retry_after_seconds: float | None = None


@dataclass(frozen=True)
class Throughput:
    """Of a closed loop while it was full."""

    tokens_per_second: float
    requests_per_second: float


def throughput(outcomes: Sequence[Outcome], in_flight: int) -> Throughput:
    """What a closed loop finished between its first `in_flight` answers and its last ones.

    Before, the batch is in step with itself; after, nobody joins any more.

    Raises:
        RuntimeError: A request failed.
    """
    failed = [outcome.code for outcome in outcomes if outcome.code != "OK"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed, the first with {failed[0]}")
    ended = sorted(outcomes, key=lambda outcome: outcome.end)
    counted = ended[in_flight : len(ended) - in_flight]
    seconds = counted[-1].end - ended[in_flight - 1].end
    return Throughput(sum(outcome.num_tokens for outcome in counted) / seconds, len(counted) / seconds)


def quantile(values: Sequence[float], q: float) -> float:
    """Of what was measured; NaN of nothing."""
    return float(np.quantile(values, q)) if len(values) else float("nan")
