"""Decides which requests wait, run and leave: no tensors, no clock, no threads, only small records.

The engine calls `schedule`, runs the plan, and hands the result to `record`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from server.backlog import Backlog
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
    """

    max_encode_tokens: int = 1024
    max_encode_tokens_beside: int = 128
    max_align_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("max_encode_tokens", "max_encode_tokens_beside", "max_align_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that just left."""

    search: Search
    error: ServerError | None


@dataclass(eq=False, slots=True)
class _Owed:
    """The alignments that a complete request waits for.

    Attributes:
        row: The row that keeps its memory. Its tokens are those of the first of `fed` whose attention is
            done.
        fed: The ids that the decoder was fed, by the place of each hypothesis that is not done.
    """

    row: Sequence
    fed: dict[int, tuple[int, ...]]


_ALIGN_CALL_TOKENS = 32  # that would take about as long as a call by itself
_End = tuple[Search, FinishReason, ServerError | None]


class Scheduler:
    """Waiting, running and finished requests, and the moves that the next plan owes.

    Owned by the engine; used on its thread only.

    Args:
        slots: The rows to give out.
        backlog: The requests that wait for them.
        start_id: What a sequence is fed first.
        eos_id: What ends one.
        limits: What bounds a turn.

    Attributes:
        running: The requests that have slots, in the order of their admission.
        num_turns: Calls of `schedule`.
    """

    def __init__(
        self,
        slots: Slots,
        backlog: Backlog,
        *,
        start_id: int,
        eos_id: int,
        limits: SchedulerLimits | None = None,
    ) -> None:
        self.slots = slots
        self.running: dict[Request, Search] = {}
        self.num_turns = 0
        self._backlog = backlog
        self._start_id = start_id
        self._eos_id = eos_id
        self._limits = limits or SchedulerLimits()
        self._moves: tuple[Move, ...] = ()
        self._owed: dict[Search, _Owed] = {}  # the oldest first

    @property
    def has_work(self) -> bool:
        """Whether another turn has anything to do."""
        return bool(self.running) or self._backlog.has_work

    def cancel(self, request: Request, *, is_expired: bool) -> list[Finished]:
        """End a request whose caller has left; nothing happens if it has ended already."""
        reason = FinishReason.DEADLINE if is_expired else FinishReason.CANCELLED
        error = _late() if is_expired else Cancelled("the caller cancelled")
        if request in self.running:
            return self._abandon([(self.running[request], reason, error)])
        return [_turned_away(request, reason, error)] if self._backlog.remove(request) else []

    def expire(self, now: float) -> list[Finished]:
        """End every request whose deadline has passed, or that was displaced from the queue."""
        late: list[_End] = [
            (search, FinishReason.DEADLINE, _late())
            for request, search in self.running.items()
            if request.deadline is not None and request.deadline <= now
        ]
        return [
            *self._abandon(late),
            *(_turned_away(request, FinishReason.DEADLINE, _late()) for request in self._backlog.expire(now)),
            *(_turned_away(request, FinishReason.DISPLACED, e) for request, e in self._backlog.displaced()),
        ]

    def schedule(self, now: float) -> StepPlan:
        """Admit the requests that fit, and plan the next step.

        A request that needs many slots holds up those behind it.
        """
        admitted: list[Sequence] = []
        longest, limits = 0, self._limits
        max_tokens = limits.max_encode_tokens_beside if self.slots.rows else limits.max_encode_tokens
        while self.slots.num_free and (request := self._backlog.first(now)) is not None:
            longest = max(longest, request.source_length, len(request.prefix_ids))
            is_full = longest * (len(admitted) + 1) > max_tokens
            if request.num_slots > self.slots.num_free or (admitted and is_full):
                break
            if not self._backlog.take(request):
                continue  # a newcomer has just displaced it
            search = self.running[request] = start(request, self._start_id)
            search.admitted_at, search.admitted_turn = now, self.num_turns
            search.num_slots = request.num_slots
            self.slots.reserve(search.num_slots)
            admitted += search.rows
        self.num_turns += 1
        self.slots.add(admitted)
        moves, self._moves = self._moves, ()
        return StepPlan(moves, tuple(admitted), self.slots.rows, tuple(self._plan_alignments()))

    def record(self, plan: StepPlan, result: StepResult, now: float) -> list[Finished]:
        """Extend every row by the selected tokens, and retire complete ones.

        An exception in the handling of one request ends that request only.
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
        """Returns the ids that the decoder was fed: the last token only where eos came after it."""
        fed = (self._start_id, *hypothesis.token_ids)
        return fed if hypothesis.finish_reason is FinishReason.EOS else fed[:-1]

    def _plan_alignments(self) -> Iterator[Alignment]:
        """Yields at least one piece, and more up to the turn's bound; the oldest requests come first.

        The pieces of a hypothesis do not depend on other requests.
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
        waiting = [*self._backlog.clear(), *(request for request, _ in self._backlog.displaced())]
        return [
            *self._abandon([(search, FinishReason.FAILED, error) for search in self.running.values()]),
            *(_turned_away(request, FinishReason.FAILED, error) for request in waiting),
        ]

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
            finished.append(Finished(search, error))
        # Moves that a plan has not carried out yet come before those that close the new holes, and these
        # before those of the forks, whose parents may have been moved: each chain of moves is kept in order.
        self._moves += self.slots.remove(leavers)
        if forks:
            newcomers = [fork.child for fork in forks if fork.child.row is None]
            self.slots.add(newcomers)
            self._moves += tuple(_copy(fork, is_new=fork.child in newcomers) for fork in forks)
        for search, _, _ in ends:
            del self.running[search.request]
            self.slots.reserve(-search.num_slots)
        return finished


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


def _turned_away(request: Request, reason: FinishReason, error: ServerError) -> Finished:
    """The end of a request that never had a slot."""
    return Finished(Search(request, finish_reason=reason), error)


def _late() -> DeadlineExceeded:
    return DeadlineExceeded("the deadline passed before the target was complete")
