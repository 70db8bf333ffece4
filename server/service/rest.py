"""The Open Inference Protocol over HTTP, with Triton's extensions for texts, streams and binary data.

A route runs on the loop of the HTTP port. Its call runs on the loop of gRPC, with the limits, rights, errors
and records that it has there.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.server.errors import InvalidRequest, Overloaded
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.calls import MAX_REQUEST_BYTES, Call, Calls
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
    given_request_id,
    reason_of,
    request_id_of,
    status_of,
)

_SERVICE = "inference.GRPCInferenceService"
_JSON_LENGTH = "Inference-Header-Content-Length"
_BODY_SECONDS = 30.0  # for a caller to send a body
_MAX_UNSENT = 16  # events of a stream
_LARGE_BYTES = 2**16

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
_TRUTHS = ("live", "ready")  # fields of answers that decide over the status

_Answer = TypeVar("_Answer")


class RestService:
    """Owned by the app. Its state belongs to the loop of gRPC, on which it is made.

    Args:
        inference: Answers the calls.
        calls: Opens and counts them.
        access: Refuses callers without the right to a method.
    """

    def __init__(self, inference: InferenceService, calls: Calls, access: Access) -> None:
        self._inference = inference
        self._calls = calls
        self._access = access
        self._loop = asyncio.get_running_loop()

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
            request.state.request_id = request_id = request_id_of(request.headers.items())
            try:
                response = await answer(request)
            except ClientDisconnect:
                response = Response(status_code=_STATUSES[grpc.StatusCode.CANCELLED])
            except Exception as error:
                response = _error_response(error)
            response.headers[REQUEST_ID] = request_id
            return response

        return page

    async def _read(self, method: str, message_class: type[Message], request: Request) -> Response:
        message = message_class(**request.path_params)

        async def work(call: Call) -> Message:
            answer: Message = await getattr(self._inference, method)(message, call)
            return answer

        content = message_dict(await self._answered(request, method, 0, work))
        is_good = all(content.get(name, True) for name in _TRUTHS)
        return JSONResponse(content, 200 if is_good else 503)

    async def _infer(self, request: Request) -> Response:
        body = await _body(request)
        length = request.headers.get(_JSON_LENGTH, str(len(body)))
        if not (length.isascii() and length.isdigit() and int(length) <= len(body)):
            raise InvalidRequest(f"{_JSON_LENGTH} is {length[:100]!r}, of {len(body)} bytes", field="")
        content = read_json(body[: int(length)])
        message = infer_request(content, body[int(length) :])
        binary = binary_outputs(content)
        _name(message, request)
        response = await self._answered(
            request, "ModelInfer", len(body), partial(self._inference.ModelInfer, message)
        )
        answer, raw = infer_answer(response, binary)
        text = _dumped(answer)
        if not raw:
            return Response(text, media_type="application/json")
        headers = {_JSON_LENGTH: str(len(text))}
        return Response(text + raw, media_type="application/octet-stream", headers=headers)

    async def _generate(self, request: Request) -> Response:
        body = await _body(request)
        content = read_json(body)

        async def work(call: Call) -> pb.ModelInferResponse:
            return await self._inference.ModelInfer(self._message(content, request), call)

        response = await self._answered(request, "ModelInfer", len(body), work)
        return Response(_dumped(generate_answer(response)), media_type="application/json")

    async def _generate_stream(self, request: Request) -> Response:
        """Answers with an event for each piece. An error before the first one is the status of the answer."""
        body = await _body(request)
        content = read_json(body)
        events: asyncio.Queue[pb.ModelInferResponse | Exception | None] = asyncio.Queue(_MAX_UNSENT)
        here = asyncio.get_running_loop()

        async def write(response: pb.ModelStreamInferResponse) -> None:
            putting = asyncio.run_coroutine_threadsafe(events.put(response.infer_response), here)
            await asyncio.wrap_future(putting)

        async def work(call: Call) -> None:
            await self._inference.answer_in_stream(self._message(content, request), call, write)

        async def run() -> None:
            try:
                await self._answered(request, "ModelStreamInfer", len(body), work)
            except Exception as error:
                await events.put(error)
            else:
                await events.put(None)

        running = asyncio.create_task(run())
        first = await _unless_gone(request, running, events.get())
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

    def _message(self, content: dict[str, Any], request: Request) -> pb.ModelInferRequest:
        """Returns the message for `generate`; on the loop of gRPC, because it needs the model."""
        name, version = request.path_params["name"], request.path_params.get("version", "")
        message = generate_request(content, self._calls.models.get(name, version))
        _name(message, request)
        return message

    async def _answered(
        self,
        request: Request,
        method: str,
        num_bytes: int,
        work: Callable[[Call], Coroutine[Any, Any, _Answer]],
    ) -> _Answer:
        """Runs a call on the loop of gRPC, and returns its answer; a caller who leaves cancels it.

        Raises:
            ServerError: The call failed.
        """
        running = asyncio.run_coroutine_threadsafe(
            self._settled(_metadata(request), _peer(request), method, num_bytes, work), self._loop
        )
        answering = asyncio.ensure_future(asyncio.wrap_future(running))
        outcome = await _unless_gone(request, answering, answering)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _settled(
        self,
        metadata: tuple[tuple[str, str], ...],
        peer: str,
        method: str,
        num_bytes: int,
        work: Callable[[Call], Coroutine[Any, Any, _Answer]],
    ) -> _Answer | Exception:
        call = self._calls.open(
            _SERVICE, method, metadata=metadata, peer=peer, remaining_seconds=None, write=_write_nothing
        )

        async def answer() -> _Answer:
            self._access.check(f"/{_SERVICE}/{method}", call.caller)
            call.check_id()
            if num_bytes > _LARGE_BYTES:
                self._calls.hold(call, num_bytes)
            return await work(call)

        try:
            return await self._calls.settle(call, answer())
        finally:
            self._calls.close_call(call)


def _name(message: pb.ModelInferRequest, request: Request) -> None:
    """Sets the model of a message from the path."""
    message.model_name = request.path_params["name"]
    message.model_version = request.path_params.get("version", "")


async def _body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises:
        InvalidRequest: It is larger than a message of gRPC may be, or does not come.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_REQUEST_BYTES:
                    raise InvalidRequest(
                        f"the request has more than {MAX_REQUEST_BYTES} bytes: send a smaller one", field=""
                    )
    except TimeoutError:
        raise InvalidRequest(f"the body did not come within {_BODY_SECONDS:g} seconds", field="") from None
    return bytes(body)


async def _unless_gone(request: Request, running: asyncio.Future[Any], wanted: Awaitable[_Answer]) -> _Answer:
    """Returns the result of `wanted`; cancels `running` if the caller leaves first.

    Raises:
        ClientDisconnect: The caller has left.
    """
    waiting = asyncio.ensure_future(wanted)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({waiting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            running.cancel()
            raise ClientDisconnect
        return waiting.result()
    finally:
        leaving.cancel()
        if not waiting.done():
            waiting.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _write_nothing(_message: Message) -> None:
    raise AssertionError("streams over HTTP have events of their own")


def _metadata(request: Request) -> tuple[tuple[str, str], ...]:
    """Returns the headers as metadata, with an id of the request."""
    headers = tuple(request.headers.items())
    has_id = given_request_id(headers) is not None  # a wrong one is refused
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
    if code is grpc.StatusCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(_error_content(error), _STATUSES.get(code, 500), headers)
