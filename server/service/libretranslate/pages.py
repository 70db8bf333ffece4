"""LibreTranslate's pages for models that translate texts.

A text is translated sentence by sentence, by the first model that has its two languages; HTML and files
segment by segment (`documents`). docs/protocols.md says where the pages differ from LibreTranslate's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.page import Page
from seq2seq_serve.documents.segments import LETTER, Document, WrongFile, check_marks
from seq2seq_serve.documents.word import Word
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import SHORT_BYTES
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import Checkpoint
from seq2seq_serve.server.service.libretranslate.fields import AUTO, FILE, Fields
from seq2seq_serve.server.service.libretranslate.files import TranslatedFiles, url_of
from seq2seq_serve.server.service.libretranslate.jobs import Job, alternatives, jobs_of, run
from seq2seq_serve.server.service.libretranslate.languages import (
    MOST_DETECTED,
    NOT_DETECTED,
    Detected,
    Route,
    best_of,
    find_route,
    is_clear,
    is_unchanged,
    languages_of,
    named_languages,
    no_route,
    rank,
)
from seq2seq_serve.server.service.read.languages import is_same_language, name_of

PATHS = ("/translate", "/translate_file", "/download_file", "/detect", "/languages", "/frontend", "/suggest")
PAGES = (
    "LibreTranslate's pages here are /translate, /translate_file, /detect, /languages and "
    "/frontend/settings; suggestions are not kept"
)
MAX_FILE_BYTES = 2**23

_LATE_BYTES = SHORT_BYTES + 1  # for the thread of long texts: what may take seconds at its first time
_BYTES_PER_CODE = 12  # of a language in JSON
_MOST_AT_ONCE = 64  # segments
_MARK_BYTES = 1024  # of memory for a tag or line of a document
_MAX_MARKS, _MAX_HTML_MARKS = 50_000, 20_000  # of a file, and of the texts of a request
_MEMORY_PER_BYTE = 4  # of a document, besides its tags and lines
_HTML_FACTOR = 8  # times as long as a byte of text takes one of HTML to read
_UNPACKED_BYTES = 2**27  # of memory while a Word document is read or written


@dataclass
class _Text:
    """A text of a request.

    Attributes:
        text: The text, or HTML.
        words: What is in a language: the text itself, or the texts of its segments.
        document: Its segments; None for a plain text.
        detected: The language that it is in, if that was not given.
        route: What translates it; None if it stays as it is.
        answer: The translation of a plain text.
        alternatives: Further translations of it.
    """

    text: str
    words: str
    document: Document | None = None
    detected: Detected = NOT_DETECTED
    route: Route | None = None
    answer: str | None = None
    alternatives: list[str] = field(default_factory=list)

    def end(self, answer: pb.GenerateResponse) -> None:
        """Takes the answer to a plain text."""
        self.answer = answer.hypotheses[0].text
        self.alternatives = alternatives(answer)

    def translated(self) -> str:
        """Returns the text in the other language."""
        if self.document is not None and self.route is not None:
            return self.document.content().decode()
        return self.text if self.answer is None else self.answer


async def translate(fields: Fields, _request: Request, call: RemoteCall) -> Response:
    """Returns the translation of a text, or of each of several.

    Raises:
        ServerError: The request is refused or fails.
    """
    if not fields.texts and not fields.is_list:
        raise InvalidRequest("q is missing: send a text, or a list of texts", field="q")
    with ExitStack() as held:
        texts = await _read_texts(fields, call, held)
        await _choose_routes(texts, fields, call)
        try:
            for route, jobs in _jobs_by_route(texts).items():
                await run(jobs, route, call, num_alternatives=fields.num_alternatives)
        except InvalidRequest as error:
            if error.row is not None:
                error.field = "q"
                if fields.is_list:
                    error.args = (f"text {error.row} of q: {error}",)
            raise

        def build(_: Checkpoint) -> Response:
            content: dict[str, Any] = {"translatedText": [text.translated() for text in texts]}
            if fields.source == AUTO:
                content["detectedLanguage"] = [text.detected.content() for text in texts]
            if fields.num_alternatives:
                content["alternatives"] = [text.alternatives for text in texts]
            if not fields.is_list:
                content = {name: values[0] for name, values in content.items()}
            return JSONResponse(content)

        return await call.build(sum(len(text.text) for text in texts), build)


async def translate_file(
    fields: Fields, request: Request, call: RemoteCall, files: TranslatedFiles
) -> Response:
    """Returns the address of a translated file. A segment that the model refuses stays as it is.

    Raises:
        ServerError: The request is refused or fails.
    """
    path = Path(fields.file_name.replace("\\", "/").rpartition("/")[2])
    kind = FILES.get(path.suffix.lower())
    if not fields.file or kind is None:
        name = f"{fields.file_name[:100]!r} with {len(fields.file)} bytes"
        raise InvalidRequest(f"the file is {name}: send one of {', '.join(FILES)}", field=FILE)

    def read(_: Checkpoint) -> Document:
        try:
            if kind is Word:
                return Word(fields.file, path, _MAX_MARKS)
            check_marks([fields.file], path, _MAX_MARKS)
            return kind(fields.file, path)
        except WrongFile as error:
            raise InvalidRequest(str(error.strerror), field=FILE) from None

    num_bytes = _MARK_BYTES * min(len(fields.file), _MAX_MARKS) + _MEMORY_PER_BYTE * len(fields.file)
    num_decoding_bytes = _UNPACKED_BYTES if kind is Word else num_bytes
    with await call.room(num_bytes):
        document = await call.read(read, len(fields.file), num_file_bytes=num_decoding_bytes)
        text = _Text("", _words_of(document), document)
        await _choose_routes([text], fields, call)
        content = fields.file
        if text.route is not None:
            refused: list[InvalidRequest] = []
            await run(jobs_of(document), text.route, call, refused=refused)
            if len(refused) == len(document.segments):
                refused[0].field = FILE
                raise refused[0]
            content = await call.read(
                lambda _: document.content(), len(content), num_file_bytes=num_decoding_bytes
            )
    new_name = f"{path.stem}_{fields.target}{path.suffix}"
    url = url_of(request, files.add(call.caller.name, new_name, content))
    return JSONResponse({"translatedFileUrl": url})


async def detect(fields: Fields, _request: Request, call: RemoteCall) -> Response:
    """Returns the languages that a text may be in, the most probable first, with percentages.

    Raises:
        InvalidRequest: There is no text, or the package that detects languages is not installed.
    """
    text = " ".join(fields.texts)
    if not text:
        raise InvalidRequest("q is missing: send a text", field="q")
    if not LETTER.search(text):
        return JSONResponse([NOT_DETECTED.content()])
    ranking = await call.read(lambda _: rank(text), _LATE_BYTES)
    return JSONResponse([one.content() for one in ranking])


async def languages(call: RemoteCall) -> Response:
    """Returns all languages, each with those into which a model translates from it."""
    models = list(call.calls.models)
    num_codes = sum(len(sources) * len(targets) for sources, targets in map(languages_of, models))
    return await call.build(_BYTES_PER_CODE * num_codes, lambda _: JSONResponse(named_languages(models)))


async def settings(call: RemoteCall) -> Response:
    """Returns what LibreTranslate's page in the browser, and programs, ask before the first text."""
    models = list(call.calls.models)

    def build(_: Checkpoint) -> Response:
        known = named_languages(models)
        targets = {code for one in known for code in one["targets"] if code != one["code"]}
        target = next((one for one in known if one["code"] in targets), {"code": "", "name": ""})
        content = {
            "charLimit": -1,
            "frontendTimeout": 500,
            "apiKeys": call.calls.access.has_tokens,
            "keyRequired": call.calls.access.has_tokens,
            "suggestions": False,
            "filesTranslation": True,
            "supportedFilesFormat": list(FILES),
            "language": {
                "source": {"code": AUTO, "name": "Auto Detect"},
                "target": {"code": target["code"], "name": target["name"]},
            },
        }
        return JSONResponse(content)

    num_codes = sum(len(sources) * len(targets) for sources, targets in map(languages_of, models))
    return await call.build(_BYTES_PER_CODE * num_codes, build)


async def _read_texts(fields: Fields, call: RemoteCall, held: ExitStack) -> list[_Text]:
    """Returns the texts of a request, with the segments of those that are HTML."""
    if not fields.is_html:
        return [_Text(text, text) for text in fields.texts]
    num_bytes = sum(map(len, fields.texts))

    def read(checkpoint: Checkpoint) -> list[_Text]:
        contents = [text.encode() for text in fields.texts]
        try:
            check_marks(contents, Path("q"), _MAX_HTML_MARKS)
        except WrongFile as error:
            raise InvalidRequest(str(error.strerror), field="q") from None
        texts = []
        for text, content in zip(fields.texts, contents, strict=True):
            checkpoint()
            document = Page(content, Path("q"), "utf-8")
            texts.append(_Text(text, _words_of(document), document))
        return texts

    held.enter_context(
        await call.room(_MARK_BYTES * min(num_bytes, _MAX_HTML_MARKS) + _MEMORY_PER_BYTE * num_bytes)
    )
    return await call.read(read, _HTML_FACTOR * num_bytes)


def _jobs_by_route(texts: Sequence[_Text]) -> dict[Route, list[Job]]:
    """Returns the texts to translate, and the segments of those that are HTML."""
    jobs: dict[Route, list[Job]] = {}
    for place, text in enumerate(texts):
        if text.route is not None:
            document, its = text.document, jobs.setdefault(text.route, [])
            its += [Job(text.text, text.end, place)] if document is None else jobs_of(document, place)
    return jobs


def _words_of(document: Document) -> str:
    """Returns the beginning of the texts of a document."""
    words, num_characters = list[str](), 0
    for segment in document.segments:
        words.append(segment.text)
        num_characters += len(words[-1])
        if num_characters > MOST_DETECTED:
            break
    return " ".join(words)


async def _choose_routes(texts: Sequence[_Text], fields: Fields, call: RemoteCall) -> None:
    """Decides which model translates each text, or that it stays as it is.

    Raises:
        InvalidRequest: No model has the two languages, or the language of no text is detected.
    """
    models = list(call.calls.models)
    if not fields.target:
        raise InvalidRequest("target is missing: name a language", field="target")
    worded = [text for text in texts if LETTER.search(text.words)]

    if fields.source == AUTO:
        num_bytes = sum(min(len(text.words), MOST_DETECTED) for text in worded)
        choose = partial(_choose_by_detection, worded, fields.target, models)
        await call.read(choose, _LATE_BYTES + num_bytes)
        return
    route = find_route(fields.source, fields.target, models)
    if route is None and not is_unchanged(fields.source, fields.target, models):
        raise await call.read(lambda _: no_route(fields.source, fields.target, models), _LATE_BYTES)
    for text in worded:
        text.route = route


def _choose_by_detection(
    texts: Sequence[_Text], target: str, models: Sequence[ServedModel], checkpoint: Checkpoint
) -> None:
    """Chooses the routes of texts by their languages.

    A text whose language is not clear is read in that of all texts together. One in the language of the
    target, or in a language that no model reads, stays as it is.
    """
    routes: dict[str, Route | None] = {}

    def route_of(code: str) -> Route | None:
        if code not in routes:
            same = is_same_language(code, target)
            routes[code] = None if same else find_route(code, target, models)
        return routes[code]

    def is_known(code: str) -> bool:
        return route_of(code) is not None or is_same_language(code, target)

    rankings = []
    for text in texts:
        checkpoint()
        rankings.append(rank(text.words))
    whole = best_of(rank(" ".join(text.words for text in texts)), is_known) if len(texts) > 1 else None
    num_known = 0
    for text, ranking in zip(texts, rankings, strict=True):
        best = best_of(ranking, is_known) or (None if is_clear(ranking) else whole)
        text.detected = best or ranking[0]
        text.route = None if best is None else route_of(best.code)
        num_known += best is not None
    if texts and not num_known:
        raise _undetected(rankings[0], target, models)


def _undetected(ranking: Sequence[Detected], target: str, models: Sequence[ServedModel]) -> InvalidRequest:
    best = ranking[0]
    if is_clear(ranking):
        return no_route(best.code, target, models)
    return InvalidRequest(
        f"the language of the text is not clear: {name_of(best.code)} has a probability of "
        f"{best.probability:.0%}: name the source",
        field="source",
    )
