"""Writes the segments of a target as subtitles: SubRip (`srt`) or WebVTT (`vtt`)."""

from __future__ import annotations

import html
from collections.abc import Iterable

from seq2seq_serve.protos.seq2seq_v1_pb2 import Segment

FORMATS = ("srt", "vtt")


class Subtitles:
    """Writes a file of subtitles segment by segment. Owned by whoever writes the file.

    With the times of words, a segment is shown from its first word to its last, and WebVTT has the time of
    each word, at which players can show that it is said.

    Args:
        form: One of `FORMATS`.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._num_cues = 0

    @property
    def beginning(self) -> str:
        """The text before the first segment."""
        return "WEBVTT\n\n" if self._form == "vtt" else ""

    def cue(self, segment: Segment) -> str:
        """Returns the text of the next segment; it is empty for one without a visible text."""
        form, point = self._form, "," if self._form == "srt" else "."
        text, words = _line(_escaped(segment.text, form)), segment.words
        if not text:
            return ""
        begin, end = segment.begin_seconds, segment.end_seconds
        if words:
            begin, end = words[0].begin_seconds, words[-1].end_seconds
        if words and form == "vtt":
            timed = [
                f"<{_clock(word.begin_seconds, point)}>{_escaped(word.text, form)}" for word in words[1:]
            ]
            text = _line("".join([_escaped(words[0].text, form), *timed]))
        self._num_cues += 1
        number = f"{self._num_cues}\n" if form == "srt" else ""
        return f"{number}{_clock(begin, point)} --> {_clock(end, point)}\n{text}\n\n"


def subtitles(segments: Iterable[Segment], form: str) -> str:
    """Returns a whole file of one of `FORMATS`; segments without a visible text are left out."""
    file = Subtitles(form)
    return file.beginning + "".join(map(file.cue, segments))


def _line(text: str) -> str:
    return " ".join(text.split()).replace("-->", "->")  # which would look like times


def _escaped(text: str, form: str) -> str:
    return html.escape(text, quote=False) if form == "vtt" else text  # WebVTT has tags


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"
