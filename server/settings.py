"""Makes flags, variables of the environment and keys of a TOML file from the fields of frozen dataclasses.

The field `max_slots: Annotated[Count, Setting()] = 256` is the flag `--max-slots`, the variable
`SEQ2SEQ_MAX_SLOTS` and the key `max_slots`; pydantic reads its type, and the docstring of its class has its
help. A switch stores the opposite of the field's default. A tuple has several values: the flag is repeated,
the variable is separated like paths, and the key has a list. This module does not know any setting.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ByteSize, Field, GetPydanticSchema, TypeAdapter, ValidationError

from seq2seq_serve.bundle.checked import problems_of
from seq2seq_serve.bundle.files import read_toml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PREFIX = "SEQ2SEQ_"
_CONFIG, _ISA = f"{_PREFIX}CONFIG", f"{_PREFIX}ISA"  # kernels/instructions.h reads the latter
# Kubernetes sets the last ones for a Service SEQ2SEQ_…
_NO_SETTINGS = re.compile(rf"{_CONFIG}|{_ISA}|\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
_SIMILAR = 0.9  # of 1: one or two letters differ
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # in a docstring
_CAPITAL = re.compile(r"^[A-Z](?![A-Z])")  # of a sentence that does not begin with an acronym

_log = logging.getLogger(__name__)

Config = TypeVar("Config", bound="DataclassInstance")

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, GetPydanticSchema(lambda _, schema: schema(ByteSize))]  # also texts such as 512MiB


class WrongSetting(ValueError, argparse.ArgumentTypeError):
    """A setting cannot have a value; argparse reports the message."""


def read(type_: Any, given: object, where: str = "it") -> Any:
    """Returns the value of a text or a number; raises WrongSetting, which names its place."""
    if given == "":
        raise WrongSetting(f"{where} is empty")
    try:
        # A switch takes the text, too, and nothing else takes true for 1.
        return TypeAdapter(type_).validate_python(str(given) if isinstance(given, bool) else given)
    except ValidationError as error:
        raise WrongSetting("; ".join(problems_of(error, where))) from None


@dataclass(frozen=True)
class Setting:
    """A field of a config that users can set.

    Attributes:
        metavar: Stands for the value in the help; by default the choices, or N.
        flag: By default that of the field's name; without dashes it is a positional argument.
        former: The flag's earlier name, which still works and is not in the help; not for switches.
        is_per_model: Whether one model may have a value of its own.
        name: The field's name.
        type: The field's type; of a tuple, that of its items.
        default: The field's value.
        help: The field's text in the docstring, with the default.
    """

    metavar: str = ""
    flag: str = ""
    former: str = ""
    is_per_model: bool = False
    name: str = ""
    type: Any = None
    default: Any = None
    help: str = ""

    @property
    def key(self) -> str:
        """Its name in a file."""
        return _key(self.flag)

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def is_list(self) -> bool:
        """Whether it has several values."""
        return isinstance(self.default, tuple)

    def read(self, given: Any, where: str) -> Any:
        """Returns the field's value for that of a file or a variable; raises WrongSetting, which names it."""
        if self.is_switch:
            return read(bool, given, where) is not self.default
        if not self.is_list:
            return read(self.type, given, where)
        if not isinstance(given, list):
            raise WrongSetting(f"{where} is {given!r}, and must be a list")
        return tuple(read(self.type, one, where) for one in given)


def settings_of(config: DataclassInstance) -> Iterator[Setting]:
    """Yields the settings of a config, and those of the configs in it."""
    hints = get_type_hints(type(config), include_extras=True)
    texts = dict(_ATTRIBUTE.findall(inspect.getdoc(config) or ""))
    for field in fields(config):
        default, hint = getattr(config, field.name), hints[field.name]
        if is_dataclass(default) and not isinstance(default, type):
            yield from settings_of(default)
        for setting in getattr(hint, "__metadata__", ()):
            if isinstance(setting, Setting):
                flag = setting.flag or f"--{field.name.replace('_', '-')}"
                kind = get_args(hint.__origin__)[0] if isinstance(default, tuple) else hint
                help_ = _help(texts.get(field.name, ""), default, is_size=field.name.endswith("_bytes"))
                metavar = setting.metavar or _choices(hint.__origin__) or "N"
                yield replace(
                    setting,
                    metavar=metavar,
                    flag=flag,
                    name=field.name,
                    type=kind,
                    default=default,
                    help=help_,
                )


def _help(text: str, default: object, *, is_size: bool) -> str:
    text = " ".join(text.split()).removesuffix(".")
    text = _CAPITAL.sub(lambda match: match[0].lower(), text)
    if default is True:
        return f"turns off {text}"
    if default in (None, False, ()) or "(default" in text:
        return text
    if isinstance(default, int | float):
        default = f"{default // 2**20}MiB" if is_size else f"{default:.9g}"
    return f"{text} (default {default})"


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _variable(flag: str) -> str:
    return _PREFIX + _key(flag).upper()


def _choices(type_: Any) -> str:
    if isinstance(type_, enum.EnumType):
        return f"{{{','.join(map(str, type_))}}}"
    return f"{{{','.join(get_args(type_))}}}" if get_origin(type_) is Literal else ""


def override(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns a config with other values, by the names of its fields and of those of the configs in it."""
    changes = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            changes[field.name] = override(value, values)
        elif field.name in values:
            changes[field.name] = values[field.name]
    return replace(config, **changes)


def add_flags(parser: argparse.ArgumentParser, config: DataclassInstance) -> None:
    """Adds the flags of a config's settings; `override` takes the options, which have only given flags."""
    for setting in settings_of(config):
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": setting.help}
        if setting.is_switch:
            options |= {"action": "store_const", "const": not setting.default}
        else:
            options |= {"type": partial(read, setting.type), "metavar": setting.metavar}
        if setting.flag == setting.name:
            parser.add_argument(setting.name, nargs="*", **options)
        else:
            options |= {"action": "append"} if setting.is_list else {}
            parser.add_argument(setting.flag, dest=setting.name, **options)
            if setting.former:
                options |= {"help": argparse.SUPPRESS, "type": partial(_read_former, setting)}
                parser.add_argument(setting.former, dest=setting.name, **options)


def _read_former(setting: Setting, text: str) -> Any:
    _log.warning("%s is called %s now", setting.former, setting.flag)
    return read(setting.type, text)


def parse_settings(
    parser: argparse.ArgumentParser,
    config: Config,
    arguments: Sequence[str] | None,
    environment: Mapping[str, str],
) -> tuple[Config, dict[str, Config]]:
    """Parses a command line, the environment and the file that `--config` names, in this order of precedence.

    The parser gets the flags, and reports the errors of all three.

    Returns:
        The config, and by name those of the models that have tables `[models.NAME]` in the file.
    """
    add_flags(parser, config)
    parser.add_argument(
        "--config",
        type=Path,
        default=environment.get(_CONFIG),
        metavar="FILE",
        help="TOML file with flags, such as max_slots = 64, and tables [models.NAME] with the flags of "
        "single models; the command line and the environment (SEQ2SEQ_MAX_SLOTS) override those outside the "
        "tables",
    )
    options = vars(parser.parse_args(arguments))
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    file = options.pop("config")
    settings = list(settings_of(config))
    of_one_model = [setting for setting in settings if setting.is_per_model]
    try:
        content = read_toml(file) if file else {}
        tables = content.pop("models", {})
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise ValueError(f"{file}: write a table [models.NAME] for each model with settings of its own")
        values = values_of(content, settings, f"{file}: ") | _variables(environment, settings) | options
        config = override(config, values)
        models = {}
        for name, table in tables.items():
            models[name] = override(config, values_of(table, of_one_model, f"{file}: models.{name}."))
    except ValueError as error:
        parser.error(str(error))
    return config, models


def values_of(table: Mapping[str, Any], settings: Sequence[Setting], where: str) -> dict[str, Any]:
    """Returns the values of a table by the names of fields."""
    known = {setting.key: setting for setting in settings}
    values = {}
    for key, given in _renamed(table, settings, _key, where).items():
        if key not in known:
            raise ValueError(f"{where}{key}: there is no such setting here, only {', '.join(known)}")
        values[known[key].name] = known[key].read(given, where + key)
    return values


def _variables(environment: Mapping[str, str], settings: Sequence[Setting]) -> dict[str, Any]:
    """Returns the values of variables by the names of fields; refuses a misspelt one, and logs others."""
    known = {_variable(setting.flag): setting for setting in settings}
    values = {}
    for variable, text in _renamed(environment, settings, _variable).items():
        if setting := known.get(variable):
            given = text.split(os.pathsep) if setting.is_list else text
            values[setting.name] = setting.read(given, variable)
        elif variable.startswith(_PREFIX) and not _NO_SETTINGS.fullmatch(variable):
            if meant := difflib.get_close_matches(variable, [*known, _CONFIG, _ISA], n=1, cutoff=_SIMILAR):
                raise ValueError(f"{variable}: there is no such setting; did you mean {meant[0]}?")
            _log.warning("%s is not a setting of this server", variable)
    return values


def _renamed(
    given: Mapping[str, Any], settings: Sequence[Setting], name: Callable[[str], str], where: str = ""
) -> dict[str, Any]:
    """Returns values by today's names; logs former ones, and ignores one that is beside its new name."""
    values = dict(given)
    for setting in settings:
        former, today = name(setting.former), name(setting.flag)
        if setting.former and former in values:
            _log.warning("%s%s is called %s now", where, former, today)
            values.setdefault(today, values.pop(former))
    return values
