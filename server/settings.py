"""Makes flags, variables of the environment and keys of a TOML file from the fields of frozen dataclasses.

The field `max_slots: Annotated[int, Setting(COUNT)] = 256` is the flag `--max-slots`, the variable
`SEQ2SEQ_MAX_SLOTS` and the key `max_slots`; the docstring of its class has its help. A switch stores the
opposite of the field's default. A tuple has several values: the flag is repeated, the variable is separated
like paths, and the key has a list. This module does not know any setting.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PREFIX = "SEQ2SEQ_"
_CONFIG, _ISA = f"{_PREFIX}CONFIG", f"{_PREFIX}ISA"  # kernels/instructions.h reads the latter
# Kubernetes sets the last ones for a Service SEQ2SEQ_…
_NO_SETTINGS = re.compile(rf"{_CONFIG}|{_ISA}|\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")
_SIMILAR = 0.9  # of 1: one or two letters differ
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # in a docstring
_CAPITAL = re.compile(r"^[A-Z](?![A-Z])")  # of a sentence that does not begin with an acronym
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BYTES = re.compile(r"(\d+) ?(KiB|MiB|GiB|)", re.ASCII)

_log = logging.getLogger(__name__)

Config = TypeVar("Config", bound="DataclassInstance")


class WrongSetting(ValueError, argparse.ArgumentTypeError):
    """A setting cannot have a value; argparse reports the message."""


@dataclass(frozen=True)
class Form:
    """How a value is written as text.

    Attributes:
        metavar: Stands for the value in the help.
        expected: A description of a right value, for errors.
        parse: Returns the value of a text; raises ValueError or KeyError.
        write: Returns the text of a value.
    """

    metavar: str
    expected: str
    parse: Callable[[str], Any]
    write: Callable[[Any], str] = str

    def read(self, given: object, where: str = "it") -> Any:
        """Returns the value of a text or a number; raises ValueError, which names its place."""
        try:
            if isinstance(given, bool | list | dict):
                raise ValueError("it is not a single value")
            return self.parse(str(given))
        except (ValueError, KeyError) as error:
            raise WrongSetting(f"{where} is {given!r}, and must be {self.expected}") from error


def number(type_: type[int | float], least: int, most: float = math.inf, metavar: str = "N") -> Form:
    """Returns the form of the finite numbers from `least` to `most`."""

    def within(text: str) -> float:
        value = type_(text)
        if not least <= value <= most or value == math.inf:
            raise ValueError("it is out of range")
        return value

    noun = "a whole number" if type_ is int else "a finite number"
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    return Form(metavar, f"{noun} {limits}", within, "{:.9g}".format)


def one_of(values: Mapping[str, Any]) -> Form:
    """Returns the form of a fixed number of values, given by their texts."""
    return Form(f"{{{','.join(values)}}}", f"one of {', '.join(values)}", lambda text: values[text])


def parse_bytes(text: str) -> int:
    """Returns the number of bytes in a text such as `1048576`, `512MiB` or `2 GiB`; raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size")
    return int(match[1]) * _UNITS[match[2]]


def _path(text: str) -> Path:
    if not text:
        raise ValueError("it is empty")
    return Path(text)


_SIZES = "a size: bytes, or a whole number with KiB, MiB or GiB"
SIZE = Form("SIZE", _SIZES, parse_bytes, lambda num_bytes: f"{num_bytes // 2**20}MiB")
COUNT = number(int, 1)
SECONDS = number(float, 0, metavar="SECONDS")
FILE = Form("FILE", "a path", _path)
SWITCH = one_of({"true": True, "false": False, "1": True, "0": False})


@dataclass(frozen=True)
class Setting:
    """A field of a config that users can set.

    Attributes:
        form: How one value is written.
        flag: By default that of the field's name; without dashes it is a positional argument.
        is_per_model: Whether one model may have a value of its own.
        name: The field's name.
        default: The field's value.
        help: The field's text in the docstring, with the default.
    """

    form: Form
    flag: str = ""
    is_per_model: bool = False
    name: str = ""
    default: Any = None
    help: str = ""

    @property
    def key(self) -> str:
        """Its name in a file."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def is_list(self) -> bool:
        """Whether it has several values."""
        return isinstance(self.default, tuple)

    def read(self, given: Any, where: str) -> Any:
        """Returns the field's value for what a file or a variable has; raises ValueError, which names it."""
        if self.form is SWITCH:
            return SWITCH.read(str(given).lower(), where) is not self.default
        if not self.is_list:
            return self.form.read(given, where)
        if not isinstance(given, list):
            raise WrongSetting(f"{where} is {given!r}, and must be a list")
        return tuple(self.form.read(one, where) for one in given)


def settings_of(config: DataclassInstance) -> Iterator[Setting]:
    """Yields the settings of a config, and those of the configs in it."""
    hints = get_type_hints(type(config), include_extras=True)
    texts = dict(_ATTRIBUTE.findall(inspect.getdoc(config) or ""))
    for field in fields(config):
        default = getattr(config, field.name)
        if is_dataclass(default) and not isinstance(default, type):
            yield from settings_of(default)
        for setting in getattr(hints[field.name], "__metadata__", ()):
            text = " ".join(texts.get(field.name, "").split()).removesuffix(".")
            text = _CAPITAL.sub(lambda match: match[0].lower(), text)
            if default is True:
                text = f"turns off {text}"
            elif default not in (None, False, ()) and "(default" not in text:
                text = f"{text} (default {setting.form.write(default)})"
            flag = setting.flag or f"--{field.name.replace('_', '-')}"
            yield replace(setting, flag=flag, name=field.name, default=default, help=text)


def check_settings(config: DataclassInstance) -> None:
    """Raises ValueError for a value that the flag of its setting would refuse."""
    for setting in settings_of(config):
        if not (setting.form is SWITCH or setting.is_list or setting.default is None):
            setting.form.read(setting.default, setting.name)


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
        if setting.form is SWITCH:
            options |= {"action": "store_const", "const": not setting.default}
        else:
            options |= {"type": setting.form.read, "metavar": setting.form.metavar}
        if setting.flag == setting.name:
            parser.add_argument(setting.name, nargs="*", **options)
        else:
            options |= {"action": "append"} if setting.is_list else {}
            parser.add_argument(setting.flag, dest=setting.name, **options)


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
        content = _content(file) if file else {}
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


def _content(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from error


def values_of(table: Mapping[str, Any], settings: Sequence[Setting], where: str) -> dict[str, Any]:
    """Returns the values of a table by the names of fields."""
    known = {setting.key: setting for setting in settings}
    values = {}
    for key, given in table.items():
        if key not in known:
            raise ValueError(f"{where}{key}: there is no such setting here, only {', '.join(known)}")
        values[known[key].name] = known[key].read(given, where + key)
    return values


def _variables(environment: Mapping[str, str], settings: Sequence[Setting]) -> dict[str, Any]:
    """Returns the values of variables by the names of fields; refuses a misspelt one, and logs others."""
    known = {_PREFIX + setting.key.upper(): setting for setting in settings}
    values = {}
    for variable, text in environment.items():
        if setting := known.get(variable):
            given = text.split(os.pathsep) if setting.is_list else text
            values[setting.name] = setting.read(given, variable)
        elif variable.startswith(_PREFIX) and not _NO_SETTINGS.fullmatch(variable):
            if meant := difflib.get_close_matches(variable, [*known, _CONFIG, _ISA], n=1, cutoff=_SIMILAR):
                raise ValueError(f"{variable}: there is no such setting; did you mean {meant[0]}?")
            _log.warning("%s is not a setting of this server", variable)
    return values
