"""Writes the segments of a target as subtitles: SubRip (`srt`) or WebVTT (`vtt`)."""

from __future__ import annotations

from collections.abc import Iterable

from seq2seq_serve.protos.seq2seq_v1_pb2 import Segment

FORMATS = ("srt", "vtt")


def subtitles(segments: Iterable[Segment], form: str) -> str:
    """Returns a whole file of one of `FORMATS`; segments without a visible text are left out."""
    point = "," if form == "srt" else "."
    cues = []
    for segment in segments:
        text = " ".join(segment.text.split()).replace("-->", "->")  # which would look like times
        if text:
            times = f"{_clock(segment.begin_seconds, point)} --> {_clock(segment.end_seconds, point)}"
            cues.append(f"{times}\n{text}\n\n")
    if form == "srt":
        return "".join(f"{number}\n{cue}" for number, cue in enumerate(cues, start=1))
    return "WEBVTT\n\n" + "".join(cues)


def _clock(seconds: float, point: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{hours:02}:{minutes:02}:{seconds:02}{point}{milliseconds:03}"
