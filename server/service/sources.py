"""Checks the sources of a request and makes them token ids, and does with long ones what the request says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import sentencex

from bundle.names import SOURCE_IDS
from protos.seq2seq_v1_pb2 import LONG_SOURCE_SPLIT, LONG_SOURCE_TRUNCATE, LongSource, Source
from server.errors import InvalidRequest
from server.models import ServedModel
from server.records import Array

# A text is measured before it is cut into tokens, which takes time. No text that a person wrote fills its
# tokens with so many bytes, so nothing that fits is refused.
MAX_BYTES_PER_TOKEN = 64
MAX_SENTENCES = 256
MAX_TIMES_TOO_LONG = 16  # that a source to be split or truncated may have more bytes
_LANGUAGE = "en"  # a bundle does not name its own; terminators of other scripts end sentences all the same


@dataclass(frozen=True)
class Part:
    """What one target is generated for: a source, or one sentence of it.

    Attributes:
        source_ids: `(S,)` int64.
        num_truncated: Tokens that were left out.
        text: Of a sentence.
        separator: The white space between a sentence and the next.
    """

    source_ids: Array
    num_truncated: int = 0
    text: str = ""
    separator: str = ""


def source_parts(
    sources: Sequence[Source], model: ServedModel, long_source: LongSource = LongSource.LONG_SOURCE_REFUSE
) -> list[Part]:
    """The source of a request, in parts where it is too long and shall be split.

    Raises:
        InvalidRequest: What is wrong, in which field, and what would be right.
    """
    if len(sources) != 1:
        raise InvalidRequest(
            f"the request has {len(sources)} sources, and {model.name} takes exactly 1",
            field="sources",
        )
    source = sources[0]
    if source.name not in ("", SOURCE_IDS):
        raise InvalidRequest(
            f"{model.name} has no source named {source.name[:100]!r}: "
            f"its only one is {SOURCE_IDS!r}, and the name may be left empty",
            field="sources[0].name",
        )
    kind = source.WhichOneof("value")
    if kind == "text":
        return _text_parts(source.text, model, long_source)
    if kind == "token_ids":
        return [_ids_part(source.token_ids.values, model, long_source)]
    raise InvalidRequest("the source is empty: give it a text or token ids", field="sources[0]")


def check_ids(token_ids: Iterable[int], model: ServedModel, field: str) -> None:
    """Refuse token ids that the model does not have."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary of {model.name}: "
                f"ids go from 0 to {model.vocab_size - 1}",
                field=f"{field}[{index}]",
            )


def check_bytes(text: str, max_tokens: int, model: ServedModel, field: str) -> None:
    """Refuse a text that cannot fit, before time is spent on it."""
    num_bytes = len(text.encode())
    if num_bytes > max_tokens * MAX_BYTES_PER_TOKEN:
        raise InvalidRequest(
            f"the text has {num_bytes} bytes, and {model.name} takes at most {max_tokens} tokens, "
            f"never more than {max_tokens * MAX_BYTES_PER_TOKEN} bytes: send shorter pieces",
            field=field,
        )


def _text_parts(text: str, model: ServedModel, long_source: LongSource) -> list[Part]:
    field, limit = "sources[0].text", model.max_source_length
    if not text:
        raise InvalidRequest("the text is empty", field=field)
    if text.isspace():
        raise InvalidRequest("the text has only white space", field=field)
    may_be_long = long_source in (LONG_SOURCE_SPLIT, LONG_SOURCE_TRUNCATE)
    check_bytes(text, limit * (MAX_TIMES_TOO_LONG if may_be_long else 1), model, field)
    is_split = long_source == LONG_SOURCE_SPLIT
    if is_split and len(text.encode()) > limit * MAX_BYTES_PER_TOKEN:
        return _sentences(text, model)
    token_ids = model.source_tokenizer.encode_source(text)
    if len(token_ids) <= limit:
        return [_part(token_ids)]
    if is_split:
        return _sentences(text, model)
    if long_source == LONG_SOURCE_TRUNCATE:
        return [_part(model.source_tokenizer.encode_source(text, limit), len(token_ids) - limit)]
    raise _too_long("the source", len(token_ids), model, field, hint=" or set options.long_source")


def _sentences(text: str, model: ServedModel) -> list[Part]:
    field, limit = "sources[0].text", model.max_source_length
    sentences = _with_separators(text)
    if len(sentences) > MAX_SENTENCES:
        raise InvalidRequest(
            f"the text has {len(sentences)} sentences, and at most {MAX_SENTENCES} are split", field=field
        )
    parts = []
    for number, (content, separator) in enumerate(sentences, start=1):
        check_bytes(content, limit, model, field)
        token_ids = model.source_tokenizer.encode_source(content)
        if len(token_ids) > limit:
            raise _too_long(f"sentence {number} of the source", len(token_ids), model, field)
        parts.append(Part(_part(token_ids).source_ids, text=content, separator=separator))
    return parts


def _with_separators(text: str) -> list[tuple[str, str]]:
    """The sentences of a text, and the white space after each: a space where there is none."""
    contents = [content for piece in sentencex.segment(_LANGUAGE, text) if (content := piece.strip())]
    sentences: list[tuple[str, str]] = []
    end = 0
    for content in contents:  # the library loses some white space between its pieces
        start = text.index(content, end)
        if sentences:
            sentences[-1] = (sentences[-1][0], text[end:start] or " ")
        sentences.append((content, ""))
        end = start + len(content)
    return sentences


def _ids_part(token_ids: Sequence[int], model: ServedModel, long_source: LongSource) -> Part:
    field, limit = "sources[0].token_ids", model.max_source_length
    if not token_ids:
        raise InvalidRequest("there are no token ids", field=field)
    num_truncated = 0
    if len(token_ids) > limit:  # before every one of them is looked at
        if long_source != LONG_SOURCE_TRUNCATE:
            raise _too_long("the source", len(token_ids), model, field)
        num_truncated = len(token_ids) - limit
        token_ids = [*token_ids[: limit - 1], token_ids[-1]]  # the last is the end of sequence
    check_ids(token_ids, model, f"{field}.values")
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
