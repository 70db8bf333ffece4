"""The languages of the served models, by the codes of LibreTranslate's programs, and their detection."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from seq2seq_serve.bundle.manifest import Choice
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, TARGET_LANGUAGE
from seq2seq_serve.commands import install_command
from seq2seq_serve.protos.languages import is_same_language, name_of, subtags
from seq2seq_serve.server.errors import InvalidRequest
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.service.call import SHORT_BYTES
from seq2seq_serve.server.service.read.options import named_choice

Names = tuple[tuple[str, ...], tuple[str, ...]]  # a model's names of the languages of sources, and of targets

LATE_BYTES = SHORT_BYTES + 1  # for the thread of long texts: what may take seconds at its first time

_MOST_LISTED = 20  # languages of an error
MOST_DETECTED, _MOST_RANKED = 2_000, 8  # characters of a text, and the languages that are kept for it
_LEAST_PROBABILITY = 0.1  # of a language that is taken for a text's; without any evidence all have 0.014
_CLEAR_PROBABILITY = 0.5  # of the language of a text that is not read as its neighbours are


@dataclass(frozen=True)
class Route:
    """A model that translates from one language into another.

    Attributes:
        model: Its name.
        source: Its name of the language of sources.
        target: Its name of the language of targets.
    """

    model: str
    source: str
    target: str


@dataclass(frozen=True)
class Detected:
    """A language that a text may be in.

    Attributes:
        code: Its code.
        probability: How probable it is.
    """

    code: str
    probability: float

    def content(self) -> dict[str, Any]:
        """Returns it as LibreTranslate writes it."""
        return {"language": self.code, "confidence": round(100 * self.probability, 1)}


NOT_DETECTED = Detected("en", 0.0)  # as LibreTranslate answers for a text without words


def find_route(source: str, target: str, models: Iterable[ServedModel]) -> Route | None:
    """Returns the first model that translates from a language into another one, such as ko_KR for ko."""
    for model in models:
        sources, targets = languages_of(model)
        names = named_choice(source, _choice(sources)), named_choice(target, _choice(targets))
        if names[0] is not None and names[1] is not None and names[0] != names[1]:
            return Route(model.name, names[0], names[1])
    return None


def is_unchanged(source: str, target: str, models: Iterable[ServedModel]) -> bool:
    """Whether texts stay as they are: both tags are of the same language, which a model has."""
    return is_same_language(source, target) and any(
        named_choice(source, _choice(names)) is not None for model in models for names in languages_of(model)
    )


def no_route(source: str, target: str, models: Sequence[ServedModel]) -> InvalidRequest:
    """Returns the error of a request for two languages that no model has.

    It may take a tenth of a second for a model with hundreds of languages.
    """
    targets = targets_by_source(map(languages_of, models))
    known = ", ".join(
        f"{code} to {' '.join(one for one in its_targets if one != code)}"
        for code, its_targets in sorted(targets.items())[:_MOST_LISTED]
        if its_targets.keys() > {code}
    )
    is_source = any(named_choice(source, _choice(languages_of(model)[0])) is not None for model in models)
    wrong = target if is_source else source
    return InvalidRequest(
        f"{wrong[:20]} is not supported: no model translates from {source[:20]!r} to {target[:20]!r}: there "
        f"are {known or 'none'}",
        field="target" if is_source else "source",
    )


def targets_by_source(names: Iterable[Names]) -> dict[str, dict[str, None]]:
    """Returns the codes of all languages, each with those into which a model translates, and itself."""
    targets: dict[str, dict[str, None]] = {}
    for of_model in names:
        of_sources, of_targets = (_codes(each).values() for each in of_model)
        for code in (*of_sources, *of_targets):
            targets.setdefault(code, {code: None})
        for code in of_sources:
            targets[code].update(dict.fromkeys(of_targets))
    return targets


@lru_cache(2)  # by the languages of the served models, which change when one is loaded
def listed_languages(names: tuple[Names, ...]) -> bytes:
    """Returns the page with all languages, from `languages_of` each model; may take a tenth of a second."""
    return json.dumps(named_languages(names), ensure_ascii=False, separators=(",", ":")).encode()


def named_languages(names: Iterable[Names]) -> list[dict[str, Any]]:
    """Returns all languages with their English names, as LibreTranslate lists them."""
    targets = targets_by_source(names)
    of_codes = {code: name_of(code) for code in targets}
    numbers = Counter(of_codes.values())
    return [
        {
            "code": code,
            "name": name if numbers[name] == 1 else f"{name} ({code})",
            "targets": sorted(targets[code]),
        }
        for code, name in sorted(of_codes.items())
    ]


def languages_of(model: ServedModel) -> Names:
    """Returns the model's names of the languages of sources and of targets; none if it lacks one of both."""
    if not model.reads_text:
        return (), ()
    fixed = {SOURCE_LANGUAGE: model.manifest.source_language, TARGET_LANGUAGE: model.manifest.target_language}
    sources, targets = (
        sorted(model.manifest.choices[name].ids) if name in model.manifest.choices else [code] * bool(code)
        for name, code in fixed.items()
    )
    return (tuple(sources), tuple(targets)) if sources and targets else ((), ())


@lru_cache(64)
def _codes(names: tuple[str, ...]) -> dict[str, str]:
    """Returns for each of a model's names of languages, such as kor_Hang, the code that programs know."""
    codes, choice = {}, _choice(names)
    for name in names:
        language, *others = subtags(name)
        scripts = [f"{language}-{part.title()}" for part in others if len(part) == 4]
        known = (language, *scripts, name.replace("_", "-"))
        codes[name] = next((code for code in known if named_choice(code, choice) == name), name)
    return codes


def _choice(names: Collection[str]) -> Choice:
    return Choice(dict.fromkeys(names, 0), "")


def rank(text: str) -> list[Detected]:
    """Returns the languages that a text may be in, the most probable first. The first call takes seconds.

    Raises:
        InvalidRequest: The package that detects languages is not installed.
    """
    found = _identifier().rank(text[:MOST_DETECTED])[:_MOST_RANKED]
    return [Detected(code, float(probability)) for code, probability in found]


def best_of(ranking: Sequence[Detected], is_wanted: Callable[[str], bool]) -> Detected | None:
    """Returns the most probable wanted language; None if it is improbable, or another one is not."""
    for one in ranking:
        if one.probability < max(_LEAST_PROBABILITY, ranking[0].probability / 2):
            break
        if is_wanted(one.code):
            return one
    return None


def is_clear(ranking: Sequence[Detected]) -> bool:
    """Whether the language of a text is clear without its neighbours."""
    return ranking[0].probability >= _CLEAR_PROBABILITY


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
