"""Writes the segments of a target as subtitles: SubRip (`srt`) or WebVTT (`vtt`)."""

from __future__ import annotations

import html
from collections.abc import Iterable

from seq2seq_serve.protos.seq2seq_v1_pb2 import Segment

FORMATS = ("srt", "vtt")


def subtitles(segments: Iterable[Segment], form: str) -> str:
    """Returns a whole file of one of `FORMATS`; segments without a visible text are left out.

    With the times of words, a segment is shown from its first word to its last, and WebVTT has the time of
    each word, at which players can show that it is said.
    """
    point = "," if form == "srt" else "."
    cues = []
    for segment in segments:
        text, words = _line(_escaped(segment.text, form)), segment.words
        if text:
            begin, end = segment.begin_seconds, segment.end_seconds
            if words:
                begin, end = words[0].begin_seconds, words[-1].end_seconds
            if words and form == "vtt":
                timed = [
                    f"<{_clock(word.begin_seconds, point)}>{_escaped(word.text, form)}" for word in words[1:]
                ]
                text = _line("".join([_escaped(words[0].text, form), *timed]))
            cues.append(f"{_clock(begin, point)} --> {_clock(end, point)}\n{text}\n\n")
    if form == "srt":
        return "".join(f"{number}\n{cue}" for number, cue in enumerate(cues, start=1))
    return "WEBVTT\n\n" + "".join(cues)


def _line(text: str) -> str:
    return " ".join(text.split()).replace("-->", "->")  # which would look like times


def _escaped(text: str, form: str) -> str:
    return html.escape(text, quote=False) if form == "vtt" else text  # WebVTT has tags


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"
