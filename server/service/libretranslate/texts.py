"""Reads the texts of a request, and the file of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from seq2seq_serve.documents.archive import Archive
from seq2seq_serve.documents.kinds import ARCHIVES, FILES, SOFTWARE
from seq2seq_serve.documents.kinds import read_file as parse_file
from seq2seq_serve.documents.page import HtmlDocument
from seq2seq_serve.documents.segments import LETTER, Document, WrongFile, check_marks
from seq2seq_serve.documents.terms import WholeTerms
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.languages import standard_tag
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.libretranslate.fields import AUTO, FILE, Fields
from seq2seq_serve.server.service.libretranslate.jobs import TranslationUnit, alternatives, jobs_of
from seq2seq_serve.server.service.libretranslate.languages import MOST_DETECTED, NOT_DETECTED, Detected, Route

_Parsed = TypeVar("_Parsed")

_MARK_BYTES = 1024  # of memory for a tag or line of a document
_MAX_MARKS, _MAX_HTML_MARKS = 50_000, 20_000  # of a file, and of the texts of a request
_MEMORY_PER_BYTE = 4  # of a document, besides its tags and lines
_MAX_TEXT_BYTES = 2**23  # of the texts of an archive with their markup, unpacked
_UNPACKED_BYTES = 2**27  # of memory while an archive is read or written
_HTML_FACTOR = 8  # times as long as a byte of text takes one of HTML to read or write


@dataclass
class Text:
    """A text of a request, or a file.

    Attributes:
        text: The text, or HTML; empty for a file.
        beginning: The beginning of what is in a language: of the text, or of the texts of its segments.
        has_words: Whether it has words to translate.
        jobs: What a model translates.
        document: What has its segments; None for a plain text.
        detected: The language that it is in, if that was not given.
        route: What translates it; None if it stays as it is.
        answer: The translation of a plain text.
        alternatives: Further translations of it.
    """

    text: str
    beginning: str
    has_words: bool
    jobs: list[TranslationUnit]
    document: Document | None = None
    detected: Detected = NOT_DETECTED
    route: Route | None = None
    answer: str | None = None
    alternatives: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """The bytes of an answer that takes as long to write as this text."""
        return len(self.text) * (1 if self.document is None else _HTML_FACTOR)

    def end(self, answer: pb.GenerateResponse) -> None:
        """Takes the answer to a plain text."""
        self.answer = answer.hypotheses[0].text
        self.alternatives = alternatives(answer)

    def translated(self) -> str:
        """Returns the text in the other language."""
        if self.document is not None and self.route is not None:
            self.document.target_language = standard_tag(self.route.target)
            return self.document.content().decode()
        return self.text if self.answer is None else self.answer


async def read_texts(fields: Fields, call: RemoteCall, held: ExitStack) -> list[Text]:
    """Returns the texts of a request.

    Args:
        fields: Its fields.
        call: The call that it came with.
        held: Counts the memory of HTML that is read, until it is closed.

    Raises:
        InvalidRequest: The texts are HTML with too many tags and lines.
        ServerError: `Call.read` or `Call.room` raises it.
    """
    if not fields.is_html:
        return [_plain(text, place) for place, text in enumerate(fields.texts)]
    num_bytes = sum(map(len, fields.texts))

    def read(checkpoint: YieldPoint) -> list[Text]:
        contents = [text.encode() for text in fields.texts]
        _refuse_wrong(lambda: check_marks(contents, Path("q"), _MAX_HTML_MARKS, what="the texts have"), "q")
        texts, terms = [], WholeTerms(fields.options.terms)
        for place, content in enumerate(contents):
            checkpoint()
            document = HtmlDocument(content, Path("q"), "utf-8")
            document.source_language = _language_of(fields)
            texts.append(_segmented(fields.texts[place], document, jobs_of(document, terms, place)))
        return texts

    held.enter_context(await call.room(_memory_of(num_bytes, _MAX_HTML_MARKS)))
    return await call.read(read, _HTML_FACTOR * num_bytes)


@dataclass(frozen=True)
class File:
    """A file of a request.

    Attributes:
        path: Its name.
        content: What it was.
        text: Its segments.
        document: What writes it.
        num_memory_bytes: The memory that writing it takes.
    """

    path: Path
    content: bytes
    text: Text
    document: Document
    num_memory_bytes: int

    async def written(self, call: RemoteCall) -> bytes:
        """Returns its content with the texts as they are now."""
        if self.text.route is not None:
            self.document.target_language = standard_tag(self.text.route.target)
        write: Callable[[YieldPoint], bytes] = lambda _: self.document.content()  # noqa: E731
        return await call.read(write, len(self.content), num_file_bytes=self.num_memory_bytes)


async def read_file(fields: Fields, call: RemoteCall, held: ExitStack) -> File:
    """Returns the file of a request; arguments and errors as those of `read_texts`."""
    path, content = Path(fields.file_name.replace("\\", "/").rpartition("/")[2]), fields.file
    suffix = path.suffix.lower()
    if not fields.file_name and not content:
        raise InvalidRequest("file is missing: send one, as multipart/form-data", field=FILE)
    if suffix in FILES and not content:
        raise InvalidRequest(f"the file {fields.file_name[:100]!r} is empty", field=FILE)
    if suffix not in FILES:
        name = f"{fields.file_name[:100]!r} with {len(content)} bytes"
        raise InvalidRequest(f"the file is {name}: send one of {', '.join(FILES)}", field=FILE)

    def parse() -> tuple[Document, list[TranslationUnit]]:
        document = parse_file(suffix, content, path, _MAX_MARKS, _MAX_TEXT_BYTES)
        document.source_language = _language_of(fields)
        terms = WholeTerms(fields.options.terms)
        return document, jobs_of(document, terms, is_software=suffix in SOFTWARE)

    def read(_: YieldPoint) -> File:
        document, jobs = _refuse_wrong(parse, FILE)
        return File(path, content, _segmented("", document, jobs), document, num_memory_bytes)

    num_bytes = _memory_of(len(content), _MAX_MARKS)
    num_memory_bytes = _UNPACKED_BYTES if suffix in ARCHIVES else num_bytes
    room = held.enter_context(await call.room(num_bytes))
    file = await call.read(read, len(content), num_file_bytes=num_memory_bytes)
    if isinstance(file.document, Archive):
        room.grow(_memory_of(file.document.num_bytes, _MAX_MARKS))
    return file


def _language_of(fields: Fields) -> str:
    """Returns the tag of the language of texts; empty if it has to be detected."""
    return "" if fields.source == AUTO else standard_tag(fields.source)


def _plain(text: str, place: int) -> Text:
    beginning = text[:MOST_DETECTED]
    has_words = len(text) > len(beginning) or LETTER.search(beginning) is not None
    read = Text(text, beginning, has_words, [])
    read.jobs.append(TranslationUnit(text, read.end, place))
    return read


def _segmented(text: str, document: Document, jobs: list[TranslationUnit]) -> Text:
    beginning, num_characters = list[str](), 0
    for job in jobs:
        if num_characters > MOST_DETECTED:
            break
        beginning.append(job.text)
        num_characters += len(job.text)
    return Text(text, " ".join(beginning)[:MOST_DETECTED], bool(jobs), jobs, document)


def _memory_of(num_bytes: int, most_marks: int) -> int:
    """Returns the memory that a document takes while it is translated, as far as its length says."""
    return _MARK_BYTES * min(num_bytes, most_marks) + _MEMORY_PER_BYTE * num_bytes


def _refuse_wrong(parse: Callable[[], _Parsed], name: str) -> _Parsed:
    """Returns what a reader of documents returns; raises InvalidRequest about a field for a wrong content."""
    try:
        return parse()
    except WrongFile as error:
        raise InvalidRequest(str(error.strerror), field=name) from None
