"""Turns JSON of the Open Inference Protocol over HTTP into its messages of gRPC, and answers back into JSON.

A request may have raw contents after the JSON, and an answer, too (Triton's extension of binary data), with
the length of the JSON in a header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from google.protobuf.message import Message

from seq2seq_serve.bundle.names import Form
from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.options import OPTIONS
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.open_inference.answers import Answer
from seq2seq_serve.server.service.open_inference.requests import (
    BINARY_DATA,
    BINARY_SIZE,
    INPUT_IDS,
    TEXT_INPUT,
)
from seq2seq_serve.server.service.open_inference.tensors import (
    BYTES,
    INT64,
    TYPED_FIELDS,
    Tensor,
    raw_contents,
)
from seq2seq_serve.server.service.wire import MAX_FIELDS, MAX_NUMBERS

_BINARY_ALL = "binary_data_output"
_MODEL_NAME = "model_name"  # which KServe's client repeats
_SURROGATE = "\\ud"
_MAX_DEPTH, _MAX_NESTED = 8, 64  # of lists in a tensor, and of all lists and objects
_LARGEST = 2**63
_PARAMETER_KINDS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def read_json(raw: bytes, name: str = "the body") -> dict[str, Any]:
    """Returns the object that a body holds, without the names whose value is null.

    Args:
        raw: The body.
        name: What errors call it.

    Raises:
        InvalidRequest: It is not a JSON object.
    """
    _check_elements(raw)
    try:
        text = raw.decode()
        content = json.loads(text)
        if _SURROGATE in text.lower():  # may be half of a character, which JSON can write and UTF-8 cannot
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON in UTF-8: {error}", field="") from error
    if not isinstance(content, dict):
        raise InvalidRequest(f"{name} must be a JSON object", field="")
    return {name: value for name, value in content.items() if value is not None}


def _check_elements(raw: bytes) -> None:
    """Refuses JSON with too many elements, or with too deep ones, before there is an object for each."""
    if raw.count(b"{") + raw.count(b"[") <= _MAX_NESTED and raw.count(b",") <= MAX_NUMBERS:
        return
    # Pairs of backslashes come first, because they do not escape a quotation mark.
    octets = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    octets = octets[~np.logical_xor.accumulate(octets == ord('"'))]  # outside of strings
    is_opening, is_closing = np.isin(octets, list(b"{[")), np.isin(octets, list(b"}]"))
    num_containers, num_commas = np.count_nonzero(is_opening), np.count_nonzero(octets == ord(","))
    if num_containers > MAX_FIELDS or num_commas > MAX_NUMBERS:
        raise InvalidRequest(
            f"the JSON has {num_containers} brackets and {num_commas} commas: send at most {MAX_FIELDS} and "
            f"{MAX_NUMBERS}",
            field="",
        )
    depth = np.cumsum(np.subtract(is_opening, is_closing, dtype=np.int8)[is_opening | is_closing]).max(
        initial=0
    )
    if depth > _MAX_NESTED:
        raise InvalidRequest(f"the JSON is nested {depth} deep: send at most {_MAX_NESTED}", field="")


def infer_request(content: Mapping[str, Any], rest: bytes) -> pb.ModelInferRequest:
    """Returns the message for the body of `infer`; it has the model's name only if the body repeats it.

    Args:
        content: The JSON.
        rest: The raw contents that follow it.

    Raises:
        InvalidRequest: A value is missing or of a wrong type.
    """
    _check_names(content, ("id", "parameters", "inputs", "outputs", _MODEL_NAME), "")
    message = pb.ModelInferRequest(
        id=_text(content.get("id", ""), "id"), model_name=_text(content.get(_MODEL_NAME, ""), _MODEL_NAME)
    )
    _set_parameters(message.parameters, _parameters(content, ""), "parameters")
    message.parameters.pop(_BINARY_ALL, None)
    start = 0
    for index, given in enumerate(_objects(content.get("inputs", []), "inputs")):
        field = f"inputs[{index}]"
        _check_names(given, ("name", "shape", "datatype", "parameters", "data"), field)
        datatype = _text(given.get("datatype", ""), f"{field}.datatype")
        tensor = message.inputs.add(name=_text(given.get("name", ""), f"{field}.name"), datatype=datatype)
        _extend(tensor.shape, given.get("shape", []), f"{field}.shape")
        parameters = dict(_parameters(given, field))
        size = parameters.pop(BINARY_SIZE, None)
        _set_parameters(tensor.parameters, parameters, f"{field}.parameters")
        if size is None:
            name = TYPED_FIELDS.get(datatype)  # an unknown datatype is refused with the message
            if name is not None:
                _extend(getattr(tensor.contents, name), given.get("data", []), f"{field}.data")
            continue
        if type(size) is not int or not 0 <= size <= len(rest) - start:
            raise InvalidRequest(
                f"{BINARY_SIZE} is {size!r}, and {len(rest) - start} bytes are left after the JSON",
                field=f"{field}.parameters",
            )
        message.raw_input_contents.append(rest[start : start + size])
        start += size
    if start < len(rest):
        raise InvalidRequest(
            f"{len(rest) - start} bytes after the JSON belong to no input: set {BINARY_SIZE}", field="inputs"
        )
    for index, given in enumerate(_objects(content.get("outputs", []), "outputs")):
        _check_names(given, ("name", "parameters"), f"outputs[{index}]")
        output = message.outputs.add(name=_text(given.get("name", ""), f"outputs[{index}].name"))
        parameters = dict(_parameters(given, f"outputs[{index}]"))
        parameters.pop(BINARY_DATA, None)
        _set_parameters(output.parameters, parameters, f"outputs[{index}].parameters")
    return message


def binary_outputs(content: Mapping[str, Any]) -> set[str] | None:
    """Returns the outputs that the caller of `infer` wants as raw contents; None for all of them."""
    if _parameters(content, "").get(_BINARY_ALL) is True:
        return None
    outputs = content.get("outputs", [])
    return {
        one.get("name", "")
        for index, one in enumerate(outputs)
        if _parameters(one, f"outputs[{index}]").get(BINARY_DATA) is True
    }


def generate_request(content: Mapping[str, Any], model: ServedModel) -> pb.ModelInferRequest:
    """Returns the message for the body of `generate`: inputs of one row by their names, and parameters.

    Raises:
        InvalidRequest: A value is of a wrong type.
    """
    message = pb.ModelInferRequest()
    names = (TEXT_INPUT, INPUT_IDS) if model.reads_text else tuple(model.sources)
    for name, value in content.items():
        if name == "id":
            message.id = _text(value, "id")
        elif name == "parameters":
            _set_parameters(message.parameters, _parameters(content, ""), "parameters")
        elif name not in names:
            _set_parameters(message.parameters, {name: value}, "parameters")
        elif isinstance(value, str) and (model.reads_text or _is_text(model, name)):
            tensor = message.inputs.add(name=name, datatype=BYTES, shape=[1])
            _extend(tensor.contents.bytes_contents, [value], name)
        elif _is_ids(value) and (model.reads_text or model.sources[name].form is Form.TEXT):
            tensor = message.inputs.add(name=name, datatype=INT64, shape=[1, len(value)])
            _extend(tensor.contents.int64_contents, value, name)
        else:
            raise InvalidRequest(
                f"{name} must be one text or the token ids of one; `infer` takes several, and other sources",
                field=name,
            )
    return message


def repository_request(
    content: Mapping[str, Any], message_class: type[Message], **path_params: str
) -> Message:
    """Returns the message for the body of a page of the repository, and the parts of its path.

    Raises:
        InvalidRequest: A value is of a wrong type.
    """
    message: Any = message_class(**path_params)
    _check_names(content, [name for name in ("ready", "parameters") if hasattr(message, name)], "")
    if type(is_ready := content.get("ready", False)) is not bool:
        raise InvalidRequest("ready must be true or false", field="ready")
    if is_ready:
        message.ready = True
    if parameters := _parameters(content, ""):
        _set_parameters(message.parameters, parameters, "parameters")
    made: Message = message
    return made


def infer_answer(answer: Answer, binary: set[str] | None) -> tuple[dict[str, Any], bytes]:
    """Returns the JSON for an answer, and the raw contents of its `binary` outputs, which follow it."""
    outputs, raws = [], []
    for tensor in answer.tensors:
        shape = list(tensor.array.shape)
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
        if binary is None or tensor.name in binary:
            raws.append(raw_contents(tensor))
            output["parameters"] = {BINARY_SIZE: len(raws[-1])}
        else:
            output["data"] = _elements(tensor)
        outputs.append(output)
    return _head(answer) | {"outputs": outputs}, b"".join(raws)


def generate_answer(answer: Answer) -> dict[str, Any]:
    """Returns the JSON for an answer of one row; a tensor of one element per hypothesis is that element."""
    content = _head(answer)
    for tensor in answer.tensors:
        elements = _elements(tensor)
        is_list = tensor.array.ndim > 2 or len(elements) != 1
        content[tensor.name] = elements if is_list else elements[0]
    return content


def _head(answer: Answer) -> dict[str, Any]:
    head: dict[str, Any] = {"model_name": answer.model.name, "model_version": answer.model.version}
    if answer.parameters:
        head["parameters"] = dict(answer.parameters)
    return head | ({"id": answer.inference.id} if answer.inference.id else {})


def _elements(tensor: Tensor) -> list[Any]:
    elements: list[Any] = tensor.array.ravel().tolist()
    return [element.decode() for element in elements] if tensor.datatype == BYTES else elements


def _is_text(model: ServedModel, name: str) -> bool:
    return model.sources[name].form in (Form.TEXT, Form.SENTENCES)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(one, str) for one in value)


def _check_names(given: Mapping[str, Any], known: Sequence[str], field: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidRequest(
                f"there is no field {name[:100]!r} here: send {', '.join(known)}",
                field=f"{field}.{name[:100]}".lstrip("."),
            )


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{field} must be a string", field=field)
    return value


def _objects(value: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise InvalidRequest(f"{field} must be a list of objects", field=field)
    return value


def _parameters(given: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    parameters = given.get("parameters")
    if not isinstance(parameters, dict | None):
        raise InvalidRequest("parameters must be an object", field=f"{field}.parameters".lstrip("."))
    return {name: value for name, value in (parameters or {}).items() if value is not None}


def _set_parameters(target: Any, given: Mapping[str, Any], field: str) -> None:
    for name, value in given.items():
        if isinstance(value, (list, dict)) and name in OPTIONS and OPTIONS[name].max_items is not None:
            value = json.dumps(value, ensure_ascii=False)  # as gRPC has it
        kind = _PARAMETER_KINDS.get(type(value))
        is_known = kind is not None and hasattr(target[name], kind)
        if not is_known or (type(value) is int and not -_LARGEST <= value < _LARGEST):
            raise InvalidRequest(
                f"the parameter {name[:100]} must be true, false, a string or a number (of 64 bits)",
                field=f"{field}[{name[:100]}]",
            )
        setattr(target[name], str(kind), value)


def _extend(target: Any, given: Any, field: str) -> None:
    """Appends the elements of a list, in which lists may be nested, to a field."""
    if not isinstance(given, list):
        raise InvalidRequest(f"{field} must be a list", field=field)
    flat: list[Any] = given
    kinds = set(map(type, flat))
    for _ in range(_MAX_DEPTH):
        if list not in kinds:
            break
        flat = list(chain.from_iterable(one if type(one) is list else (one,) for one in flat))
        kinds = set(map(type, flat))
    try:
        if bool in kinds:
            raise TypeError
        target.extend([one.encode() if type(one) is str else one for one in flat] if str in kinds else flat)
    except (TypeError, ValueError) as error:
        text = f"an element of {field} does not have the type of the datatype"
        raise InvalidRequest(text, field=field) from error
