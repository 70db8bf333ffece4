"""Reads and writes Word files (.docx): archives of XML, and of pictures that are copied as they are."""

from __future__ import annotations

import codecs
import copy
import html
import io
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.parsers import expat

from seq2seq_serve.documents.markup import Flows
from seq2seq_serve.documents.segments import (
    MAX_BYTES,
    MAX_MARKS,
    Document,
    WrongFile,
    check_marks,
    wrong_file,
)

MAX_UNPACKED_BYTES = 64 * 2**20  # of the parts of a file; more if the file has a tenth of them

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main "
_WORD_PARTS = re.compile(r"word/((document|header|footer)\d*|comments|footnotes|endnotes)\.xml")
_STYLES = "word/styles.xml"
# What a run or paragraph has beside texts and their properties separates the texts before and after it.
_AROUND_TEXTS = frozenset(f"{_W}{name}" for name in ("r", "hyperlink", "ins", "smartTag"))
_RUN = f"{_W}r"  # has a formatting; all others are there once
_BESIDE_TEXTS = {  # and whether a range begins or ends there
    f"{_W}{name}": begins
    for begins, names in (
        (True, ("bookmarkStart", "commentRangeStart")),
        (False, ("bookmarkEnd", "commentRangeEnd")),
        (None, ("commentReference", "endnoteReference", "footnoteReference", "lastRenderedPageBreak")),
        (None, ("proofErr",)),
    )
    for name in names
}
_PROPERTIES = frozenset([f"{_W}rPr", f"{_W}pPr"])
_TEXT = f"{_W}t"
_WORD_TAG = re.compile(r"<[^\s/>]+")
_LANGUAGE = re.compile(r"<w:lang\b[^>]*>")
# The attribute of texts in scripts other than those of Europe
_SCRIPT_ATTRIBUTES = dict.fromkeys(("ja", "ko", "zh"), "w:eastAsia") | dict.fromkeys(
    ("ar", "ckb", "dv", "fa", "he", "ps", "sd", "ug", "ur", "yi"), "w:bidi"
)
_PROLOG, _BEGIN, _END = range(3)  # what a part has at a place


class WordDocument(Document):
    """Word (.docx): each paragraph is a segment, in the body, tables, headers, notes and comments.

    Attributes:
        num_bytes: The length of the parts with texts, unpacked.
    """

    def __init__(
        self, content: bytes, path: Path, max_marks: int = MAX_MARKS, max_bytes: int = MAX_BYTES
    ) -> None:
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(content))
            members = self._archive.infolist()
            self.num_bytes = _check_sizes(members, len(content), path, max_bytes)
            if damaged := self._archive.testzip():
                raise wrong_file(path, f"the part {damaged} of the file is damaged")
            parts = {one.filename: self._archive.read(one) for one in members if _is_text_part(one)}
        except WrongFile:
            raise
        except Exception as error:  # the library raises errors of many classes for damaged files
            raise wrong_file(path, "the file is not a Word document (.docx), or is damaged") from error
        check_marks(parts.values(), path, max_marks)
        if "word/document.xml" not in parts:
            raise wrong_file(path, "the file is not a Word document (.docx)")
        self._parts = {name: _WordPart(part, path, name) for name, part in parts.items()}
        self.segments = [segment for part in self._parts.values() for segment in part.flows.segments]

    def content(self) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as written:
            for member in self._archive.infolist():
                copied = copy.copy(member)
                copied.extra = b""  # such as sizes, which are written anew
                content = None
                if part := self._parts.get(member.filename):
                    content = part.content(self.target_language)
                elif member.filename == _STYLES and self.target_language:
                    styles = self._archive.read(member).decode("utf-8", "surrogateescape")
                    content = _in_language(styles, self.target_language).encode("utf-8", "surrogateescape")
                if content is not None:
                    copied.file_size = len(content)
                    written.writestr(copied, content)
                else:
                    with self._archive.open(member) as source, written.open(copied, "w") as target:
                        shutil.copyfileobj(source, target)
        return stream.getvalue()


def _is_text_part(member: zipfile.ZipInfo) -> bool:
    return _WORD_PARTS.fullmatch(member.filename) is not None


def _check_sizes(members: Sequence[zipfile.ZipInfo], num_bytes: int, path: Path, max_bytes: int) -> int:
    """Returns the length of the parts with texts, unpacked. The library reads no more than that.

    Raises:
        WrongFile: The parts are too long, far longer than the file, or not different ones.
    """
    if len({member.filename for member in members}) < len(members):
        raise wrong_file(path, "two parts of the file have the same name")
    num_text_bytes = sum(member.file_size for member in members if _is_text_part(member))
    for size, limit in (
        (sum(member.file_size for member in members), max(MAX_UNPACKED_BYTES, 10 * num_bytes)),
        (num_text_bytes, max_bytes),
    ):
        if size > limit:
            what = f"has {num_bytes} bytes, and {size} unpacked: at most {limit} are read"
            raise wrong_file(path, f"the file {what}: remove large pictures, or split it")
    return num_text_bytes


def _in_language(markup: str, language: str) -> str:
    """Returns markup with the language of its texts, where it has one, replaced by another one."""
    if not language:
        return markup
    name = _SCRIPT_ATTRIBUTES.get(language.partition("-")[0], "w:val")
    value = f'{name}="{html.escape(language)}"'

    def changed(tag: re.Match[str]) -> str:
        others = re.sub(rf"\s{name}\s*=\s*(\"[^\"]*\"|'[^']*')", "", tag[0])
        return others.replace("<w:lang", f"<w:lang {value}", 1)

    return _LANGUAGE.sub(changed, markup)


class _WordPart:
    """A part of a Word document. Owned by the document.

    Everything between two events of the parser belongs to the first one: a tag, and the text after it.
    """

    def __init__(self, content: bytes, path: Path, name: str) -> None:
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        self._encoding = "utf-16" if is_utf16 else "utf-8"
        self.flows = Flows()
        self._kind, self._name, self._begin = _PROLOG, "", 0
        self._texts: list[str] = []  # after the tag
        self._text_begin = 0
        self._held: tuple[str, str, str] | None = None  # the tag of a text, its content, and both as written
        self._depth = 0  # within properties
        self._properties: list[str] = []

        def refuse(*_: object) -> None:
            text = "has a DOCTYPE, which may declare entities, and which Word does not write: remove it"
            raise wrong_file(path, f"its part {name} {text}")

        try:
            self._content = content.decode(self._encoding).encode()
            parser = self._parser = expat.ParserCreate("UTF-8", " ")
            parser.StartElementHandler = lambda name, _: self._start(_BEGIN, name)
            parser.EndElementHandler = lambda name: self._start(_END, name)
            parser.CharacterDataHandler = self._add_text
            parser.StartDoctypeDeclHandler = refuse
            parser.Parse(self._content, True)
        except (UnicodeError, expat.ExpatError) as error:
            raise wrong_file(path, f"its part {name} is not XML: {error}") from error
        self._finish(len(self._content))
        self.flows.end()
        del self._parser, self._content

    def content(self, language: str) -> bytes:
        """Returns the part with the texts as they are now, as texts of a language if that is known."""
        return _in_language(self.flows.written(), language).encode(self._encoding)

    def _start(self, kind: int, name: str) -> None:
        place = self._parser.CurrentByteIndex
        self._finish(place)
        self._kind, self._name, self._begin = kind, name, place
        self._texts = []

    def _add_text(self, text: str) -> None:
        if not self._texts:
            self._text_begin = self._parser.CurrentByteIndex
        self._texts.append(text)

    def _finish(self, end: int) -> None:
        """Adds a tag, and the text after it."""
        flows, kind, name = self.flows, self._kind, self._name
        markup = self._content[self._begin : end].decode()
        if self._held is not None:
            tag, text, written = self._held
            self._held = None
            if kind == _END and name == _TEXT:
                flows.add_text(written + markup, text, (tag, markup))
                return
            flows.end(written)  # it has elements inside
        if name in _PROPERTIES or self._depth:
            self._depth += 1 if kind == _BEGIN else -1
            self._properties.append(markup)
            if not self._depth:
                flows.extend("".join(self._properties))
                self._properties.clear()
        elif name == _TEXT and kind == _BEGIN and self._texts:
            tag = self._content[self._begin : self._text_begin].decode()
            if "xml:space" not in tag:
                tag = _WORD_TAG.sub(r'\g<0> xml:space="preserve"', tag, count=1)
            self._held = tag, "".join(self._texts), markup
        elif name == _TEXT or name in _BESIDE_TEXTS:
            flows.add_markup(markup, begins=_BESIDE_TEXTS.get(name) if kind == _BEGIN else None)
        elif name in _AROUND_TEXTS:
            if kind == _BEGIN:
                flows.open(markup, name, is_single=name != _RUN, is_run=name == _RUN)
            else:
                flows.close(markup, name)
        else:
            flows.end(markup)
