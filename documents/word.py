"""Reads and writes Word files (.docx): archives of XML, and of pictures that are copied as they are."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from seq2seq_serve.documents.archive import Archive
from seq2seq_serve.documents.elements import Event, Names, XmlTexts, named
from seq2seq_serve.documents.segments import Document

_W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main "
_WORD_PARTS = re.compile(r"word/((document|header|footer)\d*|comments|footnotes|endnotes)\.xml")
_STYLES = "word/styles.xml"
_LANGUAGE = re.compile(r"<w:lang\b[^>]*>")
# The attribute of texts in scripts other than those of Europe
_SCRIPT_ATTRIBUTES = dict.fromkeys(("ja", "ko", "zh"), "w:eastAsia") | dict.fromkeys(
    ("ar", "ckb", "dv", "fa", "he", "ps", "sd", "ug", "ur", "yi"), "w:bidi"
)


class WordDocument(Archive):
    """Word (.docx): each paragraph is a segment, in the body, tables, headers, notes and comments."""

    kind, needed = "a Word document (.docx)", "word/document.xml"

    def _names_of_texts(self) -> Iterable[str]:
        return filter(_WORD_PARTS.fullmatch, self._sizes)

    def _part(self, name: str, content: bytes) -> Document:
        return _WordPart(content, self._path, name)

    def changed_member(self, name: str) -> bytes | None:
        if name != _STYLES or not self.target_language:
            return None
        styles = self.archive.read(name).decode("utf-8", "surrogateescape")
        return _in_language(styles, self.target_language).encode("utf-8", "surrogateescape")


class _WordPart(XmlTexts):
    """A part of a Word document. Every element except runs of texts and their properties separates texts."""

    names = Names(
        around=named(_W, "r hyperlink ins smartTag"),
        single=named(_W, "hyperlink ins smartTag"),
        runs=named(_W, "r"),
        beside=named(_W, "commentReference endnoteReference footnoteReference lastRenderedPageBreak")
        | named(_W, "proofErr bookmarkStart commentRangeStart bookmarkEnd commentRangeEnd"),
        begins=named(_W, "bookmarkStart commentRangeStart"),
        ends=named(_W, "bookmarkEnd commentRangeEnd"),
        texts=named(_W, "t"),
        properties=named(_W, "rPr pPr"),
        keeps_space=True,
    )

    def has_text(self, event: Event) -> bool:  # noqa: ARG002
        return not self.around

    def name_of(self, event: Event) -> str:
        return event.name

    def changed(self, markup: str) -> str:
        return _in_language(markup, self.target_language)


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
