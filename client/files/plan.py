"""The plan of a bulk run, kept for a resume: its settings and its shards. Files are written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO, Any

from google.protobuf.json_format import MessageToDict

from seq2seq_serve.bundle.files import sync_folder
from seq2seq_serve.client.files.lines import is_compressed
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions

# Readers of whole folders, such as those of Parquet, skip names that begin so.
PLAN_FILE, ERRORS_FOLDER = "_plan.json", "_errors"
TEMPORARY = ".tmp"
_MOST_NAMED = 3  # differences of two runs

TEXT, JSONL, PARQUET, DOCUMENT = "text", "jsonl", "parquet", "document"
# The format of each known suffix, beside those of documents
SUFFIXES = {".txt": TEXT, ".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}


class JobError(Exception):
    """The run cannot go on: another shard would fail in the same way."""


@dataclass(frozen=True)
class FileState:
    """A file at some time. Two states are equal if the content is.

    Attributes:
        num_bytes: Its size.
        changed_ns: The time of its last change in nanoseconds, which machines may see differently.
        sha256: The digest of its content; empty in plans of former versions.
    """

    num_bytes: int
    changed_ns: int = field(compare=False)
    sha256: str = ""


def state_of(path: Path, known: FileState | None = None) -> FileState:
    """Returns the state of a file. It is read, unless its size and time are those of the known state."""
    found = path.stat()
    size_and_time = found.st_size, found.st_mtime_ns
    if known is not None and size_and_time == (known.num_bytes, known.changed_ns):
        return known
    with path.open("rb") as file:
        return FileState(*size_and_time, hashlib.file_digest(file, "sha256").hexdigest())


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
class Plan:
    """The plan of a run, which lies in its output folder.

    Attributes:
        settings: Everything that the output depends on beside the inputs, by name, as JSON has it. A resume
            must have the same.
        inputs: The state of each input, by its path.
        shards: The shards, in the order of the inputs.
    """

    settings: dict[str, Any]
    inputs: dict[str, FileState]
    shards: tuple[Shard, ...] = ()


def read_plan(folder: Path, name: str = PLAN_FILE) -> Plan | None:
    """Returns the plan of an output folder, in a file of this name; None if it does not have one.

    Raises:
        JobError: The file is not a plan.
    """
    path = folder / name
    try:
        content = json.loads(path.read_bytes())
        settings = dict(content["settings"])
        inputs = {name: FileState(*values) for name, values in settings.pop("inputs").items()}
        shards = tuple(Shard(*values) for values in content["shards"])
        return Plan(settings, inputs, shards)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise JobError(f"{path} is not a plan of this command: {type(error).__name__}: {error}") from error


def settings_of(options: GenerateOptions) -> dict[str, Any]:
    """Returns the options on which targets depend, for a plan; terms by their number and a digest."""
    settings = MessageToDict(options, preserving_proto_field_name=True)
    settings.pop("priority", None)
    if terms := settings.pop("terms", None):
        settings["terms"] = f"{len(terms)} ({hashlib.sha256(json.dumps(terms).encode()).hexdigest()[:16]})"
    return settings


def check_plan(folder: Path, before: Plan, now: Plan, advice: str) -> None:
    """Raises JobError if the plan of an output folder is for other settings or inputs.

    Args:
        folder: The output folder.
        before: Its plan.
        now: A plan with the settings and inputs of the command.
        advice: How to start anew, beside repeating the command.
    """
    for what, differences in (
        ("inputs", _other_inputs(before.inputs, now.inputs)),
        ("settings", _differences(before.settings, now.settings)),
    ):
        if differences:
            named = "; ".join(sorted(differences)[:_MOST_NAMED])
            raise JobError(
                f"{folder} belongs to a run with other {what}: {named}. Repeat the command of that run, "
                f"{advice}"
            )


def write_plan(folder: Path, plan: Plan, name: str = PLAN_FILE) -> None:
    """Writes the plan of an output folder, unless the folder has the same one already.

    Commands that start together write equal plans.
    """
    inputs = {path: astuple(state) for path, state in plan.inputs.items()}
    content = {
        "settings": plan.settings | {"inputs": inputs},
        "shards": [astuple(shard) for shard in plan.shards],
    }
    path, written = folder / name, json.dumps(content).encode()  # names may have bytes that are not UTF-8
    if not path.exists() or path.read_bytes() != written:
        with atomic_write(path) as file:
            file.write(written)


def _other_inputs(before: dict[str, FileState], now: dict[str, FileState]) -> list[str]:
    """Returns the inputs of only one of two runs, and those that have changed."""
    return [
        *(f"{path} was not among them" for path in now.keys() - before.keys()),
        *(f"{path} is not given now" for path in before.keys() - now.keys()),
        *(f"{path} has changed" for path in before.keys() & now.keys() if before[path] != now[path]),
    ]


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns which settings differ, by name, and how."""
    found = []
    for name in before.keys() | now.keys():
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found += [f"{name} {each}" for each in _differences(one, other)]
        elif one != other:
            found.append(f"{name} was {json.dumps(one)} and is {json.dumps(other)}")
    return found


def names_of(inputs: Sequence[Path]) -> list[str]:
    """Returns the name of each input's shards: its path below the folder that all inputs share.

    Raises:
        JobError: Two inputs would have the same name.
    """
    root = os.path.commonpath([path.parent for path in inputs])
    names = [_without_suffix(path.relative_to(root)).as_posix() for path in inputs]
    for name, number in Counter(names).items():
        if number > 1:
            raise JobError(f"{number} inputs would have the output {name}: rename all but one of them")
        if name.startswith(("_", ".")):
            raise JobError(
                f"an input would have the output {name}: rename it, because readers skip such names"
            )
    return names


def _without_suffix(path: Path) -> Path:
    if is_compressed(path):
        path = path.with_suffix("")
    return path.with_suffix("") if path.suffix.lower() in SUFFIXES else path


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Yields a file that appears under its name at the end of the block, complete and on the disk.

    Until then the file has another name, so a process that is killed leaves nothing that looks complete.
    Missing folders are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a folder for this process, also against itself. The folder is made if it is missing.

    The system gives it back when the process ends, however that happens. Where the system or its file system
    cannot lock a folder, as Windows and NFS, nothing keeps other commands away.

    Raises:
        JobError: Another command has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        is_taken = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_taken = True
        except OSError:
            pass  # NFS locks only what is open for writing, which a folder cannot be
        # A command that ends removes the folder.
        if is_taken or not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise JobError(f"another command is at work in {folder}: wait for it, or stop it")
        yield
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, older_than: float) -> None:
    """Removes the temporary files of processes that were killed; `older_than` is in Unix seconds."""
    for path in folder.rglob(f".*{TEMPORARY}"):
        if path.stat().st_mtime < older_than:
            path.unlink(missing_ok=True)
