"""Reads documents, and writes them anew with translated texts: subtitles, HTML, Word and gettext files.

A `Document` has segments, the texts that are translated by themselves: a subtitle, the text of a paragraph, a
message. A segment has pieces, one for each part of it with a formatting of its own, such as a link or bold
words. Everything else in the file stays as it is. This module does not know how texts are translated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seq2seq_serve.client.files.lines import COMPRESSED, read_whole, wrong_file
from seq2seq_serve.client.files.messages import Messages
from seq2seq_serve.client.files.page import Page
from seq2seq_serve.client.files.segments import MAX_BYTES, Document, check_marks
from seq2seq_serve.client.files.subtitles import Subtitles
from seq2seq_serve.client.files.word import MAX_UNPACKED_BYTES, Word

DOCUMENTS: dict[str, Callable[[bytes, Path], Document]] = {
    ".srt": Subtitles,
    ".vtt": Subtitles,
    ".html": Page,
    ".htm": Page,
    ".docx": Word,
    ".po": Messages,
}


def document_suffix(path: Path) -> str:
    """Returns the suffix of a document, also of a compressed one; empty for other files."""
    suffix = Path(path.name.lower().removesuffix(COMPRESSED)).suffix
    return suffix if suffix in DOCUMENTS else ""


def read_document(path: Path) -> Document:
    """Returns the document of a file, by its suffix.

    Raises:
        OSError: The file cannot be read, is too large, or is not what its name says.
    """
    read = DOCUMENTS[document_suffix(path)]
    limit = max(MAX_UNPACKED_BYTES, 10 * path.stat().st_size) if read is Word else MAX_BYTES
    content = read_whole(path, limit + 1)
    if len(content) > limit:
        raise wrong_file(path, f"the file has more than {limit} bytes, the most of a document: split it")
    if read is not Word:
        check_marks([content], path)
    return read(content, path)
