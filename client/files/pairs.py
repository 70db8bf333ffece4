"""Finds out which texts of a file in several languages are sources, and which are targets."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.documents.segments import wrong_file
from seq2seq_serve.protos.languages import (
    is_known,
    is_other_language,
    is_same_language,
    standard_tag,
    tag_of,
)
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions

_MAX_NAMED = 20  # languages of an error
_MAX_SHOWN = 20  # characters of each


class Side(Enum):
    """The part that the texts of a language have in a translation."""

    SOURCE = auto()
    TARGET = auto()
    NEITHER = auto()


class Model(Protocol):
    """The languages of a model: a `Model` of the wire contract, or the manifest of a bundle."""

    @property
    def choices(self) -> Mapping[str, Any]: ...
    @property
    def source_language(self) -> str: ...
    @property
    def target_language(self) -> str: ...


def languages_of(options: GenerateOptions, model: Model) -> dict[str, str]:
    """Returns the languages of a run by the names of their options; empty tags where nothing says them."""
    return {
        name: getattr(options, name)
        or (model.choices[name].default if name in model.choices else getattr(model, name))
        for name in ("source_language", "target_language")
    }


def check_languages(options: GenerateOptions, model: Model) -> None:
    """Raises ClientError if the languages of a run are others than those of a model that has only its own."""
    for name, own in languages_of(GenerateOptions(), model).items():
        given = getattr(options, name)
        if name not in model.choices and is_known(own) and is_other_language(tag_of(given), own):
            advice = "leave it out, or give another model"
            text = f"{name} is {given[:100]!r}, and the model has only {own}: {advice}"
            raise ClientError("INVALID_ARGUMENT", text)


def standard_languages(options: GenerateOptions, model: Model) -> tuple[str, str]:
    """Returns the tags of the same languages as documents have them."""
    source, target = map(standard_tag, languages_of(options, model).values())
    return source, target


class LanguagePair:
    """The two languages of a file that are read. Owned by its reader.

    A language that is not known is the only other one of the file.

    Args:
        source: The tag of the sources' language; empty if it is not known.
        target: That of the targets.
    """

    def __init__(self, source: str, target: str) -> None:
        self._source, self._target = source, target
        self._sides: dict[str, Side] = {}  # by the tags of the file
        self._is_guessed = False  # one of both, from the file's tags
        self._is_clear = True

    def suggest_source(self, tag: str) -> None:
        """Takes the sources' language from the head of a file, if it is not known."""
        if not self._source and tag and not (self._target and is_same_language(tag, self._target)):
            self._source = tag

    def side(self, tag: str) -> Side:
        """Returns what the texts are whose language has this tag in the file."""
        found = self._sides.get(tag)
        if found is None:
            found = self._sides[tag] = self._new_side(tag)
        return found

    def is_exact(self, tag: str) -> bool:
        """Whether a tag is that of the targets with its region."""
        return _is_same_tag(tag, self._target)

    def check(self, path: Path) -> None:
        """Raises WrongFile if the file does not have the languages, or others and one is not known."""
        is_known = self._is_clear and self._source and self._target
        if not self._sides or (is_known and {Side.SOURCE, Side.TARGET} <= set(self._sides.values())):
            return
        problem = "it is not clear which texts are translations"
        if is_known:
            problem = f"there are no translations from {self._source} to {self._target}"
        tags = [" ".join(tag[:_MAX_SHOWN].split()) or "none" for tag in self._sides]
        known = ", ".join(tags[:_MAX_NAMED]) + ", …" * (len(tags) > _MAX_NAMED)
        advice = "give --source-language and --target-language"
        raise wrong_file(path, f"{problem}: the languages of the file are {known}: {advice}")

    def _new_side(self, tag: str) -> Side:
        for is_it in (_is_same_tag, is_same_language):
            if self._source and is_it(tag, self._source):
                return Side.SOURCE
            if self._target and is_it(tag, self._target):
                return Side.TARGET
        self._is_clear &= not self._is_guessed
        if bool(self._source) == bool(self._target):
            return Side.NEITHER
        self._is_guessed = True
        if self._source:
            self._target = tag
            return Side.TARGET
        self._source = tag
        return Side.SOURCE


def _is_same_tag(one: str, other: str) -> bool:
    return one.replace("_", "-").casefold() == other.replace("_", "-").casefold()
