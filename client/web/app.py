"""The web server of the page: `python -m client web`.

It serves the page's own files, and passes its requests on to a model server. The page's policy forbids the
browser to fetch anything from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import logging
import math
import os
import socket
import sys
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn import Config, Server

from seq2seq_serve import __version__
from seq2seq_serve.bundle.pictures import read_shown_frames
from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.forms import FEATURES, command_of
from seq2seq_serve.client.output import attention_dict, error_dict, event_dict
from seq2seq_serve.client.questions import read_features
from seq2seq_serve.client.wire import MAX_REQUEST_BYTES
from seq2seq_serve.origins import is_address, named_host, own_names
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse, Sentence, Target, TokenIds
from seq2seq_serve.protos.sources import Value

PAGE = Path(__file__).parent / "page"
_MAX_BODY_BYTES = 2 * MAX_REQUEST_BYTES  # files are base64 in JSON
_MAX_MESSAGE_BYTES = 2**20  # of a WebSocket: a tenth of a second is some kilobytes
_MAX_FRAMES, _FRAME_PIXELS = 256, 160
_METRICS_SECONDS = 3.0
_LEAST_URGENT = 10
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# The metrics of the page's panel
_SHOWN = (
    "seq2seq_time_to_first_token_seconds",
    "seq2seq_inter_token_latency_seconds",
    "seq2seq_e2e_request_latency_seconds",
    "seq2seq_generation_tokens",
    "seq2seq_num_requests_running",
    "seq2seq_num_requests_waiting",
    "seq2seq_slots_in_use",
    "seq2seq_slots",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A request of the page.

    Attributes:
        sources: By the names of the model's inputs.
        grows: Whether the alignment is wanted while the target is decoded.
    """

    model: str
    sources: Mapping[str, Value]
    options: GenerateOptions
    grows: bool

    @classmethod
    def from_json(cls, content: Any) -> Asked:
        """Reads a request.

        Raises:
            ValueError: It is malformed; the message says what is wrong.
        """
        try:
            sources = {str(name): _source(value) for name, value in content["sources"].items()}
            options = GenerateOptions()
            for name, value in content.get("options", {}).items():
                options.MergeFrom(_option(str(name), value))
            return cls(str(content.get("model", "")), sources, options, bool(content.get("grows")))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("a request has `model`, `sources` and `options`") from error


@dataclass(frozen=True)
class Spoken:
    """The settings of a microphone.

    Attributes:
        sample_rate: Of its samples.
    """

    model: str
    options: GenerateOptions
    sample_rate: int

    @classmethod
    def from_json(cls, content: Any) -> Spoken:
        """Reads the settings; raises ValueError as `Asked.from_json`."""
        try:
            options = GenerateOptions()
            for name, value in content.get("options", {}).items():
                options.MergeFrom(_option(str(name), value))
            return cls(str(content.get("model", "")), options, round(content["sample_rate"]))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError("a microphone has `model`, `options` and `sample_rate`") from error


def _source(value: Mapping[str, str]) -> Value:
    if isinstance(value.get("text"), str):
        return value["text"]
    try:
        content = base64.b64decode(value["file"], validate=True)
    except binascii.Error as error:
        raise ValueError("a file must be in base64") from error
    if value.get("form") == FEATURES:
        try:
            return read_features(content, Path("the file"))
        except OSError as error:
            raise ValueError(str(error.strerror)) from error
    return content


def _option(name: str, value: Any) -> GenerateOptions:
    if name not in OPTIONS:
        raise ValueError(f"there is no option {name[:100]!r}")
    if name == "target_prefix" and isinstance(value, list):
        return GenerateOptions(target_prefix=Target(token_ids=TokenIds(values=value)))
    try:
        return OPTIONS[name].read(value)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


class Page:
    """Answers the requests of the page.

    Args:
        make_client: Connects to the model server.
        metrics_url: The metrics port of that server.
    """

    def __init__(self, make_client: Callable[[], AsyncClient], metrics_url: str) -> None:
        self._make_client = make_client
        self._metrics_url = metrics_url
        self._decoding = asyncio.Lock()  # one file at a time, which bounds the memory

    @asynccontextmanager
    async def connected(self, _app: Starlette) -> AsyncIterator[None]:
        """Keeps a client while the app runs, on its event loop."""
        async with self._make_client() as self._client:
            yield

    async def models(self, _request: Request) -> Response:
        """Answers with the served models, and the command that asks each."""
        models = await self._client.models()
        content = [message_dict(model) | {"command": command_of(model)} for model in models]
        return JSONResponse({"models": content, "address": self._client.address, "version": __version__})

    async def generate(self, request: Request) -> Response:
        """Answers with events: pieces of the target, alignments while it grows, and the whole answer."""
        try:
            content = json.loads(await _body(request))
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error
        asked = Asked.from_json(content)
        return StreamingResponse(self._events(asked), media_type="text/event-stream")

    async def frames(self, request: Request) -> Response:
        """Answers with the frames of a clip as pictures of at most 160 pixels."""
        content = await _body(request)
        async with self._decoding:
            return JSONResponse({"frames": await asyncio.to_thread(_frames, content)})

    async def metrics(self, _request: Request) -> Response:
        """Answers with the samples of the server's metrics that the page shows."""
        return JSONResponse({"samples": await asyncio.to_thread(_samples, f"{self._metrics_url}/metrics")})

    async def live(self, socket: WebSocket) -> None:
        """Transcribes the browser's microphone: takes its settings, then samples, and sends events."""
        await socket.accept()
        try:
            spoken = Spoken.from_json(await _first_message(socket))
            events = self._client.transcribe_live(
                _samples_of(socket),
                model=spoken.model,
                options=spoken.options,
                encoding="pcm_s16",
                sample_rate=spoken.sample_rate,
            )
            async with aclosing(events):
                async for event in events:
                    await _send(socket, event_dict(event))
            await socket.close()
        except WebSocketDisconnect:
            return
        except ClientError as error:
            await _refuse(socket, error)
        except ValueError as error:
            await _refuse(socket, ClientError("INVALID_ARGUMENT", str(error)))

    async def _events(self, asked: Asked) -> AsyncIterator[bytes]:
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        growth = _Growth(self._client, asked, events)

        async def stream() -> None:
            try:
                answers = self._client.stream(asked.sources, model=asked.model, options=asked.options)
                async with aclosing(answers):  # type: ignore[type-var]  # a generator
                    async for answer in answers:
                        if answer.HasField("piece"):
                            events.put_nowait({"piece": message_dict(answer.piece)})
                            growth.add(answer.piece.token_ids, answer.piece.hypothesis)
                        else:
                            events.put_nowait({"result": _result(answer.result)})
            except ValueError as error:
                events.put_nowait({"error": error_dict(ClientError.from_value_error(error))})
            except ClientError as error:
                events.put_nowait({"error": error_dict(error)})
            except Exception as error:
                _log.exception("a bug")
                events.put_nowait({"error": error_dict(ClientError("INTERNAL", repr(error)))})
            finally:
                events.put_nowait(None)

        tasks = [asyncio.create_task(stream()), asyncio.create_task(growth.run())]
        try:
            while (event := await events.get()) is not None:
                yield b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Growth:
    """Asks for the alignment of the tokens so far, one request at a time, while a target is decoded.

    The engine aligns finished targets, so the tokens so far become the forced prefix of one more token.
    """

    def __init__(
        self, client: AsyncClient, asked: Asked, events: asyncio.Queue[dict[str, Any] | None]
    ) -> None:
        self._client = client
        self._asked = asked
        self._events = events
        self._token_ids: list[int] = []  # a forced prefix is in the first piece
        self._news = asyncio.Event()

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return len(self._token_ids)

    def add(self, token_ids: Any, hypothesis: int) -> None:
        """Adds new tokens of the first hypothesis."""
        if hypothesis == 0 and token_ids:
            self._token_ids.extend(token_ids)
            self._news.set()

    async def run(self) -> None:
        """Puts alignments among the events until it is cancelled, or the server refuses one."""
        given = self._asked.options
        while self._asked.grows:
            await self._news.wait()
            self._news.clear()
            options = GenerateOptions(
                target_prefix=Target(token_ids=TokenIds(values=self._token_ids)),
                max_new_tokens=1,
                attention=True,
                priority=_LEAST_URGENT,
                source_language=given.source_language,
                target_language=given.target_language,
                task=given.task,
            )
            num_tokens = self.num_tokens
            try:
                answer = await self._client.generate(
                    self._asked.sources, model=self._asked.model, options=options
                )
            except (ClientError, ValueError):
                return  # the whole alignment comes with the answer
            attention = attention_dict(answer.hypotheses[0].attention)
            for name in ("target_tokens", "weights"):
                attention[name] = attention[name][:num_tokens]
            self._events.put_nowait({"alignment": attention})


def _result(answer: GenerateResponse) -> dict[str, Any]:
    """Returns an answer in which attention is a list of rows, also that of sentences."""
    content = message_dict(answer)
    parts: list[GenerateResponse | Sentence] = [answer, *answer.sentences]
    for part, shown_part in zip(parts, [content, *content["sentences"]], strict=True):
        for hypothesis, shown in zip(part.hypotheses, shown_part["hypotheses"], strict=True):
            if hypothesis.HasField("attention"):
                shown["attention"] = attention_dict(hypothesis.attention)
    return content


async def _first_message(socket: WebSocket) -> Any:
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    try:
        return json.loads(message.get("text") or "")
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


async def _samples_of(socket: WebSocket) -> AsyncGenerator[bytes]:
    """Yields what a browser sends, until it sends a text."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        if message.get("text") is not None:
            return
        yield message["bytes"]


async def _send(socket: WebSocket, content: dict[str, Any]) -> None:
    await socket.send_text(json.dumps(content, ensure_ascii=False))


async def _refuse(socket: WebSocket, error: ClientError) -> None:
    """Ends a connection with an error, unless the browser has left."""
    with suppress(WebSocketDisconnect):
        await _send(socket, {"error": error_dict(error)})
        await socket.close()


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise ValueError(f"the file is too large: a request may have {MAX_REQUEST_BYTES} bytes")
    return bytes(body)


def _frames(content: bytes) -> list[str]:
    frames = []
    for frame in read_shown_frames(content, _FRAME_PIXELS, _MAX_FRAMES):
        written = io.BytesIO()
        Image.fromarray(frame).save(written, "PNG")
        frames.append("data:image/png;base64," + base64.b64encode(written.getvalue()).decode())
    return frames


def _samples(url: str) -> list[dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=_METRICS_SECONDS) as answer:
            text: str = answer.read().decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError) as error:
        problem = getattr(error, "reason", error)  # of a URLError, which wraps the system's
        text = f"no metrics at {url} ({getattr(problem, 'strerror', problem)}): name them with --metrics-url"
        raise ClientError("UNAVAILABLE", text) from error
    return [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in families
        if family.name in _SHOWN
        for sample in family.samples
        if math.isfinite(sample.value)
    ]


def _refusing(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Returns an endpoint that answers with the error that another one raises."""

    async def endpoint(request: Request) -> Response:
        try:
            return await answer(request)
        except ClientError as error:
            return JSONResponse({"error": error_dict(error)}, 502)
        except ValueError as error:
            return JSONResponse({"error": error_dict(ClientError("INVALID_ARGUMENT", str(error)))}, 400)

    return endpoint


async def _index(_request: Request) -> Response:
    return FileResponse(PAGE / "index.html")


class _Guard:
    """Adds the page's policy to every answer, and refuses requests of other pages.

    Other pages may point a name of their own here (DNS rebinding), but not an address.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._names = own_names(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # A page of another site could open one, too: browsers only add their `Origin`.
            if self._is_own(Headers(scope=scope)):
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = PlainTextResponse("only the page itself may ask here\n", 403)
        answer = self._app if self._is_own(Headers(scope=scope)) else refusal
        await answer(scope, receive, send_with_policy)

    def _is_own(self, headers: Headers) -> bool:
        name = named_host(headers)
        return name is not None and (name in self._names or is_address(name))


def make_app(make_client: Callable[[], AsyncClient], metrics_url: str, host: str) -> Starlette:
    """Returns the web application.

    Args:
        make_client: Connects to the model server; called on the event loop.
        metrics_url: The metrics port of that server, such as `http://localhost:9464`.
        host: The name that the page listens on.
    """
    page = Page(make_client, metrics_url)
    return Starlette(
        routes=[
            Route("/", _index),
            Route("/api/models", _refusing(page.models)),
            Route("/api/metrics", _refusing(page.metrics)),
            Route("/api/generate", _refusing(page.generate), methods=["POST"]),
            Route("/api/frames", _refusing(page.frames), methods=["POST"]),
            WebSocketRoute("/api/live", page.live),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[Middleware(_Guard, host=host)],
        lifespan=page.connected,
    )


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket whose connections send small parts of an answer at once.

    Otherwise the end of an answer would wait for the acknowledgement of its beginning, which clients delay by
    40 ms.

    Raises:
        OSError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), f"port {port} of {host}") from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listener


def serve(make_client: Callable[[], AsyncClient], metrics_url: str, host: str, port: int) -> None:
    """Serves the page until SIGINT or SIGTERM; prints its address.

    Raises:
        OSError: The address cannot be listened on.
    """
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
        shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        sys.stderr.write(f"open http://{shown}:{port}/ (Ctrl-C ends it)\n")
        sys.stderr.flush()
        app = make_app(make_client, metrics_url, host)
        config = Config(
            app,
            log_level="error",
            timeout_graceful_shutdown=1,
            ws="websockets-sansio",
            ws_max_size=_MAX_MESSAGE_BYTES,
        )
        Server(config).run(sockets=[listener])
