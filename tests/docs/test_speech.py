"""The commands and the program of docs/speech.md on live speech and long sounds do what they say."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from seq2seq_serve.client.__main__ import main
from tests.server.service.harness import on_a_thread, serving_bundles

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "speech.md").read_text(encoding="utf-8")
RATE = 16_000


def blocks(heading: str) -> list[str]:
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```\w*\n(.*?)```", section, flags=re.DOTALL)


@pytest.fixture(scope="module")
def server(whisper_path):
    with on_a_thread(serving_bundles(whisper_path / "bundle")) as served:
        yield served


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).standard_normal(2 * RATE) * 0.1
    soundfile.write("meeting.wav", noise, RATE)
    soundfile.write("talk.flac", noise[:RATE], RATE)
    (tmp_path / "sound.raw").write_bytes((noise * 2**15).astype("<i2").tobytes())
    return tmp_path


def run(command: str, server) -> int:
    # The model of voice activity is an extra of the server.
    program, *arguments = shlex.split(command.rpartition("|")[2])
    assert program == "seq2seq"
    return main([*arguments, "--address", server.address, "--no-turn-detection"])


def test_the_commands_of_live_speech_have_their_flags(server, folder, capsys):
    commands, _ = blocks("Live")
    microphone, pipe, file, then = commands.splitlines()
    assert run(file, server) == 0
    assert capsys.readouterr().out.startswith("WEBVTT\n\n00:00:0")
    assert run(f"{then} talk.flac", server) == 1
    assert "no model is named 'opus-en-de'" in capsys.readouterr().err
    with (folder / "sound.raw").open("rb") as sound, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stdin", sound)
        assert run(pipe, server) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert microphone == "seq2seq transcribe --live"


def test_the_program_prints_what_is_said(server, folder):
    _, program = blocks("Live")
    program = program.replace("localhost:50051", server.address)
    off = 'encoding="pcm_s16", turn_detection=TurnDetection(off=True)'
    program = program.replace('encoding="pcm_s16"', off).replace("LiveText\n", "LiveText, TurnDetection\n", 1)
    with (folder / "sound.raw").open("rb") as sound:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdin=sound,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(r" \(\d\.\d to \d\.\d seconds\)\n", done.stdout)) >= 3


def test_the_commands_of_long_sounds_write_a_file(server, folder, capsys):
    [commands] = blocks("Sounds of any length")
    first, again = commands.splitlines()
    assert run(first, server) == 0
    assert (folder / "meeting.srt").read_text().startswith("1\n00:00:00,")
    assert run(again, server) == 0
    assert "is complete" in capsys.readouterr().err
