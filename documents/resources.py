"""Reads and writes strings of programs in XML: Android's strings.xml, .resx of .NET, Apple's .stringsdict."""

from __future__ import annotations

import re

from seq2seq_serve.documents.elements import Content, Event, Names, XmlTexts
from seq2seq_serve.documents.markup import escaped_xml, unescaped
from seq2seq_serve.documents.values import without_escapes

_ANDROID_MARK = re.compile(r"""((?<!\\)(?:\\\\)*+\\n|(?<!\\)"|&quot;)""")
_ANDROID_REFERENCE = re.compile(r"\s*+[@?][\w.:/+-]++\s*+")
_ANDROID_ESCAPES = str.maketrans({"\\": r"\\", "'": r"\'", '"': r"\""})
_ANDROID_SIGN = re.compile(r"\A\s*+(?=[@?])")  # begins a reference
_ANDROID_STYLES = "a annotation b big font i s small strike sub sup tt u"
_ANDROID_TEXTS = (("resources", "string"), ("plurals", "item"), ("string-array", "item"))
_PLURAL_FORMS = ("zero", "one", "two", "few", "many", "other")


class _AndroidContent(Content):
    def add_text(self, event: Event) -> None:
        if "<![CDATA[" in event.markup:
            super().add_text(event)
            return
        for number, part in enumerate(_ANDROID_MARK.split(event.markup)):
            if number % 2:
                (self.flows.end if part.endswith("n") else self.flows.add_markup)(part)
            elif _ANDROID_REFERENCE.fullmatch(part):
                self.flows.add_markup(part)
            elif part:
                self.flows.add_text(part, without_escapes(unescaped(part)))


def _escaped(text: str) -> str:
    return escaped_xml(_ANDROID_SIGN.sub(r"\g<0>\\", text.translate(_ANDROID_ESCAPES)))


class AndroidStrings(XmlTexts):
    """Android's strings.xml: strings, plurals and lists, but those with translatable="false"."""

    root = "resources"
    names = Names(around=frozenset(_ANDROID_STYLES.split()), fixed=frozenset(["g"]))
    content_of = _AndroidContent
    escape = staticmethod(_escaped)

    def has_text(self, event: Event) -> bool:
        parent = self.around[-1] if self.around else event
        is_kept = "false" in (one.attributes.get("translatable") for one in (parent, event))
        return not is_kept and (parent.local, event.local) in _ANDROID_TEXTS


class NetResources(XmlTexts):
    """.resx of .NET: the values of strings; those of other types, and what a form's designer writes, stay."""

    root = "root"
    names = Names(keeps_lines=True)

    def has_text(self, event: Event) -> bool:
        if not self.around or self.around[-1].local != "data" or event.local != "value":
            return False
        its = self.around[-1].attributes
        return not (its.keys() & {"type", "mimetype"} or its.get("name", "").startswith(">>"))


class AppleStringsDict(XmlTexts):
    """Apple's .stringsdict: the forms of plurals."""

    root = "plist"

    def has_text(self, event: Event) -> bool:
        return event.local == "string" and self.before in _PLURAL_FORMS
