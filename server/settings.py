"""Reads settings from the command line, the environment and a TOML file, in this order of precedence."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "SEQ2SEQ_"
_READ_ELSEWHERE = ("isa",)  # by kernels/products.h
_CONFIG = "--config"
_MODELS = "models"
_NO_SETTINGS = ("help", "config", "version")
_SIMILAR = 0.9  # of 1: one or two letters differ
_OF_KUBERNETES = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)$"
)  # set by a Service SEQ2SEQ_…
_log = logging.getLogger(__name__)
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def parse_settings(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    environment: Mapping[str, str],
    model_settings: Collection[str] = (),
) -> argparse.Namespace:
    """Parse a command line; missing flags are taken from the environment, then from the file.

    The flag `--max-slots` is `SEQ2SEQ_MAX_SLOTS` in the environment and `max_slots` in the file that
    `--config` names. A switch has its flag's name, and is true or false in both. A flag with several values
    is a list in the file; in the environment its values are separated like paths.

    Args:
        parser: Gets the flag `--config`, and reports usage errors of all sources.
        arguments: None takes the program's own.
        environment: The environment variables.
        model_settings: The settings that the file may give to one model, in a table `[models.NAME]`. The
            result's `models` contains all settings of each such model.
    """
    parser.add_argument(
        _CONFIG,
        type=Path,
        metavar="FILE",
        help="TOML file with flags, such as max_slots = 64, and a table [models.NAME] with the flags of one "
        f"model; outside of the tables, the command line and the environment ({PREFIX}MAX_SLOTS) override it",
    )
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument(_CONFIG, type=Path, default=environment.get(f"{PREFIX}CONFIG"))
    file: Path | None = first.parse_known_args(arguments)[0].config
    actions = {_name(action): action for action in parser._actions if action.dest not in _NO_SETTINGS}
    content = _read(parser, file) if file else {}
    tables = content.pop(_MODELS, {})
    for name, value in content.items():
        if name not in actions:
            parser.error(
                f"{file}: there is no setting {name!r}; there are {', '.join(sorted(actions))}, models"
            )
        parser.set_defaults(**{actions[name].dest: _checked(parser, actions[name], value, f"{file}: {name}")})
    _check_variables(parser, environment, actions)
    for name, action in actions.items():
        variable = PREFIX + name.upper()
        if variable in environment:
            value = environment[variable]
            given = value.split(os.pathsep) if _is_list(action) else value
            parser.set_defaults(**{action.dest: _checked(parser, action, given, variable)})
    # The flags of a list would be appended to its default.
    lists = [action.dest for action in actions.values() if isinstance(action, argparse._AppendAction)]
    defaults = {name: parser.get_default(name) for name in lists}
    parser.set_defaults(**{name: [] for name in lists})
    options = parser.parse_args(arguments)
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)
    options.models = {}
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        parser.error(f"{file}: write a table [{_MODELS}.NAME] for each model with settings of its own")
    for model, table in tables.items():
        options.models[model] = argparse.Namespace(**vars(options))
        for name, value in table.items():
            where = f"{file}: {_MODELS}.{model}.{name}"
            if name not in model_settings:
                parser.error(f"{where}: one model can only have {', '.join(model_settings)}")
            setattr(options.models[model], actions[name].dest, _checked(parser, actions[name], value, where))
    return options


def _name(action: argparse.Action) -> str:
    """Returns the name of a setting, which is that of its flag."""
    flag = action.option_strings[-1] if action.option_strings else action.dest
    return flag.lstrip("-").replace("-", "_")


def _read(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        parser.error(f"{file}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        parser.error(f"{file} is not valid TOML: {error}")


def _check_variables(
    parser: argparse.ArgumentParser, environment: Mapping[str, str], names: Iterable[str]
) -> None:
    """Refuse a misspelt variable, and log other variables with our prefix."""
    known = [PREFIX + name.upper() for name in (*names, "config", *_READ_ELSEWHERE)]
    for variable in environment:
        if not variable.startswith(PREFIX) or variable in known or _OF_KUBERNETES.search(variable):
            continue
        meant = difflib.get_close_matches(variable, known, n=1, cutoff=_SIMILAR)
        if meant:
            parser.error(f"{variable}: there is no such setting; did you mean {meant[0]}?")
        _log.warning("%s is not a setting of this server", variable)


def _checked(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    """Converts and checks the value of a setting as the flag's own value would be."""
    try:
        return _converted(action, value)
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"{where}: {error}")


def _converted(action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:  # a switch: true is the value that its flag stores
        truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
        if truth is None:
            raise ValueError(f"{value!r} is neither true nor false")
        return action.const if truth else not action.const
    if _is_list(action):
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        return [_one(action, one) for one in value]
    return _one(action, value)


def _is_list(action: argparse.Action) -> bool:
    return action.nargs == "*" or isinstance(action, argparse._AppendAction)


def _one(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, (bool, list, dict)):
        raise TypeError(f"{value!r} is not a single value")
    converted = action.type(str(value)) if callable(action.type) else str(value)
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"{value!r} is not one of {', '.join(map(str, action.choices))}")
    return converted
