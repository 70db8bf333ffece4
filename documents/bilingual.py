"""Reads and writes XML of texts beside their translations: XLIFF, Qt's .ts and TMX.

Only texts without a translation are translated. In XLIFF and Qt, a translation that lacks a placeholder, an
element or a part of its text, or is empty, is marked as one to review.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path

from seq2seq_serve.bundle.placeholders import is_kept
from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.elements import BEGIN, END, TEXT, Content, Event, Names, decoded_xml, events
from seq2seq_serve.documents.markup import Flows, unescaped
from seq2seq_serve.documents.segments import (
    Document,
    Part,
    Segment,
    TextSpan,
    begin_of,
    unchanged,
    wrong_file,
)
from seq2seq_serve.protos.languages import is_same_language

_LANGUAGE = re.compile(rb"""<tuv\b[^<>]*?\b(?:xml:)?lang\s*+=\s*+["']([^"'<>]*+)""")
_LANGUAGES = ("http://www.w3.org/XML/1998/namespace lang", "lang")  # attributes of TMX
_UNTRANSLATED = ("new", "needs-translation", "initial")  # states of XLIFF 1.2, and of 2
_STATE, _TYPE = (
    re.compile(rf"""(?<!\s)\s++{name}\s*+=\s*+("[^"]*"|'[^']*')""") for name in ("state", "type")
)
_MAX_FORMS = 6  # of plurals: no language in the CLDR has more
_HEAD = re.compile(rb"""<(?:[\w.-]+:)?(?:file|xliff|TS)\b(?:[^<>"']|"[^"<]*"|'[^'<]*')*+>""")
_ATTRIBUTE = re.compile(rb"""\s([\w-]++)\s*+=\s*+("[^"]*"|'[^']*')""")
_APPROVED = re.compile(r"""(?<!\s)\s++approved\s*+=\s*+("[^"]*"|'[^']*')""")
_FORM = re.compile(r"<numerusform\s*(?:/>|>\s*</numerusform\s*>)")
_TAG_NAME = re.compile(r"<([^\s/>]+)")
_INDENTATION = re.compile(r"\r?\n[ \t]*\Z")


@dataclass(slots=True)
class _Element:
    """An element that was read. Owned by its unit.

    Attributes:
        tag: What it begins with.
        begin: Its place among the parts of its unit.
        end: The place after it.
        inside: What is inside.
    """

    tag: Event
    begin: int
    end: int = 0
    inside: list[Event] = field(default_factory=list)

    @property
    def has_text(self) -> bool:
        return any(event.kind == TEXT and event.text.strip() for event in self.inside)


@dataclass(slots=True)
class _Unit:
    """A text and its translations, as they are read. Owned by its document.

    Attributes:
        source: The text, in segments if it has them.
        targets: The translations that the file has.
        place: The place for a new one among the parts of the unit.
        indentation: The white space before the text.
        state: What the unit says about its translation.
    """

    source: _Element | None = None
    targets: list[_Element] = field(default_factory=list)
    place: int = 0
    indentation: str = ""
    state: str = ""


class _Entry:
    """A text without a translation. Owned by its document.

    Attributes:
        parts: The first tag of the unit, what is before the translation, it, and what is after it.
        indentation: The white space before the translation, if there was no element for it.
        source_tag: What the element of the text begins with.
        target_tag: What that of the translation begins with; empty if there was none.
        forms: What was inside that.
        is_translated: Whether one of them is.
    """

    def __init__(
        self, unit: _Unit, source: _Element, parts: Sequence[str], content_of: Callable[[Flows], Content]
    ) -> None:
        self.indentation = unit.indentation
        self.source_tag = source.tag.markup
        target = unit.targets[0] if unit.targets else None
        begin, end = (target.begin, target.end) if target else (unit.place, unit.place)
        self.parts = parts[0], "".join(parts[1:begin]), "".join(parts[begin:end]), "".join(parts[end:])
        self.target_tag = target.tag.markup if target else ""
        self.forms = "".join(event.markup for event in target.inside) if target else ""
        self._source = "".join(event.markup for event in source.inside)
        self.is_translated = False
        self._num_translated = 0  # texts whose translations are not empty
        flows = Flows(is_tight=True)
        content = content_of(flows)
        content.add_all(source.inside)
        flows.end()
        self._translation = flows.part()

    def segments(self) -> list[Segment]:
        """Returns the segments of the text."""
        return [replace(one, write=partial(self._translate, one)) for one in self._translation.segments]

    def _translate(self, segment: Segment, pieces: Sequence[TextSpan]) -> None:
        segment.write(pieces)
        self.is_translated = True
        self._num_translated += text_of(pieces).strip() != begin_of(text_of(segment.pieces)).strip()

    def written(self) -> tuple[str, bool]:
        """Returns the markup of the translation, and whether it is one to review."""
        written = self._translation.written()
        is_whole = self._num_translated == len(self._translation.segments)
        return written, not (is_whole and is_kept(unescaped(self._source), unescaped(written)))


class _Bilingual(Document):
    """XML of units, each of which has a text and translations.

    Attributes:
        language_names: The attributes with the languages of texts and of translations.
    """

    errors = "xmlcharrefreplace"
    root: str
    names: Names
    content_of: type[Content] = Content
    unit_names: tuple[str, ...]
    language_names: tuple[Sequence[str], Sequence[str]] = (), ()

    def __init__(self, content: bytes, path: Path) -> None:
        self.encoding, self._content = decoded_xml(content, path)
        self._path = path

    def own_languages(self) -> tuple[set[str], set[str]]:
        heads = [dict(_ATTRIBUTE.findall(found[0])) for found in _HEAD.finditer(self._content)]
        sources, targets = (
            {head[name.encode()][1:-1].decode() for name in names for head in heads if name.encode() in head}
            for names in self.language_names
        )
        return sources, targets

    def parts(self) -> Iterator[Part]:
        parts = self._present = list[str]()  # of the present unit
        self._around: list[tuple[Event, bool]] = []  # elements, and whether their texts are to be translated
        unit: _Unit | None = None
        inside: _Element | None = None
        depth = 0
        for event in events(self._content, self._path, root=self.root):
            if inside is not None:
                depth += (event.kind == BEGIN) - (event.kind == END)
                if depth:
                    inside.inside.append(event)
                else:
                    inside.end = len(parts) + 1
                    inside = None
            if inside is None and event.kind == BEGIN:
                its = event.attributes.get("translate")
                is_open = its == "yes" or (its != "no" and (not self._around or self._around[-1][1]))
                if event.local in self.unit_names:
                    if unit is not None:  # one within another one
                        yield unchanged("".join(parts))
                        parts.clear()
                    unit = _Unit(state=event.attributes.get("state", "")) if is_open else None
                elif unit is not None and (element := self._element(unit, event)):
                    inside, depth = element, 1
                elif unit is None and (name := self._lacks_language(event)):
                    yield Part((), partial(self._with_language, event.markup, name))
                    event.markup = ""
                self._around.append((event, is_open))
            parts.append(event.markup)
            if inside is None and event.kind == END and self._around:
                self._around.pop()
                if unit is not None:
                    self._end(unit, event.local)
                if event.local in self.unit_names and unit is not None:
                    if unit.source is not None and self._is_missing(unit):
                        content_of = partial(self.content_of, names=self.names)
                        entry = _Entry(unit, unit.source, parts, content_of)
                        yield Part(entry.segments(), partial(self._written, entry))
                        parts.clear()
                    unit = None
            if unit is None:
                yield unchanged("".join(parts))
                parts.clear()

    def _with_language(self, tag: str, name: str) -> str:
        """Returns a tag, which lacks it, with the language of the translations."""
        language = self.target_language
        return _with(tag, None, f' {name}="{escape(language)}"') if language else tag

    def _written(self, entry: _Entry) -> str:
        """Returns a unit as it is written now."""
        begin, before, target, after = entry.parts
        if entry.is_translated:
            begin, target = self._write(entry)
            target = target if entry.target_tag else entry.indentation + target
        return "".join((begin, before, target, after))

    def _element(self, unit: _Unit, event: Event) -> _Element | None:
        """Returns the element of a text that begins here; None if none does."""
        if self._around[-1][0].local not in self.unit_names:
            return None
        element = _Element(event, len(self._present))
        if event.local in ("source", "seg-source"):
            unit.source = element
            found = _INDENTATION.search(self._present[-1])
            unit.indentation = found[0] if found else ""
            return element
        if event.local in ("target", "translation"):
            unit.targets.append(element)
            return element
        return None

    def _lacks_language(self, event: Event) -> str:  # noqa: ARG002
        """Returns the attribute of an element outside of units that lacks a language; empty if none does."""
        return ""

    def _end(self, unit: _Unit, name: str) -> None:
        """Ends an element inside a unit: a translation may come after the text."""
        if name in ("source", "seg-source") and self._around[-1][0].local in self.unit_names:
            unit.place = len(self._present)

    @abstractmethod
    def _is_missing(self, unit: _Unit) -> bool:
        """Whether nobody has translated a unit yet."""

    @abstractmethod
    def _write(self, entry: _Entry) -> tuple[str, str]:
        """Returns the tag of a unit, and the element of its new translation."""


class _Segments(Content):
    """The content of a text of XLIFF 1.2; each of its segments is a text of its own. Owned by an entry."""

    def __init__(self, flows: Flows, names: Names) -> None:
        super().__init__(flows, names)
        self._are_segments: list[bool] = []  # of the elements <mrk> around the place

    def add(self, event: Event, name: str) -> None:
        if name == "mrk" and event.kind == BEGIN:
            self._are_segments.append(_is_segment(event))
        is_segment = name == "mrk" and (
            self._are_segments.pop() if event.kind == END else self._are_segments[-1]
        )
        if is_segment and not self._depth:
            self.flows.end(event.markup)
        else:
            super().add(event, name)


def _is_segment(event: Event) -> bool:
    return event.local == "mrk" and event.attributes.get("mtype") == "seg"


class Xliff(_Bilingual):
    """XLIFF 1.2 and 2: units without a target, or whose state says that it is not a translation."""

    content_of = _Segments

    names = Names(
        around=frozenset(["g", "pc", "mrk", "sub"]),
        single=frozenset(["g", "pc", "mrk"]),
        fixed=frozenset(["ph", "x"]),
        beside=frozenset(["bx", "ex", "bpt", "ept", "it", "sc", "ec", "sm", "em", "cp"]),
        has_tags=True,
    )
    root = "xliff"
    unit_names = ("trans-unit", "segment")
    language_names = ("source-language", "srcLang"), ("target-language", "trgLang")

    def _lacks_language(self, event: Event) -> str:
        version = (self._around[0][0] if self._around else event).attributes.get("version", "")
        element, name = ("file", "target-language") if version.startswith("1") else ("xliff", "trgLang")
        return name if event.local == element and name not in event.attributes else ""

    def _is_missing(self, unit: _Unit) -> bool:
        states = [unit.state, *(target.tag.attributes.get("state", "") for target in unit.targets[:1])]
        if not unit.targets or any(state in _UNTRANSLATED for state in states):
            return True
        is_empty = all(_is_segment(event) for event in unit.targets[0].inside if event.kind == BEGIN)
        return is_empty and not unit.targets[0].has_text

    def _write(self, entry: _Entry) -> tuple[str, str]:
        begin, (written, is_to_review) = entry.parts[0], entry.written()
        found = _TAG_NAME.match(entry.source_tag)
        name = f"{found[1].removesuffix('source').removesuffix('seg-') if found else ''}target"  # same prefix
        state, begin = "", _APPROVED.sub("", begin)
        if "segment" in begin.partition(" ")[0]:  # XLIFF 2
            if not is_to_review:
                begin = _with(begin, _STATE, ' state="translated"')
        elif is_to_review:
            state = ' state="needs-review-translation"'
        elif entry.target_tag:
            state = ' state="translated"'
        return begin, f"{_with(entry.target_tag or f'<{name}>', _STATE, state)}{written}</{name}>"


def _with(tag: str, attribute: re.Pattern[str] | None, value: str) -> str:
    """Returns a tag that is not empty, with an attribute in place of the one that it had."""
    return (attribute.sub("", tag) if attribute else tag).rstrip(">").rstrip("/").rstrip() + value + ">"


class QtTranslations(_Bilingual):
    """Qt's .ts: messages without a translation. One to review stays "unfinished"."""

    names = Names(beside=frozenset(["byte"]), keeps_lines=True, has_tags=True)
    root = "TS"
    unit_names = ("message",)
    language_names = ("sourcelanguage",), ("language",)

    def _is_missing(self, unit: _Unit) -> bool:
        if not unit.targets:
            return True
        num_forms = sum(event.kind == BEGIN for event in unit.targets[0].inside)
        if num_forms > _MAX_FORMS:
            raise wrong_file(self._path, f"a message has {num_forms} plural forms, and may have {_MAX_FORMS}")
        is_old = unit.targets[0].tag.attributes.get("type") in ("vanished", "obsolete")
        return not (is_old or unit.targets[0].has_text)

    def _write(self, entry: _Entry) -> tuple[str, str]:
        written, is_to_review = entry.written()
        if _FORM.search(entry.forms):
            form = f"<numerusform>{written}</numerusform>"
            written = _FORM.sub(lambda _: form, entry.forms)
        tag = _with(entry.target_tag or "<translation>", _TYPE, ' type="unfinished"' * is_to_review)
        return entry.parts[0], f"{tag}{written}</translation>"


class TmxDocument(_Bilingual):
    """TMX: units with a text in its language only. The other language is that of the other units.

    The texts of a file for "en" may be in en-US. In one for all languages the first one is translated.
    """

    names = Names(
        around=frozenset(["hi"]), fixed=frozenset(["ph"]), beside=frozenset(["bpt", "ept", "it", "ut"])
    )
    root = "tmx"
    unit_names = ("tu",)

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(content, path)
        found = (found[1].decode() for found in _LANGUAGE.finditer(self._content))
        self._languages = [*dict.fromkeys(found)]
        self._source_language = ""
        self._others: dict[str, None] = {}
        num_segments = sum(len(part.segments) for part in self.parts())  # finds the other language
        if num_segments and len(self._others) != 1:
            known = ", ".join(self._others) or "no language"
            text = f"the file has translations into {known}, and must have them into one"
            raise wrong_file(path, f'{text}: add a <tuv xml:lang="…"> to the first <tu>, or remove others')

    def own_languages(self) -> tuple[set[str], set[str]]:
        return {self._source_language}, set(self._others)

    def _lacks_language(self, event: Event) -> str:
        if event.local != "header" or not self._languages:
            return ""
        language = event.attributes.get("srclang", "*all*")
        if language == "*all*":
            language = self._languages[0]
        same = [one for one in self._languages if one.lower() == language.lower()]
        same += [one for one in self._languages if is_same_language(one, language)]
        if not same:
            known = ", ".join(self._languages[:8])
            text = f"the srclang of the file is {language}, and its texts are in {known}: correct it"
            raise wrong_file(self._path, text)
        self._source_language = same[0]
        return ""

    def _element(self, unit: _Unit, event: Event) -> _Element | None:
        tuv = self._around[-1][0]
        if event.local == "tuv":
            found = _INDENTATION.search(self._present[-1])
            unit.indentation = found[0] if found else ""
        if event.local != "seg" or tuv.local != "tuv":
            return None
        language = next((tuv.attributes[name] for name in _LANGUAGES if name in tuv.attributes), "")
        element = _Element(event, len(self._present))
        if language.lower() == self._source_language.lower():
            unit.source = element
        else:
            self._others[language] = None
            unit.targets.append(element)
        return element

    def _end(self, unit: _Unit, name: str) -> None:
        if name == "tuv":
            unit.place = len(self._present)

    def _is_missing(self, unit: _Unit) -> bool:
        return not any(one.has_text for one in unit.targets)

    def _write(self, entry: _Entry) -> tuple[str, str]:
        written = f"<seg>{entry.written()[0]}</seg>"
        [language] = self._others
        if not entry.target_tag:
            written = f'<tuv xml:lang="{escape(language)}">{written}</tuv>'
        return entry.parts[0], written
