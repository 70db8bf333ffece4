"""Translates many texts at once and prints the answers in the order of the texts.

A text that fails is reported and leaves its line of the output empty, or, under --stream, with the pieces
that came before; the others go on.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from client.errors import ClientError
from client.output import attention_dict, error_dict, message_dict, one_line, to_json
from client.sync import Client, Pending
from protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse

_MAX_RETURNS = 20
_MAX_IN_FLIGHT = 64


@dataclass(frozen=True)
class Item:
    """One text to translate.

    Attributes:
        place: Where it stands, for messages; empty where there is only one.
        text: None where the input could not be read as text.
        problem: Why.
    """

    place: str
    text: str | None
    problem: str = ""


@dataclass(frozen=True)
class Translation:
    """How texts are translated and printed."""

    model: str
    options: GenerateOptions
    stream: bool
    as_json: bool
    attention_file: Path | None


def text_arguments(texts: list[str]) -> Iterator[Item]:
    """Texts from the command line."""
    for number, text in enumerate(texts, start=1):
        place = f"text {number}" if len(texts) > 1 else ""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            yield Item(place, None, f"not valid UTF-8 at character {error.start + 1}")
        else:
            yield Item(place, text)


def read_lines(descriptor: int) -> Iterator[Item]:
    """Lines of a file, each as soon as it is there."""
    with open(descriptor, "rb", closefd=False) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                yield Item(f"line {number}", None, f"not valid UTF-8 at byte {error.start + 1}")
            else:
                yield Item(f"line {number}", text)


def translate(client: Client, items: Iterable[Item], plan: Translation) -> int:
    """Translate and print; returns the exit code.

    Raises:
        ClientError: No server answers at all.
        OSError: A result cannot be written.
    """
    client.health()  # else every text would say by itself that no server answers
    num_failed = 0
    if plan.stream:
        for item in items:
            num_failed += not _print_stream(client, item, plan)
    else:
        for item, pending in _in_flight(client, items, plan):
            num_failed += not _print_answer(client, item, pending, plan)
    return 1 if num_failed else 0


def _in_flight(
    client: Client, items: Iterable[Item], plan: Translation
) -> Iterator[tuple[Item, Pending | None]]:
    """Every item with its call under way, in order; the queue's size bounds how many there are."""
    calls: queue.Queue[tuple[Item, Pending | None] | Exception | None] = queue.Queue(_MAX_IN_FLIGHT)

    def feed() -> None:
        try:
            for item in items:
                pending = None
                if item.text is not None:
                    pending = client.submit(item.text, model=plan.model, options=plan.options)
                calls.put((item, pending))
            calls.put(None)
        except Exception as error:
            calls.put(error)

    # A thread of its own, so that an answer is printed while the next line is still being typed; a daemon,
    # so that Ctrl-C ends the program while it waits for that line.
    threading.Thread(target=feed, daemon=True).start()
    while (call := calls.get()) is not None:
        if isinstance(call, Exception):
            raise call
        yield call


def _patient_result(client: Client, item: Item, pending: Pending, plan: Translation) -> GenerateResponse:
    """The answer; where the server has too much to do, it is asked again when it said so, a few times."""
    for _ in range(_MAX_RETURNS):
        try:
            return pending.result()
        except ClientError as error:
            if error.retry_after_seconds is None:
                raise
            time.sleep(error.retry_after_seconds)  # answers to later lines come meanwhile
            assert item.text is not None
            pending = client.submit(item.text, model=plan.model, options=plan.options)
    return pending.result()


def _print_answer(client: Client, item: Item, pending: Pending | None, plan: Translation) -> bool:
    try:
        if pending is None:
            raise ClientError("INVALID_ARGUMENT", item.problem)
        answer = _patient_result(client, item, pending, plan)
    except ClientError as error:
        _print_error(item, error, plan)
        return False
    if plan.as_json:
        _print(to_json({"source": item.text} | message_dict(answer)))
    else:
        for hypothesis in answer.hypotheses:
            _print(one_line(hypothesis.text))
    _save_attention(answer, plan)
    return True


def _print_stream(client: Client, item: Item, plan: Translation) -> bool:
    try:
        if item.text is None:
            raise ClientError("INVALID_ARGUMENT", item.problem)
        for event in client.stream(item.text, model=plan.model, options=plan.options):
            if plan.as_json:
                _print(to_json({"source": item.text} | message_dict(event)))
            elif event.WhichOneof("event") == "piece":
                if event.piece.hypothesis == 0:
                    _print(one_line(event.piece.text), end="")
            else:
                _print("")
                for hypothesis in event.result.hypotheses[1:]:
                    _print(one_line(hypothesis.text))
                _save_attention(event.result, plan)
    except ClientError as error:
        _print_error(item, error, plan)
        return False
    return True


def _print_error(item: Item, error: ClientError, plan: Translation) -> None:
    place = f"{item.place}: " if item.place else ""
    sys.stderr.write(f"error: {place}{error}\n")
    _print(to_json({"source": item.text, "error": error_dict(error)}) if plan.as_json else "")


def _save_attention(answer: GenerateResponse, plan: Translation) -> None:
    if plan.attention_file is None:
        return
    attention = answer.hypotheses[0].attention
    if plan.attention_file.suffix == ".json":
        plan.attention_file.write_text(to_json(attention_dict(attention)) + "\n", encoding="utf-8")
        return
    from client.heatmap import save_heatmap  # matplotlib takes longer to import than to translate

    save_heatmap(attention, plan.attention_file)


def _print(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()
