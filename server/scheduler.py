"""Decides who waits, who runs and who leaves: no tensors, no clock, no threads, only small records.

The engine calls `schedule`, runs the plan, and hands the result to `record`.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from server.errors import Cancelled, DeadlineExceeded, EngineFailed, ServerError, Unavailable
from server.records import FinishReason, Move, Request, Sequence, StepPlan, StepResult
from server.slots import Slots


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a turn.

    Attributes:
        max_encode_tokens: Padded source tokens that one encode call may hold, so that running streams do not
            stall behind newcomers. A single longer source is still encoded, alone.
        aging_seconds: Waiting that outweighs one level of priority.
    """

    max_encode_tokens: int = 1024
    aging_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.max_encode_tokens < 1:
            raise ValueError(f"max_encode_tokens is {self.max_encode_tokens}, and must be at least 1")
        if self.aging_seconds <= 0:
            raise ValueError(f"aging_seconds is {self.aging_seconds}, and must be above 0")


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence that just left, and the row that still holds its memory until the next plan's moves."""

    sequence: Sequence
    row: int | None
    error: ServerError | None


_Heap = list[tuple[float, int, Sequence]]
_End = tuple[Sequence, FinishReason, ServerError | None]


class Scheduler:
    """Waiting, running and finished sequences, and the moves that the next plan owes.

    Owned by the engine; used on its thread only.

    Args:
        slots: The rows to give out.
        start_id: What a sequence is fed first.
        eos_id: What ends one.
        limits: What bounds a turn.
    """

    def __init__(
        self, slots: Slots, *, start_id: int, eos_id: int, limits: SchedulerLimits | None = None
    ) -> None:
        self.slots = slots
        self._start_id = start_id
        self._eos_id = eos_id
        self._limits = limits or SchedulerLimits()
        self._sequences: dict[Request, Sequence] = {}
        self._waiting: _Heap = []  # by urgency, then order of arrival
        self._deadlines: _Heap = []
        self._order = itertools.count()
        self._moves: tuple[Move, ...] = ()

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self.slots.rows)

    @property
    def has_work(self) -> bool:
        """Whether another turn has anything to do."""
        return bool(self._sequences)

    def add(self, request: Request) -> None:
        """A new request, to wait for a slot."""
        prefix = request.prefix_ids
        sequence = Sequence(
            request,
            next_token_id=prefix[-1] if prefix else self._start_id,
            source_length=request.source_length,
            token_ids=list(prefix),
            is_plain=request.is_plain,
            text=request.follow() if request.follow else None,
        )
        if sequence.text is not None:
            sequence.text.push(prefix)
        self._sequences[request] = sequence
        # A level of priority is worth `aging_seconds` of waiting, so who has waited longer rises by itself.
        urgency = request.arrival + request.priority * self._limits.aging_seconds
        heapq.heappush(self._waiting, (urgency, next(self._order), sequence))
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, next(self._order), sequence))

    def cancel(self, request: Request, *, is_expired: bool) -> list[Finished]:
        """End a request that nobody waits for any more; nothing happens where it has ended already."""
        sequence = self._sequences.get(request)
        if sequence is None:
            return []
        if is_expired:
            return self._finish([(sequence, FinishReason.DEADLINE, _late())])
        return self._finish([(sequence, FinishReason.CANCELLED, Cancelled("the caller cancelled"))])

    def expire(self, now: float) -> list[Finished]:
        """End every request whose deadline has passed."""
        late: list[_End] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.finish_reason is None:
                late.append((sequence, FinishReason.DEADLINE, _late()))
        return self._finish(late)

    def schedule(self, now: float) -> StepPlan:
        """Admit who fits, and say what the next step runs."""
        admitted: list[Sequence] = []
        longest = 0
        while self._waiting and len(admitted) < self.slots.num_free:
            sequence = self._waiting[0][2]
            if sequence.finish_reason is None:
                longest = max(longest, sequence.source_length)
                if admitted and longest * (len(admitted) + 1) > self._limits.max_encode_tokens:
                    break
                sequence.admitted_at = now
                admitted.append(sequence)
            heapq.heappop(self._waiting)
        self.slots.add(admitted)
        moves, self._moves = self._moves, ()
        return StepPlan(moves, tuple(admitted), self.slots.rows)

    def record(self, plan: StepPlan, result: StepResult, now: float) -> list[Finished]:
        """Append the step's tokens, and let those go that are complete."""
        done: list[_End] = []
        for sequence in plan.admitted:
            sequence.encode_seconds = result.encode_seconds
            sequence.first_token_at = now
        selected = result.selected
        for row, choice in selected.choices.items():
            plan.rows[row].choices.append(choice)
        for sequence, token_id in zip(plan.rows, selected.token_ids, strict=True):
            sequence.last_token_at = now
            # A scored target is complete before its first step, which it only takes to keep its row.
            if token_id == self._eos_id or sequence.request.is_score:
                done.append((sequence, FinishReason.EOS, None))
                continue
            sequence.token_ids.append(token_id)
            sequence.next_token_id = token_id
            if sequence.text is not None and sequence.text.stops_with(token_id):
                done.append((sequence, FinishReason.STOP, None))
            elif sequence.num_generated >= sequence.request.max_new_tokens:
                done.append((sequence, FinishReason.LENGTH, None))
        return self._finish(done)

    def fail(self, sequences: tuple[Sequence, ...]) -> list[Finished]:
        """End the sequences of an encode or a step that raised."""
        error = EngineFailed("the engine failed on the step that ran this request")
        return self._finish([(sequence, FinishReason.FAILED, error) for sequence in sequences])

    def abandon(self) -> list[Finished]:
        """End everything, because the engine stops."""
        error = Unavailable("the server stopped before the target was complete")
        return self._finish([(sequence, FinishReason.FAILED, error) for sequence in self._sequences.values()])

    def _finish(self, ends: list[_End]) -> list[Finished]:
        if not ends:
            return []
        finished = []
        for sequence, reason, error in ends:
            sequence.finish_reason = reason
            del self._sequences[sequence.request]
            finished.append(Finished(sequence, sequence.row, error))
        # Moves that a plan has not carried out yet come before those that close the new holes; each chain of
        # moves is kept in order.
        self._moves += self.slots.remove([end[0] for end in ends if end[0].row is not None])
        for heap in (self._waiting, self._deadlines):
            self._forget_finished(heap)
        return finished

    def _forget_finished(self, heap: _Heap) -> None:
        """Drop who has finished from a heap once they are most of it: each costs O(1) over time."""
        if len(heap) > 2 * len(self._sequences):
            heap[:] = [entry for entry in heap if entry[2].finish_reason is None]
            heapq.heapify(heap)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the target was complete")
