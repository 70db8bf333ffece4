"""Reads and writes archives of XML (zip): some parts have texts, and all others are copied as they are."""

from __future__ import annotations

import copy
import io
import shutil
import zipfile
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from seq2seq_serve.documents.elements import BEGIN, Event, decoded_xml, events
from seq2seq_serve.documents.segments import (
    MAX_BYTES,
    MAX_MARKS,
    Document,
    WrongFile,
    check_marks,
    wrong_file,
)

MAX_UNPACKED_BYTES = 64 * 2**20  # of the parts of a file; more if the file has a tenth of them


class Archive(Document):
    """An archive of XML. Its parts with texts are documents of their own.

    Attributes:
        kind: What the file is, for errors.
        needed: The name of a part that each such file has.
        num_bytes: The length of the parts with texts, unpacked.
    """

    kind: ClassVar[str]
    needed: ClassVar[str]

    def __init__(
        self, content: bytes, path: Path, max_marks: int = MAX_MARKS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._path, self._max_bytes, self._num_file_bytes = path, max_bytes, len(content)
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(content))
            members = self._archive.infolist()
            self._sizes = {member.filename: member.file_size for member in members}
            if len(self._sizes) < len(members):
                raise wrong_file(path, "two parts of the file have the same name")
            self._check_size(sum(self._sizes.values()), max(MAX_UNPACKED_BYTES, 10 * len(content)))
            if damaged := self._archive.testzip():
                raise wrong_file(path, f"the part {damaged} of the file is damaged")
            if self.needed not in self._sizes:
                raise wrong_file(path, f"the file is not {self.kind}")
            names = [name for name in self._names_of_texts() if name in self._sizes]
            self.num_bytes = sum(self._sizes[name] for name in names)
            self._check_size(self.num_bytes, max_bytes)
            texts = {name: self._archive.read(name) for name in names}
        except WrongFile:
            raise
        except Exception as error:  # the library raises errors of many classes for damaged files
            raise wrong_file(path, f"the file is not {self.kind}, or is damaged") from error
        check_marks(texts.values(), path, max_marks)
        self._parts = {name: self._part(name, text) for name, text in texts.items()}
        self.segments = [segment for part in self._parts.values() for segment in part.segments]

    def _check_size(self, size: int, limit: int) -> None:
        """Raises WrongFile if parts say that they have too many bytes, unpacked. No more are read."""
        if size > limit:
            what = f"has {self._num_file_bytes} bytes, and {size} unpacked: at most {limit} are read"
            raise wrong_file(self._path, f"the file {what}: remove large pictures, or split it")

    def _elements(self, name: str) -> Iterator[Event]:
        """Yields the elements of a part."""
        self._check_size(self._sizes[name], self._max_bytes)
        _, text = decoded_xml(self._archive.read(name), self._path, name)
        return (event for event in events(text, self._path, name) if event.kind == BEGIN)

    @abstractmethod
    def _names_of_texts(self) -> Iterable[str]:
        """Returns the names of the parts that have texts, some of which may not be there."""

    @abstractmethod
    def _part(self, name: str, content: bytes) -> Document:
        """Returns a part that has texts."""

    def content(self) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as written:
            for member in self._archive.infolist():
                copied = copy.copy(member)
                copied.extra = b""  # such as sizes, which are written anew
                content = self._changed(member.filename)
                if content is not None:
                    copied.file_size = len(content)
                    written.writestr(copied, content)
                else:
                    with self._archive.open(member) as source, written.open(copied, "w") as target:
                        shutil.copyfileobj(source, target)
        return stream.getvalue()

    def _changed(self, name: str) -> bytes | None:
        """Returns what a part is now; None if it stays."""
        part = self._parts.get(name)
        if part is None:
            return None
        part.target_language = self.target_language
        return part.content()
