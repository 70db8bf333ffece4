"""The Open Inference Protocol over HTTP, with Triton's extensions for texts, streams and binary data.

A call has the limits, rights, errors and records that calls have over gRPC.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message as ASGIMessage
from starlette.types import Receive, Scope, Send

from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.server.config import OpenAINames
from seq2seq_serve.server.errors import (
    InvalidRequest,
    Overloaded,
    TooLarge,
    Unauthenticated,
    Unavailable,
    UnknownPage,
)
from seq2seq_serve.server.http import ErrorForm, error_content
from seq2seq_serve.server.models.adapters import PAGE_NAMES
from seq2seq_serve.server.service import openai
from seq2seq_serve.server.service.calls import MAX_REQUEST_BYTES, SMALL_REQUEST_BYTES, Calls, RemoteCall
from seq2seq_serve.server.service.compression import Decompressor, compressed
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.forms import ENCODED, MAX_ENCODED_BYTES
from seq2seq_serve.server.service.libretranslate import pages as libretranslate
from seq2seq_serve.server.service.libretranslate.fields import KEY, Fields, read_fields
from seq2seq_serve.server.service.libretranslate.files import TranslatedFiles
from seq2seq_serve.server.service.open_inference.answers import Answer
from seq2seq_serve.server.service.open_inference.json import (
    binary_outputs,
    generate_answer,
    generate_request,
    infer_answer,
    infer_request,
    read_json,
    repository_request,
)
from seq2seq_serve.server.service.open_inference.service import InferenceService
from seq2seq_serve.server.service.shares import Room, Shares
from seq2seq_serve.server.service.status import (
    REQUEST_ID,
    status_of,
)

_SERVICE, _GRPC_SERVICE = "http", "inference.GRPCInferenceService"
_JSON = "application/json"
_JSON_LENGTH = "Inference-Header-Content-Length"
_BODY_SECONDS = 30.0  # for a caller to send a body, and longer for
_LEAST_BYTES_PER_SECOND = 2**17  # of a long one
_MAX_OPEN = 256  # requests, shared by the callers
# Bytes of bodies in which the keys of their callers may be; short ones are not counted
_MAX_STRANGERS_BYTES, _SHORT_BYTES = 2**24, 2**16
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
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TOO_LARGE = 413
# Pages that only read: the path, the method that answers, and its request.
_READS: tuple[tuple[str, str, type[Message]], ...] = (
    ("/v2", "ServerMetadata", pb.ServerMetadataRequest),
    ("/v2/health/live", "ServerLive", pb.ServerLiveRequest),
    ("/v2/health/ready", "ServerReady", pb.ServerReadyRequest),
    ("/v2/models/stats", "ModelStatistics", pb.ModelStatisticsRequest),  # hides a model of that name
    ("{model}", "ModelMetadata", pb.ModelMetadataRequest),
    ("{model}/ready", "ModelReady", pb.ModelReadyRequest),
    ("{model}/config", "ModelConfig", pb.ModelConfigRequest),
    ("{model}/stats", "ModelStatistics", pb.ModelStatisticsRequest),
)


class _ModelName(StringConvertor):
    """The name of a model in a path, or BASE/NAME of an adapter, whose slash may be encoded.

    NAME is not the last part of a page of the model BASE.
    """

    regex = f"[^/]+(?:/(?!(?:{'|'.join(PAGE_NAMES)})(?:/|$))[^/]+)?"


register_url_convertor("model", _ModelName())
_MODEL_PATHS = ("/v2/models/{name:model}", "/v2/models/{name:model}/versions/{version}")
_PAGES = (
    "send requests to /v2/models/NAME/infer, generate or generate_stream; shared memory, traces and log "
    "settings are not supported"
)
# Pages of the repository: the path, the method that answers, and its request.
_CHANGES: tuple[tuple[str, str, type[Message]], ...] = (
    ("/v2/repository/index", "RepositoryIndex", pb.RepositoryIndexRequest),
    ("/v2/repository/models/{model_name:model}/load", "RepositoryModelLoad", pb.RepositoryModelLoadRequest),
    (
        "/v2/repository/models/{model_name:model}/unload",
        "RepositoryModelUnload",
        pb.RepositoryModelUnloadRequest,
    ),
)
_STATES = ("live", "ready")  # fields of answers that decide over the status


class _Events:
    """The events of an answer in pieces. The first one brings the status of the answer.

    Owned by its page.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.has_begun = False

    async def write(self, content: dict[str, Any]) -> None:
        """Sends a short event; as `write_json`."""
        await self.write_json(_dumped(content))

    async def write_json(self, content: bytes) -> None:
        """Sends an event, as soon as the caller has room for it."""
        if not self.has_begun:
            self.has_begun = True
            headers = {"Cache-Control": "no-cache", REQUEST_ID: self._request_id}
            start = Response(headers=headers, media_type="text/event-stream")
            del start.headers["content-length"]
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": start.raw_headers},
            )
        event = b"data: " + content + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """Ends the answer."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


ErrorContent = Callable[[Exception], dict[str, Any]]
Handler = Callable[[Request, RemoteCall, _Events], Awaitable[Response | None]]
LibreHandler = Callable[[Fields, Request, RemoteCall], Awaitable[Response]]


@dataclass(frozen=True)
class _Page:
    """Answers the requests of a route, as `server.service.rpcs` does those of a gRPC method.

    Invariant: the caller's rights are checked before its body is read, unless its token may be in there. Its
    share of the open requests is checked when some of the body has come.

    Attributes:
        rest: Owns it.
        method: The method of gRPC with the same rights and metrics.
        answer: Returns the answer, or None after it has written events.
        error_content: Returns the body of a refusal.
        reads_token: Whether a caller's token may be in the body; `answer` then checks the rights.
    """

    rest: RestService
    method: str
    answer: Handler
    error_content: ErrorContent
    reads_token: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        calls = self.rest.calls
        call = calls.open(
            _SERVICE,
            self.method,
            metadata=tuple(request.headers.items()),
            peer=peer_of(request),
            remaining_seconds=None,
            write=_write_nothing,
        )
        events = _Events(send, call.request_id)

        async def work() -> Response | None:
            if call.caller.has_token or not self.reads_token:
                calls.access.check(f"/{_GRPC_SERVICE}/{self.method}", call.caller)
            if call.refusal is not None:
                raise call.refusal
            with ExitStack() as request.state.opened:
                response = await self.answer(request, call, events)
            calls.hold(call, 0 if response is None else len(response.body))
            return response

        try:
            try:
                outcome = await calls.run(call, work())
            finally:
                if (leaving := getattr(request.state, "leaving", None)) is not None:
                    leaving.cancel()
                calls.close_call(call)
            if events.has_begun:
                if isinstance(outcome, Exception):
                    await events.write(self.error_content(outcome))
                await events.end()
                return
            if isinstance(outcome, Exception):
                response: Response | None = error_response(outcome, self.error_content(outcome))
            else:
                response = outcome
            assert response is not None
            response.headers[REQUEST_ID] = call.request_id
            await response(scope, receive, partial(_send_and_wait, send) if call.held else send)
        except asyncio.CancelledError:  # the caller has left
            return
        finally:
            calls.let_go(call)


class RestService:
    """Owned by the app; used on the event loop only.

    Args:
        inference: Answers the calls.
        calls: Opens and counts them.
        openai_names: Which names of models OpenAI's pages take.

    Attributes:
        open: The number of open requests by caller.
    """

    def __init__(self, inference: InferenceService, calls: Calls, openai_names: OpenAINames) -> None:
        self.calls = calls
        self._openai_names = openai_names
        self._inference = inference
        self._files = TranslatedFiles()
        self.open = Shares(_MAX_OPEN, "{} requests over HTTP are open")
        self._strangers = Shares(
            _MAX_STRANGERS_BYTES,
            "bodies of {} bytes come from callers with a key neither in header nor query",
        )

    def routes(self) -> list[Route]:
        """Returns the routes of every page."""
        routes: list[Route] = []

        def add(
            verb: str, path: str, method: str, answer: Handler, error_content: ErrorContent = _error_content
        ) -> None:
            page = _Page(self, method, answer, error_content)
            paths = [path.replace("{model}", model) for model in _MODEL_PATHS]
            routes.extend(Route(one, page, methods=[verb]) for one in dict.fromkeys(paths))

        for path, method, message_class in _READS:
            add("GET", path, method, partial(self._read, method, message_class))
        for path, method, message_class in _CHANGES:
            add("POST", path, method, partial(self._change, method, message_class))
        add("POST", "{model}/infer", "ModelInfer", self._infer)
        add("POST", "{model}/generate", "ModelInfer", self._generate)
        add("POST", "{model}/generate_stream", "ModelStreamInfer", self._generate_stream)
        add("POST", "/v1/models/{name:model}:predict", "ModelInfer", _older_version)
        for name, task in (("transcriptions", "transcribe"), ("translations", "translate")):
            add("POST", f"/v1/audio/{name}", "ModelInfer", partial(self._hear, task), openai.error_content)
        add("GET", "/v1/models", "ServerMetadata", self._models, openai.error_content)
        add("GET", "/v1/models/{name:model}", "ModelMetadata", self._models, openai.error_content)
        for name, most, libre_answer in (
            ("translate", MAX_REQUEST_BYTES, libretranslate.translate),
            ("translate_file", libretranslate.MAX_FILE_BYTES, self._translate_file),
            ("detect", MAX_REQUEST_BYTES, libretranslate.detect),
        ):
            answer = partial(self._libretranslate, libre_answer, most)
            page = _Page(self, "ModelInfer", answer, _error_content, reads_token=True)
            routes.append(Route(f"/{name}", page, methods=["POST"]))
        # LibreTranslate's programs send no token for these.
        add("GET", "/languages", "ServerLive", self._languages)
        add("GET", "/frontend/settings", "ServerLive", self._settings)
        add("GET", "/spec", "ServerLive", self._specification)
        add("GET", "/download_file/{name}", "ServerLive", self._download)
        return routes

    def error_forms(self) -> list[ErrorForm]:
        """Returns the forms of errors outside of the pages, such as that of an unknown page."""
        return [
            ErrorForm(["/v1"], openai.refusal_content, openai.PAGES),
            ErrorForm(libretranslate.PATHS, error_content, libretranslate.PAGES),
            ErrorForm(["/v2"], error_content, _PAGES),
        ]

    async def _read(
        self, method: str, message_class: type[Message], request: Request, call: RemoteCall, _: _Events
    ) -> Response:
        if method == "ModelReady":  # over gRPC an unknown model is not ready
            async with call.calls.models.use(
                call, request.path_params["name"], request.path_params.get("version", "")
            ):
                pass
        content = message_dict(
            await getattr(self._inference, method)(message_class(**request.path_params), call)
        )
        is_good = all(content.get(name, True) for name in _STATES)
        return JSONResponse(content, 200 if is_good else 503)

    async def _change(
        self, method: str, message_class: type[Message], request: Request, call: RemoteCall, _: _Events
    ) -> Response:
        body = await self._body(request, call, SMALL_REQUEST_BYTES)
        message = repository_request(read_json(body) if body else {}, message_class, **request.path_params)
        content = message_dict(await getattr(self._inference, method)(message, call))
        return JSONResponse(content["models"]) if method == "RepositoryIndex" else Response()

    async def _infer(self, request: Request, call: RemoteCall, _: _Events) -> Response:
        body = await self._body(request, call)
        read = partial(_infer_message, body, request.headers.get(_JSON_LENGTH))
        message, binary = await call.read(read, len(body) // _JSON_BYTES)
        del body, read
        _set_model(message, request)
        accepted = request.headers.get("accept-encoding", "")
        make = partial(_infer_response, binary=binary, accepted=accepted)
        return await self._inference.infer(message, call, make)

    async def _generate(self, request: Request, call: RemoteCall, _: _Events) -> Response:
        message = await self._generate_message(request, call)
        return Response(await self._inference.infer(message, call, _generated), media_type=_JSON)

    async def _generate_stream(self, request: Request, call: RemoteCall, events: _Events) -> None:
        message = await self._generate_message(request, call)
        await self._inference.infer_in_stream(message, call, _generated, events.write_json)

    async def _generate_message(self, request: Request, call: RemoteCall) -> pb.ModelInferRequest:
        body = await self._body(request, call)
        async with call.calls.models.use(
            call, request.path_params["name"], request.path_params.get("version", "")
        ) as model:

            def read(_: YieldPoint) -> pb.ModelInferRequest:
                return generate_request(read_json(body), model)

            message = await call.read(read, len(body) // _JSON_BYTES)
        _set_model(message, request)
        return message

    async def _hear(self, task: str, request: Request, call: RemoteCall, events: _Events) -> Response | None:
        body = await self._body(request, call, openai.MAX_FILE_BYTES)
        form = await openai.form_of(request, body, call)
        del body
        return await openai.transcribe(form, task, call, events.write_json, self._openai_names)

    async def _models(self, request: Request, call: RemoteCall, _: _Events) -> Response:
        name = request.path_params.get("name")
        return openai.models(call) if name is None else await openai.model(name, call)

    async def _libretranslate(
        self, answer: LibreHandler, most: int, request: Request, call: RemoteCall, _: _Events
    ) -> Response:
        access = self.calls.access
        if not call.caller.has_token:
            call.caller = access.with_token(call.caller, request.query_params.get(KEY, ""))
        is_stranger = access.has_tokens and not call.caller.has_token
        with self._strangers.add(call.caller.name, 0) as room:
            body = await self._body(request, call, most, room if is_stranger else None)
            fields = await read_fields(request, body, call)
            del body
            if not call.caller.has_token:
                call.caller = access.with_token(call.caller, fields.key)
                try:
                    access.check(f"/{_GRPC_SERVICE}/{call.method}", call.caller)
                except Unauthenticated:
                    text = libretranslate.WRONG_KEY if fields.key else libretranslate.NO_KEY
                    raise Unauthenticated(text) from None
        return await answer(fields, request, call)

    async def _translate_file(self, fields: Fields, request: Request, call: RemoteCall) -> Response:
        return await libretranslate.translate_file(fields, request, call, self._files)

    async def _languages(self, _request: Request, call: RemoteCall, _: _Events) -> Response:
        return await libretranslate.languages(call)

    async def _settings(self, _request: Request, call: RemoteCall, _: _Events) -> Response:
        return await libretranslate.settings(call)

    async def _specification(self, _request: Request, _call: RemoteCall, _: _Events) -> Response:
        return libretranslate.specification()

    async def _download(self, request: Request, _call: RemoteCall, _: _Events) -> Response:
        return self._files.answer(request.path_params["name"])

    async def _body(
        self,
        request: Request,
        call: RemoteCall,
        most: int = MAX_REQUEST_BYTES,
        strangers: Room | None = None,
    ) -> bytes:
        """Reads the body of a request, of `most` bytes, whose length counts as that of a message.

        It also counts in the room of `strangers`, unless it is short.

        A body in chunks counts as it comes, and has as long to come as one with the same length. A compressed
        one may have `most` bytes on both sides, and counts as it is decompressed. A form that
        writes each byte as three has less room. A caller who leaves afterwards cancels the task.

        Raises:
            CancelledError: The caller has left.
            InvalidRequest: The body is damaged, too large, or does not come.
            Overloaded: Too many large requests are open, or come from strangers.
            Unavailable: The server drains.
        """
        decompressor = Decompressor(request.headers.get("content-encoding", ""))
        length = int(request.headers.get("content-length", "0"))  # 0 also for a body in chunks
        if ENCODED in request.headers.get("content-type", "").lower():
            most = min(most, MAX_ENCODED_BYTES)
        body, parts = bytearray(), request.stream()
        room = self.calls.held.add(call.caller.name, 0)
        clock, seconds = asyncio.get_running_loop().time, 0.0
        begin, num_bytes, num_received = clock(), length, 0
        try:
            async with asyncio.timeout(None) as limit:
                while True:
                    if num_bytes > most:
                        raise TooLarge(f"the request has more than {most} bytes: send less", field="")
                    seconds = _BODY_SECONDS + num_bytes / _LEAST_BYTES_PER_SECOND
                    if not limit.expired():
                        limit.reschedule(begin + seconds)
                    if decompressor.is_waiting:
                        part = await self.calls.next_message(parts)
                        if part is None:
                            break
                        if not num_received:  # the first part: before it, the call holds no share
                            request.state.opened.enter_context(self.open.take(call.caller.name, 1))
                        num_received += len(part)
                        decompressor.add(part)
                    else:
                        await asyncio.sleep(0)  # other callers' turn
                    body += decompressor.next_bytes()
                    num_bytes = max(length, num_received, len(body))
                    if num_bytes > SMALL_REQUEST_BYTES:
                        room.grow(num_bytes)
                        call.held = [room]
                    if strangers is not None and num_bytes > _SHORT_BYTES:
                        strangers.grow(num_bytes)
        except TimeoutError:
            raise InvalidRequest(f"the body did not arrive within {seconds:.0f} seconds", field="") from None
        except ClientDisconnect:
            raise asyncio.CancelledError from None
        decompressor.end()
        task = asyncio.current_task()
        assert task is not None
        request.state.leaving = asyncio.create_task(_cancel_after_leaving(request, task))
        return bytes(body)


async def _older_version(request: Request, _call: RemoteCall, _: _Events) -> Response:
    """Refuses a caller of KServe's first protocol."""
    name = request.path_params["name"][:100]
    text = f"version 1 of KServe's protocol is not served: send version 2 to /v2/models/{name}/infer"
    raise UnknownPage(text)


async def _send_and_wait(send: Send, message: ASGIMessage) -> None:
    """Sends a part of a large answer, and waits until its caller has taken most of the body."""
    if message["type"] == "http.response.start":
        await send(message)
        return
    await send({**message, "more_body": True})
    await send({"type": "http.response.body"})  # uvicorn waits for room before it sends even nothing


async def _cancel_after_leaving(request: Request, task: asyncio.Task[Any]) -> None:
    """Cancels the task that answers a request, once its caller has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()


def _set_model(message: pb.ModelInferRequest, request: Request) -> None:
    """Sets the model of a message from the path.

    Raises:
        InvalidRequest: The body names another one.
    """
    name = request.path_params["name"]
    if message.model_name not in ("", name):
        raise InvalidRequest(
            f"model_name is {message.model_name[:100]!r}, and the path has {name[:100]!r}", field="model_name"
        )
    message.model_name = name
    message.model_version = request.path_params.get("version", "")


def _generated(answer: Answer) -> bytes:
    return _dumped(generate_answer(answer))


def _infer_message(
    body: bytes, given_length: str | None, _: YieldPoint
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


def _infer_response(answer: Answer, binary: set[str] | None, accepted: str) -> Response:
    content, raw = infer_answer(answer, binary)
    text = _dumped(content)
    body, headers = compressed(text + raw, accepted)
    if not raw:
        return Response(body, media_type=_JSON, headers=headers)
    headers[_JSON_LENGTH] = str(len(text))
    return Response(body, media_type="application/octet-stream", headers=headers)


async def _write_nothing(_message: Message) -> None:
    raise AssertionError("streams over HTTP have events of their own")


def peer_of(request: HTTPConnection) -> str:
    """Returns the caller as gRPC names the other end of a connection."""
    if request.client is None:
        return ""
    host, port = request.client.host, request.client.port
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _dumped(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def _error_content(error: Exception) -> dict[str, Any]:
    code, text, reason, field = status_of(error)
    content = {"error": text, "code": code.name, "reason": reason}
    return content if field is None else content | {"field": field}


def error_response(error: Exception, content: dict[str, Any]) -> Response:
    """Returns the answer to a call that is refused or fails, with this body."""
    code = status_of(error).code
    headers = {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
    if isinstance(error, Unavailable):
        headers["Retry-After"] = "1"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    status = _TOO_LARGE if isinstance(error, TooLarge) else _STATUSES.get(code, 500)
    return JSONResponse(content, status, headers)
