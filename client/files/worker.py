"""Translates shards as one stream of texts, by an engine in this process or by a server."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.flaws import Flaws
from seq2seq_serve.client.files.formats import Lines, Reader, Writer
from seq2seq_serve.client.files.glossary import TermFinder
from seq2seq_serve.client.files.memory import TranslationMemory
from seq2seq_serve.client.files.plan import FileState, JobError, Shard, state_of
from seq2seq_serve.client.many import Dispatcher, answers
from seq2seq_serve.client.rpcs import Outcome, Translated
from seq2seq_serve.documents.terms import WholeTerms
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Term

# Shards that a worker has at once: one is read while the last texts of others are decoded.
MAX_OPEN_SHARDS = 3
_ANSWERS_AT_ONCE = 64  # of a document are written by another thread


class WorkerLost(Exception):
    """The worker cannot go on; another one can do its shards."""


@dataclass(frozen=True)
class RunFiles:
    """The inputs and the writer that all workers of a run share.

    Attributes:
        text_field: The field or column with the text of a record.
        writer: Writes the shards.
        inputs: The state of each input when the run was planned, by its path.
        memory: Its texts are not decoded.
    """

    text_field: str
    writer: Writer
    inputs: Mapping[str, FileState]
    memory: TranslationMemory | None = None


@dataclass(frozen=True)
class Done:
    """The numbers of a shard that has been written, and the flaws of its targets where they are counted."""

    num_lines: int
    num_failed: int
    num_from_memory: int
    flaws: Flaws = field(default_factory=Flaws)


class TextDecoder(Protocol):
    """Decodes the texts of a worker, which owns it."""

    @property
    def in_flight(self) -> int:
        """The maximum number of texts that are decoded or wait for it."""

    @property
    def give_up_seconds(self) -> float:
        """How long to go on while no text is answered."""

    def prepare(self, text: str) -> Any:
        """Returns the request of a text; raises ValueError if the text cannot be sent."""

    def kind_of(self, request: Any) -> Hashable | None:
        """Returns the same for requests that may be sent together; None for one that is sent alone."""

    def send(self, requests: Sequence[Any]) -> AsyncIterator[Outcome]:
        """Sends requests of one kind, and yields the place of each with its answer or error.

        Raises:
            ClientError: The texts without an answer failed; `Dispatcher` decides what follows.
            JobError: Other texts would fail, too.
            WorkerLost: The decoder cannot go on.
        """

    def stopped(self, error: Exception) -> Exception:
        """Returns the error of the worker after the one for which the dispatcher stopped."""

    async def stop(self) -> None:
        """Ends the decoder."""


class Worker:
    """A decoder, and the shards on their way through it, as one stream of texts.

    Owned by the run, or by an actor of Ray; used on one event loop.

    Args:
        files: What to read and write.
        decoder: Decodes the texts.
        report: Is called with the number of each line, counted from 1, and its result.
        keeps_placeholders: Returns whether the target of a text has to have its placeholders. If it is given,
            the worker counts the flaws of targets.
        terms: The terms of the options with which texts are decoded.

    Attributes:
        num_unsaved_lines: The number of lines that are finished and whose shards are not.
    """

    def __init__(
        self,
        files: RunFiles,
        decoder: TextDecoder,
        report: Callable[[int, Translated], None] | None = None,
        keeps_placeholders: Callable[[str], bool] | None = None,
        terms: Sequence[Term] = (),
    ) -> None:
        self._writer, self._memory = files.writer, files.memory
        self._decoder = decoder
        self._report, self._keeps_placeholders = report, keeps_placeholders
        self._terms = TermFinder(terms) if terms and keeps_placeholders is not None else None
        self._reader = Reader(files.text_field, files.writer.languages, WholeTerms(terms))
        self._inputs = dict(files.inputs)  # with their times on this machine, as soon as a file was compared
        self._reading, self._collecting = asyncio.Lock(), asyncio.Lock()  # both in the order of the shards
        self._shards: asyncio.Queue[Iterator[Sequence[str | ClientError]]] = asyncio.Queue()
        self._results = self.answers(self._texts())
        self.num_unsaved_lines = 0

    def answers(self, texts: Iterable[str] | AsyncIterable[str | ClientError]) -> AsyncGenerator[Translated]:
        """Yields the results of texts in order, and the errors among them as they are.

        Raises:
            JobError: Other texts would fail, too.
            WorkerLost: The decoder cannot go on.
            ClientError: Texts in a row failed, or the server refuses all calls.
        """
        decoder = self._decoder
        self._dispatcher = Dispatcher(
            self._prepare, decoder.in_flight, decoder.give_up_seconds, self._memory, decoder.kind_of
        )
        return answers(texts, self._dispatcher, self._decoder.send)

    async def translate(self, shard: Shard) -> Done:
        """Translates a shard and writes it. May be called for the next shards before the first one is done.

        Raises:
            JobError: Other shards would fail, too.
            OSError: A file cannot be read or written.
            WorkerLost: The decoder cannot go on, and another one may.
            ClientError: The server answers no text, or refuses an option.
        """
        results: dict[int, Translated] = {}  # by the numbers of their lines; those that `Writer.write` needs
        answered = list[GenerateResponse]()  # to the next texts of a document
        num_results = num_failed = num_from_memory = 0
        flaws = Flaws()
        try:
            async with self._reading:
                lines = await asyncio.to_thread(self._read, shard)
                self._writer.begin(lines)
                self._shards.put_nowait(lines.batches())
            async with self._collecting:
                while num_results < shard.num_lines:
                    result = await anext(self._results)
                    num_results += 1
                    self.num_unsaved_lines += 1
                    number = shard.first_line + num_results
                    if self._report is not None:
                        self._report(number, result)
                    if self._keeps_placeholders is not None:
                        keeps = isinstance(result.source, str) and self._keeps_placeholders(result.source)
                        flaws.add(shard.input, number, result, keeps_placeholders=keeps)
                    if self._terms is not None and isinstance(result.source, str):
                        flaws.add_terms(shard.input, number, result.source, self._terms)
                    num_failed += result.error is not None
                    num_from_memory += result.from_memory
                    if lines.document is None or result.error is not None:
                        results[number] = result
                    if lines.document is not None:
                        answered.append(result.answer)
                        if len(answered) == _ANSWERS_AT_ONCE or num_results == shard.num_lines:
                            await asyncio.to_thread(lines.document.add, answered)
                            answered.clear()
            await asyncio.to_thread(self._writer.write, shard, lines, results)
            return Done(shard.num_lines, num_failed, num_from_memory, flaws)
        except (ClientError, StopAsyncIteration):
            # The stream of results has ended, with an error of this shard or of another one.
            error = self._dispatcher.error
            assert error is not None
            raise self._decoder.stopped(error) from None
        finally:
            self.num_unsaved_lines -= num_results

    async def stop(self) -> None:
        """Ends the decoder."""
        await self._results.aclose()
        await self._decoder.stop()
        self._reader.close()

    def _prepare(self, text: str | ClientError) -> Any:
        if isinstance(text, ClientError):
            raise text
        return self._decoder.prepare(text)

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
            batches = await self._shards.get()
            while batch := await asyncio.to_thread(next, batches, None):
                for text in batch:
                    yield text
