"""Formats answers and errors as JSON and as lines of text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from copy import copy
from typing import Any

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.live import (
    LiveEvent,
    LiveResult,
    LiveSegment,
    LiveText,
    SpeechBegan,
    SpeechEnded,
)
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.protos.dicts import message_dict
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.protos.seq2seq_v1_pb2 import Attention, GenerateOptions

_LINE_BREAKS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


def to_json(content: dict[str, Any]) -> str:
    """Returns one line of JSON; characters of every alphabet stay as they are."""
    return json.dumps(content, ensure_ascii=False)


class FlagFormatter(logging.Formatter):
    """Formats the log of retries with the command's names of options."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the message; its arguments may be errors."""
        if isinstance(record.args, tuple):
            record = copy(record)
            record.args = tuple(
                in_flags(each) if isinstance(each, ClientError) else each for each in record.args or ()
            )
        return super().format(record)


def in_flags(error: ClientError) -> str:
    """Returns an error's text with the command's names of options: --long-source, not long_source.

    An option whose name is also a common word, such as temperature, is one where the server names its field.
    """
    fields = {violation.field for violation in error.field_violations}

    def flag(match: re.Match[str]) -> str:
        name = match[2]
        if name == "timeout_seconds":
            return "--timeout-seconds"
        is_option = match[1] or "_" in name or f"options.{name}" in fields
        return OPTIONS[name].flag if is_option and name in OPTIONS else match[0]

    return re.sub(r"\b(options\.)?([a-z]+(?:_[a-z]+)*)\b", flag, str(error))


def error_dict(error: ClientError) -> dict[str, Any]:
    """Returns the error of a failed call, as `--json` prints it."""
    content: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.field_violations:
        content["field_violations"] = [
            {"field": violation.field, "description": violation.description}
            for violation in error.field_violations
        ]
    if error.retry_after_seconds is not None:
        content["retry_after_seconds"] = error.retry_after_seconds
    if error.request_id:
        content["request_id"] = error.request_id
    return content


def answer_json(result: Translated, number: int) -> dict[str, Any]:
    """Returns the answer to the text of a line, counted from 1, or its error, as `--json` prints it."""
    assert isinstance(result.source, str)
    content: dict[str, Any] = {"source": valid_unicode(result.source)}
    if result.error is None:
        from_memory = {"from_memory": True} if result.from_memory else {}
        return content | from_memory | message_dict(result.answer)
    return content | {"line": number, "error": error_dict(result.error)}


def answer_lines(result: Translated, num_hypotheses: int) -> list[str]:
    """Returns a line for each hypothesis, and blank ones for those that are missing."""
    lines = [one_line(hypothesis.text) for hypothesis in result.answer.hypotheses[:num_hypotheses]]
    return lines + [""] * (num_hypotheses - len(lines))


def attention_dict(attention: Attention) -> dict[str, Any]:
    """Returns attention as a dict; its weights, and those of each hop, have a row for each target token."""
    num_rows = len(attention.target_tokens)
    content: dict[str, Any] = {
        "source_tokens": list(attention.source_tokens),
        "target_tokens": list(attention.target_tokens),
        "weights": _rows(attention.weights, num_rows),
    }
    if attention.hops:
        content["hops"] = [_rows(hop.weights, num_rows) for hop in attention.hops]
    return content


def event_dict(event: LiveEvent) -> dict[str, Any]:
    """Returns an event as `--json` prints it, which is the message of the wire."""
    content: dict[str, Any]
    match event:
        case SpeechBegan():
            content = {"speech_began": {"begin_seconds": event.begin_seconds}}
        case SpeechEnded():
            content = {"speech_ended": {"end_seconds": event.end_seconds}}
        case LiveText():
            words = [message_dict(word) for word in event.stable]
            content = {
                "text": {"stable": words, "unstable": event.unstable, "lag_seconds": event.lag_seconds}
            }
        case LiveSegment():
            content = {"segment": message_dict(event.segment)}
        case LiveResult():
            content = {"result": message_dict(event.answer)}
    return content | {"received_seconds": event.received_seconds}


def length_advice(options: GenerateOptions) -> str:
    """Returns how to get longer targets than these options allow."""
    if options.HasField("max_new_tokens"):
        return "raise --max-new-tokens" + (" or --max-length-ratio" if options.max_length_ratio else "")
    if options.max_length_ratio:
        return "raise --max-length-ratio"
    return "--max-new-tokens sets another limit, up to the model's own"


def one_line(text: str) -> str:
    """Returns `text` with spaces in place of line breaks, so that it takes one line of the output."""
    return text.translate(_LINE_BREAKS)


def valid_unicode(text: str) -> str:
    """Returns `text` with replacement characters in place of surrogates, which stand for invalid UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _rows(weights: Sequence[float], num_rows: int) -> list[list[float]]:
    width = len(weights) // max(1, num_rows)
    rounded = [round(weight, 6) for weight in weights]
    return [rounded[row * width : (row + 1) * width] for row in range(num_rows)]
