"""Checks a `GenerateRequest` and makes it the engine's record. What does not fit is refused, never cut."""

from __future__ import annotations

import numpy as np

from bundle.names import SOURCE_IDS
from protos.seq2seq_v1_pb2 import GenerateOptions, GenerateRequest, Source
from server.errors import InvalidRequest
from server.models import ServedModel
from server.records import Array, Request
from server.service.calls import Call

# A text is measured before it is cut into tokens, which takes time. No text that a person wrote fills its
# tokens with so many bytes, so nothing that fits is refused.
MAX_BYTES_PER_TOKEN = 64


def engine_request(message: GenerateRequest, model: ServedModel, call: Call, *, stream: bool) -> Request:
    """The engine's record of a request.

    Raises:
        InvalidRequest: What is wrong, in which field, and what would be right.
    """
    return Request(
        request_id=call.request_id,
        sources={SOURCE_IDS: _source(message, model)},
        max_new_tokens=_max_new_tokens(message.options, model),
        arrival=call.arrival,
        deadline=call.deadline,
        attention=message.options.attention,
        stream=stream,
        priority=message.options.priority,
    )


def _source(message: GenerateRequest, model: ServedModel) -> Array:
    if len(message.sources) != 1:
        raise InvalidRequest(
            f"the request has {len(message.sources)} sources, and {model.name} takes exactly 1",
            field="sources",
        )
    source = message.sources[0]
    if source.name not in ("", SOURCE_IDS):
        raise InvalidRequest(
            f"{model.name} has no source named {source.name[:100]!r}: "
            f"its only one is {SOURCE_IDS!r}, and the name may be left empty",
            field="sources[0].name",
        )
    kind = source.WhichOneof("value")
    if kind == "text":
        token_ids, field = _text_ids(source.text, model), "sources[0].text"
    elif kind == "token_ids":
        token_ids, field = _given_ids(source, model), "sources[0].token_ids"
    else:
        raise InvalidRequest("the source is empty: give it a text or token ids", field="sources[0]")
    _check_length(len(token_ids), model, field)
    return np.asarray(token_ids, dtype=np.int64)  # (S,)


def _check_length(num_tokens: int, model: ServedModel, field: str) -> None:
    limit = model.engine.max_source_length
    if num_tokens > limit:
        raise InvalidRequest(
            f"the source has {num_tokens} tokens, and {model.name} takes at most {limit}: "
            "send shorter pieces, for example one sentence each",
            field=field,
        )


def _text_ids(text: str, model: ServedModel) -> list[int]:
    field = "sources[0].text"
    if not text:
        raise InvalidRequest("the text is empty", field=field)
    if text.isspace():
        raise InvalidRequest("the text has only white space", field=field)
    limit = model.engine.max_source_length
    num_bytes = len(text.encode())
    if num_bytes > limit * MAX_BYTES_PER_TOKEN:
        raise InvalidRequest(
            f"the text has {num_bytes} bytes, and {model.name} takes at most {limit} tokens, "
            f"never more than {limit * MAX_BYTES_PER_TOKEN} bytes: send shorter pieces",
            field=field,
        )
    return model.source_tokenizer.encode_source(text)


def _given_ids(source: Source, model: ServedModel) -> list[int]:
    field = "sources[0].token_ids"
    token_ids = source.token_ids.values
    if not token_ids:
        raise InvalidRequest("there are no token ids", field=field)
    _check_length(len(token_ids), model, field)  # before every one of them is looked at
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is outside the vocabulary of {model.name}: "
                f"ids go from 0 to {model.vocab_size - 1}",
                field=f"{field}.values[{index}]",
            )
    return list(token_ids)


def _max_new_tokens(options: GenerateOptions, model: ServedModel) -> int:
    limit = model.engine.max_target_length
    if not options.HasField("max_new_tokens"):
        return limit
    if not 1 <= options.max_new_tokens <= limit:
        raise InvalidRequest(
            f"max_new_tokens is {options.max_new_tokens}, and {model.name} takes 1 to {limit}",
            field="options.max_new_tokens",
        )
    return options.max_new_tokens
