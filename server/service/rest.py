"""The Open Inference Protocol over HTTP, with Triton's extensions for texts, streams and binary data.

A route runs on the loop of the HTTP port. Its call runs on the loop of gRPC, with the limits, rights, errors
and records that it has there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.server.errors import InvalidRequest, Overloaded, ServerError, Unavailable
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.calls import MAX_REQUEST_BYTES, Call, Calls
from seq2seq_serve.server.service.lanes import Checkpoint
from seq2seq_serve.server.service.open_inference.json import (
    binary_outputs,
    generate_answer,
    generate_request,
    infer_answer,
    infer_request,
    read_json,
)
from seq2seq_serve.server.service.open_inference.service import InferenceService
from seq2seq_serve.server.service.status import (
    REQUEST_ID,
    reason_of,
    request_id_of,
    status_of,
)

_SERVICE, _GRPC_SERVICE = "http", "inference.GRPCInferenceService"
_JSON, _PLAIN = "application/json", "identity"
_JSON_LENGTH = "Inference-Header-Content-Length"
_BODY_SECONDS = 30.0  # for a caller to send a body
_MAX_UNSENT = 16  # events of a stream
_LARGE_BYTES = 2**16
_MAX_OPEN = 256  # requests
_MAX_DIGITS = 12  # of a length
_JSON_BYTES = 4  # take as long to read as a byte of text

# The statuses of google.rpc.Code
_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# Pages that only read: the path, the method that answers, and its request.
_READS: tuple[tuple[str, str, type[Message]], ...] = (
    ("/v2", "ServerMetadata", pb.ServerMetadataRequest),
    ("/v2/health/live", "ServerLive", pb.ServerLiveRequest),
    ("/v2/health/ready", "ServerReady", pb.ServerReadyRequest),
    ("{model}", "ModelMetadata", pb.ModelMetadataRequest),
    ("{model}/ready", "ModelReady", pb.ModelReadyRequest),
    ("{model}/config", "ModelConfig", pb.ModelConfigRequest),
    ("{model}/stats", "ModelStatistics", pb.ModelStatisticsRequest),
)
_MODEL_PATHS = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
_STATES = ("live", "ready")  # fields of answers that decide over the status

_Answer = TypeVar("_Answer")

_log = logging.getLogger(__name__)


class RestService:
    """Owned by the app. Its routes run on the loop of the HTTP port.

    Args:
        inference: Answers the calls.
        calls: Opens and counts them.
        access: Refuses callers without the right to a method.
    """

    def __init__(self, inference: InferenceService, calls: Calls, access: Access) -> None:
        self._inference = inference
        self._calls = calls
        self._access = access
        self._loop = asyncio.get_running_loop()  # of gRPC
        self._num_open = 0

    def routes(self) -> list[Route]:
        """Returns the routes of every page."""
        reads = [
            Route(path.replace("{model}", model), self._page(partial(self._read, method, message_class)))
            for path, method, message_class in _READS
            for model in (_MODEL_PATHS if "{model}" in path else ("",))
        ]
        writes = [
            Route(f"{model}/{name}", self._page(answer), methods=["POST"])
            for name, answer in (
                ("infer", self._infer),
                ("generate", self._generate),
                ("generate_stream", self._generate_stream),
            )
            for model in _MODEL_PATHS
        ]
        return reads + writes

    def _page(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def page(request: Request) -> Response:
            request.state.request_id = request_id = request_id_of(request.headers.get(REQUEST_ID))
            request.state.is_read = asyncio.Event()
            request.state.is_streamed = request.state.is_logged = False
            self._num_open += 1
            try:
                # The other connections of the port are for probes.
                response = await (answer if self._num_open <= _MAX_OPEN else self._refuse)(request)
            except ClientDisconnect:
                response = Response(status_code=_STATUSES[grpc.StatusCode.CANCELLED])
            except Exception as error:
                if not (isinstance(error, ServerError) or request.state.is_logged):
                    _log.exception("%s: a bug", request_id)
                response = _error_response(error)
            finally:
                if not request.state.is_streamed:
                    self._num_open -= 1
            response.headers[REQUEST_ID] = request_id
            return response

        return page

    async def _refuse(self, request: Request) -> Response:
        async def work(_call: Call) -> Response:
            raise Overloaded(f"{_MAX_OPEN} requests over HTTP are open", retry_after_seconds=1.0)

        return await self._answered(request, "ModelInfer", work)

    async def _read(self, method: str, message_class: type[Message], request: Request) -> Response:
        message = message_class(**request.path_params)
        request.state.is_read.set()

        async def work(call: Call) -> dict[str, Any]:
            return message_dict(await getattr(self._inference, method)(message, call))

        content = await self._answered(request, method, work)
        is_good = all(content.get(name, True) for name in _STATES)
        return JSONResponse(content, 200 if is_good else 503)

    async def _infer(self, request: Request) -> Response:
        async def work(call: Call) -> Response:
            body = await self._body(request, call)
            read = partial(_infer_message, body, request.headers.get(_JSON_LENGTH))
            message, binary = await call.read(read, len(body) // _JSON_BYTES)
            del body, read
            _set_model(message, request)
            response = await self._inference.ModelInfer(message, call)
            return await call.built(response.ByteSize(), partial(_infer_response, response, binary))

        return await self._answered(request, "ModelInfer", work)

    async def _generate(self, request: Request) -> Response:
        async def work(call: Call) -> Response:
            message = await self._generate_message(request, call)
            response = await self._inference.ModelInfer(message, call)

            def build() -> Response:
                return Response(_dumped(generate_answer(response)), media_type=_JSON)

            return await call.built(response.ByteSize(), build)

        return await self._answered(request, "ModelInfer", work)

    async def _generate_stream(self, request: Request) -> Response:
        """Answers with an event for each piece. An error before the first one is the status of the answer."""
        events: asyncio.Queue[pb.ModelInferResponse | Exception | None] = asyncio.Queue(_MAX_UNSENT)
        here = asyncio.get_running_loop()

        async def write(response: pb.ModelStreamInferResponse) -> None:
            putting = asyncio.run_coroutine_threadsafe(events.put(response.infer_response), here)
            await asyncio.wrap_future(putting)

        async def work(call: Call) -> None:
            message = await self._generate_message(request, call)
            await self._inference.answer_in_stream(message, call, write)

        async def run() -> None:
            try:
                await self._answered(request, "ModelStreamInfer", work)
            except ClientDisconnect as error:
                with suppress(asyncio.QueueFull):  # nobody reads the events then
                    events.put_nowait(error)
            except Exception as error:
                await events.put(error)
            else:
                await events.put(None)
            finally:
                self._num_open -= 1

        request.state.is_streamed = True
        running = asyncio.create_task(run())
        first = await events.get()
        if isinstance(first, Exception):
            raise first

        async def stream() -> AsyncIterator[bytes]:
            event: pb.ModelInferResponse | Exception | None = first
            try:
                while isinstance(event, pb.ModelInferResponse):
                    yield _event(generate_answer(event))
                    event = await events.get()
                if event is not None:
                    yield _event(_error_content(event))
            finally:
                running.cancel()

        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)

    async def _generate_message(self, request: Request, call: Call) -> pb.ModelInferRequest:
        body = await self._body(request, call)
        with call.using(request.path_params["name"], request.path_params.get("version", "")) as model:

            def read(_: Checkpoint) -> pb.ModelInferRequest:
                return generate_request(read_json(body), model)

            message = await call.read(read, len(body) // _JSON_BYTES)
        _set_model(message, request)
        return message

    async def _body(self, request: Request, call: Call) -> bytes:
        """Reads the body of a request, whose length counts as that of a message.

        Raises:
            CancelledError: The caller has left.
            InvalidRequest: The body is larger than a message of gRPC may be, or does not come.
            Overloaded: Too many large requests are open.
        """
        encoding = request.headers.get("content-encoding", _PLAIN)
        if encoding != _PLAIN:
            raise InvalidRequest(
                f"the body is compressed ({encoding[:100]}): send it without compression", field=""
            )
        length = request.headers.get("content-length", str(MAX_REQUEST_BYTES))
        if len(length) > _MAX_DIGITS or int(length) > MAX_REQUEST_BYTES:
            raise _too_large()
        if int(length) > _LARGE_BYTES:
            self._calls.hold(call, int(length))
        reading = asyncio.run_coroutine_threadsafe(_read_body(request), request.state.loop)
        try:
            return await asyncio.wrap_future(reading)
        except ClientDisconnect:
            raise asyncio.CancelledError from None

    async def _answered(
        self, request: Request, method: str, work: Callable[[Call], Coroutine[Any, Any, _Answer]]
    ) -> _Answer:
        """Runs a call on the loop of gRPC, and returns its answer; a caller who leaves cancels it.

        Raises:
            ServerError: The call failed.
            ClientDisconnect: The caller has left.
        """
        request.state.loop = asyncio.get_running_loop()
        settling = self._settled(_metadata(request), _peer(request), method, work)
        answering = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(settling, self._loop))
        leaving = asyncio.create_task(_left(request))
        waiting: set[asyncio.Future[Any]] = {answering, leaving}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() or answering.cancelled():
                raise ClientDisconnect
            outcome = answering.result()
        finally:
            leaving.cancel()
            answering.cancel()
        if isinstance(outcome, Exception):
            request.state.is_logged = True
            raise outcome
        return outcome

    async def _settled(
        self,
        metadata: tuple[tuple[str, str], ...],
        peer: str,
        method: str,
        work: Callable[[Call], Coroutine[Any, Any, _Answer]],
    ) -> _Answer | Exception:
        call = self._calls.open(
            _SERVICE, method, metadata=metadata, peer=peer, remaining_seconds=None, write=_write_nothing
        )

        async def answer() -> _Answer:
            self._access.check(f"/{_GRPC_SERVICE}/{method}", call.caller)
            if call.refusal is not None:
                raise call.refusal
            return await work(call)

        try:
            return await self._calls.settle(call, answer())
        finally:
            self._calls.close_call(call)


def _set_model(message: pb.ModelInferRequest, request: Request) -> None:
    """Sets the model of a message from the path."""
    message.model_name = request.path_params["name"]
    message.model_version = request.path_params.get("version", "")


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_REQUEST_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise InvalidRequest(f"the body did not come within {_BODY_SECONDS:g} seconds", field="") from None
    request.state.is_read.set()
    return bytes(body)


def _too_large() -> InvalidRequest:
    return InvalidRequest(f"the request has more than {MAX_REQUEST_BYTES} bytes: send less", field="")


async def _left(request: Request) -> None:
    """Waits until the caller has left; while the body is read, its reader notices that."""
    await request.state.is_read.wait()
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _infer_message(
    body: bytes, given_length: str | None, _: Checkpoint
) -> tuple[pb.ModelInferRequest, set[str] | None]:
    length = str(len(body)) if given_length is None else given_length
    is_number = length.isascii() and length.isdigit() and len(length) <= _MAX_DIGITS
    if not is_number or int(length) > len(body):
        raise InvalidRequest(
            f"{_JSON_LENGTH} is {length[:100]!r}, and must be at most {len(body)}, the body's length",
            field="",
        )
    content = read_json(body[: int(length)])
    return infer_request(content, body[int(length) :]), binary_outputs(content)


def _infer_response(response: pb.ModelInferResponse, binary: set[str] | None) -> Response:
    answer, raw = infer_answer(response, binary)
    text = _dumped(answer)
    if not raw:
        return Response(text, media_type=_JSON)
    headers = {_JSON_LENGTH: str(len(text))}
    return Response(text + raw, media_type="application/octet-stream", headers=headers)


async def _write_nothing(_message: Message) -> None:
    raise AssertionError("streams over HTTP have events of their own")


def _metadata(request: Request) -> tuple[tuple[str, str], ...]:
    """Returns the headers as metadata, with an id of the request."""
    headers = tuple(request.headers.items())
    has_id = REQUEST_ID in request.headers  # a wrong one is refused
    return headers if has_id else (*headers, (REQUEST_ID, request.state.request_id))


def _peer(request: Request) -> str:
    """Returns the caller as gRPC names the other end of a connection."""
    if request.client is None:
        return ""
    host, port = request.client.host, request.client.port
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + _dumped(content) + b"\n\n"


def _dumped(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def _error_content(error: Exception) -> dict[str, Any]:
    code, text = status_of(error)
    content = {"error": text, "code": code.name, "reason": reason_of(error)}
    if isinstance(error, InvalidRequest):
        content["field"] = error.field
    return content


def _error_response(error: Exception) -> Response:
    code, _ = status_of(error)
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
    if isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(_error_content(error), _STATUSES.get(code, 500), headers)
