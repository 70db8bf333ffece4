"""A part of the reliability benchmark: three unlike servers, behind real proxies and without one."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.load.generator import Generator
from benchmarks.load.mix import ONLY_GREEDY, Job, draw_jobs, poisson_arrivals, quantile
from benchmarks.report import median
from benchmarks.serving import RunningServer
from reliability.place import TINY, Figures, Place, state
from reliability.proxies import PROXIES, Running, proxying
from seq2seq_serve.client import AsyncClient, ClientError

DIRECT = "direct"
_ONE = "one server"
_SLOTS = (16, 8, 4)  # the middle one is ended, killed or frozen
_STEP_SECONDS = 0.02
_MEAN_TOKENS = 34  # of the jobs' targets
_LOAD, _LOAD_AT_FAULTS = 0.6, 0.4  # of the capacity of all slots
_NUM_ROUNDS = 3
_WARM_UP_SECONDS = 5.0  # the servers begin idle
_BEFORE_SECONDS = 2.0  # of calls before a fault
_NOTICE_SECONDS = 5
_CHECKED_SECONDS = 1.0  # until a proxy has asked every server for its health
_LEFT_SECONDS = 1.0  # after which a server that is not ready gets no more calls
_HUNG_SECONDS = 2.5  # after which a server that does not answer gets no more calls
_FROZEN_SECONDS, _PATIENT_SECONDS = 9.0, 5.0  # callers wait longer than any call takes


@dataclass(frozen=True)
class _Way:
    """How callers reach the servers.

    Attributes:
        address: The address for callers.
        proxy: The proxy on the way; None without one.
    """

    name: str
    address: str
    proxy: Running | None = None

    @property
    def leaves_by_itself(self) -> bool:
        """Whether it leaves a server that is not ready, without an operator."""
        return self.proxy is None or self.proxy.proxy.asks_for_health


@dataclass(frozen=True)
class _Call:
    """A call that has ended.

    Attributes:
        code: The status that the client reports.
        grpc_code: The status that gRPC reported to the client.
        began: Seconds after the fault; negative before it.
        error: Why it was lost; empty if it was answered.
    """

    is_stream: bool
    code: str
    grpc_code: str
    began: float
    error: str = ""


def balance(place: Place) -> Figures:
    """Compare the latency with that of one large server, then end, kill and freeze a server on each way."""
    missing = {name: f"{proxy.package} installs it" for name, proxy in PROXIES.items() if not proxy.find()}
    proxies = [name for name in PROXIES if name not in missing]
    # A client without a proxy calls the servers in turn, which only suits servers of the same size.
    figures: Figures = {"missing": missing, "latency": _latency(place, proxies)}
    large, middle, small = _SLOTS
    with _serving(place, large) as first, _serving(place, small) as last:
        for name in (DIRECT, *proxies):
            figures[name] = {}
            for fault in (_freeze, _end, _kill):
                # All the other servers end only when nobody calls them any more.
                notice_seconds = _NOTICE_SECONDS if fault is _end else 0
                with (
                    _serving(place, middle, notice_seconds) as changed,
                    _way(place, name, [first, changed, last]) as way,
                ):
                    figures[name][fault.__name__.strip("_")] = _by_status(fault(place, way, changed))
    return figures


def _serving(place: Place, num_slots: int, notice_seconds: int = 0) -> Any:
    flags = ["--max-slots", str(num_slots), "--threads", "1", "--notice-seconds", str(notice_seconds)]
    return place.serving(TINY, flags, module=("reliability.paced", str(_STEP_SECONDS)))


@contextmanager
def _way(place: Place, name: str, servers: Sequence[RunningServer]) -> Iterator[_Way]:
    if name == DIRECT:
        yield _Way(name, "ipv4:" + ",".join(server.address for server in servers))
        return
    with proxying(name, place.folder / name, servers) as proxy:
        time.sleep(_CHECKED_SECONDS)
        yield _Way(name, proxy.address, proxy)


def _rate(load: float) -> float:
    """Returns the calls a second that keep this share of all slots busy."""
    return load * sum(_SLOTS) / (_MEAN_TOKENS * _STEP_SECONDS)


def _latency(place: Place, names: Sequence[str]) -> Figures:
    """Measure whole answers in open loops on each way and on one server, in alternation."""
    rate, warm_up_seconds = _rate(_LOAD), place.seconds(_WARM_UP_SECONDS)
    num_jobs = round(rate * (warm_up_seconds + place.seconds(20)))
    p99, codes = defaultdict[str, list[float]](list), Counter[str]()
    with ExitStack() as stack:
        one = stack.enter_context(_serving(place, sum(_SLOTS)))
        servers = [stack.enter_context(_serving(place, num_slots)) for num_slots in _SLOTS]
        ways = [_Way(_ONE, one.address)]
        ways += [stack.enter_context(_way(place, name, servers)) for name in names]
        generator = stack.enter_context(Generator(place.client_cores))
        for number in range(place.count(_NUM_ROUNDS)):
            jobs = draw_jobs(num_jobs, ONLY_GREEDY, seed=number)
            for way in ways:
                outcomes = generator.open_loop(way.address, jobs, rate=rate, stream=False).outcomes
                codes.update(outcome.code for outcome in outcomes)
                seconds = [each.end - each.arrival for each in outcomes if each.arrival > warm_up_seconds]
                p99[way.name].append(quantile(seconds, 0.99))
        calls = [_num_begun(server) for server in servers]
    place.expect(codes, "OK")
    for name in names:
        ratio = median(p99[name]) / median(p99[_ONE])
        place.at_most(f"{name}: p99, of that of one server", ratio, 2, is_timed=True)
    return {"calls_per_second": rate, "p99_seconds": p99, "codes": codes, "calls_by_server": calls}


def _end(place: Place, way: _Way, server: RunningServer) -> list[_Call]:
    """Terminate a server under load; it reports NOT_SERVING, and later refuses calls."""
    late = 0

    async def terminate() -> AsyncIterator[None]:
        nonlocal late
        server.process.terminate()
        yield
        if way.proxy is not None:
            way.proxy.leave(server)
        await asyncio.sleep(_LEFT_SECONDS)
        before = await asyncio.to_thread(_num_begun, server)
        await asyncio.sleep(_NOTICE_SECONDS - _LEFT_SECONDS - 1.0)
        late = await asyncio.to_thread(_num_begun, server) - before

    calls = asyncio.run(_under_load(way, place.seconds(10, _NOTICE_SECONDS + 1.0), terminate))
    after = "" if way.leaves_by_itself else ", after its reload"
    place.at_most(f"{way.name}: calls lost at SIGTERM", len(_lost(calls)), 0)
    place.at_most(f"{way.name}: calls to a server not ready for a second{after}", late, 0, is_timed=True)
    place.at_most(f"{way.name}: exit code after SIGTERM", abs(server.wait()), 0)
    return calls


def _kill(place: Place, way: _Way, server: RunningServer) -> list[_Call]:
    """Kill a server under load; only the calls that run there may be lost."""
    num_open, dying_seconds = 0, 0.0

    async def kill() -> AsyncIterator[None]:
        nonlocal num_open, dying_seconds
        num_open = int((await asyncio.to_thread(state, server))["seq2seq_open_calls"])
        counted_at = time.monotonic()
        server.process.kill()
        # Until its last thread has ended, which takes a while under load, its connections look sound.
        await asyncio.to_thread(server.wait)
        dying_seconds = time.monotonic() - counted_at
        yield

    calls = asyncio.run(_under_load(way, place.seconds(10, 2.0), kill))
    lost = _lost(calls)
    may_be_lost = num_open + sum(-dying_seconds < call.began <= 0 for call in calls)
    early = sum(call.began <= 0 for call in lost)
    late = sum(call.began > _LEFT_SECONDS for call in lost)
    place.at_least(f"{way.name}: calls that ran on the killed server", num_open, 1, is_timed=True)
    name = f"{way.name}: calls lost at SIGKILL, of those that ran there or began while it ended"
    place.at_most(name, early, may_be_lost)
    place.at_most(f"{way.name}: of them, begun a second after its end", late, 0)
    place.expect(Counter(call.code for call in lost), "UNAVAILABLE", whose=f"{way.name}: of them, those")
    return calls


def _freeze(place: Place, way: _Way, server: RunningServer) -> list[_Call]:
    """Stop a server's process for some seconds; its connections stay open and nothing answers."""
    frozen_seconds = place.seconds(_FROZEN_SECONDS)
    patient_seconds = min(_PATIENT_SECONDS, frozen_seconds)

    async def stop() -> AsyncIterator[None]:
        server.process.send_signal(signal.SIGSTOP)
        yield
        try:
            await asyncio.sleep(frozen_seconds)
        finally:
            server.process.send_signal(signal.SIGCONT)

    calls = asyncio.run(_under_load(way, place.seconds(10, frozen_seconds), stop, timeout=patient_seconds))
    # Otherwise nothing notices a frozen server; the caller's deadline ends its calls.
    if way.proxy is not None and way.leaves_by_itself:
        # A later one may be lost for another reason, after the server goes on.
        end = frozen_seconds - patient_seconds
        late = [call for call in _lost(calls) if _HUNG_SECONDS < call.began < end]
        name = f"{way.name}: calls to a server that was frozen for {_HUNG_SECONDS} seconds"
        place.at_most(name, len(late), 0, is_timed=True)
    return calls


async def _under_load(
    way: _Way,
    seconds: float,
    fault: Callable[[], AsyncIterator[None]],
    *,
    timeout: float = 60.0,
) -> list[_Call]:
    """Call for `seconds` after a fault, which yields when it has begun, and some before it.

    Half of the calls are streams.
    """
    calls, before = list[_Call](), _BEFORE_SECONDS
    rate = _rate(_LOAD_AT_FAULTS)
    jobs = draw_jobs(round(rate * (before + seconds)), ONLY_GREEDY, seed=9)
    started = time.monotonic()
    fault_at = started + before

    async def call(client: AsyncClient, job: Job, is_stream: bool) -> None:
        code, grpc_code, problem = "OK", "OK", ""
        began = time.monotonic()
        try:
            if is_stream:
                async for _ in client.stream(job.source_ids, options=job.options()):
                    pass
            else:
                await client.generate(job.source_ids, options=job.options())
        except ClientError as error:
            code, grpc_code, problem = error.code, error.__cause__.code().name, str(error)  # type: ignore[union-attr]
        calls.append(_Call(is_stream, code, grpc_code, began, problem))

    async def break_it() -> None:
        nonlocal fault_at
        await asyncio.sleep(fault_at - time.monotonic())
        async for _ in fault():
            fault_at = time.monotonic()

    async with AsyncClient(way.address, timeout_seconds=timeout) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(break_it())
        for number, (job, arrival) in enumerate(zip(jobs, poisson_arrivals(rate, seed=9), strict=False)):
            await asyncio.sleep(started + arrival - time.monotonic())
            tasks.create_task(call(client, job, is_stream=number % 2 == 0))
    return [replace(call, began=call.began - fault_at) for call in calls]


def _by_status(calls: Sequence[_Call]) -> Figures:
    """Returns the statuses of streams, which no client retries, and of whole answers, which ours does."""
    return {
        kind: {
            "codes": Counter(call.code for call in calls if call.is_stream is is_stream),
            "codes_of_grpc": Counter(call.grpc_code for call in calls if call.is_stream is is_stream),
            "errors": Counter(call.error for call in _lost(calls) if call.is_stream is is_stream),
        }
        for kind, is_stream in (("streams", True), ("answers", False))
    }


def _lost(calls: Sequence[_Call]) -> list[_Call]:
    return [call for call in calls if call.code != "OK"]


def _num_begun(server: RunningServer) -> int:
    """Returns the number of calls that have reached a server so far, without probes."""
    now = state(server)
    return int(now["seq2seq_requests_total"] + now["seq2seq_open_calls"])
