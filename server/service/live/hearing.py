"""The sound of a stream and its segments: one task hears them, and another one decodes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from seq2seq_serve.bundle.audio import SAMPLE_RATE, GrowingSound
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.service.live.turns import LiveSegment, Turns

# Complete segments, and the sound since the beginning of one; beyond them the stream is not read
_MOST_WAITING, _MOST_WAITING_SECONDS = 2, 60.0

Event = pb.SpeechBegan | pb.SpeechEnded | pb.LiveText | pb.Segment
SendEvent = Callable[[Event], Awaitable[None]]


class Hearing:
    """Owned by the stream.

    Args:
        sound: What was heard.
        turns: Finds its segments.

    Attributes:
        lock: Is held while the sound or its segments change, or are read.
        is_complete: Whether no sound follows.
    """

    def __init__(self, sound: GrowingSound, turns: Turns) -> None:
        self.sound, self.turns = sound, turns
        self.segments = turns.segments
        self.lock = asyncio.Lock()
        self.is_complete = False
        self._changed = asyncio.Condition()
        self._is_due: Callable[[], bool] | None = None  # while the decoder waits

    async def notify(self) -> None:
        """Wakes the tasks that wait for a change."""
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Waits until something is true, which is looked at after each change."""
        async with self._changed:
            await self._changed.wait_for(is_true)

    async def next_segment(self, is_due: Callable[[LiveSegment], bool]) -> LiveSegment | None:
        """Returns the oldest segment once it is due to be decoded; None after the last one."""
        segments = self.segments
        self._is_due = lambda: is_due(segments[0]) if segments else self.is_complete
        await self.notify()
        await self.wait_for(self._is_due)
        self._is_due = None
        return segments[0] if segments else None

    async def settled(self) -> None:
        """Waits until nothing has to be decoded before more of the sound comes, as on a simulated clock."""
        await self.wait_for(lambda: self._is_due is not None and not self._is_due())

    def has_room(self) -> bool:
        """Whether more sound may be heard before something is decoded."""
        complete = [segment for segment in self.segments if segment.is_complete]
        if not complete:
            return True
        seconds = (self.sound.num_samples - complete[0].begin) / SAMPLE_RATE
        return len(complete) <= _MOST_WAITING and seconds <= _MOST_WAITING_SECONDS


class Decoder(Protocol):
    """Turns the segments of a stream into text. Owned by the stream."""

    @property
    def detected_language(self) -> str:
        """The language that was detected; empty if none was, or the caller has named it."""

    def first_needed(self, begin: int) -> int:
        """Returns the first sample that is needed for a segment that begins there or later."""

    async def run(self, send: SendEvent) -> None:
        """Decodes segments and sends their texts until the sound is complete, and all of it decoded."""
