"""Messages as dicts, for JSON that people read."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message


def message_dict(message: Message) -> dict[str, Any]:
    """Returns a message as a dict by field name; zeros are in it, unset optional fields are not.

    protobuf's own JSON format writes 64-bit integers, such as token ids, as strings.
    """
    content: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_value = field.message_type.fields_by_name["value"]
            content[field.name] = {key: _value(of_value, each) for key, each in value.items()}
        elif field.is_repeated:
            content[field.name] = [_value(field, item) for item in value]
        else:
            content[field.name] = _value(field, value)
    return content


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return message_dict(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
