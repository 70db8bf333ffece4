"""One session: reads the caller's events, and transcribes the sound in one stream after the other.

A stream has the same settings all the time. New ones take effect with the next stream, which begins where a
segment of the present one ends.
"""

from __future__ import annotations

import asyncio
import binascii
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import OpenAINames
from seq2seq_serve.server.errors import InvalidRequest, Overloaded, ServerError, Unavailable
from seq2seq_serve.server.service.call import BYTES_PER_TEXT_BYTE
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.live.stream import Command, LiveStream
from seq2seq_serve.server.service.open_inference.json import read_json
from seq2seq_serve.server.service.openai import check_model, error_content, named_model
from seq2seq_serve.server.service.realtime.items import Item, Items, new_id
from seq2seq_serve.server.service.realtime.settings import Settings, named_as_sent
from seq2seq_serve.server.service.realtime.socket import Inbox, Outbox

_LEAST_COMMIT_SECONDS = 0.1  # OpenAI's bound
_EMPTY = "input_audio_buffer_commit_empty"  # OpenAI's code of that error
_MAX_EVENT_ID = 512  # characters, OpenAI's bound
_APPEND, _COMMIT, _CLEAR = (f"input_audio_buffer.{name}" for name in ("append", "commit", "clear"))
_UPDATE, _OLDER_UPDATE = "session.update", "transcription_session.update"
_KINDS = (_UPDATE, _OLDER_UPDATE, _APPEND, _COMMIT, _CLEAR)


@dataclass
class _Stream:
    """The present stream. Owned by the session.

    Attributes:
        live: Transcribes it.
        settings: With these.
        completing: Wait until an item of it is transcribed.
        num_bytes: Of the sound that came.
    """

    live: LiveStream
    settings: Settings
    completing: set[asyncio.Task[None]]
    num_bytes: int = 0


class Session:
    """Owned by its call.

    Args:
        call: The call.
        names: Which names of models are known.
        settings: Those at first.
        inbox: The caller's events, as JSON.
        outbox: Takes the events for the caller.
        is_older: Whether the caller uses the older form of the API, until it sends an event of the other one.
    """

    def __init__(
        self,
        call: RemoteCall,
        names: OpenAINames,
        settings: Settings,
        inbox: Inbox,
        outbox: Outbox,
        is_older: bool,
    ) -> None:
        self._call, self._names, self._settings = call, names, settings
        self._inbox, self._outbox, self._is_older = inbox, outbox, is_older
        self._id = new_id("sess")
        self._items = Items(self._put, lambda: self._is_older)
        self._stream: _Stream | None = None
        self._received = 0.0  # seconds of sound
        self._refused_until = (
            -math.inf
        )  # monotonic seconds; sound before that is dropped without another error
        self._event_id: str | None = None  # of the event that is answered

    async def run(self) -> None:
        """Answers events until it is cancelled.

        Raises:
            Unavailable: The server drains; what was heard has been transcribed.
        """
        self._put_session("created")
        while True:
            command = await self._next()
            if isinstance(command, bytes) and time.monotonic() >= self._refused_until:
                await self._transcribe(command)

    async def _transcribe(self, sound: bytes) -> None:
        """Transcribes the sound that begins with these bytes until the settings change."""
        problem: Exception | None = None
        try:
            async with self._opened() as self._stream:
                try:
                    await self._stream.live.run(self._commands(self._stream, sound))
                except ServerError as error:
                    problem = error
                finally:
                    for task in self._stream.completing:
                        task.cancel()
                live = self._stream.live
                content = None if problem is None else error_content(problem)["error"]
                self._items.end_stream(live.heard_seconds, live.transcribed_seconds, content)
        except ServerError as error:
            problem = error
        finally:
            self._stream = None
            self._received = self._items.stream_begin
        if isinstance(problem, Overloaded):
            self._refused_until = time.monotonic() + problem.retry_after_seconds
        if isinstance(problem, Unavailable) and self._call.calls.is_draining:
            raise problem
        if problem is not None:
            self._put_error(problem)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[_Stream]:
        """Yields a stream with the present settings.

        Raises:
            ServerError: The settings cannot be used with the model, or there is no such model.
        """
        call, settings = self._call, self._settings
        name = named_model(settings.model, call, self._names)
        with named_as_sent():
            async with call.calls.models.use(call, name) as model:
                check_model(model, "transcribe", call)
                statistics = call.calls.models.statistics_of(model.base or model)
                live = LiveStream(
                    settings.start(model), model, call, call.calls.live, statistics, self._hear_of
                )
                yield _Stream(live, settings, set())

    async def _commands(self, stream: _Stream, sound: bytes) -> AsyncIterator[bytes | Command]:
        """Yields the sound and the commands of a stream, until another one has to follow it."""
        command: bytes | Command | None = sound
        while True:
            if isinstance(command, bytes):
                stream.num_bytes += len(command)
            if command is not None:
                yield command
                if command is Command.DROP_SEGMENT:  # which is done now
                    self._clear()
            if self._is_over(stream):
                break
            command = await self._next()
        if stream.num_bytes % 2 and stream.settings.encoding == Settings.encoding:
            yield b"\0"  # the other half of a sample

    def _is_over(self, stream: _Stream) -> bool:
        """Whether the settings have changed, and nobody speaks with those before."""
        before, now = stream.settings, self._settings
        if (before.encoding, before.rate) != (now.encoding, now.rate):
            return True
        return before != now and not stream.live.is_in_segment

    async def _next(self) -> bytes | Command | None:
        """Answers the caller's next event, and returns what the stream is to do then."""
        self._event_id = None
        try:
            raw = await self._call.calls.next_message(self._inbox)
        except Unavailable:
            await self._inbox.end()
            raise
        assert raw is not None
        command = None
        try:
            event = await self._call.read(lambda _: self._read(raw), len(raw) // BYTES_PER_TEXT_BYTE)
            command = await self._answer(event)
        except ServerError as error:
            self._put_error(error)
        await self._outbox.room()
        return command

    def _read(self, raw: bytes) -> dict[str, Any]:
        """Returns an event, whose sound is bytes; raises InvalidRequest."""
        event = read_json(raw, "the event")
        given_id = event.get("event_id", "")
        if not isinstance(given_id, str) or len(given_id) > _MAX_EVENT_ID:
            raise InvalidRequest(
                f"event_id must be a text of at most {_MAX_EVENT_ID} characters", field="event_id"
            )
        self._event_id = given_id or None
        kind = event.get("type")
        if not isinstance(kind, str) or kind not in _KINDS:
            raise InvalidRequest(
                f"the type of the event is {str(kind)[:100]!r}, and must be one of {', '.join(_KINDS)}",
                field="type",
            )
        if kind == _APPEND:
            audio = event.get("audio")
            try:
                if not isinstance(audio, str):
                    raise ValueError("it is not a text")
                event["audio"] = binascii.a2b_base64(audio, strict_mode=True)
            except ValueError as error:
                raise InvalidRequest(f"audio must be base64: {error}", field="audio") from None
        return event

    async def _answer(self, event: dict[str, Any]) -> bytes | Command | None:
        kind, stream = event["type"], self._stream
        if kind == _APPEND:
            sound: bytes = event["audio"]
            if not sound:
                return None
            self._received += len(sound) / self._settings.bytes_per_second
            return sound
        if kind == _COMMIT:
            return self._commit(stream)
        if kind == _CLEAR:
            if stream is not None:
                return Command.DROP_SEGMENT
            self._clear()
            return None
        await self._update(event)
        return None

    def _commit(self, stream: _Stream | None) -> Command | None:
        if stream is not None and stream.live.is_in_segment:
            self._complete_later(stream, self._items.commit(self._received, stream.live.heard_seconds))
            return Command.FINISH_SEGMENT
        seconds = self._received - self._items.buffer_begin
        if seconds < _LEAST_COMMIT_SECONDS:
            text = (
                f"the buffer has {1000 * max(seconds, 0):.0f} ms of sound: append at least "
                f"{1000 * _LEAST_COMMIT_SECONDS:.0f} ms before it is committed"
            )
            self._put_error(InvalidRequest(text, field=""), _EMPTY)
            return None
        self._items.commit(self._received, 0.0)  # nobody speaks in it
        self._items.complete(0.0 if stream is None else stream.live.transcribed_seconds)
        return None

    def _clear(self) -> None:
        self._items.clear(self._received)
        self._put("input_audio_buffer.cleared")

    async def _update(self, event: dict[str, Any]) -> None:
        self._is_older = event["type"] == _OLDER_UPDATE
        before = self._settings
        self._settings = before.updated(event.get("session"))
        try:
            if named_model(self._settings.model, self._call, self._names):
                async with self._opened():
                    pass
        except BaseException:
            self._settings = before
            raise
        self._put_session("updated")

    async def _hear_of(self, response: pb.TranscribeResponse) -> None:
        """Turns an event of the stream into those of the session.

        Those of speech never wait, so that they come before the text of that speech.
        """
        stream, kind = self._stream, response.WhichOneof("event")
        assert stream is not None
        self._items.complete(stream.live.transcribed_seconds)
        if kind == "speech_began":
            self._items.begin_speech(response.speech_began.begin_seconds, stream.settings)
        elif kind == "speech_ended":
            seconds = response.speech_ended.end_seconds
            item = self._items.end_speech(seconds, stream.live.heard_seconds, stream.settings)
            self._complete_later(stream, item)
        elif kind == "text":
            self._items.add("".join(word.text for word in response.text.stable))
            await self._outbox.room()
        elif kind == "segment":
            self._items.end_segment()

    def _complete_later(self, stream: _Stream, item: Item) -> None:
        async def complete() -> None:
            await stream.live.wait_until_transcribed(item.heard_end - 0.01)
            self._items.complete(stream.live.transcribed_seconds)

        task = asyncio.create_task(complete())
        stream.completing.add(task)
        task.add_done_callback(stream.completing.discard)

    def _put_session(self, verb: str) -> None:
        if self._is_older:
            content = self._settings.older_content(self._id)
            self._put(f"transcription_session.{verb}", session=content)
        else:
            self._put(f"session.{verb}", session=self._settings.content(self._id))

    def _put_error(self, error: Exception, code: str = "") -> None:
        content = error_content(error)["error"]
        content["code"] = code or content["code"]
        self._put("error", error=content | {"event_id": self._event_id})

    def _put(self, kind: str, **fields: Any) -> None:
        self._outbox.put({"type": kind, "event_id": new_id("event"), **fields})
