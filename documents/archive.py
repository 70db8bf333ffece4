"""Reads and writes archives of XML (zip): some parts have texts, and all others are copied as they are."""

from __future__ import annotations

import copy
import io
import re
import shutil
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from seq2seq_serve.documents.elements import BEGIN, Event, decoded_xml, events
from seq2seq_serve.documents.segments import (
    MAX_BYTES,
    MAX_MARKS,
    Document,
    Output,
    Part,
    WrongFile,
    check_marks,
    suffix_of,
    wrong_file,
)

MAX_UNPACKED_BYTES = 64 * 2**20  # of the parts of a file; more if the file has a tenth of them


class Archive(Document):
    """An archive of XML. Its parts with texts are documents of their own.

    Attributes:
        kind: What the file is, for errors, which add its suffix.
        needed: The name of a part that each such file has, as a regular expression.
        archive: The file.
        num_bytes: The length of the parts with texts, unpacked.
    """

    kind: ClassVar[str]
    needed: ClassVar[str]

    def __init__(
        self, content: bytes, path: Path, max_marks: int = MAX_MARKS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path, self._max_bytes, self._num_file_bytes = path, max_bytes, len(content)
        kind = f"{self.kind} ({suffix_of(path)})"
        try:
            self.archive = zipfile.ZipFile(io.BytesIO(content))
            members = self.archive.infolist()
            self._sizes = {member.filename: member.file_size for member in members}
            if len(self._sizes) < len(members):
                raise wrong_file(path, "two parts of the file have the same name")
            self._check_size(sum(self._sizes.values()), max(MAX_UNPACKED_BYTES, 10 * len(content)))
            if damaged := self.archive.testzip():
                raise wrong_file(path, f"the part {damaged} of the file is damaged")
            if not any(re.fullmatch(self.needed, name) for name in self._sizes):
                raise wrong_file(path, f"the file is not {kind}")
            names = [name for name in self._names_of_texts() if name in self._sizes]
            self.num_bytes = sum(self._sizes[name] for name in names)
            self._check_size(self.num_bytes, max_bytes)
            self._names = frozenset(names)
            check_marks(map(self.archive.read, names), path, max_marks)
        except WrongFile:
            raise
        except Exception as error:  # the library raises errors of many classes for damaged files
            raise wrong_file(path, f"the file is not {kind}, or is damaged") from error

    def _check_size(self, size: int, limit: int) -> None:
        """Raises WrongFile if parts say that they have too many bytes, unpacked. No more are read."""
        if size > limit:
            what = f"has {self._num_file_bytes} bytes, and {size} unpacked: at most {limit} are read"
            raise wrong_file(self._path, f"the file {what}: remove large pictures, or split it")

    def _elements(self, name: str) -> Iterator[Event]:
        """Yields the elements of a part."""
        self._check_size(self._sizes[name], self._max_bytes)
        _, content = decoded_xml(self.archive.read(name), self._path, name)
        return (event for event in events(content, self._path, name) if event.kind == BEGIN)

    @abstractmethod
    def _names_of_texts(self) -> Iterable[str]:
        """Returns the names of the parts that have texts, some of which may not be there."""

    @abstractmethod
    def _part(self, name: str, content: bytes) -> Document:
        """Returns a part that has texts."""

    def changed_member(self, name: str) -> bytes | None:  # noqa: ARG002
        """Returns what a part without texts is now; None if it stays."""
        return None

    def parts(self) -> Iterator[Part]:
        for member in self.archive.infolist():
            name = member.filename
            document = self._part(name, self.archive.read(name)) if name in self._names else None
            yield _Member((), str, member, document)
            if document is not None:
                document.source_language = self.source_language
                yield from document.parts()

    def output(self, stream: IO[bytes]) -> Output:
        return _ArchiveOutput(self, stream)


@dataclass(slots=True)
class _Member(Part):
    """The place where a member of an archive begins.

    Attributes:
        member: Its name, and how it is packed.
        document: What reads its texts, whose parts follow; None if it has none.
    """

    member: zipfile.ZipInfo
    document: Document | None


class _UnfinishedZip(zipfile.ZipFile):
    """An archive that is written, and may be dropped before its end."""

    def __del__(self) -> None:
        """Does not write the end, as its base does."""


class _ArchiveOutput(Output):
    """Writes an archive. Owned by the caller of `output`."""

    def __init__(self, archive: Archive, stream: IO[bytes]) -> None:
        self._archive = archive
        self._written = _UnfinishedZip(stream, "w")
        self._member: tuple[IO[bytes], Output] | None = None

    def add(self, part: Part) -> None:
        if isinstance(part, _Member):
            self._end_member()
            self._begin(part)
        elif self._member is not None:
            self._member[1].add(part)

    def close(self) -> None:
        self._end_member()
        self._written.close()

    def _begin(self, begin: _Member) -> None:
        copied = copy.copy(begin.member)
        copied.extra = b""  # such as sizes, which are written anew
        document, changed = begin.document, self._archive.changed_member(copied.filename)
        if document is not None:
            document.target_language = self._archive.target_language
            stream = self._written.open(copied, "w")
            self._member = stream, document.output(stream)
        elif changed is not None:
            self._written.writestr(copied, changed)
        else:
            source = self._archive.archive.open(begin.member)
            with source, self._written.open(copied, "w") as target:
                shutil.copyfileobj(source, target)

    def _end_member(self) -> None:
        if self._member is not None:
            stream, output = self._member
            output.close()
            stream.close()
            self._member = None
