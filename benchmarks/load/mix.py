"""The requests of the load benchmark, the same for every contender, and their outcomes.

A `Job` does not depend on the contender: the options of a gRPC call and the engine's record are created from
the same numbers. The client process imports this module, so it has few imports.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seq2seq_serve.bundle.names import SOURCE_IDS
from seq2seq_serve.client import GenerateOptions
from seq2seq_serve.server.engine.request import Beam, Request, Sampling

VOCAB_SIZE = 32_000
MAX_TARGET_LENGTH = 64
_MIN_SOURCE_LENGTH, _MAX_SOURCE_LENGTH, _MIN_TARGET_LENGTH = 10, 40, 4
_EOS_ID, _SOURCE_IDS = 2, range(4, 4000)  # which the smallest preset has, too
BEAM_SIZE = 4


class Mode(enum.Enum):
    """Decoding mode of a request."""

    GREEDY = "greedy"
    BEAM = "beam"
    SAMPLING = "sampling"


MIX: Mapping[Mode, float] = {Mode.GREEDY: 0.7, Mode.BEAM: 0.2, Mode.SAMPLING: 0.1}
ONLY_GREEDY: Mapping[Mode, float] = {Mode.GREEDY: 1.0}


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
        source_ids: Token ids of the source, with the end of sequence.
        num_tokens: Length of the target: `max_new_tokens`, since random weights hardly ever end it earlier.
        seed: Random seed of sampling.
    """

    source_ids: tuple[int, ...]
    num_tokens: int
    mode: Mode
    seed: int

    def options(self) -> GenerateOptions:
        """Returns the options of the gRPC call."""
        options = GenerateOptions(max_new_tokens=self.num_tokens)
        if self.mode is Mode.BEAM:
            options.beam_size = BEAM_SIZE
        elif self.mode is Mode.SAMPLING:
            options.temperature = 1.0
            options.seed = self.seed
        return options


def draw_jobs(count: int, shares: Mapping[Mode, float], seed: int) -> list[Job]:
    """Draw random requests with uniform lengths: sources of 10–40 and targets of 4–64 tokens."""
    chance = random.Random(seed)
    jobs = []
    for mode in chance.choices(list(shares), list(shares.values()), k=count):
        source_length = chance.randint(_MIN_SOURCE_LENGTH, _MAX_SOURCE_LENGTH)
        source_ids = (*chance.choices(_SOURCE_IDS, k=source_length - 1), _EOS_ID)
        num_tokens = chance.randint(_MIN_TARGET_LENGTH, MAX_TARGET_LENGTH)
        jobs.append(Job(source_ids, num_tokens, mode, seed=chance.getrandbits(63)))
    return jobs


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yields arrival times in seconds from the start, without end; the gaps are exponential."""
    chance = random.Random(seed)
    now = 0.0
    while True:
        now += chance.expovariate(rate)
        yield now


def engine_request(job: Job, arrival: float) -> Request:
    """Returns the engine's record of a job, the same as the service creates from `Job.options`."""
    return Request(
        request_id="",
        sources={SOURCE_IDS: np.array(job.source_ids)},
        memory_length=len(job.source_ids),
        max_new_tokens=job.num_tokens,
        arrival=arrival,
        beam=Beam(BEAM_SIZE) if job.mode is Mode.BEAM else None,
        sampling=Sampling(1.0, 0, 1.0, 0.0, job.seed) if job.mode is Mode.SAMPLING else None,
    )


@dataclass(slots=True)
class Outcome:
    """The outcome of one job. Times are seconds since the run began.

    Attributes:
        arrival: Time at which the request was due; it may be sent later.
        sent: Time at which the request was sent.
        first: Time of the first token; NaN if the answer is not a stream.
        end: Time at which the answer was complete.
        num_tokens: Length of the target; 0 if the request failed.
        gaps: Times between the tokens of a stream; 0 between those of one piece.
        code: Status of the request: OK, or the code of its error.
        retry_after_seconds: Delay that the server gave to a refused request; None if it gave none.
        queue_seconds: Time from the arrival at the server to a slot; only whole answers report it.
        first_token_seconds: The same to the first token.
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
    queue_seconds: float = float("nan")
    first_token_seconds: float = float("nan")


@dataclass(frozen=True)
class Throughput:
    """Throughput of a closed loop while it was full."""

    tokens_per_second: float
    requests_per_second: float


def throughput(outcomes: Sequence[Outcome], in_flight: int) -> Throughput:
    """Computes the throughput of a closed loop between its first and its last `in_flight` answers.

    During the first ones all requests start together; during the last ones no new requests join.

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
    """Returns a quantile of the values; NaN if there are none."""
    return float(np.quantile(values, q)) if len(values) else float("nan")
