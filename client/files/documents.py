"""Reads the files of documents (`documents`), which may be compressed."""

from __future__ import annotations

from pathlib import Path

from seq2seq_serve.client.files.lines import read_whole
from seq2seq_serve.documents.archive import MAX_UNPACKED_BYTES
from seq2seq_serve.documents.kinds import ARCHIVES, DOCUMENTS, SOFTWARE, read_file
from seq2seq_serve.documents.segments import COMPRESSED, MAX_BYTES, Document, wrong_file


def document_suffix(path: Path) -> str:
    """Returns the suffix of a document, also of a compressed one; empty for other files."""
    suffix = Path(path.name.lower().removesuffix(COMPRESSED)).suffix
    return suffix if suffix in DOCUMENTS else ""


def is_software(path: Path) -> bool:
    """Whether a file is a document of a program, whose placeholders stay as they are."""
    return document_suffix(path) in SOFTWARE


def read_document(path: Path) -> Document:
    """Returns the document of a file, by its suffix.

    Raises:
        OSError: The file cannot be read, is too large, or is not what its name says.
    """
    suffix = document_suffix(path)
    limit = max(MAX_UNPACKED_BYTES, 10 * path.stat().st_size) if suffix in ARCHIVES else MAX_BYTES
    content = read_whole(path, limit + 1)
    if len(content) > limit:
        raise wrong_file(path, f"the file has more than {limit} bytes, the most of a document: split it")
    return read_file(suffix, content, path)
