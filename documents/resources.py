"""Reads and writes strings of programs in XML: Android's strings.xml, .resx of .NET, Apple's .stringsdict."""

from __future__ import annotations

import re
from collections.abc import Sequence

from seq2seq_serve.documents.elements import OTHER, TEXT, Content, Event, Names, XmlTexts
from seq2seq_serve.documents.markup import escaped_xml, unescaped
from seq2seq_serve.documents.values import without_escapes

_ANDROID_MARK = re.compile(r"""((?<!\\)(?:\\\\)*+\\n|(?<!\\)"|&quot;)""")
_ANDROID_REFERENCE = re.compile(r"\s*+[@?][\w.:/+-]++\s*+")
_ANDROID_ESCAPES = str.maketrans({"\\": r"\\", "'": r"\'", '"': r"\""})
_SPACE = r"(?:\s|\\[ t]|\\u(?:0020|00[aA]0|20[0-2][0-9a-fA-F]|3000))"
_ANDROID_BEGIN = re.compile(rf"(?P<edge>{_SPACE}++)(?P<text>.*+)", re.DOTALL)
_ANDROID_END = re.compile(rf"(?P<text>(?:{_SPACE}*+(?:\\.|[^\s\\]))*+)(?P<edge>{_SPACE}++)\Z", re.DOTALL)
_ANDROID_SIGN = re.compile(r"\A\s*+(?=[@?])")  # begins a reference
_ANDROID_STYLES = "a annotation b big font i s small strike sub sup tt u"
_ANDROID_TEXTS = (("resources", "string"), ("plurals", "item"), ("string-array", "item"))
_PLURAL_FORMS = ("zero", "one", "two", "few", "many", "other")


def _said(text: str) -> str:
    return without_escapes(unescaped(text))


def _escaped(text: str) -> str:
    return escaped_xml(_ANDROID_SIGN.sub(r"\g<0>\\", text.translate(_ANDROID_ESCAPES)))


class _AndroidContent(Content):
    """The content of a string, whose escaped spaces at its ends stay as they are written."""

    decoded = staticmethod(_said)
    escape = staticmethod(_escaped)

    def add_all(self, events: Sequence[Event]) -> None:
        inside = list(events)
        for place, edge in ((0, _ANDROID_BEGIN), (-1, _ANDROID_END)):
            text = inside[place] if inside else Event(OTHER)
            if text.kind != TEXT or not (found := edge.match(text.markup)) or "\\" not in found["edge"]:
                continue
            spaces, rest = Event(OTHER, markup=found["edge"]), Event(TEXT, markup=found["text"])
            inside[place:] = [spaces, rest, *inside[1:]] if place == 0 else [rest, spaces]
        super().add_all(inside)

    def add_lines(self, markup: str) -> None:
        for number, part in enumerate(_ANDROID_MARK.split(markup)):
            if number % 2:
                (self.flows.end if part.endswith("n") else self.flows.add_markup)(part)
            elif _ANDROID_REFERENCE.fullmatch(part):
                self.flows.add_markup(part)
            elif part:
                self.flows.add_text(part, self.said(part))


class AndroidStrings(XmlTexts):
    """Android's strings.xml: strings, plurals and lists, but those with translatable="false"."""

    root = "resources"
    names = Names(around=frozenset(_ANDROID_STYLES.split()), fixed=frozenset(["g"]), has_tags=True)
    content_of = _AndroidContent
    escape = staticmethod(_escaped)

    def has_text(self, event: Event) -> bool:
        parent = self.around[-1] if self.around else event
        is_kept = "false" in (one.attributes.get("translatable") for one in (parent, event))
        return not is_kept and (parent.local, event.local) in _ANDROID_TEXTS


class NetResources(XmlTexts):
    """.resx of .NET: the values of strings; those of other types, and what a form's designer writes, stay."""

    root = "root"
    names = Names(keeps_lines=True, has_tags=True)

    def has_text(self, event: Event) -> bool:
        if not self.around or self.around[-1].local != "data" or event.local != "value":
            return False
        its = self.around[-1].attributes
        return not (its.keys() & {"type", "mimetype"} or its.get("name", "").startswith(">>"))


class AppleStringsDict(XmlTexts):
    """Apple's .stringsdict: the forms of plurals."""

    root = "plist"
    names = Names(has_tags=True)

    def has_text(self, event: Event) -> bool:
        return event.local == "string" and self.before in _PLURAL_FORMS
