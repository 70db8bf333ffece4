"""Translates shards with engines in this process, by the code of the server and without its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from seq2seq_serve.bulk.formats import Lines, Reader, Writer
from seq2seq_serve.bulk.plan import FileState, JobError, Shard, state_of
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.client.errors import ClientError, FieldViolation
from seq2seq_serve.client.many import Dispatcher, answers
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.sources import sources_of
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.errors import InvalidRequest, ServerError, Unavailable, is_about_all
from seq2seq_serve.server.library import AsyncModel
from seq2seq_serve.server.service.status import reason_of, status_of

_TEXTS_PER_SLOT = 4  # that are decoded or wait: enough that no slot ever waits for a text
_GIVE_UP_SECONDS = 3600.0  # while steps fail, and no text is answered
_MOST_ENDS = 3  # of the engine, while one text is decoded

# Shards that a worker has at once: one is read while the last texts of others are decoded.
MAX_OPEN_SHARDS = 3


class WorkerLost(Exception):
    """The worker cannot go on; another one can do its shards."""


@dataclass(frozen=True)
class Job:
    """The settings that all workers of a run share.

    Attributes:
        bundle: The folder of the bundle, by a path that is right on every machine.
        runner: The settings of the engines.
        options: The options of every text.
        text_field: The field or column with the text.
        writer: Writes the shards.
        inputs: The state of each input when the run was planned, by its path.
    """

    bundle: Path
    runner: RunnerConfig
    options: pb.GenerateOptions
    text_field: str
    writer: Writer
    inputs: Mapping[str, FileState]


@dataclass(frozen=True)
class Done:
    """The numbers of a shard that has been written."""

    num_lines: int
    num_failed: int


class Worker:
    """One loaded model, and the shards on their way through it, as one stream of texts.

    Owned by the run, or by an actor of Ray; used on one event loop. `start_worker` makes one.

    Attributes:
        num_unsaved_lines: The number of lines that are finished and whose shards are not.
    """

    def __init__(self, job: Job, model: AsyncModel) -> None:
        self._job = job
        self._model = model
        self._decoding = model.read_options(job.options)
        self._reader = Reader(job.text_field)
        self._inputs = dict(job.inputs)  # with their times on this machine, as soon as a file was compared
        self._reading, self._collecting = asyncio.Lock(), asyncio.Lock()  # both in the order of the shards
        self._shards: asyncio.Queue[list[str | ClientError]] = asyncio.Queue()
        self._results = self.answers(self._texts())
        self.num_unsaved_lines = 0

    def answers(self, texts: Iterable[str] | AsyncIterable[str | ClientError]) -> AsyncGenerator[Translated]:
        """Yields the results of texts in order, and the errors among them as they are.

        Raises:
            JobError: Other texts would fail, too.
            WorkerLost: The engine keeps ending, or its steps keep failing.
            ClientError: Texts in a row failed.
        """
        in_flight = _TEXTS_PER_SLOT * self._model.num_slots
        self._dispatcher = Dispatcher(_sources, in_flight, _GIVE_UP_SECONDS)
        return answers(texts, self._dispatcher, self._generate)

    async def translate(self, shard: Shard) -> Done:
        """Translates a shard and writes it. May be called for the next shards before the first one is done.

        Raises:
            JobError: Other shards would fail, too.
            OSError: A file cannot be read or written.
            WorkerLost: The engine keeps ending, or its steps keep failing.
        """
        results: list[Translated] = []
        try:
            async with self._reading:
                lines = await asyncio.to_thread(self._read, shard)
                self._job.writer.check(lines)
                self._shards.put_nowait(lines.texts)
            async with self._collecting:
                for _ in lines.texts:
                    results.append(await anext(self._results))
                    self.num_unsaved_lines += 1
            await asyncio.to_thread(self._job.writer.write, shard, lines, results)
            return Done(shard.num_lines, sum(result.error is not None for result in results))
        except (ClientError, StopAsyncIteration):
            # The stream of results has ended, with an error of this shard or of another one.
            error = self._dispatcher.error
            raise error if isinstance(error, JobError | WorkerLost) else WorkerLost(str(error)) from error
        finally:
            self.num_unsaved_lines -= len(results)

    async def stop(self) -> None:
        """Ends the engine."""
        await self._results.aclose()
        await self._model.stop()
        self._reader.close()

    def _read(self, shard: Shard) -> Lines:
        lines = self._reader.read(shard)
        planned = self._inputs[shard.input]
        # After the reading: these are the lines that were planned.
        found = state_of(Path(shard.input), planned)
        if found != planned:
            raise JobError(f"{shard.input} has changed since the run was planned: give another --output")
        self._inputs[shard.input] = found
        return lines

    async def _texts(self) -> AsyncIterator[str | ClientError]:
        while True:
            for text in await self._shards.get():
                yield text

    async def _generate(self, sources: list[pb.Source]) -> pb.GenerateResponse:
        for _ in range(_MOST_ENDS):
            try:
                return await self._model.generate(sources, self._decoding)
            except Unavailable:
                continue  # the engine has ended, and is started again
            except ServerError as error:
                if isinstance(error, InvalidRequest) and is_about_all(error):
                    raise JobError(str(error)) from error
                if self._model.problem():
                    raise WorkerLost("the engine's steps keep failing: see the log") from error
                raise _client_error(error) from error
        raise WorkerLost(f"the engine ended {_MOST_ENDS} times with one text: see the log")


async def start_worker(job: Job) -> Worker:
    """Loads the model of a job.

    Raises:
        JobError: The bundle cannot be used, or its model does not translate texts.
    """
    try:
        model = await asyncio.to_thread(AsyncModel, job.bundle, job.runner)
        await model.start()
    except ValueError as error:
        raise JobError(str(error)) from error
    try:
        if list(model.description.sources.values()) != [Form.TEXT]:
            raise JobError(f"{job.bundle} does not have a model that translates texts")
        return Worker(job, model)
    except (JobError, InvalidRequest) as error:
        await model.stop()
        raise JobError(str(error)) from error


def _sources(text: str | ClientError) -> list[pb.Source]:
    if isinstance(text, ClientError):
        raise text
    return sources_of(text)


def _client_error(error: ServerError) -> ClientError:
    """Returns the error that a client of a server would get."""
    code, message = status_of(error)
    field = error.field if isinstance(error, InvalidRequest) else ""
    violations = (FieldViolation(field, message),) if field else ()
    return ClientError(code.name, message, reason=reason_of(error), field_violations=violations)
