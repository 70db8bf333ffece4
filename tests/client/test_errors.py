import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived

from seq2seq_serve.client import AsyncClient, Client, ClientError, FieldViolation
from seq2seq_serve.protos.seq2seq_v1_pb2 import BatchError


class Failure(grpc.RpcError):
    """As gRPC raises it, without trailers that fit."""

    def __init__(self, code, details, trailers=()):
        self._code, self._details, self._trailers = code, details, trailers

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailers


def test_details_that_do_not_fit_the_status_are_left_out():
    """A server's answer and gRPC's own deadline may cross."""
    status = status_pb2.Status(code=4, message="the deadline passed")
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    failure = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed", trailers)
    error = ClientError.from_rpc(failure, "here")
    assert (error.code, error.message) == (
        "DEADLINE_EXCEEDED",
        "Stream removed: a longer timeout_seconds may help",
    )


def test_a_deadline_names_the_argument_that_sets_it():
    failure = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)", ())
    text = "DEADLINE_EXCEEDED: no answer came within timeout_seconds"
    assert str(ClientError.from_rpc(failure, "here")) == text
    of_item = BatchError(code="DEADLINE_EXCEEDED", message="the deadline passed")
    assert "timeout_seconds" in ClientError.from_batch(of_item).message


@pytest.mark.parametrize(
    ("address", "details", "message"),
    [
        ("host", "refused", "try host:50051"),
        ("localhost:5", "ipv6:%5B::1%5D:5: refused", "try 127.0.0.1:5"),
    ],
)
def test_an_unreached_server_is_reported_with_what_may_help(address, details, message):
    error = ClientError.from_rpc(Failure(grpc.StatusCode.UNAVAILABLE, details), address)
    assert error.code == "UNAVAILABLE"
    assert f" {address} ({details})" in error.message
    assert error.message.endswith(message)


def test_a_server_that_is_about_to_end_is_called_where_another_does_not_listen():
    """Of two addresses, gRPC reports the error of either; the client only knew that of the health check."""
    server = grpc.server(ThreadPoolExecutor())
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for _ in range(20):
            address = f"ipv4:127.0.0.1:{closed.getsockname()[1]},127.0.0.1:{port}"
            with Client(address) as client, pytest.raises(ClientError, match="UNIMPLEMENTED"):
                client.generate("abc")  # the server itself has answered
    server.stop(None).wait()


@asynccontextmanager
async def proxy_that_loses_servers(error_code):
    """A port that answers a stream with headers, and then resets it, as a proxy whose server dies."""
    writers = []

    async def serve(reader, writer):
        writers.append(writer)
        connection = H2Connection(H2Configuration(client_side=False, header_encoding="ascii"))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                if not isinstance(event, RequestReceived):
                    continue
                if dict(event.headers)[":path"].startswith("/grpc.health"):
                    connection.send_headers(event.stream_id, [(":status", "404")], end_stream=True)
                else:
                    answer = [(":status", "200"), ("content-type", "application/grpc")]
                    connection.send_headers(event.stream_id, answer)
                    connection.reset_stream(event.stream_id, error_code)
            writer.write(connection.data_to_send())

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
        for writer in writers:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("reset", "grpc_code", "expected"),
    [
        (ErrorCodes.INTERNAL_ERROR, "INTERNAL", "UNAVAILABLE"),  # Envoy and nginx
        (ErrorCodes.CANCEL, "CANCELLED", "UNAVAILABLE"),  # HAProxy
        (ErrorCodes.PROTOCOL_ERROR, "INTERNAL", "INTERNAL"),  # a retry would end alike
    ],
)
async def test_a_stream_whose_server_a_proxy_has_lost_asks_for_a_retry(reset, grpc_code, expected):
    async with proxy_that_loses_servers(reset) as address, AsyncClient(address) as client:
        with pytest.raises(ClientError, match=f"^{expected}: .*error code {reset.value}") as raised:
            await anext(client.stream("abc"))
        assert raised.value.__cause__.code().name == grpc_code


def test_a_reset_that_the_server_itself_explains_keeps_its_status():
    trailers = (("x-request-id", "r1"),)
    failure = Failure(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", trailers)
    assert ClientError.from_rpc(failure, "here").code == "INTERNAL"


@pytest.mark.parametrize(
    ("code", "fields", "expected"),
    [
        ("INVALID_ARGUMENT", ["sources[0].text"], True),
        ("INVALID_ARGUMENT", ["options"], True),  # a too long answer
        ("INVALID_ARGUMENT", ["options.top_k"], False),
        ("INVALID_ARGUMENT", ["sources", "options.top_k"], False),
        ("INTERNAL", [], False),
    ],
)
def test_an_error_about_one_text_is_told_from_one_about_the_options(code, fields, expected):
    violations = tuple(FieldViolation(field, "") for field in fields)
    assert ClientError(code, "", field_violations=violations).is_about_the_text is expected
