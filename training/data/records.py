"""Corpora of records with named fields: JSON lines, Parquet, and data sets of Hugging Face's `datasets`.

A folder that `save_to_disk` wrote is files of Arrow, which pyarrow reads without `datasets`. Records are read
a few at a time, so that a corpus may be larger than memory. Rows of tables count from 1, as lines do.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from seq2seq_serve.commands import install_command
from seq2seq_serve.training.data.text_files import SentencePair, iterate_lines

_PARQUET, _ARROW = ".parquet", ".arrow"
_STATE_FILE, _PARTS_FILE = "state.json", "dataset_dict.json"  # of `save_to_disk`
_ROWS_AT_ONCE = 64  # of which each may have a picture or a sound
_SHARD = re.compile(r"-\d+-of-\d+$")
_LINE_BREAKS = re.compile(r"[\r\n]+")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Records:
    """The pairs of source and target in a corpus of records.

    Attributes:
        path: A file of JSON lines (gzip if its name ends in .gz), of Parquet, or of Arrow; a folder of
            Parquet files, or one that `save_to_disk` wrote; or a pattern such as `data/train-*.parquet`.
        source_field: The field of the source; `translation.de` is the field `de` of the field `translation`.
        target_field: The field of the target. A list of texts there is a pair for each.
        media: The folder that gets a file for each source that lies in its record, where a source is a file:
            the bytes of a sound or a picture, alone or with a name beside them, or a matrix of features. Its
            name is its digest, and starts from the folder above. None refuses sources that are not texts.
    """

    path: str
    source_field: str
    target_field: str
    media: Path | None = None

    def pairs(self) -> Iterator[SentencePair]:
        """The pairs, with a space for each line break in a text, and an empty text for null.

        Raises:
            ValueError: A file is damaged, a field is missing or not a text, or there are no records; the
                message names the file, and the line or row.
            OSError: A file cannot be read.
        """
        place = ""
        for place, record in self._records():
            try:
                source = self._source(_field(record, self.source_field))
                targets = _field(record, self.target_field)
                for target in targets if isinstance(targets, list) else [targets]:
                    yield SentencePair(source, _text(target, self.target_field))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        if not place:
            raise ValueError(f"{self.path} has 0 records: the corpus is empty")

    @cached_property
    def folder(self) -> Path:
        """The folder from which relative names of files start."""
        return data_files(self.path)[0].parent.resolve()

    @property
    def has_media(self) -> bool:
        """Whether the first source is not a text but lies in its record."""
        for place, record in self._records():
            try:
                return not isinstance(_field(record, self.source_field), str | None)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        return False

    def _records(self) -> Iterator[tuple[str, Record]]:
        """Each record with its place, for errors."""
        columns = [self.source_field, self.target_field]
        for file in data_files(self.path):
            if file.suffix in (_PARQUET, _ARROW):
                yield from _iterate_table(file, columns)
            else:
                yield from _iterate_json_lines(file)

    def _source(self, value: Any) -> str:
        if self.media is None or isinstance(value, str | None):
            return _text(value, self.source_field)
        content, suffix = value, ""
        if isinstance(value, Mapping):  # as `datasets` stores sounds and pictures
            content, name = value.get("bytes"), value.get("path")
            if content is None and name:
                return str(self.folder / name)
            suffix = Path(name or "").suffix
        if isinstance(content, list):
            content, suffix = _array_file(content, self.source_field), ".npy"
        if not isinstance(content, bytes):
            raise ValueError(f"{self.source_field} is {_named(value)}, and must be a text, bytes or a matrix")
        file = self.media / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}{suffix}"
        if not file.is_file() or file.stat().st_size != len(content):
            self.media.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return str(file.relative_to(self.media.parent))


def data_files(path: str) -> list[Path]:
    """The files of a corpus of records, in their order.

    Raises:
        ValueError: A folder has none, or they belong to several parts, such as `train` and `test`.
        OSError: A file cannot be read.
    """
    given = Path(path)
    if "*" in given.name and not given.exists():
        files = sorted(given.parent.glob(given.name)) or [given]  # which cannot be opened
    elif not given.is_dir():
        return [given]
    elif (given / _PARTS_FILE).is_file():
        parts = json.loads((given / _PARTS_FILE).read_text(encoding="utf-8"))["splits"]
        raise ValueError(
            f"{path} has the parts {', '.join(parts)}: give the folder of one, {given / parts[0]}"
        )
    elif (given / _STATE_FILE).is_file():
        state = json.loads((given / _STATE_FILE).read_text(encoding="utf-8"))
        return [given / file["filename"] for file in state["_data_files"]]
    else:
        files = sorted(given.glob(f"*{_PARQUET}"))
        if not files:
            raise ValueError(f"{path} is a folder without Parquet files, and `save_to_disk` did not write it")
    parts = list(dict.fromkeys(_SHARD.sub("", file.stem) for file in files if _SHARD.search(file.stem)))
    if len(parts) > 1:
        one = files[0].parent / f"{parts[0]}-*{_PARQUET}"
        raise ValueError(f"{path} has the parts {', '.join(parts)}: give the files of one, '{one}'")
    return files


def _iterate_json_lines(path: Path) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(iterate_lines(path), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: not JSON ({error})") from error
        if not isinstance(record, dict):
            advice = ' (`jq -c ".[]"` writes a list as lines)' if isinstance(record, list) else ""
            raise ValueError(f"{place}: {_named(record)}, and must be an object{advice}")
        yield place, record


def _iterate_table(path: Path, columns: list[str]) -> Iterator[tuple[str, Record]]:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ModuleNotFoundError as error:
        raise ValueError(f"{path}: {error.name} is missing: {install_command('parquet')}") from error
    number = 0
    with path.open("rb") as opened:
        try:
            if path.suffix == _PARQUET:
                file = parquet.ParquetFile(opened)
                schema = file.schema_arrow
            else:
                file = ipc.open_stream(pyarrow.memory_map(str(path)))
                schema = file.schema
            kept = []
            for name in columns:
                column = name if name in schema.names else name.partition(".")[0]
                if column not in schema.names:
                    fields = {field.name: dict.fromkeys(_children(field.type)) for field in schema}
                    raise ValueError(f"{path}: {_missing(name, fields)}")
                kept.append(column)
            kept = list(dict.fromkeys(kept))
            batches = (
                file.iter_batches(_ROWS_AT_ONCE, columns=kept)
                if path.suffix == _PARQUET
                else (batch.select(kept) for batch in file)
            )
            for batch in batches:
                for start in range(0, len(batch), _ROWS_AT_ONCE):
                    for record in batch.slice(start, _ROWS_AT_ONCE).to_pylist():
                        number += 1
                        yield f"{path}, row {number}", record
        except (pyarrow.ArrowException, OSError) as error:
            what = "Parquet" if path.suffix == _PARQUET else "Arrow stream"
            after = f", after row {number}" if number else ""
            raise ValueError(f"{path}{after}: not a whole file of {what} ({error})") from error


def _field(record: Record, name: str) -> Any:
    if name in record:
        return record[name]
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(_missing(name, record))
        value = value[part]
    return value


def _missing(name: str, record: Record) -> str:
    there = [
        f"{field}.{inner}" if inner else field
        for field, value in record.items()
        for inner in (value if isinstance(value, Mapping) and value else [""])
    ]
    return (
        f"no field {name}; there are {', '.join(there)} (--source-field and --target-field name the fields)"
    )


def _children(kind: Any) -> list[str]:
    """The fields of a column of Arrow that holds objects."""
    return (
        [kind.field(place).name for place in range(kind.num_fields)] if str(kind).startswith("struct") else []
    )


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str | None):
        inner = (
            f": name one of its fields, such as {name}.{next(iter(value))}" if isinstance(value, dict) else ""
        )
        raise ValueError(f"{name} is {_named(value)}, and must be a text{inner}")
    text = _LINE_BREAKS.sub(" ", value or "")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a character of UTF-16 (\\u{ord(text[error.start]):04x})"
        ) from error
    return text


def _array_file(content: list[Any], name: str) -> bytes:
    try:
        array = np.array(content, np.float32)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is not a matrix of numbers ({error})") from error
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _named(value: Any) -> str:
    """Returns the kind of a value in the words of JSON."""
    names = {
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), f"a {type(value).__name__}")
