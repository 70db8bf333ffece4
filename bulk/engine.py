"""Decodes the texts of bulk work with engines in this process: the code of the server without its port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seq2seq_serve.bundle.names import Form
from seq2seq_serve.client.errors import ClientError, FieldViolation
from seq2seq_serve.client.files.plan import JobError
from seq2seq_serve.client.files.worker import RunFiles, Worker, WorkerLost
from seq2seq_serve.client.output import in_flags
from seq2seq_serve.documents.segments import TextKind, kind_of, options_by_kind, with_tags
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.sources import sources_of
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.errors import InvalidRequest, ServerError, Unavailable, is_about_all
from seq2seq_serve.server.library import AsyncModel
from seq2seq_serve.server.service.read.options import Decoding
from seq2seq_serve.server.service.read.terms import Glossary
from seq2seq_serve.server.service.status import status_of

_TEXTS_PER_SLOT = 4  # that are decoded or wait: enough that no slot ever waits for a text
_GIVE_UP_SECONDS = 3600.0  # while steps fail, and no text is answered
_MOST_ENDS = 3  # of the engine, while one text is decoded


@dataclass(frozen=True)
class Job:
    """The settings that all workers of a run share.

    Attributes:
        bundle: The folder of the bundle, by a path that is right on every machine.
        runner: The settings of the engines.
        options: The options of every text.
        files: What is read and written.
        keeps_placeholders: Whether documents of programs keep their placeholders.
    """

    bundle: Path
    runner: RunnerConfig
    options: pb.GenerateOptions
    files: RunFiles
    keeps_placeholders: bool = True


class Engine:
    """One loaded model. Owned by its worker; `start_worker` makes both.

    Raises:
        InvalidRequest: An option does not fit the model.
    """

    give_up_seconds = _GIVE_UP_SECONDS

    def __init__(self, model: AsyncModel, options: pb.GenerateOptions, *, keeps_placeholders: bool) -> None:
        by_kind = options_by_kind(
            options, has_attention=model.description.has_attention, keeps_placeholders=keeps_placeholders
        )
        self._model, self._has_attention = model, model.description.has_attention
        self._decodings = dict[TextKind, Decoding]()
        glossaries = dict[bool, Glossary | None]()  # by whether placeholders are kept
        for kind, each in by_kind.items():
            decoding = model.read_options(each, glossary=glossaries.get(each.keep_placeholders))
            self._decodings[kind], glossaries[each.keep_placeholders] = decoding, decoding.glossary
        self.in_flight = _TEXTS_PER_SLOT * model.num_slots

    def prepare(self, text: str) -> tuple[list[pb.Source], Decoding]:
        """Returns the sources of a text, and how it is decoded."""
        text = text if self._has_attention else with_tags(text)
        return sources_of(text), self._decodings[kind_of(text)]

    def keeps_placeholders(self, text: str) -> bool:
        """Whether the target of a text has its placeholders."""
        return self._decodings[kind_of(text)].options.keep_placeholders

    def kind_of(self, _: tuple[list[pb.Source], Decoding]) -> None:
        """Each text goes to the engine alone."""

    async def send(
        self, requests: Sequence[tuple[list[pb.Source], Decoding]]
    ) -> AsyncGenerator[tuple[int, pb.GenerateResponse]]:
        """Yields the targets of a text; see `TextDecoder`."""
        (request,) = requests
        for _ in range(_MOST_ENDS):
            try:
                yield 0, await self._model.generate(*request)
                return
            except Unavailable:
                continue  # the engine has ended, and is started again
            except ServerError as error:
                if isinstance(error, InvalidRequest) and is_about_all(error):
                    raise _job_error(error) from error
                if self._model.problem():
                    raise WorkerLost("the engine's steps keep failing: see the log") from error
                raise _client_error(error) from error
        raise WorkerLost(f"the engine ended {_MOST_ENDS} times with one text: see the log")

    def stopped(self, error: Exception) -> Exception:
        """Returns an error after which a new engine is started, unless that would not help."""
        return error if isinstance(error, JobError | WorkerLost) else WorkerLost(str(error))

    async def stop(self) -> None:
        """Ends the engine."""
        await self._model.stop()


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
        engine = Engine(model, job.options, keeps_placeholders=job.keeps_placeholders)
        keeps_placeholders, terms = engine.keeps_placeholders, job.options.terms
        return Worker(job.files, engine, keeps_placeholders=keeps_placeholders, terms=terms)
    except InvalidRequest as error:
        await model.stop()
        raise _job_error(error) from error
    except JobError:
        await model.stop()
        raise


def _job_error(error: InvalidRequest) -> JobError:
    """Returns the error for an option, by its flag."""
    return JobError(in_flags(_client_error(error)))


def _client_error(error: ServerError) -> ClientError:
    """Returns the error that a client of a server would get."""
    code, message, reason, field = status_of(error)
    violations = (FieldViolation(field, message),) if field else ()
    return ClientError(code.name, message, reason=reason, field_violations=violations)
