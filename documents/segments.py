"""Types and limits that all readers of documents use: texts in pieces, each with a formatting.

Files come from anywhere: the time and memory that one takes are in proportion to its size, whatever is in it.
Every expression of the readers reads each character a bounded number of times, and tags are a chain, not a
list for each text. (Beautiful Soup, polib and python-docx take time in the square of the size.)
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path

from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse

COMPRESSED = ".gz"  # how the names of compressed files end

TextSpan = tuple[str, int]  # a text, and the number of its formatting within the segment

MAX_BYTES = 32 * 2**20  # of the texts of a document with their markup
MAX_MARKS = 1_000_000  # tags and lines of a document, each of which takes up to a kilobyte of memory

LETTER = re.compile(r"[^\W\d_]")
LINE_BREAK = re.compile(r"\r\n|\r|\n")
_WORD = re.compile(r"\S+")
_IN_WORD = re.compile(r"\w")
_ALPHANUMERIC = re.compile(r"[^\W_]")


class WrongFile(OSError):
    """The content of a file is wrong."""


def wrong_file(path: Path, text: str) -> WrongFile:
    """Returns the error for a file whose content is wrong; commands print it after the file's name."""
    return WrongFile(None, text, str(path))


class FormattedText(str):
    """A text whose parts have different formattings, for which its answer needs the alignment of words."""


def with_word_alignment(options: GenerateOptions, *, has_attention: bool) -> GenerateOptions:
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
        write: Puts translated pieces into the document; a formatting may have none, or several.
    """

    pieces: Sequence[TextSpan]
    write: Callable[[Sequence[TextSpan]], None]

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
        pieces = self._formatted(answer, whole)
        (first, its), (last, other) = pieces[0], pieces[-1]
        pieces[0] = before + first, its
        pieces[-1] = ((before + first if len(pieces) == 1 else last) + after), other
        self.write(pieces)

    def _formatted(self, answer: GenerateResponse, whole: str) -> list[TextSpan]:
        """Returns the target in pieces: a word has the formatting of the source word that it belongs to."""
        target = answer.hypotheses[0].text
        if not self.is_formatted:
            return [(target, longest(self.pieces))]
        sources = self._words(whole)
        linked: list[int] = []  # by target word its source word
        num_sources = 0
        for part in answer.sentences or [answer]:
            alignment = part.hypotheses[0].word_alignment
            linked += [num_sources + link.source_word for link in alignment.links]
            num_sources += len(alignment.source_words)
        words = list(_WORD.finditer(target))
        if not words or num_sources != len(sources) or len(linked) != len(words):
            # Of a model without attention, or in a script without spaces
            return [(target, longest(self.pieces))]
        spaced = {formatting for text, formatting in self.pieces if text != text.strip()}
        blank = next((formatting for text, formatting in self.pieces if not text.strip()), None)
        pieces: list[TextSpan] = []
        end = 0
        for word, source in zip(words, linked, strict=True):
            before, inside, after = _core(word[0])
            of_before, of_inside, of_after = sources[source]
            if pieces and (space := target[end : word.start()]):
                one, other = pieces[-1][1], of_before if before else of_inside
                # That of a piece with space at its ends
                its = one if one == other else next((f for f in (one, other, blank) if f in spaced), one)
                pieces.append((space, its))
            pieces += [(before, of_before), (inside, of_inside), (after, of_after)]
            end = word.end()
        groups = groupby((piece for piece in pieces if piece[0]), key=lambda piece: piece[1])
        return [("".join(text for text, _ in group), formatting) for formatting, group in groups]

    def _words(self, whole: str) -> list[tuple[int, int, int]]:
        """Returns for each word the formattings of its first character, of its letters, and of its last."""
        starts = list(accumulate((len(text) for text, _ in self.pieces), initial=0))

        def formatting(place: int) -> int:
            return self.pieces[bisect_right(starts, place) - 1][1]

        words = []
        for word in _WORD.finditer(whole):
            letter = _ALPHANUMERIC.search(whole, *word.span()) or word
            words.append((formatting(word.start()), formatting(letter.start()), formatting(word.end() - 1)))
        return words


def longest(pieces: Sequence[TextSpan]) -> int:
    """Returns the formatting of the longest piece."""
    return max(pieces, key=lambda piece: len(piece[0].strip()))[1]


def _core(word: str) -> tuple[str, str, str]:
    """Returns the marks before a word, the word, and the marks after it; a word may have only marks."""
    first = _IN_WORD.search(word)
    if first is None:
        return "", "", word
    end = len(word)
    while not _IN_WORD.match(word, end - 1):
        end -= 1
    return word[: first.start()], word[first.start() : end], word[end:]


class Document(ABC):
    """A file whose texts are translated in place. Owned by the command.

    Attributes:
        segments: The texts to translate, in the order of the file.
    """

    segments: list[Segment]

    @abstractmethod
    def content(self) -> bytes:
        """Returns the content of the file with the texts as they are now."""


def check_marks(contents: Iterable[bytes], path: Path, most: int = MAX_MARKS) -> None:
    """Raises WrongFile if a document has more tags and lines than are read."""
    number = sum(content.count(mark) for content in contents for mark in (b"<", b"\n", b"\r"))
    if number > most:
        raise wrong_file(path, f"the file has {number} tags and lines, and at most {most} are read: split it")


def decoded(content: bytes, path: Path) -> tuple[str, str]:
    """Returns the encoding of a file in UTF-8, with or without a mark, and its text.

    Raises:
        WrongFile: It is not UTF-8.
    """
    encoding = "utf-8-sig" if content.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        return encoding, content.decode(encoding)
    except UnicodeDecodeError as error:
        raise wrong_file(path, f"the file is not UTF-8: byte {error.start + 1} is wrong") from error
