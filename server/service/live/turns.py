"""Cuts a sound that comes piece by piece into segments: at pauses, or where it is quiet. Knows no text.

Places are samples from the beginning of the sound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, GrowingSound, Samples, Span, quietest
from seq2seq_serve.server.runner.voice_activity import SpeechRules, SpeechStream

_LEAST_SHARE = 0.66  # of the longest segment, after which a cut is looked for
# The farthest beginning of a further span, as a multiple of the longest segment: its pauses are kept, too.
_MOST_APART = 2


@dataclass(frozen=True)
class TurnRules:
    """When a segment begins and ends.

    Attributes:
        speech: Where speech begins and ends; None takes all sound for speech.
        margin_seconds: The sound after speech that belongs to it, at most the pause after which it ends.
        joins: Whether a segment has as many spans of speech as fit, without the pauses between them.
    """

    speech: SpeechRules | None
    margin_seconds: float
    joins: bool = False


@dataclass(eq=False)
class LiveSegment:
    """A part of the sound that is transcribed at once.

    Attributes:
        spans: Of the sound, with margins, in order. The last one is open until the segment ends: its end is
            that of the speech so far, and sound after it may belong to it.
        is_complete: Whether nothing is added to it any more.
        is_decoded: Whether it was decoded after that.
        is_pausing: Whether nobody has spoken for as long as its margin: this may be its end.
    """

    spans: list[Span]
    is_complete: bool = False
    is_decoded: bool = False
    is_pausing: bool = False

    @property
    def begin(self) -> int:
        """Where it begins."""
        return self.spans[0][0]

    @property
    def end(self) -> int:
        """Where it ends so far."""
        return self.spans[-1][1]


@dataclass(frozen=True)
class SpeechChange:
    """Somebody begins or ends to speak.

    Attributes:
        place: Where.
        is_begin: Whether somebody begins.
    """

    place: int
    is_begin: bool


class Turns:
    """Finds the segments of a sound. The pieces in which it comes do not change them.

    Owned by the stream of a caller.

    Args:
        sound: Gets what is heard.
        rules: When a segment begins and ends.
        longest: The samples that the model reads at once.

    Attributes:
        segments: Those that are not transcribed, the oldest first; the decoder removes them.
        num_dropped: No text may be about what was heard before this sample after the last segment before it.

    Raises:
        MissingVoiceActivityError: The model of voice activity is not installed.
    """

    def __init__(self, sound: GrowingSound, rules: TurnRules, longest: int) -> None:
        self.segments = deque[LiveSegment]()
        self.num_dropped = 0
        self._sound, self._rules = sound, rules
        self._longest = longest - longest % HOP
        self._speech = None if rules.speech is None else SpeechStream(rules.speech)
        self._padding = 0 if rules.speech is None else int(rules.speech.margin_seconds * SAMPLE_RATE)
        self._margin = int(rules.margin_seconds * SAMPLE_RATE)
        self._least_begin = 0  # a segment begins there or later
        self._begin: int | None = None  # of the present span, with a margin

    def hear(self, samples: Samples) -> Iterator[SpeechChange]:
        """Yields the changes that the next samples show."""
        self._sound.push(samples)
        if self._speech is None:
            if self._begin is None and len(samples):
                self._begin_span(self._least_begin)
        else:
            yield from self._change(self._speech.push(samples))
            if self._begin is None and self._speech.begin is not None:  # a segment was finished in it
                self._begin_span(self._least_begin)
        # No span can begin earlier any more: what is heard has been searched but for its last chunk.
        if self._begin is None and self._is_far(self._sound.num_samples - self._padding - SAMPLE_RATE):
            self._complete()
        if self._begin is not None:
            heard = self._sound.num_samples
            latest = heard if self._speech is None else self._with_margin(self._speech.latest)
            self._extend(max(latest, self._begin))
            self.segments[-1].is_pausing = latest < heard // HOP * HOP

    def finish_segment(self) -> Iterator[SpeechChange]:
        """Completes the present segment: what was heard so far is its end. Yields the changes until there."""
        if self._speech is not None:
            yield from self._change(self._speech.flush())
        if self._begin is not None:
            self._extend(self._sound.num_samples)
            self._least_begin = self._sound.num_samples // HOP * HOP
            self._begin = None
        self._complete()

    def drop_segment(self) -> tuple[()]:
        """Forgets the present segment, and what was heard of it; there are no changes."""
        if self.segments and not self.segments[-1].is_complete:
            self.segments.pop()
        self._begin = None
        self._least_begin = self.num_dropped = self._sound.num_samples // HOP * HOP
        return ()

    def finish(self) -> Iterator[SpeechChange]:
        """Yields the last change; the sound has ended."""
        if self._speech is not None:
            yield from self._change(self._speech.finish())
        yield from self.finish_segment()

    def _change(self, changes: Iterable[tuple[Span | None, int | None]]) -> Iterator[SpeechChange]:
        for ended, begin in changes:
            if ended is not None:
                yield from self._end_speech(min(ended[1], self._sound.num_samples))
            if begin is not None and self._begin is None:
                self._begin_span(begin - self._padding)
                yield SpeechChange(max(begin, self._least_begin), is_begin=True)

    def _begin_span(self, begin: int) -> None:
        self._begin = max(begin, self._least_begin) // HOP * HOP
        span = self._begin, self._begin
        if self._is_far(self._begin):
            self._complete()
        if not self.segments or self.segments[-1].is_complete:
            self.segments.append(LiveSegment([span]))
        else:
            self.segments[-1].spans.append(span)

    def _is_far(self, begin: int) -> bool:
        """Whether a span that begins there is too far from the present segment's beginning to be in it."""
        return bool(self.segments) and begin - self.segments[-1].begin > _MOST_APART * self._longest

    def _end_speech(self, end: int) -> Iterator[SpeechChange]:
        if self._begin is None:  # it was finished before
            return
        end_with_margin = max(self._with_margin(end), self._begin)
        self._extend(end_with_margin)
        self._begin, self._least_begin = None, end_with_margin // HOP * HOP
        yield SpeechChange(end, is_begin=False)
        if not self._rules.joins:
            self._complete()

    def _with_margin(self, end: int) -> int:
        return min((end + self._margin) // HOP * HOP, self._sound.num_samples)

    def _extend(self, end: int) -> None:
        """Moves the end of the present span; a segment that would be too long is completed before.

        Whoever transcribes looks at the segments meanwhile: none is ever without a span.
        """
        segment = self.segments[-1]
        *spans, (begin, _) = segment.spans
        num_before = sum(one_end - one for one, one_end in spans)
        while num_before + end - begin > self._longest:
            cut = begin
            if not spans:
                samples = self._sound.samples(begin, begin + self._longest)
                place = quietest(samples, int(self._longest * _LEAST_SHARE), self._longest)
                cut = begin + place // HOP * HOP
                spans = [(begin, cut)]
            segment.spans = spans
            segment.is_complete = True
            segment = LiveSegment([(cut, cut)])
            self.segments.append(segment)
            spans, num_before, begin = [], 0, cut
        segment.spans = [*spans, (begin, end)]
        self._begin = begin

    def _complete(self) -> None:
        if self.segments:
            self.segments[-1].is_complete = True
