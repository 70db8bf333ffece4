"""The plan of a bulk run: its settings, and its inputs cut into shards. It is kept for a resume."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

# Readers of whole folders, such as those of Parquet, skip names that begin so.
PLAN_FILE, ERRORS_FOLDER = "_plan.json", "_errors"
_TEMPORARY = ".tmp"


class JobError(Exception):
    """The run cannot go on: another shard would fail in the same way."""


@dataclass(frozen=True)
class Shard:
    """Consecutive lines of one input, which become one file of the output.

    Attributes:
        name: The path of that file in the output folder, without its suffix.
        input: The absolute path of the input.
        first_line: The number of its first line, or row, counted from 0.
        num_lines: The number of its lines, or rows.
        first_byte: Where its first line begins in the decompressed input; 0 in a file of Parquet.
    """

    name: str
    input: str
    first_line: int
    num_lines: int
    first_byte: int


@dataclass(frozen=True)
class Settings:
    """Everything that the output depends on. A resume must have the same.

    Attributes:
        bundle_version: The version of the bundle, which depends on its files.
        precision: The precision of its graphs, or `auto`.
        options: The options of every text, as JSON.
        text_field: The field or column with the text, where inputs have several.
        target_field: The name of the new field or column.
        format: `text`, `jsonl` or `parquet`, of the output.
        shard_lines: The largest number of lines of a shard.
        inputs: The absolute path of each input, and its size in bytes.
    """

    bundle_version: str
    precision: str
    options: dict[str, Any]
    text_field: str
    target_field: str
    format: str
    shard_lines: int
    inputs: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """The settings of a run, and its shards in the order of the inputs."""

    settings: Settings
    shards: tuple[Shard, ...]

    @property
    def num_lines(self) -> int:
        """The number of lines of all shards."""
        return sum(shard.num_lines for shard in self.shards)


def read_plan(folder: Path, settings: Settings) -> Plan | None:
    """Returns the plan of an output folder; None if it does not have one.

    Raises:
        JobError: The plan there is for other settings.
    """
    try:
        content = json.loads((folder / PLAN_FILE).read_bytes())
        found = Plan(Settings(**content["settings"]), tuple(Shard(*values) for values in content["shards"]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise JobError(f"{folder / PLAN_FILE} is not a plan of this command: {error!r}") from error
    for field in fields(Settings):
        before, now = getattr(found.settings, field.name), getattr(settings, field.name)
        if before != now:
            raise JobError(
                f"{folder} belongs to a run with another {field.name.replace('_', ' ')} ({_short(before)}, "
                f"and now {_short(now)}): repeat the command of that run, or give another --output"
            )
    return found


def write_plan(folder: Path, plan: Plan) -> None:
    """Writes the plan of an output folder, completely or not at all."""
    content = {
        "settings": asdict(plan.settings),
        "shards": [list(asdict(shard).values()) for shard in plan.shards],
    }
    with whole_file(folder / PLAN_FILE) as file:
        file.write(json.dumps(content, ensure_ascii=False).encode())


def names_of(inputs: Sequence[Path]) -> list[str]:
    """Returns the name of each input's shards: its path below the folder that all inputs share.

    Raises:
        JobError: Two inputs would have the same name.
    """
    root = os.path.commonpath([path.parent for path in inputs])
    names = [str(path.relative_to(root).with_name(path.name.partition(".")[0])) for path in inputs]
    for name in names:
        if names.count(name) > 1:
            raise JobError(f"two inputs would have the output {name}: rename one of them")
    return names


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file that appears under its name at the end of the block, completely and on the disk.

    The file has another name until then, so a process that is killed leaves nothing that looks complete.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_leftovers(folder: Path, older_than: float) -> None:
    """Removes the temporary files of processes that were killed; `older_than` is in Unix seconds."""
    for path in folder.rglob(f".*{_TEMPORARY}"):
        if path.stat().st_mtime < older_than:
            path.unlink(missing_ok=True)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) < 200 else f"{text[:200]}…"
