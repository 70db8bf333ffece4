"""Transcribes a sound while it comes: decodes the present segment again and again, and sends what is certain.

A decoding is an ordinary request to the engine. Its forced prefix is the segment's stable text, and its draft
is what the decoding before it wrote after that. There is at most one at a time for a stream. So where the
machine cannot keep up, decodings become rarer for all streams.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, Samples
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.runner.voice_activity import MissingVoiceActivityError, SpeechRules, speech
from seq2seq_serve.server.service.call import Call
from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.live.admission import DecodingLine
from seq2seq_serve.server.service.live.agreement import Agreement, Heard
from seq2seq_serve.server.service.live.hearing import Hearing, SendEvent
from seq2seq_serve.server.service.live.short_windows import decode_short
from seq2seq_serve.server.service.live.turns import LiveSegment
from seq2seq_serve.server.service.read.inputs import max_seconds, position_seconds, short_window
from seq2seq_serve.server.service.read.options import Decoding
from seq2seq_serve.server.service.read.windows import after_text, compression_ratio, split_start
from seq2seq_serve.server.service.seq2seq.generation import hold_attention
from seq2seq_serve.server.service.seq2seq.windows import Decode, decode_window
from seq2seq_serve.server.service.write.responses import estimated_attention_bytes
from seq2seq_serve.server.service.write.word_times import Times, token_times, words_of

_TOKENS_PER_SECOND, _MORE_TOKENS = 20, 20  # the most of a sound; Whisper itself writes at most 15 a second
_MOST_BEFORE = 64  # tokens of the text before a segment with which it is decoded
# An open segment of this length is cut after a stable sentence, or word, as what follows is decoded faster.
_LONG_SECONDS, _TOO_LONG_SECONDS = 12.0, 20.0
_LEAST_PART_SECONDS = 2.0
# What is complete is read before a segment, as far as it is not longer ago, and all of both is not longer
_CONTEXT_SECONDS, _WINDOW_SECONDS, _MOST_PAUSE_SECONDS = 20.0, 28.0, 3.0
_LIVE_BEFORE = 0.5  # of a step of priority
# Sound after a word, with which a decoding is taken for right; and new sound, of which decodings are rare
_FOLLOWED_SECONDS = 1.0
_PAUSE_SECONDS = 0.5
_LEAST_REST_SECONDS = 2.0  # of speech after the last word of a segment, which is decoded by itself
_SENTENCE_ENDS = (".", "?", "!", "。", "？", "！", "…")


def _speaks(samples: Samples, checkpoint: YieldPoint) -> bool:
    """Whether somebody speaks, as far as the server can tell."""
    try:
        return bool(speech(samples, SpeechRules(_PAUSE_SECONDS), checkpoint))
    except MissingVoiceActivityError:
        return True


@dataclass(frozen=True)
class SpokenWord:
    """A word of a target.

    Attributes:
        ids: Its tokens.
        text: With the space and the marks around it.
        begin: In samples of the whole sound.
        end: In samples of the whole sound.
    """

    ids: tuple[int, ...]
    text: str
    begin: int
    end: int

    def message(self) -> pb.Word:
        """Returns it for the caller."""
        begin, end = (round(place / SAMPLE_RATE, 3) for place in (self.begin, self.end))
        return pb.Word(begin_seconds=begin, end_seconds=end, text=self.text)


def ids_of(words: Iterable[SpokenWord]) -> list[int]:
    """Returns the tokens of words."""
    return [token_id for word in words for token_id in word.ids]


class FinishedPart(NamedTuple):
    """A part of the sound that is complete, and is still read before what follows it.

    Attributes:
        begin: In samples of the whole sound.
        words: Its words.
    """

    begin: int
    words: Sequence[SpokenWord]


@dataclass(eq=False)
class Progress:
    """The words of the segment that is transcribed.

    Attributes:
        segment: The segment; None before the first one.
        stable: Its stable words.
        following: What the last decoding wrote after them, if it was good.
        num_heard: The samples of the whole sound that its last decoding heard.
    """

    segment: LiveSegment | None = None
    stable: list[SpokenWord] = field(default_factory=list)
    following: list[SpokenWord] | None = None
    agreement: Agreement = field(default_factory=Agreement)
    num_heard: int = 0


class LiveDecoder:
    """Decodes the segments of one stream, one after the other; a `Decoder`.

    Owned by the stream.

    Args:
        decoding: How each of them is decoded, without times in the target, and when its text is good.
        hearing: What was heard.
        decode: Decodes a request.
        call: The stream's call.
        line: Where its decodings wait for their turn.
        interval: The samples of new speech after which a segment is decoded again.
        record: Is called with the seconds of each decoding, its waiting included.
    """

    def __init__(
        self,
        decoding: Decoding,
        hearing: Hearing,
        decode: Decode,
        call: Call,
        line: DecodingLine,
        interval: int,
        record: Callable[[float], None],
    ) -> None:
        assert decoding.windows is not None
        self._decoding, self._rules = decoding, decoding.windows
        self._hearing, self._sound, self._call = hearing, hearing.sound, call
        self._decode: Decode = partial(decode_short, decode, decoding.model, decoding.windows)
        self._line, self._interval, self._record = line, interval, record
        [(self._name, spec)] = decoding.model.sources.items()
        self._longest_seconds = max_seconds(spec)
        self._said, self._given_start = split_start(decoding.request.start_ids, decoding.model)
        self._start_ids = self._given_start  # with the language, once it is detected
        self._detected_ids = decoding.request.detected_ids
        self._progress = Progress()
        self._context = deque[FinishedPart]()
        # Tokens of a forced prefix. As many may be before it, and a token has to follow.
        self._most_known = decoding.model.max_target_length // 2 - 2

    @property
    def detected_language(self) -> str:
        """As `Decoder.detected_language`."""
        if not self._decoding.request.detected_ids or self._detected_ids:
            return ""
        choice = self._decoding.model.manifest.choices[SOURCE_LANGUAGE]
        place = self._given_start.index(None)
        return next(name for name, its_id in choice.ids.items() if its_id == self._start_ids[place])

    def first_needed(self, begin: int) -> int:
        """As `Decoder.first_needed`."""
        return self._context[0].begin if self._has_context(begin) else begin

    def _has_context(self, begin: int) -> bool:
        """Whether what is complete is read again: neither a long pause is between, nor a dropped sound."""
        if not self._context:
            return False
        end = self._context[-1].words[-1].end
        is_dropped = end < self._hearing.turns.num_dropped <= begin
        return not is_dropped and begin - end <= _MOST_PAUSE_SECONDS * SAMPLE_RATE

    async def run(self, send: SendEvent) -> None:
        """As `Decoder.run`."""
        segments = self._hearing.segments
        while (segment := await self._hearing.next_segment(self._is_due)) is not None:
            if segment is not self._progress.segment:
                self._progress = Progress(segment)
            async with aclosing(self._texts_of(segment)) as events:
                async for event in events:
                    if not segments or segments[0] is not segment:  # its caller has dropped it
                        break
                    await send(event)
            if segment.is_decoded:
                segments.popleft()
            await self._hearing.notify()

    def _is_due(self, segment: LiveSegment) -> bool:
        """Whether a segment is complete, has so much speech that no decoding heard, or a pause after any."""
        before = self._progress.num_heard if segment is self._progress.segment else 0
        num_new = segment.end - max(before, segment.begin)
        return segment.is_complete or num_new >= self._interval or (segment.is_pausing and num_new > 0)

    def _heard(self, segment: LiveSegment) -> int:
        """Returns the end of what is decoded of a segment: sound after its speech may belong to it."""
        if segment.is_complete:
            return segment.end
        return min(self._sound.num_samples, segment.begin + round(self._longest_seconds * SAMPLE_RATE))

    async def _texts_of(self, segment: LiveSegment) -> AsyncGenerator[pb.LiveText | pb.Segment]:
        """Decodes a segment as far as it has come; yields its new text, and what is complete of it."""
        progress, request, asked_at = self._progress, None, time.monotonic()
        async with AsyncExitStack() as place:
            if not self._is_known(segment):
                priority = self._decoding.request.priority
                await place.enter_async_context(self._line.place(self._call.caller.name, priority))
            async with self._hearing.lock:
                begin, end, is_last = segment.begin, self._heard(segment), segment.is_complete
                segment.is_decoded = is_last
                if end <= begin or segment not in self._hearing.segments:  # its caller has dropped it
                    return
                arrival = time.monotonic()
                if not self._is_known(segment):
                    self._shorten_context(begin, end)
                    first = self.first_needed(begin)
                    request = self._request(first, end)
            if request is None:
                following, result = progress.following or [], None
            else:
                following, result = await self._decoded(request, first, end, is_last, place)
                self._record(time.monotonic() - asked_at)
        num_new, progress.num_heard = end - max(progress.num_heard, begin), end
        if is_last:
            num_stable = len(following)
        elif self._repeats([*progress.stable, *following]):
            num_stable, progress.following = 0, None
            progress.agreement.doubt()
        else:
            least = round(_FOLLOWED_SECONDS * SAMPLE_RATE)
            # Of frequent decodings, the next one confirms a word soon, and is more often right.
            latest = end - least if num_new >= least else -1
            num_stable = progress.agreement.agreed(
                [Heard(word.ids, word.text, word.end <= latest) for word in following]
            )
            progress.following = following[num_stable:]
        if num_stable and result is not None and self._detected_ids:
            self._start_ids = result.start_ids[len(result.start_ids) - len(self._start_ids) :]
            self._detected_ids = ()
        new, rest = following[:num_stable], following[num_stable:]
        progress.stable += new
        now = end + round((time.monotonic() - arrival) * SAMPLE_RATE)
        if new or not is_last:
            yield pb.LiveText(
                stable=[word.message() for word in new],
                unstable="".join(word.text for word in rest),
                lag_seconds=round((now - new[-1].end) / SAMPLE_RATE, 3) if new else 0.0,
            )
        if is_last:
            if progress.stable:
                self._context.append(FinishedPart(begin, progress.stable))
                yield self._complete(progress.stable)
            await self._continue(segment, begin, end, has_read_before=request is not None and first < begin)
        elif (num_cut := self._place_of_cut(begin, end)) is not None:
            self._context.append(FinishedPart(begin, progress.stable[:num_cut]))
            yield self._complete(progress.stable[:num_cut])
            cut = progress.stable[num_cut - 1].end
            after = progress.stable[num_cut:] or rest
            if after:
                cut = (cut + max(after[0].begin, cut)) // 2
            del progress.stable[:num_cut]
            cut = min(max(cut // HOP * HOP, begin), end)
            async with self._hearing.lock:
                segment.spans[0] = cut, max(cut, segment.spans[0][1])

    async def _continue(self, segment: LiveSegment, begin: int, end: int, *, has_read_before: bool) -> None:
        """Lets a complete segment, or the rest of it, be decoded once more if its target ended too early.

        A model may end its target at a pause, or after the words that it is forced to write. It does so again
        if it reads the same, so what was complete before is not read any more.
        """
        words = self._progress.stable
        if not words:
            if not has_read_before:
                return
        else:
            cut = words[-1].end // HOP * HOP
            if end - cut < _LEAST_REST_SECONDS * SAMPLE_RATE or cut <= begin:
                return
            async with self._hearing.lock:
                samples = self._sound.samples(cut, end)
            if not await self._call.read(partial(_speaks, samples), len(samples)):
                return
            begin = cut
        while self._context:
            self._leave_out()
        async with self._hearing.lock:
            segment.spans[0] = begin, end
            segment.is_decoded = False
        self._progress = Progress(segment)

    def _is_known(self, segment: LiveSegment) -> bool:
        """Whether the pause at its end was decoded, and two decodings agreed about some of the segment."""
        progress = self._progress
        is_heard = segment.is_complete and segment.end <= progress.num_heard
        return is_heard and bool(progress.stable) and progress.following is not None

    async def _decoded(
        self, request: Request, begin: int, end: int, is_last: bool, place: AsyncExitStack
    ) -> tuple[list[SpokenWord], Result]:
        """Returns the words after the stable ones, none if nobody speaks, and the result they are from.

        The place in the line is given back when the model has written them.
        """
        with ExitStack() as held:
            num_copies = 2 if is_last else 1  # of an attempt, and of the best one before it
            num_bytes = num_copies * estimated_attention_bytes(request, self._decoding)
            await hold_attention(held, self._call, num_bytes)
            if not is_last:
                result = await self._decode(request, False)
            else:
                attempt = await decode_window(request, self._rules, self._decoding.model, self._decode)
                result = attempt.result
                if attempt.is_silent:
                    return [], result
            self._line.record(time.monotonic() - request.arrival)
            await place.aclose()
            return await self._words(request, result, begin, end), result

    def _request(self, begin: int, end: int) -> Request:
        model, template, progress = self._decoding.model, self._decoding.request, self._progress
        said = self._said[-_MOST_BEFORE:]
        before = after_text(said, model, self._rules.hot_ids) if said or self._rules.hot_ids else ()
        known_ids = ids_of(self._known)
        prefix_ids = (*template.prefix_ids, *known_ids)
        seconds = (end - begin) / SAMPLE_RATE
        most = model.max_target_length - len(before) - len(prefix_ids)
        most = min(most, template.max_new_tokens, math.ceil(_TOKENS_PER_SECOND * seconds) + _MORE_TOKENS)
        sources = {self._name: self._sound.log_mel(begin, end, short_window(end - begin, model))}
        return replace(
            template,
            request_id=self._call.request_id,
            sources=sources,
            memory_length=model.manifest.memory.memory_length_of(sources),
            arrival=time.monotonic(),
            deadline=self._call.deadline,
            priority=template.priority - _LIVE_BEFORE,
            max_new_tokens=max(most, 1),
            prefix_ids=prefix_ids,
            draft_ids=progress.agreement.draft_ids,
            start_ids=(*before, *self._start_ids),
            detected_ids=self._detected_ids,
            begin_suppressed_ids=frozenset() if known_ids else template.begin_suppressed_ids,
            attention=True,
            stream=False,
        )

    async def _words(self, request: Request, result: Result, begin: int, end: int) -> list[SpokenWord]:
        """Returns the words of a target after the stable ones."""
        best, model = result.best, self._decoding.model
        num_forced = len(self._decoding.request.prefix_ids)
        times = model.manifest.timestamps
        assert times is not None
        attention = best.attention
        assert attention is not None
        seconds = (end - begin) / SAMPLE_RATE
        step = position_seconds(model)
        work = partial(token_times, attention, best.token_ids, times, seconds, step)
        spoken: Times = await self._call.build(attention.nbytes, work)
        # Without what a model writes now and then although it should not: a time.
        places = [n for n, i in enumerate(best.token_ids) if n >= num_forced and not times.has(i)]
        token_ids = [best.token_ids[place] for place in places]
        words, first = list[SpokenWord](), 0
        latest = self._known[-1].end if self._known else begin
        num_stable_ids = len(request.prefix_ids) - num_forced
        for word in words_of(token_ids, model.target_tokenizer):
            ids, first = tuple(token_ids[first : word.end]), word.end
            if word.end <= num_stable_ids:
                continue
            from_, to = spoken[places[word.first]][0], spoken[places[word.last]][1]
            latest = max(latest, begin + round(from_ * SAMPLE_RATE))
            words.append(
                SpokenWord(ids, word.text, latest, max(latest, min(begin + round(to * SAMPLE_RATE), end)))
            )
            latest = words[-1].end
        return words

    def _repeats(self, words: Sequence[SpokenWord]) -> bool:
        text = "".join(word.text for word in words)
        return compression_ratio(text) > self._rules.max_compression_ratio

    def _complete(self, words: list[SpokenWord]) -> pb.Segment:
        ids = ids_of(words)
        messages = [word.message() for word in words]
        return pb.Segment(
            begin_seconds=messages[0].begin_seconds,
            end_seconds=messages[-1].end_seconds,
            text=self._decoding.model.target_tokenizer.decode(ids),
            token_ids=ids,
            words=messages,
        )

    def _shorten_context(self, begin: int, end: int) -> None:
        """Leaves out the oldest finished parts that are too long ago for a segment."""
        context, longest = self._context, min(_WINDOW_SECONDS, self._longest_seconds)
        if not self._has_context(begin):
            while context:
                self._leave_out()
        while context and (
            len(ids_of(self._known)) > self._most_known
            or begin - context[0].begin > _CONTEXT_SECONDS * SAMPLE_RATE
            or end - context[0].begin > longest * SAMPLE_RATE
        ):
            self._leave_out()

    @property
    def _known(self) -> list[SpokenWord]:
        """All words that are read again: those of what is complete, then the stable ones."""
        return [*chain.from_iterable(part.words for part in self._context), *self._progress.stable]

    def _leave_out(self) -> None:
        part = self._context.popleft()
        if self._rules.is_conditioned:
            self._said = [*self._said, *ids_of(part.words)][-_MOST_BEFORE:]

    def _place_of_cut(self, begin: int, end: int) -> int | None:
        """Returns how many stable words of an open segment are complete; None if it need not be cut."""
        if len(ids_of(self._progress.stable)) > self._most_known // 2:
            return len(self._progress.stable)
        seconds = (end - begin) / SAMPLE_RATE
        if seconds < _LONG_SECONDS:
            return None
        least = begin + _LEAST_PART_SECONDS * SAMPLE_RATE
        stable = self._progress.stable
        ends = [place for place, word in enumerate(stable, start=1) if word.end >= least]
        sentences = [place for place in ends if stable[place - 1].text.rstrip().endswith(_SENTENCE_ENDS)]
        if sentences:
            return sentences[-1]
        return ends[-1] if ends and seconds >= _TOO_LONG_SECONDS else None
