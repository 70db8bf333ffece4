"""One stream of sound: hears what comes, decodes it, and sends what is certain, side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from enum import Enum, auto
from functools import partial

from seq2seq_serve.bundle.audio import SAMPLE_RATE, GrowingSound, Samples
from seq2seq_serve.bundle.sound_files import SoundError
from seq2seq_serve.bundle.sound_streams import Encoding, SoundStream, open_stream
from seq2seq_serve.commands import install_command
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import InvalidRequest, Unavailable
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.runner.voice_activity import MissingVoiceActivityError, SpeechRules
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.live.admission import IDLE_SECONDS, LiveStreams
from seq2seq_serve.server.service.live.pieces import PieceDecoder
from seq2seq_serve.server.service.live.transcription import LiveDecoder
from seq2seq_serve.server.service.live.turns import LiveSegment, SpeechChange, TurnRules, Turns
from seq2seq_serve.server.service.read.inputs import max_seconds
from seq2seq_serve.server.service.read.options import Decoding, read_options
from seq2seq_serve.server.service.seq2seq.generation import decoded_in_turn
from seq2seq_serve.server.service.shares import Room
from seq2seq_serve.server.telemetry.statistics import Statistics

# Complete segments, and the sound since the beginning of one; beyond them the stream is not read
_MOST_WAITING, _MOST_WAITING_SECONDS = 2, 60.0
_KEPT_SECONDS = 1.0  # of sound in which nobody speaks, beside the padding before speech
_MOST_WHOLE_BYTES = 3 * 2**20  # of the segments, and their tokens again: clients take a last message of 4 MiB
_BYTES_PER_TEXT_BYTE = 2  # of samples, which take as long to hear as a byte of text to read
_ENCODINGS = {
    pb.SOUND_ENCODING_UNSPECIFIED: Encoding.FILE,
    pb.SOUND_ENCODING_PCM_S16: Encoding.PCM_S16,
    pb.SOUND_ENCODING_PCM_F32: Encoding.PCM_F32,
    pb.SOUND_ENCODING_MULAW: Encoding.MULAW,
    pb.SOUND_ENCODING_ALAW: Encoding.ALAW,
}
# Speech, and its beginning and end: of a live stream, and of a file, whose segments have many spans
_THRESHOLD, _PADDING_SECONDS, _SILENCE_SECONDS, _MARGIN_SECONDS = 0.5, 0.3, 0.5, 0.3
_FILE_SILENCE_SECONDS, _FILE_MARGIN_SECONDS = 0.8, 0.4
_BOUNDS = {
    "threshold": (0.0, 1.0),
    "prefix_padding_seconds": (0.0, 5.0),
    "silence_seconds": (0.1, 10.0),
}
_INTERVAL_BOUNDS = (0.1, 10.0)
_LATEST_SECONDS = 1e9  # at which a transcript is continued
# Options of which a stream has its own ways, or that describe one whole target
_REFUSED = (
    *("attention", "word_alignment", "num_hypotheses", "num_alternatives", "log_probabilities"),
    *("long_source", "target_prefix", "stop_sequences", "voice_activity", "max_new_tokens", "min_new_tokens"),
)
_LIVE_BYTES, _FILE_BYTES = 2**22, 2**24  # of the sound that waits, and its spectrograms


class Command(Enum):
    """The commands that a caller sends between the bytes of a sound."""

    FINISH_SEGMENT = auto()
    DROP_SEGMENT = auto()


Send = Callable[[pb.TranscribeResponse], Awaitable[None]]


class LiveStream:
    """Transcribes one stream. Owned by its call.

    Args:
        start: What is transcribed, and how.
        model: The model that it names.
        call: The stream's call.
        lives: Counts it.
        statistics: The sums of its model.
        send: Sends an event to the caller, as soon as there is room for it.

    Raises:
        InvalidRequest: The model does not read sounds and write times, or a setting does not fit.
    """

    def __init__(
        self,
        start: pb.TranscribeStart,
        model: ServedModel,
        call: Call,
        lives: LiveStreams,
        statistics: Statistics,
        send: Send,
    ) -> None:
        self._call, self._send_event = call, send
        self._lives, self._statistics = lives, statistics
        self._place: Room | None = None  # among the live streams, while sound comes
        self._idle: asyncio.TimerHandle | None = None  # gives that back
        self._decoding = _read(start, model, call)
        self._interval = round(_interval_seconds(start, lives.interval_seconds) * SAMPLE_RATE)
        try:
            self._stream: SoundStream = open_stream(
                _encoding(start), start.sample_rate or SAMPLE_RATE, start.num_channels or 1
            )
        except SoundError as error:
            raise InvalidRequest(str(error), field="start.sample_rate") from None
        [spec] = model.sources.values()
        num_mels = spec.axes[0]
        assert isinstance(num_mels, int)
        self._sound = GrowingSound(num_mels)
        rules = _turn_rules(start)
        longest = round(max_seconds(spec) * SAMPLE_RATE)
        try:
            self._turns = Turns(self._sound, rules, longest)
        except MissingVoiceActivityError:
            raise InvalidRequest(
                "the server cannot detect speech: turn detection off, or on the server "
                f"{install_command('speech')}",
                field="start.turn_detection",
            ) from None
        padding = 0.0 if rules.speech is None else rules.speech.margin_seconds
        self._kept = round((padding + _KEPT_SECONDS) * SAMPLE_RATE)
        self._hearing = asyncio.Lock()  # is held while the sound or its segments change
        self._changed = asyncio.Condition()
        self._is_complete = self._waits = False
        self._segments_only = start.segments_only
        self._whole = pb.GenerateResponse(
            request_id=call.request_id, model=model.name, hypotheses=[pb.Hypothesis()]
        )
        self._texts = list[str]()  # of its segments
        self._num_whole_bytes = 0
        decode = partial(decoded_in_turn, model.engine, call)
        self._live = LiveDecoder(self._decoding, self._sound, decode, call)
        begin = round(_begin_seconds(start) * SAMPLE_RATE)
        self._pieces = PieceDecoder(self._decoding, self._sound, decode, call, begin)

    async def run(self, commands: AsyncIterator[bytes | Command]) -> pb.GenerateResponse:
        """Hears, decodes and sends until the sound has ended; returns the whole answer.

        Args:
            commands: The bytes of the sound, and what is sent between them.

        Raises:
            ServerError: The sound cannot be read, or decoding fails.
            Overloaded: There are as many live streams, or files, as the server takes.
            Unavailable: The server drains; what came before has been transcribed and sent.
        """
        refusal: Exception | None = None
        num_bytes = _FILE_BYTES if self._segments_only else _LIVE_BYTES
        try:
            with self._call.holding(num_bytes):
                async with asyncio.TaskGroup() as tasks:
                    decoding = tasks.create_task(
                        self._decode_pieces() if self._segments_only else self._decode_live()
                    )
                    try:
                        await self._hear_all(commands)
                    except Unavailable as error:
                        refusal = error
                    async with self._hearing:
                        changes = [*self._turns.finish()]
                    await self._send_changes(changes)
                    self._is_complete = True
                    await self._notify()
                    await decoding
        except ExceptionGroup as group:
            raise group.with_traceback(None).exceptions[0] from None
        finally:
            self._stream.close()
            if self._idle is not None:
                self._idle.cancel()  # it would keep the sound
            self._leave()
        if refusal is not None:
            raise refusal
        self._whole.hypotheses[0].text = " ".join(self._texts)
        self._whole.usage.source_seconds = self._sound.num_samples / SAMPLE_RATE
        self._whole.detected_language = self._live.detected_language or self._pieces.detected_language
        return self._whole

    @property
    def heard_seconds(self) -> float:
        """The sound that was heard."""
        return self._sound.num_samples / SAMPLE_RATE

    @property
    def is_in_segment(self) -> bool:
        """Whether what comes next belongs to the segment of what was heard last."""
        segments = self._turns.segments
        return bool(segments) and not segments[-1].is_complete

    @property
    def transcribed_seconds(self) -> float:
        """The sound of which nothing has to be transcribed any more."""
        segments = self._turns.segments
        return segments[0].begin / SAMPLE_RATE if segments else self.heard_seconds

    async def wait_until_transcribed(self, seconds: float) -> None:
        """Waits until the sound before a place is transcribed, and its text was sent."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.transcribed_seconds >= seconds)

    async def _hear_all(self, commands: AsyncIterator[bytes | Command]) -> None:
        async for command in commands:
            if isinstance(command, bytes):
                self._come()
                await self._hear(self._stream.push(command), len(command))
                continue
            await self._hear(self._stream.flush(), 0)
            changes = list[SpeechChange]()
            async with self._hearing:
                if command is Command.FINISH_SEGMENT:
                    changes += self._turns.finish_segment()
                else:
                    is_decoded = len(self._turns.segments) == 1 and self.is_in_segment
                    self._turns.drop_segment()
                    if is_decoded:
                        self._live.drop()
            await self._send_changes(changes)
            await self._notify()
        await self._hear(self._stream.finish(), 0)

    def _come(self) -> None:
        """Counts the stream among those that sound comes from; raises Overloaded at the first sound."""
        if self._segments_only:
            return
        if self._idle is None:
            self._place = self._lives.admit(self._call.caller.name)
        elif self._place is None:
            self._place = self._lives.open.add(self._call.caller.name, 1)
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._leave)

    def _leave(self) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None

    async def _hear(self, blocks: Iterator[Samples], num_bytes: int) -> None:
        """Hears blocks of samples, and sends the changes that they show; waits while too much waits."""

        def hear(_checkpoint: object) -> list[SpeechChange] | None:
            samples = next(blocks, None)
            return None if samples is None else [*self._turns.hear(samples)]

        while True:
            num_before = self._sound.num_samples
            async with self._hearing:
                try:
                    changes = await self._call.read(hear, num_bytes // _BYTES_PER_TEXT_BYTE)
                except SoundError as error:
                    raise InvalidRequest(str(error), field="sound") from None
                self._forget()
            if changes is None:
                return
            if not self._segments_only:
                num_new = self._sound.num_samples - num_before
                self._statistics.live_sound_seconds += num_new / SAMPLE_RATE
            await self._send_changes(changes)
            await self._notify()
            async with self._changed:
                await self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        segments = [segment for segment in self._turns.segments if segment.is_complete]
        if not segments:
            return True
        seconds = (self._sound.num_samples - segments[0].begin) / SAMPLE_RATE
        return len(segments) <= _MOST_WAITING and seconds <= _MOST_WAITING_SECONDS

    def _forget(self) -> None:
        """Frees the sound before the oldest segment."""
        segments, now = self._turns.segments, self._sound.num_samples
        begin = segments[0].begin if segments else max(now - self._kept, 0)
        self._sound.drop(min(self._live.first_needed(begin), begin))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def settled(self) -> None:
        """Waits until nothing has to be decoded before more of the sound comes, as on a simulated clock."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waits and not self._is_due())

    def _is_due(self) -> bool:
        """Whether the oldest segment has to be decoded, or none follows."""
        segments = self._turns.segments
        if not segments:
            return self._is_complete
        return segments[0].is_complete or self._live.is_due(segments[0], self._interval)

    async def _decode_live(self) -> None:
        segments = self._turns.segments
        while True:
            async with self._changed:
                self._waits = True
                self._changed.notify_all()
                await self._changed.wait_for(self._is_due)
                self._waits = False
            if not segments:
                return
            segment = segments[0]
            begin = time.monotonic()
            async with aclosing(self._live.decode(segment, self._hearing)) as events:
                async for event in events:
                    if not segments or segments[0] is not segment:  # its caller has dropped it
                        break
                    if begin:
                        seconds, begin = time.monotonic() - begin, 0.0
                        self._record(seconds, event)
                    await self._send(event)
            if segment.is_decoded:
                segments.popleft()
            await self._notify()

    def _record(self, seconds: float, event: pb.LiveText | pb.Segment) -> None:
        self._lives.record(seconds)
        self._statistics.num_live_decodings += 1
        self._statistics.live_decode_seconds += seconds
        if isinstance(event, pb.LiveText):
            for word in event.stable:
                self._statistics.lag.add(event.lag_seconds + event.stable[-1].end_seconds - word.end_seconds)

    async def _decode_pieces(self) -> None:
        segments = self._turns.segments

        def is_ready() -> bool:
            return segments[0].is_complete if segments else self._is_complete

        async def following() -> LiveSegment | None:
            async with self._changed:
                await self._changed.wait_for(is_ready)
            return segments[0] if segments else None

        async def taken() -> None:
            segments.popleft()
            await self._notify()

        async with aclosing(self._pieces.decode_all(following, taken, self._hearing)) as answers:
            async for answer in answers:
                for segment in answer.hypotheses[0].segments:
                    await self._send(segment)

    async def _send_changes(self, changes: list[SpeechChange]) -> None:
        for change in changes:
            seconds = round(change.place / SAMPLE_RATE, 3)
            if change.is_begin:
                await self._send(pb.SpeechBegan(begin_seconds=seconds))
            else:
                await self._send(pb.SpeechEnded(end_seconds=seconds))

    async def _send(self, event: pb.SpeechBegan | pb.SpeechEnded | pb.LiveText | pb.Segment) -> None:
        response = pb.TranscribeResponse(received_seconds=round(self._sound.num_samples / SAMPLE_RATE, 3))
        getattr(response, _FIELDS[type(event)]).CopyFrom(event)
        if isinstance(event, pb.Segment):
            self._add(event)
        await self._send_event(response)

    def _add(self, segment: pb.Segment) -> None:
        """Adds a segment to the whole answer."""
        [whole] = self._whole.hypotheses
        self._num_whole_bytes += 2 * segment.ByteSize()  # at most: its tokens are there twice
        if self._num_whole_bytes <= _MOST_WHOLE_BYTES:
            whole.segments.append(segment)
            whole.token_ids.extend(segment.token_ids)
        else:
            del whole.segments[:], whole.token_ids[:]
        if text := segment.text.strip():
            self._texts.append(text)  # each assignment to a field of a message takes memory until its end
        self._whole.usage.target_tokens += len(segment.token_ids)


_FIELDS = {
    pb.SpeechBegan: "speech_began",
    pb.SpeechEnded: "speech_ended",
    pb.LiveText: "text",
    pb.Segment: "segment",
}


def _read(start: pb.TranscribeStart, model: ServedModel, call: Call) -> Decoding:
    """Returns how a stream's segments are decoded; raises InvalidRequest."""
    if not model.reads_sound or model.manifest.timestamps is None or not model.sizing.num_alignment_heads:
        raise InvalidRequest(
            f"{model.name} is not a model that transcribes live: that needs one that reads sounds, writes "
            "times, and reports the attention of single heads, as an imported Whisper does",
            field="start.model",
        )
    given = {descriptor.name for descriptor, _ in start.options.ListFields()}
    for name in _REFUSED:
        if name in given:
            raise InvalidRequest(
                f"{name} does not apply to a stream: leave it out", field=f"start.options.{name}"
            )
    options = pb.GenerateOptions()
    options.CopyFrom(start.options)
    options.long_source = pb.LONG_SOURCE_SPLIT  # has the rules by which a text is good
    options.timestamps = options.word_timestamps = start.segments_only
    return read_options(options, model, call.caller, stream=False)


def _interval_seconds(start: pb.TranscribeStart, default: float) -> float:
    if not start.HasField("interval_seconds"):
        return default
    return _in_range("interval_seconds", start.interval_seconds, *_INTERVAL_BOUNDS)


def _begin_seconds(start: pb.TranscribeStart) -> float:
    if start.begin_seconds and not start.segments_only:
        raise InvalidRequest("begin_seconds needs segments_only", field="start.begin_seconds")
    return _in_range("begin_seconds", start.begin_seconds, 0.0, _LATEST_SECONDS)


def _encoding(start: pb.TranscribeStart) -> Encoding:
    encoding = _ENCODINGS.get(start.encoding)
    if encoding is None:
        raise InvalidRequest(
            f"encoding is {start.encoding}, and must be one of {', '.join(pb.SoundEncoding.keys())}",
            field="start.encoding",
        )
    return encoding


def _turn_rules(start: pb.TranscribeStart) -> TurnRules:
    """Returns when segments begin and end; raises InvalidRequest."""
    given, joins = start.turn_detection, start.segments_only
    values = {
        "threshold": _THRESHOLD,
        "prefix_padding_seconds": _FILE_MARGIN_SECONDS if joins else _PADDING_SECONDS,
        "silence_seconds": _FILE_SILENCE_SECONDS if joins else _SILENCE_SECONDS,
    }
    for name, bounds in _BOUNDS.items():
        if given.HasField(name):
            values[name] = _in_range(f"turn_detection.{name}", getattr(given, name), *bounds)
    margin = min(_FILE_MARGIN_SECONDS if joins else _MARGIN_SECONDS, values["silence_seconds"])
    speech = SpeechRules(values["silence_seconds"], values["threshold"], values["prefix_padding_seconds"])
    return TurnRules(None if given.off else speech, margin, joins)


def _in_range(name: str, value: float, least: float, most: float) -> float:
    """Returns a value in its range; NaN is out of every range."""
    if not least <= value <= most:
        raise InvalidRequest(
            f"{name} is {value:g}, and must be from {least:g} to {most:g}", field=f"start.{name}"
        )
    return value
