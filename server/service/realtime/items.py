"""The items of a session, one for each turn, and their events. Knows no sockets and no models."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from seq2seq_serve.server.service.realtime.settings import Settings

_TOLERANCE_SECONDS = 0.011  # segments begin at multiples of 10 ms
_TRANSCRIPTION = "conversation.item.input_audio_transcription"

Put = Callable[..., None]  # an event: its type and fields


def new_id(kind: str) -> str:
    """Returns a new name of an object of a kind."""
    return f"{kind}_{uuid.uuid4().hex[:24]}"


@dataclass(eq=False)
class Item:
    """A part of the sound that the caller gets the text of.

    Attributes:
        begin: Where it begins, in seconds of the session.
        end: Where it ends; None while it grows.
        heard_end: The sound up to there must be transcribed before it is complete, in seconds of the stream.
        text: Its text so far.
        has_gap: Whether the next text belongs to another segment.
    """

    begin: float
    end: float | None = None
    heard_end: float = 0.0
    text: str = ""
    has_gap: bool = False
    item_id: str = field(default_factory=lambda: new_id("item"))


class Items:
    """The items that are not complete, the oldest first. Only the last one may grow. Owned by the session.

    Args:
        put: Sends an event.
        is_older: Whether the caller uses the older form of the API.

    Attributes:
        stream_begin: Where the present stream begins, in seconds of the session.
        buffer_begin: Where the sound begins that no item has, in seconds of the session.
    """

    def __init__(self, put: Put, is_older: Callable[[], bool]) -> None:
        self._put, self._is_older = put, is_older
        self._items = deque[Item]()
        self._previous_id: str | None = None
        self.stream_begin = self.buffer_begin = 0.0

    @property
    def growing(self) -> Item | None:
        """The item that grows, if one does."""
        return self._items[-1] if self._items and self._items[-1].end is None else None

    def begin_speech(self, seconds: float, settings: Settings) -> None:
        """Reports that somebody begins to speak, at a second of the stream."""
        padding = settings.prefix_padding_ms / 1000
        item = self.growing or self._new()
        item.begin = max(self.stream_begin + seconds - padding, self.buffer_begin)
        self._put("input_audio_buffer.speech_started", audio_start_ms=_ms(item.begin), item_id=item.item_id)

    def end_speech(self, seconds: float, heard_seconds: float, settings: Settings) -> Item:
        """Reports that nobody speaks any more, and ends the item, which is returned.

        Args:
            seconds: The end of speech, in seconds of the stream.
            heard_seconds: The sound of the stream that was heard.
            settings: Those of the stream.
        """
        item = self.growing or self._new()
        end = self.stream_begin + min(seconds + settings.silence_duration_ms / 1000, heard_seconds)
        self._put("input_audio_buffer.speech_stopped", audio_end_ms=_ms(end), item_id=item.item_id)
        self._end(item, end, seconds)
        return item

    def commit(self, end: float, heard_seconds: float) -> Item:
        """Ends the item that grows, or a new one with the sound that no item has; returns it.

        Args:
            end: The sound that came, in seconds of the session.
            heard_seconds: The sound of the stream that must be transcribed before the item is complete.
        """
        item = self.growing or self._new()
        self._end(item, end, heard_seconds)
        return item

    def clear(self, end: float) -> None:
        """Forgets the item that grows, and all sound that came."""
        if self.growing is not None:
            self._items.pop()
        self.buffer_begin = end

    def add(self, text: str) -> None:
        """Sends new text of the oldest item."""
        if not text:
            return
        if not self._items:  # the caller has committed, and the speech goes on
            self._new()
        item = self._items[0]
        if not item.text:
            text = text.lstrip()
        elif item.has_gap and text[:1].strip():
            text = f" {text}"
        item.has_gap = item.has_gap and not text
        item.text += text
        if text:
            self._put(f"{_TRANSCRIPTION}.delta", item_id=item.item_id, content_index=0, delta=text)

    def end_segment(self) -> None:
        """The next text belongs to another segment."""
        if self._items:
            self._items[0].has_gap = True

    def complete(self, transcribed_seconds: float) -> None:
        """Reports the text of each item that has ended and is transcribed.

        Args:
            transcribed_seconds: The sound of the stream of which nothing has to be transcribed any more.
        """
        while self._items and (item := self._items[0]).end is not None:
            if item.heard_end > transcribed_seconds + _TOLERANCE_SECONDS:
                return
            self._items.popleft()
            self._put(
                f"{_TRANSCRIPTION}.completed",
                item_id=item.item_id,
                content_index=0,
                transcript=item.text,
                usage={"type": "duration", "seconds": round(item.end - item.begin, 3)},
            )

    def end_stream(
        self, heard_seconds: float, transcribed_seconds: float, error: dict[str, Any] | None
    ) -> None:
        """Ends the stream: completes its items, or reports that they have failed.

        Args:
            heard_seconds: The sound of the stream that was heard.
            transcribed_seconds: As for `complete`.
            error: Why the others have failed; None if all are transcribed.
        """
        if self.growing is not None:
            self.commit(self.stream_begin + heard_seconds, heard_seconds)
        self.complete(transcribed_seconds)
        for item in self._items:
            self._put(f"{_TRANSCRIPTION}.failed", item_id=item.item_id, content_index=0, error=error)
        self._items.clear()
        self.stream_begin += heard_seconds

    def _new(self) -> Item:
        item = Item(self.buffer_begin)
        self._items.append(item)
        return item

    def _end(self, item: Item, end: float, heard_end: float) -> None:
        item.end, item.heard_end, self.buffer_begin = end, heard_end, end
        place: dict[str, Any] = {"item_id": item.item_id, "previous_item_id": self._previous_id}
        self._put("input_audio_buffer.committed", **place)
        content = {
            "id": item.item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        for name in ("created",) if self._is_older() else ("added", "done"):
            self._put(f"conversation.item.{name}", previous_item_id=self._previous_id, item=content)
        self._previous_id = item.item_id


def _ms(seconds: float) -> int:
    return max(round(seconds * 1000), 0)
