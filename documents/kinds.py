"""The kinds of documents, by the suffixes of their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seq2seq_serve.documents.messages import Messages
from seq2seq_serve.documents.page import HtmlDocument
from seq2seq_serve.documents.plain import Plain
from seq2seq_serve.documents.segments import Document
from seq2seq_serve.documents.subtitles import Subtitles
from seq2seq_serve.documents.word import WordDocument

Kind = Callable[[bytes, Path], Document]

DOCUMENTS: dict[str, Kind] = {
    ".srt": Subtitles,
    ".vtt": Subtitles,
    ".html": HtmlDocument,
    ".htm": HtmlDocument,
    ".docx": WordDocument,
    ".po": Messages,
}
# The same, and files of lines, which the client sends line by line
FILES: dict[str, Kind] = {".txt": Plain} | DOCUMENTS
