"""Drives the server's engine without gRPC: the speed that a server would reach if gRPC were free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.load.drive import Clock, closed_loop
from benchmarks.load.mix import Job, Outcome, engine_request
from seq2seq_serve.bundle.manifest import Manifest, load_bundle
from seq2seq_serve.server.config import QueueLimits, RunnerConfig, ServerConfig
from seq2seq_serve.server.engine.async_engine import AsyncEngine, Stream
from seq2seq_serve.server.engine.core import Core
from seq2seq_serve.server.engine.request import Constraints, Request
from seq2seq_serve.server.engine.result import Result, Turn
from seq2seq_serve.server.errors import ServerError
from seq2seq_serve.server.models.cores import ThreadCore
from seq2seq_serve.server.models.loading import LIMITS, create_engine
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up
from seq2seq_serve.server.service.write.responses import checked
from seq2seq_serve.server.system.trimming import spare_what_lives

_Result = TypeVar("_Result")

UNLIMITED = QueueLimits(1 << 40, 1 << 40)
_CALL_REQUESTS = 250  # of one call: engines begin with it before the next call is on its way


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """Returns the fields of every request that the service takes from the manifest.

    The runner itself forbids the tokens that the model never selects.
    """
    generation = manifest.generation
    start_ids, forced_ids = (
        tuple(
            manifest.choices[place].ids[manifest.choices[place].default] if isinstance(place, str) else place
            for place in places
        )
        for places in (manifest.template.start, manifest.template.forced)
    )
    return {
        "start_ids": start_ids,
        "begin_suppressed_ids": frozenset(generation.begin_suppressed_token_ids),
        "prefix_ids": forced_ids,
        "num_counted": len(forced_ids),
        "constraints": Constraints(
            repeats_start=generation.repeats_start,
            is_renormalized=generation.is_renormalized,
        ),
    }


def server_flags(config: RunnerConfig) -> list[str]:
    """Returns the flags of a server with the same settings."""
    named = ("provider", "precision", "max_slots", "max_source_length", "max_target_length", "speculative")
    flags = [] if config.num_threads is None else ["--threads", str(config.num_threads)]
    for name in named:
        flags += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    return flags


def server_engine(
    path: Path, config: RunnerConfig, on_turn: Callable[[Turn], object] = lambda _: None
) -> AsyncEngine:
    """Returns the engine that a server of a bundle has, in threads or processes, which is not started.

    Args:
        path: Folder of the bundle.
        config: The server's settings.
        on_turn: Is called with each turn, on the event loop.
    """
    bundle = load_bundle(path)
    server = ServerConfig(runner=config, queue=UNLIMITED, log_level="warning")
    return create_engine(bundle, size_up(bundle, config), server, "benchmark", on_turn)


def thread_engine(runner: OnnxRunner, on_turn: Callable[[Turn], object] = lambda _: None) -> AsyncEngine:
    """Returns an engine with one core on a thread of this process, which is not started.

    Args:
        runner: Runs the graphs; used by this engine only.
        on_turn: Is called with each turn, on the core's thread.
    """

    def started(deliver: Callable[[list[Turn]], object], died: Callable[[], object]) -> Core:
        def deliver_turns(turns: list[Turn]) -> None:
            for turn in turns:
                on_turn(turn)
            deliver(turns)

        limits = LIMITS[runner.provider]
        core = Core(
            runner,
            model_name="benchmark",
            deliver=deliver_turns,
            died=died,
            limits=limits,
            held_seconds=0.0,  # `on_turn` is called at the end of each turn
        )
        core.start()
        return core

    return AsyncEngine("benchmark", [ThreadCore(runner.num_slots, started)], UNLIMITED, lambda _: None)


async def answer(engine: AsyncEngine, outcome: Outcome, _now: Clock) -> None:
    """Decode the job of an outcome."""
    request = engine_request(outcome.job, asyncio.get_running_loop().time())
    try:
        with engine.submitted([request]) as (stream,):
            result = checked(await stream.wait())
    except ServerError as error:
        outcome.code = type(error).__name__
    else:
        outcome.num_tokens = len(result.best.token_ids)
        outcome.queue_seconds = result.timings.queue_seconds
        outcome.first_token_seconds = result.timings.first_token_seconds


class DrivenEngine:
    """An engine for programs without an event loop.

    Owns the engine and the thread with the event loop on which it runs.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(engine.start())
        spare_what_lives()  # as a server does, which also collects all garbage once a minute

    def closed_loop(self, jobs: Sequence[Job], in_flight: int) -> list[Outcome]:
        """Decode jobs, with `in_flight` of them at any time; returns their outcomes in order."""
        return self._run(closed_loop(partial(answer, self._engine), jobs, in_flight))

    def decode(self, requests: Iterable[Request]) -> list[Result]:
        """Submit all requests, some hundreds in a call; returns their results in order.

        Raises:
            ServerError: A request failed.
        """
        return self._run(self._decode(requests))

    async def _decode(self, requests: Iterable[Request]) -> list[Result]:
        waiting = iter(requests)
        with ExitStack() as stack:
            streams = list[Stream]()
            while call := list(islice(waiting, _CALL_REQUESTS)):
                streams += stack.enter_context(self._engine.submitted(call))
                await asyncio.sleep(0)
            return [checked(await stream.wait()) for stream in streams]

    def stop(self) -> None:
        """End the engine and its event loop."""
        self._run(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
