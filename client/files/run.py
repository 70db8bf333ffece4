"""Plans a run, and shares its shards out among workers until all are done or have failed too often."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import stat
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from seq2seq_serve.client.files.flaws import Flaws
from seq2seq_serve.client.files.formats import split_into_shards
from seq2seq_serve.client.files.plan import (
    FileState,
    Plan,
    Shard,
    check_plan,
    names_of,
    read_plan,
    remove_leftovers,
    state_of,
    write_plan,
)
from seq2seq_serve.client.files.worker import MAX_OPEN_SHARDS, Done, WorkerLost
from seq2seq_serve.client.progress import Progress
from seq2seq_serve.documents.segments import WrongFile

_MAX_TRIES = 3  # of a shard
_MAX_LOST = 5  # workers, without a shard that is done
_PAUSE_SECONDS = 1.0
_SHOW_SECONDS = 0.2
_LEFTOVER_SECONDS = 3600.0  # a file is written in far less
_FATAL = (errno.ENOSPC, errno.EROFS, errno.EDQUOT)  # no other shard can be written either

_log = logging.getLogger(__name__)


def plan_run(
    folder: Path,
    inputs: Sequence[Path],
    settings: dict[str, Any],
    shard_lines: int,
    advice: str,
    languages: tuple[str, str] = ("", ""),
) -> Plan:
    """Returns the plan of an output folder, which is made and written if there is none.

    Args:
        folder: The output folder.
        inputs: The absolute paths of the inputs.
        settings: Everything else that the output depends on, as JSON has it.
        shard_lines: The largest number of lines of a shard.
        advice: How to start anew where the folder belongs to another run, beside repeating its command.
        languages: The tags of the languages of texts and targets, as far as they are known.

    Raises:
        JobError: The folder belongs to another run, or an input cannot be read as what its name says.
        OSError: A file cannot be read or written.
    """
    plan = read_plan(folder)
    known = plan.inputs if plan is not None else {}
    states, shards = dict[str, FileState](), list[Shard]()
    for path, name in zip(inputs, names_of(inputs), strict=True):
        states[str(path)] = state_of(path, known.get(str(path)))
        if plan is None:
            shards += split_into_shards(path, name, shard_lines, languages)
    now = Plan(settings | {"shard_lines": shard_lines}, states)
    plan = plan or read_plan(folder)  # another command may have been faster
    if plan is None:
        plan = replace(now, shards=tuple(shards))
        write_plan(folder, plan)
    check_plan(folder, plan, now, advice)
    remove_leftovers(folder, time.time() - _LEFTOVER_SECONDS)
    return plan


class AnyWorker(Protocol):
    """A worker in this process, or an actor elsewhere."""

    @property
    def num_unsaved_lines(self) -> int: ...
    async def translate(self, shard: Shard) -> Done: ...
    async def stop(self) -> None: ...


@dataclass
class RunProgress:
    """The shards of a run and what became of them. Owned by the command; used on one event loop.

    Attributes:
        num_lines: Lines of the shards that are done.
        num_failed_lines: Those of them without a target.
        num_from_memory: Those of them that a translation memory has.
        flaws: Those of their targets, where workers count them.
        failed: The shards that are left out, with the reason of the last try.
    """

    num_lines: int = 0
    num_failed_lines: int = 0
    num_from_memory: int = 0
    flaws: Flaws = field(default_factory=Flaws)
    failed: dict[str, str] = field(default_factory=dict)
    _waiting: deque[Shard] = field(default_factory=deque)
    # Shards of lost workers. The next worker does each alone, to find one that always ends its worker.
    _suspects: deque[Shard] = field(default_factory=deque)
    _num_failures: Counter[str] = field(default_factory=Counter)
    _num_open: int = 0
    _workers: list[AnyWorker] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_lines_now(self) -> int:
        """The number of lines that are translated so far, also those of shards that are not done."""
        return self.num_lines + sum(worker.num_unsaved_lines for worker in self._workers)

    async def translate(
        self,
        shards: Iterable[Shard],
        start_worker: Callable[[], Awaitable[AnyWorker]],
        num_workers: int = 1,
        progress: Progress | None = None,
    ) -> None:
        """Translates shards, each on one of `num_workers` workers. A lost worker is replaced.

        It runs on the main thread. SIGTERM and SIGHUP cancel it, as Ctrl-C does.

        Raises:
            CancelledError: The process got one of the two.
            JobError: The run cannot go on.
            OSError: The output cannot be written to.
            WorkerLost: Each worker ends soon.
            ClientError: The server answers no text.
        """
        task = asyncio.current_task()
        assert task is not None
        with suppress(NotImplementedError):  # on Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _hang_up, task)
        self._waiting.extend(shards)
        showing = asyncio.create_task(self._show(progress)) if progress is not None else None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(num_workers, len(self._waiting))):
                    group.create_task(self._keep_working(start_worker))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            if showing is not None:
                showing.cancel()

    async def _show(self, progress: Progress) -> None:
        while True:
            await asyncio.sleep(_SHOW_SECONDS)
            progress.show(progress.num_skipped + self.num_lines_now, self.num_failed_lines)

    async def _keep_working(self, start_worker: Callable[[], Awaitable[AnyWorker]]) -> None:
        """Keeps one worker at work. If it is lost, starts another one."""
        num_lost = 0
        while not self._is_over:
            num_lines = self.num_lines
            try:
                await self._work(start_worker)
            except WorkerLost as lost:
                num_lost = 1 if self.num_lines > num_lines else num_lost + 1
                if num_lost == _MAX_LOST:
                    raise WorkerLost(f"{num_lost} workers were lost one after the other: {lost}") from lost
                _log.warning("a worker was lost: %s; another one takes over its shards", lost)
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _work(self, start_worker: Callable[[], Awaitable[AnyWorker]]) -> None:
        starting = asyncio.ensure_future(start_worker())
        try:
            while not starting.done() and not self._is_over:  # a cluster may never have room for it
                change = asyncio.create_task(self._changed.wait())
                await asyncio.wait({starting, change}, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
        if starting.cancelled():
            return
        worker = starting.result()
        self._workers.append(worker)
        try:
            while self._suspects:
                await self._translate(self._suspects.popleft(), worker, is_alone=True)
            async with asyncio.TaskGroup() as group:
                for _ in range(MAX_OPEN_SHARDS):
                    group.create_task(self._take_shards(worker))
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        finally:
            self._workers.remove(worker)
            await worker.stop()

    @property
    def _is_over(self) -> bool:
        return not (self._waiting or self._suspects or self._num_open)

    async def _take_shards(self, worker: AnyWorker) -> None:
        """Translates one shard after the other, until no worker has any."""
        while not self._is_over:
            if shards := self._waiting or self._suspects:
                await self._translate(shards.popleft(), worker)
            else:
                await self._changed.wait()  # a shard of another worker may come back

    async def _translate(self, shard: Shard, worker: AnyWorker, *, is_alone: bool = False) -> None:
        self._num_open += 1
        try:
            done = await worker.translate(shard)
        except OSError as error:
            if isinstance(error, WrongFile) or error.errno in _FATAL:
                raise
            self._record_failure(shard, error, self._waiting)
        except WorkerLost as error:
            if is_alone:
                self._record_failure(shard, error, self._suspects)
            else:
                self._suspects.append(shard)
            raise
        except BaseException:  # the worker was lost in another shard, or the run ends
            self._suspects.append(shard)
            raise
        else:
            self.num_lines += done.num_lines
            self.num_failed_lines += done.num_failed
            self.num_from_memory += done.num_from_memory
            self.flaws.merge(done.flaws)
            _log.info("%s is done: %d lines, %d of them failed", shard.name, done.num_lines, done.num_failed)
        finally:
            self._num_open -= 1
            self._changed.set()
            self._changed = asyncio.Event()  # those that wait for the former do not miss it

    def _record_failure(self, shard: Shard, error: Exception, again: deque[Shard]) -> None:
        self._num_failures[shard.name] += 1
        if self._num_failures[shard.name] < _MAX_TRIES:
            again.append(shard)
            _log.warning("%s failed and will be tried again: %s", shard.name, error)
        else:
            self.failed[shard.name] = str(error)
            _log.error("%s failed %d times and is left out: %s", shard.name, _MAX_TRIES, error)


def _hang_up(task: asyncio.Task[object]) -> None:
    """Cancels a run whose terminal was closed: its later signals are ignored, and it shows nothing."""
    task.cancel()
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Path(os.devnull).open("w", encoding="utf-8") as nothing:
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode):
                os.dup2(nothing.fileno(), stream)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
