"""Transcribes the segments of a file while it comes, several at a time, each as a piece of a long sound."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from seq2seq_serve.bundle.audio import SAMPLE_RATE, GrowingSound, Part, Samples, joined_spans, log_mel
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.fair_thread import YieldPoint
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
    """Decodes the segments of one stream. Owned by the stream's call.

    Args:
        decoding: How each of them is decoded, in windows.
        sound: What was heard.
        decode: Decodes a request.
        call: The stream's call.
        least_end: Segments that end before this sample are not decoded.

    Attributes:
        detected_language: That of the first segment with text; empty before, and if the caller names it.
    """

    def __init__(
        self, decoding: Decoding, sound: GrowingSound, decode: Decode, call: Call, least_end: int
    ) -> None:
        self._least_end = least_end
        self._decoding, self._sound, self._decode, self._call = decoding, sound, decode, call
        [(self._name, spec)] = decoding.model.sources.items()
        num_mels, num_frames = spec.axes
        assert isinstance(num_mels, int)
        assert isinstance(num_frames, int)
        self._num_mels, self._num_frames = num_mels, num_frames
        self.detected_language = ""

    async def decode_all(
        self,
        following: Callable[[], Awaitable[LiveSegment | None]],
        taken: Callable[[], Awaitable[None]],
        hearing: asyncio.Lock,
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Yields the answer for each segment, in order.

        Args:
            following: Returns the next complete segment when there is one; None after the last.
            taken: Is called when its sound is not needed any more.
            hearing: Is held while the sound is read.
        """
        answers = deque[asyncio.Task[pb.GenerateResponse]]()
        next_one = asyncio.ensure_future(following())
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
                            async with hearing:
                                begin, end = segment.begin, segment.end
                                spans = [(one - begin, its_end - begin) for one, its_end in segment.spans]
                                whole = self._sound.samples(begin, end)
                                samples, _, parts = joined_spans(whole, spans)  # a copy
                            await taken()
                            if len(samples) and end >= self._least_end:
                                answers.append(asyncio.create_task(self._answer(samples, parts, begin, end)))
                            del samples, whole
                            next_one = asyncio.ensure_future(following())
                if answers and (answers[0].done() or has_ended or len(answers) == _MOST_AT_ONCE):
                    answer = await answers.popleft()
                    if answer.hypotheses[0].segments and not self.detected_language:
                        self.detected_language = answer.detected_language
                    yield answer
        finally:
            for task in (next_one, *answers):
                task.cancel()
            await asyncio.gather(next_one, *answers, return_exceptions=True)

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
