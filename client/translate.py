"""Runs the command `translate`: writes a line for each text, in order, or N lines for N hypotheses.

The lines of a blank text are blank, and so are those of a text that fails, whose error goes to stderr. The
answer to a single TEXT keeps its line breaks; if it fails, nothing is written. With --stream, pieces before a
failure stay. At the end, stderr gets one warning for targets that ended at their length limit, and one for
truncated sources.

A file of answers appears when it is complete. Until then the folder FILE.parts beside it has the answers, as
that of bulk work: a plan, and shards.
"""

from __future__ import annotations

import asyncio
import filecmp
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from seq2seq_serve.bundle.files import sync_folder
from seq2seq_serve.client.aio import AsyncClient
from seq2seq_serve.client.attention import save_alignment
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.documents import is_software
from seq2seq_serve.client.files.flaws import Flaws
from seq2seq_serve.client.files.formats import ANSWERS, Writer, format_of
from seq2seq_serve.client.files.glossary import TermFinder, with_glossary
from seq2seq_serve.client.files.lines import STANDARD, count_lines, open_binary, open_input
from seq2seq_serve.client.files.memory import TranslationMemory, memory_count, read_memory
from seq2seq_serve.client.files.pairs import check_languages, languages_of, standard_languages
from seq2seq_serve.client.files.plan import (
    DOCUMENT,
    PLAN_FILE,
    TEMPORARY,
    JobError,
    Plan,
    Shard,
    atomic_write,
    check_plan,
    locked,
    read_plan,
    settings_of,
    write_plan,
)
from seq2seq_serve.client.files.run import RunProgress, plan_run
from seq2seq_serve.client.files.worker import RunFiles, Worker
from seq2seq_serve.client.forms import find_model
from seq2seq_serve.client.many import is_about_all
from seq2seq_serve.client.output import (
    FlagFormatter,
    answer_json,
    answer_lines,
    in_flags,
    one_line,
    to_json,
)
from seq2seq_serve.client.progress import Progress
from seq2seq_serve.client.rpcs import Outcome, Translated
from seq2seq_serve.client.sync import Client
from seq2seq_serve.client.wire import Item, item_maker
from seq2seq_serve.documents.segments import SoftwareText, WrongFile, kind_of, options_by_kind, with_tags
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse, Model

_SHARD_LINES = 1000  # the most that a kill costs
_FOLDER_PLAN = ".seq2seq-plan.json"  # of many outputs, which a pattern such as *.json does not find
_PIPE_FOLDER = "_pipe"  # has the text of a pipe, which can be read only once
_SHOWN_CHARACTERS = 60  # of a text that failed
_MOST_NAMED = 5  # lines that failed before
_ABOUT_THE_TEXT = "INVALID_ARGUMENT"  # another try would fail, too


@dataclass(frozen=True)
class Translation:
    """The settings of one command.

    Attributes:
        texts: From the command line; if there are none, the lines of `input` are translated.
        folder: The folder of the outputs of several inputs (--to).
        field: The field of a record that has its text.
        target_field: The field of a record that gets the target.
        resume: Whether to continue an unfinished `output`.
        overwrite: Whether to replace an existing `output`.
        memory: Files of translations, whose texts are not sent.
        glossary: A file of terms, which are added to those of the options.
        keeps_placeholders: Whether documents of programs keep their placeholders.
        is_one_of_many: Whether messages have to name the input, because the command has others.
        problem: Why this one of several inputs cannot be translated; empty if nothing says so yet.
    """

    texts: tuple[str, ...]
    input: Path
    output: Path
    folder: Path | None
    field: str
    target_field: str
    resume: bool
    overwrite: bool
    model: str
    options: GenerateOptions
    in_flight: int
    give_up_seconds: float
    stream: bool
    as_json: bool
    attention_file: Path | None
    memory: tuple[Path, ...]
    glossary: Path | None
    keeps_placeholders: bool
    is_one_of_many: bool = False
    problem: str = ""

    @property
    def num_hypotheses(self) -> int:
        """The number of hypotheses of each text in the output."""
        return max(1, self.options.num_hypotheses)

    @property
    def format(self) -> str:
        """The format of the output."""
        return ANSWERS if self.as_json else format_of(self.input)

    @property
    def has_one_text(self) -> bool:
        """Whether the whole output is the answer to one text, so that messages need no line number."""
        return len(self.texts) == 1

    @property
    def is_to_file(self) -> bool:
        """Whether the output is a file, and not a pipe or a device."""
        return self.output != STANDARD and (self.output.is_file() or not self.output.exists())


def parts_folder(output: Path) -> Path:
    """Returns the folder that has the answers to the lines of an unfinished output."""
    return output.with_name(f"{output.name}.parts")


def _remove(folder: Path) -> None:
    """Removes a folder. After a kill, either all of it is left under its name, or nothing."""
    removed = _removed(folder)
    folder.replace(removed)
    sync_folder(folder.parent)
    shutil.rmtree(removed)


def _num_passing(codes: Iterable[str]) -> int:
    """Returns how many of some errors may pass, so that another try may do without them."""
    return sum(code != _ABOUT_THE_TEXT for code in codes)


def _removed(folder: Path) -> Path:
    """Returns the name of a folder while it is removed."""
    return folder.with_name(f".{folder.name}{TEMPORARY}")


def translate_all(client: Client, connect: Callable[[], AsyncClient], plans: Sequence[Translation]) -> int:
    """Translates the inputs of several commands one after the other; see `translate`.

    An input that cannot be read or translated as what its name says is reported, and the others go on.

    Raises:
        ClientError: No server answers, or the command stopped before the last text.
        OSError: An output cannot be written, or a memory, the glossary or the only input cannot be read.
        JobError: The only output belongs to another command or input, or their folder to one with other
            options.
    """
    codes, setup = list[int](), _Setup(client)
    if (folder := plans[0].folder) is not None and plans[0].resume:
        setup.check_folder(folder, plans[0])
    for number, plan in enumerate(plans, 1):
        if len(plans) > 1 and sys.stderr.isatty():
            sys.stderr.write(f"{number} of {len(plans)}: {plan.input}\n")
        try:
            if plan.problem:
                raise JobError(plan.problem)
            codes.append(translate(client, connect, plan, setup))
        except (JobError, OSError) as error:
            is_of_input = isinstance(error, JobError)
            if isinstance(error, OSError) and error.filename is not None:
                path = Path(error.filename)
                its = isinstance(error, WrongFile) or path.absolute() == plan.input.absolute()
                is_of_input = its and path not in (*plan.memory, plan.glossary)
            if len(plans) == 1 or not is_of_input:
                raise
            text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            sys.stderr.writelines(
                f"{line}\n" for line in (f"error: {text}", *getattr(error, "__notes__", ()))
            )
            codes.append(1)
    return max(codes)


def translate(client: Client, connect: Callable[[], AsyncClient], plan: Translation, setup: _Setup) -> int:
    """Translates the texts, writes the answers, and returns the exit code.

    Args:
        client: A connection to the server.
        connect: Opens another one, on an event loop.
        plan: The settings.
        setup: What the command asks for.

    Raises:
        ClientError: No server answers, or the command stopped before the last text.
        OSError: A file cannot be read, or the output cannot be written.
        JobError: The output to continue belongs to another command or input.
    """
    if plan.is_to_file:
        plan = replace(plan, output=plan.output.resolve())
        folder = parts_folder(plan.output)
        if _removed(folder).exists():  # a command was killed
            with locked(_removed(folder)):
                shutil.rmtree(_removed(folder))
        if plan.resume and plan.output.exists() and not folder.exists():
            _check_complete(plan)
            sys.stderr.write(
                f"{plan.output} is complete, and nothing was translated: --overwrite translates it again, "
                "also with other options\n"
            )
            return 0
    plan, model, memory = setup.find(plan)
    if plan.is_to_file:
        return _FileOutput(plan, model, memory).write(connect)
    with ExitStack() as stack:
        texts = iter(plan.texts) if plan.texts else stack.enter_context(open_input(plan.input))
        output = sys.stdout
        if plan.output != STANDARD:
            output = stack.enter_context(plan.output.open("w", encoding="utf-8", newline=""))
        is_shown = sys.stderr.isatty() and not output.isatty()
        is_counted = is_shown and plan.input.is_file()
        num_lines = len(plan.texts) or (count_lines(plan.input) if is_counted else None)
        progress = _logged_progress(num_lines, is_shown=is_shown)
        report = _Report(plan, progress)
        stack.callback(report.close)
        _Answers(plan, output, report, memory).take(client, texts)
    return 1 if report.num_failed else 0


def _logged_progress(num_lines: int | None, *, is_shown: bool, num_skipped: int = 0) -> Progress:
    """Returns the progress on stderr, which also gets the log of retries."""
    progress = Progress(sys.stderr, is_shown=is_shown, num_lines=num_lines, num_skipped=num_skipped)
    handler = logging.StreamHandler(progress)
    handler.setFormatter(FlagFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("seq2seq_serve.client.many").setLevel(logging.INFO)
    logging.getLogger("seq2seq_serve.client.files").setLevel(logging.WARNING)
    return progress


def _find_model(client: Client, plan: Translation) -> Model:
    """Returns the model to ask: the given one, or the server's first that translates.

    What is wrong is found at once, and not after `give_up_seconds`.

    Raises:
        ClientError: No server answers, it does not serve the model, or the model does not translate. If
            the server has no model at all, it may be loading one: for the lines of an input, that is only a
            warning.
    """
    try:
        return find_model(client, plan.model, "translate")
    except ClientError as error:
        has_answered = error.code == "UNAVAILABLE" and error.request_id
        if plan.texts or plan.stream or plan.format == DOCUMENT or not has_answered:
            raise
        sys.stderr.write(f"warning: {error}\n")
        return Model(name=plan.model)


class _Setup:
    """The model, the memory and the glossary of a command, which may take seconds to find: once.

    Owned by `translate_all`, whose inputs have the same settings.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._found: tuple[Model, GenerateOptions, TranslationMemory | None] | None = None

    def find(self, plan: Translation) -> tuple[Translation, Model, TranslationMemory | None]:
        """Returns the settings with the name of the model and the terms of the glossary, and the others.

        Raises:
            ClientError: As `_find_model`, or the options have other languages than the model.
            OSError: A file cannot be read, or has other languages than the options and the model.
        """
        if self._found is None:
            model = _find_model(self._client, plan)
            check_languages(plan.options, model)
            memory = read_memory(*plan.memory, **languages_of(plan.options, model)) if plan.memory else None
            options = with_glossary(plan.options, plan.glossary, model)
            if not model.kind:  # it may be loaded before the next input
                return replace(plan, options=options), model, memory
            self._found = model, options, memory
        model, options, memory = self._found
        return replace(plan, model=model.name, options=options), model, memory

    def check_folder(self, folder: Path, plan: Translation) -> None:
        """Raises JobError if the folder of the outputs has some of other settings."""
        before = read_plan(folder, _FOLDER_PLAN)
        if before is not None:
            plan, _, memory = self.find(plan)
            now = Plan(_settings_of_folder(plan, memory), {})
            check_plan(folder, before, now, "give another --to, or replace its files with --overwrite")


def _settings(plan: Translation, memory: TranslationMemory | None) -> dict[str, Any]:
    """Returns the settings on which targets depend, for a plan."""
    return {
        "model": plan.model,
        "options": settings_of(plan.options),
        "text_field": plan.field,
        "target_field": plan.target_field,
        "memory": None if memory is None else memory.digest(),
    }


def _settings_of_folder(plan: Translation, memory: TranslationMemory | None) -> dict[str, Any]:
    """Returns those of all outputs of a folder, whatever their kinds."""
    kinds = {"keeps_placeholders": plan.keeps_placeholders, "json": plan.as_json}
    return _settings(plan, memory) | kinds


def _check_complete(plan: Translation) -> None:
    """Raises JobError if an output that is not under way does not have as many lines as its input."""
    if plan.format == DOCUMENT:
        return
    found = count_lines(plan.output)
    expected = count_lines(plan.input) * (1 if plan.as_json else plan.num_hypotheses)
    if found != expected:
        raise JobError(
            f"--resume {plan.output}: it has {found} lines, and this command writes {expected}: it is of "
            "another input, or an earlier version of this command did not finish it. Give another --output, "
            "or replace it with --overwrite"
        )


class _Server:
    """The server as the decoder of a worker, which owns it; see `TextDecoder`."""

    def __init__(self, client: AsyncClient, plan: Translation, model: Model) -> None:
        self._client = client
        self._model, self._has_attention = model.name, model.has_attention
        options_of = options_by_kind(
            plan.options, has_attention=model.has_attention, keeps_placeholders=plan.keeps_placeholders
        )
        self._item_of = {kind: item_maker(model.name, options) for kind, options in options_of.items()}
        self.in_flight, self.give_up_seconds = plan.in_flight, plan.give_up_seconds

    def prepare(self, text: str) -> Item:
        """Returns a text with its options."""
        text = text if self._has_attention else with_tags(text)
        return self._item_of[kind_of(text)](text)

    def kind_of(self, request: Item) -> int | None:
        """Returns the same for texts that may share a call; None for a text that has its own."""
        return request.kind

    def send(self, requests: Sequence[Item]) -> AsyncIterator[Outcome]:
        """Yields the place and the answer or error of each text of one call."""
        return self._client._send_items(requests, model=self._model)

    def stopped(self, error: Exception) -> Exception:
        """Returns the same error: a new connection would not help."""
        return error

    async def stop(self) -> None:
        """Closes the connection."""
        await self._client.close()


class _FileOutput:
    """An output file, which appears when it is complete. Owned by `translate`."""

    def __init__(self, plan: Translation, model: Model, memory: TranslationMemory | None) -> None:
        self._plan = plan
        self._model = model
        self._memory = memory
        self._folder = parts_folder(plan.output)
        self._new_folders = [folder for folder in self._folder.parents if not folder.exists()]
        self._pipe_copy = self._folder / _PIPE_FOLDER / "input.txt"
        self._languages = standard_languages(plan.options, model)
        num = plan.num_hypotheses
        self._writer = Writer(self._folder, plan.format, plan.target_field, num, self._languages)

    def write(self, connect: Callable[[], AsyncClient]) -> int:
        """Translates what is missing, completes the file, and returns the exit code."""
        with ExitStack() as lock:
            return self._write(self._planned(lock), connect)

    def _write(self, planned: Plan, connect: Callable[[], AsyncClient]) -> int:
        num_lines = sum(shard.num_lines for shard in planned.shards)
        waiting = [shard for shard in planned.shards if not self._is_done(shard)]
        num_skipped = num_lines - sum(shard.num_lines for shard in waiting)
        progress = _logged_progress(num_lines, is_shown=sys.stderr.isatty(), num_skipped=num_skipped)
        if not num_lines:
            progress.write(f"warning: {self._plan.input}: 0 texts\n")
        report, run = _Report(self._plan, progress), RunProgress()
        left = set(waiting)
        done = [shard for shard in planned.shards if shard not in left]
        report.add_failed_before([number for shard in done for number in self._writer.failed(shard)])
        files = RunFiles(self._plan.field, self._writer, planned.inputs, self._memory)

        async def start() -> Worker:
            decoder = _Server(connect(), self._plan, self._model)
            return Worker(files, decoder, take, terms=self._plan.options.terms)

        def take(number: int, result: Translated) -> None:
            report.add(number, result)
            progress.show(num_skipped + run.num_lines_now, report.num_failed)

        num_done = num_lines
        try:
            asyncio.run(run.translate(waiting, start))
            for reason in run.failed.values():
                raise JobError(reason)
        except (ClientError, JobError, OSError, KeyboardInterrupt, asyncio.CancelledError) as error:
            advice = "continue with the same command and --resume"
            num_done = self._num_done(planned)  # also what a thread has written after an interrupt
            has_shards = any(map(self._writer.is_done, planned.shards))
            if has_shards or (self._plan.resume and self._plan.output.exists()):
                error.add_note(f"{num_done} of {num_lines} lines are done: {advice}")
            elif self._pipe_copy.exists():
                error.add_note(f"the input is kept in {self._pipe_copy}: {advice}")
            else:
                if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
                    error.add_note(f"none of the shards of {_SHARD_LINES} lines is done, so nothing is kept")
                self._drop()
            raise
        finally:
            report.close(num_done)
        codes = [code for shard in planned.shards for code in self._writer.failed(shard).values()]
        self._complete(planned)
        if num_passing := _num_passing(codes):
            what = f"{report.counted(num_passing)} failed for {'reasons' if num_passing > 1 else 'a reason'}"
            progress.write(
                f"warning: {report.file}{what} that may pass: the same command with --resume tries again, "
                f"and {self._folder} is kept for it\n"
            )
        else:
            _remove(self._folder)
        return 1 if codes else 0

    def _is_done(self, shard: Shard) -> bool:
        """Whether a shard is written, and nothing in it failed for a reason that may pass."""
        return self._writer.is_done(shard) and not _num_passing(self._writer.failed(shard).values())

    def _num_done(self, planned: Plan) -> int:
        """Returns the number of lines that are written and did not fail for a reason that may pass."""
        written = filter(self._writer.is_done, planned.shards)
        return sum(shard.num_lines - _num_passing(self._writer.failed(shard).values()) for shard in written)

    def _planned(self, lock: ExitStack) -> Plan:
        plan, folder = self._plan, self._folder
        is_new = not folder.exists()
        lock.enter_context(locked(folder))
        if not is_new:
            self._check_folder()
            if plan.overwrite:
                _remove(folder)
                lock.enter_context(locked(folder))
        settings = _settings(plan, self._memory) | {
            "format": plan.format,
            "keeps_placeholders": plan.keeps_placeholders if is_software(plan.input) else None,
        }
        try:
            source = plan.input.absolute() if plan.input.is_file() else self._read_pipe()
            advice = "give another --output, or replace it with --overwrite"
            planned = plan_run(folder, [source], settings, _SHARD_LINES, advice, self._languages)
        except BaseException as error:
            is_kept = self._pipe_copy.exists() and not isinstance(error, WrongFile)
            if folder.exists() and not (folder / PLAN_FILE).exists() and not is_kept:
                self._drop()
            raise
        if plan.folder is not None:
            write_plan(plan.folder, Plan(_settings_of_folder(plan, self._memory), {}), _FOLDER_PLAN)
        return planned

    def _drop(self) -> None:
        """Removes what was written so far, and the folders that are empty then and were not there before."""
        _remove(self._folder)
        for folder in self._new_folders:
            if [path.name for path in folder.iterdir()] == [_FOLDER_PLAN]:
                (folder / _FOLDER_PLAN).unlink()
            if not any(folder.iterdir()):
                folder.rmdir()

    def _check_folder(self) -> None:
        """Raises JobError if the folder is not of this command, or has the input and is to be replaced."""
        plan, folder = self._plan, self._folder
        planned = read_plan(folder)
        others = [
            path.name
            for path in folder.iterdir()
            if path.name != _PIPE_FOLDER and not path.match(f".*{TEMPORARY}")
        ]
        if others if planned is None else "model" not in planned.settings:  # bulk work has a bundle
            raise JobError(f"{folder} exists, and this command did not create it: give another --output")
        if plan.overwrite and plan.input.resolve().is_relative_to(folder):
            raise JobError(f"--overwrite would remove the input {plan.input}: move it to another folder")

    def _read_pipe(self) -> Path:
        """Returns the file with the text of a pipe. One that is continued has the same text, or is empty."""
        kept = self._pipe_copy
        found = kept.with_name("again.txt") if kept.exists() else kept
        with open_binary(self._plan.input) as stream, atomic_write(found) as file:
            shutil.copyfileobj(stream, file)
        if found == kept:
            return kept
        is_same = not found.stat().st_size or filecmp.cmp(found, kept, shallow=False)
        found.unlink()
        if not is_same:
            raise JobError(
                f"the input is not that of the unfinished output, which is {kept}: give that one again, give "
                "another --output, or replace it with --overwrite"
            )
        return kept

    def _complete(self, planned: Plan) -> None:
        """Puts the shards together."""
        output, whole = self._plan.output, self._folder / "whole"
        with atomic_write(whole) as file:
            for shard in planned.shards:
                with self._writer.path(shard).open("rb") as part:
                    shutil.copyfileobj(part, file)
        whole.replace(output)
        sync_folder(output.parent)


class _Report:
    """Writes errors and warnings to stderr. Owned by `translate`."""

    def __init__(self, plan: Translation, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self.num_done = 0
        self.num_failed = 0
        self._num_from_memory = 0
        self._flaws, self._terms = Flaws(), TermFinder(plan.options.terms) if plan.options.terms else None

    def add(self, number: int, result: Translated) -> None:
        """Reports the error of a text, by its number, and counts its limits."""
        if result.error is not None:
            place = self._place(number)
            if self._plan.format == DOCUMENT:
                place = place.removesuffix(": ") + f" ({one_line(str(result.source))[:_SHOWN_CHARACTERS]}): "
            self._progress.write(f"error: {place}{in_flags(result.error)}\n")
            self.num_failed += 1
        self._num_from_memory += result.from_memory
        of_program = isinstance(result.source, SoftwareText) and self._plan.keeps_placeholders
        keeps = of_program or self._plan.options.keep_placeholders
        self._flaws.add("", number, result, keeps_placeholders=keeps)
        self.note_terms(number, str(result.source))
        self.num_done = number

    def add_failed_before(self, numbers: Sequence[int]) -> None:
        """Counts lines that an earlier command reported, and names the first ones."""
        self.num_failed += len(numbers)
        if numbers:
            named = self._unit + "s" * (len(numbers) > 1) + " " + ", ".join(map(str, numbers[:_MOST_NAMED]))
            more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
            self._progress.write(f"warning: {self.file}failed before, and not tried again: {named}{more}\n")

    def note_terms(self, number: int, text: str) -> None:
        """Counts a source that has translations of terms."""
        if self._terms is not None:
            self._flaws.add_terms("", number, text, self._terms)

    def note_limits(self, number: int, answer: GenerateResponse) -> None:
        """Counts a target that ended at its length limit or lacks terms, and a source that was truncated."""
        self._flaws.add_limits("", number, answer)

    def show(self) -> None:
        """Shows the progress up to the last text that was reported."""
        self._progress.show(self.num_done, self.num_failed)

    def close(self, num_done: int | None = None) -> None:
        """Writes the final progress, by default to the last text that was reported, and the warnings."""
        self._progress.close(self.num_done if num_done is None else num_done, self.num_failed)
        if self._plan.memory:
            self._progress.write(f"{self.file}{memory_count(self._num_from_memory)}\n")
        for _, number, num_more, problem in self._flaws.warnings(self._plan.options):
            self._progress.write(f"warning: {self._place(number, num_more=num_more)}{problem}\n")

    def counted(self, number: int) -> str:
        """Returns a number of texts with their unit."""
        return f"{number} {self._unit}" + "s" * (number > 1)

    @property
    def _unit(self) -> str:
        """The unit of progress."""
        return "text" if self._plan.texts or self._plan.format == DOCUMENT else "line"

    @property
    def file(self) -> str:
        """The beginning of a message, where the command has several inputs."""
        return f"{self._plan.input}: " if self._plan.is_one_of_many else ""

    def _place(self, number: int, *, num_more: int = 0) -> str:
        if self._plan.has_one_text:
            return ""
        return f"{self.file}{self._unit} {number}" + (f" and {num_more} more: " if num_more else ": ")


class _Answers:
    """Writes answers to standard output, a pipe or a device as they come. Owned by `translate`."""

    def __init__(
        self, plan: Translation, output: TextIO, report: _Report, memory: TranslationMemory | None
    ) -> None:
        self._plan = plan
        self._output = output
        self._report = report
        self._memory = memory

    def take(self, client: Client, texts: Iterator[str]) -> None:
        """Translates the texts and writes their answers."""
        plan = self._plan
        if plan.stream:
            for text in texts:
                known = self._memory.answer(text) if self._memory is not None else None
                if known is not None:
                    self._write(Translated(text, known, from_memory=True))
                elif text.strip():
                    self._stream(client, text)
                else:
                    self._write(Translated(text, GenerateResponse()))
            return
        for result in client.translate_many(
            texts,
            model=plan.model,
            options=plan.options,
            in_flight=plan.in_flight,
            give_up_seconds=plan.give_up_seconds,
            memory=self._memory,
        ):
            self._write(result)

    @property
    def _number(self) -> int:
        return self._report.num_done + 1

    @property
    def _keeps_line_breaks(self) -> bool:
        return self._plan.has_one_text and self._plan.num_hypotheses == 1

    def _write(self, result: Translated) -> None:
        number = self._number
        self._report.add(number, result)
        self._report.show()
        if self._plan.as_json:
            self._print(to_json(answer_json(result, number)))
        elif self._keeps_line_breaks and result.answer.hypotheses:
            self._print(result.answer.hypotheses[0].text)
        elif result.error is None or not self._plan.has_one_text:
            self._print("\n".join(answer_lines(result, self._plan.num_hypotheses)))
        self._save_attention(result.answer)

    def _stream(self, client: Client, text: str) -> None:
        """Writes the pieces of an answer as they arrive, then the other hypotheses."""
        is_line_begun = False
        try:
            for event in client.stream(text, model=self._plan.model, options=self._plan.options):
                if self._plan.as_json:
                    self._print(to_json({"source": text} | message_dict(event)))
                elif event.WhichOneof("event") == "piece":
                    if event.piece.hypothesis == 0:
                        piece = event.piece.text
                        self._print(piece if self._keeps_line_breaks else one_line(piece), end="")
                        is_line_begun = True
                else:
                    result = Translated(text, event.result)
                    self._print("\n".join(["", *answer_lines(result, self._plan.num_hypotheses)[1:]]))
                    self._save_attention(event.result)
                if event.HasField("result"):
                    self._report.note_limits(self._number, event.result)
                    self._report.note_terms(self._number, text)
        except ValueError as error:
            self._write(Translated(text, GenerateResponse(), ClientError.from_value_error(error)))
        except ClientError as error:
            if is_line_begun and self._plan.has_one_text:
                self._print("")
            if error.code == "UNAVAILABLE" or is_about_all(error):
                raise
            self._write(Translated(text, GenerateResponse(), None if error.is_blank_source else error))
        else:
            self._report.num_done += 1

    def _save_attention(self, answer: GenerateResponse) -> None:
        if self._plan.attention_file is not None and answer.sentences:
            text = (
                f"--attention shows one sentence, and the text was split into {len(answer.sentences)}: give "
                "one of them, or --long-source refuse"
            )
            raise ClientError("INVALID_ARGUMENT", text)
        if self._plan.attention_file is not None and answer.hypotheses:
            save_alignment(answer.hypotheses[0], self._plan.attention_file)

    def _print(self, text: str, end: str = "\n") -> None:
        self._output.write(text + end)
        self._output.flush()
