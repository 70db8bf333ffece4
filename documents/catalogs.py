"""Reads and writes catalogues of strings, by key: .properties, Apple's .strings, JSON and YAML.

The libraries for them write the whole file anew, without its comments or spelling; here only the strings
change. PyYAML reads YAML, and reports where each string stands.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from seq2seq_serve.documents.segments import LINE_BREAK, decoded, wrong_file
from seq2seq_serve.documents.values import PlacedString, Spliced, imported, without_escapes
from seq2seq_serve.protos.languages import is_same_language

_TO_ESCAPE = str.maketrans({"\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f"})
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")

_PROPERTY = re.compile(
    r"[ \t\f]*+(?:[#!][^\r\n]*+|(?:[^\\\s=:]|\\(?:\r\n|.))*+[ \t\f]*+[=:]?[ \t\f]*+"
    r"((?:[^\\\r\n]|\\(?:\r\n|.))*+)\\?+)(?:\r\n|\r|\n|\Z)",
    re.DOTALL,
)
_APPLE_TOKEN = re.compile(
    r'/\*(?:[^*]|\*(?!/))*+(?:\*/)?+|//[^\r\n]*+|"((?:[^"\\]|\\.)*+)"|[=;]|[\w.$:/-]++|(\s++)|(.)', re.DOTALL
)
_JSON_TOKEN = re.compile(r'\s++|"(?:[^"\\\x00-\x1f]|\\.)*+"|[{}\[\],:]|[-+.\w]++|(.)', re.DOTALL)
_JSON_LD = frozenset(f'"@{name}"' for name in ("base", "context", "id", "language", "type", "vocab"))
_YAML_ROOT = re.compile(r"^(?!---|\.\.\.)[^\s#%]", re.MULTILINE)
_YAML_PROPERTIES = re.compile(r"(?:[&!]\S*+\s++)*+")
_YAML_LINE = re.compile(r"^ *+(\S[^\n\r]*+)", re.MULTILINE)
_YAML_INDENTATION = re.compile(r"[\n\r]( ++)[^ \n\r]")
_YAML_INDENTED = re.compile(r"^[ \t]", re.MULTILINE)
_YAML_PLAIN = re.compile(r"\w(?:[^:#]|:(?=\S))*+(?<!\s)")
_YAML_IN_BRACKETS = re.compile(r"\w[^:#\[\]{},]*+(?<!\s)")
_BREAKS, _LINE_BEGIN = re.compile(r"\n++"), re.compile(r"\n(?=[^\n])")


class Properties(Spliced):
    """Java's .properties: values are texts. In a file of ASCII, other characters are written as \\uXXXX."""

    def __init__(self, content: bytes, path: Path) -> None:  # noqa: ARG002
        try:
            super().__init__("utf-8", content.decode())
        except UnicodeDecodeError:
            super().__init__("latin-1", content.decode("latin-1"))

    def strings(self) -> Iterator[PlacedString]:
        is_ascii = self.encoding == "latin-1" or self._text.isascii()
        encode = partial(_property, is_ascii=is_ascii)
        for found in _PROPERTY.finditer(self._text):
            if found[1]:
                yield *found.span(1), without_escapes(found[1]), encode


def _property(text: str, *, is_ascii: bool) -> str:
    written = text.translate(_TO_ESCAPE)
    if written[:1] == " ":
        written = f"\\{written}"
    return _NOT_ASCII.sub(_utf16_escape, written) if is_ascii else written


def _utf16_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


class AppleStrings(Spliced):
    """Apple's .strings, in UTF-8 or UTF-16: values are texts."""

    def __init__(self, content: bytes, path: Path) -> None:
        self._path = path
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "utf-16-le" if content.startswith(codecs.BOM_UTF16_LE) else "utf-16-be"
            super().__init__(encoding, content.decode(encoding, "replace"))
        else:
            super().__init__(*decoded(content, path))

    def strings(self) -> Iterator[PlacedString]:
        before = ""
        for found in _APPLE_TOKEN.finditer(self._text):
            if found[3] and found[0] != "\ufeff":
                raise _not_kind(self._path, "strings (.strings)", self._text, found.start())
            if found[1] and before == "=":
                yield *found.span(1), without_escapes(found[1]), _apple_string
            if not (found[2] or found[0].startswith("/")):
                before = found[0]


def _apple_string(text: str) -> str:
    return text.translate(_TO_ESCAPE).replace('"', '\\"')


class JsonCatalog(Spliced):
    """JSON: values that are strings are texts, but those of JSON-LD's keywords, such as @type.

    Flutter's .arb: those of keys that begin with @ are not.

    The value of its key @@locale becomes the language of the translations, if that is known.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(*decoded(content, path))
        self._path = path

    def strings(self) -> Iterator[PlacedString]:
        is_arb = ".arb" in self._path.suffixes
        is_escaped = self._text.isascii() and r"\u" in self._text
        encode = partial(json.dumps, ensure_ascii=is_escaped)
        opened: list[
            tuple[str, bool]
        ] = []  # the brackets around the place, and whether their values are left out
        expected, is_left_out, key = "value", False, ""
        for found in _JSON_TOKEN.finditer(self._text):
            token = found[0]
            if token.isspace():
                continue
            first, expects = token[0], expected
            around = opened[-1][0] if opened else ""
            expected = "end"
            if found[1]:
                expects = ""
            elif expects in ("value", "first value") and first not in ",:]}":
                if first in "{[":
                    opened.append((first, is_left_out))
                    expected = "first key" if first == "{" else "first value"
                elif first == '"' and not is_left_out:
                    yield *found.span(), self._said(found), encode
                elif first == '"' and key == '"@@locale"' and len(opened) == 1:
                    yield *found.span(), None, encode
            elif first == '"' and expects in ("key", "first key"):
                key = token
                is_left_out = opened[-1][1] or (token[1] == "@" if is_arb else token in _JSON_LD)
                expected = "colon"
            elif first == ":" and expects == "colon":
                expected = "value"
            elif first == "," and expects == "end" and opened:
                expected = "key" if around == "{" else "value"
                is_left_out = opened[-1][1]
            elif expects in ("end", "first key", "first value") and around + first in ("{}", "[]"):
                opened.pop()
            else:
                expects = ""
            if not expects:
                raise _not_kind(self._path, "JSON", self._text, found.start())
        if opened or expected != "end":
            raise _not_kind(self._path, "JSON", self._text, len(self._text))

    def without_text(self, markup: str, encode: Callable[[str], str]) -> str:
        """Returns the language, which is written with a low line."""
        return encode(self.target_language.replace("-", "_")) if self.target_language else markup

    def _said(self, found: re.Match[str]) -> str:
        try:
            return str(json.loads(found[0]))
        except ValueError:
            raise _not_kind(self._path, "JSON", self._text, found.start()) from None


class YamlCatalog(Spliced):
    """YAML: values that are strings are texts. Anchors are not expanded: each text is there once.

    A single key of the outermost mapping that is the language of the texts, as in Rails, becomes that of the
    translations, if both are known.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        self._yaml = imported("yaml", path)
        self._resolver = self._yaml.resolver.Resolver()
        super().__init__(*decoded(content, path))
        self._path = path
        self._newline = "\r\n" if "\r\n" in self._text else "\n"
        self._plain = [partial(self._without_quotes, pattern) for pattern in (_YAML_PLAIN, _YAML_IN_BRACKETS)]

    def strings(self) -> Iterator[PlacedString]:
        opened: list[str] = []  # what comes next at each level: a key or a value of a mapping, or an item
        num_brackets = 0  # levels from the outermost bracket on
        has_one_root = len(_YAML_ROOT.findall(self._text)) == 1
        loader = getattr(self._yaml, "CSafeLoader", self._yaml.SafeLoader)
        try:
            for event in self._yaml.parse(self._text, Loader=loader):
                if isinstance(event, self._yaml.CollectionEndEvent):
                    opened.pop()
                    num_brackets -= num_brackets > 0
                elif isinstance(event, self._yaml.NodeEvent):
                    comes = opened[-1] if opened else "item"
                    if comes != "item":
                        opened[-1] = "value" if comes == "key" else "key"
                    if isinstance(event, self._yaml.CollectionStartEvent):
                        is_list = isinstance(event, self._yaml.SequenceStartEvent)
                        opened.append("item" if is_list else "key")
                        num_brackets += num_brackets > 0 or event.flow_style
                    elif comes != "key" and isinstance(event, self._yaml.ScalarEvent):
                        yield from self._scalar(event, is_in_brackets=num_brackets > 0)
                    elif comes == "key" and has_one_root and len(opened) == 1 and not num_brackets:
                        yield from self._root(event)
        except self._yaml.YAMLError as error:
            text = " ".join(str(error).split())
            raise wrong_file(self._path, f"the file is not YAML: {text}") from error

    def _root(self, event: Any) -> Iterator[PlacedString]:
        """Yields the key of the outermost mapping if it is the language of the texts."""
        if isinstance(event, self._yaml.ScalarEvent) and self.source_language:
            begin, end = event.start_mark.index, event.end_mark.index
            if is_same_language(event.value, self.source_language):
                yield begin, end, None, _json_string if event.style else self._plain[False]

    def without_text(self, markup: str, encode: Callable[[str], str]) -> str:
        """Returns the language in place of that of the texts, with a low line if that has one."""
        language = self.target_language.replace("-", "_" if "_" in markup else "-")
        return encode(language) if language else markup

    def _scalar(self, event: Any, *, is_in_brackets: bool) -> Iterator[PlacedString]:
        begin, end = event.start_mark.index, event.end_mark.index
        if properties := _YAML_PROPERTIES.match(self._text, begin, end):
            begin = properties.end()
        if not self._is_text(event.value, event.style, event.tag):
            return
        if event.style == "|":
            for line in _YAML_LINE.finditer(self._text, self._text.find("\n", begin) + 1, end):
                yield *line.span(1), line[1], str
            return
        written = self._text[begin:end]
        if event.style == ">":
            encode: Callable[[str], str] = partial(self._folded, written)
        elif not event.style:
            encode = self._plain[is_in_brackets]
        else:
            encode = _single_quoted if event.style == "'" else _json_string
        yield begin, end, event.value, encode

    def _is_text(self, value: str, style: str | None, tag: str | None) -> bool:
        if tag is None and not style:
            tag = self._resolver.resolve(self._yaml.ScalarNode, value, (True, False))
        return tag in (None, "!", "tag:yaml.org,2002:str")

    def _without_quotes(self, pattern: re.Pattern[str], text: str) -> str:
        is_plain = pattern.fullmatch(text) and text.isprintable() and self._is_text(text, None, None)
        return text if is_plain else _json_string(text)

    def _folded(self, written: str, text: str) -> str:
        """Returns a text as a block with the header, the indentation and the end of another one."""
        body, after = written.rstrip(), written[len(written.rstrip()) :]
        indentation = _YAML_INDENTATION.search(body)
        if not indentation or _YAML_INDENTED.search(text):
            return _json_string(text) + after
        lines = _BREAKS.sub(r"\g<0>\n", "\n" + text.strip("\n"))[1:]
        block = _LINE_BEGIN.sub("\n" + indentation[1], lines).replace("\n", self._newline)
        return LINE_BREAK.split(body, 1)[0] + block + after


def _single_quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'" if text.isprintable() else _json_string(text)


def _json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _not_kind(path: Path, what: str, text: str, place: int) -> OSError:
    breaks = [found.end() for found in LINE_BREAK.finditer(text, 0, place)]
    column = place - (breaks[-1] if breaks else 0) + 1
    shown = text[place : place + 1]
    reason = f"{shown!r} is not expected there" if shown else "something is missing at its end"
    return wrong_file(path, f"the file is not {what}: see line {len(breaks) + 1}, column {column}: {reason}")
