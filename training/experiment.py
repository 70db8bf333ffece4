"""Reads an experiment from a TOML file, whose keys are the flags of `train` and the names of `--set`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from seq2seq_serve.bundle.files import read_toml
from seq2seq_serve.training.config import TrainingConfig
from seq2seq_serve.training.models.registry import FAMILIES


def arguments_of(file: Path, flags: Mapping[str, bool]) -> dict[str, list[str]]:
    """Returns by key the arguments that a file stands for.

    Args:
        file: Its `preset` is the positional argument. Relative names of files in it start from the folder in
            which the command runs, as those of flags do.
        flags: The names of flags, and whether each is a switch.

    Raises:
        ValueError: The file cannot be read, or has an unknown key, or a key of several values; it is named.
    """
    settings = [field.name for field in dataclasses.fields(TrainingConfig)] + ["learning_rate"]
    for family in FAMILIES.values():
        settings += [field.name for field in dataclasses.fields(family.config)]
    arguments = {}
    for key, value in read_toml(file).items():
        flag = f"--{key.replace('_', '-')}"
        is_switch = flags.get(flag, False)
        if not isinstance(value, bool if is_switch else str | int | float):
            expected = "true or false" if is_switch else "one value"
            raise ValueError(f"{file}: {key} is {value!r}, and must be {expected}")
        text = value if isinstance(value, str) else json.dumps(value)
        if key == "preset":
            arguments[key] = [text]
        elif flag in flags and "-" not in key:
            arguments[key] = [flag] * bool(value) if is_switch else [f"{flag}={text}"]
        elif key in settings:
            arguments[key] = [f"--set={key}={text}"]
        else:
            names = [name.removeprefix("--").replace("-", "_") for name in flags]
            meant = get_close_matches(key, ["preset", *names, *settings], n=1)
            hint = f" (meant: {meant[0]}?)" if meant else ""
            raise ValueError(f"{file}: there is no setting {key}{hint}")
    return arguments
