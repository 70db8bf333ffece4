"""A core in a process of its own: `ProcessCore` in the server's process, and `main` of the other one.

Python runs one thread of a process at a time, so the cores of a small model would wait for each other and for
the handlers. The two processes exchange pickles over a pair of sockets, each after its length. A request
crosses once, in an `Admit`, and all messages after that have only its number. A `Stop` ends the process. Both
have the same monotonic clock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.server.engine.async_engine import CoreHandle
from seq2seq_serve.server.engine.core import STOP_SECONDS, Admit, Cancel, Core, Stop, WriteAdapter
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Turn, Update
from seq2seq_serve.server.models.cores import CoreSpec, started_core
from seq2seq_serve.server.system.logs import configure_logging
from seq2seq_serve.server.system.threads import in_thread
from seq2seq_serve.server.system.trimming import Trimmer, spare_what_lives

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # which Ctrl-C, and systemd, send to all processes of a server
_MAIN = f"import sys; from {__name__} import main; main(*map(int, sys.argv[1:]))"
_LENGTH = struct.Struct("<Q")
_HEARTBEAT_SECONDS = 1.0
_MOST_SILENT_ROUNDS = 5  # of the watcher, without a heartbeat


class _Cancel(NamedTuple):
    """Server to process: end a request."""

    number: int
    is_expired: bool


class _Turned(NamedTuple):
    """Process to server: the core is warm, or has turned, or is alive.

    Attributes:
        turns: Their updates have the numbers of requests.
        turn_seconds: The age of the present turn.
    """

    turns: list[Turn]
    turn_seconds: float


class _Stopped(NamedTuple):
    """Process to server: the core cannot be built."""

    problem: str


def _packed(message: object) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


class ProcessCore(CoreHandle):
    """A core in a process of its own.

    The process ends with this one, however that ends, and ignores the signals that end a server, which drains
    first.

    Args:
        spec: Describes the core.
        weights: Descriptors of memory with the weights of the model, and of its draft model, if it has one
            (`shared_memory`); they may be closed afterwards.

    Attributes:
        process: The last one that was started.
    """

    can_be_killed = True

    def __init__(self, spec: CoreSpec, weights: Sequence[int]) -> None:
        super().__init__(spec.sizing.num_slots)
        self._spec = spec
        self._weights = [os.dup(descriptor) for descriptor in weights]
        self.process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._by_number: dict[int, Request] = {}
        self._turn_seconds = 0.0

    async def start(self, turned: Callable[[Sequence[Turn]], None], ended: Callable[[str], None]) -> None:
        """Start the process; as `CoreHandle.start`."""
        ours, theirs = socket.socketpair()
        with theirs, _signals_blocked():
            descriptors = theirs.fileno(), *self._weights
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _MAIN, *map(str, descriptors)],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
            except OSError as error:  # for one, the container's limit of processes
                ours.close()
                problem = f"its engine's process cannot be started: {error}"
                raise ValueError(f"{self._spec.bundle.path}: {problem}") from error
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._send(self._spec)
        first = await _read_message(reader)
        if first is None:
            raise ValueError(f"{self._spec.bundle.path}: {await self._reap()} while it started")
        if isinstance(first, _Stopped):
            await self._reap()
            raise ValueError(first.problem)
        self.num_silent_rounds, self._turn_seconds = 0, 0.0
        self._listening = asyncio.create_task(self._listen(reader, turned, ended))

    def admit(self, requests: tuple[Request, ...]) -> None:
        """As `CoreHandle.admit`."""
        self._send(Admit(requests))
        for request in requests:
            self._by_number[request.number] = request
            request.drop_arrays()

    def cancel(self, request: Request, *, is_expired: bool) -> None:
        """As `CoreHandle.cancel`."""
        if request.number in self._by_number:
            self._send(_Cancel(request.number, is_expired))

    def write_adapter(self, place: int, weights: Weights) -> None:
        """As `CoreHandle.write_adapter`."""
        self._send(WriteAdapter(place, weights))

    def watch(self) -> None:
        """As `CoreHandle.watch`."""
        self.num_silent_rounds += 1

    def turn_seconds(self) -> float:
        """As `CoreHandle.turn_seconds`, as the process last reported it."""
        is_silent = self.num_silent_rounds > _MOST_SILENT_ROUNDS
        return math.inf if is_silent else self._turn_seconds

    def kill(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()

    async def stop(self) -> None:
        """End the process; as `CoreHandle.stop`."""
        if self._listening is None:  # it has never been warm, or is being started again
            self.kill()
        else:
            self._send(Stop())
            stopping, self._listening = self._listening, None
            await asyncio.wait({stopping}, timeout=STOP_SECONDS)  # `asyncio.run` may have cancelled it
            self.kill()
            await asyncio.wait({stopping})
        if self.process is not None:
            await self._reap()
        while self._weights:
            os.close(self._weights.pop())

    def _send(self, message: object) -> None:
        """Send a message without waiting; what a dead process does not read is lost."""
        assert self._writer is not None
        if not self._writer.is_closing():  # its end is read in a later turn of the loop
            self._writer.write(_packed(message))

    async def _listen(
        self,
        reader: asyncio.StreamReader,
        turned: Callable[[Sequence[Turn]], None],
        ended: Callable[[str], None],
    ) -> None:
        """Hand over all turns until the process ends or sends another message than turns."""
        try:
            while (message := await _read_message(reader)) is not None:
                self.num_silent_rounds, self._turn_seconds = 0, message.turn_seconds
                if message.turns:
                    turned(
                        [
                            turn._replace(updates=tuple(map(self._with_request, turn.updates)))
                            for turn in message.turns
                        ]
                    )
        except Exception:
            _log.critical("the turns of an instance cannot be read", exc_info=True)
            self.fault = self.fault or "whose turns could not be read"
        self.is_ready = False
        is_stopping, self._listening = self._listening is None, None
        self._by_number.clear()
        if not is_stopping:
            ended(await self._reap())

    def _with_request(self, update: Update) -> Update:
        """Returns an update that refers to its request instead of the request's number."""
        number: Any = update.request
        request = self._by_number[number]
        if update.result is not None:
            del self._by_number[number]
        return update._replace(request=request)

    async def _reap(self) -> str:
        """Returns how the process ended."""
        assert self.process is not None
        self.process.kill()  # it may have closed its socket only
        code = await in_thread(self.process.wait)
        if self._writer is not None:  # otherwise the first start was cancelled before it was connected
            self._writer.close()
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"the process of an instance {cause}"


async def _read_message(reader: asyncio.StreamReader) -> Any:
    """Returns the next message; None after the last one."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError):
        return None


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process that starts in this block never gets the signals that end a server."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def shared_memory() -> Iterator[int]:
    """Yields a descriptor of an empty file in memory, which other processes can map."""
    descriptor = os.memfd_create("weights")
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def main(connection: int, *weights: int) -> None:
    """Run one core for the process that started this one, until that process stops it or ends.

    Args:
        connection: Descriptor of the socket.
        weights: Descriptors of the memory with the weights, as for `ProcessCore`.
    """
    _Process(socket.socket(fileno=connection)).run(weights)


class _Process:
    """The core of this process, and its connection to the server.

    Owned by `main`. The main thread builds the core and carries out the server's commands, the core's thread
    reports its turns, and a third thread shows each second that the process is alive.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._stream = connection.makefile("rb")
        self._by_number: dict[int, Request] = {}  # the requests that have not ended
        self._sending = threading.Lock()

    def run(self, weights: Sequence[int]) -> None:
        """Build the core, and carry out commands until one stops it."""
        spec: CoreSpec = _read_blocking(self._stream)
        configure_logging(spec.log_level, spec.log_format)
        token_bytes = spec.token_bytes
        contents = [memoryview(mmap.mmap(each, 0, access=mmap.ACCESS_READ)) for each in weights]
        try:
            core = started_core(spec, contents, self._report, _exit_with_failure)
        except ValueError as error:
            self._send(_Stopped(str(error)))
            return
        del spec
        spare_what_lives()
        self._send(_Turned([], 0.0))
        threading.Thread(target=self._show_life, args=(core,), name="heartbeat", daemon=True).start()
        try:
            while not isinstance(command := _read_blocking(self._stream), Stop):
                if isinstance(command, _Cancel):
                    if (request := self._by_number.get(command.number)) is not None:
                        core.send(Cancel(request, command.is_expired))
                    continue
                for request in command.requests if isinstance(command, Admit) else ():
                    self._by_number[request.number] = request
                    if request.stops is not None:
                        request.stops.token_bytes = token_bytes
                    if request.terms is not None:
                        request.terms.token_bytes = token_bytes
                core.send(command)
        except (EOFError, OSError):
            os._exit(1)  # the server has ended
        core.stop()
        logging.shutdown()
        os._exit(0)  # without freeing each session

    def _show_life(self, core: Core) -> None:
        trimmer = Trimmer()
        while True:
            time.sleep(_HEARTBEAT_SECONDS)
            core.watch()
            self._send(_Turned([], core.turn_seconds()))
            if trimmer.look():
                trimmer.trim()

    def _report(self, turns: list[Turn]) -> None:
        self._send(
            _Turned(
                [turn._replace(updates=tuple(map(self._with_number, turn.updates))) for turn in turns], 0.0
            )
        )

    def _with_number(self, update: Update) -> Update:
        """Returns an update that refers to its request by the request's number."""
        number: Any = update.request.number
        if update.result is not None:
            del self._by_number[number]
        return update._replace(request=number)

    def _send(self, message: object) -> None:
        # The thread of the commands sees that the server has ended.
        with suppress(OSError), self._sending:
            self._connection.sendall(_packed(message))


def _read_blocking(stream: BinaryIO) -> Any:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    content = stream.read(_LENGTH.unpack(header)[0])
    return pickle.loads(content)


def _exit_with_failure() -> None:
    logging.shutdown()
    os._exit(1)
