"""Turns answers of `seq2seq.v1` into tensors of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2 import FinishReason, GenerateResponse, Hypothesis, Piece
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.open_inference.requests import (
    FINISH_REASON,
    LOG_PROBABILITIES,
    MISSING_TERMS,
    OUTPUT_IDS,
    OUTPUT_LENGTHS,
    SCORE,
    TEXT_OUTPUT,
    UNKNOWN_WORDS,
    Inference,
)
from seq2seq_serve.server.service.open_inference.tensors import (
    BYTES,
    FP32,
    INT64,
    TYPED_FIELDS,
    Tensor,
    bytes_array,
    raw_contents,
)

_FINAL = "triton_final_response"
_REASON_PREFIX = "FINISH_REASON_"

# R rows   N hypotheses   T target length


@dataclass(frozen=True)
class Answer:
    """The answer to a request, or one of those of a stream.

    Attributes:
        model: Decoded it.
        inference: The request.
        tensors: Its outputs.
        parameters: The words of the sources that the model does not have, with a space between two, and the
            terms that targets lack, each on a line.
        is_final: In a stream, whether it is the last one; otherwise None.
    """

    model: ServedModel
    inference: Inference
    tensors: list[Tensor] = field(default_factory=list)
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_final: bool | None = None


def whole_answer(inference: Inference, answers: Sequence[GenerateResponse], model: ServedModel) -> Answer:
    """Returns the answer to all rows of a request."""
    tensors = _tensors([answer.hypotheses for answer in answers], inference.outputs)
    return Answer(model, inference, tensors, _parameters(answers))


def piece_answer(inference: Inference, piece: Piece, model: ServedModel) -> Answer:
    """Returns the answer for one piece of a stream, with its text and token ids only."""
    outputs = [name for name in inference.outputs if name in (TEXT_OUTPUT, OUTPUT_IDS, OUTPUT_LENGTHS)]
    rows = [[Hypothesis(text=piece.text, token_ids=piece.token_ids)]]
    return Answer(model, inference, _tensors(rows, outputs), is_final=False)


def last_answer(inference: Inference, answer: GenerateResponse, model: ServedModel) -> Answer:
    """Returns the answer that ends a stream: the outputs that are not in its pieces, with an empty text."""
    rest = answer.hypotheses[0]
    rest.ClearField("text")
    rest.ClearField("token_ids")
    tensors = _tensors([[rest]], inference.outputs)
    is_final = not inference.has_empty_final
    return Answer(model, inference, tensors, _parameters([answer]), is_final=is_final)


def answer_message(answer: Answer) -> pb.ModelInferResponse:
    """Returns an answer in the form of gRPC, with raw or typed contents as those of the request."""
    name, version = answer.model.name, answer.model.version
    response = pb.ModelInferResponse(model_name=name, model_version=version, id=answer.inference.id)
    if answer.is_final is not None:
        response.parameters[_FINAL].bool_param = answer.is_final
    for key, value in answer.parameters.items():
        response.parameters[key].string_param = value
    for tensor in answer.tensors:
        output = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.array.shape)
        if answer.inference.is_raw:
            response.raw_output_contents.append(raw_contents(tensor))
        else:
            getattr(output.contents, TYPED_FIELDS[tensor.datatype]).extend(tensor.array.ravel().tolist())
    return response


def _parameters(answers: Sequence[GenerateResponse]) -> dict[str, str]:
    words = dict.fromkeys(word for answer in answers for word in answer.unknown_words)
    hypotheses = [hypothesis for answer in answers for hypothesis in answer.hypotheses]
    terms = dict.fromkeys(term for hypothesis in hypotheses for term in hypothesis.missing_terms)
    parameters = {UNKNOWN_WORDS: " ".join(words), MISSING_TERMS: "\n".join(terms)}
    return {name: value for name, value in parameters.items() if value}


def _reason(hypothesis: Hypothesis) -> str:
    """`eos`, `length` or `stop`; empty for a piece."""
    if not hypothesis.finish_reason:
        return ""
    return FinishReason.Name(hypothesis.finish_reason).removeprefix(_REASON_PREFIX).lower()


# The datatype of each output, its number of axes (R, N; or R, N, T), and its value for a hypothesis
OUTPUTS: dict[str, tuple[str, int, Callable[[Hypothesis], Any]]] = {
    TEXT_OUTPUT: (BYTES, 2, lambda one: one.text),
    OUTPUT_IDS: (INT64, 3, lambda one: one.token_ids),
    OUTPUT_LENGTHS: (INT64, 2, lambda one: len(one.token_ids)),
    FINISH_REASON: (BYTES, 2, _reason),
    SCORE: (FP32, 2, lambda one: one.score),
    LOG_PROBABILITIES: (FP32, 3, lambda one: one.log_probabilities),
}
_DTYPES = {INT64: np.int64, FP32: np.float32}


def _tensors(rows: Sequence[Sequence[Hypothesis]], outputs: Sequence[str]) -> list[Tensor]:
    shape = (len(rows), max(len(row) for row in rows))  # (R, N)
    # A beam may find fewer hypotheses than were asked for, if constraints forbid the others.
    flat = [one for row in rows for one in (*row, *[Hypothesis()] * (shape[1] - len(row)))]
    tensors = []
    for name in outputs:
        datatype, num_axes, value_of = OUTPUTS[name]
        values = [value_of(one) for one in flat]
        if datatype == BYTES:
            array = bytes_array(values, shape)
        elif num_axes == 2:
            array = np.array(values, _DTYPES[datatype]).reshape(shape)
        else:
            array = _padded(values, _DTYPES[datatype], shape)
        tensors.append(Tensor(name, datatype, array))
    return tensors


def _padded(lists: Sequence[Sequence[float]], dtype: type, shape: tuple[int, int]) -> Array:
    """Returns `(R, N, T)`, with zeros after the end of each list."""
    padded: Array = np.zeros((len(lists), max(map(len, lists))), dtype)
    for row, values in zip(padded, lists, strict=True):
        row[: len(values)] = values
    return padded.reshape(*shape, padded.shape[1])
