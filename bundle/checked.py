"""Frozen dataclasses whose fields pydantic checks; what is wrong is reported in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar, Unpack, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_SHOULD = "Input should be "
_PLAINER = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
    "a valid integer": "an integer",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid string": "a text",
    "a valid ": "a ",
}
_LONGEST = 100  # characters of a wrong value that a message shows

_Config = TypeVar("_Config")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def checked(**options: Unpack[ConfigDict]) -> Callable[[type[_Config]], type[_Config]]:
    """Makes a class a frozen dataclass that raises a ValueError of one line for a wrong or unknown field.

    Args:
        options: Of pydantic, such as `strict`, with which a text is no number and 1 is not true.
    """
    config = ConfigDict(extra="forbid", allow_inf_nan=False) | options

    def make(cls: type[_Config]) -> type[_Config]:
        made: Any = dataclass(frozen=True, config=config)(cls)
        check = made.__init__
        names = [each.name for each in fields(made) if not each.kw_only]

        def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807
            try:  # messages need the names of all values
                check(self, *args[len(names) :], **dict(zip(names, args, strict=False)), **named)
            except ValidationError as error:
                raise ValueError("; ".join(problems_of(error))) from None

        made.__init__ = __init__
        return made  # type: ignore[no-any-return]

    return make


def from_json(cls: type[_Config], content: object) -> _Config:
    """Returns the record of a class that JSON stands for; raises ValueError in one line."""
    try:
        return TypeAdapter(cls).validate_json(json.dumps(content))
    except ValidationError as error:
        raise ValueError("; ".join(problems_of(error))) from None


def problems_of(error: ValidationError, place: str = "") -> list[str]:
    """Returns one message for each wrong value, which names its place, the value and what is right."""
    problems = []
    for item in error.errors(include_url=False):
        name = ".".join(map(str, [place] * bool(place) + list(item["loc"])))
        given, message = repr(item["input"]), item["msg"]
        given = given if len(given) <= _LONGEST else f"{given[:_LONGEST]}…"
        if item["type"] == "missing":
            problems.append(f"{name} is missing")
        elif item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            problems.append(f"{name} is unknown")
        elif item["type"] == "value_error":  # a sentence of our own
            problems.append(": ".join(filter(None, (name, str(item["ctx"]["error"])))))
        elif message.startswith(_SHOULD):
            right = message.removeprefix(_SHOULD).partition(", unable to parse")[0]
            for words, plainer in _PLAINER.items():
                right = right.replace(words, plainer)
            problems.append(f"{name or 'it'} is {given}, and must be {right}")
        else:
            problems.append(f"{name or 'it'} is {given}: {message}")
    return problems
