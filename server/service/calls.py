"""The frame of every RPC: its id, its deadline, its end, and its count."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from server.errors import InvalidRequest, LoadFailed, ServerError, Unavailable
from server.futures import retrieve
from server.metrics import Metrics
from server.models import Models, ServedModel
from server.service.access import Access, Caller
from server.service.lanes import Lane
from server.service.status import (
    MAX_REQUEST_ID_LENGTH,
    REQUEST_ID,
    abort,
    given_request_id,
    request_id_of,
    status_of,
)
from server.service.text_threads import TextThreads

Context = aio.ServicerContext[Any, Any]
_Message = TypeVar("_Message")
_Answer = TypeVar("_Answer", bound=Message)
_Built = TypeVar("_Built")

MAX_ANSWER_BYTES = 16 * 2**20
_SMALL_ANSWER_BYTES = 2**16  # built in about a millisecond

_TIMEOUT_ROUNDING = 0.01
_CLOCK_SECONDS = 0.002
_QUIET_SECONDS = 0.1
_NUM_QUIET_TURNS, _NUM_AFTER_NEWCOMERS, _MAX_QUIET_TURNS = 2, 6, 300

_log = logging.getLogger(__name__)


@dataclass
class Call:
    """One RPC while it is handled; owned by its handler.

    Attributes:
        caller: Its sender.
        arrival: `time.monotonic()` when the handler started.
        deadline: The same clock, when the caller stops waiting; None for never.
        answers: The thread that builds large answers.
        texts: The threads that work with its texts.
        model_name: The served model's name, once it is known.
        is_counted_by_request: Whether its handler counts every request in it instead.
    """

    method: str
    request_id: str
    caller: Caller
    arrival: float
    deadline: float | None
    models: Models
    answers: Lane
    texts: TextThreads
    model_name: str = ""
    is_counted_by_request: bool = False

    def is_expired(self) -> bool:
        """Whether the caller has stopped waiting by now."""
        return has_expired(self.arrival, self.deadline)

    @contextmanager
    def using(self, name: str, version: str = "") -> Iterator[ServedModel]:
        """The model that the caller asked for, by which the call will be counted.

        Raises:
            UnknownModel: There is none of that name or version.
            Unavailable: The models are still loading.
        """
        with self.models.using(name, version) as model:
            self.model_name = model.name
            yield model

    async def built(self, num_bytes: int, build: Callable[[], _Built]) -> _Built:
        """Returns what `build` makes, about `num_bytes` long; a large one is built on another thread."""
        if num_bytes <= _SMALL_ANSWER_BYTES:
            return build()
        return await self.answers.run(build, num_bytes, self.caller.name)


class Calls:
    """Opens and ends every call of our own services.

    Owned by the app; used on the event loop only. Invariant: a call that ends in any way is counted once
    and answered with a status of the table in `server.service.status`.
    """

    def __init__(self, models: Models, metrics: Metrics, access: Access) -> None:
        self._models = models
        self._metrics = metrics
        self._access = access
        self.num_open = 0
        self._num_opened = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = asyncio.Event()
        self._answers = Lane("answers")
        self._texts = TextThreads()

    def close(self) -> None:
        """End the threads that cut texts and that build answers."""
        self._texts.stop()
        self._answers.stop()

    def drain(self) -> None:
        """Let calls end that wait for their caller's next message, or for their texts to be cut."""
        self._draining.set()
        self._texts.drain()

    async def next_message(self, messages: AsyncIterator[_Message]) -> _Message | None:
        """The next message of a stream; None at its end.

        Raises:
            Unavailable: None should come any more.
        """
        following = asyncio.ensure_future(anext(messages, None))
        following.add_done_callback(retrieve)
        draining = asyncio.ensure_future(self._draining.wait())
        try:
            await asyncio.wait({following, draining}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise Unavailable("the server is shutting down")
            return following.result()
        finally:
            following.cancel()
            draining.cancel()
            del following  # its error, if it has one, refers to this frame

    async def wait_until_idle(self) -> None:
        """Wait until no call is being handled."""
        await self._idle.wait()

    async def wait_until_quiet(self) -> None:
        """Wait until calls that gRPC has received have come to their handlers, half a minute at most.

        It would end those itself when the server stops, as cancelled. Calls that were open before are not
        waited for: they had their time, and the answer of some of them may never be read.
        """
        num_left = self.num_open
        num_quiet, num_needed = 0, _NUM_QUIET_TURNS
        for _ in range(_MAX_QUIET_TURNS):
            num_opened, end = self._num_opened, time.monotonic() + 2 * _QUIET_SECONDS
            await asyncio.sleep(_QUIET_SECONDS)
            # Where the loop was late, calls may still be on their way to it.
            is_in_time = time.monotonic() < end
            is_quiet = is_in_time and num_opened == self._num_opened and self.num_open <= num_left
            num_quiet += 1
            if not is_quiet:  # whoever still sends may pause for a moment
                num_quiet, num_needed = 0, _NUM_AFTER_NEWCOMERS
            if num_quiet == num_needed:
                return

    @asynccontextmanager
    async def open(self, method: str, context: Context) -> AsyncIterator[Call]:
        """Handle one call inside the block; what the block raises becomes the call's status.

        A call that has `is_counted_by_request` set is not counted if it ends well: its handler has counted
        every request in it.
        """
        arrival = time.monotonic()
        remaining: float | None = context.time_remaining()
        deadline = None if remaining is None else arrival + remaining
        metadata = context.invocation_metadata()
        given_id, request_id = given_request_id(metadata), request_id_of(metadata)
        caller = self._access.caller_of(context)
        call = Call(method, request_id, caller, arrival, deadline, self._models, self._answers, self._texts)
        self.num_open += 1
        self._num_opened += 1
        self._idle.clear()
        try:
            if given_id not in (None, request_id):
                raise InvalidRequest(
                    f"the request id has {len(given_id)} characters: send 1 to {MAX_REQUEST_ID_LENGTH}, of "
                    "those that ASCII can print, or none at all",
                    field=REQUEST_ID,
                )
            yield call
        except asyncio.CancelledError:
            self.count(call, code_of_leaving(call.arrival, call.deadline))
            raise
        except Exception as error:
            code, _ = status_of(error)
            if not isinstance(error, ServerError):
                _log.exception("%s %s: a bug", call.request_id, method)
            elif isinstance(error, LoadFailed):
                _log.error("%s %s: %s", call.request_id, method, error)
            self.count(call, code)  # before the caller can know, who may look at the metrics next
            await abort(context, error, call.request_id)
        else:
            if not call.is_counted_by_request:
                self.count(call, grpc.StatusCode.OK)
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self._idle.set()

    def count(self, call: Call, code: grpc.StatusCode) -> None:
        """Note in metrics and log how a call or a request of it ended."""
        self._metrics.record_rpc(model_name=call.model_name, method=call.method, code=code.name)
        seconds = time.monotonic() - call.arrival
        _log.debug("%s %s %s in %.6f s", call.request_id, call.method, code.name, seconds)


def check_answer_bytes(num_bytes: int) -> None:
    """Refuse an answer that clients do not take.

    Raises:
        InvalidRequest: It is too long.
    """
    if num_bytes > MAX_ANSWER_BYTES:
        raise InvalidRequest(
            f"the answer would have up to {num_bytes} bytes, and at most {MAX_ANSWER_BYTES} can be sent: ask "
            "for less max_new_tokens, num_hypotheses or num_alternatives, no attention, or fewer rows",
            field="options",
        )


def sized(answer: _Answer) -> _Answer:
    """The same answer, if clients take it.

    Raises:
        InvalidRequest: It is too long.
    """
    check_answer_bytes(answer.ByteSize())
    return answer


async def send(context: Context, message: Message) -> None:
    """Write a message of a stream, as soon as its reader has room for it.

    Raises:
        CancelledError: The reader has left.
        InvalidRequest: The message is too long.
    """
    try:
        await context.write(sized(message))
    except aio.InternalError as error:  # gRPC fails a write that waits before it cancels the handler
        raise asyncio.CancelledError from error


def code_of_leaving(arrival: float, deadline: float | None) -> grpc.StatusCode:
    """The status of a call whose caller has left by now, as the caller sees it."""
    is_late = has_expired(arrival, deadline)
    return grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED


def has_expired(arrival: float, deadline: float | None) -> bool:
    """Whether a caller with that deadline has stopped waiting by now, both by the monotonic clock."""
    if deadline is None:
        return False
    # gRPC rounds a timeout up to three digits on the wire, and the caller, who counts by its own clock,
    # hangs up first.
    early = _TIMEOUT_ROUNDING * (deadline - arrival) + _CLOCK_SECONDS
    return time.monotonic() >= deadline - early
