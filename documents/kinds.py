"""The kinds of documents, by the suffixes of their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seq2seq_serve.documents.archive import Archive
from seq2seq_serve.documents.bilingual import QtTranslations, TmxDocument, Xliff
from seq2seq_serve.documents.catalogs import AppleStrings, JsonCatalog, Properties, YamlCatalog
from seq2seq_serve.documents.markdown import MarkdownDocument
from seq2seq_serve.documents.messages import Messages
from seq2seq_serve.documents.office import Book, BookPage, OpenDocument, Slides, Spreadsheet
from seq2seq_serve.documents.page import HtmlDocument
from seq2seq_serve.documents.plain import Plain
from seq2seq_serve.documents.resources import AndroidStrings, AppleStringsDict, NetResources
from seq2seq_serve.documents.segments import (
    MAX_BYTES,
    MAX_MARKS,
    Document,
    check_is_not_ole,
    check_is_text,
    check_marks,
)
from seq2seq_serve.documents.styled import StyledSubtitles
from seq2seq_serve.documents.subtitles import Subtitles
from seq2seq_serve.documents.word import WordDocument

Kind = Callable[[bytes, Path], Document]

# They are read with two limits: of their tags and lines, and of the bytes of their texts, unpacked.
ARCHIVES: dict[str, type[Archive]] = {
    **dict.fromkeys((".docx", ".docm", ".dotx", ".dotm"), WordDocument),
    **dict.fromkeys((".pptx", ".pptm", ".potx", ".potm", ".ppsx", ".ppsm"), Slides),
    **dict.fromkeys((".xlsx", ".xlsm", ".xltx", ".xltm"), Spreadsheet),
    **dict.fromkeys((".odt", ".ods", ".odp", ".ott", ".ots", ".otp"), OpenDocument),
    ".epub": Book,
}
# Of programs, where placeholders such as %s and {name} stay as they are
SOFTWARE: dict[str, Kind] = {
    ".po": Messages,
    ".xliff": Xliff,
    ".xlf": Xliff,
    ".ts": QtTranslations,
    ".xml": AndroidStrings,
    ".resx": NetResources,
    ".properties": Properties,
    ".strings": AppleStrings,
    ".stringsdict": AppleStringsDict,
    ".json": JsonCatalog,
    ".arb": JsonCatalog,
    ".yaml": YamlCatalog,
    ".yml": YamlCatalog,
}
DOCUMENTS: dict[str, Kind] = {
    ".srt": Subtitles,
    ".vtt": Subtitles,
    ".ass": StyledSubtitles,
    ".ssa": StyledSubtitles,
    ".html": HtmlDocument,
    ".htm": HtmlDocument,
    ".xhtml": BookPage,
    **ARCHIVES,
    ".md": MarkdownDocument,
    ".markdown": MarkdownDocument,
    ".tmx": TmxDocument,
    **SOFTWARE,
}
# The same, and files of lines, which the client sends line by line
FILES: dict[str, Kind] = {".txt": Plain} | DOCUMENTS
# What separates texts there, besides tags and lines
_MARKS = {
    **dict.fromkeys((".ass", ".ssa"), (b"{", b"\\")),
    **dict.fromkeys((".md", ".markdown"), (b"[", b"*", b"_", b"`", b"|", b"~", b"&", b"\\", b">")),
    **dict.fromkeys((".json", ".arb", ".strings"), (b'"', b"[", b"{")),
    **dict.fromkeys((".yaml", ".yml"), (b",", b"[", b"{")),
}


def read_file(
    suffix: str, content: bytes, path: Path, max_marks: int = MAX_MARKS, max_bytes: int = MAX_BYTES
) -> Document:
    """Returns the document in a file.

    Args:
        suffix: Its kind, one of `FILES`.
        content: The file.
        path: Its name.
        max_marks: How many tags and lines are read.
        max_bytes: How long the texts of an archive may be, unpacked.

    Raises:
        WrongFile: The file is too large, or not one of its kind. Some of that is found only by reading its
            parts, which raises the same.
    """
    if archive := ARCHIVES.get(suffix):
        check_is_not_ole(content, path)
        return archive(content, path, max_marks, max_bytes)
    check_is_text(content, path)
    check_marks([content], path, max_marks, _MARKS.get(suffix, ()))
    return FILES[suffix](content, path)
