"""Speech while it comes: `AsyncClient.transcribe_live` sends a sound in pieces, and yields what is said."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from seq2seq_serve.client.errors import ClientError, client_errors
from seq2seq_serve.client.rpcs import Connection
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.options import Options, options_of

Encoding = Literal["file", "pcm_s16", "pcm_f32", "mulaw", "alaw"]
_ENCODINGS: dict[str, pb.SoundEncoding] = {
    "file": pb.SOUND_ENCODING_UNSPECIFIED,
    "pcm_s16": pb.SOUND_ENCODING_PCM_S16,
    "pcm_f32": pb.SOUND_ENCODING_PCM_F32,
    "mulaw": pb.SOUND_ENCODING_MULAW,
    "alaw": pb.SOUND_ENCODING_ALAW,
}
_MESSAGE_BYTES = 2**18  # of sound; a longer chunk is sent in several messages


@dataclass(frozen=True)
class SpeechBegan:
    """Somebody begins to speak. All times are in seconds from the beginning of the sound.

    Attributes:
        received_seconds: Of sound, which the server had received. Every event has them.
    """

    begin_seconds: float
    received_seconds: float


@dataclass(frozen=True)
class SpeechEnded:
    """Nobody speaks any more."""

    end_seconds: float
    received_seconds: float


@dataclass(frozen=True)
class LiveText:
    """New text of the present segment.

    Attributes:
        stable: Words that follow those of the events before, and are never changed or taken back.
        unstable: What probably follows them; the next event has another one in its place.
        lag_seconds: From the end of the last stable word until now, on the clock of the sound.
    """

    stable: tuple[pb.Word, ...]
    unstable: str
    lag_seconds: float
    received_seconds: float

    @property
    def text(self) -> str:
        """The stable words, each with the space before it."""
        return "".join(word.text for word in self.stable)


@dataclass(frozen=True)
class LiveSegment:
    """A segment is complete.

    Attributes:
        segment: Its text, times and words.
    """

    segment: pb.Segment
    received_seconds: float

    @property
    def text(self) -> str:
        """The text, without the space before it."""
        return self.segment.text.strip()


@dataclass(frozen=True)
class LiveResult:
    """The last event.

    Attributes:
        answer: The whole text, with all segments.
    """

    answer: pb.GenerateResponse
    received_seconds: float

    @property
    def text(self) -> str:
        """The whole text."""
        return self.answer.hypotheses[0].text


LiveEvent = SpeechBegan | SpeechEnded | LiveText | LiveSegment | LiveResult


def start_message(
    *,
    model: str,
    options: Options | None,
    encoding: str,
    sample_rate: int,
    num_channels: int,
    turn_detection: pb.TurnDetection | None,
    interval_seconds: float | None,
    segments_only: bool,
    begin_seconds: float,
) -> pb.TranscribeStart:
    """Returns the first message of a stream; the arguments are those of `AsyncClient.transcribe_live`.

    Raises:
        ValueError: The encoding does not have such a name, or a number does not fit.
    """
    if encoding not in _ENCODINGS:
        raise ValueError(f"the encoding is {encoding!r}, and must be one of {', '.join(_ENCODINGS)}")
    return pb.TranscribeStart(
        model=model,
        options=options_of(options),
        encoding=_ENCODINGS[encoding],
        sample_rate=sample_rate,
        num_channels=num_channels,
        turn_detection=turn_detection,
        interval_seconds=interval_seconds,
        segments_only=segments_only,
        begin_seconds=begin_seconds,
    )


async def transcribe(
    client: Connection,
    start: pb.TranscribeStart,
    chunks: AsyncIterable[bytes | pb.FinishSegment],
    timeout_seconds: float | None,
    request_id: str,
) -> AsyncGenerator[LiveEvent]:
    """Sends a stream and yields its events; see `AsyncClient.transcribe_live`."""
    timeout_seconds = math.inf if timeout_seconds is None else timeout_seconds
    rpc = client._rpc("Transcribe", start, _event_of, timeout_seconds, request_id)
    for each in (rpc, rpc.directly):
        call = each.method(**each.settings)
        sending: asyncio.Task[None] | None = None
        try:
            with client_errors(client.address):
                # Sound is sent only after this, so that none of it is lost where the call was not sent.
                await call.write(pb.TranscribeRequest(start=start))
                sending = asyncio.create_task(_send(call, chunks))
                try:
                    async for response in call:
                        yield each.read(response)
                except asyncio.CancelledError:
                    # Of the task of the caller, or of the call because `chunks` failed
                    if sending.done() and not sending.cancelled() and sending.exception() is not None:
                        await sending
                    raise
                return
        except ClientError as error:
            if not error.may_be_by_health_check or each is not rpc or sending is not None:
                raise
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.wait({sending})
                if not sending.cancelled():
                    sending.exception()  # which was raised, or the server's error was
            call.cancel()


async def _send(call: Any, chunks: AsyncIterable[bytes | pb.FinishSegment]) -> None:
    """Sends chunks until they end, or the call does, and waits while the server cannot take more."""
    # `call.write` reports INTERNAL in place of the server's status if that comes while it writes (gRPC 1.85).
    send = call._cython_call.send_serialized_message
    try:
        async for chunk in chunks:
            for request in _requests(chunk):
                try:
                    await send(request.SerializeToString())
                except Exception:  # gRPC's class is private: the call has ended, and its reader raises why
                    return
        with suppress(Exception):  # for the same reason
            await call.done_writing()
    except BaseException:
        call.cancel()
        raise


def _requests(chunk: bytes | pb.FinishSegment) -> Iterator[pb.TranscribeRequest]:
    if isinstance(chunk, pb.FinishSegment):
        yield pb.TranscribeRequest(finish_segment=chunk)
        return
    for first in range(0, len(chunk), _MESSAGE_BYTES):
        yield pb.TranscribeRequest(sound=bytes(chunk[first : first + _MESSAGE_BYTES]))


def _event_of(response: pb.TranscribeResponse) -> LiveEvent:
    received = response.received_seconds
    kind = response.WhichOneof("event")
    if kind == "speech_began":
        return SpeechBegan(response.speech_began.begin_seconds, received)
    if kind == "speech_ended":
        return SpeechEnded(response.speech_ended.end_seconds, received)
    if kind == "text":
        text = response.text
        return LiveText(tuple(text.stable), text.unstable, text.lag_seconds, received)
    if kind == "segment":
        return LiveSegment(response.segment, received)
    return LiveResult(response.result, received)
