"""`transcribe --live`."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seq2seq_serve.client import (
    Client,
    ClientError,
    LiveResult,
    LiveSegment,
    LiveText,
    SpeechBegan,
    SpeechEnded,
)
from seq2seq_serve.client.output import event_dict
from seq2seq_serve.client.speech import listen
from seq2seq_serve.client.speech.listen import Output
from seq2seq_serve.client.speech.transcript import Transcript
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateOptions, GenerateResponse, Segment, Word

ROOT = Path(__file__).parents[3]


@pytest.fixture
def lines(run, samples) -> list[str]:
    """The text that the model hears in the noise."""
    code, out, _ = run("--live", "-", stdin=samples)
    assert code == 0
    assert len(out.splitlines()) >= 2
    return out.splitlines()


def test_samples_of_a_pipe_are_a_line_for_each_segment(run, lines, samples):
    code, out, err = run("--live", "-", "--timestamps", stdin=samples)
    assert (code, err) == (0, [])
    assert [re.sub(r"^\[[\d:.]+ --> [\d:.]+\] ", "", line) for line in out.splitlines()] == lines


def test_a_stream_with_a_header_is_told_by_its_beginning(run, lines, write, tmp_path):
    write("speech.flac")
    assert run("--live", "-", stdin=(tmp_path / "speech.flac").read_bytes())[:2] == (
        0,
        "\n".join([*lines, ""]),
    )


def test_samples_may_have_another_rate_and_several_channels(run, lines, samples):
    twice = b"".join(samples[place : place + 2] * 2 for place in range(0, len(samples), 2))
    assert run("--live", "-", "--channels", "2", stdin=twice)[1].splitlines() == lines
    faster = run("--live", "-", "--rate", "32000", "--timestamps", stdin=samples)[1]
    assert 0.5 < float(re.findall(r"--> 00:([\d.]+)", faster)[-1]) <= 0.75


def test_a_sound_without_text_is_a_warning(run):
    """A wrong --rate, and silence, were an empty output without a word."""
    assert run("--live", "-", stdin=b"") == (0, "", ["warning: nobody speaks in 0.0 seconds of sound"])


def test_a_file_is_played(run, lines, write):
    write("speech.wav")
    assert run("--live", "speech.wav")[1].splitlines() == lines


def test_subtitles_are_written_cue_by_cue(run, lines, samples):
    out = run("--live", "-", "--format", "srt", stdin=samples)[1]
    cues = [cue.splitlines() for cue in out.strip().split("\n\n")]
    assert [cue[0] for cue in cues] == [str(number) for number in range(1, len(cues) + 1)]
    assert [cue[2] for cue in cues] == [" ".join(line.split()) for line in lines]


def test_events_are_lines_of_json(run, lines, samples):
    events = [json.loads(line) for line in run("--live", "-", "--json", stdin=samples)[1].splitlines()]
    assert [event["segment"]["text"].strip() for event in events if "segment" in event] == lines
    assert events[-1]["result"]["usage"]["source_seconds"] == events[-1]["received_seconds"] == 1.5


def test_a_second_model_translates_each_segment(run, lines, server, samples):
    """A segment that is too long for it stays as it is."""
    expected, options = [], {"long_source": "split"}
    with Client(server.address) as client:
        model = next(one.name for one in client.models() if "text" in one.sources.values())
        for result in client.translate_many(lines, model=model, options=options):
            expected.append(None if result.error else result.text)
    assert {text is None for text in expected} == {True, False}
    shown = [line if text is None else text.strip() for line, text in zip(lines, expected, strict=True)]
    code, out, err = run("--live", "-", "--then", model, stdin=samples)
    assert (code, out.splitlines()) == (0, list(filter(None, shown)))
    assert len(err) == expected.count(None)
    assert all(line.startswith("warning: not translated: INVALID_ARGUMENT: ") for line in err)
    events = map(json.loads, run("--live", "-", "--then", model, "--json", stdin=samples)[1].splitlines())
    translations = [event["translation"]["text"] for event in events if "translation" in event]
    assert translations == [text for text in expected if text is not None]


def test_a_translation_that_takes_too_long_names_its_time_and_no_flag(
    run, lines, server, samples, monkeypatch
):
    """It named --timeout-seconds, which does not change the time of a translation."""
    with Client(server.address) as client:
        model = next(one.name for one in client.models() if "text" in one.sources.values())

    async def time_out(*_arguments, **_options):
        raise ClientError("DEADLINE_EXCEEDED", "no answer came within timeout_seconds")

    monkeypatch.setattr(listen.AsyncClient, "translate", time_out)
    code, out, err = run("--live", "-", "--then", model, stdin=samples)
    assert (code, out.splitlines()) == (0, lines)
    assert err == ["warning: not translated: no translation came within 10 seconds"] * len(lines)


def test_an_unknown_second_model_is_found_before_anything_is_said(run, samples):
    code, out, [err] = run("--live", "-", "--then", "nobody", stdin=samples)
    assert (code, out) == (1, "")
    assert "no model is named 'nobody'" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "there is no FILE"),
        (["--live", "--output", "x"], "--live writes to standard output"),
        (["x.wav", "--then", "demo"], "--then MODEL needs --live"),
        (["--live", "--then-source-language", "ko"], "--then-source-language needs --then"),
        (["--live", "--format", "srt", "--json"], "--format and --json are both given"),
        (["x", "--rate", "8000", "--file-type", "audio/pcm; rate=8000"], "leave out --rate"),
        (["x", "--file-type", "audio/pcm; rate=fast"], "rate=NUMBER"),
        (["x", "--resume"], "need --output"),
        (["-", "--output", "y", "--resume"], "cannot be read again"),
    ],
)
def test_wrong_usage_is_one_line(run, capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_the_sound_and_what_was_said_is_written(server, lines, samples):
    command = [sys.executable, "-m", "client", "transcribe", "--address", server.address]
    with subprocess.Popen(
        [*command, "--no-turn-detection", "--live", "-"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=False,
    ) as process:
        process.stdin.write(samples)
        process.stdin.flush()  # and stays open
        first = process.stdout.readline().decode()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert first.strip() == lines[0]
    assert rest.decode().splitlines() == lines[1 : 1 + rest.decode().count("\n")]


async def test_the_second_ctrl_c_ends_the_command():
    stopping, handlers = asyncio.Event(), signal.getsignal(signal.SIGINT)
    with listen._interrupting(stopping):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stopping.wait(), 20)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, handlers)


def word(text: str) -> Word:
    return Word(begin_seconds=0.5, end_seconds=1.0, text=text)


def live(stable: str, unstable: str) -> LiveText:
    return LiveText(tuple(map(word, re.findall(r" \S+", stable))), unstable, 1.0, 2.0)


def segment(text: str) -> LiveSegment:
    words = map(word, re.findall(r" \S+", text))
    return LiveSegment(Segment(begin_seconds=0.5, end_seconds=1.0, text=text, words=words), 2.0)


class Drawn:
    """Records what a screen would show: lines that stay, and the present text."""

    def __init__(self, _stream) -> None:
        self.written: list[str] = []
        self.drawn = ([], "", "")

    def write(self, text: str) -> None:
        self.written += text.splitlines()

    def draw(self, *drawn) -> None:
        self.drawn = drawn


@pytest.fixture
def output(monkeypatch):
    """An output on a terminal, whose translations end when they are told to."""
    monkeypatch.setattr(listen, "Screen", Drawn)
    translations: dict[str, asyncio.Future] = {}

    def make(*, translates: bool = False, options=None, form=None) -> tuple[Output, Drawn, dict]:
        async def translate(text: str):
            return await translations.setdefault(text, asyncio.get_running_loop().create_future())

        made = Output(
            Transcript(form, options or GenerateOptions()),
            translate if translates else None,
            as_json=False,
            is_drawn=True,
        )
        return made, made._screen, translations

    return make


async def test_text_grows_until_its_segment_is_complete(output):
    made, screen, _ = output()
    made.take(SpeechBegan(0.1, 0.2))
    made.take(live("", " And so"))
    assert screen.drawn == ([], "", " And so")
    made.take(live(" And so", " my"))
    made.take(live(" my fellow.", " Ask not"))
    assert screen.drawn == ([], " And so my fellow.", " Ask not")
    assert screen.written == []
    made.take(segment(" And so my"))  # it was cut, and its last word belongs to the next one
    assert screen.written == ["And so my"]
    assert screen.drawn == ([], " fellow.", " Ask not")
    made.take(SpeechEnded(2.0, 3.0))
    await made.finish()
    assert screen.drawn == ([], "", "")


async def test_translations_are_in_order_and_nothing_waits_for_them(output):
    made, screen, translations = output(translates=True)
    for text in (" One.", " Two.", " ", " Three."):
        made.take(segment(text))
    made.take(live("", " Four"))
    assert screen.written == []
    assert screen.drawn == (["One.", "Two.", "Three."], "", " Four")
    await asyncio.sleep(0)
    assert translations.keys() == {"One.", "Two.", "Three."}
    translations["Two."].set_result("Zwei.")
    translations["Three."].set_result(None)  # it failed
    await asyncio.sleep(0)
    assert screen.written == []
    translations["One."].set_result("Eins.")
    await made.finish()
    assert screen.written == ["One.", "  Eins.", "Two.", "  Zwei.", "Three."]
    made.take(segment("Five."))
    await asyncio.sleep(0)
    translations["Five."].set_result("Fünf.")
    await made.finish()
    assert screen.written[-2:] == ["Five.", "  Fünf."]


async def test_subtitles_have_the_translation_in_place_of_the_segment(output):
    made, screen, translations = output(translates=True, form="srt")
    made.take(segment(" One."))
    made.take(segment(" Two."))
    await asyncio.sleep(0)
    translations["One."].set_result("Eins.")
    translations["Two."].set_result(None)
    await made.finish()
    times = "00:00:00,500 --> 00:00:01,000"
    assert screen.written == ["1", times, "Eins.", "", "2", times, "Two.", ""]


def test_an_event_is_the_message_of_the_wire():
    assert event_dict(SpeechBegan(1.0, 2.0)) == {
        "speech_began": {"begin_seconds": 1.0},
        "received_seconds": 2.0,
    }
    assert event_dict(SpeechEnded(1.0, 2.0))["speech_ended"] == {"end_seconds": 1.0}
    assert event_dict(live(" a b", " c"))["text"]["stable"][1]["text"] == " b"
    assert event_dict(LiveResult(GenerateResponse(model="m"), 2.0))["result"]["model"] == "m"
