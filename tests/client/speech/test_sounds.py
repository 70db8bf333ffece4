"""Sounds as they are sent."""

import asyncio
import io
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from seq2seq_serve.client.speech import sounds
from seq2seq_serve.client.speech.sounds import (
    SoundForm,
    file_sound,
    form_of_type,
    heard_sound,
    paced,
    played_sound,
    sound_seconds,
    streamed_sound,
    until,
)

PCM = SoundForm("pcm_s16")


class Pipe(io.BytesIO):
    """Gives a few bytes at a time."""

    def read1(self, _size: int = -1) -> bytes:
        return self.read(7)


async def all_of(chunks) -> bytes:
    return b"".join([chunk async for chunk in chunks])


@pytest.mark.parametrize(
    ("file_type", "form"),
    [
        ("", SoundForm()),
        ("audio/wav", SoundForm()),
        ("audio/pcm; rate=8000", SoundForm("pcm_s16", 8_000)),
        ('Audio/PCM;rate="8000"; channels=2', SoundForm("pcm_s16", 8_000, 2)),
        ("audio/L16; rate=8000", SoundForm("pcm_s16", 8_000, is_swapped=True)),
        ("audio/L16; rate=8000; endianness=little-endian", SoundForm("pcm_s16", 8_000)),
        ("audio/PCMU", SoundForm("mulaw", 8_000)),
        ("audio/pcma; rate=16000; channels=2", SoundForm("alaw", 16_000, 2)),
    ],
)
def test_a_media_type_is_a_form(file_type, form):
    assert form_of_type(file_type) == form


@pytest.mark.parametrize("rest", ["", "; rate=x", "; rate=8000; bits=24", "; rate=8000; endianness=middle"])
def test_a_media_type_without_its_rate_is_refused(rest):
    with pytest.raises(ValueError, match="must be audio/pcm with rate=NUMBER"):
        form_of_type(f"audio/pcm{rest}")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("a.wav", {}),
        ("a.wav", {"subtype": "FLOAT"}),
        ("a.flac", {}),
        ("a.ogg", {"subtype": "VORBIS"}),
        ("a.ogg", {"subtype": "OPUS"}),
    ],
)
def test_the_header_of_a_file_has_its_length(write, tmp_path, name, settings):
    write(name, 2.5, **settings)
    assert sound_seconds(tmp_path / name, SoundForm()) == pytest.approx(2.5, abs=0.03)  # Opus has a lead-in


def test_a_recording_to_a_pipe_has_the_length_of_its_file(write, tmp_path):
    write("a.wav", 2.0)
    path, content = tmp_path / "a.wav", bytearray((tmp_path / "a.wav").read_bytes())
    place = content.index(b"data") + 4
    for size in (bytes(4), b"\xff" * 4):
        content[place : place + 4] = size
        path.write_bytes(content)
        assert sound_seconds(path, SoundForm()) == 2.0


@pytest.mark.parametrize("beginning", [b"", b"RIFF", b"RIFF0000WAVEfmt ", b"fLaC", b"OggS", b"\x1aE\xdf\xa3"])
def test_other_files_do_not_have_a_length(tmp_path, beginning):
    (tmp_path / "a").write_bytes(beginning)
    assert sound_seconds(tmp_path / "a", SoundForm()) is None
    with pytest.raises(OSError, match="leave out --live") as caught:
        played_sound(tmp_path / "a", io.BytesIO(beginning), SoundForm())
    assert caught.value.filename == str(tmp_path / "a")


def test_samples_have_the_length_of_their_bytes(tmp_path):
    (tmp_path / "a").write_bytes(bytes(64_000))
    assert sound_seconds(tmp_path / "a", SoundForm("pcm_s16", 8_000, 2)) == 2.0


@pytest.mark.parametrize(
    ("beginning", "encoding"),
    [
        (b"RIFF", "file"),
        (b"fLaC", "file"),
        (b"OggS", "file"),
        (b"\x1aE\xdf\xa3", "file"),
        (b"\x00\x00\x00\x20ftypM4A ", "file"),
        (b"\x00\x01\x02\x03", "pcm_s16"),
        (b"\xff\xfb\x90\x00", "pcm_s16"),  # an MP3 without a tag, or samples
    ],
)
async def test_the_beginning_of_a_pipe_tells_what_it_is(beginning, encoding):
    content = beginning + bytes(100)
    sound = await streamed_sound(Pipe(content), PCM)
    assert sound.form.encoding == encoding
    assert await all_of(sound.chunks) == content


async def test_whole_samples_are_sent_in_the_order_of_the_server():
    sound = await streamed_sound(
        Pipe(b"abcdefghijklm"), SoundForm("pcm_s16", num_channels=2, is_swapped=True)
    )
    assert await all_of(sound.chunks) == b"badcfehgjilk"
    sound = await streamed_sound(Pipe(b""), PCM)
    assert await all_of(sound.chunks) == b""


async def test_a_wav_file_is_one_whatever_its_type_says(write, tmp_path):
    write("a.wav")
    path = tmp_path / "a.wav"
    with path.open("rb") as stream:
        sound = file_sound(path, stream, PCM)
        assert (sound.form, sound.seconds, sound.num_bytes) == (SoundForm(), 1.5, path.stat().st_size)
        assert await all_of(sound.chunks) == path.read_bytes()


async def test_an_error_of_reading_is_raised():
    class Broken(io.BytesIO):
        def read1(self, _size: int = -1) -> bytes:
            raise OSError("it is gone")

    with pytest.raises(OSError, match="it is gone"):
        await streamed_sound(Broken(), PCM)


async def test_what_is_read_ahead_is_bounded(tmp_path):
    num_read = itertools.count()

    class Endless(io.BytesIO):
        def read1(self, size: int = -1) -> bytes:
            next(num_read)
            return bytes(size)

    sound = file_sound(Path("-"), Endless(), PCM, b"begun!")
    for _ in range(20):
        await anext(sound.chunks)
    await sound.chunks.aclose()
    assert next(num_read) <= 20 + 2 * sounds._BLOCKS_AHEAD


async def test_a_file_comes_as_fast_as_it_is_played(monkeypatch):
    loop, now, waits = asyncio.get_running_loop(), [100.0], []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += max(seconds, 0)

    monkeypatch.setattr(sounds.asyncio, "sleep", sleep)
    monkeypatch.setattr(loop, "time", lambda: now[0])

    async def chunks():
        yield bytes(32_000)
        now[0] += 0.5  # the disk is slow
        yield bytes(32_000)

    parts = [part async for part in paced(chunks(), 32_000)]
    assert sum(map(len, parts)) == 64_000
    assert {len(part) for part in parts} == {3_200}
    assert now[0] == pytest.approx(102.0)
    assert max(waits) == pytest.approx(0.1)


async def test_a_stream_ends_when_it_is_stopped():
    stopping, has_ended = asyncio.Event(), []

    async def chunks():
        try:
            yield b"a"
            stopping.set()
            await asyncio.Event().wait()
        finally:
            has_ended.append(True)

    assert [chunk async for chunk in until(stopping, chunks())] == [b"a"]
    assert has_ended == [True]

    async def two():
        yield b"a"
        yield b"b"

    assert [chunk async for chunk in until(asyncio.Event(), two())] == [b"a", b"b"]


class FakeSoundDevice(ModuleType):
    """The parts of `sounddevice` that are used, with a device that has the rates `rates`."""

    class PortAudioError(Exception):
        pass

    def __init__(self, *rates: int, num_blocks: int = 3) -> None:
        super().__init__("sounddevice")
        self._rates, self._num_blocks = rates, num_blocks
        self.opened = None

    def check_input_settings(self, samplerate: int, **_) -> None:
        if not self._rates:
            raise self.PortAudioError("no device")
        if samplerate not in self._rates:
            raise self.PortAudioError("wrong rate")

    def query_devices(self, kind: str) -> dict:
        if not self._rates:
            raise self.PortAudioError("no device")
        return {"default_samplerate": float(self._rates[0])}

    def RawInputStream(self, **settings):  # noqa: N802
        self.opened = settings
        return self

    def __enter__(self):
        for number in range(self._num_blocks):
            self.opened["callback"](memoryview(bytes([number] * 4)), 2, None, None)
        return self

    def __exit__(self, *_) -> None:
        self.opened = None


@pytest.mark.parametrize(("rates", "rate"), [((48_000, 16_000), 16_000), ((44_100,), 44_100)])
async def test_a_microphone_has_the_rate_of_the_model_or_its_own(monkeypatch, rates, rate):
    device = FakeSoundDevice(*rates)
    monkeypatch.setitem(sys.modules, "sounddevice", device)
    sound = heard_sound()
    assert sound.form == SoundForm("pcm_s16", rate)
    assert [await anext(sound.chunks) for _ in range(3)] == [bytes([number] * 4) for number in range(3)]
    assert (device.opened["samplerate"], device.opened["channels"]) == (rate, 1)
    await sound.chunks.aclose()
    assert device.opened is None


async def test_a_server_that_is_too_slow_for_a_microphone_ends_it(monkeypatch):
    """While the client waited for the server, what the microphone heard was kept without a bound."""
    lengths = []

    class Watched(asyncio.Queue):
        def _put(self, item):
            super()._put(item)
            lengths.append(self.qsize())

    monkeypatch.setattr(asyncio, "Queue", Watched)
    monkeypatch.setitem(sys.modules, "sounddevice", FakeSoundDevice(16_000, num_blocks=9))
    monkeypatch.setattr(sounds, "_MOST_WAITING", 2)
    sound = heard_sound()
    await anext(sound.chunks)
    with pytest.raises(OSError, match="too slow"):
        await all_of(sound.chunks)
    assert max(lengths) == 2


def test_without_a_microphone_or_its_library_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", FakeSoundDevice())
    with pytest.raises(OSError, match="cannot be opened") as caught:
        heard_sound()
    assert caught.value.filename == "microphone"
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    monkeypatch.setattr(sys, "argv", ["seq2seq"])
    with pytest.raises(SystemExit, match=r"sounddevice is missing: pip install .*microphone"):
        heard_sound()
