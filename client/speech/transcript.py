"""Writes the segments of a sound one after the other: as text, as lines with times, or as subtitles."""

from __future__ import annotations

from collections.abc import Iterator

from seq2seq_serve.client.output import one_line
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, Segment, Word
from seq2seq_serve.protos.subtitles import Subtitles


class Transcript:
    """Forms the text of each segment. Owned by the command.

    Args:
        form: A form of subtitles; None writes lines.
        options: Whether lines have times, and of segments or words.
    """

    def __init__(self, form: str | None, options: GenerateOptions) -> None:
        self._subtitles = Subtitles(form) if form else None
        self._has_times = options.timestamps
        self._has_word_times = options.word_timestamps

    @property
    def beginning(self) -> str:
        """The text before the first segment."""
        return self._subtitles.beginning if self._subtitles is not None else ""

    @property
    def is_plain(self) -> bool:
        """Whether a segment is a line of text alone."""
        return not (self._subtitles or self._has_times or self._has_word_times)

    def text(self, segment: Segment, translation: str | None = None) -> str:
        """Returns the lines of the next segment, with their breaks; a translation stands in its place."""
        if translation is not None:
            begin, end = segment.begin_seconds, segment.end_seconds
            segment = Segment(begin_seconds=begin, end_seconds=end, text=translation)
        elif not self._has_word_times and segment.words:
            plain = Segment()
            plain.CopyFrom(segment)
            del plain.words[:]
            segment = plain
        if self._subtitles is not None:
            return self._subtitles.cue(segment)
        return "".join(f"{line}\n" for line in self._lines(segment))

    def _lines(self, segment: Segment) -> Iterator[str]:
        if self._has_word_times and segment.words:
            yield from map(timed_line, segment.words)
        elif self._has_times or (self._has_word_times and segment.text.strip()):
            yield timed_line(segment)
        elif text := one_line(segment.text).strip():
            yield text


def timed_line(part: Segment | Word) -> str:
    """Returns a line with the times of a segment or word, and its text."""
    times = f"{clock(part.begin_seconds)} --> {clock(part.end_seconds)}"
    return f"[{times}] {one_line(part.text).strip()}"


def clock(seconds: float) -> str:
    """Returns a time in minutes and seconds."""
    minutes, seconds = divmod(round(seconds, 2), 60)
    return f"{minutes:02.0f}:{seconds:05.2f}"
