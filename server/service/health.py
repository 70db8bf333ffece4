"""`grpc.health.v1`, and whether the server is ready or alive: one truth for gRPC and for HTTP.

The servicer of `grpcio-health-checking` is not used: its Watch holds a lock while it sends, so one slow
watcher delays every change, and a watcher that leaves takes the others' notification with it.
"""

from __future__ import annotations

import asyncio
import math

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from protos import open_inference_pb2, seq2seq_v1_pb2
from server.errors import UnknownModel
from server.models import Models, ServedModel
from server.service.calls import Context, send
from server.service.status import abort, request_id_of

Status = health_pb2.HealthCheckResponse

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

# What can be asked for by name, besides models; `server.service.endpoint` has them on its port.
SERVICE_NAMES = tuple(
    file.services_by_name[name].full_name
    for file, name in (
        (seq2seq_v1_pb2.DESCRIPTOR, "Seq2Seq"),
        (seq2seq_v1_pb2.DESCRIPTOR, "Repository"),
        (open_inference_pb2.DESCRIPTOR, "GRPCInferenceService"),
    )
)

# An engine that works gives a sign of life every turn; no encode or step of a sound machine takes this long.
HEARTBEAT_LIMIT_SECONDS = 60.0


class Health:
    """Whether the server loads, serves, drains, or has failed.

    Owned by the app, changed on the event loop. `unready` and `unhealthy` only read, from any thread.

    Attributes:
        is_closed: Whether the server is about to end.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._is_loading = True
        self._is_draining = False
        self.is_closed = False
        self._changed = asyncio.Event()
        self._shown: dict[str, int] = {}
        self.refresh()

    def unhealthy(self) -> str | None:
        """Why the process should be restarted, or None."""
        return next((problem for model in self._models if (problem := _problem(model))), None)

    def unready(self) -> str | None:
        """Why no request should be sent here, or None."""
        if self._is_draining:
            return "draining"
        if self._is_loading:
            return "loading"
        if not len(self._models):
            return "no model is served"
        return self.unhealthy()

    def is_serving(self, model: ServedModel) -> bool:
        """Whether requests for a model may come."""
        return not self._is_draining and _problem(model) is None

    def status(self, service: str) -> int:
        """The status of "" (the whole server), of a service, or of a model, by its name."""
        if service in ("", *SERVICE_NAMES):
            return _serving(self.unready() is None)
        model = next((model for model in self._models if model.name == service), None)
        if model is None:
            return int(Status.SERVICE_UNKNOWN)
        return _serving(self.is_serving(model))

    def names(self) -> tuple[str, ...]:
        """All that `status` knows."""
        return ("", *SERVICE_NAMES, *(model.name for model in self._models))

    def end_loading(self) -> None:
        """Ready from now on, as far as the models are."""
        self._is_loading = False
        self.refresh()

    def drain(self) -> None:
        """Not serving, from now on."""
        self._is_draining = True
        self.refresh()

    def close(self) -> None:
        """Let every watcher go, which by itself never ends."""
        self.is_closed = True
        self.refresh()

    def refresh(self) -> None:
        """Show watchers every status as it is now, and wake them where one has changed."""
        shown = {name: self.status(name) for name in self.names()}
        if shown != self._shown or self.is_closed:  # not every second: there may be many watchers
            self._shown = shown
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def shown_status(self, service: str) -> int:
        """The status at the last refresh."""
        return self._shown.get(service, int(Status.SERVICE_UNKNOWN))

    async def wait_for_refresh(self) -> None:
        """Wait until a status has changed, or the server ends."""
        await self._changed.wait()


def _serving(is_serving: bool) -> int:
    return int(Status.SERVING if is_serving else Status.NOT_SERVING)


def _problem(model: ServedModel) -> str | None:
    silence = model.silent_seconds()
    if math.isinf(silence):
        return f"{model.name}: the engine's thread has ended"
    if silence > HEARTBEAT_LIMIT_SECONDS:
        return f"{model.name}: no sign of life from the engine for {silence:.0f} seconds"
    if not model.is_healthy:
        return f"{model.name}: the engine's steps keep failing"
    return None


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Check, Watch and List over `Health`. Holds nothing of its own."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(  # noqa: N802 (the name is the contract's)
        self, message: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Answer with the status now; an unknown name is NOT_FOUND."""
        status = self._health.status(message.service)
        if status == Status.SERVICE_UNKNOWN:
            error = UnknownModel(f"unknown service {message.service[:100]!r}", name=message.service)
            await abort(context, error, request_id_of(context.invocation_metadata()))
        return Status(status=status)

    async def Watch(  # noqa: N802
        self, message: health_pb2.HealthCheckRequest, context: Context
    ) -> None:
        """Answer with the status now and at every change, until the caller leaves or the server ends."""
        last = None
        while not self._health.is_closed:
            status = self._health.shown_status(message.service)
            if status != last:
                await send(context, Status(status=status))
                last = status
                continue  # it may have changed while that was sent
            await self._health.wait_for_refresh()

    async def List(  # noqa: N802
        self, _message: health_pb2.HealthListRequest, _context: Context
    ) -> health_pb2.HealthListResponse:
        """Answer with every status at once. Only a `grpcio-health-checking` from 1.85 on calls it."""
        statuses = {name: Status(status=self._health.status(name)) for name in self._health.names()}
        return health_pb2.HealthListResponse(statuses=statuses)
