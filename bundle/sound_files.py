"""Opens files of sounds, which may be hostile, and reads them in blocks after their headers fit the limits.

libsndfile reads WAV, AIFF, FLAC and OGG. FFmpeg's libraries (PyAV, the optional extra `speech`) read MP3,
AAC, AMR, WMA, and the sound of MP4 and WebM, each with the one demuxer and the few decoders that it needs.
Without them libsndfile reads MP3, too, and its decoder writes lines about frames to the standard error.
Samples without a header need a media type that describes them.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_CHANNELS = 8
MIN_RATE, MAX_RATE = 4_000, 192_000
# Sizes in the header of a WAV file that was written before its size was known: GStreamer's 0, SoX's 7ffff000
# and more, ALSA's 7fffffff and less, ffmpeg's ffffffff
_LEAST_UNKNOWN_SIZE = 0x7FFF_F000
_UNKNOWN = 2**63 - 1  # frames of a file whose header does not have their number
_CUT = "the sound ends before its header says: the file is damaged"
_FORMS = "WAV, AIFF, FLAC, OGG, MP3, AAC, AMR, WMA, MP4 (M4A) or WebM"
# The header of an MP3 file counts samples that encoders add and players drop; this share must come.
_LEAST_SHARE = 0.95
# How many times its size an MP3 file without a length claims to have, as libsndfile guesses the
# length by the bit rate of the first frame, and ends there: the largest rate is 40 times the smallest
_TIMES_AS_LONG = 64
_LEAST_MP3_RATE = 1_000  # bytes a second of 8 kbit/s
_LEAST_RATE = 50  # bytes a second of other formats: a packet of Opus has at most 120 ms
_MAX_PACKETS = 2**20  # of an MP4 file, whose header can claim any number of them and takes memory for each
# Where the header of an MP4 file has numbers of packets: after the name of a box
_PACKET_COUNTS = {b"stsz": 12, b"stz2": 12, b"trun": 8}
_PACKET_BOX = re.compile(b"|".join(_PACKET_COUNTS))
_DATA_BOX = b"mdat"  # the one whose content is never read as boxes: FFmpeg reads "free" as "moov" at need
_OF_CONTAINERS = ("aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis")
CODECS = {  # by FFmpeg's names of demuxers
    "mov": _OF_CONTAINERS,
    "matroska": _OF_CONTAINERS,
    "asf": ("wmav1", "wmav2", "wmapro", "wmalossless", "wmavoice"),
    "amr": ("amrnb", "amrwb", "libopencore_amrnb", "libopencore_amrwb"),
    "aac": ("aac",),
    "mp3": ("mp3", "mp3float", "mp2", "mp2float", "mp1", "mp1float"),
}
_OF_FRAMES = ("amr", "aac", "mp3")  # one frame after the other, of which players leave out damaged ones
_PROBE_BYTES = 2**17  # in which a good frame comes; FFmpeg takes a second for a MiB of others
_MOST_LEFT_OUT = 1_000  # damaged frames beyond the number of others; each takes as long as a good one
_BEGINNINGS = {b"\x1a\x45\xdf\xa3": "matroska", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11": "asf", b"#!AMR": "amr"}
_MP3_FLAGS = re.compile(rb"(?:Xing|Info).{3}(.)", re.DOTALL)  # the lowest bit: the number of frames follows
_AIFF = re.compile(rb"FORM.{4}AIF[FC]", re.DOTALL)  # libsndfile reads other files of IFF, too
_RAW_TYPES = {"audio/pcm": "<i2", "audio/l16": ">i2"}  # by RFC 2586, the first byte of L16 is the high one
_WAV = re.compile(rb"R(?:IFF|F64).{4}WAVE", re.DOTALL)
_ENDS = {"little-endian": "<i2", "big-endian": ">i2"}
_LOUDEST_RAW = 2**15
_NUMBER = re.compile(r"[0-9]{1,6}")


class SoundError(ValueError):
    """A file is not a sound that can be read."""


class SoundTooLongError(SoundError):
    """A sound is longer than the limit."""


class SoundFile(NamedTuple):
    """An open file.

    Attributes:
        rate: Samples of each channel a second.
        num_channels: At most 8.
        num_samples: Of each channel, by the header.
        max_samples: The most that are read, if the header does not have their exact number.
        is_exact: Whether it has exactly `num_samples`; otherwise they are an estimate.
        is_guessed: Whether no header has their number: they may be many times as many, or as few.
        blocks: Blocks `(samples, channels)` of at most about the size that was asked for.
    """

    rate: int
    num_channels: int
    num_samples: int
    max_samples: int
    is_exact: bool
    blocks: Iterator[NDArray[np.float32]]
    is_guessed: bool = False


@contextmanager
def opened(content: bytes, max_seconds: float, block_size: int, file_type: str = "") -> Iterator[SoundFile]:
    """Opens a file whose header fits.

    Args:
        content: The file.
        max_seconds: The limit.
        block_size: Samples of each channel that are decoded at once.
        file_type: The media type of samples without a header, such as "audio/pcm; rate=16000; channels=2"; of
            16 bits, little-endian, or big-endian for audio/L16. Other types, and that of a WAV file, change
            nothing.

    Raises:
        SoundError: The bytes are not a whole sound, also in the block that reads it.
        SoundTooLongError: The sound is longer than `max_seconds`.
    """
    demuxer, is_aiff = demuxer_of(content), _AIFF.match(content)
    kind = "" if _WAV.match(content) else _raw_kind(file_type)
    if kind:
        opening = _opened_raw(content, block_size, kind, file_type)
    elif demuxer and (demuxer != "mp3" or find_spec("av")):
        opening = _opened_by_ffmpeg(content, block_size, demuxer)
    elif content.startswith((b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")) or is_aiff or demuxer == "mp3":
        opening = _opened_by_sndfile(content, block_size)
    else:
        raise SoundError(
            f"the file is not a {_FORMS} file; samples without a header need a file_type such as "
            "'audio/pcm; rate=16000'"
        )
    with opening as file:
        if not (1 <= file.num_channels <= MAX_CHANNELS and MIN_RATE <= file.rate <= MAX_RATE):
            raise SoundError(
                f"the sound has {file.num_channels} channels of {file.rate} samples a second, and 1 to "
                f"{MAX_CHANNELS} channels of {MIN_RATE} to {MAX_RATE} can be read"
            )
        if file.num_samples == _UNKNOWN:
            raise SoundError(
                "the header does not have the sound's length: save it as a file, not as a stream"
            )
        if not file.is_guessed:
            _check_length(file.num_samples, file.rate, max_seconds)
        most = min(file.max_samples, math.ceil(max_seconds * file.rate))
        yield file._replace(max_samples=most, blocks=_counted(file, max_seconds))


def demuxer_of(content: bytes) -> str:
    """Returns FFmpeg's name of the demuxer that a file needs; empty if it needs none or is no sound."""
    if content[4:8] == b"ftyp":
        return "mov"
    for beginning, demuxer in _BEGINNINGS.items():
        if content.startswith(beginning):
            return demuxer
    place = _first_frame(content)
    if content[place : place + 1] != b"\xff" or len(content) < place + 2:
        return ""
    if content[place + 1] & 0xF6 == 0xF0:
        return "aac"
    return "mp3" if content[place + 1] & 0xE0 == 0xE0 and content[place + 1] & 0x06 else ""


def _first_frame(content: bytes) -> int:
    """Returns the place of the first frame of MPEG audio: after the tag, whose size has 7 bits a byte."""
    if not content.startswith(b"ID3"):
        return 0
    return 10 + sum(octet << shift for octet, shift in zip(content[6:10], (21, 14, 7, 0), strict=False))


def _has_mp3_length(content: bytes) -> bool:
    """Returns whether an MP3 file's first frame has the number of its frames (the header of Xing)."""
    place = _first_frame(content)
    found = _MP3_FLAGS.search(content, place, place + 48)
    return found is not None and bool(found[1][0] & 1)


def _counted(file: SoundFile, max_seconds: float) -> Iterator[NDArray[np.float32]]:
    """Yields the blocks, at most the samples that the header or the limit allows."""
    num_read = 0
    for block in file.blocks:
        kept = block[: file.num_samples - num_read] if file.is_exact else block
        num_read += len(kept)
        _check_length(num_read, file.rate, max_seconds)
        if num_read > file.max_samples:
            raise SoundError("the sound is far longer than its header says: the file is damaged")
        if len(kept):
            yield kept
        if file.is_exact and num_read == file.num_samples:
            return
    if file.is_exact and num_read < file.num_samples:
        raise SoundError(_CUT)


def _check_length(num_samples: int, rate: int, max_seconds: float) -> None:
    if num_samples > max_seconds * rate:
        raise SoundTooLongError(
            f"the sound has {num_samples / rate:.2f} seconds, and {max_seconds:g} is the limit"
        )


@contextmanager
def _opened_by_sndfile(content: bytes, block_size: int) -> Iterator[SoundFile]:
    import soundfile  # not by servers of other models

    is_riff = content.startswith(b"RIFF")
    num_bytes = int.from_bytes(content[4:8], "little" if is_riff else "big")
    is_streamed = is_riff and (num_bytes == 0 or num_bytes >= _LEAST_UNKNOWN_SIZE)
    if content.startswith((b"RIFF", b"FORM")) and not is_streamed and num_bytes > len(content) - 8:
        raise SoundError(_CUT)

    is_exact = content.startswith((b"RIFF", b"RF64", b"fLaC", b"FORM"))
    is_mp3 = content.startswith(b"ID3") or demuxer_of(content) == "mp3"
    has_length = not is_mp3 or _has_mp3_length(content)

    def blocks(file: Any) -> Iterator[NDArray[np.float32]]:
        num_read = 0
        while len(block := file.read(block_size, dtype="float32", always_2d=True)):
            num_read += len(block)
            yield block
        if is_mp3 and has_length and num_read < _LEAST_SHARE * file.frames:
            raise SoundError(_CUT)

    try:
        stream = _WavStream(content) if is_streamed else io.BytesIO(content)
        if not has_length:
            stream = _EndlessStream(content)
        with soundfile.SoundFile(stream) as file:
            num_samples = file.frames if has_length else file.frames // _TIMES_AS_LONG
            if is_exact:
                max_samples = num_samples
            elif has_length:
                max_samples = _most_samples(num_samples, file.samplerate)
            else:
                max_samples = len(content) * file.samplerate // _LEAST_MP3_RATE
            yield SoundFile(
                file.samplerate,
                file.channels,
                num_samples,
                max_samples,
                is_exact,
                blocks(file),
                is_guessed=not has_length,
            )
    except soundfile.LibsndfileError as error:
        raise SoundError(f"the file is damaged: {error.error_string}") from error


@contextmanager
def _opened_by_ffmpeg(content: bytes, block_size: int, demuxer: str) -> Iterator[SoundFile]:
    try:
        import av  # optional
    except ImportError:
        raise SoundError(
            "MP4, WebM, AAC, AMR and WMA files need the extra speech where the server runs: send WAV, AIFF, "
            "FLAC, OGG or MP3"
        ) from None
    if demuxer == "mov":
        _check_packets(content)
    has_length = demuxer == "mp3" and _has_mp3_length(content)

    def frames(packet: Any) -> list[Any]:
        try:
            return list(packet.decode())
        except av.error.InvalidDataError:
            if demuxer not in _OF_FRAMES:
                raise
            return []

    def blocks(container: Any, rate: int, layout: str, least: float) -> Iterator[NDArray[np.float32]]:
        resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate, frame_size=block_size)
        num_read = num_left_out = 0
        for packet in container.demux(audio=0):
            found = frames(packet)
            num_left_out += 1 if not found else -1
            if num_left_out > _MOST_LEFT_OUT:
                raise SoundError("most frames of the sound cannot be read: the file is damaged")
            for frame in found:
                num_read += frame.samples
                frame.pts = None  # gaps between packets are not filled
                try:
                    resampled = resampler.resample(frame)
                except ValueError as error:
                    raise SoundError("the sound changes its rate or its channels") from error
                yield from map(_samples_of, resampled)
        yield from map(_samples_of, resampler.resample(None))
        if num_read < least:
            raise SoundError(_CUT)

    codecs = CODECS[demuxer]
    options = {"codec_whitelist": ",".join(codecs)}
    if demuxer in _OF_FRAMES:
        options["probesize"] = str(_PROBE_BYTES)
    try:
        with av.open(
            io.BytesIO(content),
            "r",
            format=demuxer,
            options=options,
            metadata_errors="ignore",
        ) as file:
            if not file.streams.audio:
                raise SoundError("the file has no sound")
            stream = file.streams.audio[0]
            codec = stream.codec_context
            if codec is None or codec.name not in codecs:
                name = "unknown" if codec is None else codec.name
                raise SoundError(f"the codec of the sound is {name}, and {', '.join(codecs)} can be read")
            num_samples = int((file.duration or 0) * codec.sample_rate / av.time_base)
            is_guessed = demuxer in _OF_FRAMES and not has_length
            if num_samples and not is_guessed:
                max_samples = _most_samples(num_samples, codec.sample_rate)
            else:  # WebM that a browser recorded has no length
                least_rate = _LEAST_MP3_RATE if demuxer == "mp3" else _LEAST_RATE
                max_samples = len(content) * codec.sample_rate // least_rate
            yield SoundFile(
                codec.sample_rate,
                codec.layout.nb_channels,
                num_samples,
                max_samples,
                False,
                blocks(file, codec.sample_rate, codec.layout.name, has_length * _LEAST_SHARE * num_samples),
                is_guessed,
            )
    except av.FFmpegError as error:
        raise SoundError(f"the file is damaged: {error.strerror}") from error


def _raw_kind(file_type: str) -> str:
    """Returns the type of samples without a header; empty for any other media type."""
    kind = file_type.partition(";")[0].strip().casefold()
    return kind if kind in _RAW_TYPES else ""


@contextmanager
def _opened_raw(content: bytes, block_size: int, kind: str, file_type: str) -> Iterator[SoundFile]:
    given = {"channels": "1"}
    for parameter in file_type.casefold().split(";")[1:]:
        name, _, value = parameter.partition("=")
        given[name.strip()] = value.strip(' "')
    order = given.pop("endianness", "")
    dtype, numbers = _ENDS.get(order, "") if order else _RAW_TYPES[kind], [*given.values()]
    if given.keys() != {"rate", "channels"} or not dtype or not all(map(_NUMBER.fullmatch, numbers)):
        raise SoundError(
            f"the file_type is {file_type[:100]!r}, and must be {kind} with rate=NUMBER and, if you like, "
            "channels=NUMBER and endianness=little-endian or big-endian"
        )
    rate, num_channels = int(given["rate"]), int(given["channels"])
    if not num_channels or len(content) % (2 * num_channels):
        raise SoundError(
            f"the sound has {num_channels} channels and {len(content)} bytes, which are not whole samples"
        )
    samples = np.frombuffer(content, dtype).reshape(-1, num_channels)

    def blocks() -> Iterator[NDArray[np.float32]]:
        for first in range(0, len(samples), block_size):
            yield samples[first : first + block_size].astype(np.float32) / np.float32(_LOUDEST_RAW)

    yield SoundFile(rate, num_channels, len(samples), len(samples), True, blocks())


def _most_samples(num_samples: int, rate: int) -> int:
    """Returns the most samples that are read where the header has an estimate: some headers are wrong."""
    return 2 * num_samples + 60 * rate


def _samples_of(frame: Any) -> NDArray[np.float32]:
    """The samples (N, channels) of a frame of planes."""
    samples: NDArray[np.float32] = frame.to_ndarray().T
    return samples


def _check_packets(content: bytes) -> None:
    """Refuses an MP4 file whose header claims more packets than a sound within the limits has."""
    place, num_packets = 0, 0
    while place + 8 <= len(content):
        size, name = int.from_bytes(content[place : place + 4], "big"), content[place + 4 : place + 8]
        if size == 1:
            size = int.from_bytes(content[place + 8 : place + 16], "big")
        end = min(place + size, len(content)) if size >= 8 else len(content)
        if name != _DATA_BOX:
            if content.find(b"cmov", place, end) >= 0:
                raise SoundError("the header of the MP4 file is compressed: save it without that")
            for box in _PACKET_BOX.finditer(content, place, end):
                first = box.start() + _PACKET_COUNTS[box[0]]
                num_packets += int.from_bytes(content[first : first + 4], "big")
        place = end
    if num_packets > _MAX_PACKETS:
        raise SoundError(f"the header of the MP4 file claims {num_packets} packets: the file is damaged")


class _WavStream(io.BytesIO):
    """A WAV file, without a copy, that says it has 8 bytes: libsndfile then reads no samples as all."""

    def readinto(self, buffer: Any, /) -> int:
        start, num_bytes = self.tell(), super().readinto(buffer)
        for place in range(max(start, 4), min(start + num_bytes, 8)):
            memoryview(buffer)[place - start] = 8 if place == 4 else 0
        return num_bytes


class _EndlessStream(io.BytesIO):
    """An MP3 file that claims to be longer than it is, so that it is read to its end."""

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_END and offset == 0:  # asks for the size; a tag is sought before the end
            return super().seek(_TIMES_AS_LONG * len(self.getbuffer()))
        return super().seek(offset, whence)
