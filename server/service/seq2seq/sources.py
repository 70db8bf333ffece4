"""Checks the sources of a request and cuts them into token ids; long ones are refused, truncated or split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from seq2seq_serve.bundle.normalization import is_blank
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SPLIT,
    LONG_SOURCE_SPLIT_ALWAYS,
    LONG_SOURCE_TRUNCATE,
    LongSource,
    Source,
)
from seq2seq_serve.server.engine.records import Array
from seq2seq_serve.server.errors import BlankSource, InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.seq2seq.sentences import DEFAULT_LANGUAGE, lines, sentences
from seq2seq_serve.server.service.text_threads import Checkpoint

# Cutting a text into tokens takes time, so its bytes are counted before. Texts of human authors have fewer
# bytes per token, before and after normalisation, so texts that fit are not refused.
MAX_BYTES_PER_TOKEN = 64
MAX_PARTS = 256  # lines or sentences that a text is split into
MAX_TIMES_TOO_LONG = 16  # how many times the usual bytes a source to split or truncate may have
SPLITTING = (LONG_SOURCE_SPLIT, LONG_SOURCE_SPLIT_ALWAYS)

_TEXT, _TOKEN_IDS = "sources[0].text", "sources[0].token_ids"


@dataclass(frozen=True)
class Part:
    """The source of one target: a whole source, or one line or sentence of it.

    Attributes:
        source_ids: `(S,)` int64.
        num_truncated: The number of tokens that were left out.
        text: The line or sentence; empty for a whole source.
        separator: The white space before the next part, line breaks included.
    """

    source_ids: Array
    num_truncated: int = 0
    text: str = ""
    separator: str = ""


def source_parts(
    sources: Sequence[Source],
    model: ServedModel,
    checkpoint: Checkpoint,
    *,
    long_source: LongSource = LongSource.LONG_SOURCE_REFUSE,
    language: str = DEFAULT_LANGUAGE,
) -> list[Part]:
    """Returns the source of a request: one part, or several if it is split.

    Args:
        sources: The sources of the request.
        model: The model that the request names.
        checkpoint: Is called every few milliseconds; an error that it raises ends the work.
        long_source: What to do with a text that is too long.
        language: The language by whose rules sentences are split.

    Raises:
        InvalidRequest: The source does not fit; the error names the field and what it must be.
    """
    if len(sources) != 1:
        raise InvalidRequest(
            f"the request has {len(sources)} sources, and {model.name} takes exactly 1",
            field="sources",
        )
    source = sources[0]
    its_name = model.memory.source
    if source.name not in ("", its_name):
        raise InvalidRequest(
            f"{model.name} has no source named {source.name[:100]!r}: "
            f"its only one is {its_name!r}, and the name may be left empty",
            field="sources[0].name",
        )
    kind = source.WhichOneof("value")
    if kind == "text":
        return _text_parts(source.text, model, long_source, language, checkpoint)
    if kind == "token_ids":
        return [_ids_part(source.token_ids.values, model, long_source)]
    raise InvalidRequest("the source is empty: give it a text or token ids", field="sources[0]")


def check_ids(token_ids: Iterable[int], model: ServedModel, field: str) -> None:
    """Refuses token ids that the model does not have."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary of {model.name}: "
                f"ids go from 0 to {model.vocab_size - 1}",
                field=f"{field}[{index}]",
            )


def check_bytes(text: str, max_tokens: int, model: ServedModel, field: str) -> None:
    """Refuses a text that is too long for `max_tokens`, before it is cut into tokens."""
    num_bytes = len(text.encode())
    if num_bytes > max_tokens * MAX_BYTES_PER_TOKEN:
        raise InvalidRequest(
            f"the text has {num_bytes} bytes, and {model.name} takes at most {max_tokens} tokens, "
            f"never more than {max_tokens * MAX_BYTES_PER_TOKEN} bytes: send shorter pieces",
            field=field,
        )


def _text_parts(
    text: str, model: ServedModel, long_source: LongSource, language: str, checkpoint: Checkpoint
) -> list[Part]:
    limit = model.max_source_length
    if not text:
        raise BlankSource("the text is empty", field=_TEXT)
    if is_blank(text):
        raise BlankSource("the text has only white space and invisible characters", field=_TEXT)
    is_split = long_source in SPLITTING
    may_be_long = is_split or long_source == LONG_SOURCE_TRUNCATE
    check_bytes(text, limit * (MAX_TIMES_TOO_LONG if may_be_long else 1), model, _TEXT)
    if is_split:
        has_long_lines = long_source == LONG_SOURCE_SPLIT
        passages = _passages(text, model, language, checkpoint, has_long_lines=has_long_lines)
        parts = list(islice(passages, MAX_PARTS + 1))
        if len(parts) > MAX_PARTS:
            raise InvalidRequest(
                f"the text has more than {MAX_PARTS} sentences and lines, the most for one request: "
                "send shorter pieces",
                field=_TEXT,
            )
        return parts
    token_ids, num_over = model.source_tokenizer.encode_truncated(text, limit)
    if num_over and long_source != LONG_SOURCE_TRUNCATE:
        raise _too_long("the source", limit + num_over, model, _TEXT, hint=" or set options.long_source")
    return [_part(token_ids, num_over)]


def _passages(
    text: str, model: ServedModel, language: str, checkpoint: Checkpoint, *, has_long_lines: bool
) -> Iterator[Part]:
    """Yields a part for each sentence of a text.

    With `has_long_lines`, a line that fits into the model is one part. An error for one part ends the work.
    """
    limit, number = model.max_source_length, count(1)
    max_bytes = limit * MAX_BYTES_PER_TOKEN

    def before_window(num_characters: int) -> None:
        checkpoint()
        if num_characters > max_bytes:
            raise InvalidRequest(
                f"sentence {next(number)} of the source has more than {num_characters} characters, and "
                f"{model.name} takes at most {limit} tokens: send shorter pieces",
                field=_TEXT,
            )

    for line, after_line in lines(text):
        checkpoint()
        if has_long_lines and len(line.encode()) <= max_bytes:
            token_ids, num_over = model.source_tokenizer.encode_truncated(line, limit)
            if not num_over:
                next(number)
                yield replace(_part(token_ids), text=line, separator=after_line)
                continue
        for sentence, separator in sentences(line, language, before_window):
            which = f"sentence {next(number)} of the source"
            check_bytes(sentence, limit, model, _TEXT)
            token_ids, num_over = model.source_tokenizer.encode_truncated(sentence, limit)
            if num_over:
                raise _too_long(which, limit + num_over, model, _TEXT)
            yield replace(_part(token_ids), text=sentence, separator=separator or after_line)


def _ids_part(token_ids: Sequence[int], model: ServedModel, long_source: LongSource) -> Part:
    limit = model.max_source_length
    if not token_ids:
        raise InvalidRequest("the source has no token ids: send at least one", field=_TOKEN_IDS)
    num_truncated = 0
    if len(token_ids) > limit:  # first, so that a long list is refused before each id is checked
        if long_source != LONG_SOURCE_TRUNCATE:
            raise _too_long("the source", len(token_ids), model, _TOKEN_IDS)
        num_truncated = len(token_ids) - limit
        token_ids = [*token_ids[: limit - 1], token_ids[-1]]  # the last is the end of sequence
    field = f"{_TOKEN_IDS}.values"
    check_ids(token_ids, model, field)
    # Training never lets a model read padding, and the served graphs read every id that they are given.
    if model.pad_id in token_ids:
        raise InvalidRequest(
            f"token id {model.pad_id} is padding, which {model.name} does not read: leave it out, or send "
            "the rows' own lengths",
            field=f"{field}[{list(token_ids).index(model.pad_id)}]",
        )
    return _part(token_ids, num_truncated)


def _part(token_ids: Sequence[int], num_truncated: int = 0) -> Part:
    return Part(np.asarray(token_ids, dtype=np.int64), num_truncated)  # (S,)


def _too_long(
    what: str, num_tokens: int, model: ServedModel, field: str, *, hint: str = ""
) -> InvalidRequest:
    return InvalidRequest(
        f"{what} has {num_tokens} tokens, and {model.name} takes at most {model.max_source_length}: "
        f"send shorter pieces, for example one sentence each{hint}",
        field=field,
    )
