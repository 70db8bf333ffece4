"""Reads the files of documents (`documents`), which may be compressed."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from seq2seq_serve.client.files.lines import read_whole
from seq2seq_serve.client.files.plan import JobError
from seq2seq_serve.documents.archive import MAX_UNPACKED_BYTES
from seq2seq_serve.documents.kinds import ARCHIVES, DOCUMENTS, SOFTWARE, read_file
from seq2seq_serve.documents.segments import (
    MAX_BYTES,
    Document,
    Part,
    software_text,
    suffix_of,
    wrong_file,
)
from seq2seq_serve.documents.terms import NO_TERMS, WholeTerms
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse

_TEXTS_AT_ONCE = 64  # are read by another thread


def document_suffix(path: Path) -> str:
    """Returns the suffix of a document, also of a compressed one; empty for other files."""
    suffix = suffix_of(path)
    return suffix if suffix in DOCUMENTS else ""


def is_software(path: Path) -> bool:
    """Whether a file is a document of a program, whose placeholders stay as they are."""
    return document_suffix(path) in SOFTWARE


def read_document(path: Path, languages: tuple[str, str] = ("", "")) -> Document:
    """Returns the document of a file, by its suffix.

    Args:
        path: The file.
        languages: The tags of the languages of texts and of translations; empty where they are not known.

    Raises:
        OSError: As `documents.kinds.read_file`, or the file has other languages.
    """
    suffix = document_suffix(path)
    limit = max(MAX_UNPACKED_BYTES, 10 * path.stat().st_size) if suffix in ARCHIVES else MAX_BYTES
    content = read_whole(path, limit + 1)
    if len(content) > limit:
        raise wrong_file(path, f"the file has more than {limit} bytes, the most of a document: split it")
    document = read_file(suffix, content, path)
    document.source_language = languages[0]
    if problem := document.language_problem(languages):
        advice = "give --source-language and --target-language or another model, or correct the file"
        raise wrong_file(path, f"{problem}: {advice}")
    return document


class DocumentTranslation:
    """A document whose texts are read as they are needed, and whose parts are written as they are answered.

    Owned by a worker, which reads on one thread and writes on another one. It holds the file, the parts that
    were read and are not answered, and the output.

    Args:
        path: The file.
        num_texts: The number of its texts when the run was planned.
        languages: See `read_document`.
        terms: Those of its texts.
    """

    def __init__(
        self,
        path: Path,
        num_texts: int,
        languages: tuple[str, str] = ("", ""),
        terms: WholeTerms = NO_TERMS,
    ) -> None:
        document = self._document = read_document(path, languages)
        self._path, self._num_texts, self._terms = path, num_texts, terms
        self._is_software = is_software(path)
        self._parts: deque[Part] = deque()  # read and not yet written
        self._num_answered = 0  # segments of the first of them
        self._stream = io.BytesIO()
        self._output = document.output(self._stream)
        self._texts = self._read()
        self._next = list(islice(self._texts, _TEXTS_AT_ONCE))

    def begin(self, language: str) -> None:
        """Sets the language of the translations, before the first answer."""
        self._document.target_language = language

    def texts(self) -> Iterator[list[str]]:
        """Yields all texts, some at a time. The last part is read before the last texts are yielded."""
        while texts := self._next:
            self._next = list(islice(self._texts, _TEXTS_AT_ONCE))
            yield texts

    def add(self, answers: Sequence[GenerateResponse]) -> None:
        """Puts the answers to the next texts into the document; a text without a target stays as it is."""
        for answer in answers:
            while self._num_answered == len(self._parts[0].segments):
                self._write_part()
            segment = self._parts[0].segments[self._num_answered]
            self._num_answered += 1
            if answer.hypotheses:
                segment.translate(answer, self._terms)

    def content(self) -> bytes:
        """Returns the content of the translated file, after the last answer."""
        while self._parts:
            self._write_part()
        self._output.close()
        return self._stream.getvalue()

    def _write_part(self) -> None:
        self._output.add(self._parts.popleft())
        self._num_answered = 0

    def _read(self) -> Iterator[str]:
        num_texts = 0
        for part in self._document.parts():
            self._parts.append(part)
            num_texts += len(part.segments)
            if num_texts > self._num_texts:
                break
            for segment in part.segments:
                text = segment.text
                yield software_text(text, segment.with_tags) if self._is_software else text
        if num_texts != self._num_texts:
            raise JobError(f"{self._path} has changed since the run was planned: it has other texts")
