"""Reads the texts of a shard, and writes its targets: lines of text or JSON, Parquet, or a document."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from seq2seq_serve.bundle.files import sync_folder
from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.files.documents import DocumentTranslation, document_suffix, read_document
from seq2seq_serve.client.files.lines import open_binary, read_lines, text_of
from seq2seq_serve.client.files.plan import (
    DOCUMENT,
    ERRORS_FOLDER,
    JSONL,
    PARQUET,
    SUFFIXES,
    TEXT,
    JobError,
    Shard,
    atomic_write,
)
from seq2seq_serve.client.output import answer_json, answer_lines, error_dict, to_json, valid_unicode
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.commands import needs_extra
from seq2seq_serve.documents.kinds import DOCUMENTS
from seq2seq_serve.documents.segments import COMPRESSED, suffix_of
from seq2seq_serve.documents.terms import NO_TERMS, WholeTerms

FORMATS = (TEXT, JSONL, PARQUET)
ANSWERS = "answers"  # whole answers as lines of JSON, without the records of the input
_OF_OUTPUT = {TEXT: ".txt", JSONL: ".jsonl", PARQUET: ".parquet", ANSWERS: ".jsonl", DOCUMENT: ""}
_REFUSED = {
    **dict.fromkeys((".zst", ".xz", ".bz2", ".zip"), "decompress it, or compress it with gzip"),
    **dict.fromkeys((".tar", ".tgz", ".7z"), "unpack it"),
    **dict.fromkeys((".csv", ".tsv"), "write the column to a file of its own, such as with `cut -f 1`"),
}
# Corpora are named by their languages: corpus.ko, news.pt_BR, test.zho_Hans (not .ts, which is a file of Qt)
_LANGUAGES = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el
en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu
ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na
nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so
sq sr ss st su sv sw ta te tg th ti tk tl tn to tr tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
_LANGUAGE_SUFFIX = re.compile(
    rf"\.(?:(?:{'|'.join(_LANGUAGES.split())})(?:[-_]\w+)?|[a-z]{{3}}_[a-z]{{4}})", re.IGNORECASE
)
_NEWER = {".doc": ".docx", ".rtf": ".docx", ".xls": ".xlsx", ".ppt": ".pptx", ".pdf": ".docx"}
_MAX_SHARDS = 1_000_000  # of a table
_MAX_BYTES = 16 * 2**20  # after which a shard ends with its line


@dataclass(frozen=True)
class Lines:
    """The content of a shard.

    Attributes:
        texts: The text of each line, or why it cannot be used; without those of a document.
        records: The record of each line, once: objects of JSON as they were read, a table of Arrow, or None.
        names: The names of their fields.
        document: What has the texts of a document.
    """

    texts: list[str | ClientError]
    records: Any
    names: set[str]
    document: DocumentTranslation | None = None

    def batches(self) -> Iterator[Sequence[str | ClientError]]:
        """Yields all texts, some at a time."""
        return iter([self.texts]) if self.document is None else self.document.texts()


def check_kind(path: Path, *, is_text: bool = False) -> None:
    """Raises JobError if the name of a file does not say how to read it.

    Args:
        path: The file.
        is_text: Whether a file of an unknown kind has a text on each line.
    """
    suffix = suffix_of(path)
    if suffix in SUFFIXES or document_suffix(path):
        if is_text and suffix != ".txt":
            raise JobError(
                f"{path}: --as text is for files of unknown kinds: leave it out, or rename the file"
            )
    elif not (is_text or not suffix or _LANGUAGE_SUFFIX.fullmatch(suffix)):
        format_of(path)  # it may have a better advice
        known = ", ".join([*SUFFIXES, *DOCUMENTS])
        newer = _NEWER.get(suffix)
        advice = f"save it as {newer}" if newer else "give --as text if each of its lines is a text"
        raise JobError(
            f"{path}: the kind {suffix} is not known: {advice}. Known are {known}, and names of languages "
            "such as .ko"
        )


def format_of(path: Path) -> str:
    """Returns the format of a file by its name; text if the name does not say it.

    Raises:
        JobError: Files of this kind cannot be read.
    """
    name = path.name.lower().removesuffix(COMPRESSED)
    for suffix, advice in _REFUSED.items():
        if name.endswith(suffix):
            raise JobError(f"{path}: {suffix} cannot be read: {advice}")
    return DOCUMENT if document_suffix(path) else SUFFIXES.get(Path(name).suffix, TEXT)


def check_formats(inputs: Sequence[Path], output: str | None, *, is_text: bool = False) -> str:
    """Returns the format of the output: the given one, or that of the inputs. Documents keep their own.

    Args:
        inputs: The files.
        output: The given format.
        is_text: Whether files of unknown kinds have a text on each line.

    Raises:
        JobError: An input cannot be read, or its kind is not known, the inputs have several formats and
            none is given for the output, or the output cannot have the given one.
    """
    for path in inputs:
        check_kind(path, is_text=is_text)
    formats = {format_of(path) for path in inputs}
    if formats == {DOCUMENT}:
        if output is not None:
            raise JobError("the outputs of documents are documents: leave out --format")
        return DOCUMENT
    formats.discard(DOCUMENT)
    if output is None and len(formats) > 1:
        raise JobError(f"the inputs are {' and '.join(sorted(formats))}: choose the output's --format")
    output = output or formats.pop()
    if output == PARQUET and formats - {PARQUET}:
        raise JobError("only Parquet inputs can have a Parquet output: give --format jsonl or text")
    return output


def split_into_shards(
    path: Path, name: str, shard_lines: int, languages: tuple[str, str] = ("", "")
) -> list[Shard]:
    """Reads an input once, and returns its shards.

    Args:
        path: The input.
        name: The name of its shards, to which their numbers are appended.
        shard_lines: The largest number of lines of a shard.
        languages: See `read_document`.

    Raises:
        OSError: The file cannot be read, or is a document in other languages.
        JobError: It is not a file of Parquet, as its name says.
    """
    if document_suffix(path):
        num_texts = sum(len(part.segments) for part in read_document(path, languages).parts())
        return [Shard(name, str(path), 0, num_texts, 0)]
    starts = _row_starts(path, shard_lines) if format_of(path) == PARQUET else _line_starts(path, shard_lines)
    num_digits = max(5, len(str(len(starts))))  # so that the names sort by their numbers
    return [
        Shard(f"{name}-{number:0{num_digits}}", str(path), line, end - line, byte)
        for number, ((line, byte), (end, _)) in enumerate(pairwise(starts))
    ]


def _row_starts(path: Path, shard_lines: int) -> list[tuple[int, int]]:
    with _open_parquet(path) as file:
        num_rows = file.metadata.num_rows
    if num_rows > _MAX_SHARDS * shard_lines:  # as its header says
        raise JobError(f"{path} has {num_rows} rows, more than {_MAX_SHARDS} shards: raise --shard-lines")
    return [(row, 0) for row in range(0, num_rows, shard_lines)] + [(num_rows, 0)]


def _line_starts(path: Path, shard_lines: int) -> list[tuple[int, int]]:
    """Returns the line and byte at which each shard begins, and those of the end."""
    starts, num_lines, num_bytes = [(0, 0)], 0, 0
    with open_binary(path) as stream:
        for line in read_lines(stream, path):
            first_line, first_byte = starts[-1]
            if num_lines - first_line == shard_lines or num_bytes - first_byte >= _MAX_BYTES:
                starts.append((num_lines, num_bytes))
            num_lines += 1
            num_bytes += len(line)
    return [*starts, (num_lines, num_bytes)] if num_lines else starts


class Reader:
    """Reads shards. Owned by a worker, which reads them one at a time.

    It keeps the last file of lines open, and the last group of rows, because the next shard usually follows
    there. Otherwise all that comes before would be decompressed again.
    """

    def __init__(
        self, text_field: str, languages: tuple[str, str] = ("", ""), terms: WholeTerms = NO_TERMS
    ) -> None:
        self._languages, self._terms = languages, terms
        self._field = text_field
        self._path = ""
        self._stream: BinaryIO | None = None
        self._group: tuple[str, int] = "", 0
        self._rows: Any = None

    def read(self, shard: Shard) -> Lines:
        """Returns the lines of a shard.

        Raises:
            OSError: The input cannot be read.
            JobError: The input has changed since it was planned, or does not have the text field.
        """
        try:
            kind = format_of(Path(shard.input))
            if kind == DOCUMENT:
                document = DocumentTranslation(
                    Path(shard.input), shard.num_lines, self._languages, self._terms
                )
                return Lines([], None, set(), document)
            return self._read_rows(shard) if kind == PARQUET else self._read_lines(shard)
        except BaseException:
            self.close()  # the next try opens the file again
            raise

    def _read_lines(self, shard: Shard) -> Lines:
        path = Path(shard.input)
        if self._stream is None or self._path != shard.input:
            self.close()
            self._path, self._stream = shard.input, open_binary(path)
        self._stream.seek(shard.first_byte)
        lines = list(islice(read_lines(self._stream, path, shard.first_line), shard.num_lines))
        if len(lines) < shard.num_lines:
            raise _changed(path)
        if format_of(path) == TEXT:
            plain = [
                text_of(line, is_first=number == 0) for number, line in enumerate(lines, shard.first_line)
            ]
            json_lines = (_json({self._field: valid_unicode(text)}) for text in plain)
            return Lines([*plain], json_lines, {self._field})
        if shard.first_line == 0:
            lines[0] = lines[0].removeprefix(BOM_UTF8)
        texts, records, names = list[str | ClientError](), list[bytes](), set[str]()
        for line in lines:  # a record takes up to twenty times the memory of its line: one at a time
            record = _parsed(line) if line.strip() else {self._field: ""}
            texts.append(self._text_of(record))
            if isinstance(record, ClientError):
                records.append(b"{}")
            else:
                records.append(line.strip() or b"{}")
                names.update(record)
        if names and self._field not in names:
            raise self._missing(path, names)
        return Lines(texts, records, names)

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

    def _text_of(self, record: dict[str, Any] | ClientError) -> str | ClientError:
        if isinstance(record, ClientError):
            return record
        if self._field not in record:
            return ClientError("INVALID_ARGUMENT", f"there is no field {self._field!r}")
        text = record[self._field]
        if not isinstance(text, str):
            return ClientError("INVALID_ARGUMENT", f"the field {self._field!r} is not a text: {text!r:.100}")
        return text

    def close(self) -> None:
        """Closes what is kept open."""
        if self._stream is not None:
            self._stream.close()
        self._stream = self._rows = None


def _changed(path: Path) -> JobError:
    return JobError(f"{path} has changed since the run was planned: it has fewer lines")


def _parsed(line: bytes) -> dict[str, Any] | ClientError:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ClientError("INVALID_ARGUMENT", f"not JSON: {error}")
    return record if isinstance(record, dict) else ClientError("INVALID_ARGUMENT", "not a JSON object")


@dataclass(frozen=True)
class Writer:
    """Writes shards.

    Attributes:
        folder: The output folder.
        format: The format of the files.
        target_field: The name of the new field; its score is in the field with `_score` appended.
        num_hypotheses: The number of hypotheses. Several are in the field with `_hypotheses` appended; in
            text, each has a line.
        languages: The tags of the languages of texts and targets, for documents; empty if they are not known.
    """

    folder: Path
    format: str
    target_field: str
    num_hypotheses: int = 1
    languages: tuple[str, str] = ("", "")

    def path(self, shard: Shard) -> Path:
        """Returns the file of a shard. It is there if the shard is done."""
        suffix = "" if document_suffix(Path(shard.input)) else _OF_OUTPUT[self.format]
        return self.folder / f"{shard.name}{suffix}"

    def is_done(self, shard: Shard) -> bool:
        """Whether a shard has been written."""
        return self.path(shard).exists()

    def failed(self, shard: Shard) -> dict[int, str]:
        """Returns the codes of the lines of a shard that failed when it was written, by their numbers."""
        path = self._errors_path(shard)
        errors = map(json.loads, path.read_bytes().splitlines()) if path.exists() else ()
        return {error["line"]: error["code"] for error in errors}

    def begin(self, lines: Lines) -> None:
        """Begins a shard; raises JobError if records already have a field of a new name."""
        if lines.document is not None:
            lines.document.begin(self.languages[1])
        for name in self._names:
            if self.format in (JSONL, PARQUET) and name in lines.names:
                raise JobError(f"an input already has a field {name!r}: choose another --target-field")

    def write(self, shard: Shard, lines: Lines, results: Mapping[int, Translated]) -> None:
        """Writes the targets of a shard, after its errors if there are any.

        A shard that was written before is removed first: a kill leaves no targets beside other errors.

        Args:
            shard: The shard.
            lines: Its content.
            results: Those of its lines, by their numbers from 1 on; of a document only those that failed.

        Raises:
            OSError: The output cannot be written.
            JobError: A value of a record cannot be written in the output's format.
        """
        errors = [
            {"input": shard.input, "line": number, **error_dict(result.error)}
            for number, result in results.items()
            if result.error is not None
        ]
        path, errors_path = self.path(shard), self._errors_path(shard)
        if path.exists():
            path.unlink()
            sync_folder(path.parent)
        if errors:
            with atomic_write(errors_path) as file:
                file.writelines(_json(error) + b"\n" for error in errors)
        else:
            errors_path.unlink(missing_ok=True)  # of a try that was killed
        with atomic_write(path) as file:
            if lines.document is not None:
                file.write(lines.document.content())
            elif self.format == PARQUET:
                _parquet().write_table(self._with_columns(lines.records, results.values()), file)
            elif self.format == JSONL:
                records = lines.records
                if hasattr(records, "to_pylist"):
                    records = (_json(row) for row in records.to_pylist())
                for record, result in zip(records, results.values(), strict=True):
                    file.write(_joined(record, _json(self._fields(result))) + b"\n")
            else:
                for number, result in results.items():
                    shown = (
                        [to_json(answer_json(result, number))]
                        if self.format == ANSWERS
                        else answer_lines(result, self.num_hypotheses)
                    )
                    file.writelines(f"{line}\n".encode() for line in shown)

    def _errors_path(self, shard: Shard) -> Path:
        return self.folder / ERRORS_FOLDER / f"{shard.name}.jsonl"

    def _fields(self, result: Translated) -> dict[str, Any]:
        hypotheses = [
            {"text": each.text, "score": each.score if each.HasField("score") else None}
            for each in result.answer.hypotheses
        ]
        best = hypotheses[0] if hypotheses else {"text": "", "score": None}
        values = (None, None, None) if result.error else (best["text"], best["score"], hypotheses)
        return dict(zip(self._names, values, strict=False))

    @property
    def _names(self) -> list[str]:
        """The names of the new fields."""
        ends = ("", "_score") if self.num_hypotheses == 1 else ("", "_score", "_hypotheses")
        return [self.target_field + end for end in ends]

    def _with_columns(self, table: Any, results: Collection[Translated]) -> Any:
        """Returns the table with the columns of the targets, which have equal types in every shard."""
        arrow = _pyarrow()
        text, score = arrow.string(), arrow.float32()
        kinds = (text, score, arrow.list_(arrow.struct({"text": text, "score": score})))
        for name, kind in zip(self._names, kinds, strict=False):
            values = [self._fields(result)[name] for result in results]
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
            f"a row has a value that JSON cannot represent ({error}): give --format parquet"
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
        raise JobError(f"{path} is not a Parquet file: {error}") from error
