"""Translations that texts have already, and the reader of the files that have them (TMX)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from seq2seq_serve.client.files.elements import TextElements
from seq2seq_serve.client.files.pairs import LanguagePair, Side
from seq2seq_serve.documents.segments import FormattedText, begin_of, with_tags, wrong_file
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis

MAX_ENTRIES = 5_000_000  # of a memory, each of which takes some 300 bytes


class TranslationMemory:
    """Translations of whole texts, which are answered without a server.

    White space around a text does not count, and inside of it all is alike.

    Args:
        translations: Texts, each with its translation. Of equal texts, the last one counts.
    """

    def __init__(self, translations: Iterable[tuple[str, str]] = ()) -> None:
        exact, derived = dict[str, str](), dict[str, str]()
        for source, target in translations:
            exact[_key(source)] = target
            derived.update(_without_begin(source, target))
        self._targets = _joined(exact, derived)

    def __len__(self) -> int:
        return len(self._targets)

    def answer(self, source: Any) -> GenerateResponse | None:
        """Returns the answer to a source; None if the memory does not have it.

        It never has a `FormattedText`, whose formatting needs the alignment of words, but that with its tags.
        """
        if not isinstance(source, str):
            return None
        source = with_tags(source)
        if isinstance(source, FormattedText):
            return None
        target = self._targets.get(_key(source))
        return None if target is None else GenerateResponse(hypotheses=[Hypothesis(text=target)])

    def digest(self) -> str:
        """Returns the number of texts, and the beginning of a digest of them and their translations."""
        digest = hashlib.sha256()
        for source, target in self._targets.items():
            digest.update(f"{source}\0{target}\0".encode("utf-8", "surrogatepass"))
        return f"{len(self)} texts ({digest.hexdigest()[:16]})"


def read_memory(
    *paths: Path | str, source_language: str = "", target_language: str = ""
) -> TranslationMemory:
    """Returns the translations of files (TMX 1.4, also compressed by gzip).

    If a text has several translations, the newest one counts, by the dates of the files; without dates the
    last one.

    Args:
        paths: The files.
        source_language: The language of the texts, as a tag such as "en" or "eng_Latn". Empty: that of the
            file's head.
        target_language: That of their translations. Empty: the only other one of the file.

    Raises:
        OSError: A file cannot be read, is not TMX, is too large, or does not have these languages.
    """
    exact, derived = _Newest(), _Newest()
    for path in map(Path, paths):
        _Tmx(path, LanguagePair(source_language, target_language), exact, derived).read()
    memory = TranslationMemory()
    memory._targets = _joined(exact.targets, derived.targets)
    return memory


def memory_count(number: int) -> str:
    """Returns what a command reports at its end about the texts that the memory had."""
    return f"from the memory: {number} {'text' if number == 1 else 'texts'}"


class _Newest:
    """The newest translations of texts, by the dates of the files. Owned by `read_memory`."""

    def __init__(self) -> None:
        self.targets: dict[str, str] = {}
        self._dates: dict[str, str] = {}

    def add(self, key: str, target: str, date: str) -> None:
        known = self._dates.get(key)
        if not key or (known and date and date < known):
            return
        self.targets[key] = target
        if date:
            self._dates[key] = date
        elif known:
            del self._dates[key]


class _Tmx(TextElements):
    """A file of TMX, whose translations are added to those of others. Owned by `read_memory`.

    The content of codes is not text, and neither are the texts inside of them (`sub`).
    """

    roots = ("tmx",)
    text_names = ("seg",)

    def __init__(self, path: Path, languages: LanguagePair, exact: _Newest, derived: _Newest) -> None:
        super().__init__(path)
        self._languages = languages
        self._exact, self._derived = exact, derived
        self._sources: list[str] = []  # of the present unit
        self._target = ""
        self._target_rank = False, ""  # whether it has the wanted region, and its date
        self._side, self._rank = Side.NEITHER, (False, "")  # of the present variant
        self._unit_date = ""

    def read(self) -> None:
        super().read()
        self._languages.check(self._path)

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        if name == "tuv":
            tag = attributes.get("xml:lang") or attributes.get("lang", "")
            self._side = self._languages.side(tag)
            is_exact = self._side is Side.TARGET and self._languages.is_exact(tag)
            self._rank = is_exact, attributes.get("changedate", self._unit_date)
        elif name == "tu":
            self._unit_date = attributes.get("changedate", "")
            self._sources, self._target, self._target_rank = [], "", (False, "")
        elif name == "header":
            language = attributes.get("srclang", "")
            self._languages.suggest_source("" if language == "*all*" else language)

    def end(self, name: str) -> None:
        if name != "tu" or not self._target:
            return
        date = self._target_rank[1]
        for source in self._sources:
            self._exact.add(_key(source), self._target, date)
            for key, target in _without_begin(source, self._target):
                self._derived.add(key, target, date)
        if len(self._exact.targets) + len(self._derived.targets) > MAX_ENTRIES:
            raise wrong_file(self._path, f"the memory has more than {MAX_ENTRIES} texts: give fewer files")

    def take(self, text: str) -> None:
        if self._side is Side.SOURCE:
            self._sources.append(text)
        elif self._side is Side.TARGET and text and self._rank >= self._target_rank:
            self._target, self._target_rank = text, self._rank


def _without_begin(source: str, target: str) -> Iterator[tuple[str, str]]:
    """Yields the key and the translation of a text without the mark of a list, as documents send texts."""
    begin = begin_of(source)
    if begin.strip() and begin_of(target).strip() == begin.strip():
        yield _key(source.removeprefix(begin)), target.removeprefix(begin_of(target))


def _joined(exact: dict[str, str], derived: dict[str, str]) -> dict[str, str]:
    """Adds translations of texts without their marks to those of texts that are not there as they are."""
    for key, target in derived.items():
        exact.setdefault(key, target)
    return exact


def _key(text: str) -> str:
    return " ".join(text.split())
