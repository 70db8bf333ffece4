"""Finds what stays as it is when a text is translated: addresses, tags, and the variables of programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from seq2seq_serve.bundle.words import BREAKLESS, CLOSING, OPENING, is_inside

IN_PLACEHOLDERS = "%", "{", "<", "@", "://", "www.", "$t("  # each placeholder has at least one of them
_MOST_KEPT_CHARACTERS = 100  # of a placeholder and what is beside it
# The lengths are bounded, so that the time is linear in the length of any text.
_PLACEHOLDER = re.compile(
    rf"""
      (?: (?<![^\W_]) | (?<=[{BREAKLESS}]) )
      (?P<url> (?:https?://|www\.) [^\s<>"\u3000-\u303f\uff00-\uffef{BREAKLESS}]{{1,2000}})
    | (?: (?<![\w.+-]) | (?<=[{BREAKLESS}]) ) [A-Za-z0-9_.+-]{{1,64}}
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
_NEXT = ("", "a", "s", "1")  # characters that go on with most placeholders
_AFTER_URL = ".,;:!?)]}'’”»"  # marks at the end of a URL, which belong to the sentence


def placeholders(text: str) -> Iterator[tuple[int, int]]:
    """Yields where a text has placeholders, each by its begin and end, in their order.

    They are URLs, e-mail addresses, tags (`<b>`, `<br/>`, `</a>`), and variables: `{name}`, `{{name}}`,
    `{count, number}`, `${name}`, `%{name}`, `$t(name)`, `%s`, `%1$s`, `%(name)s`, `%1`, `%@`, `%#@name@`.
    """
    for found in _PLACEHOLDER.finditer(text):
        whole = found[0].rstrip(_AFTER_URL) if found["url"] else found[0]
        yield found.start(), found.start() + len(whole)


def count_placeholders(text: str) -> Counter[str]:
    """Returns the placeholders of a text, in their order, and how often it has each."""
    return Counter(text[begin:end] for begin, end in placeholders(text))


def is_placeholder(text: str) -> bool:
    """Returns whether a text is one placeholder, and nothing more."""
    return [*placeholders(text)] == [(0, len(text))]


def stays(before: str, placeholder: str, after: str) -> bool:
    """Returns whether a placeholder is still one, and no other, with some text beside it.

    So it has to be with one more character, because a target is written from its beginning: `%1$` is not
    followed by an `s`. Only a mark that ends a sentence may stand after a URL.

    Args:
        before: What is directly before it, from the last white space on.
        placeholder: A placeholder; anything else stays.
        after: What is directly after it, up to the first white space.
    """
    is_short = len(before) + len(placeholder) + len(after) <= _MOST_KEPT_CHARACTERS
    return (_short_stays if is_short else _stays)(before, placeholder, after)


def _stays(before: str, placeholder: str, after: str) -> bool:
    if not is_placeholder(placeholder):
        return True
    place = len(before), len(before) + len(placeholder)
    texts = [before + placeholder + after]
    if after and after[0] not in _AFTER_URL:
        texts += [before + placeholder + after[0] + character for character in _NEXT]
    return all(place in placeholders(text) for text in texts)


_short_stays = lru_cache(maxsize=2**14)(_stays)  # what is kept has a bound in bytes, too


def is_kept(source: str, target: str) -> bool:
    """Whether a target has each placeholder of its source as often, and its tags in pairs as the source.

    If those of the source are around texts, so are those of the target, and each begins before its end.
    """
    if count_placeholders(source) != count_placeholders(target):
        return False
    num_empty = _num_empty_pairs(source)
    its = 0 if num_empty is None else _num_empty_pairs(target)
    return num_empty is None or (its is not None and its <= num_empty)


def space_around(text: str, begin: int, end: int) -> tuple[bool | None, bool]:
    """Returns whether a translation needs a break before and after a placeholder of a text.

    A break is white space, the beginning or end of the translation, or a mark; before the placeholder, one
    that opens something. It is not needed where the placeholder is part of a word (`v{version}`,
    `{width}px`), nor beside a tag without white space, which belongs to the word beside it.

    Args:
        text: The text.
        begin: Where the placeholder begins.
        end: Where it ends.

    Returns:
        Whether it needs one before it, or None if it directly follows what is there; and whether after it.
    """
    before, after = text[begin - 1 : begin] if begin else " ", text[end : end + 1] or " "
    if text[begin] == "<":
        if text[begin + 1] == "/":
            return (True if begin and before.isspace() else None), after.isspace()
        return before.isspace(), after.isspace()
    is_part = is_inside(before) or before == "_"
    return (None if is_part else before not in CLOSING), not (is_inside(after) or after == "_")


def is_after_space_in_bracket(text: str, begin: int) -> bool:
    """Whether a space is between an opening bracket and the placeholder that begins at a place of a text."""
    return begin > 1 and text[begin - 1].isspace() and text[begin - 2] in OPENING


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
