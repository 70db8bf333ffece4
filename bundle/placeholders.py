"""Finds what stays as it is when a text is translated: addresses, tags, and the variables of programs."""

from __future__ import annotations

import re

from seq2seq_serve.bundle.words import UNSPACED

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
