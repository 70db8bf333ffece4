"""Finds what stays as it is when a text is translated: addresses, tags, and the variables of programs."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

from seq2seq_serve.bundle.words import UNSPACED, is_inside

# The lengths are bounded, so that the time is linear in the length of any text.
_PLACEHOLDER = re.compile(
    rf"""
      (?: (?<![^\W_]) | (?<=[{UNSPACED}]) )
      (?P<url> (?:https?://|www\.) [^\s<>"\u3000-\u303f\uff00-\uffef{UNSPACED}]{{1,2000}})
    | (?: (?<![\w.+-]) | (?<=[{UNSPACED}]) ) [A-Za-z0-9_.+-]{{1,64}}
      @ [A-Za-z0-9_-]{{1,64}} (?:\.[A-Za-z0-9_-]{{1,64}}){{1,8}}          # an e-mail address
    """
    r"""
    | </?[A-Za-z][^<>]{0,500}>                                         # a tag
    | \{\{ [^{}\n]{1,64} \}\}                                          # {{name}}
    | [$%]\{ [^{}\n]{1,64} \}                                          # ${name}, %{name}
    | \{ [\w.:!,\[\]-]{0,64} \}                                        # {name}, {0:d}, {}
    | \{ \w{1,64},\ (?:number|date|time|ordinal|spellout|duration) [^{}\n]{0,64} \}  # {count, number}
    | \$t\( [^()\n]{1,128} \)                                          # $t(name)
    | % (?:\d{1,2}\$)? \#@ \w{1,64} @                                  # %#@name@
    | % \( \w{1,64} \) [-+\#]? \d{0,3} (?:\.\d{1,2})? [a-zA-Z]         # %(name)s
    | % (?:\d{1,2}\$)? @                                               # %@
    | % (?:\d{1,2}\$)? [-+\#0]? \d{0,3} (?:\.\d{1,2})? (?:hh?|ll?|[jztL])? [diouxXeEfgGcspn]
      (?![A-Za-z0-9])                                                  # %s
    | % L? [1-9] \d? (?![A-Za-z0-9])                                   # %1, %L1
    | %%
    """,
    re.VERBOSE,
)
_TAG_NAME = re.compile(r"<(/?)([A-Za-z][^\s/>]*+)")
_AFTER_URL = ".,;:!?)]}'’”»"  # marks at the end of a URL, which belong to the sentence


def placeholders(text: str) -> list[tuple[int, int]]:
    """Returns where a text has placeholders, each by its begin and end, in their order.

    They are URLs, e-mail addresses, tags (`<b>`, `<br/>`, `</a>`), and variables: `{name}`, `{{name}}`,
    `{count, number}`, `${name}`, `%{name}`, `$t(name)`, `%s`, `%1$s`, `%(name)s`, `%1`, `%@`, `%#@name@`.
    """
    spans = []
    for found in _PLACEHOLDER.finditer(text):
        whole = found[0].rstrip(_AFTER_URL) if found["url"] else found[0]
        spans.append((found.start(), found.start() + len(whole)))
    return spans


def is_kept(source: str, target: str) -> bool:
    """Whether a target has each placeholder of its source as often, and its tags in pairs as the source.

    If those of the source are around texts, so are those of the target, and each begins before its end.
    """
    one, other = (sorted(text[begin:end] for begin, end in placeholders(text)) for text in (source, target))
    if one != other:
        return False
    num_empty = _num_empty_pairs(source)
    its = 0 if num_empty is None else _num_empty_pairs(target)
    return num_empty is None or (its is not None and its <= num_empty)


def with_spaces(source: str, target: str) -> str:
    """Returns a target with a space between a placeholder and a word or another one, as in its source.

    In scripts without white space between words, and in Korean with its particles, none is added.
    """
    spaced = dict[tuple[str, int], tuple[bool, bool]]()  # whether white space is before, and after each
    numbers = Counter[str]()
    for begin, end in placeholders(source):
        text = source[begin:end]
        spaced[text, numbers[text]] = source[begin - 1 : begin].isspace(), source[end : end + 1].isspace()
        numbers[text] += 1
    numbers.clear()
    places, found = set[int](), placeholders(target) if spaced else []
    begins, ends = {begin for begin, _ in found}, {end for _, end in found}
    for begin, end in found:
        text = target[begin:end]
        is_before, is_after = spaced.get((text, numbers[text]), (False, False))
        numbers[text] += 1
        if is_before and (begin in ends or is_inside(target[begin - 1 : begin])):
            places.add(begin)
        if is_after and (end in begins or is_inside(target[end : end + 1])):
            places.add(end)
    cuts = [0, *sorted(places), len(target)]
    return " ".join(target[begin:end] for begin, end in pairwise(cuts)) if places else target


def _num_empty_pairs(text: str) -> int | None:
    """Returns how many pairs of tags have nothing inside; None if not all tags with an end are in pairs."""
    tags = [(begin, end, _TAG_NAME.match(text, begin)) for begin, end in placeholders(text)]
    found = [(begin, end, tag[1], tag[2]) for begin, end, tag in tags if tag and text[end - 2] != "/"]
    closed = {name for _, _, slash, name in found if slash}
    opened, num_empty = list[tuple[str, int]](), 0
    for begin, end, slash, name in found:
        if not slash and name in closed:
            opened.append((name, end))
        elif slash:
            if not opened or opened[-1][0] != name:
                return None
            num_empty += not text[opened.pop()[1] : begin].strip()
    return None if opened else num_empty
