"""Translates texts and writes the answers in their order: always as many lines for a text as were asked for.

The lines of a blank text are blank, and so are those of a text that fails, which is reported; the others go
on. Under --stream the pieces that came before a failure stay. A target that ended at a limit is written, and
reported with a warning on stderr.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from client.errors import ClientError
from client.files import STANDARD, count_lines, open_input, open_output, skip_answered
from client.many import STOPPING_CODES, Translated
from client.output import attention_dict, error_dict, message_dict, one_line, to_json, valid_unicode
from client.progress import Progress
from client.sync import Client
from protos.seq2seq_v1_pb2 import FINISH_REASON_LENGTH, GenerateOptions, GenerateResponse


@dataclass(frozen=True)
class Translation:
    """The settings of one command.

    Attributes:
        texts: Where there are none, the lines of `input` are.
        resume: Whether `output` is continued where it exists.
        overwrite: Whether it is written anew where it exists.
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
        """Lines that a text has in the output."""
        return 1 if self.as_json else max(1, self.options.num_hypotheses)


def translate(client: Client, plan: Translation) -> int:
    """Translate and write; returns the exit code.

    Raises:
        ClientError: No server answers, or it was of no use to go on.
        OSError: The input cannot be read, or a result cannot be written.
        WrongOutput: The output that is to be continued is another input's.
    """
    client.health()  # a wrong address is reported at once, and not after `give_up_seconds`
    with ExitStack() as stack:
        texts = iter(plan.texts) if plan.texts else stack.enter_context(open_input(plan.input))
        output, num_skipped = sys.stdout, 0
        if plan.output != STANDARD:
            file = stack.enter_context(open_output(plan.output, resume=plan.resume, overwrite=plan.overwrite))
            if plan.resume:
                num_skipped = skip_answered(texts, file, plan.lines_each, as_json=plan.as_json)
            output = io.TextIOWrapper(file, encoding="utf-8", newline="")
        is_shown = sys.stderr.isatty() and not output.isatty()
        progress = Progress(
            sys.stderr,
            is_shown=is_shown,
            num_lines=len(plan.texts) or count_lines(plan.input) if is_shown else None,
            num_skipped=num_skipped,
        )
        logging.basicConfig(stream=progress, format="%(message)s", force=True)
        logging.getLogger("client").setLevel(logging.INFO)
        answers = _Answers(plan, output, progress, num_skipped)
        stack.callback(answers.close)
        try:
            answers.take(client, texts)
        except (ClientError, OSError, KeyboardInterrupt) as error:
            if plan.output != STANDARD:
                error.add_note(
                    f"{plan.output} answers the first {answers.num_done} lines: the same command with "
                    "--resume goes on with the next"
                )
            raise
    return 1 if answers.num_failed else 0


class _Answers:
    """Writes answers to the output, and failures to stderr. Owned by `translate`."""

    def __init__(self, plan: Translation, output: TextIO, progress: Progress, num_skipped: int) -> None:
        self._plan = plan
        self._output = output
        self._progress = progress
        self.num_done = num_skipped
        self.num_failed = 0

    def take(self, client: Client, texts: Iterator[str]) -> None:
        """Translate the texts and write what comes."""
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
        self._progress.close(self.num_done, self.num_failed)

    def _write(self, result: Translated) -> None:
        assert isinstance(result.source, str)
        content: dict[str, Any] = {"source": valid_unicode(result.source)}
        if result.error is None:
            content |= message_dict(result.answer)
        else:
            content |= {"line": self.num_done + 1, "error": error_dict(result.error)}
            self._progress.write(f"error: {self._place()}{result.error}\n")
            self.num_failed += 1
        self._print(to_json(content) if self._plan.as_json else "\n".join(self._lines(result.answer)))
        self._warn_of_limits(result.answer)
        self._save_attention(result.answer)
        self.num_done += 1
        self._progress.show(self.num_done, self.num_failed)

    def _stream(self, client: Client, text: str) -> None:
        """Write pieces as they come; the last line ends with the whole answer."""
        try:
            for event in client.stream(text, model=self._plan.model, options=self._plan.options):
                if self._plan.as_json:
                    self._print(to_json({"source": text} | message_dict(event)))
                elif event.WhichOneof("event") == "piece":
                    if event.piece.hypothesis == 0:
                        self._print(one_line(event.piece.text), end="")
                else:
                    self._print("\n".join(["", *self._lines(event.result)[1:]]))
                    self._save_attention(event.result)
                if event.HasField("result"):
                    self._warn_of_limits(event.result)
        except ValueError as error:
            self._write(Translated(text, GenerateResponse(), ClientError.from_value_error(error)))
        except ClientError as error:
            if error.code in (*STOPPING_CODES, "UNAVAILABLE"):
                raise
            self._write(Translated(text, GenerateResponse(), error))
        else:
            self.num_done += 1

    def _lines(self, answer: GenerateResponse) -> list[str]:
        lines = [one_line(hypothesis.text) for hypothesis in answer.hypotheses]
        return lines + [""] * (self._plan.lines_each - len(lines))

    def _warn_of_limits(self, answer: GenerateResponse) -> None:
        if any(hypothesis.finish_reason == FINISH_REASON_LENGTH for hypothesis in answer.hypotheses):
            self._progress.write(
                f"warning: {self._place()}the target ended at its length limit: it may repeat itself or lack "
                "its end (--max-new-tokens and --max-length-ratio set the limit)\n"
            )

    def _place(self) -> str:
        number = self.num_done + 1
        if not self._plan.texts:
            return f"line {number}: "
        return f"text {number}: " if len(self._plan.texts) > 1 else ""

    def _save_attention(self, answer: GenerateResponse) -> None:
        path = self._plan.attention_file
        if path is None or not answer.hypotheses:
            return
        attention = answer.hypotheses[0].attention
        if path.suffix == ".json":
            path.write_text(to_json(attention_dict(attention)) + "\n", encoding="utf-8")
            return
        from client.heatmap import save_heatmap  # matplotlib takes longer to import than to translate

        save_heatmap(attention, path)

    def _print(self, text: str, end: str = "\n") -> None:
        self._output.write(text + end)
        self._output.flush()
