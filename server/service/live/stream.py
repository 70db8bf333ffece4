"""One stream of sound: hears what comes, decodes it, and sends what is certain, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack
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
from seq2seq_serve.server.service.live.admission import LiveStreams, Presence
from seq2seq_serve.server.service.live.hearing import Decoder, Event, Hearing
from seq2seq_serve.server.service.live.pieces import PieceDecoder
from seq2seq_serve.server.service.live.transcription import LiveDecoder
from seq2seq_serve.server.service.live.turns import SpeechChange, TurnRules, Turns
from seq2seq_serve.server.service.read.inputs import max_seconds
from seq2seq_serve.server.service.read.options import Decoding, read_options
from seq2seq_serve.server.service.seq2seq.generation import decoded_in_turn
from seq2seq_serve.server.telemetry.statistics import Statistics

_KEPT_SECONDS = 1.0  # of sound in which nobody speaks, beside the padding before speech
_MOST_WHOLE_BYTES = 3 * 2**20  # of the segments, and their tokens again: clients take a last message of 4 MiB
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
        self._call, self._lives, self._statistics, self._send_event = call, lives, statistics, send
        decoding = _read(start, model, call)
        interval_seconds = lives.interval_seconds
        if start.HasField("interval_seconds"):
            interval_seconds = _in_range("interval_seconds", start.interval_seconds, *_INTERVAL_BOUNDS)
        begin = round(_begin_seconds(start) * SAMPLE_RATE)
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
        try:
            self._turns = Turns(self._sound, rules, round(max_seconds(spec) * SAMPLE_RATE))
        except MissingVoiceActivityError:
            raise InvalidRequest(
                "the server cannot detect speech: turn detection off, or on the server "
                f"{install_command('speech')}",
                field="start.turn_detection",
            ) from None
        padding = 0.0 if rules.speech is None else rules.speech.margin_seconds
        self._kept = round((padding + _KEPT_SECONDS) * SAMPLE_RATE)
        self._hearing = Hearing(self._sound, self._turns)
        self._whole = pb.GenerateResponse(
            request_id=call.request_id, model=model.name, hypotheses=[pb.Hypothesis()]
        )
        self._texts = list[str]()  # of its segments
        self._num_whole_bytes = 0
        decode = partial(decoded_in_turn, model.engine, call)
        self._presence: Presence | None = None  # a file does not have to be decoded in time
        self._decoder: Decoder
        if start.segments_only:
            self._num_bytes = _FILE_BYTES
            self._decoder = PieceDecoder(decoding, self._hearing, decode, call, begin)
        else:
            self._num_bytes = _LIVE_BYTES
            self._presence = Presence(lives, call.caller.name)
            interval, line = round(interval_seconds * SAMPLE_RATE), lives.line(model.engine)
            self._decoder = LiveDecoder(decoding, self._hearing, decode, call, line, interval, self._record)

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
        try:
            with ExitStack() as held:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._decoder.run(self._send))
                    try:
                        await self._hear_all(commands, held)
                    except Unavailable as error:
                        refusal = error
                    await self._change(self._turns.finish)
                    self._hearing.is_complete = True
                    await self._hearing.notify()
        except ExceptionGroup as group:
            raise group.with_traceback(None).exceptions[0] from None
        finally:
            self._stream.close()
            if self._presence is not None:
                self._presence.end()
        if refusal is not None:
            raise refusal
        self._whole.hypotheses[0].text = " ".join(self._texts)
        self._whole.usage.source_seconds = self.heard_seconds
        self._whole.detected_language = self._decoder.detected_language
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
        await self._hearing.wait_for(lambda: self.transcribed_seconds >= seconds)

    async def settled(self) -> None:
        """As `Hearing.settled`."""
        await self._hearing.settled()

    async def _hear_all(self, commands: AsyncIterator[bytes | Command], held: ExitStack) -> None:
        has_begun = False
        async for command in commands:
            if isinstance(command, bytes):
                if not command:
                    continue
                if not has_begun:
                    held.enter_context(self._call.holding(self._num_bytes))
                    has_begun = True
                if self._presence is not None:
                    self._presence.come()
                await self._hear(self._stream.push(command), len(command))
                continue
            await self._hear(self._stream.flush(), 0)
            is_finish = command is Command.FINISH_SEGMENT
            await self._change(self._turns.finish_segment if is_finish else self._turns.drop_segment)
            await self._hearing.notify()
        await self._hear(self._stream.finish(), 0)

    async def _hear(self, blocks: Iterator[Samples], num_bytes: int) -> None:
        """Hears blocks of samples, and sends the changes that they show; waits while too much waits."""

        def hear(_checkpoint: object) -> list[SpeechChange] | None:
            samples = next(blocks, None)
            return None if samples is None else [*self._turns.hear(samples)]

        cost = self._stream.most_samples(num_bytes)
        while True:
            num_before = self._sound.num_samples
            async with self._hearing.lock:
                try:
                    changes = await self._call.read(hear, cost)
                except SoundError as error:
                    raise InvalidRequest(str(error), field="sound") from None
                if changes is None:
                    return
                segments, now = self._turns.segments, self._sound.num_samples
                begin = segments[0].begin if segments else max(now - self._kept, 0)
                self._sound.drop(self._decoder.first_needed(begin))
                await self._send_changes(changes)
            if self._presence is not None:
                self._statistics.live_sound_seconds += (now - num_before) / SAMPLE_RATE
            await self._hearing.notify()
            await self._hearing.wait_for(self._hearing.has_room)

    async def _change(self, change: Callable[[], Iterable[SpeechChange]]) -> None:
        async with self._hearing.lock:
            await self._send_changes(change())

    async def _send_changes(self, changes: Iterable[SpeechChange]) -> None:
        """Sends changes before any text that follows them: segments are decoded when the lock is free."""
        for change in changes:
            seconds = round(change.place / SAMPLE_RATE, 3)
            if change.is_begin:
                await self._send(pb.SpeechBegan(begin_seconds=seconds))
            else:
                await self._send(pb.SpeechEnded(end_seconds=seconds))

    def _record(self, seconds: float) -> None:
        """Counts the time of a decoding of a live stream."""
        self._lives.record(seconds)
        self._statistics.num_live_decodings += 1
        self._statistics.live_decode_seconds += seconds

    async def _send(self, event: Event) -> None:
        response = pb.TranscribeResponse(received_seconds=round(self.heard_seconds, 3))
        getattr(response, _FIELDS[type(event)]).CopyFrom(event)
        if isinstance(event, pb.Segment):
            self._add(event)
        elif isinstance(event, pb.LiveText):
            for word in event.stable:
                self._statistics.lag.add(event.lag_seconds + event.stable[-1].end_seconds - word.end_seconds)
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
