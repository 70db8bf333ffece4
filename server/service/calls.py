"""The calls of clients, and the count of those that are open."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import random
import re
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LoadFailed,
    ServerError,
    Unavailable,
)
from seq2seq_serve.server.models.served import Models
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.service.arrivals import SHUTTING_DOWN, Arrivals, end_now
from seq2seq_serve.server.service.call import ON_THE_LOOP_BYTES, SHORT_BYTES, SMALL_ANSWER_BYTES, Call
from seq2seq_serve.server.service.fair_thread import FairThreads, YieldPoint
from seq2seq_serve.server.service.live.admission import LiveStreams
from seq2seq_serve.server.service.pace import Pace
from seq2seq_serve.server.service.shares import Room, Shares
from seq2seq_serve.server.service.status import REQUEST_ID, status_of
from seq2seq_serve.server.service.wire import MAX_FIELDS
from seq2seq_serve.server.system.machine import usable_cpus
from seq2seq_serve.server.telemetry.record import CallRecord, Metadata, Work, trace_id_of

_Message = TypeVar("_Message")
_Built = TypeVar("_Built")
_Item = TypeVar("_Item")

# The size of a message after decompression: gRPC's own default, far more than a text that can be served.
MAX_REQUEST_BYTES = 4 * 2**20
MAX_ANSWER_BYTES = 16 * 2**20
# A field takes at least two bytes, so a message of this length cannot have too many fields.
SMALL_REQUEST_BYTES = 2 * MAX_FIELDS
_MAX_HELD_BYTES = 2**28  # of large requests whose calls are open, and of arrays that no queue counts yet
_MAX_ATTENTION_BYTES = 2**31  # from which words get their times, if targets have their greatest length
# Messages that are received at once, of one caller, and late ones of all. Where small ones are expected, gRPC
# still receives one of 4 MiB.
_MOST_PROMPT, _MOST_LATE = 24, 64
_MOST_SMALL_PROMPT, _MOST_SMALL_LATE = 8, 16
# Streams that last as long as their callers want, such as one a connection of a client that watches the
# server's health; each takes about 45 KiB.
_MOST_STREAMS = 2048

_WITH_ITEMS = "GenerateBatch", "ModelStreamInfer"  # methods whose calls bring many requests
_MOST_BEGUN = 8  # requests of a call in one round of the event loop, of a third of a millisecond each

_MAX_WAITING_BYTES = 8 * 2**20
_MAX_DECODING_BYTES = 2**27  # and one file of any size beyond them
_LEAST_FILES = 4  # of any size that may wait to be read
_MOST_FILE_THREADS = 4

_MAX_ID_LENGTH = 128
_ID_BITS = 128
# Visible ASCII characters except " and =, so that an id cannot look like fields in a line of the log.
_LOGGABLE_ID = re.compile(rf"[!#-<>-~]{{1,{_MAX_ID_LENGTH}}}")
_PROBES = "grpc."  # how the names of the services of health and reflection begin
_TIMEOUT_ROUNDING = 0.01
_CLOCK_SECONDS = 0.002
_QUIET_SECONDS, _MOST_QUIET_TURNS = 0.3, 33

Sink = Callable[[CallRecord], None]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RemoteCall(Call):
    """The call of a client, over gRPC or HTTP.

    Attributes:
        write: Sends a message of a stream.
        writes_bytes: Whether it takes the message's bytes.
        calls: Opened it.
        writing: Is held while a message is written: one after the other.
        is_probe: Whether the call is for the service of health or reflection. Probes are not counted as
            requests, and a server that drains does not wait for them.
        held: Counts its request and its only answer, if they are large, and a stream that lasts, until its
            caller has the answer or has left.
        whole: The call that brought it, if it is one of the requests of a call.
        is_recorded_by_item: Whether each request of the call is recorded, in place of the call.
        refusal: Why it is refused whatever it asks for: its id cannot be logged and sent back.
    """

    write: Callable[[Any], Awaitable[None]]
    calls: Calls
    writes_bytes: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_probe: bool = False
    held: list[Room] = field(default_factory=list)
    whole: RemoteCall | None = None
    is_recorded_by_item: bool = False
    refusal: InvalidRequest | None = None

    def item(self, number: int, outbox: Outbox) -> RemoteCall:
        """Returns a call for one of the requests that this call brings, which is recorded by itself."""
        its = copy.copy(self)
        its.request_id, its.arrival = f"{self.request_id}-{number}", time.monotonic()
        its.work, its.held, its.whole, its.pace = Work(), [], self, self.calls.pace
        its.write, its.writing = outbox.write, asyncio.Lock()
        return its

    def is_expired(self) -> bool:
        """Whether the caller has stopped waiting by now."""
        if self.deadline is None:
            return False
        # gRPC rounds a timeout up to three digits on the wire, so the caller stops waiting a little earlier.
        early = _TIMEOUT_ROUNDING * (self.deadline - self.arrival) + _CLOCK_SECONDS
        return time.monotonic() >= self.deadline - early

    def code_of_leaving(self) -> grpc.StatusCode:
        """Returns the status that a caller who has just left sees."""
        return grpc.StatusCode.DEADLINE_EXCEEDED if self.is_expired() else grpc.StatusCode.CANCELLED

    def check_answer_bytes(self, num_bytes: int) -> None:
        """Refuses an answer that is too long for clients.

        Raises:
            InvalidRequest: The answer has more than `MAX_ANSWER_BYTES`.
        """
        if num_bytes > MAX_ANSWER_BYTES:
            raise InvalidRequest(
                f"the answer would have up to {num_bytes} bytes, and at most {MAX_ANSWER_BYTES} can be sent: "
                "lower max_new_tokens, num_hypotheses or num_alternatives, omit attention, or send fewer "
                "rows",
                field="options",
            )

    @contextmanager
    def holding(self, num_bytes: int, num_attention_bytes: int = 0) -> Iterator[None]:
        """Counts memory that the call takes until the block ends.

        Raises:
            Overloaded: Too much is held, and the caller would have more than its share of it.
        """
        held, attention, name = self.calls.held, self.calls.attention, self.caller.name
        with held.take(name, num_bytes), attention.take(name, num_attention_bytes):
            yield

    def hold(self, num_bytes: int) -> None:
        """Counts memory as `Calls.hold`."""
        self.calls.hold(self, num_bytes)

    async def room(self, num_bytes: int) -> Room:
        """Counts the memory of arrays before they are read, until the room is closed.

        An accepted call waits for room.

        Raises:
            Overloaded: Too much is held, and the caller would have more than its share of it.
        """
        if self.is_accepted:
            return await self.calls.held.wait(self.caller.name, num_bytes)
        return self.calls.held.take(self.caller.name, num_bytes)

    async def read(
        self, work: Callable[[YieldPoint], _Built], num_bytes: int, *, num_file_bytes: int | None = None
    ) -> _Built:
        """As `Call.read`, with other callers in turn."""
        if num_file_bytes is not None:
            return await self._read_files(work, num_bytes, num_file_bytes)
        if num_bytes <= ON_THE_LOOP_BYTES:
            return work(lambda: None)
        threads = self.calls.short_texts if num_bytes <= SHORT_BYTES else self.calls.long_texts
        return await threads.run(
            work, num_bytes, self.caller.name, self.deadline, is_accepted=self.is_accepted
        )

    async def _read_files(
        self, work: Callable[[YieldPoint], _Built], num_bytes: int, num_file_bytes: int
    ) -> _Built:
        calls, name = self.calls, self.caller.name
        num_bytes = min(num_bytes, _MAX_WAITING_BYTES // _LEAST_FILES)
        try:
            async with asyncio.timeout_at(self.deadline):
                room = await calls.decoding.wait(name, num_file_bytes)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before there was room to decode a file") from None
        with room:
            return await calls.files.run(work, num_bytes, name, self.deadline, is_accepted=self.is_accepted)

    async def build(self, num_bytes: int, work: Callable[[YieldPoint], _Built]) -> _Built:
        """As `Call.build`, with other callers in turn."""
        if num_bytes <= SMALL_ANSWER_BYTES:
            return work(lambda: None)
        return await self.calls.answers.run(work, num_bytes, self.caller.name, self.deadline)

    async def send(self, message: Message) -> None:
        """Writes a message of a stream, as soon as the caller has room for it.

        Raises:
            CancelledError: The caller has left.
            InvalidRequest: The message is too long.
            Overloaded: As `room`, for a large message.
        """
        content = message.SerializeToString() if self.writes_bytes else message
        num_bytes = len(content) if isinstance(content, bytes) else content.ByteSize()
        self.check_answer_bytes(num_bytes)
        del message  # its objects take ten times the memory of its bytes, for which there may be no room yet
        with await self.room(num_bytes) if num_bytes > SMALL_REQUEST_BYTES else nullcontext():
            async with self.writing:
                try:
                    await self.write(content)
                except aio.InternalError as error:  # gRPC fails a waiting write before it cancels the handler
                    raise asyncio.CancelledError from error


class Outbox:
    """Writes the answers to the requests that a call brought, in the order of their completion.

    Owned by the call. A request may be cancelled, by the error of another one, while its answer is written.
    During a write, gRPC sends no status: the caller would wait for ever. So a task of its own writes, and
    `close` waits for it.

    Args:
        write: Writes a message.
        join: Joins messages that wait into one, a few kilobytes long; None to write each by itself.
    """

    def __init__(
        self, write: Callable[[Any], Awaitable[None]], join: Callable[[list[bytes]], bytes] | None
    ) -> None:
        self._write = write
        self._join = join
        self._waiting: deque[tuple[Any, asyncio.Future[None]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def write(self, content: Any) -> None:
        """Writes a message, after those before it; raises what the writing raises."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((content, written))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await written

    async def close(self) -> None:
        """Waits for the writing. The requests whose messages have not been written are cancelled."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write_all(self) -> None:
        while self._waiting:
            contents, written = self._next()
            error: Exception | None = None
            if contents:
                try:
                    await self._write(
                        self._join(contents) if self._join and len(contents) > 1 else contents[0]
                    )
                except Exception as raised:
                    error = raised
            for each in written:
                if each.done():
                    continue
                if error is None:
                    each.set_result(None)
                else:
                    each.set_exception(error)
        self._writing = None

    def _next(self) -> tuple[list[Any], list[asyncio.Future[None]]]:
        """Returns the contents of the next message, without those of requests that were cancelled."""
        contents: list[Any] = []
        written: list[asyncio.Future[None]] = []
        num_bytes = 0
        while self._waiting:
            content, its = self._waiting[0]
            if contents and (self._join is None or num_bytes + len(content) > SMALL_REQUEST_BYTES):
                break
            self._waiting.popleft()
            if not its.done():
                contents.append(content)
                written.append(its)
                num_bytes += len(content) if self._join is not None else 0
        return contents, written


class Calls:
    """Opens, counts and closes calls, and ends waiting ones when the server drains.

    Owned by the app; used on the event loop only.

    Args:
        models: The served models.
        access: Knows the callers and their rights.
        sinks: Each is called with the record of every call that ended, except probes.
        begins_traces: Whether a call gets a trace if its caller did not begin one.
        live: Counts live streams; None for one with the settings' defaults.

    Attributes:
        models: The served models.
        access: The callers' rights.
        is_draining: Whether the server drains.
        held: The bytes of large requests, of what is read from files, and of large answers that callers have
            not taken, by caller.
        decoding: The bytes of memory in which files are decoded, by caller.
        attention: The bytes of attention from which words get their times, by caller.
        streams: The streams that last as long as their callers want, by caller.
        live: The live streams, by caller.
        large_messages: Receives messages with sources.
        small_messages: Receives all others.
        num_open: The number of calls that have not ended, without probes.
        pace: Gives the requests of batches their turns.
        answers: The thread that builds large answers.
        short_texts: The thread that cuts texts of up to `SHORT_BYTES`.
        long_texts: The thread that cuts longer texts.
        files: The threads that decode files.
    """

    def __init__(
        self,
        models: Models,
        access: Access,
        sinks: Sequence[Sink] = (),
        *,
        begins_traces: bool = False,
        live: LiveStreams | None = None,
    ) -> None:
        self.models = models
        self.access = access
        self._sinks = tuple(sinks)
        self._begins_traces = begins_traces
        self.is_draining = False
        self.num_open = 0
        self._num_opened = 0
        self._num_with_items = 0
        self.pace = Pace(lambda: self.num_open > self._num_with_items)
        self.held = Shares(_MAX_HELD_BYTES, "large requests and answers of {} bytes are open")
        self.attention = Shares(_MAX_ATTENTION_BYTES, "words get their times from attention of {} bytes")
        self._idle = asyncio.Event()
        self._idle.set()
        self.streams = Shares(_MOST_STREAMS, "{} streams are open")
        self.live = live or LiveStreams(ServerConfig.max_live_streams, ServerConfig.live_interval_seconds)
        self.large_messages = Arrivals(MAX_REQUEST_BYTES, _MOST_PROMPT, _MOST_LATE)
        self.small_messages = Arrivals(SMALL_REQUEST_BYTES, _MOST_SMALL_PROMPT, _MOST_SMALL_LATE)
        self._reading = set[asyncio.Timeout]()
        self.decoding = Shares(_MAX_DECODING_BYTES, "files are decoded in {} bytes")
        self.answers = FairThreads("answers")
        self.short_texts = FairThreads("short-texts", _MAX_WAITING_BYTES)
        self.long_texts = FairThreads("long-texts", _MAX_WAITING_BYTES)
        self.files = FairThreads("files", _MAX_WAITING_BYTES, min(usable_cpus(), _MOST_FILE_THREADS))

    def open(
        self,
        service: str,
        method: str,
        *,
        metadata: Metadata | None,
        peer: str,
        remaining_seconds: float | None,
        write: Callable[[Any], Awaitable[None]],
        writes_bytes: bool = False,
    ) -> RemoteCall:
        """Returns a new call; `close_call` and `let_go` must follow.

        Args:
            service: The full name of the service.
            method: The name of the method.
            metadata: The metadata that the caller sent.
            peer: gRPC's name of the other end of the connection, such as `ipv4:10.0.0.7:50124`.
            remaining_seconds: The time until the caller stops waiting; None for ever.
            write: Sends a message of a stream.
            writes_bytes: Whether it takes the message's bytes.
        """
        arrival, given_id = time.monotonic(), dict(metadata or ()).get(REQUEST_ID)
        request_id, refusal = "", None
        if isinstance(given_id, str) and _LOGGABLE_ID.fullmatch(given_id):
            request_id = given_id
        elif given_id is not None:
            refusal = InvalidRequest(
                f"the request id has {len(given_id)} characters: send 1 to {_MAX_ID_LENGTH} visible "
                'ASCII characters other than " and =, or no id',
                field=REQUEST_ID,
            )
        call = RemoteCall(
            request_id=request_id or f"{random.getrandbits(_ID_BITS):0{_ID_BITS // 4}x}",
            caller=self.access.caller_of(metadata, peer),
            arrival=arrival,
            deadline=None if remaining_seconds is None else arrival + remaining_seconds,
            service=service,
            method=method,
            metadata=metadata or (),
            write=write,
            writes_bytes=writes_bytes,
            calls=self,
            is_probe=service.startswith(_PROBES),
            refusal=refusal,
        )
        if not call.is_probe:
            self.num_open += 1
            self._num_with_items += method in _WITH_ITEMS
            self._num_opened += 1
            self._idle.clear()
        return call

    def hold(self, call: RemoteCall, num_bytes: int) -> None:
        """Counts the bytes of a large request or answer until `let_go`; a small one is not counted.

        What a request brings may wait as long: parsed, read, or in the engine's queue.

        Raises:
            Overloaded: Too many are held, and the caller would have more than its share of them; not of an
                accepted call, whose answer is complete.
        """
        if num_bytes > SMALL_REQUEST_BYTES:
            count = self.held.add if call.is_accepted else self.held.take
            call.held.append(count(call.caller.name, num_bytes))

    def let_last(self, call: RemoteCall) -> None:
        """Counts a call that lasts as long as its caller wants, until `let_go`; raises Overloaded."""
        call.lasts = True
        call.held.append(self.streams.take(call.caller.name, 1))

    def let_go(self, call: RemoteCall) -> None:
        """Ends the count of a call's bytes, once its caller has taken the answer, or has left."""
        for room in call.held:
            room.close()

    def close_call(self, call: RemoteCall) -> None:
        """Ends the record of a call that has its answer."""
        if not call.is_probe:
            self.num_open -= 1
            self._num_with_items -= call.method in _WITH_ITEMS
            if self.num_open == 0:
                self._idle.set()

    def close(self) -> None:
        """Ends the threads that read sources and build answers."""
        for threads in (self.short_texts, self.long_texts, self.files, self.answers):
            threads.stop()

    def drain(self) -> None:
        """Ends the calls that wait for their caller's next message, or for the reading of their sources."""
        self.is_draining = True
        for limit in self._reading:
            end_now(limit)
        self.large_messages.drain()
        self.small_messages.drain()
        for threads in (self.short_texts, self.long_texts, self.files):
            threads.drain()

    async def next_message(self, messages: AsyncIterator[_Message]) -> _Message | None:
        """Returns the next message of a stream; None at its end.

        Raises:
            Unavailable: The server drains.
        """
        if self.is_draining:
            raise Unavailable(SHUTTING_DOWN)
        try:
            async with asyncio.timeout(None) as limit:
                self._reading.add(limit)
                return await anext(messages, None)
        except TimeoutError:
            raise Unavailable(SHUTTING_DOWN) from None
        finally:
            self._reading.discard(limit)

    async def answer_items(
        self,
        call: RemoteCall,
        following: Callable[[], Awaitable[_Item | None]],
        most_open: int,
        answer: Callable[[_Item, RemoteCall], Awaitable[None]],
        *,
        first_number: int = 0,
        join: Callable[[list[bytes]], bytes] | None = None,
    ) -> None:
        """Answers the requests that a call brings side by side. Each is recorded in place of the call.

        Args:
            call: The call.
            following: Returns the next request, when there is room for it; None after the last one.
            most_open: The most requests that are answered at once.
            answer: Answers one, given its own call; an error that it raises ends the others, and is raised.
            first_number: The number of the first one, which is in its id.
            join: As for `Outbox`.

        Raises:
            Unavailable: `following` raised it; the requests before have been answered.
        """
        room, outbox = asyncio.Semaphore(most_open), Outbox(call.write, join)

        async def answer_one(item: _Item, its: RemoteCall) -> None:
            try:
                await self.pace.turn()
                answering = answer(item, its)
                del item  # whose memory is not needed while it is decoded
                await answering
            finally:
                room.release()
                self.let_go(its)

        call.is_recorded_by_item = True
        refusal: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in itertools.count(first_number):
                    try:
                        item = await following()
                    except Unavailable as error:
                        refusal = error
                        break
                    if item is None:
                        break
                    await room.acquire()
                    tasks.create_task(answer_one(item, call.item(number, outbox)))
                    del item
                    if (number + 1) % _MOST_BEGUN == 0:
                        await asyncio.sleep(0)  # they are read, and then submitted, before the next ones
                        await self.pace.turn()
        except ExceptionGroup as group:
            refusal = group.with_traceback(None).exceptions[0]
        finally:
            await outbox.close()
        try:
            if refusal is not None:
                raise refusal
        finally:
            del refusal  # its frames refer to it and to requests

    async def wait_until_idle(self) -> None:
        """Waits until no call is being handled."""
        await self._idle.wait()

    async def wait_until_quiet(self) -> None:
        """Waits until the calls that gRPC has received have reached their handlers, for ten seconds or so.

        gRPC ends the others as cancelled when the server stops, and clients do not retry those. Calls that
        are open already are not waited for: their time is over, and some callers may never read the answers.
        """
        num_left = self.num_open
        for _ in range(_MOST_QUIET_TURNS):
            num_opened = self._num_opened
            await asyncio.sleep(_QUIET_SECONDS)
            if num_opened == self._num_opened and self.num_open <= num_left:
                return

    async def run(
        self,
        call: RemoteCall,
        answering: Awaitable[_Built],
        ends_whole: Callable[[Exception], bool] = lambda _: False,
    ) -> _Built | Exception:
        """Awaits the answer of a call, or of a request of a call, and records its end.

        Args:
            call: The call.
            answering: Answers it.
            ends_whole: Whether an error ends the whole call that brought the request. Such an error is
                raised, and that call is recorded in place of its requests.

        Returns:
            The answer, or the error of a call that fails.

        Raises:
            CancelledError: The caller has left.
        """
        try:
            answered = await answering
        # gRPC fails a write that waits before it cancels the handler.
        except (asyncio.CancelledError, aio.InternalError):
            self._record(call, (call.whole or call).code_of_leaving())
            raise asyncio.CancelledError from None
        except Exception as error:
            if call.whole is not None and ends_whole(error):
                call.whole.is_recorded_by_item = False
                raise
            call.is_recorded_by_item = False
            _log_fault(call, error)
            # Before the answer, because the caller may read the metrics next.
            self._record(call, status_of(error).code)
            return error
        self._record(call, grpc.StatusCode.OK)
        return answered

    def _record(self, call: RemoteCall, code: grpc.StatusCode) -> None:
        """Hands the record of a call to the sinks, unless another one stands for it."""
        is_recorded = not call.is_recorded_by_item if call.whole is None else call.whole.is_recorded_by_item
        if call.is_probe or not is_recorded:
            return
        call.code, call.code_number = code.name, code.value[0]
        call.seconds = time.monotonic() - call.arrival
        call.trace_id = trace_id_of(call.metadata) or (uuid.uuid4().hex if self._begins_traces else "")
        for sink in self._sinks:
            sink(call)


def _log_fault(call: RemoteCall, error: Exception) -> None:
    """Logs a failed load, and with its traceback an error that is not one of the server's own."""
    extra = {"fields": {"request_id": call.request_id, "service": call.service, "method": call.method}}
    if isinstance(error, LoadFailed):
        _log.error("%s %s: %s", call.request_id, call.method, error, extra=extra)
    elif not isinstance(error, ServerError):
        _log.error("%s %s: a bug", call.request_id, call.method, exc_info=error, extra=extra)
