"""Sounds are decoded while their bytes come, whatever the pieces are, and hostile ones take little."""

import struct
import threading
import time
from importlib.util import find_spec

import numpy as np
import pytest

from seq2seq_serve.bundle.audio import SAMPLE_RATE, read_sound
from seq2seq_serve.bundle.sound_files import SoundError
from seq2seq_serve.bundle.sound_streams import Encoding, open_stream
from tests.bundle.test_audio import encoded

needs_ffmpeg = pytest.mark.skipif(not find_spec("av"), reason="needs the extra speech")


def tone(seconds: float, rate: int = SAMPLE_RATE) -> np.ndarray:
    times = np.arange(int(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * 440 * times * (1 + times / 9))).astype(np.float32)


def decoded(content: bytes, sizes, encoding=Encoding.FILE, **described) -> np.ndarray:
    """The samples of a stream that comes in pieces of these sizes, in turn."""
    stream, place, pieces, number = open_stream(encoding, **described), 0, [np.zeros(0, np.float32)], 0
    try:
        while place < len(content):
            size = sizes[number % len(sizes)]
            pieces += stream.push(content[place : place + size])
            place, number = place + size, number + 1
        pieces += stream.finish()
    finally:
        stream.close()
    return np.concatenate(pieces)


@pytest.mark.parametrize("sizes", [[1], [3, 1, 1001], [10**6]])
def test_samples_without_a_header_are_the_same_in_any_pieces(sizes):
    samples = tone(0.2)
    integers = np.rint(samples * 32767).astype("<i2")
    np.testing.assert_array_equal(
        decoded(integers.tobytes(), sizes, Encoding.PCM_S16), integers.astype(np.float32) / np.float32(2**15)
    )
    np.testing.assert_array_equal(decoded(samples.astype("<f4").tobytes(), sizes, Encoding.PCM_F32), samples)


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (44_100, 2), (48_000, 1), (24_000, 3)])
def test_samples_of_any_rate_are_those_of_a_file(rate, channels):
    samples = np.stack([tone(0.5, rate) * (1 - number / 4) for number in range(channels)], axis=1)
    integers = np.rint(samples * 32767).astype("<i2")
    expected = read_sound(encoded(integers, rate, subtype="PCM_16"), 9)
    found = decoded(integers.tobytes(), [777], Encoding.PCM_S16, rate=rate, num_channels=channels)
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("encoding", "subtype"), [(Encoding.MULAW, "ULAW"), (Encoding.ALAW, "ALAW")])
def test_telephone_encodings_are_those_of_libsndfile(encoding, subtype):
    octets = bytes(range(256)) * 4
    header = struct.pack("<HHIIHH", 7 if subtype == "ULAW" else 6, 1, 16_000, 16_000, 1, 8)
    chunks = b"fmt " + struct.pack("<I", 16) + header + b"data" + struct.pack("<I", len(octets)) + octets
    content = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks
    np.testing.assert_allclose(decoded(octets, [5], encoding), read_sound(content, 9), atol=1e-7)


def test_half_a_sample_at_the_end_is_refused():
    with pytest.raises(SoundError, match="ends inside of a sample: it has 1 bytes more"):
        decoded(b"\0" * 33, [7], Encoding.PCM_S16)


def test_samples_that_are_not_numbers_are_refused():
    with pytest.raises(SoundError, match="samples that are not numbers"):
        decoded(np.array([0, np.nan, 1], "<f4").tobytes(), [100], Encoding.PCM_F32)


@pytest.mark.parametrize(("rate", "channels"), [(3_999, 1), (192_001, 1), (16_000, 0), (16_000, 9)])
def test_unusual_rates_and_channels_are_refused(rate, channels):
    with pytest.raises(SoundError, match=r"1 to 8 channels of 4000 to 192000 can be read"):
        open_stream(Encoding.PCM_S16, rate, channels)


@needs_ffmpeg
@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG"])
@pytest.mark.parametrize("sizes", [[11], [5_000, 1], [10**7]])
def test_files_are_the_same_in_any_pieces(form, sizes):
    content = encoded(tone(1.5, 22_050), 22_050, form=form)
    expected = read_sound(content, 9)
    found = decoded(content, sizes)
    assert abs(len(found) - len(expected)) <= (1_000 if form == "OGG" else 32)
    size = min(len(found), len(expected))
    if form != "OGG":  # whose decoders differ in what they leave out at the beginning
        np.testing.assert_allclose(found[:size], expected[:size], atol=2e-3)


@needs_ffmpeg
@pytest.mark.parametrize("container", ["webm", "ogg"])
def test_opus_of_a_browser_gives_its_samples_as_they_come(container):
    import av

    class Pieces(list):
        def write(self, content):
            self.append(bytes(content))
            return len(content)

    sent = Pieces()
    with av.open(
        sent, "w", format=container, options={"flush_packets": "1", "cluster_time_limit": "100"}
    ) as output:
        stream = output.add_stream("libopus", rate=48_000, layout="mono")
        samples = np.rint(tone(3, 48_000) * 32767).astype(np.int16)
        for first in range(0, len(samples), 960):
            frame = av.AudioFrame.from_ndarray(
                samples[None, first : first + 960], format="s16", layout="mono"
            )
            frame.sample_rate = 48_000
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    whole, ours, lengths = b"".join(sent), open_stream(Encoding.FILE), []
    for first in range(0, len(whole), 512):
        lengths.append(sum(map(len, ours.push(whole[first : first + 512]))))
    lengths.append(sum(map(len, ours.finish())))
    ours.close()
    assert sum(lengths) == pytest.approx(3 * SAMPLE_RATE, rel=0.02)
    assert sum(lengths[: len(lengths) // 2]) > 0.2 * sum(lengths), "half of the bytes gave next to nothing"


@needs_ffmpeg
def test_few_bytes_that_hold_hours_are_decoded_block_by_block():
    content = encoded(np.zeros(SAMPLE_RATE * 3600, np.int16), form="FLAC")
    assert len(content) < 2**20
    stream = open_stream(Encoding.FILE)
    blocks = stream.push(content)
    sizes = [len(next(blocks)) for _ in range(5)]
    assert max(sizes) <= 2**15
    stream.close()
    assert sum(map(len, blocks)) <= 2**15  # one that was decoded already
    deadline = time.monotonic() + 20
    while any(one.name == "sound-stream" for one in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_ffmpeg
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not a WAV"),
        (b"abc", "is not a WAV"),
        (b"no sound at all, only text", "is not a WAV"),
        (b"OggS" + bytes(200), "damaged"),
        (b"RIFF\x24\0\0\0WAVEfmt " + bytes(100), "damaged|no sound|codec|channels"),
    ],
)
def test_what_is_no_sound_is_refused(content, problem):
    with pytest.raises(SoundError, match=problem):
        decoded(content, [10])


@needs_ffmpeg
def test_a_sound_that_is_cut_gives_what_it_has():
    content = encoded(tone(2), form="FLAC")
    found = decoded(content[: len(content) // 2], [1000])
    assert 0.5 * SAMPLE_RATE < len(found) < 1.5 * SAMPLE_RATE
