"""Parts of the reliability benchmark: a step that raises, and requests beyond the server's limits."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from grpc import aio

from benchmarks.load.mix import ONLY_GREEDY, draw_jobs
from benchmarks.serving import RunningServer
from reliability.callers import code_of, endless_jobs, good_calls, stream, under_load
from reliability.damage import RAISING_ID, linked_copy, make_step_raise
from reliability.place import (
    TINY,
    Bar,
    Figures,
    Place,
    at_least,
    at_most,
    nothing_left,
    settled,
    state,
    status,
    unexpected,
)
from reliability.reload import load
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.client import AsyncClient, ClientError
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.protos.seq2seq_v1_pb2 import Target, TokenIds
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig
from seq2seq_serve.server.runner.sizing import size_up

_IN_FLIGHT = 16
_TO_UNHEALTHY = 3  # consecutive failing steps after which the server reports that it is unhealthy
_NUM_SLOTS = 4


def step(place: Place) -> tuple[Figures, list[Bar]]:
    """Serve a bundle whose step raises for one token, and send that token in a caller's prefix."""
    times, num_after = place.count(50, 3), place.count(200, 8)
    bundle = linked_copy(place.bundle(TINY), place.folder / "raising")
    make_step_raise(bundle)
    log = place.folder / "raising.log"
    with log.open("wb") as stderr, place.serving(bundle, stderr=stderr) as server:
        before = state(server)
        raised, codes, ids = asyncio.run(_raise_under_load(server, times))
        alone, sick, well = asyncio.run(_raise_alone(server))
        good = asyncio.run(good_calls(server.address, num_after))
        after = settled(server, before)
    # A line begins with the ids of all requests in the failed step.
    failures = " ".join(line for line in log.read_text().splitlines() if ": the step raised" in line)
    told = sum(re.search(rf"\b{request_id}\b", failures) is not None for request_id in ids)
    figures = {"raised": raised + alone, "others": codes, "unhealthy": sick, "after": good}
    return figures, [
        at_least(
            "steps that raised and said ENGINE_FAILED", (raised + alone)["INTERNAL"], times + _TO_UNHEALTHY
        ),
        at_least("of the first, those in the log under their id", told, times),
        unexpected(codes, "OK", "INTERNAL"),
        at_least("others that were answered meanwhile", codes["OK"], 1),
        at_least("probes that fail after three in a row", sick, 2),
        at_least("probes that pass after a good one", well, 2),
        unexpected(good, "OK", whose="calls afterwards"),
        *nothing_left(before, after),
    ]


async def _raise_under_load(
    server: RunningServer, times: int
) -> tuple[Counter[str], Counter[str], list[str]]:
    raised, ids = Counter[str](), [f"raising-{number}" for number in range(times)]
    async with (
        under_load(server.address, _IN_FLIGHT, seed=10) as codes,
        AsyncClient(server.address) as client,
    ):
        for request_id in ids:
            raised[await code_of(_poisoned(client, request_id))] += 1
            await good_calls(server.address, 1)
    return raised, codes, ids


async def _raise_alone(server: RunningServer) -> tuple[Counter[str], int, int]:
    """Let steps fail without a successful one between them; the probes must fail until a step succeeds."""
    raised: Counter[str] = Counter()
    page = partial(asyncio.to_thread, status, server, "/readyz")
    async with AsyncClient(server.address) as client:
        for number in range(_TO_UNHEALTHY):
            raised[await code_of(_poisoned(client, f"alone-{number}"))] += 1
        sick = (await client.health() == "NOT_SERVING") + (await page() == 503)
        await good_calls(server.address, 1)
        well = (await client.health() == "SERVING") + (await page() == 200)
    return raised, sick, well


async def _poisoned(client: AsyncClient, request_id: str) -> None:
    (job,) = draw_jobs(1, ONLY_GREEDY, seed=11)
    options = job.options()
    options.target_prefix.CopyFrom(Target(token_ids=TokenIds(values=[RAISING_ID])))
    await client.generate(job.source_ids, options=options, request_id=request_id)


def budget(place: Place) -> tuple[Figures, list[Bar]]:
    """Exceed a server's limits: memory for four slots, a queue of sixteen, and room for one version."""
    number, num_after = place.count(400, 64), place.count(200, 8)
    bundle = place.bundle(TINY)
    flags = ["--max-waiting-requests", str(4 * _NUM_SLOTS), "--open-repository"]
    config = RunnerConfig(provider=ProviderPolicy.CPU)
    slot_bytes = size_up(load_bundle(bundle), config).slot_bytes
    small = replace(config, memory_budget_bytes=_NUM_SLOTS * slot_bytes)
    total_bytes = size_up(load_bundle(bundle), small).total_bytes
    flags += ["--memory-budget", str(small.memory_budget_bytes), "--memory-limit", str(total_bytes * 3 // 2)]
    with place.serving(TINY, flags) as server:
        before = state(server)
        codes, has_delay, wide, second = asyncio.run(_exhaust(server, number, bundle.name))
        good = asyncio.run(good_calls(server.address, num_after))
        after = settled(server, before)
    figures = {
        "slots": after["seq2seq_slots"],
        "codes": codes,
        "wide beam": wide,
        "second": second,
        "after": good,
    }
    return figures, [
        at_most("slots that the budget holds", after["seq2seq_slots"], _NUM_SLOTS),
        unexpected(codes, "OK", "RESOURCE_EXHAUSTED"),
        at_least("calls that were refused", codes["RESOURCE_EXHAUSTED"], 1),
        at_least("of them with a time to come again", has_delay, codes["RESOURCE_EXHAUSTED"]),
        at_least("a beam wider than all slots: INVALID_ARGUMENT", wide == "INVALID_ARGUMENT", 1),
        at_least("a version beyond the limit: FAILED_PRECONDITION", second == "FAILED_PRECONDITION", 1),
        unexpected(good, "OK", whose="calls afterwards"),
        *nothing_left(before, after),
    ]


async def _exhaust(server: RunningServer, number: int, model: str) -> tuple[Counter[str], int, str, str]:
    """Returns the statuses of too many calls at once, of too wide a beam, and of a second version's load."""
    codes, num_delays, draw = Counter[str](), 0, endless_jobs(12)

    async def call(client: AsyncClient) -> None:
        nonlocal num_delays
        try:
            await stream(client, draw())
            codes["OK"] += 1
        except ClientError as error:
            codes[error.code] += 1
            num_delays += error.retry_after_seconds is not None

    async with AsyncClient(server.address) as client, aio.insecure_channel(server.address) as channel:
        await asyncio.gather(*(call(client) for _ in range(number)))
        job = draw()
        options = job.options()
        options.beam_size, options.temperature = 2 * _NUM_SLOTS, 0
        wide = await code_of(client.generate(job.source_ids, options=options))
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        return codes, num_delays, wide, await load(stub, model)
