"""Reads the texts of XML files as a stream, such as translation memories and term bases.

Files come from anywhere: the time is in proportion to the size of a file, and the memory to that of its
longest text. No declaration of a file is obeyed, so no entity grows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar
from xml.parsers import expat

from seq2seq_serve.client.files.lines import read_blocks
from seq2seq_serve.documents.segments import WrongFile, wrong_file

MAX_XML_BYTES = 2 * 2**30  # of a file, decompressed
_MAX_DEPTH = 100  # of elements in elements
_MAX_TEXT = 4 * 2**20  # characters of a text: no request is longer
_MAX_TAG_BYTES = 4 * 2**20  # of a tag or comment, which the parser reads again with each block


class TextElements(ABC):
    """The texts of a file of XML. Owned by the function that reads it.

    Class attributes:
        roots: The names that the outermost element may have.
        text_names: The elements whose texts are read.
        codes: The elements inside of them whose content is not text.
    """

    roots: ClassVar[Collection[str]]
    text_names: ClassVar[Collection[str]]
    codes: ClassVar[Collection[str]] = frozenset({"bpt", "ept", "ph", "it", "ut"})

    def __init__(self, path: Path) -> None:
        self._path = path
        self._depth = 0
        self._text: list[str] | None = None  # of the present element of `text_names`, in pieces
        self._text_depth = self._code_depth = 0
        self._num_characters = 0
        parser = self._parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._check_declarations
        parser.SkippedEntityHandler = self._refuse_entity
        parser.StartElementHandler = self._begin
        parser.EndElementHandler = self._end

    def read(self) -> None:
        """Reads the file.

        Raises:
            OSError: The file cannot be read, is too large, or is not what it must be.
        """
        num_bytes = 0
        try:
            for block in read_blocks(self._path, MAX_XML_BYTES):
                self._parser.Parse(block, False)
                num_bytes += len(block)
                if num_bytes - self._parser.CurrentByteIndex > _MAX_TAG_BYTES:
                    raise self._wrong(f"a tag or comment has more than {_MAX_TAG_BYTES} bytes")
            self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise wrong_file(self._path, f"the file is not XML: {error}") from error
        finally:
            del self._parser  # whose handlers are methods of this object

    @property
    def line(self) -> int:
        """The line of the file that is read now."""
        return self._parser.CurrentLineNumber

    @abstractmethod
    def begin(self, name: str, attributes: dict[str, str]) -> None:
        """Takes the beginning of a text, or of an element outside of the texts."""

    @abstractmethod
    def end(self, name: str) -> None:
        """Takes the end of an element outside of the texts."""

    @abstractmethod
    def take(self, text: str) -> None:
        """Takes the text of an element, without white space around it."""

    def _wrong(self, text: str) -> WrongFile:
        return wrong_file(self._path, f"line {self.line}: {text}")

    def _check_declarations(self, _: str, __: str | None, ___: str | None, has_own: int) -> None:
        if has_own:
            raise self._wrong("the DOCTYPE has declarations, which are not read: remove them")

    def _refuse_entity(self, name: str, _: bool) -> None:
        raise self._wrong(f"the entity &{name[:20]}; is not known: write the character")

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        if not self._depth and name not in self.roots:
            raise self._wrong(f"the file is not <{'> or <'.join(self.roots)}>, but <{name[:20]}>")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._wrong(f"the file has more than {_MAX_DEPTH} elements inside each other")
        if self._text is not None:
            if name in self.codes and not self._code_depth:
                self._code_depth = self._depth
                self._parser.CharacterDataHandler = None
            return
        self.begin(name, attributes)
        if name in self.text_names:
            self._text, self._text_depth, self._num_characters = [], self._depth, 0
            self._parser.CharacterDataHandler = self._collect

    def _end(self, name: str) -> None:
        if self._text is None:
            self.end(name)
        elif self._depth == self._text_depth:
            text = "".join(self._text).strip()
            self._text, self._parser.CharacterDataHandler = None, None
            self.take(text)
        elif self._depth == self._code_depth:
            self._code_depth = 0
            self._parser.CharacterDataHandler = self._collect
        self._depth -= 1

    def _collect(self, text: str) -> None:
        assert self._text is not None
        self._text.append(text)
        self._num_characters += len(text)
        if self._num_characters > _MAX_TEXT:
            raise self._wrong(f"a text has more than {_MAX_TEXT} characters")
