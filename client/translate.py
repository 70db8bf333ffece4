"""Runs the command `translate`: writes a line for each text, in order, or N lines for N hypotheses.

The lines of a blank text are blank, and so are those of a text that fails, whose error goes to stderr. The
answer to a single TEXT keeps its line breaks; if it fails, nothing is written. With --stream, pieces before a
failure stay. At the end, stderr gets one warning for targets that ended at their length limit, and one for
truncated sources.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict

from seq2seq_serve.client.attention import save_alignment
from seq2seq_serve.client.documents import DOCUMENTS
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files import (
    STANDARD,
    WrongOutput,
    count_lines,
    open_input,
    open_output,
    skip_answered,
)
from seq2seq_serve.client.forms import find_model
from seq2seq_serve.client.many import STOPPING_CODES
from seq2seq_serve.client.output import (
    error_dict,
    in_flags,
    length_advice,
    one_line,
    to_json,
    valid_unicode,
)
from seq2seq_serve.client.progress import Progress
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.client.sync import Client
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.protos.seq2seq_v1_pb2 import FINISH_REASON_LENGTH, GenerateOptions, GenerateResponse

_SHOWN_CHARACTERS = 60  # of a text that failed


@dataclass(frozen=True)
class Translation:
    """The settings of one command.

    Attributes:
        texts: From the command line; if there are none, the lines of `input` are translated.
        resume: Whether to continue an existing `output`.
        overwrite: Whether to replace an existing `output`.
    """

    texts: tuple[str, ...]
    input: Path
    output: Path
    resume: bool
    overwrite: bool
    model: str
    options: GenerateOptions
    in_flight: int
    give_up_seconds: float
    stream: bool
    as_json: bool
    attention_file: Path | None

    @property
    def lines_each(self) -> int:
        """The number of lines of each text in the output."""
        return 1 if self.as_json else max(1, self.options.num_hypotheses)

    @property
    def is_document(self) -> bool:
        """Whether the input is a document, whose texts are translated in their places."""
        return not self.texts and self.input.suffix.lower() in DOCUMENTS

    @property
    def has_one_text(self) -> bool:
        """Whether the whole output is the answer to one text, so that messages need no line number."""
        return len(self.texts) == 1


def translate(client: Client, plan: Translation) -> int:
    """Translates the texts, writes the answers, and returns the exit code.

    Raises:
        ClientError: No server answers, or the command stopped before the last text.
        OSError: The input cannot be read, or the output cannot be written.
        WrongOutput: The output to continue belongs to another input.
    """
    if plan.is_document:
        return _translate_document(client, plan)
    plan = replace(plan, model=_find_model(client, plan))
    with ExitStack() as stack:
        texts = iter(plan.texts) if plan.texts else stack.enter_context(open_input(plan.input))
        output, num_skipped = sys.stdout, 0
        if plan.output != STANDARD:
            file = stack.enter_context(open_output(plan.output, resume=plan.resume, overwrite=plan.overwrite))
            settings = _Settings(plan)
            if plan.resume:
                num_skipped = skip_answered(texts, file, plan.lines_each, as_json=plan.as_json)
                if num_skipped and not settings.are_known() and (first := next(texts, None)) is not None:
                    texts = itertools.chain([first], texts)
                    settings.warn(num_skipped)
            settings.write()
            output = io.TextIOWrapper(file, encoding="utf-8", newline="")
        is_shown = sys.stderr.isatty() and not output.isatty()
        progress = Progress(
            sys.stderr,
            is_shown=is_shown,
            num_lines=len(plan.texts) or count_lines(plan.input) if is_shown else None,
            num_skipped=num_skipped,
        )
        logging.basicConfig(stream=progress, format="%(message)s", force=True)
        logging.getLogger("seq2seq_serve.client").setLevel(logging.INFO)
        answers = _Answers(plan, output, progress, num_skipped)
        stack.callback(answers.close)
        try:
            answers.take(client, texts)
        except (ClientError, OSError, KeyboardInterrupt) as error:
            if plan.output != STANDARD:
                error.add_note(
                    f"{plan.output} has the answers to the first {answers.num_done} lines: continue with the "
                    "same command and --resume"
                )
            raise
        if plan.output != STANDARD:
            settings.remove()
    return 1 if answers.num_failed else 0


def _translate_document(client: Client, plan: Translation) -> int:
    """Writes a document with translated texts, and returns the exit code; texts that fail stay."""
    document = DOCUMENTS[plan.input.suffix.lower()](plan.input.read_bytes(), plan.input)
    model, options = find_model(client, plan.model, "translate"), GenerateOptions()
    options.CopyFrom(plan.options)
    options.word_alignment = model.has_attention and any(one.is_formatted for one in document.segments)
    is_shown = sys.stderr.isatty()
    progress = Progress(sys.stderr, is_shown=is_shown, num_lines=len(document.segments), unit="texts")
    results = client.translate_many(
        [segment.text for segment in document.segments],
        model=model.name,
        options=options,
        in_flight=plan.in_flight,
        give_up_seconds=plan.give_up_seconds,
    )
    num_failed, at_limit = 0, _Warned()
    for number, (segment, result) in enumerate(zip(document.segments, results, strict=True), start=1):
        if result.error is not None:
            text = one_line(segment.text)[:_SHOWN_CHARACTERS]
            progress.write(f"error: text {number} ({text}): {in_flags(str(result.error))}\n")
            num_failed += 1
        elif result.answer.hypotheses:
            segment.translate(result.answer)
            if result.answer.hypotheses[0].finish_reason == FINISH_REASON_LENGTH:
                at_limit.add(number)
        progress.show(number, num_failed)
    progress.close(len(document.segments), num_failed)
    if at_limit.num_texts:
        progress.write(f"warning: {at_limit.num_texts} texts ended at their length limit, first text ")
        progress.write(f"{at_limit.first_number} ({length_advice(plan.options)})\n")
    written = plan.output.with_name(f".{plan.output.name}.part")
    written.write_bytes(document.content())
    written.replace(plan.output)
    return 1 if num_failed else 0


class _Settings:
    """What an unfinished output was begun with: a small file beside it, removed at the end."""

    def __init__(self, plan: Translation) -> None:
        self._output = plan.output
        self._file = plan.output.with_name(f"{plan.output.name}.settings.json")
        options = MessageToDict(plan.options, preserving_proto_field_name=True)
        options.pop("priority", None)  # it does not change any target
        self._content: dict[str, Any] = {"model": plan.model, "json": plan.as_json, "options": options}

    def are_known(self) -> bool:
        """Returns whether the settings of the output to continue are known.

        Raises:
            WrongOutput: They are others.
        """
        try:
            before = json.loads(self._file.read_bytes())
        except (OSError, ValueError):
            return False
        if before != self._content:
            raise WrongOutput(
                f"it was begun with {to_json(before)}, and this is {to_json(self._content)}: give the same "
                f"options, or --overwrite; without {self._file} it goes on in any case"
            )
        return True

    def warn(self, num_answered: int) -> None:
        """Warns of an output whose settings are not known."""
        sys.stderr.write(
            f"warning: {self._output} has the answers to {num_answered} lines, and {self._file} is not "
            "there: its options may have been others\n"
        )

    def write(self) -> None:
        """Writes the file, unless the output is a pipe or a device."""
        if self._output.is_file():
            self._file.write_text(to_json(self._content) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Removes the file, because the output is complete."""
        self._file.unlink(missing_ok=True)


def _find_model(client: Client, plan: Translation) -> str:
    """Returns the name of the model to ask: the given one, or the server's first that translates.

    What is wrong is found at once, and not after `give_up_seconds`.

    Raises:
        ClientError: No server answers, it does not serve the model, or the model does not translate. If
            the server has no model at all, it may be loading one: for the lines of an input, that is only a
            warning.
    """
    try:
        return find_model(client, plan.model, "translate").name
    except ClientError as error:
        has_answered = error.code == "UNAVAILABLE" and error.request_id
        if plan.texts or plan.stream or not has_answered:
            raise
        sys.stderr.write(f"warning: {error}\n")
        return plan.model


@dataclass
class _Warned:
    """Counts the texts that a warning is about. Owned by `_Answers`."""

    first_number: int = 0
    num_texts: int = 0

    def add(self, number: int) -> None:
        self.first_number = self.first_number or number
        self.num_texts += 1


class _Answers:
    """Writes answers to the output, and errors and warnings to stderr. Owned by `translate`."""

    def __init__(self, plan: Translation, output: TextIO, progress: Progress, num_skipped: int) -> None:
        self._plan = plan
        self._output = output
        self._progress = progress
        self.num_done = num_skipped
        self.num_failed = 0
        self._at_limit, self._truncated = _Warned(), _Warned()
        self._num_left_out = 0  # tokens of truncated sources

    def take(self, client: Client, texts: Iterator[str]) -> None:
        """Translates the texts and writes their answers."""
        plan = self._plan
        if plan.stream:
            for text in texts:
                if text.strip():
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
        ):
            self._write(result)

    def close(self) -> None:
        """Writes the final progress and the warnings."""
        self._progress.close(self.num_done, self.num_failed)
        self._warn(
            self._at_limit,
            "the target ended at its length limit: it may repeat itself or lack its end "
            f"({length_advice(self._plan.options)})",
        )
        self._warn(
            self._truncated,
            f"the source is too long, and {self._num_left_out} tokens at its end were left out "
            "(--long-source split_always translates each sentence)",
        )

    def _warn(self, about: _Warned, text: str) -> None:
        if about.num_texts:
            place = self._place(about.first_number, num_more=about.num_texts - 1)
            self._progress.write(f"warning: {place}{text}\n")

    def _write(self, result: Translated) -> None:
        assert isinstance(result.source, str)
        content: dict[str, Any] = {"source": valid_unicode(result.source)}
        if result.error is None:
            content |= message_dict(result.answer)
        else:
            content |= {"line": self.num_done + 1, "error": error_dict(result.error)}
            self._progress.write(f"error: {self._place(self.num_done + 1)}{in_flags(str(result.error))}\n")
            self.num_failed += 1
        if self._plan.as_json:
            self._print(to_json(content))
        elif result.error is None or not self._plan.has_one_text:
            self._print("\n".join(self._lines(result.answer)))
        self._note_limits(result.answer)
        self._save_attention(result.answer)
        self.num_done += 1
        self._progress.show(self.num_done, self.num_failed)

    def _stream(self, client: Client, text: str) -> None:
        """Writes the pieces of an answer as they arrive, then the other hypotheses."""
        is_line_begun = False
        try:
            for event in client.stream(text, model=self._plan.model, options=self._plan.options):
                if self._plan.as_json:
                    self._print(to_json({"source": text} | message_dict(event)))
                elif event.WhichOneof("event") == "piece":
                    if event.piece.hypothesis == 0:
                        self._print(self._shown(event.piece.text), end="")
                        is_line_begun = True
                else:
                    self._print("\n".join(["", *self._lines(event.result)[1:]]))
                    self._save_attention(event.result)
                if event.HasField("result"):
                    self._note_limits(event.result)
        except ValueError as error:
            self._write(Translated(text, GenerateResponse(), ClientError.from_value_error(error)))
        except ClientError as error:
            if is_line_begun and self._plan.has_one_text:
                self._print("")
            if error.code in (*STOPPING_CODES, "UNAVAILABLE"):
                raise
            self._write(Translated(text, GenerateResponse(), None if error.is_blank_source else error))
        else:
            self.num_done += 1

    def _lines(self, answer: GenerateResponse) -> list[str]:
        lines = [self._shown(hypothesis.text) for hypothesis in answer.hypotheses]
        return lines + [""] * (self._plan.lines_each - len(lines))

    def _shown(self, text: str) -> str:
        return text if self._plan.has_one_text and self._plan.lines_each == 1 else one_line(text)

    def _note_limits(self, answer: GenerateResponse) -> None:
        if any(hypothesis.finish_reason == FINISH_REASON_LENGTH for hypothesis in answer.hypotheses):
            self._at_limit.add(self.num_done + 1)
        if num_tokens := answer.usage.truncated_source_tokens:
            self._truncated.add(self.num_done + 1)
            self._num_left_out += num_tokens

    def _place(self, number: int, *, num_more: int = 0) -> str:
        if self._plan.has_one_text:
            return ""
        kind = "text" if self._plan.texts else "line"
        return f"{kind} {number}" + (f" and {num_more} more: " if num_more else ": ")

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
