"""This project's engine as a contender: in a separate process, without gRPC.

As in a server, one instance is a thread of that process, and several are processes beside it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.work import Clock, Search, Source
from seq2seq_serve.bundle.manifest import Manifest, load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, ServerConfig
from seq2seq_serve.server.engine.records import (
    Beam,
    Constraints,
    Request,
    Result,
    Turn,
    Update,
)
from seq2seq_serve.server.errors import ServerError
from seq2seq_serve.server.models.loading import start_engines
from seq2seq_serve.server.runner.sizing import size_up

_CALL_REQUESTS = 250  # of one call: engines begin with it before the next call is on its way
_NO_BUDGET = 1 << 62  # the number of slots is the limit, not their bytes


class EngineProcess:
    """A process with the engines of one model, configured like the server's.

    Owned by the benchmark; a call of `translate` ends before the next one starts.

    Args:
        bundle_path: Folder of an exported bundle.
        precision: Precision of the graphs.
        num_threads: Number of threads of all instances.
        num_slots: Number of slots of all instances.
        num_instances: See `server.config.RunnerConfig`.

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
    """Main function of the process: answer requests until the parent closes the connection."""
    engines = _Engines(bundle_path, config)
    while True:
        try:
            sources, search = connection.recv()
        except EOFError:
            break
        engines.turns.clear()
        targets = engines.translate(sources, search)
        step_seconds = statistics.median(turn.step_seconds for turn in engines.turns)
        busy_seconds = sum(turn.encode_seconds + turn.step_seconds for turn in engines.turns)
        connection.send((targets, Clock(step_seconds, busy_seconds / config.num_instances)))
    engines.stop()


class _Engines:
    """The engines of one model; only the thread that created them calls `translate`.

    Attributes:
        turns: The turns since the caller emptied it, without their updates.
    """

    def __init__(self, bundle_path: Path, config: RunnerConfig) -> None:
        self.turns: list[Turn] = []
        self._results: dict[Request, Result] = {}
        self._num_open = 0
        self._delivering = threading.Lock()  # engines deliver from several threads
        self._all_done = threading.Event()
        bundle = load_bundle(bundle_path)
        self._settings = settings_of(bundle.manifest)
        self._memory = bundle.manifest.memory
        (self._source,) = bundle.manifest.sources
        self._engines = start_engines(
            bundle,
            size_up(bundle, config),
            ServerConfig(runner=config, log_level="warning"),
            model_name="bench",
            deliver=self._deliver,
            refuse=self._refuse,
        )

    def translate(self, sources: Sequence[Source], search: Search) -> list[list[int]]:
        """Submit all sources as calls, the longest first, as the peers get them; returns each best target."""
        self._results.clear()
        self._all_done.clear()
        self._num_open = len(sources)
        requests: dict[int, Request] = {}
        order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
        for start in range(0, len(order), _CALL_REQUESTS):
            call = {i: self._request(i, sources[i], search) for i in order[start : start + _CALL_REQUESTS]}
            requests |= call
            for place, engine in enumerate(self._engines):
                if part := list(call.values())[place :: len(self._engines)]:
                    engine.submit(*part)
        self._all_done.wait()
        results = (self._results[requests[i]] for i in range(len(sources)))
        return [_best_target(result)[requests[0].num_counted :] for result in results]

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

    def stop(self) -> None:
        """End the engines."""
        for engine in self._engines:
            engine.stop()

    def _deliver(self, turn: Turn) -> None:
        with self._delivering:
            self.turns.append(replace(turn, updates=()))
            for update in turn.updates:
                if update.result is not None:
                    self._results[update.request] = update.result
                    self._num_open -= 1
            if not self._num_open:
                self._all_done.set()

    def _refuse(self, requests: Sequence[Request], error: ServerError) -> None:
        self._deliver(Turn(tuple(Update(each, {}, Result.failed(each, error)) for each in requests)))


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
    if result.error is not None:
        raise result.error
    return list(result.best.token_ids)
