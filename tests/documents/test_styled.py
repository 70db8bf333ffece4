"""Subtitles with styles: texts change, and codes, times and drawings stay."""

from pathlib import Path

import pysubs2
import pytest

from seq2seq_serve.documents.styled import StyledSubtitles
from tests.documents.answers import backwards, capitals, translated

ASS = r"""[Script Info]
Title: stays
ScriptType: v4.00+

[V4+ Styles]
Format: Name, Fontname
Style: Default,Arial

[Events]
Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text
Comment: 0,0:00:00.00,0:00:01.00,Default,,0,0,0,,not shown
Dialogue: 0,0:00:01.00,0:00:02.00,Default,Ann,0,0,0,,{\an8}One {\i1}two{\i0}, three\Nfour {\c&HFF&}five six
Dialogue: 0,0:00:02.00,0:00:03.00,Default,,0,0,0,,- Who?\N- I am.
Dialogue: 0,0:00:03.00,0:00:04.00,Default,,0,0,0,,{\p1}m 0 0 l 9 9{\p0}
Dialogue: 0,0:00:04.00,0:00:05.00,Default,,0,0,0,,{\k20}syl{\k20}la{\k20}bles
Dialogue: 0,0:00:05.00,0:00:06.00,Default,,0,0,0,,{\b1}never closed\h{note}here

[Fonts]
fontname: a.ttf
"""
"""Of these the last one is not an event."""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("end", ["", "Dialogue: 0"])
def test_subtitles_without_translations_are_as_they_were(newline, encoding, end):
    content = (ASS + end).replace("\n", newline).encode(encoding)
    assert StyledSubtitles(content, Path("a.ass")).content() == content


def test_codes_and_lines_stay():
    texts, written = translated("a.ass", ASS, capitals)
    assert texts == ["One two, three four five six", "Who?", "I am.", "never closed here"]
    expected = ASS.replace(r"One {\i1}two{\i0}, three\Nfour", r"ONE {\i1}TWO{\i0}, THREE\NFOUR")
    expected = expected.replace("five six", "FIVE SIX").replace("Who?", "WHO?").replace("I am", "I AM")
    assert written == expected.replace(r"never closed\h{note}here", "NEVER CLOSED {note}HERE")
    shown = [event.plaintext for event in pysubs2.SSAFile.from_string(written) if not event.is_comment]
    assert shown[:2] == ["ONE TWO, THREE\nFOUR FIVE SIX", "- WHO?\n- I AM."]


def test_styles_follow_their_words():
    written = translated("a.ass", ASS, backwards)[1]
    assert r"{\an8}SIX FIVE FOUR\NTHREE {\i1}TWO{\i0}, ONE" in written.replace(r"{\c&HFF&}", "")


def test_braces_of_a_target_are_not_codes():
    written = translated("a.ass", ASS, lambda _: capitals(r"{\p1} x"))[1]
    assert r"- (\P1) X\N- (\P1) X" in written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"{\an8}- Who?\N{\i1}- I am.", r"{\an8}- WHO?\N{\i1}- AM. I"),
        (r"one {\c&HFF&}two{\c} three", r"THREE TWO ONE{\c&HFF&}{\c}"),
        (r"a b\Nlonger words", r"WORDS\NLONGER B A"),
        (r"a\Nb\Nc\Nd e", r"E\ND C\NB\NA"),
        (r"a{\b1}\Nb", r"B\NA{\b1}"),
    ],
)
def test_speakers_codes_and_lines_have_their_places(text, expected):
    event = "[Events]\nDialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,"
    assert translated("a.ass", event + text, backwards)[1] == event + expected
    assert translated("a.ass", event + r"a\Nb", lambda _: capitals(""))[1] == event
