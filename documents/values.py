"""Texts that are replaced where they stand in a file: strings of catalogues."""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from seq2seq_serve.commands import install_command
from seq2seq_serve.documents.segments import (
    Document,
    Part,
    has_choice,
    has_words,
    unchanged,
    wrong_file,
)
from seq2seq_serve.documents.tags import string_part

# Words of formats of dates in scripts whose letters stand beside those of a field: other words are texts
_UNIT = "(?:요일|시간|曜日?|[년월일시분초주年月日时時分秒点點号號週周])"
# Values of a catalogue that are not texts
_CODE = re.compile(
    rf"""
      [!-.0-?A-\[\]^`-~]*+[/@_\\][!-~]*+ | [:\#][!-~]*+  # paths, addresses, colours
    | [A-Z_$][\w$-]*+(?:\.[\w$-]++)++ | true | false  # names
    | v?[0-9]++(?:\.[0-9]++)++[\w.+-]*+  # versions
    | [0-9]{{4}}-?[0-9]{{2}}-?[0-9]{{2}}[T ][0-9:.,]++(?:Z|[+-][0-9:]++)?+  # times of ISO 8601
    | P(?=T?[0-9])(?:[0-9]++[YMWD])*+(?:T(?:[0-9.]++[HMS])++)?+  # durations
    | \{{?[0-9A-F]{{8}}(?:-[0-9A-F]{{4}}){{3}}-[0-9A-F]{{12}}\}}?  # UUIDs
    | (?-i:[a-z]{{2,3}}-(?:(?:Arab|Cyrl|Hans|Hant|Latn)(?:-[A-Z]{{2}})?|[A-Z]{{2}}|[0-9]{{3}}))  # languages
    | (?-i: (?=.*?%[-_0^]?[BHIMYmy])(?=.*?%.*?%) (?:  # formats of strftime, with the words of dates
        %[-_0^]?[A-Za-z](?:T(?=%)|Z\Z|{_UNIT}|[\u0370-\u1fff]{{1,2}}+)?+(?![A-Za-z\u00aa-\U0010ffff])
        | (?:[dghmosuvàгч]|at|del?|klo?|la|min|o[bfm]|um|Uhr|[áà]s|GMT|UTC|Z)(?![A-Za-z\u00aa-\U0010ffff])
        | [^%A-Za-z\u00aa-\U0010ffff] )++ )
    | 0x[0-9A-F]++ | (?=[A-F]*[0-9])(?=[0-9]*[A-F])[0-9A-F]{{8,}}  # numbers, digests
    | (?:[+-]?[0-9.]++  # sizes
        (?:%|ch|cm|deg|d?px?|dpi|r?em|ex|fr|in|k?Hz|mm|m?s|pc|pt|q|sp|turn|v[hw]|vmax|vmin|[KMGT]i?B)
        (?:\s++(?=\S)|$) )++
    | (?:rgba?|hsla?|hwb|(?:ok)?l(?:ab|ch)|var|calc|url|cubic-bezier|(?:linear|radial|conic)-gradient)\(.*\)
    | (?=.*?(?:[0-9]|(?-i:[a-z][A-Z])))(?:[A-Z0-9+]{{4}})*+(?:[A-Z0-9+]{{3}}=|[A-Z0-9+]{{2}}==)  # base64
    | (?=.*?[0-9])(?=.*?(?-i:[a-z]))(?=.*?(?-i:[A-Z]))[A-Z0-9+=-]{{20,}}
    """,
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)

_STYLE = r"""(?-i:  # of CSS
    (?: --[\w-]++ | -(?:moz|ms|webkit)-[a-z-]++
      | (?: align|background|border|box|column|flex|font|grid|justify|letter|line|list|margin|max|min|object
        |outline|overflow|padding|pointer|row|text|transition|user|vertical|white|word|z )-[a-z-]++
      | (?: animation|background|border|bottom|color|cursor|display|fill|flex|float|font|gap|grid|height|left
        |margin|opacity|outline|overflow|padding|position|right|stroke|top|transform|transition|visibility
        |width )\b
    ) \s*+:\s*+ [^\s:;{}][^:;{}]*+ )"""
_LETTERS = r"\u00c0-\u1fff\u3041-\ud7ff"
# Words of formats of dates: after the letters of a field, such as that for "year", or alone
_GLUED = rf"(?:(?:{_UNIT}|[\u0370-\u1fff]{{1,3}}+)(?![{_LETTERS}]))?+"
_ALONE = rf"(?:(?:{_UNIT}|[\u0370-\u1fff])(?![{_LETTERS}]))?+"
_NUMBERS = r"(?:[-+]?[\d.]++(?:E[-+]?\d++)?+[\s,]*+)"
# The same of other languages and formats, which may have spaces
_CODE_WITH_SPACES = re.compile(
    rf"""
      (?:{_STYLE};\s*+)++(?:{_STYLE})?+
    | {_STYLE}(?: (?<=[%)]) | (?<=[er]m) | (?<=:\s0|\dpx) | (?<=auto|none|\#\w\w\w) )
    | (?: [^{{}}]++ \{{\s*+ (?:{_STYLE}(?:;\s*+|(?=\}})))++ \}}\s*+ )++
    | (?:(?:only\s|not\s)?+(?:all|print|screen)\s+and\s+)?+
      (?: \((?:max|min|prefers)-[a-z-]++\s*+:[^():]++\)(?:\s+and\s+|$) )++
    | (?-i: (?: (?:application|audio|font|image|message|multipart|text|video|\*)/[\w.+*-]++  # types of files
        (?:\s*+;\s*+[\w-]++=[^\s;,]++)*+ (?:,\s*+|$) )++ )
    | (?:\*\.[\w.*,{{}}]++(?:;?+\s*+|$))++  # names of files
    | (?:\#[0-9A-F]{{3,8}}(?:[,\s]++|$))++  # colours
    | M\s*+{_NUMBERS}{{2,}}+(?:[ACHLMQSTVZ]\s*+{_NUMBERS}*+)++  # paths of SVG
    | (?=.*[*?]) (?: (?: (?:SUN|MON|TUE|WED|THU|FRI|SAT  # cron
        |JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC) | [\d*/,?\#LW-] )++(?:\s++|$) ){{5,7}}
    | \^.+\$  # expressions
    | [^\s\[]*+ \[[^\s\[\]]{{0,100}}[A-Z0-9]-[A-Z0-9][^\s\]]{{0,100}}\] (?:[+*?]|\{{\d)\S*
    | (?-i: (?=.{{3}}) (?=.*?(?:yy|YY|MM|dd|DD|HH|hh|mm:ss|h:mm|EEE)) (?:  # formats of dates
        (?: Do | [ADEGHKLMQSYZacdehkmsuwxyz](?![A-Za-z])
        | (?: (?P<letter>[ADEFGHKLMOQSVWXYZacdehkmstuwxyz])(?P=letter)++T?+ )++Z?+(?![A-Za-z]) )
        {_GLUED} (?: '[^']*+' | \[[^\[\]]*+\] | [^A-Za-z'\[{_LETTERS}] {_ALONE} )*+ )++ )
    """,
    re.ASCII | re.IGNORECASE | re.VERBOSE,
)

# Statements of SQL in capitals, the first name of which a sentence would go on after
_STATEMENT = re.compile(
    r"""
    (?=[^a-z*=;_]*+[a-z*=;_])
    (?:INSERT\s+INTO|UPDATE(?=(?>.*?\sSET\s)[^=]*+=)|DELETE\s+FROM|(?:ALTER|CREATE|DROP)\s+(?:INDEX|TABLE|VIEW))
    (?:\s++[A-Z]{2,}+(?![\w.]))*+ (?:\s++["`\[\]\w.]++)?+ (?:\s++[a-z]{1,2}(?=\s+SET\s))?+
    \s*+ (?:[(,;]|--|[A-Z]{2}|\Z) .*
    """,
    re.ASCII | re.DOTALL | re.VERBOSE,
)
_SELECT = re.compile(
    r"""
      (?-i: (?=[^a-z*=;_]*+[a-z*=;_]) SELECT(?=.*\sFROM\s) \s ).*
    | SELECT\s+\*\s+FROM\s.* | SELECT\s(?>.*?\sFROM\s)(?>.*?\sWHERE\s)[^=<>]*+[=<>].*
    """,
    re.ASCII | re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
# What a query has beside short names: texts, comments, long names, what is in brackets, a second name of a
# table, words in capitals, and the usual words of SQL in small letters
_NO_NAMES = re.compile(
    r"""
    '[^']*+' | "[^"]*+" | `[^`]*+` | --[^\n]*+ | (?<!\w)\w*+\([^()]*+\) | (?<!\w)\w++\.[\w.]++
    | (?-i: (?<!\w) (?:FROM|JOIN)\s++[\w.]++\s++[a-z]\w*+(?=\s+[A-Z]{2}) | (?<!\w)[A-Z]{2}[A-Z\d_]*+(?!\w) )
    | (?<!\w) (?: and|as|asc|between|by|case|desc|distinct|else|end|from|group|having|inner|join|left|like
      |limit|not|null|offset|on|or|order|outer|right|select|then|union|when|where
    ) (?!\w)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_TWO_WORDS = re.compile(r"[^\W\d_]\s+[^\W\d_]{3}")  # no name has a longer one right after it

_ESCAPE = re.compile(r"\\(?:[uU]([0-9a-fA-F]{4})|\r\n[ \t\f]*+|[\r\n][ \t\f]*+|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}


# Where a string begins and ends in its file, what it says, and what returns how another text is written.
# One without a text is not translated, and may still change.
PlacedString = tuple[int, int, str | None, Callable[[str], str]]


class Spliced(Document):
    """A file in which only the strings that are translated change."""

    def __init__(self, encoding: str, text: str) -> None:
        self.encoding, self._text = encoding, text

    @abstractmethod
    def strings(self) -> Iterator[PlacedString]:
        """Yields the strings of the file, in their order."""

    def parts(self) -> Iterator[Part]:
        done = 0
        for begin, end, text, encode in self.strings():
            if text is None:
                part = Part((), partial(self.without_text, self._text[begin:end], encode))
            elif has_words(text) and not has_choice(text) and not _is_code(text.strip()):
                part = string_part(text, partial(_written, self._text[begin:end], text, encode))
            else:
                continue
            yield unchanged(self._text[done:begin])
            yield part
            done = end
        yield unchanged(self._text[done:])

    def without_text(self, markup: str, encode: Callable[[str], str]) -> str:  # noqa: ARG002
        """Returns what is written for a string that is not a text to translate."""
        return markup


def _is_code(text: str) -> bool:
    return bool(_CODE.fullmatch(text) or _CODE_WITH_SPACES.fullmatch(text) or _is_sql(text))


def _is_sql(text: str) -> bool:
    """Whether a text is SQL, and not a sentence with some of its words."""
    if _STATEMENT.fullmatch(text):
        return True
    if not _SELECT.fullmatch(text):
        return False
    for _ in range(2):  # brackets may be in brackets
        text = _NO_NAMES.sub(",", text)
    return not _TWO_WORDS.search(text)


def _written(markup: str, before: str, encode: Callable[[str], str], text: str) -> str:
    """Returns how a string is written: as it was if it says the same as before."""
    return markup if text == before else encode(text)


def imported(name: str, path: Path) -> Any:
    """Returns the package that reads a kind of file.

    Raises:
        WrongFile: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        text = f"the package {name} is missing, which reads such files: {install_command('documents')}"
        raise wrong_file(path, text) from error


def without_escapes(text: str) -> str:
    """Returns what a string with escapes of Java or Apple says."""

    def character(found: re.Match[str]) -> str:
        return chr(int(found[1], 16)) if found[1] else _ESCAPED.get(found[2], found[2]) if found[2] else ""

    # Characters beyond 16 bits are written in two halves
    whole = _ESCAPE.sub(character, text)
    return (
        whole
        if whole.isascii()
        else whole.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    )
