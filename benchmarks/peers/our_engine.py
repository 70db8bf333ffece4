"""This project's engine as a contender: in a separate process, without gRPC.

As in a server, one instance is a thread of that process, and several are processes beside it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.work import Clock, Search, Source
from seq2seq_serve.bundle.manifest import Manifest, load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, QueueLimits, RunnerConfig, ServerConfig, Speculation
from seq2seq_serve.server.engine.request import Beam, Constraints, Request
from seq2seq_serve.server.engine.result import Result, Turn
from seq2seq_serve.server.models.loading import create_engine
from seq2seq_serve.server.runner.sizing import size_up
from seq2seq_serve.server.service.write.responses import checked

_CALL_REQUESTS = 250  # of one call: engines begin with it before the next call is on its way
_NO_BUDGET = 1 << 62  # the number of slots is the limit, not their bytes
_UNLIMITED = QueueLimits(1 << 40, 1 << 40)


class EngineProcess:
    """A process with the engines of one model, configured like the server's.

    Owned by the benchmark; a call of `translate` ends before the next one starts.

    Args:
        bundle_path: Folder of an exported bundle.
        precision: Precision of the graphs.
        num_threads: Number of threads of all instances.
        num_slots: Number of slots of all instances.
        num_instances: See `server.runner.sizing.RunnerConfig`.

    Attributes:
        clock: Times of the last translation.
    """

    def __init__(
        self, bundle_path: Path, precision: Precision, num_threads: int, num_slots: int, num_instances: int
    ) -> None:
        self.clock = Clock()
        config = RunnerConfig(
            shares_threads=True,
            num_instances=num_instances,
            provider=ProviderPolicy.CPU,
            precision=precision,
            num_threads=num_threads,
            max_slots=num_slots,
            memory_budget_bytes=_NO_BUDGET,
            speculative=Speculation.OFF,  # random weights repeat themselves
        )
        context = multiprocessing.get_context(
            "spawn"
        )  # a forked process would not have torch's threads, but might hold their locks
        self._connection, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, bundle_path, config), daemon=True)
        self._process.start()
        its_end.close()

    def translate(self, sources: Sequence[Source], search: Search) -> list[list[int]]:
        """Submit all sources at once; returns the best target of each.

        Raises:
            EOFError: The process failed, and has printed its error.
        """
        self._connection.send((sources, search))
        targets, its_clock = self._connection.recv()
        self.clock.__dict__.update(its_clock.__dict__)
        return targets  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, bundle_path: Path, config: RunnerConfig) -> None:
    """Main function of the process."""
    asyncio.run(_answer(connection, bundle_path, config))


async def _answer(connection: Connection, bundle_path: Path, config: RunnerConfig) -> None:
    """Answer requests until the parent closes the connection."""
    engine = _Engine(bundle_path, config)
    await engine.start()
    while True:
        try:
            sources, search = await asyncio.to_thread(connection.recv)
        except EOFError:
            break
        engine.turns.clear()
        targets = await engine.translate(sources, search)
        step_seconds = statistics.median(turn.step_seconds for turn in engine.turns)
        busy_seconds = sum(turn.encode_seconds + turn.step_seconds for turn in engine.turns)
        connection.send((targets, Clock(step_seconds, busy_seconds / config.num_instances)))
    await engine.stop()


class _Engine:
    """The engine of one model.

    Attributes:
        turns: The turns since the caller emptied it.
    """

    def __init__(self, bundle_path: Path, config: RunnerConfig) -> None:
        self.turns: list[Turn] = []
        bundle = load_bundle(bundle_path)
        self._settings = settings_of(bundle.manifest)
        self._memory = bundle.manifest.memory
        (self._source,) = bundle.manifest.sources
        server = ServerConfig(runner=config, queue=_UNLIMITED, log_level="warning")
        self._engine = create_engine(bundle, size_up(bundle, config), server, "bench", self.turns.append)
        self.start, self.stop = self._engine.start, self._engine.stop

    async def translate(self, sources: Sequence[Source], search: Search) -> list[list[int]]:
        """Submit all sources as calls, the longest first, as the peers get them; returns each best target."""
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        targets: dict[int, list[int]] = {}
        with ExitStack() as stack:
            calls = []
            for start in range(0, len(order), _CALL_REQUESTS):
                places = order[start : start + _CALL_REQUESTS]
                requests = [self._request(i, sources[i], search) for i in places]
                calls.append((places, stack.enter_context(self._engine.submitted(requests))))
                await asyncio.sleep(0)
            for places, streams in calls:
                for place, stream in zip(places, streams, strict=True):
                    targets[place] = _best_target(await stream.wait())[stream.request.num_counted :]
        return [targets[i] for i in range(len(sources))]

    def _request(self, number: int, source: Source, search: Search) -> Request:
        return Request(
            str(number),
            {self._source: np.array(source)},
            self._memory.memory_length({self._source: len(source)}),
            search.most(source),
            arrival=time.monotonic(),
            beam=Beam(search.beam_size, alpha=0.0) if search.beam_size > 1 else None,
            **self._settings,
        )


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
        for places in (manifest.frames.start, manifest.frames.forced)
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


def _best_target(result: Result) -> list[int]:
    return list(checked(result).best.token_ids)
