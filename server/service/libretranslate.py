"""LibreTranslate's pages `/translate`, `/languages` and `/detect`, for models that translate texts.

A text is translated sentence by sentence, by the first model that has its two languages. Where the pages
differ from LibreTranslate's is said in docs/protocols.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seq2seq_serve.bundle.manifest import Choice
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TARGET_LANGUAGE
from seq2seq_serve.bundle.normalization import is_blank
from seq2seq_serve.commands import install_command
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import SHORT_BYTES
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.fair_thread import Checkpoint
from seq2seq_serve.server.service.forms import read_form, text_of
from seq2seq_serve.server.service.open_inference.json import read_json
from seq2seq_serve.server.service.read.languages import name_of
from seq2seq_serve.server.service.read.options import named_choice
from seq2seq_serve.server.service.seq2seq.generation import generate, read_decoding

PATHS = ("/translate", "/translate_file", "/download_file", "/detect", "/languages", "/frontend", "/suggest")
PAGES = (
    "LibreTranslate's pages here are /translate, /translate_file, /detect, /languages and "
    "/frontend/settings; suggestions are not kept"
)
_AUTO = "auto"
_MAX_TEXTS = 256
_FIELDS = ("q", "source", "target", "format", "alternatives", "api_key")
_LANGUAGES = ("source", "target")
_NEUTRAL = {"format": ("text",), "alternatives": (0, "0")}
_JSON_BYTES = 4  # take as long to read as a byte of text
_BYTES_PER_CODE = 12  # of a language in JSON
_MOST_DETECTED, _MOST_LANGUAGES = 2_000, 5  # characters of a text, and the languages that are listed for it


async def fields_of(request: Request, body: bytes, call: RemoteCall) -> dict[str, Any]:
    """Returns the fields of a request, whose body is JSON or a form.

    Raises:
        InvalidRequest: The body is neither, or has a field that the pages do not have.
    """
    content_type = request.headers.get("content-type", "")

    def read(_: Checkpoint) -> dict[str, Any]:
        if "json" in content_type:
            fields = read_json(body)
        else:
            form = read_form(body, content_type)
            fields = {name: text_of(values[-1], name) for name, values in form.items()}
        for name, value in fields.items():
            if name not in _FIELDS:
                raise InvalidRequest(f"there is no field {name[:100]!r}", field=name[:100])
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise InvalidRequest(
                    f"{name} is {str(value)[:100]!r}, and the server supports only {_NEUTRAL[name][0]}",
                    field=name,
                )
            if name in _LANGUAGES and not isinstance(value, str):
                raise InvalidRequest(f"{name} must be the code of a language", field=name)
        return fields

    return await call.read(read, len(body) // _JSON_BYTES)


async def translate(fields: Mapping[str, Any], call: RemoteCall) -> Response:
    """Returns the translation of a text, or of each of several.

    Raises:
        ServerError: The request is refused or fails.
    """
    given = fields.get("q")
    texts: list[Any] = given if isinstance(given, list) else [given]
    if len(texts) > _MAX_TEXTS or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"q must be a text, or a list of at most {_MAX_TEXTS} texts", field="q")
    source, target = (fields.get(name, "") for name in _LANGUAGES)
    detected = await _detected(texts, call) if source == _AUTO else []
    model, *pair = _pair(detected[0]["language"] if detected else source, target, call)
    options = pb.GenerateOptions(long_source=pb.LONG_SOURCE_SPLIT_ALWAYS)
    for name, language in zip((SOURCE_LANGUAGE, TARGET_LANGUAGE), pair, strict=True):
        if name in model.manifest.choices:
            setattr(options, name, language)
    with call.calls.models.use(call, model.name) as model:
        decoding = await read_decoding(options, model, call)
        places = [place for place, text in enumerate(texts) if not is_blank(text)]
        rows: list[Sequence[pb.Source]] = [[pb.Source(text=texts[place])] for place in places]
        try:
            answers = await generate(rows, decoding, call) if rows else []
        except InvalidRequest as error:
            error.field = "q"
            if error.row is not None:
                error.args = (f"text {places[error.row]} of q: {error}",)
            raise
    translated = [""] * len(texts)
    for place, answer in zip(places, answers, strict=True):
        translated[place] = answer.hypotheses[0].text
    content: dict[str, Any] = {"translatedText": translated if isinstance(given, list) else translated[0]}
    if detected:
        content["detectedLanguage"] = detected[0]
    return await call.build(sum(map(len, translated)), lambda _: JSONResponse(content))


async def detect(fields: Mapping[str, Any], call: RemoteCall) -> Response:
    """Returns the languages that a text may be in, the most probable first, with percentages.

    Raises:
        InvalidRequest: There is no text, it is in none of the languages from which a model translates, or
            the package that detects languages is not installed.
    """
    text = fields.get("q")
    if not isinstance(text, str) or is_blank(text):
        raise InvalidRequest("q must be a text", field="q")
    return JSONResponse(await _detected([text], call))


async def languages(call: RemoteCall) -> Response:
    """Returns the languages from which a model translates, each with those into which one does."""
    targets = _targets(call)
    names = {code: name_of(code) for code in targets}
    numbers = Counter(names.values())

    def build(_: Checkpoint) -> Response:
        return JSONResponse(
            [
                {
                    "code": code,
                    "name": name if numbers[name] == 1 else f"{name} ({code})",
                    "targets": [one for one in targets[code] if one != code],
                }
                for code, name in sorted(names.items())
            ]
        )

    return await call.build(_BYTES_PER_CODE * sum(map(len, targets.values())), build)


def _targets(call: RemoteCall) -> dict[str, dict[str, None]]:
    """Returns the languages into which the models translate, by those from which they do."""
    targets: dict[str, dict[str, None]] = {}
    for model in call.calls.models:
        sources, its_targets = _languages(model)
        for code in sources if its_targets else ():
            targets.setdefault(code, {}).update(dict.fromkeys(its_targets))
    return targets


def _languages(model: ServedModel) -> tuple[Collection[str], Collection[str]]:
    """Returns the model's names of the languages of sources and of targets; none of a model without texts."""
    if not model.reads_text:
        return (), ()
    fixed = {SOURCE_LANGUAGE: model.manifest.source_language, TARGET_LANGUAGE: model.manifest.target_language}
    source, target = (
        sorted(model.manifest.choices[name].ids) if name in model.manifest.choices else [code] * bool(code)
        for name, code in fixed.items()
    )
    return source, target


def _pair(source: str, target: str, call: RemoteCall) -> tuple[ServedModel, str, str]:
    """Returns the first model that has both languages, with its names of them, such as ko for ko_KR."""
    for model in call.calls.models:
        names = [
            named_choice(given, Choice(dict.fromkeys(its_own, 0), ""))
            for given, its_own in zip((source, target), _languages(model), strict=True)
        ]
        if names[0] is not None and names[1] is not None:
            return model, names[0], names[1]
    targets = _targets(call)
    known = ", ".join(
        f"{code} to {' '.join(one for one in targets[code] if one != code)}" for code in sorted(targets)[:20]
    )
    raise InvalidRequest(
        f"no model translates from {source[:20]!r} to {target[:20]!r}: there are {known or 'none'}",
        field="target" if source in targets else "source",
    )


async def _detected(texts: Iterable[str], call: RemoteCall) -> list[dict[str, Any]]:
    """Returns the languages in which texts may be, among those from which a model translates."""
    choices = [
        Choice(dict.fromkeys(sources, 0), "")
        for sources, targets in map(_languages, call.calls.models)
        if sources and targets
    ]
    text = " ".join(texts)[:_MOST_DETECTED]

    def known(_: Checkpoint) -> dict[str, float]:
        probabilities: dict[str, float] = {}
        for code, probability in _identifier().rank(text):
            names = (named_choice(code, choice) for choice in choices)
            if (name := next(filter(None, names), None)) is not None:
                probabilities.setdefault(name, probability)
            if len(probabilities) == _MOST_LANGUAGES:
                break
        return probabilities

    # On the thread of files, because the first one waits for the model, about two seconds.
    found = await call.read(known, SHORT_BYTES + 1)
    if not found:
        raise InvalidRequest(
            "no model translates from the detected language: name the source", field="source"
        )
    return [
        {"language": name, "confidence": round(100 * probability, 1)} for name, probability in found.items()
    ]


@cache
def _identifier() -> Any:
    """Returns langid's model of languages (Lui and Baldwin 2012), read once."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier  # optional
    except ImportError:
        raise InvalidRequest(
            "the server cannot detect languages: name the source, or on the server "
            f"{install_command('detection')}",
            field="source",
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
