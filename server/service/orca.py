"""Reports the server's load to balancers by ORCA (gRFC A51): in trailers, and in a stream of its own.

gRPC's `weighted_round_robin` (gRFC A58) and Envoy's `client_side_weighted_round_robin` read the reports. They
send each server calls in proportion to its calls a second, divided by its utilization. By Little's law this
is the calls a second that would fill its slots. So larger and faster servers get more.
"""

from __future__ import annotations

import asyncio
import time

import grpc

from seq2seq_serve.protos.orca_pb2 import LoadReport, LoadReportRequest
from seq2seq_serve.server.models.served import Models
from seq2seq_serve.server.service.calls import Call
from seq2seq_serve.server.service.health import Health
from seq2seq_serve.server.service.status import Trailers
from seq2seq_serve.server.statistics import correction_at_end

LOAD_SERVICE = "xds.service.orca.v3.OpenRcaService"
_TRAILER = "endpoint-load-metrics-bin"
_LEAST_SECONDS = 1.0  # between two reports of a stream


def load_report(models: Models) -> LoadReport:
    """Returns the calls a second of all models, and the utilization of the busiest one."""
    report = LoadReport()
    for model in models:
        calls_per_second, slots_wanted = model.deliveries.recent_load.averages()
        report.rps_fractional += calls_per_second
        utilization = slots_wanted / model.num_slots
        report.application_utilization = max(report.application_utilization, utilization)
    return report


def load_trailers(call: Call) -> Trailers:
    """Returns the trailing metadata of a call that has ended."""
    report = load_report(call.models)
    if call.work.mode:  # it used slots
        report.rps_fractional += correction_at_end(time.monotonic() - call.arrival)
    return ((_TRAILER, report.SerializeToString()),)


class LoadService:
    """`OpenRcaService`, which reports the load for as long as the caller stays; without state of its own."""

    def __init__(self, models: Models, health: Health) -> None:
        self._models = models
        self._health = health

    async def stream(self, message: LoadReportRequest, call: Call) -> None:
        """Sends a report at once and after each interval, until the caller leaves or the server ends."""
        interval = message.report_interval
        seconds = max(_LEAST_SECONDS, interval.seconds + interval.nanos / 1e9)
        while not self._health.is_closed:
            await call.send(load_report(self._models))
            try:
                async with asyncio.timeout(seconds):
                    while not self._health.is_closed:
                        await self._health.wait_for_refresh()
            except TimeoutError:
                continue

    def handlers(self) -> grpc.GenericRpcHandler:
        """Returns the handlers for gRPC's server, under the names of xDS."""
        method = grpc.unary_stream_rpc_method_handler(
            self.stream,
            request_deserializer=LoadReportRequest.FromString,
            response_serializer=LoadReport.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(LOAD_SERVICE, {"StreamCoreMetrics": method})
