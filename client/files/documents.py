"""Reads documents, and writes them anew with translated texts: subtitles, HTML, Word and gettext files.

A `Document` has segments, the texts that are translated by themselves: a subtitle, the text of a paragraph, a
message. A segment has pieces, one for each part of it with a formatting of its own, such as a link or bold
words. Everything else in the file stays as it is. This module does not know how texts are translated.
"""

from __future__ import annotations

import copy
import html
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from seq2seq_serve.client.files.lines import COMPRESSED, read_whole, wrong_file
from seq2seq_serve.commands import needs_extra
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse

Piece = tuple[str, int]  # a text, and the number of its formatting within the segment

_TIMES = re.compile(r"^\s*(?:\d+:)?\d+:\d+[.,]\d+\s+-->\s")
_TAG = re.compile(r"(</?[a-zA-Z][^<>]*>)")
_VTT_TAG = re.compile(r"(</?[a-zA-Z][^<>]*>|<\d[\d:.]*>)")
_TAG_NAME = re.compile(r"<([^\s.>]*)")
_POSITION = re.compile(r"^(?:\{\\[^}]*\})+")  # such as {\an8}, at the begin of a subtitle
_SPEAKER = re.compile(r"^\s*[-–—]\s*")  # begins a line of another speaker
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_WORD = re.compile(r"\S+")
_CORE = re.compile(r"(\W*?)(\w.*?|)(\W*)", re.DOTALL)  # the marks around a word
_LETTER = re.compile(r"[^\W\d_]")
_PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[#0\- +]*\d*(?:\.\d+)?[a-zA-Z%]|\{[^{}]*\}|</?\w[^<>]*>")

_NAMES = """
a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark q rp rt ruby s samp small
span strike strong sub sup time tt u var
"""
_INLINE = frozenset(_NAMES.split())
_LEFT_OUT = frozenset(["math", "noscript", "pre", "script", "style", "svg", "template", "textarea"])
_ATTRIBUTES = ("alt", "aria-label", "placeholder", "title")
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
# What a run or paragraph has beside texts and their properties separates the texts before and after it.
_TRANSPARENT = frozenset(
    f"{_W}{name}"
    for name in ("r", "t", "rPr", "pPr", "hyperlink", "ins", "smartTag", "proofErr", "bookmarkStart")
) | {f"{_W}bookmarkEnd", f"{_W}lastRenderedPageBreak"}
_NOTES = re.compile(r"/word/(footnotes|endnotes)\.xml")


class FormattedText(str):
    """A text whose parts have different formattings, for which its answer needs the alignment of words."""


def with_word_alignment(options: GenerateOptions, *, has_attention: bool) -> GenerateOptions:
    """Returns the options of a `FormattedText`: those given, and word alignment where there is attention."""
    aligned = GenerateOptions()
    aligned.CopyFrom(options)
    aligned.word_alignment |= has_attention
    return aligned


@dataclass(frozen=True)
class Segment:
    """A text to translate.

    Attributes:
        pieces: Its text in order.
        write: Puts translated pieces into the document; a formatting may have none, or several.
    """

    pieces: Sequence[Piece]
    write: Callable[[Sequence[Piece]], None]

    @property
    def text(self) -> str:
        """The whole text, with single spaces; a `FormattedText` if its parts have different formattings."""
        text = " ".join("".join(text for text, _ in self.pieces).split())
        return FormattedText(text) if self.is_formatted else text

    @property
    def is_formatted(self) -> bool:
        """Whether parts of it have different formattings."""
        return len({formatting for text, formatting in self.pieces if text.strip()}) > 1

    def translate(self, answer: GenerateResponse) -> None:
        """Puts the answer to its text into the document, with the white space around it."""
        whole = "".join(text for text, _ in self.pieces)
        before, after = whole[: len(whole) - len(whole.lstrip())], whole[len(whole.rstrip()) :]
        pieces = self._formatted(answer)
        (first, its), (last, other) = pieces[0], pieces[-1]
        pieces[0] = before + first, its
        pieces[-1] = ((before + first if len(pieces) == 1 else last) + after), other
        self.write(pieces)

    def _formatted(self, answer: GenerateResponse) -> list[Piece]:
        """Returns the target in pieces: a word has the formatting of the source word that it belongs to."""
        target = answer.hypotheses[0].text
        largest = max(self.pieces, key=lambda piece: len(piece[0].strip()))[1]
        if not self.is_formatted:
            return [(target, largest)]
        sources = [_parts_of(word) for word in self._words()]
        linked: list[int] = []  # by target word its source word
        num_sources = 0
        for part in answer.sentences or [answer]:
            alignment = part.hypotheses[0].word_alignment
            linked += [num_sources + link.source_word for link in alignment.links]
            num_sources += len(alignment.source_words)
        words = list(_WORD.finditer(target))
        if not words or num_sources != len(sources) or len(linked) != len(words):
            return [(target, largest)]  # of a model without attention, or in a script without spaces
        pieces: list[Piece] = []
        end = 0
        for word, source in zip(words, linked, strict=True):
            before, inside, after = _CORE.fullmatch(word[0]).groups()  # type: ignore[union-attr]
            of_before, of_inside, of_after = sources[source]
            if pieces and (space := target[end : word.start()]):
                pieces.append((space, self._of_space(pieces[-1][1], of_before if before else of_inside)))
            pieces += [(before, of_before), (inside, of_inside), (after, of_after)]
            end = word.end()
        groups = groupby((piece for piece in pieces if piece[0]), key=lambda piece: piece[1])
        return [("".join(text for text, _ in group), formatting) for formatting, group in groups]

    def _words(self) -> Iterator[Sequence[Piece]]:
        """Yields each word of the source as its characters with their formattings."""
        characters = [(character, formatting) for text, formatting in self.pieces for character in text]
        whole = "".join(text for text, _ in self.pieces)
        return (characters[slice(*word.span())] for word in _WORD.finditer(whole))

    def _of_space(self, before: int, after: int) -> int:
        """Returns the formatting of the space between two words: of a piece that has space at its ends."""
        if before == after:
            return before
        spaced = [formatting for text, formatting in self.pieces if text != text.strip()]
        blank = [formatting for text, formatting in self.pieces if not text.strip()]
        return next((one for one in (before, after, *blank) if one in spaced), before)


def _parts_of(word: Sequence[Piece]) -> tuple[int, int, int]:
    """Returns the formattings of a word's first character, of its letters, and of its last character."""
    letters = [formatting for character, formatting in word if character.isalnum()]
    return word[0][1], (letters or [word[0][1]])[0], word[-1][1]


class Document(ABC):
    """A file whose texts are translated in place. Owned by the command.

    Attributes:
        segments: The texts to translate, in the order of the file.
    """

    segments: list[Segment]

    @abstractmethod
    def content(self) -> bytes:
        """Returns the content of the file with the texts as they are now."""


class Subtitles(Document):
    """SubRip (.srt) or WebVTT (.vtt): each subtitle is a segment, or each of its lines that has a speaker."""

    def __init__(self, content: bytes, path: Path) -> None:
        text = _decoded(content, path)
        self._is_vtt = document_suffix(path) == ".vtt"
        self._lines: list[str] = []
        self.segments = []
        lines = _LINE_BREAK.split(text)
        self._newline = "\r\n" if "\r\n" in text else "\n"
        place = 0
        while place < len(lines):
            self._lines.append(lines[place])
            place += 1
            if not _TIMES.match(lines[place - 1]):
                continue
            begin = place
            while place < len(lines) and lines[place].strip():
                place += 1
            shown = lines[begin:place]
            has_speakers = len(shown) > 1 and all(map(_SPEAKER.match, shown))
            for group in [[line] for line in shown] if has_speakers else [shown] if shown else []:
                self._add(group)

    def content(self) -> bytes:
        return self._newline.join(self._lines).encode()

    def _add(self, shown: list[str]) -> None:
        """Adds the lines of a segment, whose place a single line holds from now on."""
        place = len(self._lines)
        self._lines.append(self._newline.join(shown))
        first = shown[0]
        position = _POSITION.match(first)
        prefix = position[0] if position else ""
        if speaker := _SPEAKER.match(first[len(prefix) :]):
            prefix += speaker[0]
        opened: list[str] = []
        tags: list[tuple[str, ...]] = []  # by the number of the formatting
        pieces: list[Piece] = []
        tag = _VTT_TAG if self._is_vtt else _TAG
        for number, part in enumerate(tag.split(" ".join(shown)[len(prefix) :])):
            if number % 2 == 0:
                tags.append(tuple(opened))
                pieces.append((html.unescape(part) if self._is_vtt else part, len(tags) - 1))
            elif part.startswith("</"):
                del opened[-1:]
            elif not part[1:2].isdigit():  # times inside of a subtitle do not fit the words of a translation
                opened.append(part)

        def write(translated: Sequence[Piece]) -> None:
            self._lines[place] = prefix + self._newline.join(self._wrapped(translated, tags, len(shown)))

        if _LETTER.search("".join(text for text, _ in pieces)):
            self.segments.append(Segment(pieces, write))

    def _wrapped(
        self, pieces: Sequence[Piece], tags: Sequence[tuple[str, ...]], num_lines: int
    ) -> Iterator[str]:
        """Yields lines of about the same length, with tags around the words that have them."""
        total = len("".join(text for text, _ in pieces).strip())
        line, opened, length, number, is_apart = "", tuple[str, ...](), 0, 1, False
        for text, formatting in pieces:
            for word in re.findall(r"\S+|\s+", text):
                if word.isspace():
                    is_apart = bool(length)
                    continue
                its = tags[formatting]
                closing, opening = (_closed(opened), "".join(its)) if its != opened else ("", "")
                shown = html.escape(word, quote=False) if self._is_vtt else word
                half = length + len(word) / 2
                if is_apart and number < num_lines and half >= total * number / num_lines:
                    yield line + closing
                    line, number = opening + shown, number + 1
                else:
                    line += closing + " " * is_apart + opening + shown
                opened, length, is_apart = its, length + is_apart + len(word), False
        yield line + _closed(opened)


def _closed(tags: Sequence[str]) -> str:
    """Returns the ends of tags of a subtitle: `</v>` of `<v.loud Mary>`."""
    return "".join(f"</{_TAG_NAME.match(tag)[1]}>" for tag in reversed(tags))  # type: ignore[index]


class Page(Document):
    """HTML: the text of each block is a segment, and so are some attributes."""

    def __init__(self, content: bytes, path: Path) -> None:  # noqa: ARG002
        with needs_extra("documents"):
            from bs4 import BeautifulSoup
            from bs4.element import Doctype, NavigableString

        self._soup = BeautifulSoup(content, "html.parser")
        for child in self._soup.contents:
            # The library writes a line break after it.
            if isinstance(child, Doctype) and isinstance(after := child.next_sibling, NavigableString):
                after.replace_with(type(after)(after.removeprefix("\n")))
        self.segments = []
        self._walk(self._soup)
        for tag in self._soup.find_all(True):
            for name in _ATTRIBUTES:
                if isinstance(value := tag.get(name), str) and _LETTER.search(value):
                    self.segments.append(Segment([(value, 0)], _attribute_writer(tag, name)))

    def content(self) -> bytes:
        from bs4.dammit import EntitySubstitution
        from bs4.formatter import HTMLFormatter

        formatter = HTMLFormatter(EntitySubstitution.substitute_xml, void_element_close_prefix="")
        return self._soup.encode(self._soup.original_encoding or "utf-8", formatter=formatter)

    def _walk(self, root: Any) -> None:
        """Adds the texts of each block; without recursion, as pages may be nested more deeply than calls."""
        from bs4.element import NavigableString, Tag

        blocks, texts = [root], list[Any]()
        opened = [(root, iter(list(root.children)))]

        def flush() -> None:
            if _LETTER.search("".join(texts)):
                pieces = [(str(text), number) for number, text in enumerate(texts)]
                self.segments.append(Segment(pieces, _tree_writer(_HtmlTree(blocks[-1]), list(texts))))
            texts.clear()

        while opened:
            parent, children = opened[-1]
            child = next(children, None)
            if child is None:
                opened.pop()
                if parent is blocks[-1]:
                    flush()
                    blocks.pop()
            elif type(child) is NavigableString:
                texts.append(child)
            elif isinstance(child, Tag):
                is_left_out = child.name in _LEFT_OUT or child.get("translate") == "no"
                is_inline = child.name in _INLINE and not is_left_out
                if not is_inline:
                    flush()
                if not is_left_out:
                    blocks += [] if is_inline else [child]
                    opened.append((child, iter(list(child.children))))


class Word(Document):
    """Word (.docx): the text of each paragraph is a segment, in the body, tables, headers and notes."""

    def __init__(self, content: bytes, path: Path) -> None:
        with needs_extra("documents"):
            import docx
            from lxml import etree
        import io

        try:
            self._document = docx.Document(io.BytesIO(content))
        except Exception as error:  # the library raises errors of several classes for other files
            raise wrong_file(path, "the file is not a Word document (.docx)") from error
        self.segments = []
        self._notes: list[tuple[Any, Any]] = []
        for part in self._document.part.package.iter_parts():
            if re.fullmatch(r"/word/(document|header\d*|footer\d*)\.xml", str(part.partname)):
                self._add(part.element)
            elif _NOTES.fullmatch(str(part.partname)):
                root = etree.fromstring(part.blob)
                self._notes.append((part, root))
                self._add(root)

    def content(self) -> bytes:
        import io

        from lxml import etree

        for part, root in self._notes:
            part._blob = etree.tostring(root, xml_declaration=True, encoding="UTF-8", standalone=True)
        stream = io.BytesIO()
        self._document.save(stream)
        return stream.getvalue()

    def _add(self, root: Any) -> None:
        for paragraph in root.iter(f"{_W}p"):
            texts: list[Any] = []
            for element in [*paragraph.iter(), None]:
                if element is not None and next(element.iterancestors(f"{_W}p"), None) is not paragraph:
                    continue  # the paragraph itself, or one in a box of text
                if element is not None and element.tag == f"{_W}t":
                    texts.append(element)
                elif element is None or not (element.tag in _TRANSPARENT or _is_property(element)):
                    if _LETTER.search("".join(text.text or "" for text in texts)):
                        pieces = [(text.text or "", number) for number, text in enumerate(texts)]
                        self.segments.append(Segment(pieces, _tree_writer(_WordTree(paragraph), texts)))
                    texts = []


class Messages(Document):
    """gettext (.po): each line of a message without a translation is a segment.

    A translation that lacks a placeholder of its message, such as %s or {name}, is marked as fuzzy.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        with needs_extra("documents"):
            import polib
        try:
            self._file = polib.pofile(_decoded(content, path))
        except (OSError, ValueError) as error:
            raise wrong_file(path, f"the file is not a file of gettext (.po): {error}") from error
        self.segments = []
        forms = re.search(r"nplurals\s*=\s*(\d+)", self._file.metadata.get("Plural-Forms", ""))
        num_forms = int(forms[1]) if forms else 2
        for entry in self._file:
            if entry.obsolete or entry.msgstr or any(entry.msgstr_plural.values()):
                continue
            if not entry.msgid_plural:
                self._add(entry, entry.msgid, ())
                continue
            for form in range(num_forms):
                is_singular = form == 0 and num_forms > 1
                self._add(entry, entry.msgid if is_singular else entry.msgid_plural, (form,))

    def content(self) -> bytes:
        return str(self._file).removeprefix("#\n" if not self._file.header else "").encode()

    def _add(self, entry: Any, message: str, forms: tuple[int, ...]) -> None:
        lines = message.split("\n")

        def writer(place: int) -> Callable[[Sequence[Piece]], None]:
            def write(translated: Sequence[Piece]) -> None:
                lines[place] = "".join(text for text, _ in translated)
                target = "\n".join(lines)
                for form in forms:
                    entry.msgstr_plural[form] = target
                if not forms:
                    entry.msgstr = target
                is_wrong = place == places[-1] and not _has_placeholders(target, message)
                if is_wrong and "fuzzy" not in entry.flags:
                    entry.flags.append("fuzzy")

            return write

        places = [place for place, line in enumerate(lines) if _LETTER.search(line)]
        self.segments += [Segment([(lines[place], 0)], writer(place)) for place in places]


DOCUMENTS: dict[str, Callable[[bytes, Path], Document]] = {
    ".srt": Subtitles,
    ".vtt": Subtitles,
    ".html": Page,
    ".htm": Page,
    ".docx": Word,
    ".po": Messages,
}


def document_suffix(path: Path) -> str:
    """Returns the suffix of a document, also of a compressed one; empty for other files."""
    suffix = Path(path.name.lower().removesuffix(COMPRESSED)).suffix
    return suffix if suffix in DOCUMENTS else ""


def read_document(path: Path) -> Document:
    """Returns the document of a file, by its suffix.

    Raises:
        OSError: The file cannot be read, or is not what its name says.
    """
    return DOCUMENTS[document_suffix(path)](read_whole(path), path)


class _HtmlTree:
    """The tags between a block and its texts, for `_tree_writer`."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def set_text(self, text: Any, value: str) -> Any:
        new = type(text)(value)
        text.replace_with(new)
        return new

    def top(self, text: Any) -> Any:
        while text.parent is not self._block:
            text = text.parent
        return text

    def with_copies(self, text: Any, value: str) -> Any:
        """A text in copies of the tags around another one."""
        result: Any = type(text)(value)
        for tag in text.parents:
            if tag is self._block:
                break
            around = copy.copy(tag)
            around.clear()
            around.append(result)
            result = around
        return result

    def insert_before(self, node: Any, new: Any) -> None:
        node.insert_before(new)

    def remove(self, text: Any) -> None:
        """Removes a text, and the tags that are empty without it."""
        parent = text.parent
        text.extract()
        while parent is not self._block and not parent.contents:
            parent, empty = parent.parent, parent
            empty.extract()


class _WordTree:
    """The runs and links between a paragraph and its texts, for `_tree_writer`."""

    def __init__(self, paragraph: Any) -> None:
        self._paragraph = paragraph

    def set_text(self, text: Any, value: str) -> Any:
        text.text = value
        text.set("{http://www.w3.org/XML/1998/namespace}space", "preserve")
        return text

    def top(self, text: Any) -> Any:
        while text.getparent() is not self._paragraph:
            text = text.getparent()
        return text

    def with_copies(self, text: Any, value: str) -> Any:
        """A text in copies of the elements around another one, with their properties."""
        result = self.set_text(copy.copy(text), value)
        for element in text.iterancestors():
            if element is self._paragraph:
                break
            around = copy.copy(element)
            for child in list(around):
                if not child.tag.endswith("Pr"):
                    around.remove(child)
            around.append(result)
            result = around
        return result

    def insert_before(self, node: Any, new: Any) -> None:
        node.addprevious(new)

    def remove(self, text: Any) -> None:
        """Removes a text, and the elements that are empty without it."""
        parent = text.getparent()
        parent.remove(text)
        while parent is not self._paragraph and all(child.tag.endswith("Pr") for child in parent):
            parent, empty = parent.getparent(), parent
            parent.remove(empty)


def _tree_writer(tree: Any, texts: list[Any]) -> Callable[[Sequence[Piece]], None]:
    """Returns a function that puts translated pieces in place of texts within inline elements.

    If the formattings keep their order, the elements around them stay. Otherwise each piece gets copies of
    the elements around the text with its formatting.
    """

    def write(pieces: Sequence[Piece]) -> None:
        formattings = [formatting for _, formatting in pieces]
        if formattings == sorted(set(formattings)):
            by_formatting = {formatting: text for text, formatting in pieces}
            for number, text in enumerate(texts):
                if number in by_formatting:
                    tree.set_text(text, by_formatting[number])
                else:
                    tree.remove(text)
            return
        first = tree.top(texts[0])
        for value, formatting in pieces:
            tree.insert_before(first, tree.with_copies(texts[formatting], value))
        for text in texts:
            tree.remove(text)

    return write


def _attribute_writer(tag: Any, name: str) -> Callable[[Sequence[Piece]], None]:
    def write(pieces: Sequence[Piece]) -> None:
        tag[name] = "".join(text for text, _ in pieces)

    return write


def _is_property(element: Any) -> bool:
    return any(one.tag in (f"{_W}rPr", f"{_W}pPr") for one in element.iterancestors())


def _has_placeholders(target: str, message: str) -> bool:
    return sorted(_PLACEHOLDER.findall(target)) == sorted(_PLACEHOLDER.findall(message))


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise wrong_file(path, f"the file is not UTF-8: byte {error.start + 1} is wrong") from error
