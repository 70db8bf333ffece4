"""Transcribes the segments of a file while it comes, several at a time, each as a piece of a long sound."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from seq2seq_serve.bundle.audio import SAMPLE_RATE, Part, Samples, joined_spans, log_mel
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.live.hearing import Hearing, SendEvent
from seq2seq_serve.server.service.live.turns import LiveSegment
from seq2seq_serve.server.service.read.options import Decoding
from seq2seq_serve.server.service.read.sources import Reading
from seq2seq_serve.server.service.seq2seq.generation import hold_attention
from seq2seq_serve.server.service.seq2seq.windows import Decode, decode_in_a_row
from seq2seq_serve.server.service.write.responses import (
    attention_bytes,
    estimated_attention_bytes,
    generate_response,
    with_token_times,
)

_MOST_AT_ONCE = 8
_TEXT_BYTES_PER_SECOND = 1000  # which take as long to read as the spectrogram of a second to compute


class PieceDecoder:
    """Decodes the complete segments of one stream, some of them at once; a `Decoder`. Owned by the stream.

    Args:
        decoding: How each of them is decoded, in windows.
        hearing: What was heard.
        decode: Decodes a request.
        call: The stream's call.
        least_end: Segments that end before this sample are not decoded.
    """

    def __init__(
        self, decoding: Decoding, hearing: Hearing, decode: Decode, call: Call, least_end: int
    ) -> None:
        self._least_end = least_end
        self._decoding, self._hearing, self._decode, self._call = decoding, hearing, decode, call
        [(self._name, spec)] = decoding.model.sources.items()
        num_mels, num_frames = spec.axes
        assert isinstance(num_mels, int)
        assert isinstance(num_frames, int)
        self._num_mels, self._num_frames = num_mels, num_frames
        self.detected_language = ""

    def first_needed(self, begin: int) -> int:
        """As `Decoder.first_needed`."""
        return begin

    async def run(self, send: SendEvent) -> None:
        """As `Decoder.run`."""
        answers = deque[asyncio.Task[pb.GenerateResponse]]()
        next_one = asyncio.ensure_future(self._next_segment())
        has_ended = False
        try:
            while not has_ended or answers:
                if not has_ended and len(answers) < _MOST_AT_ONCE:
                    await asyncio.wait(
                        {next_one, *([answers[0]] if answers else ())}, return_when="FIRST_COMPLETED"
                    )
                    if next_one.done():
                        segment = next_one.result()
                        if segment is None:
                            has_ended = True
                        else:
                            if (answer := await self._begun(segment)) is not None:
                                answers.append(answer)
                            next_one = asyncio.ensure_future(self._next_segment())
                if answers and (answers[0].done() or has_ended or len(answers) == _MOST_AT_ONCE):
                    response = await answers.popleft()
                    segments = response.hypotheses[0].segments
                    if segments and not self.detected_language:
                        self.detected_language = response.detected_language
                    for one in segments:
                        await send(one)
        finally:
            for task in (next_one, *answers):
                task.cancel()
            await asyncio.gather(next_one, *answers, return_exceptions=True)

    async def _next_segment(self) -> LiveSegment | None:
        return await self._hearing.next_segment(lambda segment: segment.is_complete)

    async def _begun(self, segment: LiveSegment) -> asyncio.Task[pb.GenerateResponse] | None:
        """Takes a segment, and begins to decode it if it has speech that is of interest."""
        async with self._hearing.lock:
            begin, end = segment.begin, segment.end
            spans = [(one - begin, its_end - begin) for one, its_end in segment.spans]
            samples, _, parts = joined_spans(self._hearing.sound.samples(begin, end), spans)  # a copy
        self._hearing.segments.popleft()
        await self._hearing.notify()
        if not len(samples) or end < self._least_end:
            return None
        return asyncio.create_task(self._answer(samples, parts, begin, end))

    async def _answer(
        self, samples: Samples, parts: tuple[Part, ...], begin: int, end: int
    ) -> pb.GenerateResponse:
        reading = await self._call.read(
            partial(self._read, samples, parts, begin, end),
            len(samples) * _TEXT_BYTES_PER_SECOND // SAMPLE_RATE,
        )
        del samples
        pairs: list[tuple[Reading, Result]] = []
        with ExitStack() as held:
            # Of an attempt, and of the best one before it
            num_bytes = 2 * estimated_attention_bytes(reading.request, self._decoding)
            await hold_attention(held, self._call, num_bytes)
            async for window, result in decode_in_a_row(reading, self._decoding, self._decode):
                timed = partial(with_token_times, window, result, self._decoding)
                pairs.append(await self._call.build(attention_bytes(result), timed))
                del result
        return await self._call.build(0, lambda _: generate_response(pairs, self._decoding))

    def _read(
        self, samples: Samples, parts: tuple[Part, ...], begin: int, end: int, checkpoint: YieldPoint
    ) -> Reading:
        sources = {self._name: log_mel(samples, self._num_mels, self._num_frames, checkpoint)}
        memory = self._decoding.model.manifest.memory
        request = replace(
            self._decoding.request,
            request_id=self._call.request_id,
            sources=sources,
            memory_length=memory.memory_length_of(sources),
            arrival=time.monotonic(),
            deadline=self._call.deadline,
        )
        return Reading(
            request,
            num_seconds=len(samples) / SAMPLE_RATE,
            sound_seconds=end / SAMPLE_RATE,
            parts=tuple(Part(one.end_seconds, one.delay_seconds + begin / SAMPLE_RATE) for one in parts),
        )
