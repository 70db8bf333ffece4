"""Decodes sounds while they come, in pieces of any length: samples without a header, or a file or stream.

FFmpeg's libraries (PyAV, the optional extra `speech`) read files and streams, each with the one demuxer and
the few decoders that it needs, on a thread of its own, as they ask for bytes when they want them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.bundle.audio import LOUDEST, SAMPLE_RATE, Samples
from seq2seq_serve.bundle.sound_files import CODECS, MAX_CHANNELS, MAX_RATE, MIN_RATE, SoundError, demuxer_of

_BLOCK_BYTES = 2**16  # of samples that are decoded at once
_BLOCK_SAMPLES = 2**14  # of each channel that FFmpeg's thread hands over at once
_BEGINNING = 16  # bytes by which the kind of a file is found
# What FFmpeg reads before it decodes: little, because a live stream comes slowly
_PROBE_BYTES, _PROBE_MICROSECONDS = 2**14, 0
_STREAMS = {  # the demuxers of files that `sound_files` opens by other means, by their beginnings
    b"RIFF": "wav",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"ID3": "mp3",
}
_STREAM_CODECS = {
    "wav": ("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_alaw", "pcm_mulaw"),
    "flac": ("flac",),
    "ogg": ("opus", "libopus", "vorbis", "flac"),
}


class Encoding(StrEnum):
    """The form of a sound's bytes."""

    FILE = "a file"
    PCM_S16 = "pcm_s16"
    PCM_F32 = "pcm_f32"
    MULAW = "mulaw"
    ALAW = "alaw"


class SoundStream(Protocol):
    """A sound whose bytes come one after the other. Used by one thread at a time."""

    def most_samples(self, num_bytes: int) -> int:
        """Returns the most samples that a block has, before or after resampling, of a number of bytes."""

    def push(self, content: bytes) -> Iterator[Samples]:
        """Yields the samples at `SAMPLE_RATE` that are complete with these bytes, in blocks.

        Every block must be taken before the next call. Raises SoundError.
        """

    def flush(self) -> Iterator[Samples]:
        """Yields the samples of the bytes so far that wait for the next ones, of a sound without a header."""

    def finish(self) -> Iterator[Samples]:
        """Yields the rest of the samples; no bytes follow. Raises SoundError."""

    def close(self) -> None:
        """Frees what it holds; it may be called again, and from another thread."""


def open_stream(encoding: Encoding, rate: int = SAMPLE_RATE, num_channels: int = 1) -> SoundStream:
    """Returns a stream; `rate` and `num_channels` are those of samples without a header.

    Raises:
        SoundError: The rate or the number of channels cannot be read.
    """
    if encoding is Encoding.FILE:
        return _FileStream()
    if not (1 <= num_channels <= MAX_CHANNELS and MIN_RATE <= rate <= MAX_RATE):
        raise SoundError(
            f"the sound has {num_channels} channels of {rate} samples a second, and 1 to {MAX_CHANNELS} "
            f"channels of {MIN_RATE} to {MAX_RATE} can be read"
        )
    return _RawStream(_DTYPES[encoding], _VALUES.get(encoding), rate, num_channels)


class _Resampler:
    """Turns blocks `(samples, channels)` of any rate into samples of one channel at `SAMPLE_RATE`."""

    def __init__(self, rate: int) -> None:
        import soxr  # not by servers of other models

        self._stream = None
        if rate != SAMPLE_RATE:
            self._stream = soxr.ResampleStream(rate, SAMPLE_RATE, num_channels=1)

    def read(self, block: NDArray[np.float32]) -> Samples:
        if not (block.min() >= -LOUDEST and block.max() <= LOUDEST):  # NaN is not
            raise SoundError(f"the sound has samples that are not numbers from -{LOUDEST:g} to {LOUDEST:g}")
        samples = block[:, 0]
        if block.shape[1] > 1:
            samples = np.einsum("sc->s", block) / np.float32(block.shape[1])
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def finish(self) -> Samples:
        nothing: Samples = np.zeros(0, np.float32)
        if self._stream is None:
            return nothing
        rest: Samples = self._stream.resample_chunk(nothing, last=True)
        self._stream.clear()
        return rest


class _RawStream:
    """Samples without a header.

    Args:
        dtype: Of a sample.
        values: The value of each sample, of encodings with 8 bits; None if it is the sample itself.
        rate: Samples of each channel a second.
        num_channels: One sample of each follow each other.
    """

    def __init__(
        self, dtype: np.dtype[Any], values: NDArray[np.float32] | None, rate: int, num_channels: int
    ) -> None:
        self._dtype, self._values, self._num_channels = dtype, values, num_channels
        self._frame_bytes = dtype.itemsize * num_channels
        self._rate = rate
        self._rest = b""
        self._resampler = _Resampler(rate)

    def most_samples(self, num_bytes: int) -> int:
        num_frames = min(num_bytes, _BLOCK_BYTES) // self._frame_bytes
        return max(num_frames * self._num_channels, num_frames * SAMPLE_RATE // self._rate)

    def push(self, content: bytes) -> Iterator[Samples]:
        step = _BLOCK_BYTES - _BLOCK_BYTES % self._frame_bytes
        content = self._rest + content
        num_whole = len(content) - len(content) % self._frame_bytes
        self._rest = content[num_whole:]
        for first in range(0, num_whole, step):
            raw = np.frombuffer(content[first : min(first + step, num_whole)], self._dtype)
            block = raw.astype(np.float32) if self._values is None else self._values[raw]
            if self._dtype.kind == "i":
                block /= np.float32(2**15)
            yield self._resampler.read(block.reshape(-1, self._num_channels))

    def flush(self) -> Iterator[Samples]:
        yield self._resampler.finish()

    def finish(self) -> Iterator[Samples]:
        if self._rest:
            raise SoundError(
                f"the sound ends inside of a sample: it has {len(self._rest)} bytes more than whole samples"
            )
        yield self._resampler.finish()

    def close(self) -> None:
        """Nothing is held."""


class _FileStream:
    """A file or stream with a header, which a thread decodes as its bytes come.

    The thread asks for bytes, and is given all that has come, or waits; after each block of samples it waits
    until that is taken. So it never has more than one block, however much a few bytes decode to.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes = bytearray()
        self._is_hungry = self._is_complete = self._is_closed = self._has_ended = False
        self._block: Samples | None = None
        self._error: SoundError | None = None
        self._thread: threading.Thread | None = None
        self.before_hunger: Callable[[], None] = lambda: None  # the thread has decoded all that it was given

    def most_samples(self, _num_bytes: int) -> int:
        return _BLOCK_SAMPLES  # of few bytes, too, and FFmpeg's thread is waited for

    def push(self, content: bytes) -> Iterator[Samples]:
        with self._changed:
            self._bytes += content
            if self._thread is None:
                if len(self._bytes) < _BEGINNING:
                    return
                self._start()
            self._is_hungry = False
            self._changed.notify_all()
        yield from self._blocks()

    def flush(self) -> Iterator[Samples]:
        yield from ()

    def finish(self) -> Iterator[Samples]:
        with self._changed:
            self._is_complete = True
            self._is_hungry = False
            if self._thread is None:
                self._start()
            self._changed.notify_all()
        yield from self._blocks()

    def close(self) -> None:
        with self._changed:
            self._is_closed = self._is_complete = True
            self._block = None
            self._changed.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._decode, name="sound-stream", daemon=True)
        self._thread.start()

    def _blocks(self) -> Iterator[Samples]:
        """Yields blocks until the thread wants more bytes, or has ended."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._block is not None or self._is_hungry or self._has_ended or self._is_closed
                )
                block, self._block = self._block, None
                self._changed.notify_all()
                if block is None:
                    if self._error is not None and not self._is_closed:
                        raise self._error
                    return
            yield block

    def read(self, size: int) -> bytes:
        """Returns the next bytes for FFmpeg; waits for at least one, or for the end."""
        with self._changed:
            must_wait = not self._bytes and not self._is_complete
        if must_wait:
            self.before_hunger()
        with self._changed:
            if not self._bytes and not self._is_complete:
                self._is_hungry = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._bytes or self._is_complete)
            if self._is_closed:
                return b""
            taken = bytes(self._bytes[:size])
            del self._bytes[:size]
            return taken

    def _give(self, samples: Samples) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._block is None or self._is_closed)
            if self._is_closed:
                raise _ClosedError
            self._block = samples
            self._changed.notify_all()

    def _decode(self) -> None:
        try:
            _decode_file(bytes(self._bytes[:_BEGINNING]), self, self._give)
        except _ClosedError:
            pass
        except SoundError as error:
            self._error = error
        except Exception as error:  # FFmpeg's errors, of hostile files also others
            self._error = SoundError(f"the sound is damaged: {error}")
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()


class _ClosedError(Exception):
    """Nobody wants the rest of a sound."""


def _decode_file(beginning: bytes, file: _FileStream, give: Callable[[Samples], None]) -> None:
    """Decodes a file to its end, and gives its samples in blocks."""
    demuxer = next((name for start, name in _STREAMS.items() if beginning.startswith(start)), "")
    demuxer = demuxer or demuxer_of(beginning)
    if not demuxer:
        raise SoundError(
            "the sound is not a WAV, FLAC, OGG, MP3, AAC, AMR, WMA, MP4 or WebM file or stream: name the "
            "encoding of samples without a header"
        )
    try:
        import av  # optional
    except ImportError:
        raise SoundError(
            "files and streams with a header need the extra speech where the server runs: send samples "
            "without a header, and name their encoding"
        ) from None
    codecs = _STREAM_CODECS.get(demuxer) or CODECS[demuxer]
    options = {
        "codec_whitelist": ",".join(codecs),
        "probesize": str(_PROBE_BYTES),
        "analyzeduration": str(_PROBE_MICROSECONDS),
    }
    with av.open(file, "r", format=demuxer, options=options, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise SoundError("the file has no sound")
        stream = container.streams.audio[0]
        codec = stream.codec_context
        if codec.name not in codecs:
            raise SoundError(f"the codec of the sound is {codec.name}, and {', '.join(codecs)} can be read")
        rate = codec.sample_rate
        same = av.AudioResampler(format="fltp", layout=codec.layout.name, rate=rate)
        ours = _Resampler(rate)
        waiting: list[Any] = []  # (samples, channels)

        def take(frame: Any) -> None:
            try:
                waiting.extend(one.to_ndarray().T for one in same.resample(frame))
            except ValueError as error:
                raise SoundError("the sound changes its rate or its channels") from error
            if sum(map(len, waiting)) >= _BLOCK_SAMPLES:
                hand_over()

        def hand_over() -> None:
            if waiting:
                block = np.concatenate(waiting)
                waiting.clear()
                for first in range(0, len(block), _BLOCK_SAMPLES):
                    give(ours.read(block[first : first + _BLOCK_SAMPLES]))

        file.before_hunger = hand_over
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                continue  # a stream may be damaged for a while; players leave that out
            for frame in frames:
                frame.pts = None  # gaps between packets are not filled
                take(frame)
        take(None)
        hand_over()
        give(ours.finish())


def _mulaw() -> NDArray[np.float32]:
    """The value of each octet (ITU-T G.711)."""
    octets = ~np.arange(256, dtype=np.uint8)
    exponents, mantissas = (octets >> 4) & 7, (octets & 15).astype(np.int32)
    values = (((mantissas << 3) + 0x84) << exponents.astype(np.int32)) - 0x84
    return (np.where(octets & 0x80, -values, values) / 2**15).astype(np.float32)


def _alaw() -> NDArray[np.float32]:
    """The value of each octet (ITU-T G.711)."""
    octets = np.arange(256, dtype=np.uint8) ^ 0x55
    exponents, mantissas = ((octets >> 4) & 7).astype(np.int32), (octets & 15).astype(np.int32)
    values = (mantissas << 4) + 8
    values = np.where(exponents > 0, (values + 0x100) << np.maximum(exponents - 1, 0), values)
    return (np.where(octets & 0x80, values, -values) / 2**15).astype(np.float32)


_DTYPES: dict[Encoding, np.dtype[Any]] = {
    Encoding.PCM_S16: np.dtype("<i2"),
    Encoding.PCM_F32: np.dtype("<f4"),
    Encoding.MULAW: np.dtype("u1"),
    Encoding.ALAW: np.dtype("u1"),
}
_VALUES = {Encoding.MULAW: _mulaw(), Encoding.ALAW: _alaw()}
