"""The command `transcribe`, against a server with a small Whisper."""

import functools
import io
import json

import numpy as np
import pytest
import soundfile

from seq2seq_serve.client import Client, GenerateOptions
from seq2seq_serve.client.output import one_line
from seq2seq_serve.client.speech.transcript import clock
from seq2seq_serve.protos.seq2seq_v1_pb2 import LONG_SOURCE_SEQUENTIAL, LONG_SOURCE_SPLIT
from tests.server.service.harness import on_a_thread, serving_bundles

SECONDS = 1.5  # the model takes 0.64


@pytest.fixture(scope="module")
def server(whisper_path):
    with on_a_thread(serving_bundles(whisper_path / "bundle")) as served:
        yield served


@pytest.fixture
def sound() -> bytes:
    stream = io.BytesIO()
    noise = np.random.default_rng(0).standard_normal(int(SECONDS * 22050)) * 0.1
    soundfile.write(stream, noise, 22050, format="WAV")
    return stream.getvalue()


@pytest.fixture
def run(run, sound, tmp_path):
    (tmp_path / "speech.wav").write_bytes(sound)
    return functools.partial(run, "transcribe")


@pytest.mark.parametrize(
    ("long_source", "flags"),
    [(LONG_SOURCE_SEQUENTIAL, ()), (LONG_SOURCE_SPLIT, ("--long-source", "split"))],
)
def test_a_long_sound_is_read_in_windows_and_written_on_one_line(run, server, sound, long_source, flags):
    with Client(server.address) as client:
        options = GenerateOptions(long_source=long_source)
        text = client.generate(sound, options=options).hypotheses[0].text
    code, out, _ = run("speech.wav", *flags)
    assert (code, out) == (0, f"{one_line(text).strip()}\n")
    assert out.strip()


def test_samples_without_a_header_are_read_by_their_type(run, server, tmp_path):
    samples = np.random.default_rng(0).uniform(-0.1, 0.1, 9_000)
    soundfile.write(tmp_path / "speech.wav", samples, 16_000)
    raw = soundfile.read(tmp_path / "speech.wav", dtype="int16")[0].tobytes()
    (tmp_path / "speech.raw").write_bytes(raw)
    code, out, _ = run("speech.raw", "--file-type", "audio/pcm; rate=16000")
    assert (code, out) == (0, run("speech.wav")[1])
    code, _, [err] = run("speech.raw")
    assert code == 1
    assert "'audio/pcm; rate=16000'" in err


@pytest.mark.parametrize("form", ["srt", "vtt"])
def test_a_sound_becomes_subtitles(run, form):
    lines = run("speech.wav", "--timestamps")[1].splitlines()
    out = run("speech.wav", "--format", form)[1]
    cues = [cue.splitlines() for cue in out.split("\n\n") if " --> " in cue]
    assert out.startswith("WEBVTT\n\n" if form == "vtt" else "1\n00:00:0")
    assert len(cues) == sum(bool(line[22:].strip()) for line in lines) > 1
    assert cues[-1][-2].endswith({"srt": "00:00:01,500", "vtt": "00:00:01.500"}[form])


def test_words_are_lines_with_their_times(run):
    answer = json.loads(run("speech.wav", "--word-timestamps", "--json")[1])
    words = [word for one in answer["hypotheses"][0]["segments"] for word in one["words"]]
    lines = run("speech.wav", "--word-timestamps")[1].splitlines()
    assert len(lines) == len(words) > 2
    for line, word in zip(lines, words, strict=True):
        begin, end = (clock(word.get(f"{name}_seconds", 0)) for name in ("begin", "end"))
        assert line == f"[{begin} --> {end}] {one_line(word['text']).strip()}"


def test_subtitles_have_one_form(run, capsys):
    with pytest.raises(SystemExit):
        run("speech.wav", "--format", "srt", "--json")
    assert "--format and --json are both given" in capsys.readouterr().err


def test_times_are_those_of_the_whole_sound(run):
    lines = run("speech.wav", "--timestamps")[1].splitlines()
    times = [[float(time[3:]) for time in line[1:21].split(" --> ")] for line in lines]
    assert all(line.startswith("[00:") for line in lines)
    assert times == sorted(times)
    assert times[0][0] >= 0
    assert 2 * 0.64 < times[-1][1] <= SECONDS
    answer = json.loads(run("speech.wav", "--timestamps", "--json")[1])
    assert len(answer["hypotheses"][0]["segments"]) == len(lines)
    assert len(answer["sentences"]) >= 3
    assert answer["detected_language"] in ("en", "de", "ko")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "00:00.00"),
        (59.994, "00:59.99"),
        (59.998, "01:00.00"),
        (179.99, "02:59.99"),
        (6000, "100:00.00"),
    ],
)
def test_a_time_is_in_minutes_and_seconds(seconds, expected):
    """59.998 was 00:60.00."""
    assert clock(seconds) == expected


def test_several_hypotheses_are_of_a_whole_sound(run):
    code, out, [err] = run("speech.wav", "--beam-size", "2", "--num-hypotheses", "2")
    assert (code, out) == (1, "")
    assert "0.64 is the limit" in err
    flags = ("--beam-size", "2", "--num-hypotheses", "2", "--long-source", "truncate")
    assert len(run("speech.wav", *flags)[1].splitlines()) == 2


def test_samples_of_telephones_are_sent_as_a_stream(run):
    """They were bytes of a file without channels."""
    code, _, err = run("--file-type", "audio/pcmu", "-", stdin=bytes(8000))
    assert (code, err) == (0, [])
