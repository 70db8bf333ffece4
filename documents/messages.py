"""Reads and writes messages of gettext (.po)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from seq2seq_serve.bundle.placeholders import is_kept
from seq2seq_serve.documents.segments import (
    Document,
    Part,
    Segment,
    TextSpan,
    decoded,
    has_choice,
    lines_of,
    unchanged,
    wrong_file,
)
from seq2seq_serve.documents.tags import string_part
from seq2seq_serve.protos.languages import tag_of

_MAX_FORMS = 6  # of plurals: no language in the CLDR has more

_MESSAGE_LINE = re.compile(
    r'(?:(msgctxt|msgid|msgid_plural|msgstr(?:\[([0-9]{1,9})\])?)\s*+)?"((?:[^"\\]|\\.)*+)"'
)
_NUM_FORMS = re.compile(r"nplurals\s*+=\s*+0*+([0-9]++)")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
_LANGUAGE = re.compile(r"^(X-Source-)?Language:[ \t]*+(.*)", re.MULTILINE)
_NO_LANGUAGE = re.compile(r'((?:"|\\n)Language:)[ \t]*+(?=\\n|"\s*$)')
_TO_ESCAPE = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n", "\t": r"\t", "\r": r"\r"})


@dataclass(slots=True)
class _Message:
    """A message of gettext. Owned by its document.

    Attributes:
        before: What is written before it.
        lines: Its lines, with the comments before it.
        begin: The number of its first line, after its comments.
        flags: The number of the line with its flags.
        targets: The numbers of the lines with its translation.
        values: What the lines of each keyword say.
        sources: The text of each plural form, or the only text.
        forms: The parts of their translations.
    """

    before: str = ""
    lines: list[str] = field(default_factory=list)
    begin: int | None = None
    flags: int | None = None
    targets: list[int] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    forms: list[Part] = field(default_factory=list)
    is_translated: bool = False

    def text(self, keyword: str) -> str:
        """Returns the text of a keyword; empty if it is missing."""
        return "".join(self.values.get(keyword, ()))

    @property
    def is_header(self) -> bool:
        """Whether it has the fields of the file, such as its language."""
        return bool(self.text("msgstr")) and not self.text("msgid") and "msgctxt" not in self.values

    def translate(self, segment: Segment, pieces: Sequence[TextSpan]) -> None:
        """Replaces a text of a form."""
        segment.write(pieces)
        self.is_translated = True

    def written(self, newline: str) -> str:
        """Returns its lines, with the translation if there is one."""
        if not self.is_translated:
            return self.before + newline.join(self.lines)
        lines: list[str | None] = [*self.lines]
        first, *others = self.targets
        for number in others:
            lines[number] = None
        targets = [form.written() for form in self.forms]
        written = []
        for form, target in enumerate(targets):
            parts = [f'"{part.translate(_TO_ESCAPE)}"' for part in target.splitlines(keepends=True)]
            keyword = f"msgstr[{form}]" if "msgid_plural" in self.values else "msgstr"
            written += [f"{keyword} {parts[0]}"] if len(parts) == 1 else [f'{keyword} ""', *parts]
        lines[first] = newline.join(written)
        if not all(map(is_kept, self.sources, targets)):
            if self.flags is None:
                lines[self.begin or 0] = f"#, fuzzy{newline}{lines[self.begin or 0]}"
            elif "fuzzy" not in (flags := lines[self.flags] or ""):
                lines[self.flags] = f"{flags.rstrip()}, fuzzy"
        return self.before + newline.join(line for line in lines if line is not None)


class Messages(Document):
    """gettext (.po): each line of a message without a translation is a segment.

    A translation that lacks a placeholder of its message, such as %s or {name}, or has a tag after its end
    is marked as fuzzy.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        self.encoding, self._text = decoded(content, path)
        self._path = path
        self._newline = "\r\n" if "\r\n" in self._text else "\n"
        self._num_forms = 2

    def own_languages(self) -> tuple[set[str], set[str]]:
        first = next(self._messages())
        found = _LANGUAGE.findall(first.text("msgstr")) if first.is_header else []
        sources, targets = (
            {tag_of(tag.partition("@")[0].strip()) for of, tag in found if bool(of) is is_source}
            for is_source in (True, False)
        )
        return sources, targets

    def parts(self) -> Iterator[Part]:
        return map(self._part, self._messages())

    def _messages(self) -> Iterator[_Message]:
        """Reads the file, and yields its messages; raises WrongFile."""
        message, values = _Message(), list[str]()
        for line_number, (line, _) in enumerate(lines_of(self._text), 1):
            shown = line.strip()
            found = _MESSAGE_LINE.fullmatch(shown)
            keyword = found[1] if found else None
            if message.targets and (not found or keyword in ("msgctxt", "msgid")):
                yield message
                message = _Message(before=self._newline)
            number = len(message.lines)
            message.lines.append(line)
            if shown.startswith("#,"):
                message.flags = number
            if not shown or shown[0] == "#":
                continue
            if found is None or (keyword is None and message.begin is None):
                text = f"the file is not a file of gettext (.po): see line {line_number}"
                raise wrong_file(self._path, text)
            if message.begin is None:
                message.begin = number
            if keyword is not None:
                values = message.values.setdefault(keyword, [])
            values.append(_ESCAPE.sub(lambda one: _ESCAPED.get(one[1], one[0]), found[3]))
            if message.targets or (keyword or "").startswith("msgstr"):
                message.targets.append(number)
        yield message

    def _part(self, message: _Message) -> Part:
        """Returns the part of a message, which has segments if it does not have a translation."""
        segments = self._segments(message) if message.targets else []
        written = self._header if message.is_header else _Message.written
        return Part(segments, partial(written, message, self._newline))

    def _header(self, message: _Message, newline: str) -> str:
        """Returns the lines of the header, with the language of the translations if it lacks one."""
        if not self.target_language:
            return message.written(newline)
        fields, language = message.text("msgstr"), self.target_language.replace("-", "_")
        tags = [tag.strip() for of, tag in _LANGUAGE.findall(fields) if not of]
        if not tags:
            last = message.targets[-1]
            if not fields.endswith("\n"):
                message.lines[last] = message.lines[last].rstrip()[:-1] + r'\n"'
            message.lines[last] += rf'{newline}"Language: {language}\n"'
        elif not tags[0]:
            for number in message.targets:
                message.lines[number] = _NO_LANGUAGE.sub(rf"\1 {language}", message.lines[number], count=1)
        return message.written(newline)

    def _segments(self, message: _Message) -> list[Segment]:
        source, plural = message.text("msgid"), message.text("msgid_plural")
        if not source and (forms := _NUM_FORMS.search(message.text("msgstr"))):  # the header
            self._num_forms = int(forms[1][:4])
            if self._num_forms > _MAX_FORMS:
                text = (
                    f"nplurals is {forms[1][:12]} in its header, and can be at most {_MAX_FORMS}: correct it"
                )
                raise wrong_file(self._path, text)
        if any(message.text(keyword) for keyword in message.values if keyword.startswith("msgstr")):
            return []
        num_forms = self._num_forms if plural else 1
        message.sources = [plural] * num_forms if plural else [source]
        if num_forms > 1:
            message.sources[0] = source
        message.forms = [
            unchanged(text) if has_choice(text) else string_part(text) for text in message.sources
        ]
        return [
            replace(segment, write=partial(message.translate, segment))
            for form in message.forms
            for segment in form.segments
        ]
