"""Decides who waits, who runs and who leaves: no tensors, no clock, no threads, only small records.

The engine calls `schedule`, runs the plan, and hands the result to `record`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from server.errors import Cancelled, DeadlineExceeded, EngineFailed, ServerError
from server.records import (
    Alignment,
    Array,
    FinishReason,
    Hypothesis,
    Move,
    Request,
    Search,
    Sequence,
    StepPlan,
    StepResult,
)
from server.search import Fork, abandon, branch, extend, note, start
from server.slots import Slots


@dataclass(frozen=True)
class SchedulerLimits:
    """What bounds a turn.

    Attributes:
        max_encode_tokens: Padded source tokens that one encode call may hold, and padded prefix tokens that
            are filled into caches at once. A single longer request is still admitted, alone.
        max_encode_tokens_beside: The same while others run, so that these do not stall behind newcomers.
        max_align_tokens: Target positions of complete requests whose attention a turn computes, about: a call
            counts as some more, and has at most as many positions.
        aging_seconds: Waiting that outweighs one level of priority.
    """

    max_encode_tokens: int = 1024
    max_encode_tokens_beside: int = 128
    max_align_tokens: int = 64
    aging_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_encode_tokens", "max_encode_tokens_beside", "max_align_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.aging_seconds <= 0:
            raise ValueError(f"aging_seconds is {self.aging_seconds}, and must be above 0")


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that just left."""

    search: Search
    error: ServerError | None


@dataclass(eq=False, slots=True)
class _Owed:
    """The alignments that a complete request waits for.

    Attributes:
        row: Keeps its memory; its tokens are the positions that are done of the first of `fed`.
        fed: By the place of a hypothesis what the decoder was fed, of those that are not done.
    """

    row: Sequence
    fed: dict[int, tuple[int, ...]]


_ALIGN_CALL_TOKENS = 32  # that would take about as long as a call by itself
_Heap = list[tuple[float, int, Search]]
_End = tuple[Search, FinishReason, ServerError | None]


class Scheduler:
    """Waiting, running and finished requests, and the moves that the next plan owes.

    Owned by the engine; used on its thread only.

    Args:
        slots: The rows to give out.
        start_id: What a sequence is fed first.
        eos_id: What ends one.
        limits: What bounds a turn.

    Attributes:
        running: The requests that have slots, in the order of their admission.
    """

    def __init__(
        self, slots: Slots, *, start_id: int, eos_id: int, limits: SchedulerLimits | None = None
    ) -> None:
        self.slots = slots
        self.running: dict[Request, Search] = {}
        self._start_id = start_id
        self._eos_id = eos_id
        self._limits = limits or SchedulerLimits()
        self._searches: dict[Request, Search] = {}
        self._waiting: _Heap = []  # by urgency, then order of arrival
        self._deadlines: _Heap = []
        self._order = itertools.count()
        self._moves: tuple[Move, ...] = ()
        self._owed: dict[Search, _Owed] = {}  # the oldest first

    @property
    def has_work(self) -> bool:
        """Whether another turn has anything to do."""
        return bool(self._searches)

    def add(self, request: Request) -> None:
        """A new request, to wait for its slots."""
        search = self._searches[request] = start(request, self._start_id)
        # A level of priority is worth `aging_seconds` of waiting, so who has waited longer rises by itself.
        urgency = request.arrival + request.priority * self._limits.aging_seconds
        heapq.heappush(self._waiting, (urgency, next(self._order), search))
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, next(self._order), search))

    def cancel(self, request: Request, *, is_expired: bool) -> list[Finished]:
        """End a request that nobody waits for any more; nothing happens where it has ended already."""
        search = self._searches.get(request)
        if search is None:
            return []
        if is_expired:
            return self._abandon([(search, FinishReason.DEADLINE, _late())])
        return self._abandon([(search, FinishReason.CANCELLED, Cancelled("the caller cancelled"))])

    def expire(self, now: float) -> list[Finished]:
        """End every request whose deadline has passed."""
        late: list[_End] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            search = heapq.heappop(self._deadlines)[2]
            if search.finish_reason is None:
                late.append((search, FinishReason.DEADLINE, _late()))
        return self._abandon(late)

    def schedule(self, now: float) -> StepPlan:
        """Admit who fits, and say what the next step runs. Who needs many slots holds up those behind."""
        admitted: list[Sequence] = []
        longest, limits = 0, self._limits
        max_tokens = limits.max_encode_tokens_beside if self.slots.rows else limits.max_encode_tokens
        while self._waiting:
            search = self._waiting[0][2]
            request = search.request
            if search.finish_reason is None:
                longest = max(longest, request.source_length, len(request.prefix_ids))
                is_full = longest * (len(admitted) + 1) > max_tokens
                if request.num_slots > self.slots.num_free or (admitted and is_full):
                    break
                search.admitted_at = now
                search.num_slots = request.num_slots
                self.slots.reserve(search.num_slots)
                self.running[request] = search
                admitted += search.rows
            heapq.heappop(self._waiting)
        self.slots.add(admitted)
        moves, self._moves = self._moves, ()
        return StepPlan(moves, tuple(admitted), self.slots.rows, tuple(self._plan_alignments()))

    def record(self, plan: StepPlan, result: StepResult, now: float) -> list[Finished]:
        """Let every row go on by what the step selected, and those leave that are complete.

        What raises for one request ends that one only.
        """
        for sequence in plan.admitted:
            sequence.search.encode_seconds = result.encode_seconds
            sequence.search.first_token_at = now
        selected = result.selected
        failed = {plan.rows[row].search: error for row, error in selected.failures.items()}
        ends = self._record_alignments(plan, result.attention, failed)
        leavers = [self._owed.pop(search).row for search, _, _ in ends]
        forking: dict[Search, None] = {}
        for row, (sequence, token_id) in enumerate(zip(plan.rows, selected.token_ids, strict=True)):
            search = sequence.search
            if search in failed or not sequence.num_branches:
                continue
            search.last_token_at = now
            if sequence.num_branches > 1:
                forking[search] = None
                continue
            try:
                if row in selected.branches:
                    note(sequence, selected.branches[row])
                if extend(sequence, token_id, self._eos_id):
                    leavers.append(sequence)
            except Exception as error:
                failed[search] = error
        forks: list[Fork] = []
        for search in forking:
            before = search.rows
            try:
                forks += branch(search, selected.branches, self._eos_id)
            except Exception as error:
                failed[search] = error
            else:
                leavers += [sequence for sequence in before if sequence not in search.rows]
        leavers = [sequence for sequence in leavers if sequence.search not in failed]
        complete = {sequence.search: sequence for sequence in leavers if sequence.num_branches}
        for search, last in complete.items():
            if search.rows:
                continue
            if not search.ended:
                no_numbers = EngineFailed("the model's scores of the next token are not numbers")
                ends.append((search, FinishReason.FAILED, no_numbers))
            elif search.request.attention:
                leavers.remove(last)
                self._owe_alignments(search, last)
            else:
                ends.append((search, _reason(search), None))
        finished = self._leave(leavers, ends, forks)
        return finished + self._abandon([_broken(search, error) for search, error in failed.items()])

    def _owe_alignments(self, search: Search, row: Sequence) -> None:
        """Keep a complete request, and of its rows one, until its alignments have been computed."""
        fed = {place: self._fed(hypothesis) for place, hypothesis in sorted(search.ended.items())}
        self._owed[search] = _Owed(row, fed)
        row.token_ids, row.next_token_id = [], self._start_id
        row.num_branches, row.is_plain = 0, True
        self.slots.reserve(1 - search.num_slots)
        search.num_slots = 1

    def _fed(self, hypothesis: Hypothesis) -> tuple[int, ...]:
        """What the decoder was fed for a hypothesis: the last token only where the end of sequence came."""
        fed = (self._start_id, *hypothesis.token_ids)
        return fed if hypothesis.finish_reason is FinishReason.EOS else fed[:-1]

    def _plan_alignments(self) -> Iterator[Alignment]:
        """At least one piece, and more while the turn's bound is not reached; the oldest requests first.

        The pieces of a hypothesis are the same whoever else is there.
        """
        longest = num_left = self._limits.max_align_tokens
        for owed in self._owed.values():
            for place, fed in owed.fed.items():
                done = len(owed.row.token_ids)
                while done < len(fed):
                    if num_left <= 0:
                        return
                    piece = Alignment(owed.row, place, done, fed[done : done + longest])
                    done += len(piece.target_ids)
                    num_left -= len(piece.target_ids) + _ALIGN_CALL_TOKENS
                    # The step, which runs this row like the others, writes where the next piece will.
                    owed.row.token_ids = list(fed[:done]) if done < len(fed) else []
                    yield piece

    def _record_alignments(
        self, plan: StepPlan, attention: tuple[Array | Exception, ...], failed: dict[Search, Exception]
    ) -> list[_End]:
        """Keep what was computed; returns the requests that have all of it."""
        ends: list[_End] = []
        for piece, weights in zip(plan.alignments, attention, strict=True):
            search = piece.row.search
            if isinstance(weights, Exception):
                failed[search] = weights
                continue
            if search in failed:
                continue
            search.alignments.setdefault(piece.place, []).append(weights)
            fed = self._owed[search].fed
            if piece.first_position + len(piece.target_ids) == len(fed[piece.place]):
                del fed[piece.place]
            if not fed:
                ends.append((search, _reason(search), None))
        return ends

    def fail(self, sequences: tuple[Sequence, ...]) -> list[Finished]:
        """End the requests of an encode or a step that raised."""
        error = EngineFailed("the engine failed on the step that ran this request")
        searches = dict.fromkeys(sequence.search for sequence in sequences)
        return self._abandon([(search, FinishReason.FAILED, error) for search in searches])

    def abandon(self, error: ServerError) -> list[Finished]:
        """End everything."""
        return self._abandon([(search, FinishReason.FAILED, error) for search in self._searches.values()])

    def _abandon(self, ends: list[_End]) -> list[Finished]:
        ending = {search for search, _, _ in ends}
        # Not the searches' own rows: after a failure amid a change these may say something else.
        leavers = [sequence for sequence in self.slots.rows if sequence.search in ending] if ending else []
        for search, reason, _ in ends:
            self._owed.pop(search, None)
            abandon(search, reason)
        return self._leave(leavers, ends)

    def _leave(
        self, leavers: list[Sequence], ends: list[_End], forks: list[Fork] | None = None
    ) -> list[Finished]:
        """Take rows out, give forks theirs, and end requests, of which no row is left."""
        finished = []
        for search, reason, error in ends:
            search.finish_reason = reason
            del self._searches[search.request]
            finished.append(Finished(search, error))
        # Moves that a plan has not carried out yet come before those that close the new holes, and these
        # before those of the forks, whose parents may have been moved: each chain of moves is kept in order.
        self._moves += self.slots.remove(leavers)
        if forks:
            newcomers = [fork.child for fork in forks if fork.child.row is None]
            self.slots.add(newcomers)
            self._moves += tuple(_copy(fork, is_new=fork.child in newcomers) for fork in forks)
        for search, _, _ in ends:
            if self.running.pop(search.request, None) is not None:
                self.slots.reserve(-search.num_slots)
        if ends:
            for heap in (self._waiting, self._deadlines):
                self._forget_finished(heap)
        return finished

    def _forget_finished(self, heap: _Heap) -> None:
        """Drop who has finished from a heap once they are most of it: each costs O(1) over time."""
        if len(heap) > 2 * len(self._searches):
            heap[:] = [entry for entry in heap if entry[2].finish_reason is None]
            heapq.heapify(heap)


def _copy(fork: Fork, *, is_new: bool) -> Move:
    parent, child = fork.parent, fork.child
    assert parent.row is not None
    assert child.row is not None
    source_length = child.source_length if is_new else 0
    return Move(parent.row, child.row, child.cache_length, source_length, fork.num_shared)


def _reason(search: Search) -> FinishReason:
    return search.ended[min(search.ended)].finish_reason


def _broken(search: Search, cause: Exception) -> _End:
    error = EngineFailed("the engine failed on this request")
    error.__cause__ = cause
    return search, FinishReason.FAILED, error


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the target was complete")
