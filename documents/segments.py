"""Types and limits that all readers of documents use: texts in pieces, each with a formatting.

Files come from anywhere: the time and memory that one takes are in proportion to its size, whatever is in it.
Every expression of the readers reads each character a bounded number of times, and tags are a chain, not a
list for each text. (Beautiful Soup, polib and python-docx take time in the square of the size.)
"""

from __future__ import annotations

import codecs
import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, takewhile
from pathlib import Path
from typing import IO, ClassVar

from seq2seq_serve.bundle.placeholders import placeholders
from seq2seq_serve.documents.alignment import formatted, longest, text_of
from seq2seq_serve.documents.terms import NO_TERMS, WholeTerms
from seq2seq_serve.protos.languages import is_other_language
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse

_ZIP, _OLE = (b"PK\x03\x04", b"PK\x05\x06"), b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"  # how files begin

COMPRESSED = ".gz"  # how the names of compressed files end

TextSpan = tuple[str, int]  # a text, and the number of its formatting within the segment
WITH_TAGS = -1  # in place of that number

MAX_BYTES = 32 * 2**20  # of the texts of a document with their markup
MAX_MARKS = 1_000_000  # tags and lines of a document, each of which takes up to a kilobyte where all are held

LETTER = re.compile(r"[^\W\d_]")
LINE_BREAK = re.compile(r"\r\n|\r|\n")


# A choice by number or word, as ICU and Java write it, is code around texts; half a character cannot be sent.
_NOT_TEXT = re.compile(r"\{\s*+[\w.]++\s*+,\s*+(?:plural|select|selectordinal|choice)\s*+,|[\ud800-\udfff]")
_MAY_BE_PLACEHOLDER = re.compile(r"[<{$%@]|://|www\.")
_DIRECTIVE = re.compile(r"%[-_^#0]?[a-zA-Z]")  # of a format for dates
# Marks of a list that are typed before a text. A dash or number without white space after it is none.
_MARKS = re.compile(
    r"""
    \s*+ (?:
        (?: [-*+‐-―−·・※›»ㅇ] | [←-⇿∙⌀-⏿①-⓿■-➿⬀-⯿\U0001f300-\U0001faff]\ufe0f?+
          | \[[ xX]\] | \([ ]\) | \(?(?:[0-9]{1,3}|[a-zA-Z]|[ivx]{2,5})\) ) \s++
        | [•‣⁃▪▫◦☐-☒✓-✘\uf000-\uf0ff]\ufe0f?+\s*+
    )++
    """,
    re.VERBOSE,
)
_CONTROL = re.compile(r"\s*[\x00-\x1f\x7f-\x9f\u2028\u2029]\s*+")  # line breaks, tabs, and what no text has


def tags_between(less: str, greater: str, quotes: Sequence[str] = ('"', "'")) -> re.Pattern[str]:
    """Returns what finds tags, given how their brackets and the quotes around values may be written."""
    inside = rf"(?:(?!{less}|{greater}).)"
    values = "|".join(rf"=\s?\\?(?:{quote})(?:(?!{less}|{quote}).){{0,500}}(?:{quote})" for quote in quotes)
    return re.compile(
        rf"(?:{less})(/?)([a-zA-Z][\w.:-]{{0,63}}|[0-9]{{1,3}})(\s(?>{values}|{inside}){{0,500}}?)?(/?)(?:{greater})",
        re.DOTALL,
    )


TAG = tags_between("<", ">")  # as a string of a program has it


def _tags_of(text: str) -> list[str]:
    return sorted(found[0] for found in TAG.finditer(text))


def has_words(text: str) -> bool:
    """Whether a text has letters outside of placeholders, and of formats for dates."""
    if not LETTER.search(text) or not _MAY_BE_PLACEHOLDER.search(text):
        return LETTER.search(text) is not None
    parts, end = list[str](), 0
    for begin, after in placeholders(text):
        parts.append(text[end:begin])
        end = after
    return LETTER.search(_DIRECTIVE.sub("", " ".join([*parts, text[end:]]))) is not None


def begin_of(text: str) -> str:
    """Returns the marks of a list that a text begins with, and the white space around them; empty if none.

    A text that has them at its end, too, such as "- or -", does not begin with them.
    """
    found = _MARKS.match(text)
    if found is None or text.rstrip().endswith(f" {found[0].strip()}"):
        return ""
    return found[0] if LETTER.search(text, found.end()) else ""


def has_choice(text: str) -> bool:
    """Whether a text is code with texts inside, or has what cannot be sent, and stays as it is."""
    return _NOT_TEXT.search(text) is not None


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file's name in small letters, also of a compressed file."""
    return Path(path.name.lower().removesuffix(COMPRESSED)).suffix


class WrongFile(OSError):
    """The content of a file is wrong."""


def wrong_file(path: Path, text: str) -> WrongFile:
    """Returns the error for a file whose content is wrong; commands print it after the file's name."""
    return WrongFile(None, text, str(path))


class FormattedText(str):
    """A text whose parts have different formattings, for which its answer needs the alignment of words."""


class SoftwareText(str):
    """A text of a program, whose placeholders stay as they are."""


class FormattedSoftwareText(FormattedText, SoftwareText):
    """A text of a program whose parts have different formattings.

    Attributes:
        with_tags: The text with its tags, if the program has them as a part of it; empty otherwise.
    """

    with_tags: str = ""


TextKind = tuple[bool, bool]  # whether a text is a `FormattedText`, and whether a `SoftwareText`


def kind_of(text: str) -> TextKind:
    """Returns what makes the options of a text others than those of a plain one."""
    return isinstance(text, FormattedText), isinstance(text, SoftwareText)


def software_text(text: str, with_tags: str = "") -> SoftwareText:
    """Returns a text of a document as one of a program; `with_tags` as that of its segment."""
    if not isinstance(text, FormattedText):
        return SoftwareText(text)
    found = FormattedSoftwareText(text)
    found.with_tags = " ".join(with_tags.removeprefix(begin_of(with_tags)).split())
    return found


def with_tags(text: str) -> str:
    """Returns a text with the tags that a program has in it, for what does not have an alignment of words."""
    whole = text.with_tags if isinstance(text, FormattedSoftwareText) else ""
    return SoftwareText(whole) if whole else text


def options_by_kind(
    options: GenerateOptions, *, has_attention: bool, keeps_placeholders: bool
) -> dict[TextKind, GenerateOptions]:
    """Returns the options of texts of each kind.

    Args:
        options: Those of plain texts.
        has_attention: Whether the model has attention.
        keeps_placeholders: Whether those of programs are kept, where no tokens are sampled.
    """
    found: dict[TextKind, GenerateOptions] = {}
    for is_formatted in (False, True):
        its = _with_word_alignment(options, has_attention=has_attention and is_formatted)
        kept = GenerateOptions(keep_placeholders=keeps_placeholders and not options.temperature)
        kept.MergeFrom(its)
        found |= {(is_formatted, False): its, (is_formatted, True): kept}
    return found


def _with_word_alignment(options: GenerateOptions, *, has_attention: bool) -> GenerateOptions:
    """Returns the options of a `FormattedText`: those given, and word alignment where there is attention."""
    aligned = GenerateOptions()
    aligned.CopyFrom(options)
    aligned.word_alignment |= has_attention
    return aligned


@dataclass(frozen=True, slots=True)
class Segment:
    """A text to translate.

    Attributes:
        pieces: Its text in order.
        write: Puts translated pieces into the document; a formatting may have none, or several. One with
            the formatting `WITH_TAGS` is a whole text with tags.
        kept: The numbers of pieces that belong together, such as those of a link; the inner of two is first.
            One of them gets a word of the target, as far as there are enough words.
        with_tags: Its text with the tags that a program has in it; empty if there are none.
        fixed: The formattings of pieces that are not typed, such as code, which are no marks of a list.
    """

    pieces: Sequence[TextSpan]
    write: Callable[[Sequence[TextSpan]], None]
    kept: Sequence[range] = ()
    with_tags: str = ""
    fixed: Collection[int] = ()

    @property
    def text(self) -> str:
        """The text after `begin_of` it, with single spaces, as the model gets it.

        A `FormattedText` if its parts have different formattings.
        """
        _, pieces = self._cut()
        text = " ".join(text_of(pieces).split())
        return FormattedText(text) if _is_formatted(pieces) else text

    def _cut(self) -> tuple[Sequence[TextSpan], Sequence[TextSpan]]:
        """Returns the pieces of the marks that it begins with, and all pieces, without these marks."""
        typed = takewhile(lambda piece: piece[1] not in self.fixed, self.pieces)
        whole = text_of(self.pieces)
        left = min(len(begin_of(whole)), len(text_of(typed)))
        if not left:
            return (), self.pieces
        begin, rest = list[TextSpan](), list[TextSpan]()
        for text, number in self.pieces:
            begin.append((text[:left], number))
            rest.append((text[left:], number))
            left = max(left - len(text), 0)
        return begin, rest

    def translate(self, answer: GenerateResponse, terms: WholeTerms = NO_TERMS) -> None:
        """Puts the answer to its text into the document, with the white space around it.

        A text is a line, and so is its translation: a memory may have it in several.

        Args:
            answer: The answer.
            terms: The terms of its options.
        """
        target = _CONTROL.sub(" ", answer.hypotheses[0].text).strip()
        if target == self.text:
            self.write(self.pieces)
            return
        if self.with_tags and _tags_of(target) == _tags_of(self.with_tags):
            whole = text_of(self.pieces)
            begin, end = len(whole) - len(whole.lstrip()), len(whole.rstrip())
            spaced = f"{begin_of(self.with_tags) or whole[:begin]}{target}{whole[end:]}"
            self.write([(spaced, WITH_TAGS)])
            return
        marks, sent = self._cut()
        pieces = [(target, longest(sent))]
        if _is_formatted(sent):
            alignments = [part.hypotheses[0].word_alignment for part in answer.sentences or [answer]]
            num_before = list(accumulate((bool(text.strip()) for text, _ in sent), initial=0))
            kept = [group for group in self.kept if num_before[group.start] < num_before[group.stop]]
            pieces = self._with_whole_placeholders(formatted(sent, target, kept, alignments))
            pieces = terms.joined(sent, pieces, kept)
        before = _space(sent)
        after = [(text[::-1], number) for text, number in reversed(sent)]
        after = [(text[::-1], number) for text, number in reversed([*_space(after)])]
        groups = groupby([*marks, *before, *pieces, *after], key=lambda piece: piece[1])
        self.write([(text_of(group), number) for number, group in groups])

    def _with_whole_placeholders(self, pieces: Sequence[TextSpan]) -> list[TextSpan]:
        """Returns pieces of a target: none ends within a placeholder, unless one of the source does."""
        target = text_of(pieces)
        if not _MAY_BE_PLACEHOLDER.search(target):
            return [*pieces]
        formattings = [formatting for text, formatting in pieces for _ in text]  # of each character
        sizes = Counter(
            one for one, character in zip(formattings, target, strict=True) if not character.isspace()
        )
        source = text_of(self.pieces)
        for begin, end in placeholders(target):
            text, inside = target[begin:end], formattings[begin:end]
            is_split = text in source and not any(text in piece for piece, _ in self.pieces)
            if len(set(inside)) > 1 and not is_split:
                # One that no other word has, or that of its letters, since its marks are between words
                votes = [one for one, character in zip(inside, text, strict=True) if character.isalnum()]
                chosen = max(inside, key=lambda one: (inside.count(one) == sizes[one], votes.count(one)))
                formattings[begin:end] = [chosen] * len(inside)
        runs = groupby(zip(target, formattings, strict=True), key=lambda one: one[1])
        return [("".join(character for character, _ in run), formatting) for formatting, run in runs]


def _is_formatted(pieces: Sequence[TextSpan]) -> bool:
    """Whether parts of a text have different formattings."""
    return len({formatting for text, formatting in pieces if text.strip()}) > 1


def _space(pieces: Iterable[TextSpan]) -> Iterator[TextSpan]:
    """Yields the white space before the first word of a text."""
    for text, number in pieces:
        words = text.lstrip()
        if space := text[: len(text) - len(words)]:
            yield space, number
        if words:
            return


@dataclass(slots=True)
class Part:
    """A part of a document.

    Attributes:
        segments: The texts to translate. When those of this part and of all before it are translated, it can
            be written.
        written: Returns what is written now.
    """

    segments: Sequence[Segment]
    written: Callable[[], str]


def unchanged(text: str) -> Part:
    """Returns a part that is written as it is."""
    return Part((), text.__str__)


class Output:
    """Writes the parts of a document to a stream.

    Args:
        stream: Where to write.
        encoding: Of the file.
        errors: What to do with characters that the encoding does not have.
    """

    def __init__(self, stream: IO[bytes], encoding: str, errors: str) -> None:
        self._stream = stream
        self._encoder = codecs.getincrementalencoder(encoding)(errors)

    def add(self, part: Part) -> None:
        """Writes the next part."""
        self._stream.write(self._encoder.encode(part.written()))

    def close(self) -> None:
        """Writes the end."""
        self._stream.write(self._encoder.encode("", final=True))


class Document(ABC):
    """A file whose texts are translated in place. Owned by the command.

    It is read part by part, so that a caller that writes each part as soon as it is translated holds only a
    few of them. `segments` and `content` are for callers that hold all.

    Attributes:
        encoding: That of the file.
        errors: What to do with characters of translations that the encoding does not have.
        source_language: The tag of the language of its texts, set before they are read; empty if not known.
        target_language: The tag of the language (BCP 47) of its translations; empty if it is not known.
    """

    encoding: str
    errors: ClassVar[str] = "strict"
    source_language: str = ""
    target_language: str = ""

    def own_languages(self) -> tuple[set[str], set[str]]:
        """Returns the tags that the file has for the languages of its texts, and of their translations."""
        return set(), set()

    def language_problem(self, languages: tuple[str, str]) -> str:
        """Returns which of the file's languages is not that of a translation; empty if none.

        Args:
            languages: The tags of the languages of texts and of translations; empty where they are not known.
        """
        for what, tags, language in zip(("source", "target"), self.own_languages(), languages, strict=True):
            others = sorted(tag for tag in tags if is_other_language(tag, language))
            if others:
                return f"its {what} language is {others[0]:.20}, and that of the translation is {language}"
        return ""

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """Reads the file, once, and yields its parts in their order.

        Raises:
            WrongFile: The content is not what the name of the file says.
        """

    def output(self, stream: IO[bytes]) -> Output:
        """Returns what writes the parts to a stream."""
        return Output(stream, self.encoding, self.errors)

    @cached_property
    def _parts(self) -> list[Part]:
        return list(self.parts())

    @property
    def segments(self) -> list[Segment]:
        """All texts to translate, in the order of the file; raises as `parts`."""
        return [segment for part in self._parts for segment in part.segments]

    def content(self) -> bytes:
        """Returns the content of the file with the texts as they are now."""
        stream = io.BytesIO()
        output = self.output(stream)
        for part in self._parts:
            output.add(part)
        output.close()
        return stream.getvalue()


def check_marks(
    contents: Iterable[bytes],
    path: Path,
    most: int = MAX_MARKS,
    marks: Sequence[bytes] = (),
    what: str = "the file has",
) -> None:
    """Raises WrongFile if a document has more tags, lines and other marks than are read."""
    every = (b"<", b"\n", b"\r", *marks)
    number = sum(content.count(mark) for content in contents for mark in every)
    if number > most:
        raise wrong_file(path, f"{what} {number} tags and lines, and at most {most} are read: split it")


def check_is_text(content: bytes, path: Path) -> None:
    """Raises WrongFile if a file, or its beginning, is one of an office program, and not text."""
    if content.startswith(_ZIP):
        what = "the file is an archive (ZIP), such as of Word, Excel or EPUB, and not what its name says"
        raise wrong_file(path, f"{what}: name it by its kind, such as .docx")
    check_is_not_ole(content, path)


def check_is_not_ole(content: bytes, path: Path) -> None:
    """Raises WrongFile if a file, or its beginning, is one of an old office program."""
    if content.startswith(_OLE):
        what = "the file is one of an old office program (OLE), such as .doc or .xls, or has a password"
        raise wrong_file(path, f"{what}: save it as .docx, .xlsx or .pptx without one")


def lines_of(text: str) -> Iterator[tuple[str, str]]:
    """Yields the lines of a text, each with the break after it; the last one has none."""
    end = 0
    for found in LINE_BREAK.finditer(text):
        yield text[end : found.start()], found[0]
        end = found.end()
    yield text[end:], ""


def decoded(content: bytes, path: Path) -> tuple[str, str]:
    """Returns the encoding of a file in UTF-8, with or without a mark, and its text.

    Raises:
        WrongFile: It is not UTF-8.
    """
    encoding = "utf-8-sig" if content.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        return encoding, content.decode(encoding)
    except UnicodeDecodeError as error:
        number = len(content) - len(error.object) + error.start + 1  # after the mark
        raise wrong_file(path, f"the file is not UTF-8: byte {number} is wrong") from error
