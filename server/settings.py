"""Where a flag's value comes from that is not given: the environment, a TOML file, then its default."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "SEQ2SEQ_"
_CONFIG = "--config"
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


def parse_settings(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, environment: Mapping[str, str]
) -> argparse.Namespace:
    """Parse a command line, filled up from environment and file.

    A flag `--max-slots` is `SEQ2SEQ_MAX_SLOTS` in the environment and `max_slots` in the file that `--config`
    names; a switch is true or false in both, and its name is that of the flag. What is given several times is
    a list in the file, and in the environment separated as paths are.

    Args:
        parser: Gets the flag `--config`. Usage errors of any source end the program by it.
        arguments: None is the program's own.
        environment: Its variables.
    """
    parser.add_argument(
        _CONFIG,
        type=Path,
        metavar="FILE",
        help="TOML, with flags by their names, such as max_slots = 64; the command line and the environment "
        f"({PREFIX}MAX_SLOTS) override it",
    )
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument(_CONFIG, type=Path, default=environment.get(f"{PREFIX}CONFIG"))
    file: Path | None = first.parse_known_args(arguments)[0].config
    actions = {_name(action): action for action in parser._actions if action.dest not in ("help", "config")}
    for name, value in (_read(parser, file) if file else {}).items():
        if name not in actions:
            parser.error(f"{file}: there is no setting {name!r}; there are {', '.join(sorted(actions))}")
        _set(parser, actions[name], value, f"{file}: {name}")
    for name, action in actions.items():
        variable = PREFIX + name.upper()
        if variable in environment:
            value = environment[variable]
            _set(parser, action, value.split(os.pathsep) if action.nargs == "*" else value, variable)
    return parser.parse_args(arguments)


def _name(action: argparse.Action) -> str:
    """Of a setting: that of its flag."""
    flag = action.option_strings[-1] if action.option_strings else action.dest
    return flag.lstrip("-").replace("-", "_")


def _read(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        parser.error(f"{file}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        parser.error(f"{file} is no TOML: {error}")


def _set(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> None:
    """Make a value the default of a flag, checked as the flag's own would be."""
    try:
        parser.set_defaults(**{action.dest: _converted(action, value)})
    except (TypeError, ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"{where}: {error}")


def _converted(action: argparse.Action, value: Any) -> Any:
    if action.nargs == 0:  # a switch: its flag stands for true, whatever it stores
        truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
        if truth is None:
            raise ValueError(f"{value!r} is neither true nor false")
        return action.const if truth else not action.const
    if action.nargs == "*":
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is no list")
        return [_one(action, one) for one in value]
    return _one(action, value)


def _one(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, (bool, list, dict)):
        raise TypeError(f"{value!r} is no single value")
    converted = action.type(str(value)) if callable(action.type) else str(value)
    if action.choices is not None and converted not in action.choices:
        raise ValueError(f"{value!r} is none of {', '.join(map(str, action.choices))}")
    return converted
