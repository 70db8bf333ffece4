"""Reads and writes Markdown: CommonMark with tables and text that is struck out.

markdown-it-py finds the blocks, and the parts of each. Between these, and in code, nothing changes.
"""

from __future__ import annotations

import html
import re
from array import array
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from string import punctuation
from typing import Any

from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.markup import Flows, escaped_xml, unescaped
from seq2seq_serve.documents.notes import MAX_CHARACTERS, MAX_TAGS
from seq2seq_serve.documents.page import FIXED, FORMATTING, INLINE, READINGS, RUBY, note_of
from seq2seq_serve.documents.segments import (
    LETTER,
    LINE_BREAK,
    Document,
    Part,
    Segment,
    TextSpan,
    decoded,
    has_choice,
    has_words,
)
from seq2seq_serve.documents.spans import Tag
from seq2seq_serve.documents.values import imported

_FRONT_MATTER = re.compile(r"(---|\+\+\+)[ \t]*\n(?:(?!\1[ \t]*$)[^\n]*\n)*+\1[ \t]*$", re.MULTILINE)
_MARK = re.compile(r"\[(?:[ xX]|![A-Z]+)\]\s*+")  # of a task, or of a kind of quotation
_BAR = re.compile(r"\|")
_BRACKETS = frozenset(["link", "note", "span"])  # kinds of parts with a text in brackets
_NUM_AFTER = 2  # characters after a note that are looked at
_MAX_MARKS = 8  # of emphasis before a picture that are looked at
_INDENTATION = 4  # spaces before the blocks of a footnote
_SPACES = re.compile(" *+")
_QUOTED = r"""("(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|\((?:[^()\\]|\\.)*+\))\s*+"""
_TARGET = re.compile(rf"\(\s*+(?:<(?:[^<>\\]|\\.)*+>|[^\s<]\S*+)\s++{_QUOTED}\)", re.DOTALL)  # and title
_TITLE = re.compile(rf"(?<!\S){_QUOTED}\Z")  # of a reference, at the end of a line
_FOOTNOTE = re.compile(r"(\[\^[^\s\[\]]++\])")
# What begins a footnote, a block with a title, or the definition of a term: what is indented belongs to it.
_INDENTED = re.compile(r"\[\^[^\s\[\]]++\]:[ \t]*+|(?:!!!|\?\?\?)[^\n]*+|[:~][ \t]++")
# What programs that read more than CommonMark take for code: whole lines, what begins one, and the others.
_LINES = re.compile(
    r"""
      (?:\n[ \t]*+)? (?: (?: :::[^\n]*+
        | (?: \{\{[^{}\n]*+\}\}[ \t]*+ | \{%[^%\n]*+%\}[ \t]*+ | </[a-zA-Z][^<>\n]*+>[ \t]*+ )++
        | \$\$ (?: [^$]{1,1000} \$\$ )? [ \t]*+
        | import\b[^\n]*?["'][ \t]*+;?[ \t]*+
        | export[ ](?:default|const|function|class|let|var|async|[{*])[^\n]*+
        | \+[-=:+]{3,}+ (?: \n[|+][^\n]*+ )*+ | \\begin\{ [\s\S]{1,2000}? \\end\{[^{}\n]++\}
      ) (?:\n[ \t]*+|\Z) )++
    | (?:\n[ \t]*+)? (?: \(@[\w-]*+\) | \#\. ) [ \t]++
    | \n[ \t]*+ \|[ \t]++ | \|[ \t]++ (?=[^\n]*+\n[ \t]*+\|)
    """,
    re.VERBOSE,
)
_LETTERED = re.compile(r"(?:\n[ \t]*+)?\(?[a-z]\)[ \t]++")  # begins an item of a list
_LETTERS = re.compile(r"^[ \t]*+\(?([a-z])\)[ \t]", re.MULTILINE)
_MAX_TERM = 60  # characters of a line that is the term of a definition, and not the first one of a paragraph
_KEPT = re.compile(
    r"""
      (?P<mark> \{:?[ ]?(?:[#.]|[\w-]{1,32}=)[^{}\n]{1,200}\} | \{\{[<%][^{}]{1,500}\}\} | \{%[^%]{1,500}%\} )
    | \[ (?: [^@\[\]]{0,100} [\s;] )? -?@\w [^\[\]]{0,500} \] (?![(\[])
    | \{\{[^{}]{1,200}\}\} | \$\$[^$]{1,1000}\$\$ | \$(?![\s$])[^$]{1,500}(?<![\s\\])\$(?!\w)
    """,
    re.VERBOSE,
)
_ATTRIBUTES = re.compile(r"\{[ ]?[#.\w][^{}\n]{0,200}\}")  # after a text in brackets
_TAG = re.compile(r"</?(?:code|kbd)\b[^<>]*+>", re.IGNORECASE)
_HTML = re.compile(r"<(/?)([a-zA-Z][\w-]*+)")
_ID = re.compile(r"\s(?:id|name)\s*+=", re.IGNORECASE)
_TO_ESCAPE = re.compile(
    r"[\\`*\[\]|]|(?<![^\W_])_|_(?![^\W_])|~(?=~)|\A[#>+=~-]|(<(?=[a-zA-Z/!?])|&(?=#?\w{1,40};))"
)
_NUMBER = re.compile(r"\A(\d{1,9})(?=[.)](?:\s|\Z))")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the text of a block.

    Attributes:
        kind: The rule of the parser that found it, or "code" and "markup" for what stays, or "tag" and
            "end_tag" for HTML around a text, or "source" for HTML that belongs to characters of the source.
        begin: Where it begins in the text.
        end: Where it ends.
        label_end: Where the text of a link, picture, footnote or other text in brackets ends.
        title: What its title says; empty if there is none, or if it is that of a reference.
        quotes: Where the title begins and ends, with its quotes.
        token: What the parser made of it, in the end.
        picture: The picture that a link has in place of a text.
    """

    kind: str
    begin: int
    end: int
    label_end: int = 0
    title: str = ""
    quotes: tuple[int, int] = (0, 0)
    token: Any = None
    picture: _Part | None = None


class _Parser:
    """Finds the parts of the texts of blocks. Owned by a document."""

    def __init__(self, path: Path) -> None:
        parser = self._parser = imported("markdown_it", path).MarkdownIt("commonmark")
        # The last rule joins texts, and would hide where each of them was.
        parser.enable(["table", "strikethrough"]).disable(["inline", "text_join", "fragments_join"])
        around = {"alt": ["paragraph", "reference", "blockquote", "list"]}  # which it may end
        parser.block.ruler.before("reference", "indented", _add_indented, around)
        rules = imported("markdown_it.rules_inline", path)
        for name, rule in {
            "newline": rules.newline,
            "escape": rules.escape,
            "backticks": rules.backtick,
            "strikethrough": rules.strikethrough.tokenize,
            "emphasis": rules.emphasis.tokenize,
            "link": rules.link,
            "image": rules.image,
            "autolink": rules.autolink,
            "html_inline": rules.html_inline,
            "entity": rules.entity,
        }.items():
            parser.inline.ruler.at(name, partial(self._apply, name, rule))
        parser.inline.ruler.before("text", "lines", partial(self._apply, "lines", self._skip_lines))
        parser.inline.ruler.before("newline", "kept", partial(self._apply, "kept", _skip_kept))
        parser.inline.ruler.before("link", "brackets", partial(self._apply, "brackets", _read_brackets))
        self._environment: dict[str, Any] = {}  # the targets of links
        self._found: list[_Part] = []
        self._state: Any = None  # of the block
        self._is_list = False  # whether letters before its lines begin items

    def blocks(self, text: str) -> Iterator[tuple[str, int]]:
        """Yields the text of each block, and the number of its first line."""
        blocks = _Blocks()
        self._parser.block.parse(text.replace("\0", "\ufffd"), self._parser, self._environment, blocks)
        return iter(blocks.found())

    def titles(self) -> Iterator[tuple[str, int]]:
        """Yields the title of each reference, and the number of its last line, after `blocks`.

        Those of comments, as `[//]: # (…)`, are none.
        """
        for reference in self._environment.get("references", {}).values():
            if reference["title"] and reference["href"] not in ("", "#"):
                yield reference["title"], reference["map"][1] - 1

    def parts(self, text: str) -> list[_Part]:
        """Returns the parts of the text of a block that are not just text, by their places."""
        self._found, self._state = [], None
        letters = [*map(ord, _LETTERS.findall(text))]
        follow = any(other - one == 1 for one, other in pairwise(letters))
        self._is_list = follow or _LETTERED.match(text) is not None
        self._parser.inline.parse(text, self._parser, self._environment, [])
        return self._found

    def _skip_lines(self, state: Any, silent: bool) -> bool:  # noqa: ARG002
        """Reads lines that are no text, where a line begins or the one before it ends."""
        is_there = state.pos == 0 or "\n" in state.src[state.pos - 1 : state.pos + 1]
        return is_there and (_skip(_LINES, state) or (self._is_list and _skip(_LETTERED, state)))

    def _apply(self, name: str, rule: Callable[[Any, bool], bool], state: Any, silent: bool) -> bool:
        """Applies a rule of the parser where it stands, and records what it finds."""
        begin, num_found, num_tokens = state.pos, len(self._found), len(state.tokens)
        self._state = self._state or state
        if not rule(state, silent):
            return False
        if silent or state is not self._state:  # it looks ahead, or reads the text of a picture
            return True
        end, token = state.pos, state.tokens[-1] if state.tokens else None
        if name in ("emphasis", "strikethrough"):
            number = len(state.tokens)
            while end > begin:
                number -= 1
                token = state.tokens[number]
                self._found.insert(num_found, _Part(name, end - len(token.content), end, token=token))
                end -= len(token.content)
        elif name in ("link", "image"):
            label_end = state.md.helpers.parseLinkLabel(state, begin + (name == "image"), name == "link")
            if end - label_end < 4 and state.src[label_end + 1 : label_end + 2] != "(":
                del self._found[num_found:]  # its text is also the name of its target
                self._found.append(_Part("code", begin, end))
            else:
                target = _TARGET.fullmatch(state.src, label_end + 1, end)
                made = state.tokens[num_tokens : num_tokens + 2]  # after the text before it, if there is one
                its = next(each for each in made if each.type in ("link_open", "image"))
                title, quotes = (its.attrs.get("title", ""), target.span(1)) if target else ("", (0, 0))
                self._found.insert(num_found, _Part(name, begin, end, label_end, title, quotes))
        elif name == "brackets":
            is_note = state.src[begin] == "^"
            label_end = end - 1 if is_note else state.src.rindex("]{", begin, end)
            self._found.insert(num_found, _Part("note" if is_note else "span", begin, end, label_end))
        elif name in ("newline", "escape", "entity"):
            self._found.append(_Part(name, begin, end, token=token))
        elif name == "lines":
            self._found.append(_Part(name, begin, end))
        elif name != "backticks" or not state.pending:  # a pair of them, and not just one
            kept = _KEPT.match(state.src, begin) if name == "kept" else None
            is_markup = name == "html_inline" or (kept and kept["mark"])
            self._found.append(_Part("markup" if is_markup else "code", begin, end))
        return True


class _Blocks(list[Any]):
    """The tokens of blocks, of which only their texts and lines stay. Owned by a parser.

    A token takes twenty times as much memory as a short text.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: Any = None  # its text is set after it was added
        self._texts = bytearray()
        self._places = array("Q")  # of each text its length in bytes, and the number of its first line

    def append(self, token: Any) -> None:
        last, self._last = self._last, token
        if last is not None and last.type == "inline" and last.map:
            text = last.content.encode("utf-8", "surrogatepass")
            self._texts += text
            self._places.extend((len(text), last.map[0]))

    def found(self) -> Iterator[tuple[str, int]]:
        """Yields the texts, and the numbers of their first lines."""
        self.append(None)
        end, places = 0, iter(self._places)
        for length, line in zip(places, places, strict=True):
            begin, end = end, end + length
            yield self._texts[begin:end].decode("utf-8", "surrogatepass"), line


def _add_indented(state: Any, line: int, end: int, silent: bool) -> bool:
    """Reads what begins an indented block, with the blocks in it; `silent`: whether it ends another one."""
    begin = state.bMarks[line] + state.tShift[line]
    found = None if state.is_code_block(line) else _INDENTED.match(state.src, begin, state.eMarks[line])
    if found is None or silent:
        return found is not None and not (found[0][0] in ":~" and _is_wrapped(state, line))
    before = state.bMarks[line], state.tShift[line], state.sCount[line], state.parentType
    state.push("indented_open", "", 1)
    state.blkIndent += _INDENTATION
    state.bMarks[line], state.tShift[line], state.sCount[line] = found.end(), 0, state.blkIndent
    state.parentType = "root"
    state.md.block.tokenize(state, line, end)
    state.blkIndent -= _INDENTATION
    state.bMarks[line], state.tShift[line], state.sCount[line], state.parentType = before
    state.push("indented_close", "", -1)
    return True


def _is_wrapped(state: Any, line: int) -> bool:
    """Whether a line goes on with the paragraph before it, which is more than the term of a definition."""
    first = state.line
    is_paragraph = state.parentType in ("paragraph", "reference") and state.sCount[line] >= state.blkIndent
    return is_paragraph and (line > first + 1 or state.eMarks[first] - state.bMarks[first] > _MAX_TERM)


def _skip_kept(state: Any, silent: bool) -> bool:  # noqa: ARG001
    """Reads code within a text."""
    return state.src[state.pos] in "{[$" and _skip(_KEPT, state)


def _read_brackets(state: Any, silent: bool) -> bool:
    """Reads a footnote within a text, as `^[text]`, or a text with attributes, as `[text]{.name}`."""
    begin, last = state.pos, state.posMax
    is_note = state.src.startswith("^[", begin)
    first = begin + is_note
    end = state.md.helpers.parseLinkLabel(state, first) if state.src[first : first + 1] == "[" else -1
    attributes = None if is_note else _ATTRIBUTES.match(state.src, end + 1, last)
    if end < 0 or not (is_note or attributes):
        return False
    if not silent:
        state.pos, state.posMax = first + 1, end
        state.push("brackets_open", "", 1)
        state.md.inline.tokenize(state)
        state.push("brackets_close", "", -1)
    state.pos, state.posMax = attributes.end() if attributes else end + 1, last
    return True


def _skip(pattern: re.Pattern[str], state: Any) -> bool:
    found = pattern.match(state.src, state.pos, state.posMax)
    if found:
        state.pos = found.end()
    return found is not None


def _with_html(parts: Sequence[_Part], text: str) -> list[_Part]:
    """Returns the parts with tags of HTML around texts: pairs within one link and one style."""
    result, opened = [*parts], list[tuple[tuple[str, int], int]]()
    num_opened, link, depth, reading = Counter[tuple[str, int]](), -1, 0, -1
    depths = list[int]()  # of styles of Markdown
    for number, part in enumerate(parts):
        depths.append(depth)
        link = part.label_end if part.kind in _BRACKETS else link if part.begin < link else -1
        if part.kind in ("emphasis", "strikethrough") and part.token:
            depth += part.token.nesting
        tag = _HTML.match(text, part.begin) if part.kind == "markup" else None
        name = tag[2].lower() if tag else ""
        if name in READINGS or name in RUBY or name == "wbr":
            result[number] = replace(part, kind="source")
            if reading >= 0 and name != "wbr":
                result[reading] = replace(result[reading], end=part.begin)
                reading = -1
            if tag and not tag[1] and name in READINGS:
                reading = number
        if tag is None or name not in INLINE or text[part.end - 2] == "/":
            continue
        key = name, link
        if not tag[1]:
            opened.append((key, number))
            num_opened[key] += 1
        elif num_opened[key]:
            while True:
                its, begin = opened.pop()
                num_opened[its] -= 1
                if its == key:
                    break
            if depths[begin] != depth:
                continue
            if name in FIXED:
                result[begin] = replace(parts[begin], kind="code", end=part.end)
            else:
                result[begin], result[number] = (
                    replace(parts[begin], kind="tag"),
                    replace(part, kind="end_tag"),
                )
    return result


def _as_html(parts: Sequence[_Part], text: str) -> list[tuple[int, int, str]]:
    """Returns where parts begin and end, and the tags of HTML that they are."""
    tags = list[tuple[int, int, str]]()
    for part in parts:
        if part.kind == "link":
            target = html.escape(text[part.label_end + 1 : part.end])
            tags += [(part.begin, part.begin + 1, f'<a href="{target}">'), (part.label_end, part.end, "</a>")]
        elif part.kind not in ("escape", "newline", "entity"):
            tags.append((part.begin, part.end, text[part.begin : part.end]))
    return sorted(tags)


def _with_pictures(parts: Sequence[_Part], text: str) -> list[_Part]:
    """Returns the parts with pictures that do not end a text: after a word and a space, or in a link."""
    result, begin, link_end = list[_Part](), 0, -1  # where the text begins, and where the link ends
    for part in parts:
        link = result[-1] if result and result[-1].kind == "link" else None
        whole = part
        if part.kind == "image":
            if link and not f"{text[link.begin + 1 : part.begin]}{text[part.end : link.label_end]}".strip():
                whole, link_end = replace(result.pop(), kind="image", picture=part), -1
            before = text[max(begin, whole.begin - _MAX_MARKS) : whole.begin].rstrip("*_~")
            is_after_word = before[-1:].isspace() and LETTER.search(text, begin, whole.begin)
            if whole.begin < link_end or is_after_word:
                whole = replace(whole, kind="picture")
        link_end = part.end if part.kind == "link" else link_end
        if whole.kind in ("image", "lines") or _is_break(part, text):
            begin = whole.end
        result.append(whole)
    return result


def _with_ends(parts: Sequence[_Part], text: str) -> list[_Part]:
    """Returns the parts with marks that end a text in place of emphasis over several texts."""
    result, opened, num_ends, num_inside = [*parts], list[tuple[int, int, int]](), 0, 0
    breaks = {place for part in parts if _is_break(part, text) for place in (part.begin, part.end)}

    for number, part in enumerate(parts):
        num_ends += part.kind in ("image", "lines") or _is_break(part, text)
        nesting = part.token.nesting if part.kind in ("emphasis", "strikethrough") else 0
        if nesting == 1:
            num_inside += 1
            opened.append((number, num_ends, num_inside))
        elif nesting == -1:
            first, before, num_before = opened.pop()
            if before < num_ends:
                is_strong = part.token.tag == "strong"
                begin, end = parts[first].begin - is_strong, part.end + is_strong
                beside = (begin, text[begin - 1 : begin]), (end, text[end : end + 1])
                # They stay marks beside white space, whatever text is on their other side.
                is_apart = all(place in breaks or not character.strip() for place, character in beside)
                kind = "lines" if is_apart and num_before == num_inside else "glued"
                result[first] = replace(parts[first], kind=kind, begin=begin)
                result[number] = replace(part, kind=kind, end=end)
    return result


def _after_spaces(text: str, place: int) -> int:
    found = _SPACES.match(text, place)
    return found.end() if found else place


def _is_break(part: _Part, text: str) -> bool:
    """Whether a part is a line break, which is shown."""
    if part.kind in ("newline", "escape"):
        return bool(part.token.type == "hardbreak")
    tag = _HTML.match(text, part.begin) if part.kind == "markup" else None
    return tag is not None and tag[2].lower() == "br"


class MarkdownDocument(Document):
    """Markdown: the text of a paragraph, heading or cell is a segment, and so is that of a picture."""

    def __init__(self, content: bytes, path: Path) -> None:
        self.encoding, self._text = decoded(content, path)
        self._parser = _Parser(path)

    def parts(self) -> Iterator[Part]:
        text, parser, flows = self._text, self._parser, Flows(_escaped, is_tight=True)
        lines = _Lines(text)
        end = 0  # of what was added
        blocks = parser.blocks(_without_front_matter(text))
        titles = deque(_places_of_titles(parser.titles(), lines))
        for block, line in blocks:
            if places := _places(block, lines, line, end):
                _add_between(flows, text, end, places[0][1], titles)
                adder = _Adder(flows, text, block, places)
                found = _with_pictures(_with_html(parser.parts(block), block), block)
                adder.add(_with_ends(found, block))
                end = adder.place_of(len(block))
                flows.end()
                part = flows.part()
                if adder.glued:
                    write = partial(_write_tags, adder.glued)
                    part.segments = [replace(one, write=partial(write, one)) for one in part.segments]
                yield part
        _add_between(flows, text, end, len(text), titles)
        yield flows.part()


def _add_between(flows: Flows, text: str, begin: int, end: int, titles: deque[tuple[str, int, int]]) -> None:
    """Adds what is between two blocks, in which the titles of references are texts."""
    while titles and titles[0][2] <= end:
        title, first, last = titles.popleft()
        if first >= begin:
            flows.end(text[begin:first])
            flows.end(_with_title(flows, "", text[first:last], "", title))
            begin = last
    flows.end(text[begin:end])


def _with_title(flows: Flows, before: str, quoted: str, after: str, title: str) -> Tag:
    """Returns markup with a title, which becomes a text of its own if it has words.

    Args:
        flows: Get the text.
        before: What is before the title.
        quoted: The title as it is written, in its quotes.
        after: What is after it.
        title: What it says.
    """
    tag = Tag(before + quoted + after, "")

    def write(pieces: Sequence[TextSpan]) -> None:
        text, inside = text_of(pieces), quoted[1:-1]
        if text != title:
            inside = re.sub(r"[()]" if quoted[0] == "(" else quoted[0], r"\\\g<0>", _escaped(text))
        tag.open = f"{before}{quoted[0]}{inside}{quoted[-1]}{after}"

    if has_words(title) and not has_choice(title):
        flows.segments.append(Segment([(title, 0)], write))
    return tag


def _write_tags(
    glued: list[tuple[Tag, str]],
    segment: Segment,
    pieces: Sequence[TextSpan],
) -> None:
    """Replaces a text, and the marks beside words of its block if none of its texts was replaced before."""
    while glued and pieces is not segment.pieces:  # these are the text itself
        tag, instead = glued.pop()
        tag.open = instead
    segment.write(pieces)


def _without_front_matter(text: str) -> str:
    """Returns a text with single line breaks, and with empty lines in place of its front matter."""
    whole = text.replace("\r\n", "\n").replace("\r", "\n")
    if front := _FRONT_MATTER.match(whole):
        return "\n" * (front[0].count("\n") + 1) + whole[front.end() + 1 :]
    return whole


class _Lines:
    """The lines of a text, of which only the beginnings are kept. Owned by a document.

    Attributes:
        begins: Where each begins.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self.begins = array("Q", [0])
        self.begins.extend(found.end() for found in LINE_BREAK.finditer(text))

    def __len__(self) -> int:
        return len(self.begins)

    def __getitem__(self, number: int) -> str:
        end = self.begins[number + 1] if number + 1 < len(self) else None
        return self._text[self.begins[number] : end].rstrip("\r\n")


def _places(block: str, lines: _Lines, line: int, end: int) -> list[tuple[int, int]]:
    """Returns where each line of a block begins in it, and in the file; empty if it is not there as it is.

    Args:
        block: Its text, without what stands before it in lines of quotations and lists.
        lines: The lines of the file.
        line: The number of its first line.
        end: Where the block before it ends.
    """
    begins, places, offset = lines.begins, list[tuple[int, int]](), 0
    for number, part in enumerate(block.split("\n"), line):
        before = max(end - begins[number], 0) if number < len(lines) else 0
        found = lines[number].find(part, before) if number < len(lines) else -1
        escaped = found < 0 and number < len(lines)
        if escaped:  # in a cell
            found = lines[number].find(part.replace("|", r"\|"), before)
        if found < 0:
            return []
        places.append((offset, begins[number] + found))
        for before, bar in enumerate(_BAR.finditer(part) if escaped else (), 1):
            places.append((offset + bar.end(), begins[number] + found + bar.end() + before))
        offset += len(part) + 1
    return places


def _places_of_titles(titles: Iterable[tuple[str, int]], lines: _Lines) -> Iterator[tuple[str, int, int]]:
    """Yields each title with the places in the file where it begins and ends, if it is in one line."""
    for title, number in titles:
        if found := _TITLE.search(lines[number]):
            begin = lines.begins[number]
            yield title, begin + found.start(1), begin + found.end(1)


class _Adder:
    """Adds the parts of a block to the texts of a document, which owns it.

    Attributes:
        glued: Marks beside words that end texts, with the tags of HTML that a translation has instead.
    """

    def __init__(self, flows: Flows, file: str, text: str, places: Sequence[tuple[int, int]]) -> None:
        self._flows, self._file, self._text = flows, file, text
        self._offsets, self._begins = zip(*places, strict=True)
        self.glued: list[tuple[Tag, str]] = []
        self._outer = list[Flows]()  # those around a footnote within a text
        self._place = 0
        self._written: list[str] = []  # of the text that is not added yet
        self._shown: list[str] = []

    def place_of(self, offset: int) -> int:
        """Returns the place in the file of one in the text."""
        line = bisect_right(self._offsets, offset) - 1
        return int(self._begins[line]) + offset - int(self._offsets[line])

    def add(self, parts: Sequence[_Part]) -> None:
        """Adds the text."""
        opened = list[_Part]()  # those with brackets around the place
        if mark := _MARK.match(self._text):
            self._flows.end(self._taken(mark.end()))
        for number, part in enumerate([*parts, _Part("end", len(self._text), len(self._text))]):
            while opened and part.begin >= opened[-1].label_end:
                self._close(opened.pop())
            is_strong = part.kind == "emphasis" and part.token.tag == "strong"
            begin = part.begin - (is_strong and part.token.nesting == 1)
            if begin < self._place or (
                part.token and part.token.type == "text" and part.kind in ("emphasis",)
            ):
                continue
            self._add_text(begin)
            if part.kind in ("link", "tag") and self._add_note(parts[number : number + MAX_TAGS]):
                continue
            self._add_part(part, part.end + (is_strong and part.token.nesting == -1))
            if part.kind in _BRACKETS:
                opened.append(part)
        self._flush()

    def _close(self, part: _Part) -> None:
        """Adds the end of brackets, and what is after them."""
        self._add_text(part.label_end)
        if part.kind != "note":
            self._flows.close(self._titled(part, part.end), "[")
            return
        self._flows.end(self._marked(part.end))
        inner, self._flows = self._flows, self._outer.pop()
        self._flows.add_inner_note(inner, self._text[part.end : part.end + _NUM_AFTER])

    def _add_note(self, parts: Sequence[_Part]) -> bool:
        """Adds the number of a note, if parts begin with one: a link or a tag of HTML."""
        self._flush()
        tags, pieces = _as_html(parts, self._text), list[str]()
        for (_, end, tag), (begin, _, _) in pairwise([*tags, (len(self._text), 0, "")]):
            pieces += [tag, self._text[end : min(begin, end + MAX_CHARACTERS)].replace("\\", "")]
        found = None if parts[0].title else note_of(pieces, self._flows.last_characters)
        if found is not None:
            self._flows.add_note(self._marked(tags[len(found[0]) // 2][1]), found[1])
        return found is not None

    def _add_part(self, part: _Part, end: int) -> None:
        flows = self._flows
        if part.kind in ("link", "span"):
            flows.open(self._marked(part.begin + 1), "[", is_single=True)
        elif part.kind == "note":
            before = self._marked(part.begin + len("^["))
            self._outer.append(flows)
            self._flows = flows.inner()
            self._flows.end(before)
        elif part.kind == "picture":
            self._flush()
            self._flows = flows.inner()
            self._add_picture(part, end if flows.has_words else _after_spaces(self._text, end))
            flows.add_parts([self._flows.part()], is_spaced=flows.has_words)
            self._flows = flows
        elif part.kind == "image":
            self._add_picture(part, _after_spaces(self._text, end))
        elif part.kind == "source":
            flows.add_of_source(self._marked(end))
        elif part.kind == "code":
            shown = _TAG.sub("", self._text[part.begin : end]).strip("`<>[] ")
            self._add_fixed(end, shown)
        elif part.kind in ("tag", "end_tag") and (tag := _HTML.match(self._text, part.begin)):
            name, markup = tag[2].lower(), self._marked(end)
            if part.kind == "end_tag":
                flows.close(markup, name)
            else:
                is_single = name not in FORMATTING or _ID.search(markup) is not None
                flows.open(markup, name, is_single=is_single)
        elif part.kind == "lines" or _is_break(part, self._text):
            flows.end(self._marked(end))
        elif part.kind == "glued":
            mark = Tag(self._marked(end), "")
            self.glued.append((mark, f"<{'/' * (part.token.nesting < 0)}{part.token.tag}>"))
            flows.end(mark)
        elif part.kind == "markup" and end == len(self._text):
            flows.end(self._marked(end))
        elif part.kind == "markup":
            is_apart = not part.begin or self._text[part.begin - 1].isspace()
            flows.add_markup(self._marked(_after_spaces(self._text, end) if is_apart else end))
        elif part.kind == "newline":
            self._add_shown(end, " ")
        elif part.kind in ("escape", "entity"):
            raw = self._text[part.begin : end]
            self._add_shown(end, unescaped(raw) if part.kind == "entity" else raw[raw[1:2] in punctuation :])
        elif part.token is not None and part.token.nesting == 1:
            name = part.token.tag
            flows.open(self._marked(end), name).instead = f"<{name}>", f"</{name}>"
        elif part.token is not None and part.token.nesting == -1:
            flows.close(self._marked(end), part.token.tag)

    def _add_picture(self, part: _Part, end: int) -> None:
        """Adds a picture, or a link that has only one, until a place of the text."""
        if part.picture is None:
            self._flows.end(self._marked(part.begin + len("![")))
            self._add_text(part.label_end)
        else:
            self._flows.end(self._marked(part.picture.begin))
            self._add_picture(part.picture, part.label_end)
        self._flows.end(self._titled(part, end))

    def _taken(self, end: int) -> str:
        """Returns what is written until a place of the text, from where the last part ended."""
        begin, self._place = self._place, end
        return self._file[self.place_of(begin) : self.place_of(end)]

    def _marked(self, end: int) -> str:
        """Returns the same, which is markup: the text before it is added."""
        self._flush()
        return self._taken(end)

    def _titled(self, part: _Part, end: int) -> str | Tag:
        """Returns the same, with the title of a link or picture as a text of its own."""
        if not part.title:
            return self._marked(end)
        before, quoted = map(self._marked, part.quotes)
        return _with_title(self._flows, before, quoted, self._marked(end), part.title)

    def _add_shown(self, end: int, text: str) -> None:
        self._shown.append(text)
        self._written.append(self._taken(end))

    def _add_text(self, end: int) -> None:
        for number, part in enumerate(_FOOTNOTE.split(self._text[self._place : end])):
            if number % 2:
                self._add_fixed(self._place + len(part), part)
            else:
                self._add_shown(self._place + len(part), part)

    def _add_fixed(self, end: int, shown: str) -> None:
        """Adds code or the number of a footnote until a place of the text."""
        markup = self._marked(end)
        if _FOOTNOTE.fullmatch(markup):
            self._flows.add_note(markup, self._text[end : end + _NUM_AFTER])
        else:
            self._flows.add_fixed(markup, shown)

    def _flush(self) -> None:
        if text := "".join(self._shown):
            self._flows.add_text("".join(self._written), text)
        self._shown.clear()
        self._written.clear()


def _escaped(text: str) -> str:
    """Returns a text as Markdown has it."""
    escaped = _TO_ESCAPE.sub(lambda found: escaped_xml(found[0]) if found[1] else f"\\{found[0]}", text)
    return _NUMBER.sub(r"\1\\", escaped)
