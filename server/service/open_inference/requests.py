"""Turns each row of a `ModelInferRequest` of the Open Inference Protocol into a request of `seq2seq.v1`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from seq2seq_serve.bundle.names import Form
from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, Source, TokenIds
from seq2seq_serve.protos.seq2seq_v1_pb2 import Tensor as SourceTensor
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel, SourceSpec
from seq2seq_serve.server.service.open_inference.tensors import (
    BYTES,
    INT32,
    INT64,
    MAX_ROWS,
    Tensor,
    read_tensors,
)
from seq2seq_serve.server.service.read.inputs import TENSOR_DATATYPES, VALUES

TEXT_INPUT, INPUT_IDS, INPUT_LENGTHS = "text_input", "input_ids", "input_lengths"
TEXT_OUTPUT, OUTPUT_IDS, OUTPUT_LENGTHS = "text_output", "output_ids", "output_lengths"
FINISH_REASON, SCORE, LOG_PROBABILITIES = "finish_reason", "score", "log_probabilities"
UNKNOWN_WORDS, MISSING_TERMS = "unknown_words", "missing_terms"  # parameters of answers

# The datatypes of a source that the model names, with a row for each request; the metadata has the first one.
# BYTES are texts or files. Token ids are padded at the end; the rows of other tensors have equal shapes.
DATATYPES = {
    form: (
        *[BYTES] * ("text" in kinds),
        *[INT64] * ("token_ids" in kinds),
        *TENSOR_DATATYPES.get(form, ()),
        *[BYTES] * ("file" in kinds),
    )
    for form, kinds in VALUES.items()
}

_MAX_TEXT, _MAX_ID = 65_536, 128  # characters
_DEFAULT_OUTPUTS = (TEXT_OUTPUT, OUTPUT_IDS, OUTPUT_LENGTHS, FINISH_REASON)
_SCORED_OUTPUTS = (SCORE, LOG_PROBABILITIES)

_TIMEOUT, _EMPTY_FINAL = "timeout", "triton_enable_empty_final_response"
_IGNORED = ("binary_data_output", "headers")  # reserved by the protocol, as is every name in `triton_`
BINARY_SIZE, BINARY_DATA = "binary_data_size", "binary_data"
_CONTENT_TYPE = "content_type"  # how clients of MLServer and KServe say what they send
_TEXTS, _NUMBERS = "str", "np"
_SHARED_MEMORY = "shared_memory"  # how the names of its parameters begin
_MICROSECONDS = 1e-6

# All options except those whose answers do not fit into tensors.
_WITHOUT_TENSORS = ("attention", "word_alignment", "num_alternatives", "timestamps", "word_timestamps")
PARAMETERS = [name for name in OPTIONS if name not in _WITHOUT_TENSORS]
_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True)
class Inference:
    """The contents of a request.

    Attributes:
        id: The caller's id of the request.
        rows: The sources of each row; whoever decodes them empties the list.
        options: The options of all rows.
        outputs: Names of the tensors to answer with.
        is_raw: Whether to answer with raw contents, because the inputs are raw.
        timeout_seconds: The limit that the caller sets; None if it sets none.
        has_empty_final: Whether a stream ends with a response that has no tensors.
    """

    id: str
    rows: list[Sequence[Source]]
    options: GenerateOptions
    outputs: tuple[str, ...]
    is_raw: bool
    timeout_seconds: float | None
    has_empty_final: bool


def read_inference(message: pb.ModelInferRequest, model: ServedModel) -> Inference:
    """Reads a request. The values of its options and sources are checked where they are used.

    Raises:
        InvalidRequest: The request is malformed; the error names the field and what it must be.
    """
    if len(message.id) > _MAX_ID:
        raise InvalidRequest(f"the id has {len(message.id)} characters: send at most {_MAX_ID}", field="id")
    options = GenerateOptions()
    settings: dict[str, Any] = {}
    for name, parameter in message.parameters.items():
        value = _value(name, parameter)
        if name in (_TIMEOUT, _EMPTY_FINAL):
            settings[name] = value
        elif name == _CONTENT_TYPE:
            for tensor in message.inputs:
                _check_content_type(value, tensor, model, _field(name))
        elif name not in _IGNORED and not name.startswith("triton_"):
            _set_option(options, name, value)
    _check_parameters(message, model)
    outputs = tuple(dict.fromkeys(output.name for output in message.outputs))
    known = (*_DEFAULT_OUTPUTS, *_SCORED_OUTPUTS)
    for index, name in enumerate(outputs):
        if name not in known:
            raise InvalidRequest(
                f"no output is named {name[:100]!r}: send any of {', '.join(known)}",
                field=f"outputs[{index}].name",
            )
    if set(outputs) & set(_SCORED_OUTPUTS):
        options.log_probabilities = True
    elif not outputs:
        outputs = known if options.log_probabilities else _DEFAULT_OUTPUTS
        if options.beam_size > 1 and not options.log_probabilities:
            outputs += (SCORE,)
    return Inference(
        id=message.id,
        rows=_sources(read_tensors(message), model),
        options=options,
        outputs=outputs,
        is_raw=not any(spec.HasField("contents") for spec in message.inputs),
        timeout_seconds=_timeout(settings.get(_TIMEOUT, 0)),
        has_empty_final=_truth(settings.get(_EMPTY_FINAL, False)),
    )


@contextmanager
def own_fields(model: ServedModel) -> Iterator[None]:
    """Makes errors of sources and options name the inputs, with the row, and the parameters of a request."""
    try:
        yield
    except InvalidRequest as error:
        place, _, name = error.field.partition(".")
        if place == "options":
            error.field = f"parameters[{name}]" if name else "parameters"
        elif found := re.fullmatch(r"sources\[(\d+)\]", place):
            tensors = {"text": TEXT_INPUT, "token_ids": INPUT_IDS} if model.reads_text else {}
            tensor = tensors.get(name.partition(".")[0]) or list(model.sources)[int(found[1])]
            error.field = f"inputs[{tensor}]"
            if error.row is not None:
                error.args = (f"row {error.row} of {tensor}: {error}",)
        raise


def _check_parameters(message: pb.ModelInferRequest, model: ServedModel) -> None:
    """Refuses parameters of tensors that change nothing here: a caller must not believe that they do.

    An input may have its type and the size of its raw content. An output may be wanted as raw content; over
    gRPC it has the form of the inputs.
    """
    for index, tensor in enumerate(message.inputs):
        for name in sorted(tensor.parameters):
            parameter, field = tensor.parameters[name], f"inputs[{index}].parameters"
            sizes = [len(raw) for raw in message.raw_input_contents[index : index + 1]]
            if name == _CONTENT_TYPE:
                _check_content_type(parameter.string_param, tensor, model, field)
            elif name != BINARY_SIZE or parameter.int64_param not in sizes:
                raise _unknown_parameter(name, field)
    for index, output in enumerate(message.outputs):
        for name in sorted(output.parameters):
            if name != BINARY_DATA or output.parameters[name].WhichOneof("parameter_choice") != "bool_param":
                raise _unknown_parameter(name, f"outputs[{index}].parameters")


def _unknown_parameter(name: str, field: str) -> InvalidRequest:
    what = "shared memory" if name.startswith(_SHARED_MEMORY) else f"the parameter {name[:100]!r}"
    return InvalidRequest(f"{what} is not supported", field=field)


def _check_content_type(
    value: Any, tensor: pb.ModelInferRequest.InferInputTensor, model: ServedModel, field: str
) -> None:
    """Refuses a type of an input that is not what the server reads it as."""
    source = model.sources.get(tensor.name)
    is_text = source is not None and source.form in (Form.TEXT, Form.SENTENCES)
    is_text |= model.reads_text and tensor.name == TEXT_INPUT
    read_as = "" if tensor.datatype == BYTES else _NUMBERS
    if tensor.datatype == BYTES and is_text:
        read_as = _TEXTS
    if value != read_as:
        raise InvalidRequest(
            f"the {_CONTENT_TYPE} of {tensor.name[:100]} is {str(value)[:100]!r}: "
            + (f"send {read_as}, or leave it out" if read_as else "leave it out"),
            field=field,
        )


def _sources(tensors: Mapping[str, Tensor], model: ServedModel) -> list[Sequence[Source]]:
    """Returns the sources of each row."""
    names = tensors.keys()
    if names == model.sources.keys() and not model.reads_text:
        columns = [list(_column(tensors[name], source)) for name, source in model.sources.items()]
        if len({len(column) for column in columns}) > 1:
            counts = ", ".join(f"{len(tensors[name].array)} of {name}" for name in names)
            raise InvalidRequest(f"there are {counts}: send as many rows of each", field="inputs")
        return [list(row) for row in zip(*columns, strict=True)]
    if names == {TEXT_INPUT} and model.reads_text:
        texts = _rows_of_one(tensors[TEXT_INPUT], (BYTES,))
        return [[Source(text=_text(element, row, TEXT_INPUT))] for row, element in enumerate(texts)]
    if names in ({INPUT_IDS}, {INPUT_IDS, INPUT_LENGTHS}) and model.reads_text:
        return [[Source(token_ids=TokenIds(values=row))] for row in _id_rows(tensors)]
    given = ", ".join(sorted(name[:100] for name in names)[:8]) or "missing"
    wanted = f"{TEXT_INPUT}, or {INPUT_IDS}, with {INPUT_LENGTHS} if rows are padded"
    if not model.reads_text:
        wanted = " and ".join(
            f"{name} ({' or '.join(DATATYPES[source.form])})" for name, source in model.sources.items()
        )
    raise InvalidRequest(f"the inputs are {given}: send {wanted}", field="inputs")


def _column(tensor: Tensor, source: SourceSpec) -> Iterator[Source]:
    """Yields the source of each row from a tensor that the model names."""
    name, form = tensor.name, source.form
    _check_datatype(tensor, DATATYPES[form])
    if tensor.datatype == BYTES:
        for row, element in enumerate(_rows_of_one(tensor, (BYTES,))):
            if form in (Form.TEXT, Form.SENTENCES):
                yield Source(name=name, text=_text(element, row, name))
            else:
                yield Source(name=name, file=element)
        return
    if tensor.array.ndim != 1 + len(source.axes):
        raise InvalidRequest(
            f"{name} has {tensor.array.ndim} axes, and must have {1 + len(source.axes)}: rows first",
            field="inputs",
        )
    _check_rows(len(tensor.array))
    for array in tensor.array:
        if tensor.datatype == INT64:
            others = tuple(range(1, array.ndim))
            array = array[: np.flatnonzero(array.any(axis=others)).max(initial=-1) + 1]
        if form is Form.TEXT:
            yield Source(name=name, token_ids=TokenIds(values=array.tolist()))
        else:
            its_tensor = SourceTensor(datatype=tensor.datatype, shape=array.shape, data=array.tobytes())
            yield Source(name=name, tensor=its_tensor)


def _id_rows(tensors: Mapping[str, Tensor]) -> list[list[int]]:
    ids = tensors[INPUT_IDS]
    _check_datatype(ids, (INT64, INT32))
    array = ids.array[None] if ids.array.ndim == 1 else ids.array
    if array.ndim != 2:
        raise InvalidRequest(f"{INPUT_IDS} has {array.ndim} axes: send rows and positions", field="inputs")
    _check_rows(len(array))
    lengths = [array.shape[1]] * len(array)
    if INPUT_LENGTHS in tensors:
        lengths = _rows_of_one(tensors[INPUT_LENGTHS], (INT64, INT32)).tolist()
    if len(lengths) != len(array) or any(not 0 <= length <= array.shape[1] for length in lengths):
        raise InvalidRequest(
            f"{INPUT_LENGTHS} is {lengths[:8]}: send 0 to {array.shape[1]} for each of {len(array)} rows",
            field="inputs",
        )
    return [row[:length].tolist() for row, length in zip(array, lengths, strict=True)]


def _rows_of_one(tensor: Tensor, datatypes: tuple[str, ...]) -> Array:
    """Returns the elements of a tensor that has one for each row."""
    _check_datatype(tensor, datatypes)
    shape = tensor.array.shape
    if len(shape) not in (1, 2) or (len(shape) == 2 and shape[1] != 1):
        raise InvalidRequest(
            f"{tensor.name} has the shape {list(shape)}, and must have [rows] or [rows, 1]", field="inputs"
        )
    _check_rows(shape[0])
    return tensor.array.reshape(-1)


def _check_datatype(tensor: Tensor, datatypes: tuple[str, ...]) -> None:
    if tensor.datatype not in datatypes:
        raise InvalidRequest(
            f"{tensor.name} is {tensor.datatype}, and must be {' or '.join(datatypes)}", field="inputs"
        )


def _check_rows(num_rows: int) -> None:
    if not 1 <= num_rows <= MAX_ROWS:
        raise InvalidRequest(f"there are {num_rows} rows: send 1 to {MAX_ROWS}", field="inputs")


def _text(element: bytes, row: int, name: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"row {row} of {name} is not UTF-8: {error.reason}", field="inputs") from error


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{_EMPTY_FINAL} must be true or false", field=_field(_EMPTY_FINAL))
    return value


def _timeout(microseconds: Any) -> float | None:
    if isinstance(microseconds, bool) or not isinstance(microseconds, int) or microseconds < 0:
        raise InvalidRequest(
            f"timeout is {microseconds!r}, and must be a number of microseconds, or 0 for none",
            field=f"parameters[{_TIMEOUT}]",
        )
    return microseconds * _MICROSECONDS or None


def _value(name: str, parameter: pb.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidRequest(f"the parameter {name[:100]!r} has no value", field=_field(name))
    value = getattr(parameter, kind)
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        raise InvalidRequest(
            f"the parameter {name[:100]} has {len(value)} characters: send at most {_MAX_TEXT}",
            field=_field(name),
        )
    return value


def _set_option(options: GenerateOptions, name: str, value: Any) -> None:
    """Sets a generation option from the parameter of the same name."""
    if name not in PARAMETERS:
        raise InvalidRequest(
            f"no parameter is named {name[:100]!r}: send any of {', '.join(PARAMETERS)}", field=_field(name)
        )
    try:
        options.MergeFrom(OPTIONS[name].read(value))
    except ValueError as error:
        sent = json.dumps(value, ensure_ascii=False)[:100]
        raise InvalidRequest(
            f"the parameter {name} is the {_KINDS[type(value)]} {sent}, and {error}", field=_field(name)
        ) from error


def _field(name: str) -> str:
    return f"parameters[{name[:100]}]"
