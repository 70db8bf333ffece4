"""One server process: starts it, serves, drains and stops it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.engine.result import Turn
from seq2seq_serve.server.errors import ServerError
from seq2seq_serve.server.http import HttpServer
from seq2seq_serve.server.models.adapters import AdapterFolders
from seq2seq_serve.server.models.folders import ModelFolders
from seq2seq_serve.server.models.repository import Repository
from seq2seq_serve.server.models.served import Models, ServedModel
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.calls import Calls
from seq2seq_serve.server.service.endpoint import Endpoint
from seq2seq_serve.server.service.health import Health
from seq2seq_serve.server.service.live.admission import LiveStreams
from seq2seq_serve.server.service.open_inference.service import InferenceService
from seq2seq_serve.server.service.realtime.page import RealtimePage
from seq2seq_serve.server.service.rest import RestService
from seq2seq_serve.server.system.trimming import Trimmer, spare_what_lives
from seq2seq_serve.server.telemetry.access_log import AccessLog
from seq2seq_serve.server.telemetry.metrics import Metrics
from seq2seq_serve.server.telemetry.tracing import Tracing

Loader = Callable[[Path, ServerConfig, str, Callable[[Turn], None], int, str], ServedModel]

_REFRESH_SECONDS = 1.0  # after which health watchers are informed of a failed engine

_log = logging.getLogger(__name__)


class App:
    """Models, ports and metrics of one process.

    Owns everything that lives as long as the server. Its methods run on one event loop.

    Args:
        bundles: Folders; a model has the name of its folder.
        loader: Loads one bundle; called on a thread of its own.

    Attributes:
        metrics: What Prometheus scrapes.
        models: The served models.
        health: What health checks are answered with.
        repository: Loads and unloads models.
        calls: The calls of clients.
        rest: The pages of the HTTP port.
        http: The HTTP port.
        endpoint: The gRPC port.

    Raises:
        OSError: A port cannot be opened, or a file cannot be read.
        ValueError: Two bundles have the same name, the repository is not a folder, a model has settings but
            no bundle, or the access file cannot be used.
    """

    def __init__(self, bundles: Sequence[Path], config: ServerConfig, loader: Loader) -> None:
        self._folders = ModelFolders(bundles, config.repository, config.named_bundles)
        self._folders.check_names(config.models)
        access = Access(config.access_file, is_repository_open=config.is_repository_open)
        self._config = config
        self._loader = loader
        self.metrics = Metrics()
        self.models = Models(self.metrics)
        self.health = Health(self.models)
        self.repository = Repository(
            self._folders,
            self.models,
            self._load,
            self.health.refresh,
            AdapterFolders(config.named_adapters, config.adapters),
        )
        self._watching: asyncio.Task[None] | None = None
        self._tracing = Tracing() if config.is_traced else None
        sinks = [self.metrics.record_call, AccessLog(config.max_log_lines, config.slow_seconds).record]
        if self._tracing is not None:
            sinks.append(self._tracing.record)
        live = LiveStreams(config.max_live_streams, config.live_interval_seconds)
        self.calls = Calls(self.models, access, sinks, begins_traces=config.is_traced, live=live)
        self.metrics.show_open_calls(lambda: self.calls.num_open)
        self.metrics.show_live_streams(lambda: self.calls.live.open.held.total())
        inference = InferenceService(self.repository, self.health)
        self.rest = RestService(inference, self.calls, config.openai_names)
        realtime = RealtimePage(self.calls, config.openai_names)
        self.http = HttpServer(
            config.host,
            config.metrics_port,
            registry=self.metrics.registry,
            unhealthy=self.health.unhealthy,
            unready=self.health.unready,
            routes=[*self.rest.routes(), realtime.route()] if config.has_rest else (),
            error_forms=self.rest.error_forms() if config.has_rest else (),
            origins=config.allowed_origins.split(",") if config.allowed_origins else (),
        )
        try:
            self.endpoint = Endpoint(
                config,
                repository=self.repository,
                calls=self.calls,
                health=self.health,
                inference=inference,
            )
        except BaseException:
            self.http.close()
            raise

    async def start(self) -> None:
        """Open the ports, load the models, and report ready.

        Raises:
            ValueError: A model whose own folder was given cannot be served, or no model can.
        """
        self._watching = asyncio.create_task(self.calls.access.watch())
        await self.http.start()
        await self.endpoint.start()
        names = self._folders.names
        for name in names:
            try:
                await self.repository.load_one(name)
            except ServerError as error:
                if self._folders.is_given(name):
                    raise ValueError(str(error)) from error
                _log.error("model %s: not served: %s", name, error)
        self.repository.check_adapters()
        if names and not list(self.models):
            raise ValueError(f"no model of the repository {self._config.repository} can be served")
        self.health.end_loading()
        host = self._config.host
        _log.info("at most %d connections of gRPC callers may be open", self.endpoint.max_connections)
        _log.info(
            "ready: gRPC on %s:%d, metrics on %s:%d, models %s",
            host,
            self.endpoint.port,
            host,
            self.http.port,
            ", ".join(model.name for model in self.models),
        )

    def _load(self, name: str, version: str, path: Path, num_used_bytes: int) -> ServedModel:
        """Load a version; called on a thread of its own."""
        record = self.metrics.statistics_of(name).record_turn
        return self._loader(path, self._config.of_model(name), name, record, num_used_bytes, version)

    @property
    def is_loading(self) -> bool:
        """Whether a bundle is being loaded, which cannot be interrupted."""
        return self.repository.is_loading

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, keep health watchers informed, and give memory back."""
        trimmer = Trimmer()
        while not stopping.is_set():
            self.health.refresh()
            if trimmer.look():
                await asyncio.to_thread(trimmer.trim)
            try:
                await asyncio.wait_for(stopping.wait(), _REFRESH_SECONDS)
            except TimeoutError:
                continue

    async def drain(self, notice_seconds: float = 0.0) -> None:
        """Report NOT_SERVING, then refuse new requests, and let the accepted ones finish.

        Args:
            notice_seconds: Time between the first two, in which load balancers can switch to other servers.
        """
        self.health.drain()
        await asyncio.sleep(notice_seconds)
        self.repository.drain()
        self.calls.drain()
        for model in self.models:
            model.engine.drain()
        limit = self._config.drain_seconds
        try:
            await asyncio.wait_for(self.calls.wait_until_idle(), limit)
        except TimeoutError:
            _log.warning("%d calls were not finished within %g seconds", self.calls.num_open, limit)

    async def stop(self) -> None:
        """Stop the engines, then the ports; unfinished and late requests are answered with UNAVAILABLE."""
        await self.repository.stop()
        await self.calls.wait_until_quiet()
        self.health.close()
        await self.endpoint.stop()
        await self.http.stop()
        self.calls.close()
        if self._watching is not None:
            self._watching.cancel()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)


async def serve(bundles: Sequence[Path], config: ServerConfig, loader: Loader) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal kills the process.

    Raises:
        OSError: As `App`.
        ValueError: As `App`, or a bundle cannot be used.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    notice_seconds = config.notice_seconds

    def on_signal(number: signal.Signals) -> None:
        nonlocal notice_seconds
        if stopping.is_set():
            os._exit(128 + number)  # not SIG_DFL: the kernel ignores it for the first process of a container
        stopping.set()
        if number is signal.SIGINT:  # a user waits at the keyboard, and no load balancer is used
            notice_seconds = 0.0
        limit = notice_seconds + config.drain_seconds
        _log.info("%s: draining for at most %g seconds; a second signal ends at once", number.name, limit)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    app = App(bundles, config, loader)
    try:
        if await _is_first(app.start(), stopping):
            spare_what_lives()
            await app.run_until(stopping)
            await app.drain(notice_seconds)
    finally:
        await app.stop()
    _log.info("stopped")
    if app.is_loading:
        logging.shutdown()
        os._exit(0)  # a normal exit would wait for the loading thread


async def _is_first(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Run `work` until it is done or `stopping` is set, which cancels it; returns whether it was done."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait({working})
        return False
    await working
    return True
