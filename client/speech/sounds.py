"""Sounds for a stream: a microphone, standard input, or a file; how long they are, and their pace.

Knows the beginnings of files, and decodes none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from seq2seq_serve.client.files.lines import is_compressed, open_binary
from seq2seq_serve.client.live import Encoding
from seq2seq_serve.commands import needs_extra
from seq2seq_serve.documents.segments import wrong_file

DEFAULT_RATE = 16_000
_BEGINNING_BYTES = 2**16  # which have the header of a file
_END_BYTES = 2**16  # which have the last page of an OGG file
_BLOCK_BYTES = 2**16
_BLOCKS_AHEAD = 4
_PACE_SECONDS = 0.1  # of sound in a chunk of a file that is sent at real time, or of a microphone
_MOST_WAITING = 600  # such chunks of a microphone
_SAMPLE_BYTES = 2
_WAV, _WAV_BYTES = (b"RIFF", b"RF64"), 4
_OPUS_RATE = 48_000
# What a stream with a header begins with, but for MPEG and ADTS, which samples may also begin with
_HEADERS = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3", b"\x1aE\xdf\xa3", b"#!AMR", b"FORM")
_KIND_BYTES = 8  # that show whether a stream has a header
_RAW_TYPES = {"audio/pcm": "little-endian", "audio/l16": "big-endian"}
_TELEPHONE_TYPES: dict[str, Encoding] = {"audio/pcmu": "mulaw", "audio/pcma": "alaw"}  # RFC 3551
_TELEPHONE_RATE = 8_000


@dataclass(frozen=True)
class SoundForm:
    """The form of a sound's bytes.

    Attributes:
        sample_rate: Of samples without a header.
        num_channels: Of samples without a header.
        is_swapped: Whether samples are big-endian, and must be turned before they are sent.
    """

    encoding: Encoding = "file"
    sample_rate: int = DEFAULT_RATE
    num_channels: int = 1
    is_swapped: bool = False

    @property
    def frame_bytes(self) -> int:
        """The bytes of a sample of all channels; 1 for a sound with a header."""
        if self.encoding == "file":
            return 1
        return (_SAMPLE_BYTES if self.encoding == "pcm_s16" else 1) * self.num_channels


@dataclass(frozen=True)
class Sound:
    """A sound that can be sent once.

    Attributes:
        chunks: Its bytes.
        seconds: Its length; None if only its end shows it.
        num_bytes: Of the file; None of a stream.
    """

    form: SoundForm
    chunks: AsyncIterable[bytes]
    seconds: float | None = None
    num_bytes: int | None = None


def form_of_type(file_type: str) -> SoundForm:
    """Returns the form of samples without a header from their media type; that of a file for other types.

    Raises:
        ValueError: The type does not describe the samples.
    """
    kind, *parameters = (part.strip() for part in file_type.lower().split(";"))
    if kind not in _RAW_TYPES and kind not in _TELEPHONE_TYPES:
        return SoundForm()
    given = {"channels": "1", "endianness": _RAW_TYPES.get(kind, "")}
    if kind in _TELEPHONE_TYPES:
        given["rate"] = str(_TELEPHONE_RATE)
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        given[name.strip()] = value.strip(' "')
    rate, channels = given.pop("rate", ""), given.pop("channels")
    order = given.pop("endianness")
    orders = _RAW_TYPES.values() if kind in _RAW_TYPES else ("",)
    if given or order not in orders or not (rate.isdecimal() and channels.isdecimal()):
        raise ValueError(
            f"the file type is {file_type!r}, and must be {kind} with rate=NUMBER and, if you like, "
            "channels=NUMBER and endianness=little-endian or big-endian"
        )
    if kind in _TELEPHONE_TYPES:
        return SoundForm(_TELEPHONE_TYPES[kind], int(rate), int(channels))
    return SoundForm("pcm_s16", int(rate), int(channels), order == "big-endian")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file, or standard input.

    Raises:
        OSError: The file cannot be read.
    """
    stream = open_binary(path)
    try:
        yield stream
    finally:
        if path.is_file():  # closing a pipe would wait for the thread that reads from it
            stream.close()


def file_sound(path: Path, stream: BinaryIO, form: SoundForm, begun: bytes = b"") -> Sound:
    """Returns the sound of a file, or of standard input. A WAV file is one, whatever its type says.

    Args:
        path: The file.
        stream: Of `opened`; the file itself, so that the whole sound comes.
        form: Of its bytes.
        begun: What was read of the stream.

    Raises:
        OSError: The file cannot be read.
    """
    begun = begun or stream.read(_WAV_BYTES)
    if begun.startswith(_WAV):
        form = SoundForm()
    chunks = _in_order(_read_ahead(stream, begun), form)
    if not path.is_file() or is_compressed(path):
        return Sound(form, chunks)
    return Sound(form, chunks, sound_seconds(path, form), path.stat().st_size)


def played_sound(path: Path, stream: BinaryIO, form: SoundForm) -> Sound:
    """Returns the sound of a file whose bytes come as fast as they are played.

    Raises:
        OSError: The file cannot be read, or its header does not have its length.
    """
    sound = file_sound(path, stream, form)
    if not sound.seconds or not sound.num_bytes:
        raise wrong_file(
            path,
            "its header does not have its length, so that its speed is unknown: leave out --live, or "
            f"`ffmpeg -re -i {path} -f s16le -ac 1 -ar 16000 - | seq2seq transcribe --live -`",
        )
    return replace(sound, chunks=paced(sound.chunks, sound.num_bytes / sound.seconds))


async def streamed_sound(stream: BinaryIO, form: SoundForm) -> Sound:
    """Returns the sound of a pipe, whose beginning tells whether it has a header or is samples of `form`."""
    blocks = _read_ahead(stream, b"")
    beginning = b""
    async for block in blocks:
        beginning += block
        if len(beginning) >= _KIND_BYTES:
            break

    async def chunks() -> AsyncGenerator[bytes]:
        async with aclosing(blocks):
            yield beginning
            async for block in blocks:
                yield block

    if beginning.startswith(_HEADERS) or beginning[4:8] == b"ftyp":
        form = SoundForm()
    return Sound(form, _in_order(chunks(), form))


def heard_sound() -> Sound:
    """Returns the sound of the default microphone, which listens from the first chunk on.

    Raises:
        OSError: There is no microphone.
    """
    with needs_extra("microphone"):
        try:
            import sounddevice
        except OSError as error:  # of the wheel without the library, on Linux
            raise OSError(
                None, f"{error}: install PortAudio (on Debian libportaudio2)", "microphone"
            ) from None
    rate = DEFAULT_RATE
    try:
        try:
            sounddevice.check_input_settings(channels=1, dtype="int16", samplerate=rate)
        except sounddevice.PortAudioError:  # some devices have only a rate of their own
            rate = int(sounddevice.query_devices(kind="input")["default_samplerate"])
            sounddevice.check_input_settings(channels=1, dtype="int16", samplerate=rate)
    except (sounddevice.PortAudioError, ValueError) as error:
        raise OSError(None, f"it cannot be opened ({error})", "microphone") from None
    return Sound(SoundForm("pcm_s16", rate), _heard(sounddevice, rate))


async def _heard(sounddevice: Any, rate: int) -> AsyncGenerator[bytes]:
    loop = asyncio.get_running_loop()
    blocks = asyncio.Queue[bytes](_MOST_WAITING)
    is_late = False

    def put(block: bytes) -> None:
        nonlocal is_late
        if not is_late and not (is_late := blocks.full()):
            blocks.put_nowait(block)

    def take(content: Any, *_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(put, bytes(content))

    with sounddevice.RawInputStream(
        samplerate=rate, channels=1, dtype="int16", blocksize=int(rate * _PACE_SECONDS), callback=take
    ):
        while True:
            if is_late:
                seconds = _MOST_WAITING * _PACE_SECONDS
                raise OSError(None, f"the server is {seconds:.0f} seconds behind, and too slow", "microphone")
            yield await blocks.get()


async def _read_ahead(stream: BinaryIO, begun: bytes) -> AsyncGenerator[bytes]:
    """Yields the bytes of a file or pipe as they come.

    A daemon thread reads, so that one that waits for a pipe does not keep the program from its end.
    """
    loop = asyncio.get_running_loop()
    blocks = asyncio.Queue[bytes | Exception]()
    room, has_left = threading.Semaphore(_BLOCKS_AHEAD), threading.Event()
    read: Callable[[int], bytes] = stream.read1  # type: ignore[attr-defined]  # which returns what has come

    def put(block: bytes | Exception) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(blocks.put_nowait, block)

    def work() -> None:
        try:
            while room.acquire() and not has_left.is_set():
                put(block := read(_BLOCK_BYTES))
                if not block:
                    return
        except Exception as error:
            put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        if begun:
            yield begun
        while block := await blocks.get():
            if isinstance(block, Exception):
                raise block
            yield block
            room.release()
    finally:
        has_left.set()
        room.release()


async def _in_order(chunks: AsyncGenerator[bytes], form: SoundForm) -> AsyncGenerator[bytes]:
    """Yields whole samples, little-endian; bytes after the last whole one are left out."""
    rest = b""
    async with aclosing(chunks):
        async for chunk in chunks:
            chunk = rest + chunk
            num_whole = len(chunk) - len(chunk) % form.frame_bytes
            rest = chunk[num_whole:]
            whole = bytearray(chunk[:num_whole])
            if form.is_swapped:
                whole[::2], whole[1::2] = whole[1::2], whole[::2]
            if whole:
                yield bytes(whole)


async def paced(chunks: AsyncIterable[bytes], bytes_per_second: float) -> AsyncGenerator[bytes]:
    """Yields chunks in smaller ones, each when it would have been heard."""
    loop = asyncio.get_running_loop()
    began, num_bytes = loop.time(), 0
    step = max(_SAMPLE_BYTES, int(bytes_per_second * _PACE_SECONDS))
    async for chunk in chunks:
        for first in range(0, len(chunk), step):
            part = chunk[first : first + step]
            num_bytes += len(part)
            await asyncio.sleep(began + num_bytes / bytes_per_second - loop.time())
            yield part


async def until(stopping: asyncio.Event, chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """Yields chunks until there are no more, or `stopping` is set."""
    stopped = asyncio.ensure_future(stopping.wait())
    iterator = aiter(chunks)
    following: asyncio.Future[bytes] | None = None
    try:
        while not stopped.done():
            following = asyncio.ensure_future(anext(iterator))
            await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                try:
                    yield following.result()
                except StopAsyncIteration:
                    return
    finally:
        stopped.cancel()
        if following is not None:
            following.cancel()
            await asyncio.wait({following})


def sound_seconds(path: Path, form: SoundForm) -> float | None:
    """Returns the length of a sound file from its header; None if that does not have it.

    Raises:
        OSError: The file cannot be read.
    """
    num_bytes = path.stat().st_size
    if form.encoding != "file":
        return num_bytes / (form.frame_bytes * form.sample_rate)
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
        file.seek(max(0, num_bytes - _END_BYTES))
        end = file.read()
    if beginning.startswith(_WAV):
        return _wav_seconds(beginning, num_bytes)
    if beginning.startswith(b"fLaC"):
        info = int.from_bytes(beginning[18:26])  # STREAMINFO: 20 bits of rate, 3, 5, 36 of samples
        rate, num_samples = info >> 44, info & (2**36 - 1)
        return num_samples / rate if rate and num_samples else None
    if beginning.startswith(b"OggS"):
        return _ogg_seconds(beginning, end)
    return None


def _wav_seconds(beginning: bytes, num_bytes: int) -> float | None:
    place, bytes_per_second = 12, 0
    while place + 8 <= len(beginning):
        name, size = beginning[place : place + 4], int.from_bytes(beginning[place + 4 : place + 8], "little")
        place += 8
        if name == b"fmt ":
            bytes_per_second = int.from_bytes(beginning[place + 8 : place + 12], "little")
        if name == b"data":
            # A recorder that was killed, or wrote to a pipe, left no size.
            num_data = min(size or num_bytes, num_bytes - place)
            return num_data / bytes_per_second if bytes_per_second else None
        place += size + size % 2
    return None


def _ogg_seconds(beginning: bytes, end: bytes) -> float | None:
    place = end.rfind(b"OggS")
    num_samples = int.from_bytes(end[place + 6 : place + 14], "little")
    rate = _OPUS_RATE if b"OpusHead" in beginning else 0
    if (vorbis := beginning.find(b"\x01vorbis")) >= 0:
        rate = int.from_bytes(beginning[vorbis + 12 : vorbis + 16], "little")
    return num_samples / rate if rate and place >= 0 and 0 < num_samples < 2**62 else None
