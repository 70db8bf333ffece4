"""A part of the reliability benchmark: streams whose readers stop, beside streams that are read or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio

from benchmarks.load.mix import MAX_TARGET_LENGTH, ONLY_GREEDY, Job, draw_jobs, poisson_arrivals, quantile
from benchmarks.serving import RunningServer
from reliability.callers import PATIENT_SECONDS, capacity
from reliability.place import BASE, TINY, Figures, Place, once, state
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub

_CAPACITY_SECONDS = 15.0
_LOAD = 0.5
_ONE_IN = 10
_NUM_ROUNDS = 3  # of each kind, in alternation
_NUM_ALTERNATIVES = 20
_DECODED_SECONDS = 20.0
_NUM_UNREAD, _UNREAD_SECONDS, _UNREAD_TOKENS = 2000, 60.0, 120
# gRPC buffers little of a stream before its reader asks for more, and does not increase the limit by itself.
_NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


@dataclass
class _Round:
    """Measurements of one round.

    Attributes:
        gaps: Times between the pieces of the nine streams in ten that are read to their end in every round.
        num_stalled: Number of calls that the server had not ended when all others were done.
        num_slots: Number of slots still in use when all targets were complete.
    """

    gaps: list[float] = field(default_factory=list)
    num_stalled: float = 0.0
    num_slots: float = 0.0
    num_failed: int = 0


def slow(place: Place) -> Figures:
    """Run rounds in which every tenth reader stops after one piece, and rounds in which none stops."""
    rounds: dict[bool, list[_Round]] = {False: [], True: []}
    with place.serving(BASE) as server:
        rate = _LOAD * asyncio.run(capacity(server.address, place.seconds(_CAPACITY_SECONDS)))
        jobs = draw_jobs(max(round(rate * place.seconds(20, 0.5)), _ONE_IN), ONLY_GREEDY, seed=7)
        sizes = []
        for _ in range(_NUM_ROUNDS):
            with place.checked(server) as now:
                for is_slow in (False, True):
                    rounds[is_slow].append(asyncio.run(_round(server, jobs, rate, is_slow)))
            sizes.append(now["process_resident_memory_bytes"])
    with place.serving(TINY) as server:
        unread = _unread(server, place.count(_NUM_UNREAD, 20), place.seconds(_UNREAD_SECONDS, 5))
        num_unread, unread_bytes = asyncio.run(unread)
    with_slow, without = (
        float(np.median([quantile(one.gaps, 0.99) for one in rounds[kind]])) for kind in (True, False)
    )
    num_slow, stalled = len(jobs[::_ONE_IN]), [one.num_stalled for one in rounds[True]]
    num_failed = sum(one.num_failed for kind in rounds.values() for one in kind)
    place.at_least("slow streams that the server waits for, of all", min(stalled) / num_slow, 0.9)
    place.at_most("slots held for them", max(one.num_slots for one in rounds[True]), 0)
    place.at_most("others that failed", num_failed, 0)
    place.at_most("others' p99 between tokens, of that without", with_slow / without, 1.5, is_timed=True)
    place.at_most("memory over that after the first rounds", sizes[-1] / sizes[0], 1.05, is_timed=True)
    place.at_most("memory of streams that nobody reads, MiB", unread_bytes / 2**20, 456, is_timed=True)
    return {
        "requests_per_second": rate,
        "inter_token_p99_seconds": {"with": with_slow, "without": without},
        "slow_streams": num_slow,
        "stalled_streams": stalled,
        "resident_bytes": sizes,
        "unread": {"streams": num_unread, "bytes": unread_bytes},
    }


async def _round(server: RunningServer, jobs: Sequence[Job], rate: float, is_slow: bool) -> _Round:
    """Run one round; in both kinds of round, every tenth stream uses another connection than the rest."""
    one, slow_streams = _Round(), []
    before = (await asyncio.to_thread(state, server))["seq2seq_requests_total"]

    async def read(client: AsyncClient, job: Job) -> None:
        times = []
        try:
            async for event in client.stream(job.source_ids, options=job.options()):
                if event.WhichOneof("event") == "piece":
                    times.append(time.perf_counter())
        except Exception:
            one.num_failed += 1
        one.gaps += [late - early for early, late in pairwise(times)]

    async def read_narrowly(stub: Any, job: Job) -> None:
        call = stub.GenerateStream(_large(job), timeout=PATIENT_SECONDS)
        await call.read()
        if is_slow:
            slow_streams.append(call)
            return
        while await call.read() is not aio.EOF:
            pass

    async with (
        AsyncClient(server.address, timeout_seconds=PATIENT_SECONDS) as client,
        aio.insecure_channel(server.address, options=_NARROW) as channel,
    ):
        stub: Any = Seq2SeqStub(channel)  # type: ignore[no-untyped-call]
        async with asyncio.TaskGroup() as tasks:
            started = time.monotonic()
            for number, (job, arrival) in enumerate(zip(jobs, poisson_arrivals(rate, seed=7), strict=False)):
                await asyncio.sleep(arrival - (time.monotonic() - started))
                is_tenth = number % _ONE_IN == 0
                tasks.create_task(read_narrowly(stub, job) if is_tenth else read(client, job))
        now = await asyncio.to_thread(
            once, server, lambda now: not now["seq2seq_slots_in_use"], _DECODED_SECONDS
        )
        one.num_stalled = len(jobs) - (now["seq2seq_requests_total"] - before)
        one.num_slots = now["seq2seq_slots_in_use"]
        for call in slow_streams:
            call.cancel()
    return one


async def _unread(server: RunningServer, number: int, seconds: float) -> tuple[int, float]:
    """Open streams with alternatives, and read the first piece of each.

    Returns:
        How many began, and the memory over that of a server that has used all of its slots.
    """
    job, num_begun = draw_jobs(1, ONLY_GREEDY, seed=7)[0], 0
    raw, streams = _large(job, _UNREAD_TOKENS).SerializeToString(), []
    await capacity(server.address, min(seconds, _CAPACITY_SECONDS))
    start = peak = _resident_bytes(server)
    async with aio.insecure_channel(server.address, options=_NARROW) as channel:

        async def begin() -> None:
            nonlocal num_begun
            while True:
                streams.append(stream := channel.unary_stream("/seq2seq.v1.Seq2Seq/GenerateStream")(raw))
                try:
                    await stream.read()
                    num_begun += 1
                    return
                except aio.AioRpcError:  # there is no room for it yet
                    await asyncio.sleep(1)

        begun = [asyncio.create_task(begin()) for _ in range(number)]
        end = time.monotonic() + seconds
        while time.monotonic() < end and not all(one.done() for one in begun):
            await asyncio.sleep(0.1)
            peak = max(peak, _resident_bytes(server))
        for each in (*begun, *streams):
            each.cancel()
    return num_begun, peak - start


def _resident_bytes(server: RunningServer) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * float(status.partition("VmRSS:")[2].split()[0])


def _large(job: Job, num_tokens: int = MAX_TARGET_LENGTH) -> pb.GenerateRequest:
    """Returns a request with a long answer; a short one would be sent before its reader can stop."""
    options = job.options()
    options.max_new_tokens = num_tokens
    options.num_alternatives = _NUM_ALTERNATIVES
    return pb.GenerateRequest(
        sources=[pb.Source(token_ids=pb.TokenIds(values=job.source_ids))], options=options
    )
