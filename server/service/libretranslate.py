"""LibreTranslate's pages `/translate`, `/languages` and `/detect`, for models that translate texts.

A text is translated sentence by sentence, by the first model that has its two languages. Where the pages
differ from LibreTranslate's is said in docs/protocols.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from starlette.requests import Request

from seq2seq_serve.bundle.manifest import Choice
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TARGET_LANGUAGE
from seq2seq_serve.bundle.normalization import is_blank
from seq2seq_serve.commands import install_command
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.calls import SHORT_BYTES, Call
from seq2seq_serve.server.service.fair_thread import Checkpoint
from seq2seq_serve.server.service.forms import read_form
from seq2seq_serve.server.service.languages import name_of
from seq2seq_serve.server.service.open_inference.json import read_json
from seq2seq_serve.server.service.read.options import named_choice
from seq2seq_serve.server.service.seq2seq.generation import generate, read_decoding

_AUTO = "auto"
_MAX_TEXTS = 256
_FIELDS = ("q", "source", "target", "format", "alternatives", "api_key")
_NEUTRAL = {"format": ("text",), "alternatives": (0, "0")}
_JSON_BYTES = 4  # take as long to read as a byte of text
_MOST_DETECTED, _MOST_LANGUAGES = 2_000, 5  # characters of a text, and the languages that are listed for it


class _Pair(NamedTuple):
    """A model, and its names of two languages."""

    model: ServedModel
    source: str
    target: str


async def fields_of(request: Request, body: bytes, call: Call) -> dict[str, Any]:
    """Returns the fields of a request, whose body is JSON or a form.

    Raises:
        InvalidRequest: The body is neither, or has a field that the pages do not have.
    """
    content_type = request.headers.get("content-type", "")

    def read(_: Checkpoint) -> dict[str, Any]:
        if "json" in content_type:
            return dict(read_json(body))
        form = read_form(body, content_type)
        return {name: values[-1].decode(errors="replace") for name, values in form.items()}

    fields = await call.read(read, len(body) // _JSON_BYTES)
    for name, value in fields.items():
        if name not in _FIELDS:
            raise InvalidRequest(f"there is no field {name[:100]!r}", field=name[:100])
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise InvalidRequest(
                f"{name} is {str(value)[:100]!r}, and the server has only {_NEUTRAL[name][0]}", field=name
            )
    return fields


async def translate(fields: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Returns the translation of a text, or of each of several.

    Raises:
        ServerError: The request is refused or fails.
    """
    given = fields.get("q")
    texts: list[Any] = given if isinstance(given, list) else [given]
    if len(texts) > _MAX_TEXTS or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"q must be a text, or a list of at most {_MAX_TEXTS} texts", field="q")
    source, target = (str(fields.get(name) or "") for name in ("source", "target"))
    detected = await _detected(texts, call) if source == _AUTO else []
    pair = _pair(detected[0]["language"] if detected else source, target, call)
    options = pb.GenerateOptions(long_source=pb.LONG_SOURCE_SPLIT_ALWAYS)
    for name, language in ((SOURCE_LANGUAGE, pair.source), (TARGET_LANGUAGE, pair.target)):
        if name in pair.model.choices:
            setattr(options, name, language)
    with call.use_model(pair.model.name) as model:
        decoding = await read_decoding(options, model, call)
        rows = [[pb.Source(text=text)] for text in texts if not is_blank(text)]
        answers = iter(await generate(list(rows), decoding, call) if rows else [])
    translated = ["" if is_blank(text) else next(answers).hypotheses[0].text for text in texts]
    content: dict[str, Any] = {"translatedText": translated if isinstance(given, list) else translated[0]}
    if detected:
        content["detectedLanguage"] = detected[0]
    return content


async def detect(fields: Mapping[str, Any], call: Call) -> list[dict[str, Any]]:
    """Returns the languages that a text may be in, the most probable first, with percentages.

    Raises:
        InvalidRequest: There is no text, it is in none of the languages from which a model translates, or
            the package that detects languages is not installed.
    """
    text = fields.get("q")
    if not isinstance(text, str) or is_blank(text):
        raise InvalidRequest("q must be a text", field="q")
    return await _detected([text], call)


def languages(call: Call) -> list[dict[str, Any]]:
    """Returns the languages from which a model translates, each with those into which one does."""
    targets: dict[str, dict[str, None]] = {}
    for model in call.calls.models:
        sources, its_targets = _languages(model)
        for code in sources if its_targets else ():
            targets.setdefault(code, {}).update(dict.fromkeys(its_targets))
    return [
        {"code": code, "name": name_of(code), "targets": [one for one in targets[code] if one != code]}
        for code in sorted(targets)
    ]


def _languages(model: ServedModel) -> tuple[Iterable[str], Iterable[str]]:
    """Returns the model's names of the languages of sources and of targets; none of a model without texts."""
    if not model.reads_text:
        return (), ()
    fixed = {SOURCE_LANGUAGE: model.source_language, TARGET_LANGUAGE: model.target_language}
    source, target = (
        sorted(model.choices[name].ids) if name in model.choices else [code] * bool(code)
        for name, code in fixed.items()
    )
    return source, target


def _pair(source: str, target: str, call: Call) -> _Pair:
    """Returns the first model that has both languages, also in another spelling, such as ko for ko_KR."""
    for model in call.calls.models:
        names = [
            named_choice(given, Choice(dict.fromkeys(its_own, 0), ""))
            for given, its_own in zip((source, target), _languages(model), strict=True)
        ]
        if names[0] is not None and names[1] is not None:
            return _Pair(model, names[0], names[1])
    known = ", ".join(f"{one['code']} to {' '.join(one['targets'])}" for one in languages(call)[:20])
    raise InvalidRequest(
        f"no model translates from {source[:20]!r} to {target[:20]!r}: there are {known or 'none'}",
        field="source" if source not in {one["code"] for one in languages(call)} else "target",
    )


async def _detected(texts: Iterable[str], call: Call) -> list[dict[str, Any]]:
    """Returns the languages in which texts may be, among those from which a model translates."""
    codes = {one["code"].replace("_", "-").split("-")[0].casefold(): one["code"] for one in languages(call)}
    text = " ".join(texts)[:_MOST_DETECTED]
    # On the thread of files, because the first one waits for the model, about two seconds.
    ranked = await call.read(lambda _: _identifier().rank(text), SHORT_BYTES + 1)
    known = [(codes[code], probability) for code, probability in ranked if code in codes]
    if not known:
        raise InvalidRequest("the language is none from which a model translates: name it", field="source")
    return [
        {"language": code, "confidence": round(100 * probability, 1)}
        for code, probability in known[:_MOST_LANGUAGES]
    ]


@functools.cache
def _identifier() -> Any:
    """Returns langid's model of languages (Lui and Baldwin 2012), read once."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier  # optional
    except ImportError:
        raise InvalidRequest(
            f"the server cannot detect languages: name the source, or {install_command('detection')} there",
            field="source",
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
