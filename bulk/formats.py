"""Reads the texts of a shard, and writes its targets: lines of text, lines of JSON, or Parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from seq2seq_serve.bulk.plan import (
    COMPRESSED,
    ERRORS_FOLDER,
    JSONL,
    PARQUET,
    SUFFIXES,
    TEXT,
    JobError,
    Shard,
    atomic_write,
)
from seq2seq_serve.client.output import one_line
from seq2seq_serve.commands import needs_extra

FORMATS = (TEXT, JSONL, PARQUET)
_OF_OUTPUT = {TEXT: ".txt", JSONL: ".jsonl", PARQUET: ".parquet"}
_REFUSED = {
    **dict.fromkeys((".zst", ".xz", ".bz2", ".zip"), "decompress it, or compress it with gzip"),
    **dict.fromkeys((".csv", ".tsv"), "write the column to a file of its own, such as with `cut -f 1`"),
    ".json": "write JSON lines, one object on each line (.jsonl)",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class LineError:
    """Why a line does not have a target.

    Attributes:
        code: The name of the gRPC status that the server would answer with.
        message: For people.
    """

    code: str
    message: str


@dataclass(frozen=True)
class Target:
    """The answer to one line.

    Attributes:
        text: The best target.
        score: Its score; None where the server does not compute it, as for greedy targets and blank texts.
        hypotheses: The `text` and `score` of every hypothesis.
    """

    text: str
    score: float | None = None
    hypotheses: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Lines:
    """The content of a shard.

    Attributes:
        texts: The text of each line, or why it cannot be used.
        records: The record of each line: objects of JSON as they were read, or a table of Arrow.
        names: The names of their fields.
    """

    texts: list[str | LineError]
    records: Any
    names: set[str]


def format_of(path: Path) -> str:
    """Returns the format of a file by its name.

    Raises:
        JobError: Files of this kind cannot be read.
    """
    name = path.name.lower().removesuffix(COMPRESSED)
    for suffix, advice in _REFUSED.items():
        if name.endswith(suffix):
            raise JobError(f"{path}: {suffix} cannot be read: {advice}")
    return SUFFIXES.get(Path(name).suffix, TEXT)


def check_formats(inputs: Sequence[Path], output: str | None) -> str:
    """Returns the format of the output: the given one, or that of the inputs.

    Raises:
        JobError: An input cannot be read, the inputs have several formats and none is given for the output,
            or the output cannot have the given one.
    """
    formats = {format_of(path) for path in inputs}
    if output is None and len(formats) > 1:
        raise JobError(f"the inputs are {' and '.join(sorted(formats))}: choose the output's --format")
    output = output or formats.pop()
    if output == PARQUET and formats - {PARQUET}:
        raise JobError("only inputs in Parquet have an output in Parquet: give --format jsonl or text")
    return output


def split_into_shards(path: Path, name: str, shard_lines: int) -> list[Shard]:
    """Reads an input once, and returns its shards.

    Args:
        path: The input.
        name: The name of its shards, to which their numbers are appended.
        shard_lines: The largest number of lines of a shard.

    Raises:
        OSError: The file cannot be read.
        JobError: It is not what its name says.
    """
    starts = _row_starts(path, shard_lines) if format_of(path) == PARQUET else _line_starts(path, shard_lines)
    num_digits = max(5, len(str(len(starts))))  # so that the names sort by their numbers
    return [
        Shard(f"{name}-{number:0{num_digits}}", str(path), line, end - line, byte)
        for number, ((line, byte), (end, _)) in enumerate(pairwise(starts))
    ]


def _row_starts(path: Path, shard_lines: int) -> list[tuple[int, int]]:
    with _open_parquet(path) as file:
        num_rows = file.metadata.num_rows
    return [(row, 0) for row in range(0, num_rows, shard_lines)] + [(num_rows, 0)]


def _line_starts(path: Path, shard_lines: int) -> list[tuple[int, int]]:
    """Returns the line and byte at which each shard begins, and those of the end."""
    starts, num_lines, num_bytes, last = [(0, 0)], 0, 0, b"\n"
    with _open_lines(path) as stream, _reading(path):
        while block := stream.read(_BLOCK_BYTES):
            breaks = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            while (number := starts[-1][0] + shard_lines - num_lines) <= len(breaks):
                starts.append((num_lines + number, num_bytes + int(breaks[number - 1]) + 1))
            num_lines += len(breaks)
            num_bytes += len(block)
            last = block[-1:]
    num_lines += last != b"\n"
    if starts[-1][0] == num_lines:
        starts.pop()
    return [*starts, (num_lines, num_bytes)]


def _open_lines(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.name.lower().endswith(COMPRESSED) else path.open("rb")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Reports a damaged file by its name."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise JobError(f"{path} is not a whole file of gzip: {error}") from error


class Reader:
    """Reads shards. Owned by a worker, which reads them one at a time.

    It keeps the last file of lines open, and the last group of rows, because the next shard usually follows
    there. Otherwise all that comes before would be decompressed again.
    """

    def __init__(self, text_field: str) -> None:
        self._field = text_field
        self._path = ""
        self._stream: IO[bytes] | None = None
        self._group: tuple[str, int] = "", 0
        self._rows: Any = None

    def read(self, shard: Shard) -> Lines:
        """Returns the lines of a shard.

        Raises:
            OSError: The input cannot be read.
            JobError: The input has changed since it was planned, or does not have the text field.
        """
        try:
            if format_of(Path(shard.input)) == PARQUET:
                return self._read_rows(shard)
            return self._read_lines(shard)
        except BaseException:
            self.close()  # the next try opens the file again
            raise

    def _read_lines(self, shard: Shard) -> Lines:
        path = Path(shard.input)
        if self._stream is None or self._path != shard.input:
            self.close()
            self._path, self._stream = shard.input, _open_lines(path)
        with _reading(path):
            self._stream.seek(shard.first_byte)
            lines = [self._stream.readline() for _ in range(shard.num_lines)]
        if not lines[-1]:
            raise _changed(path)
        lines = [line.removesuffix(b"\n").removesuffix(b"\r") for line in lines]
        if shard.first_line == 0:
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        if format_of(path) == TEXT:
            texts = [_decoded(line) for line in lines]
            return Lines(texts, [self._record(text) for text in texts], {self._field})
        parsed = [_parsed(line) if line.strip() else {self._field: ""} for line in lines]
        names = {name for record in parsed if not isinstance(record, LineError) for name in record}
        if names and self._field not in names:
            raise self._missing(path, names)
        records = [
            b"{}" if isinstance(record, LineError) else line.strip() or b"{}"
            for record, line in zip(parsed, lines, strict=True)
        ]
        return Lines([self._text_of(record) for record in parsed], records, names)

    def _read_rows(self, shard: Shard) -> Lines:
        path, end = Path(shard.input), shard.first_line + shard.num_lines
        with _open_parquet(path) as file:
            names = file.schema_arrow.names
            if self._field not in names:
                raise self._missing(path, names)
            if file.metadata.num_rows < end:
                raise _changed(path)
            parts, first = [], 0
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                if first < end and first + num_rows > shard.first_line:
                    if self._group != (shard.input, group) or self._rows is None:
                        self._rows = file.read_row_group(group)
                        self._group = shard.input, group
                    start = max(shard.first_line - first, 0)
                    parts.append(self._rows.slice(start, end - first - start))
                first += num_rows
        table = _pyarrow().concat_tables(parts)
        texts = table.column(self._field).to_pylist()
        return Lines([self._text_of({self._field: text}) for text in texts], table, set(names))

    def _missing(self, path: Path, names: Sequence[str] | set[str]) -> JobError:
        return JobError(
            f"{path} does not have a field {self._field!r}, but {', '.join(sorted(names))}: give --field"
        )

    def _record(self, text: str | LineError) -> bytes:
        return b"{}" if isinstance(text, LineError) else _json({self._field: text})

    def _text_of(self, record: dict[str, Any] | LineError) -> str | LineError:
        if isinstance(record, LineError):
            return record
        if self._field not in record:
            return LineError("INVALID_ARGUMENT", f"there is no field {self._field!r}")
        text = record[self._field]
        if not isinstance(text, str):
            return LineError("INVALID_ARGUMENT", f"the field {self._field!r} is not a text: {text!r:.100}")
        return text

    def close(self) -> None:
        """Closes what is kept open."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._rows = None


def _changed(path: Path) -> JobError:
    return JobError(f"{path} has changed since the run was planned: it has fewer lines")


def _decoded(line: bytes) -> str | LineError:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return LineError("INVALID_ARGUMENT", f"not valid UTF-8 at byte {error.start + 1}")


def _parsed(line: bytes) -> dict[str, Any] | LineError:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return LineError("INVALID_ARGUMENT", f"not JSON: {error}")
    return record if isinstance(record, dict) else LineError("INVALID_ARGUMENT", "not a JSON object")


@dataclass(frozen=True)
class Writer:
    """Writes shards.

    Attributes:
        folder: The output folder.
        format: The format of the files.
        target_field: The name of the new field; its score is in the field with `_score` appended.
        has_hypotheses: Whether all hypotheses are written, in the field with `_hypotheses` appended.
    """

    folder: Path
    format: str
    target_field: str
    has_hypotheses: bool

    def path(self, shard: Shard) -> Path:
        """Returns the file of a shard. It is there if the shard is done."""
        return self.folder / f"{shard.name}{_OF_OUTPUT[self.format]}"

    def is_done(self, shard: Shard) -> bool:
        """Whether a shard has been written."""
        return self.path(shard).exists()

    def check(self, lines: Lines) -> None:
        """Raises JobError if records already have a field of a new name."""
        for name in self._names:
            if self.format != TEXT and name in lines.names:
                raise JobError(f"an input already has a field {name!r}: choose another --target-field")

    def write(self, shard: Shard, lines: Lines, answers: Sequence[Target | LineError]) -> None:
        """Writes the targets of a shard, after its errors if there are any.

        Raises:
            OSError: The output cannot be written.
            JobError: A value of a record cannot be written in the output's format.
        """
        errors = [
            {
                "input": shard.input,
                "line": shard.first_line + number + 1,
                "code": answer.code,
                "message": answer.message,
            }
            for number, answer in enumerate(answers)
            if isinstance(answer, LineError)
        ]
        errors_path = self.folder / ERRORS_FOLDER / f"{shard.name}.jsonl"
        if errors:
            with atomic_write(errors_path) as file:
                file.writelines(_json(error) + b"\n" for error in errors)
        else:
            errors_path.unlink(missing_ok=True)  # of a try that was killed
        targets = [None if isinstance(answer, LineError) else answer for answer in answers]
        with atomic_write(self.path(shard)) as file:
            if self.format == TEXT:
                texts = ("" if target is None else one_line(target.text) for target in targets)
                file.writelines(f"{text}\n".encode() for text in texts)
            elif self.format == JSONL:
                records = lines.records
                if not isinstance(records, list):
                    records = [_json(row) for row in records.to_pylist()]
                for record, target in zip(records, targets, strict=True):
                    file.write(_joined(record, _json(self._fields(target))) + b"\n")
            else:
                _parquet().write_table(self._with_columns(lines.records, targets), file)

    def _fields(self, target: Target | None) -> dict[str, Any]:
        values = (target.text, target.score, target.hypotheses) if target else (None, None, None)
        return dict(zip(self._names, values, strict=False))

    @property
    def _names(self) -> list[str]:
        """The names of the new fields."""
        return [self.target_field + end for end in ("", "_score", "_hypotheses")[: 2 + self.has_hypotheses]]

    def _with_columns(self, table: Any, targets: Sequence[Target | None]) -> Any:
        """Returns the table with the columns of the targets, which have equal types in every shard."""
        arrow = _pyarrow()
        text, score = arrow.string(), arrow.float32()
        kinds = (text, score, arrow.list_(arrow.struct({"text": text, "score": score})))
        for name, kind in zip(self._names, kinds, strict=False):
            values = [self._fields(target)[name] for target in targets]
            table = table.append_column(name, arrow.array(values, kind))
        return table


def _joined(record: bytes, fields: bytes) -> bytes:
    """Returns an object of JSON with more fields; those that it had stay as they were written."""
    begin = record[:-1].rstrip()
    return begin + (b"" if begin == b"{" else b", ") + fields[1:]


def _json(record: dict[str, Any]) -> bytes:
    """Returns an object of JSON.

    Raises:
        JobError: Parquet has values that JSON does not have.
    """
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, default=_text_of_value)
    except ValueError as error:
        raise JobError(
            f"a row has a value that JSON does not have ({error}): give --format parquet"
        ) from error
    return text.encode("utf-8", "backslashreplace")


def _text_of_value(value: Any) -> str:
    """Returns a value, such as a date, that JSON can only have as text."""
    if isinstance(value, bytes):
        raise ValueError("bytes")
    return str(value)


def _pyarrow() -> Any:
    with needs_extra("parquet"):
        import pyarrow
    return pyarrow


def _parquet() -> Any:
    with needs_extra("parquet"):
        import pyarrow.parquet
    return pyarrow.parquet


@contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    try:
        with _parquet().ParquetFile(path) as file:
            yield file
    except _pyarrow().ArrowInvalid as error:
        raise JobError(f"{path} is not a file of Parquet: {error}") from error
