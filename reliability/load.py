"""Parts of the reliability benchmark: callers that leave, and too many callers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from benchmarks.load.generator import Generator, Run
from benchmarks.load.mix import MIX, Job, draw_jobs, poisson_arrivals, quantile
from benchmarks.serving import RunningServer
from reliability.callers import capacity, code_of, endless_jobs, stream
from reliability.place import BASE, Figures, Place, state
from seq2seq_serve.client import AsyncClient

_CAPACITY_SECONDS = 15.0
_UNSTEADY_LOAD, _OVERLOAD = 0.8, 3.0
_CANCELLED, _LATE, _CUT = 0.20, 0.10, 0.05
_SHORT_SECONDS = 0.02
_DRAIN_SECONDS = 30.0
_NUM_WAITING = 1024


def unsteady(place: Place) -> Figures:
    """Call at 80 % of the capacity; some callers cancel, set a short deadline, or close the connection."""
    seconds = place.seconds(600)
    with place.serving(BASE, ["--drain-seconds", str(_DRAIN_SECONDS)]) as server:
        rate = asyncio.run(capacity(server.address, place.seconds(_CAPACITY_SECONDS)))
        with place.checked(server) as now:
            counted = -now["seq2seq_requests_total"]
            codes, sizes = asyncio.run(_unsteady(server, _UNSTEADY_LOAD * rate, seconds))
        # A handler that hangs would extend the drain to its limit.
        started = time.monotonic()
        server.process.terminate()
        exit_code = server.wait()
        end_seconds = time.monotonic() - started
    counted += now["seq2seq_requests_total"]
    early, late = sizes[max(len(sizes) // 10, 1) - 1], sizes[-1]
    place.expect(codes, "OK", "CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
    place.at_most("calls that the server counted beyond those made", counted - codes.total(), 0)
    place.at_most("exit code after SIGTERM", abs(exit_code), 0)
    place.at_most("seconds to the exit, with nobody there", end_seconds, _DRAIN_SECONDS / 2)
    place.at_most("memory over that of the first tenth", late / early, 1.05, is_timed=True)
    return {"capacity": rate, "codes": codes, "resident_bytes": sizes, "end_seconds": end_seconds}


async def _unsteady(server: RunningServer, rate: float, seconds: float) -> tuple[Counter[str], list[float]]:
    """Run callers of every kind; returns their statuses, and the server's memory over time."""
    chance, draw = random.Random(4), endless_jobs(4)
    codes, sizes = Counter[str](), list[float]()

    async def fickle(client: AsyncClient, job: Job, patience: float) -> str:
        call = asyncio.create_task(code_of(stream(client, job)))
        await asyncio.wait({call}, timeout=patience)
        call.cancel()
        await asyncio.wait({call})
        return "CANCELLED" if call.cancelled() else call.result()

    async def cut(job: Job, patience: float) -> str:
        async with AsyncClient(server.address) as own:  # its connection is closed after the block
            return await fickle(own, job, patience)

    async def caller(client: AsyncClient, job: Job) -> None:
        kind, patience = chance.random(), chance.uniform(0.0, 0.5)
        if kind < _CANCELLED:
            code = await fickle(client, job, patience)
        elif kind < _CANCELLED + _LATE:
            code = await code_of(stream(client, job, _SHORT_SECONDS))
        elif kind < _CANCELLED + _LATE + _CUT:
            code = await cut(job, patience)
        else:
            code = await code_of(stream(client, job))
        codes[code] += 1

    async def watch() -> None:
        while True:
            sizes.append((await asyncio.to_thread(state, server))["process_resident_memory_bytes"])
            await asyncio.sleep(max(seconds / 60, 0.5))

    watching = asyncio.create_task(watch())
    async with AsyncClient(server.address) as client, asyncio.TaskGroup() as tasks:
        started = time.monotonic()
        for arrival in poisson_arrivals(rate, seed=5):
            if arrival > seconds:
                break
            await asyncio.sleep(arrival - (time.monotonic() - started))
            tasks.create_task(caller(client, draw()))
    watching.cancel()
    return codes, sizes


def overload(place: Place) -> Figures:
    """Offer three times the capacity from two processes; the figures include their own lateness."""
    seconds = place.seconds(120)
    # The queue is full after the same share of the time at every scale.
    flags = ["--max-waiting-requests", str(place.count(_NUM_WAITING, 4))]
    cores = place.client_cores
    with place.serving(BASE, flags) as server:
        rate = asyncio.run(capacity(server.address, place.seconds(_CAPACITY_SECONDS)))
        with Generator(cores[:1]) as one, Generator(cores[-1:]) as other, ThreadPoolExecutor(2) as pool:

            def offer(generator: Generator, seed: int) -> Run:
                half = _OVERLOAD * rate / 2
                jobs = draw_jobs(max(round(half * seconds), 1), MIX, seed=seed)
                return generator.open_loop(server.address, jobs, rate=half, stream=False)

            runs = list(pool.map(offer, (one, other), (2, 3)))
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    answered = [outcome for outcome in outcomes if outcome.code == "OK"]
    refused = [outcome for outcome in outcomes if outcome.code == "RESOURCE_EXHAUSTED"]
    goodput = sum(outcome.end <= seconds for outcome in answered) / seconds
    refusals = [outcome.end - outcome.sent for outcome in refused]
    figures: Figures = {
        "capacity": rate,
        "goodput": goodput,
        "codes": Counter(outcome.code for outcome in outcomes),
        "refused_p50_seconds": quantile(refusals, 0.5),
        "refused_p99_seconds": quantile(refusals, 0.99),
        "client_lag_p99_seconds": [run.lag_seconds for run in runs],
        "client_lateness_p99_seconds": [run.lateness_seconds for run in runs],
        "client_cpu_share": [run.cpu_share for run in runs],
    }
    told = sum(outcome.retry_after_seconds is not None for outcome in refused)
    place.at_least("answered a second, of the capacity", goodput / rate, 0.9, is_timed=True)
    place.at_least("calls that were refused", len(refused), 1, is_timed=True)
    place.at_most("p99 of a refusal, ms", 1e3 * figures["refused_p99_seconds"], 50, is_timed=True)
    place.at_least("refusals with a time to come again", told, len(refused))
    place.expect(figures["codes"], "OK", "RESOURCE_EXHAUSTED")
    return figures
