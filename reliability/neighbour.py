"""A part of the reliability benchmark: one stream beside one or four callers with an expensive option."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import numpy as np

from benchmarks.load.mix import VOCAB_SIZE, quantile
from reliability.callers import PATIENT_SECONDS, code_of
from reliability.place import TINY, Bar, Figures, Place, at_most, nothing_left, settled, state, unexpected
from seq2seq_serve.client import AsyncClient, ClientError, GenerateOptions

_NUM_SLOTS = 128
_SECONDS = 5.0
_NUM_TOKENS = 250
_TIMES = (1, 4)
_SOURCE_IDS = (*random.Random(1).choices(range(4, VOCAB_SIZE), k=30), 2)
_CHANCE = random.Random(2)
_SUPPRESSED = _CHANCE.sample(range(4, VOCAB_SIZE), 1024)
_BIASES = dict.fromkeys(_CHANCE.sample(range(4, VOCAB_SIZE), 1024), 0.5)

Ask = Callable[[AsyncClient, int, int], Awaitable[Any]]  # by a client, the target's length, the call's number


def _drawn(**options: Any) -> Ask:
    """Returns a call for sixteen samples of one source; the call's number is its seed."""

    def ask(client: AsyncClient, num_tokens: int, number: int) -> Awaitable[Any]:
        settings = {name: value(number) if callable(value) else value for name, value in options.items()}
        return client.generate(
            _SOURCE_IDS,
            options=GenerateOptions(
                max_new_tokens=num_tokens, num_hypotheses=16, temperature=1.0, seed=number, **settings
            ),
        )

    return ask


def _searched(**options: Any) -> Ask:
    return lambda client, num_tokens, _: client.generate(
        _SOURCE_IDS, options=GenerateOptions(max_new_tokens=num_tokens, beam_size=16, **options)
    )


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


@dataclass
class _Round:
    """Measurements of the stream beside some callers.

    Attributes:
        gaps: Times between its pieces, in seconds.
        codes: Numbers of calls by status.
    """

    gaps: list[float] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)

    def figures(self) -> Figures:
        return {
            "p50_seconds": quantile(self.gaps, 0.5),
            "p99_seconds": quantile(self.gaps, 0.99),
            "longest_seconds": max(self.gaps),
            "codes": self.codes,
        }


def neighbour(place: Place) -> tuple[Figures, list[Bar]]:
    """Run rounds with each option, from one caller and from four, beside a stream of one row."""
    seconds, num_tokens = place.seconds(_SECONDS, 0.2), place.count(_NUM_TOKENS, 6)
    rounds: dict[tuple[str, int], _Round] = {}
    with place.serving(TINY, ["--max-slots", str(_NUM_SLOTS)]) as server:
        before = state(server)
        alone = asyncio.run(_round(server.address, OPTIONS["16 samples"], 0, seconds, num_tokens))
        for name, ask in OPTIONS.items():
            for times in _TIMES:
                rounds[name, times] = asyncio.run(_round(server.address, ask, times, seconds, num_tokens))
        after = settled(server, before)
    codes = sum((one.codes for one in rounds.values()), Counter[str]())
    figures: Figures = {"alone": alone.figures()}
    for (name, times), one in rounds.items():
        figures.setdefault(name, {})[str(times)] = one.figures()

    def ratio(name: str, other: str) -> float:
        return max(_median(rounds[name, times]) / _median(rounds[other, times]) for times in _TIMES)

    stalls = [max(one.gaps) / _median(one) for (name, _), one in rounds.items() if "attention" in name]
    plain, sorted_once = "16 samples", "16 samples, one top_k"
    return figures, [
        unexpected(codes, "OK"),
        at_most("longest gap beside alignments, in median steps", max(stalls), 10, is_timed=True),
        *(
            at_most(f"step beside {name}, of that beside {other}", ratio(name, other), bar, is_timed=True)
            for name, other, bar in (
                ("a beam of 16 with stop sequences", "a beam of 16", 1.5),
                ("16 samples under 2,048 constraints", plain, 3),
                ("16 samples, each call another top_k", sorted_once, 1.5),
            )
        ),
        *nothing_left(before, after),
    ]


def _median(one: _Round) -> float:
    return float(np.median(one.gaps))


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
