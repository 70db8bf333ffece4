"""`grpc.health.v1`, and the state of the server for gRPC and HTTP probes.

The servicer of `grpcio-health-checking` is not used. Its Watch holds a lock while it sends, so one slow
watcher delays every change, and when a watcher leaves, others miss a notification.
"""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from seq2seq_serve.protos import open_inference_pb2, seq2seq_v1_pb2
from seq2seq_serve.server.errors import UnknownModel
from seq2seq_serve.server.models.served import Models, ServedModel
from seq2seq_serve.server.service.calls import RemoteCall

HealthCheckResponse = health_pb2.HealthCheckResponse

# What `server.service.endpoint` serves.
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
SEQ2SEQ = seq2seq_v1_pb2.DESCRIPTOR.services_by_name["Seq2Seq"]
REPOSITORY = seq2seq_v1_pb2.DESCRIPTOR.services_by_name["Repository"]
INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]

# The services that have a status, as models have.
SERVICE_NAMES = (SEQ2SEQ.full_name, REPOSITORY.full_name, INFERENCE.full_name)


class Health:
    """Whether the server loads, serves, drains, or has failed.

    Owned by the app; changed on the event loop. `unready` and `unhealthy` may be called from any thread.

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
        """Returns why the process should be restarted, or None."""
        problems = (model.engine.fatal_problem() for model in self._models)
        return next((problem for problem in problems if problem), None)

    def unready(self) -> str | None:
        """Returns why callers should not send requests, or None."""
        if self._is_draining:
            return "draining"
        if self._is_loading:
            return "loading"
        if not len(self._models):
            return "no model is served"
        problems = [model.engine.problem() for model in self._models]
        return problems[0] if all(problems) else None

    def is_serving(self, model: ServedModel) -> bool:
        """Returns whether callers may send requests for a model."""
        return not self._is_draining and model.engine.problem() is None

    def status(self, service: str) -> int:
        """Returns the status of "" (the whole server), of a service, or of a model, by its name."""
        if service in ("", *SERVICE_NAMES):
            is_serving = self.unready() is None
        else:
            model = self._models.get(service)
            if model is None or model.base is not None:
                return int(HealthCheckResponse.SERVICE_UNKNOWN)
            is_serving = self.is_serving(model)
        return int(HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING)

    def names(self) -> tuple[str, ...]:
        """Returns every name that `status` knows; not those of adapters, which are customers' names."""
        return ("", *SERVICE_NAMES, *(model.name for model in self._models.bases))

    def end_loading(self) -> None:
        """Makes the server ready, if its models are."""
        self._is_loading = False
        self.refresh()

    def drain(self) -> None:
        """Reports NOT_SERVING from now on."""
        self._is_draining = True
        self.refresh()

    def close(self) -> None:
        """Ends every Watch; they do not end by themselves."""
        self.is_closed = True
        self.refresh()

    def refresh(self) -> None:
        """Updates the statuses that watchers see, and wakes the watchers if one has changed."""
        shown = {name: self.status(name) for name in self.names()}
        if shown != self._shown or self.is_closed:  # not at every call: there may be many watchers
            self._shown = shown
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def shown_status(self, service: str) -> int:
        """Returns the status at the last refresh."""
        return self._shown.get(service, int(HealthCheckResponse.SERVICE_UNKNOWN))

    async def wait_for_refresh(self) -> None:
        """Waits until a status has changed or the server ends."""
        await self._changed.wait()


class HealthService:
    """Check, Watch and List over `Health`; without state of its own."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(
        self, message: health_pb2.HealthCheckRequest, _call: RemoteCall
    ) -> health_pb2.HealthCheckResponse:
        """Answers with the current status; an unknown name is NOT_FOUND."""
        status = self._health.status(message.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise UnknownModel(f"unknown service {message.service[:100]!r}", name=message.service)
        return HealthCheckResponse(status=status)

    async def Watch(self, message: health_pb2.HealthCheckRequest, call: RemoteCall) -> None:
        """Answers with the current status and every change, until the caller leaves or the server ends."""
        last = None
        while not self._health.is_closed:
            status = self._health.shown_status(message.service)
            if status != last:
                await call.send(HealthCheckResponse(status=status))
                last = status
                continue  # it may have changed while that was sent
            await self._health.wait_for_refresh()

    async def List(
        self, _message: health_pb2.HealthListRequest, _call: RemoteCall
    ) -> health_pb2.HealthListResponse:
        """Answers with every status at once; registered by `grpcio-health-checking` from 1.85 on."""
        statuses = {
            name: HealthCheckResponse(status=self._health.status(name)) for name in self._health.names()
        }
        return health_pb2.HealthListResponse(statuses=statuses)
