"""This project's engine as a contender: in a separate process, without gRPC.

As in a server, one instance is a thread of that process, and several are processes beside it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load.engine import DrivenEngine, server_engine, settings_of
from benchmarks.peers.work import Clock, Search, Source
from seq2seq_serve.bundle.manifest import Manifest, load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy, RunnerConfig, Speculation
from seq2seq_serve.server.engine.request import Beam, Request
from seq2seq_serve.server.engine.result import Turn

_NO_BUDGET = 1 << 62  # the number of slots is the limit, not their bytes


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
            max_slots_size_bytes=_NO_BUDGET,
            speculative=Speculation.OFF,  # random weights repeat themselves
        )
        # A forked process would not have torch's threads, but might hold their locks.
        context = multiprocessing.get_context("spawn")
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
    """Answer requests until the parent closes the connection."""
    manifest = load_bundle(bundle_path).manifest
    turns: list[Turn] = []
    engine = DrivenEngine(server_engine(bundle_path, config, turns.append))
    while True:
        try:
            sources, search = connection.recv()
        except EOFError:
            break
        turns.clear()
        # The longest first, as the peers get them.
        order = sorted(range(len(sources)), key=lambda place: -len(sources[place]))
        settings = settings_of(manifest)  # once for all sources of a call, as a server does
        # One by one, as a server gets them: the first are decoded before the last are made.
        requests = (_request(manifest, settings, sources[place], search) for place in order)
        results = engine.decode(requests)
        targets: list[list[int]] = [[] for _ in sources]
        for place, result in zip(order, results, strict=True):
            targets[place] = list(result.best.token_ids)[len(manifest.template.forced) :]
        step_seconds = statistics.median(turn.step_seconds for turn in turns)
        busy_seconds = sum(turn.encode_seconds + turn.num_steps * turn.step_seconds for turn in turns)
        num_busy = min(config.num_instances, len(sources))
        connection.send((targets, Clock(step_seconds, busy_seconds / num_busy)))
    engine.stop()


def _request(manifest: Manifest, settings: dict[str, Any], source: Source, search: Search) -> Request:
    (name,) = manifest.sources
    return Request(
        "",
        {name: np.array(source)},
        manifest.memory.memory_length({name: len(source)}),
        search.most(source),
        arrival=time.monotonic(),
        beam=Beam(search.beam_size, alpha=0.0) if search.beam_size > 1 else None,
        **settings,
    )
