"""LibreTranslate's pages for models that translate texts.

A text is translated sentence by sentence, by the first model that has its two languages; HTML and files
segment by segment (`documents`). docs/protocols.md says where the pages differ from LibreTranslate's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seq2seq_serve import __version__
from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.segments import LETTER
from seq2seq_serve.protos.languages import standard_tag
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.libretranslate.fields import AUTO, FILE, Fields
from seq2seq_serve.server.service.libretranslate.files import TranslatedFiles, url_of
from seq2seq_serve.server.service.libretranslate.jobs import TranslationUnit, run
from seq2seq_serve.server.service.libretranslate.languages import (
    LATE_BYTES,
    MOST_DETECTED,
    NOT_DETECTED,
    Names,
    Route,
    languages_of,
    listed_languages,
    rank,
)
from seq2seq_serve.server.service.libretranslate.routes import choose_routes
from seq2seq_serve.server.service.libretranslate.texts import read_file, read_texts

_SUMMARIES = (
    ("/translate", "post", "Translate texts"),
    ("/translate_file", "post", "Translate a file"),
    ("/detect", "post", "Detect the language of a text"),
    ("/languages", "get", "List the languages"),
    ("/frontend/settings", "get", "Show the settings"),
)
PATHS = (*(path for path, *_ in _SUMMARIES), "/download_file", "/frontend", "/spec", "/suggest")
PAGES = (
    "LibreTranslate's pages here are /translate, /translate_file, /detect, /languages and "
    "/frontend/settings; suggestions are not kept"
)
# They begin as those of LibreTranslate, which programs compare.
WRONG_KEY = "Invalid API key: send a known token as api_key, or as `authorization: Bearer …`"
NO_KEY = "Please contact the server operator to get an API key, and send it as api_key"
MAX_FILE_BYTES = 2**23

_BYTES_PER_CODE = 12  # of a language in JSON


async def translate(fields: Fields, _request: Request, call: RemoteCall) -> Response:
    """Returns the translation of a text, or of each of several.

    Raises:
        ServerError: The request is refused or fails.
    """
    if not fields.texts and not fields.is_list:
        raise InvalidRequest("q is missing: send a text, or a list of texts", field="q")
    with ExitStack() as held:
        texts = await read_texts(fields, call, held)
        await choose_routes(texts, fields, call)
        jobs: dict[Route, list[TranslationUnit]] = {}
        for text in texts:
            if text.route is not None:
                jobs.setdefault(text.route, []).extend(text.jobs)
        try:
            for route, its in jobs.items():
                await run(its, route, call, fields)
        except InvalidRequest as error:
            if error.row is not None:
                error.field = "q"
                if fields.is_list:
                    error.args = (f"text {error.row} of q: {error}",)
            raise

        def build(_: YieldPoint) -> Response:
            content: dict[str, Any] = {"translatedText": [text.translated() for text in texts]}
            if fields.source == AUTO:
                content["detectedLanguage"] = [text.detected.content() for text in texts]
            if fields.num_alternatives:
                content["alternatives"] = [text.alternatives for text in texts]
            if not fields.is_list:
                content = {name: values[0] for name, values in content.items()}
            return JSONResponse(content)

        return await call.build(sum(text.num_bytes for text in texts), build)


async def translate_file(
    fields: Fields, request: Request, call: RemoteCall, files: TranslatedFiles
) -> Response:
    """Returns the address of a translated file. A segment that the model refuses stays as it is.

    Raises:
        ServerError: The request is refused or fails.
    """
    with ExitStack() as held:
        file = await read_file(fields, call, held)
        await choose_routes([file.text], fields, call)
        content = file.content
        if file.text.route is not None:
            languages = standard_tag(file.text.route.source), standard_tag(file.text.route.target)
            if problem := await call.read(
                lambda _: file.document.language_problem(languages), len(file.content)
            ):
                raise InvalidRequest(f"{problem}: send other languages, or correct the file", field=FILE)
            refused: list[InvalidRequest] = []
            await run(file.text.jobs, file.text.route, call, fields, refused=refused)
            if len(refused) == len(file.text.jobs):
                refused[0].field = FILE
                raise refused[0]
            content = await file.written(call)
    name = f"{file.path.stem}_{fields.target}{file.path.suffix}"
    url = url_of(request, files.add(call.caller.name, name, content))
    return JSONResponse({"translatedFileUrl": url})


async def detect(fields: Fields, _request: Request, call: RemoteCall) -> Response:
    """Returns the languages that a text may be in, the most probable first, with percentages.

    Raises:
        InvalidRequest: There is no text, or the package that detects languages is not installed.
    """
    if not any(fields.texts):
        raise InvalidRequest("q is missing: send a text", field="q")
    text = " ".join(one[:MOST_DETECTED] for one in fields.texts)[:MOST_DETECTED]
    if not LETTER.search(text):
        return JSONResponse([NOT_DETECTED.content()])
    ranking = await call.read(lambda _: rank(text), LATE_BYTES)
    best, *others = (one.content() for one in ranking)
    return JSONResponse([best, *(one for one in others if one["confidence"])])


async def languages(call: RemoteCall) -> Response:
    """Returns all languages, each with those into which a model translates from it."""
    names = tuple(dict.fromkeys(map(languages_of, call.calls.models.open_to(call.caller))))

    def build(_: YieldPoint) -> Response:
        return Response(listed_languages(names), media_type="application/json")

    return await call.build(_BYTES_PER_CODE * _num_pairs(names), build)


def specification() -> Response:
    """Returns the pages, in the beginning of LibreTranslate's specification: programs look for its title."""
    paths = {
        path: {method: {"summary": summary, "responses": {"200": {"description": "Success"}}}}
        for path, method, summary in _SUMMARIES
    }
    info = {"title": "LibreTranslate", "version": __version__, "description": "The pages of seq2seq-serve"}
    return JSONResponse({"swagger": "2.0", "info": info, "basePath": "/", "paths": paths})


async def settings(call: RemoteCall) -> Response:
    """Returns what LibreTranslate's page in the browser, and programs, ask before the first text."""
    names = tuple(dict.fromkeys(map(languages_of, call.calls.models.open_to(call.caller))))
    has_tokens = call.calls.access.has_tokens

    def build(_: YieldPoint) -> Response:
        known = json.loads(listed_languages(names))
        targets = {code for one in known for code in one["targets"] if code != one["code"]}
        target = next((one for one in known if one["code"] in targets), {"code": "", "name": ""})
        content = {
            "charLimit": -1,
            "frontendTimeout": 500,
            "apiKeys": has_tokens,
            "keyRequired": has_tokens,
            "suggestions": False,
            "filesTranslation": True,
            "supportedFilesFormat": list(FILES),
            "language": {
                "source": {"code": AUTO, "name": "Auto Detect"},
                "target": {"code": target["code"], "name": target["name"]},
            },
        }
        return JSONResponse(content)

    return await call.build(_BYTES_PER_CODE * _num_pairs(names), build)


def _num_pairs(names: Iterable[Names]) -> int:
    return sum(len(sources) * len(targets) for sources, targets in names)
