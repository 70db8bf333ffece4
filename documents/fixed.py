"""Texts within a sentence that are not translated, such as code: where they stand in a translation."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from seq2seq_serve.documents.alignment import text_of
from seq2seq_serve.documents.segments import LETTER
from seq2seq_serve.documents.spans import Here, Placed

_NUM_COMPARED = 16  # texts with the same first word that are looked for in a translation
_ARTICLE = 3  # characters that one has at most
_BEGIN = 3  # characters that words have in common with their translation
_WORD, _WORD_OR_MARK = re.compile(r"\w+"), re.compile(r"\w+|[^\w\s]")
_DIGIT = re.compile(r"\d")
_CORE = re.compile(r"\w(?:.*\w)?", re.DOTALL)


def with_fixed(parts: list[Placed], texts: Sequence[Here]) -> list[Placed]:
    """Returns parts of a translation with fixed texts in place of their translations.

    Each stands once, where the translation has the same text, or else at the longest part with a word that
    belongs to it: in its place if that may be its translation, or after it, since words may belong to a text
    only because the translation lacks it. One without such a part is left out.
    """
    fixed = [here for here in texts if here.is_fixed]
    if not fixed:
        return parts
    found = deque(_found(text_of(parts), fixed))
    cut, place, num_before = list[Placed](), 0, 0
    placed: dict[Here, int] = {}  # where each is among the parts
    for text, its in parts:
        end = num_before + len(text)
        while place < end:
            begin, stop, here = found[0] if found else (end, end, its)
            if begin > place:
                cut.append((text[place - num_before : min(begin, end) - num_before], its))
                place = min(begin, end)
                continue
            if here not in placed:
                placed[here] = len(cut)
                cut.append((here.text, here))
            place = min(stop, end)
            if stop <= end:
                found.popleft()
        num_before = end
    is_found = set(placed)
    for number, (text, its) in enumerate(cut):
        is_longer = its not in placed or len(text) > len(cut[placed[its]][0])
        is_there = _CORE.search(text) or text.strip() == its.text.strip()
        if its.is_fixed and its not in is_found and is_longer and is_there:
            placed[its] = number
    result = list[Placed]()
    for number, (text, its) in enumerate(cut):
        if not its.is_fixed:
            result.append((text, its))
            continue
        beside, core = Here("", its.place, ("", "")), _CORE.search(text)
        if placed.get(its) != number:
            result.append((text, beside))
        elif its in is_found or core is None:
            result.append((text, its))
        elif not _may_translate(text, its.text):
            result += [(f"{text[: core.end()]} ", beside), (its.text, its), (text[core.end() :], beside)]
        else:  # keep the marks beside it that the fixed text does not have itself
            own = _CORE.search(its.text)
            marks = (its.text[: own.start()], its.text[own.end() :]) if own else ("", "")
            before = _without(text[: core.start()], marks[0])
            after = _without(text[core.end() :][::-1], marks[1])[::-1]
            result += [(before, beside), (its.text, its), (after, beside)]
    return [part for part in result if part[0]]


def _may_translate(target: str, text: str) -> bool:
    """Whether a part of a translation may be that of a fixed text.

    It shares a word or the begin of one with it, or has as many words beside an article. A text with a
    digit, such as a reference, or without a letter has no translation that shares nothing with it.
    """
    begins = [{word[:_BEGIN] for word in _WORD.findall(each.casefold())} for each in (target, text)]
    if not begins[0].isdisjoint(begins[1]) or target.strip() == text.strip():
        return True
    words, num_words = target.split(), len(text.split())
    has_article = len(words) == num_words + 1 and len(words[0]) <= _ARTICLE
    return (
        LETTER.search(text) is not None and not _DIGIT.search(text) and len(words) <= num_words + has_article
    )


def _without(marks: str, own: str) -> str:
    """Returns the marks before a text without as many of its own at their end, also as dashes."""
    known = own + "–—" if "-" in own else own
    kept = marks[: max(len(marks) - len(own), 0)]
    return kept + marks[len(kept) :].rstrip(known)


def _found(whole: str, fixed: Sequence[Here]) -> list[tuple[int, int, Here]]:
    """Returns where a text has fixed ones, in its order: from where, to where, and which."""
    by_word: dict[str, dict[str, list[Here]]] = {}
    for here in reversed(fixed):
        text = here.text.strip()
        if word := _WORD.search(text) or _WORD_OR_MARK.search(text):
            by_word.setdefault(word[0], {}).setdefault(text, []).append(here)
    found, end = list[tuple[int, int, Here]](), 0
    ordered = {word: sorted(texts, key=len, reverse=True)[:_NUM_COMPARED] for word, texts in by_word.items()}
    for word in _WORD_OR_MARK.finditer(whole):
        for text in ordered.get(word[0], ()):
            heres = by_word[word[0]][text]
            first = _WORD.search(text)
            begin = word.start() - (first.start() if first else 0)
            stop = begin + len(text)
            if (
                heres
                and begin >= end
                and whole.startswith(text, begin)
                and not whole[stop : stop + 1].isalnum()
            ):
                found.append((begin, stop, heres.pop()))
                end = stop
                break
    return found
