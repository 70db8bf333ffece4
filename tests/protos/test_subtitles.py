"""Subtitles of segments."""

from seq2seq_serve.protos.seq2seq_v1_pb2 import Segment, Word
from seq2seq_serve.protos.subtitles import subtitles

SEGMENTS = [
    Segment(begin_seconds=0, end_seconds=1.5, text=" And so --> my\n fellow"),
    Segment(begin_seconds=59.9996, end_seconds=60.5, text=" "),
    Segment(begin_seconds=59.9996, end_seconds=3661.25, text=" Americans,"),
]


def test_srt_numbers_its_cues_and_has_commas_in_times():
    assert subtitles(SEGMENTS, "srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nAnd so -> my fellow\n\n"
        "2\n00:01:00,000 --> 01:01:01,250\nAmericans,\n\n"
    )


def test_vtt_has_a_header_and_points_in_times():
    assert subtitles(SEGMENTS[:1], "vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nAnd so --&gt; my fellow\n\n"
    )
    assert subtitles([], "vtt") == "WEBVTT\n\n"


def test_times_of_words_bound_a_cue_and_are_in_vtt():
    words = [
        Word(begin_seconds=0.3, end_seconds=0.5, text=" And"),
        Word(begin_seconds=0.5, end_seconds=1.25, text=" so,"),
    ]
    segments = [Segment(begin_seconds=0, end_seconds=2, text=" And so,", words=words)]
    assert subtitles(segments, "srt") == "1\n00:00:00,300 --> 00:00:01,250\nAnd so,\n\n"
    assert subtitles(segments, "vtt") == (
        "WEBVTT\n\n00:00:00.300 --> 00:00:01.250\nAnd<00:00:00.500> so,\n\n"
    )


def test_what_looks_like_a_tag_is_text_in_vtt():
    words = [
        Word(begin_seconds=0, end_seconds=0.5, text=" AT&T"),
        Word(begin_seconds=0.5, end_seconds=1, text=" <b>x</b>"),
    ]
    segment = Segment(begin_seconds=0, end_seconds=1, text=" AT&T <b>x</b>")
    header = "WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n"
    assert subtitles([segment], "srt").endswith("\nAT&T <b>x</b>\n\n")
    assert subtitles([segment], "vtt") == f"{header}AT&amp;T &lt;b&gt;x&lt;/b&gt;\n\n"
    segment.words.extend(words)
    timed = "AT&amp;T<00:00:00.500> &lt;b&gt;x&lt;/b&gt;"
    assert subtitles([segment], "vtt") == f"{header}{timed}\n\n"
