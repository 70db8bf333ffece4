"""Threads beside the event loop that callers share fairly: for long texts, files and large answers."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from seq2seq_serve.server.errors import Cancelled, DeadlineExceeded, Unavailable
from seq2seq_serve.server.service.shares import Shares

_Result = TypeVar("_Result")

# Called often; raises if the work must end because its caller has left or the server drains. It may wait
# while others have their turns.
YieldPoint = Callable[[], None]

_BYTES_PER_SECOND = 500_000  # about what one core cuts into tokens or sentences of the slowest texts
_TURN_SECONDS = 0.02
# Works of one caller, and as many accepted ones, each of which may hold memory while it waits for its turn
_MOST_BEGUN = 4
_MOST_THREADS = 1024


class FairThreads:
    """Threads that work for callers in turn; some of them run at once.

    A turn ends at the first checkpoint after `_TURN_SECONDS` if others wait, so that long work of one caller
    does not hold up the short work of another. Decoding of files, and arithmetic of arrays, run without the
    interpreter's lock, so that several threads do more. Cutting texts needs the lock: a second thread would
    only take it from the event loop and the engines more often. Owned by `Calls`; used on the event loop
    only. Invariant: work whose caller has left does not start, or ends at its next checkpoint.

    Args:
        name: The name of the threads.
        max_bytes: The size of the work that may wait or run, shared by the callers.
        num_running: The number of threads that run at once.

    Attributes:
        shares: The bytes of the work that waits or runs.
    """

    def __init__(self, name: str, max_bytes: float = math.inf, num_running: int = 1) -> None:
        self.shares = Shares(max_bytes, "sources of {} bytes wait to be read")
        self._is_draining = False
        self._pool = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=name)
        self._turns = _Turns(num_running)
        # For begun work, by caller; the accepted items of a batch leave places for other calls.
        self._places = WeakValueDictionary[tuple[str, bool], asyncio.Semaphore]()

    async def run(
        self,
        work: Callable[[YieldPoint], _Result],
        num_bytes: int,
        caller: str,
        deadline: float | None,
        *,
        is_accepted: bool = False,
    ) -> _Result:
        """Returns the result of `work`.

        Args:
            work: Touches no state of the event loop, and calls its checkpoint every few milliseconds.
            num_bytes: The size of the work.
            caller: The name of the caller.
            deadline: Monotonic seconds.
            is_accepted: Whether the work is for a call that is finished while the server drains, and waits
                however much waits already.

        Raises:
            Overloaded: Too much work waits, and the caller would have more than its share of it.
            DeadlineExceeded: The deadline passed before the end of the work.
            Unavailable: The server drains.
        """
        loop, turn = asyncio.get_running_loop(), _Turn(caller)

        def check() -> None:
            if turn.has_left:
                raise Cancelled("the caller has left")
            if self._is_draining and not is_accepted:
                raise Unavailable("the server is shutting down")

        def checkpoint() -> None:
            check()
            self._turns.pass_on(turn)
            check()

        def begin() -> _Result:
            try:
                self._turns.wait(turn)
                check()
                return work(checkpoint)
            finally:
                self._turns.end(turn)
                if not loop.is_closed():
                    loop.call_soon_threadsafe(room.close)

        check()
        if is_accepted:
            room = self.shares.add(caller, num_bytes)
        else:
            room = self.shares.take(caller, num_bytes, self.shares.held.total() / _BYTES_PER_SECOND)
        places = self._places.setdefault((caller, is_accepted), asyncio.Semaphore(_MOST_BEGUN))
        job: Future[_Result] | None = None
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()), places:
                job = self._pool.submit(begin)
                return await asyncio.wrap_future(job)
        except TimeoutError:
            text = "the deadline passed before the sources were read, or the answer was built"
            raise DeadlineExceeded(text) from None
        finally:
            self._turns.leave(turn)
            if job is None or job.cancel():  # no thread will begin it
                room.close()

    def drain(self) -> None:
        """Ends work with `Unavailable`, because the engines would refuse its requests."""
        self._is_draining = True

    def stop(self) -> None:
        """Ends the threads; running work ends at its next checkpoint."""
        self.drain()
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(eq=False)
class _Turn:
    """The place of some work among the turns.

    Attributes:
        caller: The name of the caller.
        has_left: Whether the caller has left.
        is_running: Whether it has its turn.
        ends: When its turn ends, if others wait: monotonic seconds.
        woken: Is set when it gets its turn, or its caller leaves.
    """

    caller: str
    has_left: bool = False
    is_running: bool = False
    ends: float = 0.0
    woken: threading.Event = field(default_factory=threading.Event)


class _Turns:
    """Gives turns to waiting threads: each caller has one after every other caller, for one of its works.

    Thread-safe. Invariant: nobody waits while fewer than `num_running` run.
    """

    def __init__(self, num_running: int) -> None:
        self._lock = threading.Lock()
        self._num_free = num_running
        self._waiting: dict[str, deque[_Turn]] = {}  # by caller, in the order of their next turns

    def wait(self, turn: _Turn) -> None:
        """Waits for a turn.

        Raises:
            Cancelled: The caller has left.
        """
        with self._lock:
            if not turn.has_left:
                self._queue(turn)
                if self._num_free:
                    self._num_free -= 1
                    self._start_next()
        self._sleep(turn)

    def pass_on(self, turn: _Turn) -> None:
        """Ends a turn that has lasted long enough while others wait, and waits for the next one.

        That of a caller who has left goes on to its next checkpoint.

        Raises:
            Cancelled: The caller has left.
        """
        if not self._waiting or time.monotonic() < turn.ends:
            return
        with self._lock:
            if turn.has_left:
                return
            self._stop(turn)
            turn.woken.clear()
            self._queue(turn)
            self._start_next()
        self._sleep(turn)

    def end(self, turn: _Turn) -> None:
        """Ends a turn; nothing happens if there is none."""
        with self._lock:
            if turn.is_running:
                self._stop(turn)
                if self._waiting:
                    self._start_next()
                else:
                    self._num_free += 1

    def leave(self, turn: _Turn) -> None:
        """Ends the waiting of work whose caller has left, or has its result."""
        with self._lock:
            turn.has_left = True
            works = self._waiting.get(turn.caller)
            if works is not None and turn in works:
                works.remove(turn)
                if not works:
                    del self._waiting[turn.caller]
        turn.woken.set()

    def _queue(self, turn: _Turn) -> None:
        self._waiting.setdefault(turn.caller, deque()).append(turn)

    def _stop(self, turn: _Turn) -> None:
        turn.is_running = False
        self._put_last(turn.caller)

    def _put_last(self, caller: str) -> None:
        if caller in self._waiting:
            self._waiting[caller] = self._waiting.pop(caller)

    def _start_next(self) -> None:
        works = next(iter(self._waiting.values()))
        turn = works.popleft()
        if not works:
            del self._waiting[turn.caller]
        self._put_last(turn.caller)
        turn.is_running, turn.ends = True, time.monotonic() + _TURN_SECONDS
        turn.woken.set()

    def _sleep(self, turn: _Turn) -> None:
        turn.woken.wait()
        if not turn.is_running:
            raise Cancelled("the caller has left")
