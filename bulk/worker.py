"""Translates shards with engines in this process, by the code of the server and without its port."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from seq2seq_serve.bulk.formats import LineError, Reader, Target, Writer
from seq2seq_serve.bulk.plan import JobError, Shard, state_of
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.errors import BlankSource, InvalidRequest, ServerError, Unavailable, is_about_all
from seq2seq_serve.server.library import AsyncModel

_TEXTS_PER_SLOT = 4  # that are decoded or wait: enough that no slot ever waits for a text
_STEP_FAILED = LineError("INTERNAL", "a step of the engine failed: the log has the reason")
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
    inputs: Mapping[str, list[int]]

    def check_unchanged(self, shard: Shard) -> None:
        """Raises JobError if the input of a shard has changed since the run was planned."""
        if state_of(Path(shard.input)) != self.inputs[shard.input]:
            raise JobError(f"{shard.input} has changed since the run was planned: give another --output")


@dataclass(frozen=True)
class Done:
    """The numbers of a shard that has been written."""

    num_lines: int
    num_failed: int


class Worker:
    """One loaded model, and the texts of some shards on their way through it.

    Owned by the run, or by an actor of Ray; used on one event loop. `start_worker` makes one.

    Attributes:
        max_texts: The number of texts that are decoded or wait at once.
        num_unsaved_lines: The number of lines that are finished and whose shards are not.
    """

    def __init__(self, job: Job, model: AsyncModel) -> None:
        self._job = job
        self._model = model
        self._decoding = model.read_options(job.options)
        self._reader = Reader(job.text_field)
        self._reading = asyncio.Lock()
        self.max_texts = _TEXTS_PER_SLOT * model.num_slots
        self._room = asyncio.Semaphore(self.max_texts)
        self.num_unsaved_lines = 0

    async def translate(self, shard: Shard) -> Done:
        """Translates a shard and writes it. May be called for the next shards before the first one is done.

        Raises:
            JobError: Other shards would fail, too.
            OSError: A file cannot be read or written.
            WorkerLost: The engine keeps ending, or its steps keep failing.
        """
        tasks: list[asyncio.Task[Target | LineError]] = []
        try:
            async with self._reading:
                lines = await asyncio.to_thread(self._reader.read, shard)
                self._job.check_unchanged(shard)  # after the reading: these are the lines that were planned
                self._job.writer.check(lines)
                for text in lines.texts:
                    await self._room.acquire()
                    tasks.append(asyncio.create_task(self.answer(text)))
                    tasks[-1].add_done_callback(self._count)
            answers = await asyncio.gather(*tasks)
            await self._repeat_failed(lines.texts, answers)
            await asyncio.to_thread(self._job.writer.write, shard, lines, answers)
            return Done(shard.num_lines, sum(isinstance(answer, LineError) for answer in answers))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.num_unsaved_lines -= len(tasks)

    def _count(self, _task: object) -> None:
        self._room.release()
        self.num_unsaved_lines += 1

    async def _repeat_failed(self, texts: list[str | LineError], answers: list[Target | LineError]) -> None:
        """Decodes the texts of failed steps again, alone, because a step fails for all of its texts."""
        failed = [number for number, answer in enumerate(answers) if answer == _STEP_FAILED]
        if not failed:
            return
        async with self._reading:
            for _ in range(self.max_texts):  # waits until nothing else is decoded
                await self._room.acquire()
            for number in failed:
                answers[number] = await self.answer(texts[number])
            for _ in range(self.max_texts):
                self._room.release()

    async def answer(self, text: str | LineError) -> Target | LineError:
        """Returns the target of a text, or why it does not have one.

        Raises:
            JobError: Other texts would fail, too.
            WorkerLost: The engine keeps ending, or its steps keep failing.
        """
        if isinstance(text, LineError):
            return text
        if not text.strip():
            return Target("")
        try:
            source = pb.Source(text=text)
        except ValueError:  # a lone surrogate, which JSON can have
            return LineError("INVALID_ARGUMENT", "the text is not valid Unicode")
        for _ in range(_MOST_ENDS):
            try:
                answer = await self._model.generate([source], self._decoding)
            except Unavailable:
                continue  # the engine has ended, and is started again
            except BlankSource:
                return Target("")
            except InvalidRequest as error:
                if is_about_all(error):
                    raise JobError(str(error)) from error
                return LineError("INVALID_ARGUMENT", str(error))
            except ServerError as error:
                if self._model.problem():
                    raise WorkerLost("the engine's steps keep failing: see the log") from error
                return _STEP_FAILED
            best, *_ = answer.hypotheses
            hypotheses = [{"text": one.text, "score": _score(one)} for one in answer.hypotheses]
            return Target(best.text, _score(best), tuple(hypotheses))
        raise WorkerLost(f"the engine ended {_MOST_ENDS} times with one text: see the log")

    async def stop(self) -> None:
        """Ends the engine."""
        await self._model.stop()
        self._reader.close()


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


def _score(hypothesis: pb.Hypothesis) -> float | None:
    return hypothesis.score if hypothesis.HasField("score") else None
