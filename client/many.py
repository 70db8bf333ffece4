"""Schedules the requests of many texts: when to send, to retry, and to give up.

Both clients send them to a server, and bulk work to an engine in its own process.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeGuard, TypeVar

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.memory import TranslationMemory
from seq2seq_serve.client.rpcs import Outcome, Translated, translated
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse
from seq2seq_serve.protos.sources import Sources

DEFAULT_IN_FLIGHT = 64
DEFAULT_GIVE_UP_SECONDS = 300.0

# Texts of one call. More cost little less each; fewer are shared out better among several servers.
MOST_TOGETHER = 32
_CALLS_IN_FLIGHT = 8  # or more: a text is sent when there is room for that share of those in flight

_MAX_TRIES = 3
_MAX_FAILED_IN_A_ROW = 5
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.2, 5.0
# After one of these, every other text would fail, too. FAILED_PRECONDITION: the adapter cannot be loaded.
_STOPPING_CODES = (
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "FAILED_PRECONDITION", "UNIMPLEMENTED"),
)

NO_ANSWER = ClientError("INTERNAL", "the call ended without an answer to this text")

Request = TypeVar("Request")

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingText(Generic[Request]):
    """One text between being read and being yielded. Owned by the dispatcher.

    Attributes:
        number: Position among the texts.
        request: What to send; None for a text that is blank, in the memory, or cannot be sent.
        kind: It shares calls with others of this kind; None for a text that needs a call of its own.
        ticket: Position among all sent texts, counted at the last time that this one was sent.
        has_shared: Whether it shared the last call in which it was sent.
        is_moved: Whether it was sent again at once, because a server ended such a call.
        num_failures: The number of failures that this text may have caused.
        result: Is set when the text is done.
    """

    number: int
    source: Sources
    request: Request | None = None
    kind: Hashable | None = None
    ticket: int = 0
    has_shared: bool = False
    is_moved: bool = False
    num_failures: int = 0
    result: Translated | None = None

    @property
    def to_send(self) -> Request:
        """The request of a text that has one."""
        assert self.request is not None
        return self.request


@dataclass
class Dispatcher(Generic[Request]):
    """Schedules the calls of one `translate_many`. Owned by the thread or task that runs it.

    Results come in the order of the texts. Texts of one kind share calls, up to `MOST_TOGETHER` in each, and
    end one by one. If an overloaded server pushes a call back, the dispatcher sends its texts again after the
    server's retry delay, halves the limit of texts in flight, and then raises it by one with each round of
    answers. If a call does not reach a server, or ends with an error that may pass, the dispatcher sends its
    texts again after a pause, which doubles each time. Until an answer arrives, and for the texts that may
    have caused a failure, it sends one text at a time. Before that, a text whose server ends is sent again at
    once.

    Attributes:
        prepare: Prepares the request of a source; if it raises `ClientError`, that text fails.
        in_flight: The maximum number of texts in flight.
        give_up_seconds: How long to go on while the server answers no call.
        memory: Its texts are not sent.
        kind_of: Returns the kind of a request, as in `PendingText`.
        error: Why the work stopped before the last text; the client raises it when `is_over`.
    """

    prepare: Callable[[Any], Request]
    in_flight: int
    give_up_seconds: float
    memory: TranslationMemory | None = None
    kind_of: Callable[[Request], Hashable | None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random
    error: Exception | None = None
    _texts: deque[PendingText[Request]] = field(default_factory=deque)  # read and not yet yielded, in order
    _waiting: list[tuple[int, PendingText[Request]]] = field(
        default_factory=list
    )  # a heap: the earliest text first
    _num_read: int = 0
    _is_read: bool = False
    _read_error: Exception | None = None
    _num_in_flight: int = 0
    _num_sent: int = 0
    _limit: float = 0.0  # the present limit of texts in flight
    _last_cut: int = 0  # the last ticket at the time of the last trouble
    _resume_at: float = 0.0
    _failing_since: float | None = None
    _num_troubles: int = 0  # rounds without an answer
    _is_away: bool = False  # no server has answered since a warning
    _logged_codes: set[str] = field(default_factory=set)  # of other errors that may pass
    _num_failed: int = 0  # failed texts since the last answer
    _suspects: set[PendingText[Request]] = field(default_factory=set)  # failed, and sent again alone

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise ValueError(f"in_flight is {self.in_flight}, and must be at least 1")
        self._limit = float(self.in_flight)
        self._resume_at = self.clock()

    @property
    def max_held(self) -> int:
        """The maximum number of texts that are read and not yet yielded, so that a slow one delays few."""
        return 4 * self.in_flight + 16

    @property
    def is_over(self) -> bool:
        """Whether no more texts will be yielded."""
        return self.error is not None or (self._is_read and not self._texts)

    def add(self, source: Any) -> None:
        """Adds the next text. If it cannot be sent, it fails, and its error has its place among the texts."""
        text: PendingText[Request] = PendingText(self._num_read, source)
        self._num_read += 1
        self._texts.append(text)
        if isinstance(source, str) and not source.strip():
            text.result = Translated(source, GenerateResponse())
            return
        if self.memory is not None and (known := self.memory.answer(source)) is not None:
            text.result = Translated(source, known, from_memory=True)
            return
        try:
            text.request = self.prepare(source)
            text.kind = self.kind_of(text.request)
        except ClientError as error:
            self._fail(text, error)
        except (TypeError, ValueError) as error:
            self._fail(text, ClientError.of_item(error, text.number))
        else:
            heapq.heappush(self._waiting, (text.number, text))

    def finish(self, error: Exception | None = None) -> None:
        """Records the end of the texts. The error that ended them, if any, is raised after their results."""
        self._is_read = True
        self._read_error = error

    def next_calls(self) -> list[list[PendingText[Request]]]:
        """Returns the calls to send now, each with its texts."""
        if not self._may_send or self.clock() < self._resume_at:
            return []
        calls: list[list[PendingText[Request]]] = []
        latest: dict[Hashable, list[PendingText[Request]]] = {}  # call by kind
        number = min(self._room, len(self._waiting))
        if len(self._waiting) > number > MOST_TOGETHER:
            number -= number % MOST_TOGETHER  # whole calls only: the others go with the next ones
        for _ in range(number):
            _, text = heapq.heappop(self._waiting)
            self._num_in_flight += 1
            self._num_sent += 1
            text.ticket = self._num_sent
            together = latest.get(text.kind, [])
            if text.kind is None or len(together) % MOST_TOGETHER == 0:
                together = latest[text.kind] = []
                calls.append(together)
            together.append(text)
        for call in calls:
            for text in call:
                text.has_shared = len(call) > 1
        return calls

    def seconds_to_wait(self) -> float | None:
        """Returns the time until the next call may be sent; None if only an event can change that."""
        return max(0.0, self._resume_at - self.clock()) if self._may_send else None

    def end(
        self, text: PendingText[Request], outcome: GenerateResponse | Exception, *, is_shared: bool = False
    ) -> None:
        """Records the answer to a text, or its error.

        Args:
            text: The text.
            outcome: The answer, or the error.
            is_shared: Whether it is the error of a whole call with other texts.
        """
        self._num_in_flight -= 1
        self._suspects.discard(text)
        if isinstance(outcome, ClientError) and outcome.code == "INVALID_ARGUMENT" and is_shared:
            # Perhaps only the message has too many elements: the server decides about each text alone.
            text.kind = None
            heapq.heappush(self._waiting, (text.number, text))
        elif self._may_move(text, outcome):
            text.is_moved = True
            heapq.heappush(self._waiting, (text.number, text))
        elif isinstance(outcome, GenerateResponse) or _is_about_the_text(outcome):
            self._record_answer(text)
            text.result = translated(text.source, outcome)
        elif not isinstance(outcome, ClientError) or is_about_all(outcome):
            self.error = self.error or outcome
        else:
            self._record_trouble(text, outcome)

    def results(self) -> Iterator[Translated]:
        """Yields the results that are due.

        A failure that the server may have caused is held back until the server answers another text. If the
        work stops first, the failure is never yielded, and its text counts as not done.
        """
        while self._texts and (result := self._texts[0].result) is not None:
            is_doubtful = result.error is not None and not result.error.is_about_the_text
            if is_doubtful and self._num_failed and (self.error or self._waiting or self._num_in_flight):
                return
            self._texts.popleft()
            yield result
        if self.is_over:
            self.error = self.error or self._read_error

    @property
    def _limit_now(self) -> int:
        return 1 if self._num_troubles or self._suspects else int(self._limit)

    @property
    def _room(self) -> int:
        return self._limit_now - self._num_in_flight

    @property
    def _may_send(self) -> bool:
        if not self._waiting or self.error is not None:
            return False
        _, first = self._waiting[0]
        least = 1
        if first.kind is not None:
            least = max(1, min(self._limit_now // _CALLS_IN_FLIGHT, MOST_TOGETHER, len(self._waiting)))
        return self._room >= least

    def _record_answer(self, text: PendingText[Request]) -> None:
        self._failing_since = None
        self._num_failed = 0
        if text.ticket <= self._last_cut:
            return
        if self._is_away:
            _log.info("the server answers again")
        self._is_away, self._num_troubles = False, 0
        self._limit = min(self.in_flight, self._limit + 1 / self._limit)

    def _record_trouble(self, text: PendingText[Request], error: ClientError) -> None:
        now = self.clock()
        pushback = error.retry_after_seconds
        if pushback is not None:  # with jitter, because other callers got the same time
            self._resume_at = max(self._resume_at, now + pushback * (1 + self.chance() / 10))
        if text.ticket > self._last_cut:
            self._last_cut = self._num_sent
            if pushback is not None or error.code == "DEADLINE_EXCEEDED":
                self._limit = max(1.0, self._limit / 2)
            if pushback is None:
                self._warn(error)
                pause = min(_MOST_PAUSE_SECONDS, _LEAST_PAUSE_SECONDS * 2**self._num_troubles)
                self._resume_at = max(self._resume_at, now + pause * (1 - self.chance() / 2))
                self._num_troubles += 1
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since >= self.give_up_seconds:
            self.error = error.followed_by(
                f"gave up after {self.give_up_seconds:g} seconds without an answer"
            )
        if pushback is None and error.code != "UNAVAILABLE":
            text.num_failures += 1
            text.kind = None
        if text.num_failures == _MAX_TRIES:
            self._fail_for_now(text, error)
            return
        heapq.heappush(self._waiting, (text.number, text))
        if error.code == "INTERNAL":  # a step of the engine fails for all texts that are in it
            self._suspects.add(text)

    def _warn(self, error: ClientError) -> None:
        """Logs an error that may pass: once until the next answer if no server answers, otherwise once."""
        if error.code != "UNAVAILABLE":
            if error.code not in self._logged_codes:
                _log.warning("%s; a text is tried up to %d times", error, _MAX_TRIES)
            self._logged_codes.add(error.code)
        elif not self._is_away:
            _log.warning("%s; trying again for up to %g seconds", error, self.give_up_seconds)
            self._is_away = True

    def _may_move(self, text: PendingText[Request], outcome: GenerateResponse | Exception) -> bool:
        """Whether another server may answer a text now: gRPC itself sends only unary calls again."""
        return (
            isinstance(outcome, ClientError)
            and outcome.code == "UNAVAILABLE"
            and outcome.retry_after_seconds is None
            and text.has_shared
            and not text.is_moved
        )

    def _fail_for_now(self, text: PendingText[Request], error: ClientError) -> None:
        self._fail(text, error)
        self._num_failed += 1
        if self._num_failed == _MAX_FAILED_IN_A_ROW:
            self.error = error.followed_by(f"stopped after {_MAX_FAILED_IN_A_ROW} texts in a row that failed")

    def _fail(self, text: PendingText[Request], error: ClientError) -> None:
        text.result = Translated(text.source, GenerateResponse(), error)


def is_about_all(error: ClientError) -> bool:
    """Whether every other text with the same options would fail, too."""
    is_option = error.code == "INVALID_ARGUMENT" and not error.is_about_the_text
    return is_option or error.code in _STOPPING_CODES


def _is_about_the_text(outcome: Exception) -> TypeGuard[ClientError]:
    return isinstance(outcome, ClientError) and outcome.is_about_the_text


async def answers(
    texts: Iterable[Any] | AsyncIterable[Any],
    dispatcher: Dispatcher[Request],
    send: Callable[[Sequence[Request]], AsyncIterable[Outcome]],
) -> AsyncGenerator[Translated]:
    """Yields the results of texts in order, each as soon as it and all before it are done.

    Args:
        texts: As `prepare` takes them. May be endless or slow: few more are read than have been yielded.
        dispatcher: A new one.
        send: Sends requests in one call, and yields the place of each with its answer or error. The
            dispatcher decides what follows a `ClientError`, also one that is raised; another error ends the
            work.

    Raises:
        Exception: The error for which the dispatcher stopped, after the results before it.
    """
    events: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
    room = asyncio.Semaphore(dispatcher.max_held)

    async def read() -> None:
        try:
            iterator = aiter(texts if isinstance(texts, AsyncIterable) else _each(texts))
            while await room.acquire():
                events.put_nowait(partial(dispatcher.add, await anext(iterator)))
        except StopAsyncIteration:
            events.put_nowait(dispatcher.finish)
        except Exception as error:
            events.put_nowait(partial(dispatcher.finish, error))

    async def ask(texts: list[PendingText[Request]]) -> None:
        unanswered = dict(enumerate(texts))
        error: Exception = NO_ANSWER
        try:
            async for place, outcome in send([text.to_send for text in texts]):
                events.put_nowait(partial(dispatcher.end, unanswered.pop(place), outcome))
        except Exception as raised:
            error = raised
        except asyncio.CancelledError:  # gRPC cancels the calls of a closed channel
            error = ClientError("CANCELLED", "the caller cancelled")
        for text in unanswered.values():
            events.put_nowait(partial(dispatcher.end, text, error, is_shared=len(texts) > 1))

    under_way: set[asyncio.Task[None]] = {asyncio.create_task(read())}
    try:
        while not dispatcher.is_over:
            for call in dispatcher.next_calls():
                task = asyncio.create_task(ask(call))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            with suppress(TimeoutError):
                async with asyncio.timeout(dispatcher.seconds_to_wait()):
                    event = await events.get()
                event()
            while not events.empty():
                events.get_nowait()()
            for result in dispatcher.results():
                yield result
                room.release()
    finally:
        for task in under_way:
            task.cancel()
    if dispatcher.error is not None:
        raise dispatcher.error


async def _each(texts: Iterable[Any]) -> AsyncIterator[Any]:
    for text in texts:
        yield text
