"""A part of the reliability benchmark: one stream beside one or four callers with an expensive option."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from typing import Any

import numpy as np

from benchmarks.load.mix import VOCAB_SIZE
from reliability.callers import PATIENT_SECONDS, code_of
from reliability.place import TINY, Figures, Place
from seq2seq_serve.client import AsyncClient, ClientError, GenerateOptions

_NUM_SLOTS = 128
_SECONDS, _NUM_TOKENS = 5.0, 250
_TIMES = (1, 4)
_SOURCE_IDS = (*random.Random(1).choices(range(4, VOCAB_SIZE), k=30), 2)
_CHANCE = random.Random(2)
_SUPPRESSED = _CHANCE.sample(range(4, VOCAB_SIZE), 1024)
_BIASES = dict.fromkeys(_CHANCE.sample(range(4, VOCAB_SIZE), 1024), 0.5)

Ask = Callable[[AsyncClient, int, int], Awaitable[Any]]  # by a client, the target's length, the call's number


def _hypotheses(**options: Any) -> Ask:
    """Returns a call for one source with these options; an option may be a function of the call's number."""

    def ask(client: AsyncClient, num_tokens: int, number: int) -> Awaitable[Any]:
        settings = {name: value(number) if callable(value) else value for name, value in options.items()}
        return client.generate(_SOURCE_IDS, options=GenerateOptions(max_new_tokens=num_tokens, **settings))

    return ask


_drawn = partial(_hypotheses, num_hypotheses=16, temperature=1.0, seed=lambda number: number)
_searched = partial(_hypotheses, beam_size=16)

# Keyed by name, so that options can be compared with each other.
OPTIONS: Mapping[str, Ask] = {
    "16 samples": _drawn(),
    "16 samples with attention": _drawn(attention=True),
    "16 samples with 32 alternatives": _drawn(num_alternatives=32),
    "16 samples under 2,048 constraints": _drawn(suppressed_token_ids=_SUPPRESSED, logit_bias=_BIASES),
    "16 samples without repeated n-grams": _drawn(no_repeat_ngram_size=100, repetition_penalty=1.2),
    "16 samples, one top_k": _drawn(top_k=64),
    "16 samples, each call another top_k": _drawn(top_k=lambda number: 17 + 7 * number % 48),
    "16 samples, top_p": _drawn(top_p=0.9),
    "a beam of 16": _searched(),
    "a beam of 16 with stop sequences": _searched(stop_sequences=[f"stop {i} " * 30 for i in range(16)]),
    "a given target": lambda client, num_tokens, _: client.score(_SOURCE_IDS, [5] * num_tokens),
}
# A step beside the first option may take at most this many times as long as a step beside the second.
_COMPARED = (
    ("a beam of 16 with stop sequences", "a beam of 16", 1.5),
    ("16 samples under 2,048 constraints", "16 samples", 3),
    ("16 samples, each call another top_k", "16 samples, one top_k", 1.5),
)


@dataclass
class _Round:
    """Measurements of the stream beside some callers.

    Attributes:
        gaps: Times between its pieces, in seconds.
        codes: Numbers of calls by status.
    """

    gaps: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def median(self) -> float:
        return float(np.median(self.gaps))

    @property
    def longest(self) -> float:
        return max(self.gaps)


def neighbour(place: Place) -> Figures:
    """Run rounds with each option, from one caller and from four, beside a stream of one row."""
    seconds, num_tokens = place.seconds(_SECONDS, 0.2), place.count(_NUM_TOKENS, 6)
    rounds: dict[str, list[_Round]] = {}
    with place.serving(TINY, ["--max-slots", str(_NUM_SLOTS)]) as server, place.checked(server):
        for name, ask in OPTIONS.items():
            rounds[name] = [
                asyncio.run(_round(server.address, ask, times, seconds, num_tokens)) for times in _TIMES
            ]
    stalls = [
        one.longest / one.median for name, ones in rounds.items() if "attention" in name for one in ones
    ]
    place.expect(sum((one.codes for ones in rounds.values() for one in ones), Counter[str]()), "OK")
    place.at_most("longest gap beside alignments, in median steps", max(stalls), 10, is_timed=True)
    for name, other, bar in _COMPARED:
        ratio = max(a.median / b.median for a, b in zip(rounds[name], rounds[other], strict=True))
        place.at_most(f"step beside {name}, of that beside {other}", ratio, bar, is_timed=True)
    return {
        name: {
            times: {"median_seconds": one.median, "longest_seconds": one.longest, "codes": one.codes}
            for times, one in zip(_TIMES, ones, strict=True)
        }
        for name, ones in rounds.items()
    }


async def _round(address: str, ask: Ask, times: int, seconds: float, num_tokens: int) -> _Round:
    """Let `times` callers repeat their calls while another one reads a stream."""
    one, numbers = _Round(), count()
    end = time.monotonic() + seconds

    async def caller(client: AsyncClient) -> None:
        while time.monotonic() < end:
            one.codes[await code_of(ask(client, num_tokens, next(numbers)))] += 1

    async def victim(client: AsyncClient) -> None:
        options = GenerateOptions(max_new_tokens=num_tokens)
        while time.monotonic() < end or not one.gaps:
            pieces = []
            try:
                async for event in client.stream(_SOURCE_IDS, options=options):
                    if event.WhichOneof("event") == "piece":
                        pieces.append(time.perf_counter())
            except ClientError as error:
                one.codes[error.code] += 1
            one.gaps += [late - early for early, late in pairwise(pieces)]

    async with AsyncClient(address, timeout_seconds=PATIENT_SECONDS) as client:
        await asyncio.gather(victim(client), *(caller(client) for _ in range(times)))
    return one
