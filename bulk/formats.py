"""Reads the texts of a shard, and writes its targets: lines of text, lines of JSON, or Parquet."""

from __future__ import annotations

import gzip
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from seq2seq_serve.bulk.plan import ERRORS_FOLDER, JobError, Shard, whole_file
from seq2seq_serve.commands import needs_extra

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
FORMATS = (TEXT, JSONL, PARQUET)

_SUFFIXES = {TEXT: ".txt", JSONL: ".jsonl", PARQUET: ".parquet"}
_COMPRESSED = ".gz"
_LINE_BREAKS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")
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
        score: Its score; None for a blank text, which is not sent to the model.
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
        records: The whole record of each line: a list of dicts, or a table of Arrow.
    """

    texts: list[str | LineError]
    records: Any


def format_of(path: Path) -> str:
    """Returns the format of a file by its name; all unknown names are text."""
    name = path.name.removesuffix(_COMPRESSED)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return JSONL
    return PARQUET if name.endswith(".parquet") else TEXT


def check_formats(inputs: Sequence[Path], output: str | None) -> str:
    """Returns the format of the output: the given one, or that of the inputs.

    Raises:
        JobError: The inputs cannot be written in that format, or have several formats and none is given.
    """
    formats = {format_of(path) for path in inputs}
    if output is None and len(formats) > 1:
        raise JobError(f"the inputs are {' and '.join(sorted(formats))}: choose the output's --format")
    output = output or formats.pop()
    if output == PARQUET and formats - {PARQUET}:
        raise JobError("only inputs in Parquet have an output in Parquet: give --format jsonl or text")
    return output


def cut(path: Path, name: str, shard_lines: int) -> list[Shard]:
    """Cuts an input into shards.

    Args:
        path: The input.
        name: The name of its shards, to which their numbers are appended.
        shard_lines: The largest number of lines of a shard.

    Raises:
        OSError: The file cannot be read.
        JobError: It is not what its name says.
    """
    starts = _row_starts(path, shard_lines) if format_of(path) == PARQUET else _line_starts(path, shard_lines)
    return [
        Shard(f"{name}-{number:05}", str(path), line, end - line, byte)
        for number, ((line, byte), (end, _)) in enumerate(pairwise(starts))
    ]


def _row_starts(path: Path, shard_lines: int) -> list[tuple[int, int]]:
    num_rows = _parquet().ParquetFile(path).metadata.num_rows
    return [(row, 0) for row in range(0, num_rows, shard_lines)] + [(num_rows, 0)]


def _line_starts(path: Path, shard_lines: int) -> list[tuple[int, int]]:
    """Returns the line and byte at which each shard begins, and those of the end."""
    starts, num_lines, num_bytes, last = [(0, 0)], 0, 0, b"\n"
    with open_input(path) as stream:
        while block := _read(path, stream):
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


def _read(path: Path, stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_BLOCK_BYTES)
    except (EOFError, gzip.BadGzipFile) as error:
        raise JobError(f"{path} is not a whole file of gzip: {error}") from error


def open_input(path: Path) -> IO[bytes]:
    """Opens a file of lines; a compressed one is read as what it holds."""
    return cast(IO[bytes], gzip.open(path)) if path.suffix == _COMPRESSED else path.open("rb")


class Reader:
    """Reads shards. Owned by a worker, which reads them one at a time.

    It keeps the last compressed file open, because the next shard usually follows in it: to go back, or to
    open it again, all that comes before has to be decompressed.
    """

    def __init__(self, text_field: str) -> None:
        self._field = text_field
        self._path = ""
        self._stream: IO[bytes] | None = None

    def read(self, shard: Shard) -> Lines:
        """Returns the lines of a shard.

        Raises:
            OSError: The input cannot be read.
            JobError: The input has changed since it was planned, or does not have the text field.
        """
        path = Path(shard.input)
        if format_of(path) == PARQUET:
            return self._read_rows(shard)
        if self._stream is None or self._path != shard.input:
            self.close()
            self._path, self._stream = shard.input, open_input(path)
        self._stream.seek(shard.first_byte)
        raw = [self._stream.readline() for _ in range(shard.num_lines)]
        if not raw[-1]:
            raise JobError(f"{path} has changed since the run was planned: it has fewer lines")
        lines = [line.removesuffix(b"\n").removesuffix(b"\r") for line in raw]
        if format_of(path) == TEXT:
            texts = [_decoded(line) for line in lines]
            return Lines(
                texts, [{} if isinstance(text, LineError) else {self._field: text} for text in texts]
            )
        parsed = [_parsed(line) for line in lines]
        records = [{} if isinstance(one, LineError) else one for one in parsed]
        return Lines([self._text_of(one) for one in parsed], records)

    def _read_rows(self, shard: Shard) -> Lines:
        file = _parquet().ParquetFile(shard.input)
        if self._field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise JobError(f"{shard.input} does not have a column {self._field!r}, but {names}: give --field")
        first, end, groups, begins = 0, shard.first_line + shard.num_lines, [], []
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if first < end and first + num_rows > shard.first_line:
                groups.append(group)
                begins.append(first)
            first += num_rows
        table = file.read_row_groups(groups).slice(shard.first_line - begins[0], shard.num_lines)
        texts = table.column(self._field).to_pylist()
        return Lines([self._text_of({self._field: text}) for text in texts], table)

    def _text_of(self, record: dict[str, Any] | LineError) -> str | LineError:
        if isinstance(record, LineError):
            return record
        if self._field not in record:
            return LineError("INVALID_ARGUMENT", f"there is no field {self._field!r}: --field names another")
        text = record[self._field]
        if not isinstance(text, str):
            return LineError("INVALID_ARGUMENT", f"the field {self._field!r} is not a text: {text!r:.100}")
        return text

    def close(self) -> None:
        """Closes the file that is kept open."""
        if self._stream is not None:
            self._stream.close()


def _decoded(line: bytes) -> str | LineError:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        return LineError("INVALID_ARGUMENT", f"not valid UTF-8 at byte {error.start + 1}")


def _parsed(line: bytes) -> dict[str, Any] | LineError:
    try:
        record = json.loads(line)
    except ValueError as error:
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
        return self.folder / f"{shard.name}{_SUFFIXES[self.format]}"

    def is_done(self, shard: Shard) -> bool:
        """Whether a shard has been written."""
        return self.path(shard).exists()

    def write(self, shard: Shard, lines: Lines, answers: Sequence[Target | LineError]) -> None:
        """Writes the targets of a shard, after its errors if there are any.

        Raises:
            OSError: The output cannot be written.
            JobError: The records already have a field of that name.
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
        path = self.path(shard)
        if errors:
            with whole_file(self.folder / ERRORS_FOLDER / f"{shard.name}.jsonl") as file:
                file.writelines(_json_line(error) for error in errors)
        targets = [None if isinstance(answer, LineError) else answer for answer in answers]
        with whole_file(path) as file:
            if self.format == TEXT:
                texts = ("" if target is None else target.text.translate(_LINE_BREAKS) for target in targets)
                file.writelines(f"{text}\n".encode() for text in texts)
            elif self.format == JSONL:
                records = lines.records if isinstance(lines.records, list) else lines.records.to_pylist()
                for record, target in zip(records, targets, strict=True):
                    self._check_free(record)
                    file.write(_json_line(record | self._fields(target)))
            else:
                self._check_free(lines.records.column_names)
                _parquet().write_table(self._with_columns(lines.records, targets), file)

    def _fields(self, target: Target | None) -> dict[str, Any]:
        values = (target.text, target.score, target.hypotheses) if target else (None, None, None)
        return dict(zip(self._names, values, strict=False))

    @property
    def _names(self) -> list[str]:
        """The names of the new fields."""
        return [self.target_field + end for end in ("", "_score", "_hypotheses")[: 2 + self.has_hypotheses]]

    def _check_free(self, names: Container[str]) -> None:
        for name in self._names:
            if name in names:
                raise JobError(f"an input already has a field {name!r}: choose another --target-field")

    def _with_columns(self, table: Any, targets: Sequence[Target | None]) -> Any:
        """Returns the table with the columns of the targets, which have equal types in every shard."""
        arrow = _arrow()
        text, score = arrow.string(), arrow.float32()
        kinds = (text, score, arrow.list_(arrow.struct({"text": text, "score": score})))
        for name, kind in zip(self._names, kinds, strict=False):
            values = [self._fields(target)[name] for target in targets]
            table = table.append_column(name, arrow.array(values, kind))
        return table


def _json_line(record: dict[str, Any]) -> bytes:
    # Parquet has values, such as dates, that JSON has not.
    return json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace") + b"\n"


def _arrow() -> Any:
    with needs_extra("parquet"):
        import pyarrow
    return pyarrow


def _parquet() -> Any:
    with needs_extra("parquet"):
        import pyarrow.parquet
    return pyarrow.parquet
