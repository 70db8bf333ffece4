"""A call while it is handled, of a program that has the model in its own process.

`server.service.calls.RemoteCall` is that of a client.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from seq2seq_serve.server.service.fair_thread import YieldPoint
from seq2seq_serve.server.service.pace import Pace
from seq2seq_serve.server.service.shares import Room, Shares
from seq2seq_serve.server.system.threads import in_thread
from seq2seq_serve.server.telemetry.record import CallRecord

_Built = TypeVar("_Built")

ON_THE_LOOP_BYTES = 2_000  # of text: a millisecond or two
SHORT_BYTES = 32_000
# A byte of text takes about as long to read as this many bytes of a file or tensor, and as many pixels.
BYTES_PER_TEXT_BYTE = 64
# Of text that takes about as long to read as a term or a placeholder, beside its own bytes
BYTES_PER_TERM = 64
SMALL_ANSWER_BYTES = 2**16  # built in about a millisecond


@dataclass(kw_only=True)
class Call(CallRecord):
    """A call whose caller waits for ever, and for which nothing is bounded. Owned by its handler.

    Attributes:
        is_accepted: Whether those of its requests that are not with an engine yet are finished although the
            server drains or the queue is full.
        pace: Gives it its turns among other calls, if it is one of the requests of a call.
    """

    is_accepted: bool = False
    pace: Pace | None = None

    def is_expired(self) -> bool:
        """Whether the caller has stopped waiting by now."""
        return False

    def check_answer_bytes(self, num_bytes: int) -> None:
        """Refuses an answer that is too long for the caller; raises InvalidRequest."""

    def holding(self, _num_bytes: int, _num_attention_bytes: int = 0) -> AbstractContextManager[None]:
        """Counts memory, and that of attention, until the block ends; raises Overloaded if it is too much."""
        return nullcontext()

    def hold(self, _num_bytes: int) -> None:
        """Counts memory until the call has its answer; raises Overloaded if it is too much."""

    async def room(self, _num_bytes: int) -> Room:
        """Counts the memory of arrays before they are read; waits for room, or raises Overloaded."""
        return Room(Shares(math.inf, ""), self.caller.name, 0)

    async def read(
        self, work: Callable[[YieldPoint], _Built], num_bytes: int, *, num_file_bytes: int | None = None
    ) -> _Built:
        """Returns the result of `work`, which reads sources; files and what is large, in a thread.

        Args:
            work: As for `FairThreads.run`.
            num_bytes: The bytes of text that take as long to read as the sources.
            num_file_bytes: The memory that it takes until it ends to decode files, some of which take far
                longer than their headers say; None without files.
        """
        if num_bytes <= ON_THE_LOOP_BYTES and num_file_bytes is None:
            return work(_ignore_time)
        return await in_thread(partial(work, _ignore_time))

    async def build(self, num_bytes: int, work: Callable[[YieldPoint], _Built]) -> _Built:
        """Returns the result of `work`, about `num_bytes` long. A large one is built in a thread."""
        if num_bytes <= SMALL_ANSWER_BYTES:
            return work(_ignore_time)
        return await in_thread(partial(work, _ignore_time))


def _ignore_time() -> None:
    """Work is done to its end."""
