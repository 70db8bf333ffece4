"""An engine in a process of its own: `EngineProcess` in the server's process, and `main` of the other one.

Python runs one thread of a process at a time, so the engines of a small model would wait for each other and
for the handlers. The two processes exchange pickles over a pair of sockets. A request crosses once, and is a
number in all messages after that. Both have the same monotonic clock.
"""

from __future__ import annotations

import asyncio
import copyreg
import io
import itertools
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, NamedTuple

from seq2seq_serve.bundle.manifest import Bundle, VariantFiles
from seq2seq_serve.bundle.names import Axis, Verb
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.server.config import QueueLimits, RunnerConfig
from seq2seq_serve.server.engine.engine import RETRY_SECONDS, STOP_SECONDS, Engine
from seq2seq_serve.server.engine.records import (
    Hypothesis,
    Load,
    Request,
    Result,
    Timings,
    Turn,
    Update,
)
from seq2seq_serve.server.engine.scheduler import GATHERED_SHARE, SchedulerLimits
from seq2seq_serve.server.errors import EngineFailed, ServerError, Unavailable
from seq2seq_serve.server.logs import configure_logging
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import Sizing
from seq2seq_serve.server.trimming import keep_trimmed, spare_what_lives

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # which Ctrl-C, and systemd, send to all processes of a server
_MAIN = f"import sys; from {__name__} import main; main(*map(int, sys.argv[1:]))"
_HELD_SECONDS = 0.01  # a turn that has waited as long is reported after the next one
_TOKEN_BYTES = "token bytes"  # stands for the table of the model's tokens in a pickle


@dataclass(frozen=True)
class EngineSetup:
    """All that an engine is built from, except the weights.

    Attributes:
        bundle: Its tokenizers are not used.
        graphs: The content of the graphs' files.
        token_bytes: The table of the target's tokens, to which the stop rules of requests refer.
        log_level: As in the server's configuration.
        log_format: As in the server's configuration.
    """

    model_name: str
    bundle: Bundle
    runner: RunnerConfig
    sizing: Sizing
    graphs: dict[Verb, bytes]
    queue_limits: QueueLimits
    limits: SchedulerLimits
    token_bytes: Sequence[bytes]
    log_level: str
    log_format: str


def started_engine(setup: EngineSetup, weights: memoryview, deliver: Callable[[Turn], None]) -> Engine:
    """Load the graphs, and start the engine on a thread of this process.

    Raises:
        ValueError: The bundle cannot be used here; the message names it.
    """
    path = setup.bundle.path
    try:
        files = VariantFiles(setup.graphs, weights)
        runner = OnnxRunner(setup.bundle, setup.runner, setup.sizing, files)
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        raise ValueError(f"{path}: {error}") from error
    engine = Engine(
        runner,
        model_name=setup.model_name,
        deliver=deliver,
        queue_limits=setup.queue_limits,
        limits=setup.limits,
    )
    try:
        engine.start()
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        engine.stop()
        raise ValueError(f"{path}: the graphs do not run here: {error}") from error
    return engine


class _Submit(NamedTuple):
    """Server to process: queue the requests of a call, all or none."""

    numbers: tuple[int, ...]
    requests: tuple[Request, ...]


class _GiveBack(NamedTuple):
    """Server to process: return the waiting requests that come next, for this number of slots."""

    num_slots: int


class _Cancel(NamedTuple):
    """Server to process: end a request."""

    number: int
    is_expired: bool


class _Stop(NamedTuple):
    """Server to process: end all requests, and then itself."""


class _Started(NamedTuple):
    """Process to server: the engine is warm, or cannot be built."""

    problem: str = ""


class _Refused(NamedTuple):
    """Process to server: the engine does not accept these requests."""

    numbers: tuple[int, ...]
    error: ServerError


class _GivenBack(NamedTuple):
    """Process to server: the answer to `_GiveBack`."""

    numbers: tuple[int, ...]


_Updates = tuple[tuple[int, Mapping[int, list[int]], Result | None], ...]  # by the numbers of requests


class _Turned(NamedTuple):
    """Process to server: turns, whose updates are apart, and the engine's state after them."""

    turns: tuple[tuple[Turn, _Updates], ...]
    load: Load
    is_healthy: bool


def _reduction(record: type) -> Callable[[Any], tuple[type, tuple[Any, ...]]]:
    """Returns a function that describes a record by its fields."""
    values = attrgetter(*record.__slots__)  # type: ignore[attr-defined]
    return lambda one: (record, values(one))


class _CommandPickler(pickle.Pickler):
    """Pickles commands without the table of tokens, which both processes have.

    It looks for the table in every object, so it takes twice the time of `pickle`.
    """

    def __init__(self, stream: io.BytesIO, token_bytes: Sequence[bytes]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._token_bytes = token_bytes

    def persistent_id(self, value: Any) -> str | None:
        return _TOKEN_BYTES if value is self._token_bytes else None


class _CommandUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BufferedReader, token_bytes: Sequence[bytes]) -> None:
        super().__init__(stream)
        self._token_bytes = token_bytes

    def persistent_load(self, _name: str) -> Sequence[bytes]:
        return self._token_bytes


class _ReportPickler(pickle.Pickler):
    """Pickles what an engine reports, in half of the time that `pickle` needs for dataclasses."""

    dispatch_table = copyreg.dispatch_table | {
        record: _reduction(record) for record in (Turn, Result, Hypothesis, Timings)
    }


class _Outbox:
    """Sends without ever waiting for the reader: a thread sends what the socket does not take at once.

    Owned by the sender of its messages; thread-safe.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._num_behind = 0  # pieces that the thread has not sent yet
        self._behind: SimpleQueue[memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send_behind, name=f"outbox-{name}", daemon=True)
        self._thread.start()

    def send(self, content: bytes) -> None:
        """Send bytes after all earlier ones; what a dead reader does not read is lost."""
        with self._sending, suppress(OSError):
            num_sent = 0
            if not self._num_behind:
                with suppress(BlockingIOError):
                    num_sent = self._connection.send(content, socket.MSG_DONTWAIT)
            if num_sent < len(content):
                self._num_behind += 1
                self._behind.put(memoryview(content)[num_sent:])

    def close(self) -> None:
        """End the thread, after it has sent everything or the connection was shut down."""
        self._behind.put(None)
        self._thread.join()

    def _send_behind(self) -> None:
        while (content := self._behind.get()) is not None:
            with suppress(OSError):
                self._connection.sendall(content)
            with self._sending:
                self._num_behind -= 1


class EngineProcess:
    """An engine in a process of its own; callers use it like an `Engine`.

    Owned by the served model. The process starts at once, so that several start side by side. It ends with
    this process, however that ends, and it ignores the signals that end a server, which drains first. If it
    has free slots while requests wait for another process of its `Group`, it takes over some of them.

    Args:
        setup: Describes the engine.
        weights: A descriptor of memory with the weights (`shared_memory`); it may be closed afterwards.
        group: The engines of the same model, to which it adds itself.
        deliver: Is called with the results of each turn, on a thread of this object; must not block.
        refuse: Is called on that thread with requests that the engine does not accept, and the error.
    """

    def __init__(
        self,
        setup: EngineSetup,
        weights: int,
        group: Group,
        *,
        deliver: Callable[[Turn], None],
        refuse: Callable[[Sequence[Request], ServerError], None],
    ) -> None:
        self.model_name = setup.model_name
        self.num_slots = setup.sizing.num_slots
        self.max_source_length = setup.sizing.max_source_length
        self.max_target_length = setup.sizing.sizes[Axis.CACHE_CAPACITY]
        self.is_healthy = True  # whether its steps succeed and its process runs
        self._path = setup.bundle.path
        self._group = group
        self._deliver = deliver
        self._refuse = refuse
        self._token_bytes = setup.token_bytes
        self._entrance = threading.Lock()  # guards the seven below
        self._open: dict[int, Request] = {}  # accepted or on the way to it, by their numbers
        self._numbers: dict[Request, int] = {}
        self._cancelled: dict[Request, bool] = {}  # those of them with a cancellation: is it the deadline's?
        self._num_slots_wanted = 0
        self._is_draining = False
        self._has_ended = False  # so that no request comes after the last answer
        self._is_asked = False  # to give back requests
        self._last_sign_at = time.monotonic()  # of life: a message, or the first request after none
        self._count = itertools.count()
        self._load = Load(0, 0, 0, 0)  # after the last turn
        self._is_stopping = False
        self._has_died = False
        self._warm_up: Future[None] = Future()
        self._connection, its_end = socket.socketpair()
        with its_end, _signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(its_end.fileno()), str(weights)],
                pass_fds=(its_end.fileno(), weights),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._outbox = _Outbox(self._connection, self.model_name)
        self._outbox.send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL))
        group.engines.append(self)
        self._thread = threading.Thread(target=self._receive, name=f"instance-{self.model_name}", daemon=True)
        self._thread.start()

    @property
    def process_id(self) -> int:
        """The system's number of the process."""
        return self._process.pid

    def start(self) -> None:
        """Wait until the engine is warm.

        Raises:
            ValueError: It cannot be built; the message says why.
        """
        self._warm_up.result()

    def submit(self, *requests: Request) -> None:
        """Send the requests of a call to the engine, which accepts all or none; as `Engine.submit`.

        Raises:
            Unavailable: The engine is draining or has ended. Other refusals are reported by `refuse`.
        """
        with self._entrance:
            if self._is_draining:
                raise Unavailable(f"model {self.model_name} is shutting down")
            self._add(requests)

    def accept(self, *requests: Request) -> None:
        """The same while the engine drains.

        Raises:
            Unavailable: The engine has ended.
        """
        with self._entrance:
            if self._has_ended:
                raise Unavailable(f"model {self.model_name} is shutting down")
            self._add(requests)

    def _add(self, requests: tuple[Request, ...]) -> None:
        if not self._open:
            self._last_sign_at = time.monotonic()
        numbers = tuple(itertools.islice(self._count, len(requests)))
        self._open |= zip(numbers, requests, strict=True)
        self._numbers |= zip(requests, numbers, strict=True)
        self._num_slots_wanted += sum(request.num_slots for request in requests)
        self._is_asked = False
        self._send(_Submit(numbers, requests))

    def cancel(self, request: Request, *, is_expired: bool = False) -> None:
        """End a request, which another engine may have taken over; as `Engine.cancel`."""
        with self._group.moving:
            for engine in self._group.engines:
                with engine._entrance:
                    number = engine._numbers.get(request)
                    if number is not None:
                        engine._cancelled[request] = is_expired
                        engine._send(_Cancel(number, is_expired))

    def drain(self) -> None:
        """Refuse new requests from now on, and finish the accepted ones; thread-safe."""
        with self._entrance:
            self._is_draining = True

    def stop(self) -> None:
        """End the process; unfinished requests end with `Unavailable`."""
        self.drain()
        self._is_stopping = True
        if self._warm_up.done():
            self._send(_Stop())
        else:
            self._process.kill()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join(STOP_SECONDS)

    def may_take(self) -> bool:
        """Whether it should get requests while other engines are healthy; as `Engine.may_take`."""
        is_due = time.monotonic() - self._last_sign_at > RETRY_SECONDS
        return not self._has_ended and (self.is_healthy or is_due)

    def load(self) -> Load:
        """Returns the numbers of its requests, slots and cache positions in use after its last turn."""
        return self._load._replace(num_waiting=max(len(self._open) - self._load.num_running, 0))

    def num_slots_wanted(self) -> int:
        """Returns the number of slots that all unfinished requests need; thread-safe."""
        return self._num_slots_wanted

    def silent_seconds(self) -> float:
        """Returns the seconds since the last report.

        0 while there is no work; infinity once the process has ended unexpectedly.
        """
        if self._has_died:
            return math.inf
        return time.monotonic() - self._last_sign_at if self._open else 0.0

    def ask_back(self, num_slots: int) -> None:
        """Ask the process to give back waiting requests for this number of slots, once at a time.

        After an answer without requests it is asked again once it has got new ones.
        """
        with self._entrance:
            if not self._is_asked:
                self._is_asked = True
                self._send(_GiveBack(num_slots))

    def _send(self, command: _Submit | _GiveBack | _Cancel | _Stop) -> None:
        stream = io.BytesIO()
        if isinstance(command, _Submit) and any(request.stops is not None for request in command.requests):
            _CommandPickler(stream, self._token_bytes).dump(command)
        else:
            pickle.dump(command, stream, pickle.HIGHEST_PROTOCOL)
        self._outbox.send(stream.getvalue())

    def _receive(self) -> None:
        """The thread's main function: handle all messages until the process has ended."""
        with self._connection.makefile("rb") as stream:
            try:
                while True:
                    self._handle(pickle.load(stream))
            except (EOFError, OSError, pickle.UnpicklingError):
                pass  # the process has ended; the last two within a message
            except BaseException:  # whatever ends the thread, every handler must get an answer
                _log.critical("model %s: an instance cannot be heard", self.model_name, exc_info=True)
        self._end()

    def _handle(self, message: _Started | _Refused | _GivenBack | _Turned) -> None:
        if not isinstance(message, _GivenBack):  # which another thread than the engine's sends
            self._last_sign_at = time.monotonic()
        if isinstance(message, _Turned):
            self._load, self.is_healthy = message.load, message.is_healthy
            for turn, news in message.turns:
                updates = tuple(
                    Update(self._open[number], token_ids, result) for number, token_ids, result in news
                )
                self._forget([number for number, _, result in news if result is not None])
                self._deliver(replace(turn, updates=updates))
            self._group.balance()
        elif isinstance(message, _GivenBack):
            self._is_asked = not message.numbers
            with self._group.moving:
                for number in message.numbers:
                    is_expired = self._cancelled.get(self._open[number])
                    (request,) = self._forget((number,))
                    try:
                        self._group.idlest().accept(request)
                    except Unavailable as error:
                        self._refuse((request,), error)
                    if is_expired is not None:  # the engine had given it back before it saw the cancellation
                        self.cancel(request, is_expired=is_expired)
        elif isinstance(message, _Refused):
            self._refuse(self._forget(message.numbers), message.error)
        elif message.problem:
            self._warm_up.set_exception(ValueError(message.problem))
        else:
            self._warm_up.set_result(None)

    def _forget(self, numbers: Sequence[int]) -> list[Request]:
        """Remove requests that have ended; returns them."""
        with self._entrance:
            requests = [self._open.pop(number) for number in numbers]
            for request in requests:
                del self._numbers[request]
                self._cancelled.pop(request, None)
                self._num_slots_wanted -= request.num_slots
        return requests

    def _end(self) -> None:
        """Give every unfinished request an answer after the end of the process."""
        self._process.kill()  # it may have closed its socket only
        code = self._process.wait()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._outbox.close()
        self._connection.close()
        self.drain()
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        if not self._warm_up.done():
            problem = f"{self._path}: the process of an instance {cause} while it started"
            self._warm_up.set_exception(ValueError(problem))
        elif not self._is_stopping:
            self._has_died, self.is_healthy = True, False
            _log.critical(
                "model %s: the process of an instance %s, and its %d unfinished requests fail; the other "
                "instances go on: restart the server, with less --memory-budget if memory was short",
                self.model_name,
                cause,
                len(self._open),
            )
        error: ServerError = EngineFailed("the process of the engine ended")
        if self._is_stopping:
            error = Unavailable("the server stopped before the target was complete")
        self._load = Load(0, 0, 0, 0)
        with self._entrance:
            self._has_ended = True
        ended = self._forget(tuple(self._open))
        if ended:
            now = time.monotonic()
            results = (Result.failed(request, error, now - request.arrival) for request in ended)
            self._deliver(Turn(tuple(map(Update, ended, itertools.repeat({}), results))))


AnyEngine = Engine | EngineProcess


class Group:
    """The engines of one model that have a process each, which take over each other's waiting requests.

    Attributes:
        engines: Each adds itself.
        moving: Held while requests move between engines.
    """

    def __init__(self) -> None:
        self.engines: list[EngineProcess] = []
        self.moving = threading.RLock()

    def idlest(self) -> EngineProcess:
        """Returns the engine, if possible a healthy one, whose requests want the fewest slots."""
        able = [engine for engine in self.engines if engine.may_take()] or self.engines
        return min(able, key=lambda engine: engine.num_slots_wanted())

    def balance(self) -> None:
        """Let an engine with free slots take over what waits for another and fits into them."""
        idle = self.idlest()
        busy = max(self.engines, key=lambda engine: engine.num_slots_wanted())
        num_free = idle.num_slots - idle.num_slots_wanted()
        if busy.num_slots_wanted() > busy.num_slots and num_free * GATHERED_SHARE >= idle.num_slots:
            busy.ask_back(num_free)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that starts in this block never gets the signals that end a server."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def shared_memory(content: memoryview) -> Iterator[int]:
    """Yields a descriptor of memory with a copy of the content, which other processes can map."""
    descriptor = os.memfd_create("weights")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield descriptor
    finally:
        os.close(descriptor)


def without_tokenizers(bundle: Bundle) -> Bundle:
    """Returns a bundle that a runner can use, and that is small."""
    none = Tokenizer.__new__(Tokenizer)
    return replace(bundle, source_tokenizer=none, target_tokenizer=none)


def main(connection: int, weights: int) -> None:
    """Run one engine for the process that started this one, until that process stops it or ends.

    Args:
        connection: Descriptor of the socket.
        weights: Descriptor of the memory with the weights.
    """
    _Instance(socket.socket(fileno=connection)).run(weights)


class _Instance:
    """The engine of this process, and its connection to the server.

    Owned by `main`. The main thread starts the engine and waits for its end, the engine's thread reports the
    turns, and a third thread carries out the server's commands.

    A report interrupts the server's process, which may share a core with an engine. So turns are reported
    together while no caller waits for their results: those of a call without a stream are sent all at once.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._sending = threading.Lock()
        self._requests: dict[int, Request] = {}  # those that have not ended
        self._numbers: dict[Request, int] = {}
        self._calls: dict[Request, set[Request]] = {}  # by request, those of its call that have not ended
        self._reporting = threading.Lock()  # guards the two below
        self._held: list[tuple[Turn, _Updates]] = []  # turns that are not reported yet
        self._held_since = 0.0
        self._engine: Engine | None = None

    def run(self, weights: int) -> None:
        """Start the engine, and wait until its thread ends."""
        setup: EngineSetup = pickle.load(self._stream)
        configure_logging(setup.log_level, setup.log_format)
        commands = threading.Thread(
            target=self._carry_out, args=(setup.token_bytes,), name="commands", daemon=True
        )
        commands.start()
        with open(weights, "rb") as file:
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            self._engine = engine = started_engine(setup, content, self._deliver)
        except ValueError as error:
            self._send(_Started(str(error)))
            return
        del setup
        spare_what_lives()
        threading.Thread(target=asyncio.run, args=(keep_trimmed(),), name="trimmer", daemon=True).start()
        self._send(_Started())
        engine.wait()
        logging.shutdown()
        os._exit(int(math.isinf(engine.silent_seconds())))  # without freeing each session

    def _carry_out(self, token_bytes: Sequence[bytes]) -> None:
        """The main function of the thread that reads commands: nothing outlives the server."""
        try:
            while not isinstance(command := _CommandUnpickler(self._stream, token_bytes).load(), _Stop):
                self._handle(command)
        except (EOFError, OSError, pickle.UnpicklingError):
            os._exit(1)  # the server has ended
        except BaseException:
            _log.critical("the instance cannot carry out a command, and ends", exc_info=True)
            logging.shutdown()
            os._exit(1)
        assert self._engine is not None
        self._engine.stop()

    def _handle(self, command: _Submit | _GiveBack | _Cancel) -> None:
        assert self._engine is not None
        if isinstance(command, _Cancel):
            request = self._requests.get(command.number)
            if request is not None:
                self._engine.cancel(request, is_expired=command.is_expired)
            return
        if isinstance(command, _GiveBack):
            given = self._engine.give_back(command.num_slots)
            numbers = tuple(self._numbers[request] for request in given)
            for request in given:
                self._forget(request)
            self._send(_GivenBack(numbers))
            self._report()  # the engine may have no further turn
            return
        self._requests |= zip(command.numbers, command.requests, strict=True)
        self._numbers |= zip(command.requests, command.numbers, strict=True)
        call = set(command.requests)
        self._calls |= dict.fromkeys(command.requests, call)
        try:
            self._engine.submit(*command.requests)
        except Exception as raised:
            error = raised if isinstance(raised, ServerError) else EngineFailed("the engine failed")
            if error is not raised:
                _log.exception("model %s: a request cannot be queued", self._engine.model_name)
            for request in command.requests:
                self._forget(request)
            self._send(_Refused(command.numbers, error))

    def _deliver(self, turn: Turn) -> None:
        engine = self._engine
        assert engine is not None
        updates = tuple(
            (self._numbers[update.request], update.token_ids, update.result) for update in turn.updates
        )
        now = time.monotonic()
        with self._reporting:
            if not self._held:
                self._held_since = now
            self._held.append((replace(turn, updates=()), updates))
        # Without waiting requests, the server may have some for the free slots.
        is_urgent = not engine.num_waiting or now - self._held_since >= _HELD_SECONDS
        for update in turn.updates:
            is_urgent |= update.request.stream
            if update.result is not None:
                is_last = self._forget(update.request)
                is_urgent |= is_last or update.result.error is not None
        if is_urgent:
            self._report()

    def _report(self) -> None:
        """Send the turns that are not reported yet."""
        engine = self._engine
        assert engine is not None
        with self._reporting:
            if self._held:
                self._send(_Turned(tuple(self._held), engine.load(), engine.is_healthy))
                self._held.clear()

    def _forget(self, request: Request) -> bool:
        """Forget a request; returns whether it was the last of its call."""
        del self._requests[self._numbers.pop(request)]
        call = self._calls.pop(request)
        call.remove(request)
        return not call

    def _send(self, report: _Started | _Refused | _GivenBack | _Turned) -> None:
        stream = io.BytesIO()
        _ReportPickler(stream, pickle.HIGHEST_PROTOCOL).dump(report)
        with self._sending, suppress(OSError):  # the thread of the commands sees that the server has ended
            self._connection.sendall(stream.getbuffer())
