"""Reads glossaries: how terms are translated, from lines of two columns or TBX."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seq2seq_serve.bundle.characters import is_blank
from seq2seq_serve.bundle.words import MAX_TERM_LENGTH, phrase, words
from seq2seq_serve.client.files.columns import is_source, is_target, tag_in
from seq2seq_serve.client.files.elements import TextElements
from seq2seq_serve.client.files.lines import is_compressed, read_text
from seq2seq_serve.client.files.pairs import LanguagePair, Model, Side, languages_of
from seq2seq_serve.documents.segments import WrongFile, wrong_file
from seq2seq_serve.protos.languages import is_known, is_same_language
from seq2seq_serve.protos.options import OPTIONS, terms_of
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, Term

MAX_TERMS = OPTIONS["terms"].max_items or 0
_MAX_NAMED = 3  # wrong lines
_MAX_SHOWN = 40  # characters of the name of a column
_LOOKED_THROUGH = 2**12  # characters of a text
_COMMENT = "#"
_CSV = ".csv"
_QUOTED = re.compile(r'\s*"((?:[^"]|"")*)"\s*')  # as spreadsheets write cells with commas or quotes
_TBX = (".tbx", ".xml")
_WORKBOOKS = (".xls", ".xlsx", ".ods", ".numbers")


def read_glossary(
    path: Path | str, *, source_language: str = "", target_language: str = ""
) -> list[tuple[str, str]]:
    """Returns the terms of a file, each with its translation, in their order.

    Args:
        path: A file of lines with a term, a tab and its translation, a table (`.csv`), or TBX (`.tbx` or
            `.xml`). A first line may name these columns, in any order and among others.
        source_language: The language of the terms, as a tag such as "en". Empty: in TBX, the only other one.
        target_language: That of the translations.

    Raises:
        OSError: The file cannot be read, is not what its name says, does not have these languages, has more
            than `MAX_TERMS` terms, or two translations of one term.
    """
    return _read(Path(path), source_language, target_language).pairs()


def with_glossary(options: GenerateOptions, path: Path | None, model: Model) -> GenerateOptions:
    """Returns the options of a run with the terms of a file, in the languages of the run.

    A file without terms, and a line that is left out, are reported on stderr.

    Raises:
        OSError: As `read_glossary`.
    """
    if path is None:
        return options
    terms = _read(path, **languages_of(options, model))
    for key, given in _given(options).found.items():
        known = terms.found.get(key, given)
        if known.target != given.target:
            text = f"the term {known.source!r} has two translations, {known.target!r} and {given.target!r}"
            raise wrong_file(path, f"line {known.line}: {text} of --terms: remove one")
    if terms.columns:
        source, target = (name[:_MAX_SHOWN] for name in terms.columns)
        sys.stderr.write(f"{path}: column {source!r} has the terms, and {target!r} their translations\n")
    if not terms.found:
        sys.stderr.write(f"warning: {path}: 0 terms\n")
    with_terms = GenerateOptions(terms=terms_of(terms.pairs()))
    with_terms.MergeFrom(options)
    return with_terms


def problem_of_terms(options: GenerateOptions) -> str:
    """Returns which term of options is blank or has two translations; empty if none."""
    try:
        _given(options)
    except WrongFile as error:
        return str(error.strerror)
    return ""


class TermFinder:
    """Finds the terms of options, and their translations, in texts. It does not change.

    Long texts are searched in their beginning only.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        self._terms = _by_first_word(term.source for term in terms)
        self._translations = _by_first_word(term.target for term in terms)

    def find(self, text: str) -> tuple[list[str], list[str]]:
        """Returns the terms and the translations that are in a text."""
        its = [word.casefold() for word in words(text[:_LOOKED_THROUGH])]
        return _found(self._terms, its), _found(self._translations, its)


def _by_first_word(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns texts by their first words and by all of their words."""
    found: dict[str, dict[str, str]] = {}
    for text in texts:
        if its := [word.casefold() for word in words(text)]:
            found.setdefault(its[0], {})[phrase(its)] = text
    return found


def _found(wanted: dict[str, dict[str, str]], its: list[str]) -> list[str]:
    """Returns which of the texts of `_by_first_word` are among the words of a text."""
    whole = "\n" + phrase(its)
    beginning = [wanted[word] for word in dict.fromkeys(its) if word in wanted]
    return [one for some in beginning for key, one in some.items() if f"\n{key}" in whole]


def _suffix(path: Path) -> str:
    """Returns the suffix of a file that says what it is, also of a compressed one."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def _given(options: GenerateOptions) -> _Terms:
    """Returns the terms of options that are translated by the same words everywhere."""
    terms = _Terms(Path())
    for term in options.terms:
        if is_blank(term.source) or is_blank(term.target):
            raise wrong_file(Path(), f"the term {term.source!r} or its translation {term.target!r} is blank")
        if not term.case_sensitive:
            terms.put(_Term(term.source, term.target, 0))
    return terms


@dataclass(frozen=True)
class _Term:
    """A term, its translation, and the line of the file where it stands; 0 without a file."""

    source: str
    target: str
    line: int


@dataclass
class _Terms:
    """The terms of a file so far. Owned by `_read`.

    Attributes:
        path: The file.
        found: The terms, by what makes two of them one for a server.
        columns: The names of the columns with the terms and with their translations, if the first line has
            them.
    """

    path: Path
    found: dict[str, _Term] = field(default_factory=dict)
    columns: tuple[str, str] | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Returns each term with its translation."""
        return [(term.source, term.target) for term in self.found.values()]

    def put(self, term: _Term) -> None:
        """Adds a term, of any length; raises WrongFile if it has another translation already."""
        known = self.found.setdefault(phrase(words(term.source)).casefold(), term)
        if known.target != term.target:
            problem = f"the term {term.source!r} has two translations, {known.target!r} and {term.target!r}"
            lines = f"lines {known.line} and {term.line}: " if term.line else ""
            raise wrong_file(self.path, f"{lines}{problem}: remove one")

    def add(self, source: str, target: str, line: int) -> None:
        """Adds a term.

        Raises:
            WrongFile: It is too long, has another translation already, or is one too many.
        """
        for text in (source, target):
            if len(text) > MAX_TERM_LENGTH:
                problem = f"line {line}: a term has {len(text)} characters, and may have {MAX_TERM_LENGTH}"
                raise wrong_file(self.path, problem)
        self.put(_Term(source, target, line))
        if len(self.found) > MAX_TERMS:
            raise wrong_file(self.path, f"line {line}: the file has more than {MAX_TERMS} terms: remove some")


def _read(path: Path, source_language: str, target_language: str) -> _Terms:
    """Returns the terms of a file; see `read_glossary`."""
    terms = _Terms(path)
    if _suffix(path) in _WORKBOOKS:
        raise wrong_file(path, "a glossary is lines of text, CSV or TBX: save the table as CSV in UTF-8")
    if _suffix(path) in _TBX:
        _Tbx(path, LanguagePair(source_language, target_language), terms).read()
    else:
        _read_lines(path, terms, (source_language, target_language))
    return terms


def _read_lines(path: Path, terms: _Terms, languages: tuple[str, str]) -> None:
    places, wrong, is_first = None, list[tuple[int, list[str]]](), True
    for number, row in _rows(path):
        cells = [" ".join(text.split()) for text in row]
        while not cells[-1]:
            del cells[-1]
        was_first, is_first = is_first, False
        if was_first and (places := _named_columns(path, cells, languages)):
            terms.columns = cells[places[0]], cells[places[1]]
            continue
        its = [cells[place] for place in places if place < len(cells)] if places else cells
        if len(its) == 2 and not any(map(is_blank, its)):
            terms.add(its[0], its[1], number)
        else:
            wrong.append((number, cells))
    if wrong:
        named = ", ".join(str(number) for number, _ in wrong[:_MAX_NAMED])
        named += ", …" * (len(wrong) > _MAX_NAMED)
        lines = "line" if len(wrong) == 1 else "lines"
        is_table = _suffix(path) == _CSV
        text = "a term and its translation are expected"
        if not places:
            what = "two columns" if is_table else "a term, a tab and its translation"
            more = "of more columns, the first line has the names, such as source and target"
            text = f"{what} are expected; {more}"
        if not is_table and any(len(cells) == 1 and set(",;") & set(cells[0]) for _, cells in wrong):
            text += "; the name of a table with commas or semicolons ends with .csv"
        raise wrong_file(path, f"{lines} {named}: {text}")


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line of a file, or row of a table, with its cells; leaves out comments."""
    text = read_text(path)
    if _suffix(path) != _CSV:
        rows = (
            (number, [_unquoted(cell) for cell in line.split("\t")])
            for number, line in enumerate(text.split("\n"), start=1)
        )
    else:
        first = next((line for line in text.split("\n") if line.strip() and line[0] != _COMMENT), "")
        delimiter = max(",;\t", key=first.count)  # spreadsheets of some countries write semicolons
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        rows = ((reader.line_num, row) for row in reader)
    try:
        for number, row in rows:
            if any(map(str.strip, row)) and not row[0].startswith(_COMMENT):
                yield number, row
    except csv.Error as error:
        raise wrong_file(path, f"line {reader.line_num}: {error}") from error


def _unquoted(cell: str) -> str:
    quoted = _QUOTED.fullmatch(cell)
    return quoted[1].replace('""', '"') if quoted else cell


def _named_columns(path: Path, row: list[str], languages: tuple[str, str]) -> tuple[int, int] | None:
    """Returns the places of the columns that a first line names; None if it is a term.

    Raises:
        WrongFile: It names two languages by words, and the run has others.
    """
    source, target = (
        next((place for place, cell in enumerate(row) if is_its(cell)), None)
        for is_its in (is_source, is_target)
    )
    if source is None or target is None:
        return _columns_of_languages(path, row, languages)
    return source, target


def _columns_of_languages(path: Path, row: list[str], languages: tuple[str, str]) -> tuple[int, int] | None:
    """Returns what `_named_columns` does for languages.

    Codes are also words (`it` is `es` in German), so they must be those of the run as far as it has some. A
    row may also end with the languages of its term and translation.
    """
    tags = [tag_in(cell) for cell in row]
    known = [language if is_known(language) else "" for language in languages]  # not mul
    pair = LanguagePair(*known)
    if is_known(tags[0]) and not any(known):
        pair.suggest_source(tags[0])
    sides = [pair.side(tag) if is_known(tag) else Side.NEITHER for tag in tags]
    are_names = len(row) > 1 and all(tag != cell for tag, cell in zip(tags[:2], row, strict=False))
    if are_names and not is_same_language(*tags[:2]):
        pair.check(path)
    if not {Side.SOURCE, Side.TARGET} <= set(sides):
        return None
    target = max(
        (place for place, side in enumerate(sides) if side is Side.TARGET),
        key=lambda place: pair.is_exact(tags[place]),
    )
    source = sides.index(Side.SOURCE)
    return (source, target) if sum(not is_known(tag) for tag in tags[: max(source, target)]) < 2 else None


class _Tbx(TextElements):
    """A file of TBX (version 2 or 3), whose terms are added to others. Owned by `_read`.

    If a concept has several terms in the target's language, its preferred one counts, or the first one that
    is not deprecated.
    """

    roots = ("tbx", "martif")
    text_names = ("term", "termNote")

    def __init__(self, path: Path, languages: LanguagePair, terms: _Terms) -> None:
        super().__init__(path)
        self._languages, self._terms = languages, terms
        self._sources: list[tuple[str, int]] = []  # of the present concept, with their lines
        self._target, self._target_rank = "", (False, 0)
        self._side, self._is_exact = Side.NEITHER, False  # of the present language
        self._term, self._line, self._status = "", 0, ""
        self._is_term = self._is_status = False  # whether the present text is a term, or the status of one

    def read(self) -> None:
        super().read()
        self._languages.check(self._path)

    def begin(self, name: str, attributes: dict[str, str]) -> None:
        if name in ("conceptEntry", "termEntry"):
            self._sources, self._target, self._target_rank = [], "", (False, 0)
        elif name in ("langSec", "langSet"):
            tag = attributes.get("xml:lang", "")
            self._side = self._languages.side(tag)
            self._is_exact = self._side is Side.TARGET and self._languages.is_exact(tag)
        elif name in ("termSec", "tig", "ntig"):
            self._term = self._status = ""
        self._is_term = name == "term"
        self._is_status = name == "termNote" and attributes.get("type") == "administrativeStatus"

    def take(self, text: str) -> None:
        if self._is_status:
            self._status = text
        elif self._is_term and not self._term and not is_blank(text):
            self._term, self._line = " ".join(text.split()), self.line

    def end(self, name: str) -> None:
        if name in ("termSec", "tig", "ntig"):
            self._add_term()
        elif name in ("conceptEntry", "termEntry") and self._target:
            for source, line in self._sources:
                self._terms.add(source, self._target, line)

    def _add_term(self) -> None:
        if self._side is Side.SOURCE and self._term:
            self._sources.append((self._term, self._line))
        rank = self._is_exact, _rank(self._status)
        if self._side is Side.TARGET and self._term and rank[1] and rank > self._target_rank:
            self._target, self._target_rank = self._term, rank


def _rank(status: str) -> int:
    """Returns how good a term is by its administrative status; 0 for one that is not to be used."""
    if status.startswith(("deprecated", "superseded")):
        return 0
    return 2 if status.startswith("preferred") else 1
