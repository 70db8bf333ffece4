"""Decides when requests are admitted to slots, what each step runs, and when requests end.

The engine calls `schedule`, runs the plan, and passes the result to `record`. Nothing here uses tensors or a
clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.engine.plan import Alignment, Move, Selected, StepPlan, StepResult
from seq2seq_serve.server.engine.request import Array, Request
from seq2seq_serve.server.engine.result import FinishReason, Load
from seq2seq_serve.server.engine.search import (
    Fork,
    abandon,
    add_choice,
    branch,
    extend,
    extend_beam,
    rank,
    start,
)
from seq2seq_serve.server.engine.slots import Slots
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.errors import NO_NUMBERS, Cancelled, DeadlineExceeded, EngineFailed, ServerError


@dataclass(frozen=True)
class SchedulerLimits:
    """The bounds of a turn.

    Attributes:
        max_encode_tokens: `Request.encode_tokens` of one encode call, and prefix tokens of one prefill;
            padding counts a quarter. A single longer request is still admitted, alone.
        max_encode_tokens_beside: The same while other requests run, so that newcomers do not delay them; up
            to `max_encode_tokens` if a call probably takes at most `SHORT_ENCODE_SECONDS`.
        max_align_tokens: Target positions of complete requests whose attention a turn computes, roughly: each
            call counts as 32 more positions, and has at most this number of positions.
    """

    max_encode_tokens: int = 1024
    max_encode_tokens_beside: int = 128
    max_align_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("max_encode_tokens", "max_encode_tokens_beside", "max_align_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")


class Finished(NamedTuple):
    """A request that has ended in this turn."""

    search: Search
    error: ServerError | None


@dataclass(eq=False, slots=True)
class PendingAlignments:
    """The alignments that a complete request waits for.

    Attributes:
        row: The row that keeps its memory. Its tokens are the aligned beginning of the first of `fed`.
        fed: The ids that the decoder was fed from the last start token on, by the place of each hypothesis
            without a whole alignment.
    """

    row: Sequence
    fed: dict[int, tuple[int, ...]]


_End = tuple[Search, FinishReason, ServerError | None]


@dataclass(eq=False, slots=True)
class _Turn:
    """The changes that a step has caused.

    Attributes:
        failed: The searches that fail, and why.
        leavers: The rows that leave their slots.
        forking: The searches whose rows have several continuations.
        forks: The rows that copy others.
        ends: The searches that end.
    """

    failed: dict[Search, Exception] = field(default_factory=dict)
    leavers: list[Sequence] = field(default_factory=list)
    forking: dict[Search, None] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    ends: list[_End] = field(default_factory=list)


_ALIGN_CALL_TOKENS = 32  # positions that take about as long as the fixed cost of a call
_PADDING_SHARE = 4  # attention and copies over this number of padded positions cost as much as one token
# A full core admits requests when this part of its slots, one in eight, is free: an encode call for each
# would cost an H100 a third of its tokens (benchmarks/scale). Where slots become free slowly, it admits
# requests when the steps since the last call have taken sixteen times as long as the next one will take.
_GATHERED_SHARE, _GATHERED_CALLS = 8, 16
# Running rows may wait so long for newcomers, in any case. A full core of a model as small as `tiny` is 1.1
# times as fast with calls of 3 to 4 ms, for 16 requests, as with calls for 8 (Zen 4).
SHORT_ENCODE_SECONDS = 3e-3
# A turn may take so long with several steps, so that a newcomer or a stream does not wait for it.
_SHORT_TURN_SECONDS, _MOST_STEPS = 1e-3, 4
_TOKEN_IDS, _START_IDS = attrgetter("token_ids"), attrgetter("search.start_ids")


class Scheduler:
    """Holds every request of a core from its arrival to its end, and the moves of the next plan.

    Owned by the core; used on its thread. Invariant: a request is in `waiting` or in `running` until it is
    returned as `Finished`.

    Args:
        num_slots: Rows of the runner's buffers.
        start_ids: The tokens that a sequence is fed first; exactly one without `decode`.
        eos_ids: The tokens that end a sequence.
        has_decode: Whether the runner can compute several positions at once; otherwise steps read prefixes
            and compute attention.
        shares_memory: Whether the runner reads the memory of a request in its owner's row only.
        repeats_steps: Whether the runner can do several steps in one call.
        limits: Bounds of a turn.
        drafter: Drafts tokens of rows; None if the runner takes one position of a row at a time.

    Attributes:
        slots: The rows, and the sequences in them.
        waiting: The requests without slots, in the order of their arrival.
        running: The requests that have slots, in the order of their admission.
        streaming: Those of them that stream.
        beginning: Those without a token. A step brings each of the others one, but for those in `aligning`.
        aligning: Those that are complete, and wait for their alignments with one row each; the oldest first.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        start_ids: tuple[int, ...],
        eos_ids: Collection[int],
        has_decode: bool = True,
        shares_memory: bool = False,
        repeats_steps: bool = False,
        limits: SchedulerLimits | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.slots = Slots(num_slots, shares_memory=shares_memory)
        self.waiting: dict[Request, None] = {}
        self.running: dict[Request, Search] = {}
        self.streaming: dict[Search, None] = {}
        self.beginning: dict[Search, None] = {}
        self.aligning: dict[Search, PendingAlignments] = {}
        self._start_ids = start_ids
        self._eos_ids = eos_ids
        self._has_decode = has_decode
        self._repeats_steps = repeats_steps
        self._step_seconds = 0.0  # of the last turn; 0 before the first one
        self._encode_token_seconds = math.inf  # of the last encode call
        self._seconds_since_encode = 0.0  # of all steps
        self._limits = limits or SchedulerLimits()
        self._drafter = drafter
        self._moves: tuple[Move, ...] = ()

    def load(self) -> Load:
        """Returns the numbers of its requests, slots and cache positions in use."""
        rows = self.slots.rows
        # The sum of their `cache_length`, without a call for each: most deliveries count it.
        num_cached = sum(map(len, map(_TOKEN_IDS, rows))) + sum(map(len, map(_START_IDS, rows))) - len(rows)
        num_slots_in_use = self.slots.num_slots - self.slots.num_free
        return Load(len(self.waiting), len(self.running), num_slots_in_use, num_cached)

    def add(self, requests: Iterable[Request]) -> None:
        """Accept requests."""
        self.waiting |= dict.fromkeys(requests)

    def cancel(self, request: Request, *, is_expired: bool) -> list[Finished]:
        """End a request before its target is complete; nothing happens if it has ended already."""
        reason = FinishReason.DEADLINE if is_expired else FinishReason.CANCELLED
        error = leaving_error(is_expired=is_expired)
        if request in self.running:
            return self._abandon([(self.running[request], reason, error)])
        if request not in self.waiting:
            return []
        del self.waiting[request]
        return [self._turned_away(request, reason, error)]

    def _count_draft(self, request: Request, number: int) -> None:
        if self._drafter is not None and request.draft_ids:
            self._drafter.num_given += number

    def schedule(self, now: float) -> StepPlan:
        """Admit the requests that fit, and plan the next step."""
        admitted: list[Sequence] = []
        for request in self._newcomers() if self.waiting else ():
            del self.waiting[request]
            search = start(request, self._start_ids, self._eos_ids, feeds_prefix=not self._has_decode)
            search.admitted_at = now
            search.num_slots = request.num_slots
            self.running[request] = search
            self.beginning[search] = None
            if request.stream:
                self.streaming[search] = None
            self._count_draft(request, 1)
            self.slots.reserve(search.num_slots)
            admitted += search.rows
        self.slots.add(admitted)
        moves, self._moves = self._moves, ()
        alignments = tuple(self._plan_alignments()) if self.aligning else ()
        drafts = () if self._drafter is None else self._drafter.draft(self.slots.rows)
        rows, num_steps = self.slots.rows, 1
        is_short = self._repeats_steps and 0.0 < self._step_seconds <= _SHORT_TURN_SECONDS / 2
        if is_short and rows and not (self.waiting or admitted or drafts or alignments):
            # Short steps take less time than what is done around them. A row that ends in the middle has
            # some positions computed in vain.
            most = min(_MOST_STEPS, int(_SHORT_TURN_SECONDS / self._step_seconds))
            if all(row.num_simple or row.may_repeat_steps for row in rows):
                num_steps = min(most, 1 + min(row.num_simple or row.num_draftable for row in rows))
        return StepPlan(moves, tuple(admitted), rows, alignments, drafts, num_steps)

    def _newcomers(self) -> list[Request]:
        """Returns the waiting requests that the next turn admits, the oldest first.

        One call encodes several requests faster. So if their slots are too few for all of them, they wait
        until an encode call is full, several slots are free, or the last call was long ago.
        """
        newcomers: list[Request] = []
        num_free, longest, total, limits = self.slots.num_free, 0, 0, self._limits
        max_tokens = limits.max_encode_tokens
        if self.slots.rows:
            short_tokens = int(SHORT_ENCODE_SECONDS / self._encode_token_seconds)
            max_tokens = max(limits.max_encode_tokens_beside, min(short_tokens, max_tokens))
        for request in self.waiting:
            num_tokens = request.encode_tokens
            if self._has_decode:
                num_tokens = max(num_tokens, len(request.start_ids) + len(request.prefix_ids))
            longest, total = max(longest, num_tokens), total + num_tokens
            padding = longest * (len(newcomers) + 1) - total
            if newcomers and total + padding // _PADDING_SHARE > max_tokens:
                return newcomers
            if request.num_slots > num_free:
                call_seconds = self._encode_token_seconds * (total - num_tokens)
                is_gathered = self.slots.num_free * _GATHERED_SHARE >= self.slots.num_slots
                is_late = self._seconds_since_encode >= call_seconds * _GATHERED_CALLS
                return newcomers if is_gathered or is_late else []
            newcomers.append(request)
            num_free -= request.num_slots
        return newcomers

    def record(self, plan: StepPlan, result: StepResult, now: float) -> list[Finished]:
        """Extend every row by the selected tokens, and retire complete rows.

        An exception that one request causes fails only that request.
        """
        self._record_seconds(plan, result)
        selected = result.selected
        turn = _Turn()
        for row, error in selected.failures.items():
            if row < len(plan.rows):  # a failed draft matters only if the row selects what was drafted
                turn.failed[plan.rows[row].search] = error
                plan.rows[row].num_simple = 0
        if plan.alignments:
            self._record_alignments(plan, result.attention, turn)
        for row, attended in selected.attention.items():
            plan.rows[row].attended.append(attended)
        self._extend_rows(plan, selected.token_ids, selected, turn, now)
        for token_ids in selected.further:
            self._extend_rows(plan, token_ids, selected, turn, now, is_further=True)
        if turn.forking:
            self._fork(selected, turn)
        if turn.leavers:
            self._complete(turn)
        finished = []
        if turn.leavers or turn.ends or turn.forks:
            finished = self._leave(turn.leavers, turn.ends, turn.forks)
        return finished + self._fail_each(turn.failed) if turn.failed else finished

    def _record_seconds(self, plan: StepPlan, result: StepResult) -> None:
        """Remember what calls take, by which later turns are planned."""
        for sequence in plan.admitted:
            sequence.search.encode_seconds = result.encode_seconds
        if plan.admitted and result.encode_seconds:
            # Of a prefix that the call also decoded, the cache has the positions.
            num_tokens = sum(max(each.request.encode_tokens, each.cache_length) for each in plan.admitted)
            self._encode_token_seconds = result.encode_seconds / num_tokens
            self._seconds_since_encode = 0.0
        if not result.num_rows:
            return
        self._step_seconds = result.step_seconds
        self._seconds_since_encode += result.step_seconds * (1 + len(result.selected.further))
        if self._drafter is not None:
            self._drafter.record(len(plan.rows) + len(plan.drafts), result.step_seconds)

    def _extend_rows(
        self,
        plan: StepPlan,
        token_ids: list[int],
        selected: Selected,
        turn: _Turn,
        now: float,
        *,
        is_further: bool = False,
    ) -> None:
        """Extend each row by its token, and by those of its drafts as long as they are what it selects.

        The tokens are those of the first step of a call, or of a further one, which has no drafts.
        """
        num_rows, eos_ids = len(plan.rows), self._eos_ids
        for row, (position, token_id) in enumerate(zip(plan.rows + plan.drafts, token_ids, strict=True)):
            if position.num_simple and token_id not in eos_ids:
                position.num_simple -= 1
                position.token_ids.append(token_id)
                position.next_token_id = token_id
                if is_further:
                    position.search.num_further_tokens += 1
                continue
            search = position.search
            if search in turn.failed or not position.num_branches:
                continue
            sequence = position
            if row >= num_rows:
                assert position.row is not None
                sequence = plan.rows[position.row]
                search.num_draft_tokens += 1
                if position.token_ids != sequence.token_ids or sequence not in search.rows:
                    continue
                search.num_accepted_tokens += 1
                search.num_further_tokens += 1
                if row in selected.failures:
                    turn.failed[search] = selected.failures[row]
                    continue
            elif is_further:
                if sequence not in search.rows:
                    continue
                search.num_further_tokens += 1
            if search in self.beginning and not (sequence.num_forced or sequence.detects):
                search.first_token_at = now
                del self.beginning[search]
            if sequence.num_branches > 1:
                turn.forking[search] = None
                continue
            try:
                if row in selected.branches:
                    add_choice(sequence, selected.branches[row])
                if extend(sequence, token_id, eos_ids):
                    turn.leavers.append(sequence)
            except Exception as error:
                turn.failed[search] = error

    def _fork(self, selected: Selected, turn: _Turn) -> None:
        """Extend the beams, and start the further samples of a source, which copy rows."""
        ranked = rank(turn.forking, selected.candidates, self._eos_ids) if selected.candidates else {}
        for search in turn.forking:
            before = search.rows
            try:
                if search in ranked:
                    turn.forks += extend_beam(search, ranked[search], self._eos_ids)
                else:
                    (root,) = before
                    assert root.row is not None
                    turn.forks += branch(search, selected.branches[root.row], self._eos_ids)
            except Exception as error:
                turn.failed[search] = error
            else:
                if len(search.rows) < len(before):  # otherwise each row goes on, perhaps with another target
                    turn.leavers += [sequence for sequence in before if sequence not in search.rows]

    def _complete(self, turn: _Turn) -> None:
        """Find the searches whose last row leaves: they end, or wait for their alignments."""
        turn.leavers = [sequence for sequence in turn.leavers if sequence.search not in turn.failed]
        for search in dict.fromkeys(sequence.search for sequence in turn.leavers if sequence.num_branches):
            if search.rows:
                continue
            if not search.ended:
                turn.ends.append((search, FinishReason.FAILED, EngineFailed(NO_NUMBERS)))
            elif search.request.attention and self._has_decode:
                assert search.memory_owner is not None
                turn.leavers.remove(search.memory_owner)
                self._keep_for_alignments(search, search.memory_owner)
            else:
                turn.ends.append(_end_of(search))

    def _fail_each(self, failed: dict[Search, Exception]) -> list[Finished]:
        """End searches, each by what it caused."""
        ends: list[_End] = []
        for search, cause in failed.items():
            if isinstance(cause, EngineFailed):
                failure = cause
            else:
                failure = EngineFailed("the engine failed on this request")
                failure.__cause__ = cause
            ends.append((search, FinishReason.FAILED, failure))
        return self._abandon(ends)

    def _keep_for_alignments(self, search: Search, row: Sequence) -> None:
        """Keep a complete request and one of its rows until its alignments have been computed."""
        fed = {}
        for place, hypothesis in sorted(search.ended.items()):
            fed[place] = (search.start_ids[-1], *hypothesis.token_ids)
            if hypothesis.finish_reason is not FinishReason.EOS:  # then the last token was not fed
                fed[place] = fed[place][:-1]
        self.aligning[search] = PendingAlignments(row, fed)
        row.token_ids, row.next_token_id = [], search.start_ids[-1]
        row.num_branches, row.is_plain = 0, True
        self.slots.reserve(1 - search.num_slots)
        search.num_slots = 1

    def _plan_alignments(self) -> Iterator[Alignment]:
        """Yields at least one piece, and more up to the turn's bound; the oldest requests come first.

        Other requests do not change how a hypothesis is cut into pieces.
        """
        longest = num_left = self._limits.max_align_tokens
        for pending in self.aligning.values():
            for place, fed in pending.fed.items():
                done = len(pending.row.token_ids)
                while done < len(fed):
                    if num_left <= 0:
                        return
                    first_position = len(pending.row.search.start_ids) - 1 + done
                    piece = Alignment(pending.row, place, first_position, fed[done : done + longest])
                    done += len(piece.target_ids)
                    num_left -= len(piece.target_ids) + _ALIGN_CALL_TOKENS
                    # The step runs this row, too: it writes the position that the next piece overwrites.
                    pending.row.token_ids = list(fed[:done]) if done < len(fed) else []
                    yield piece

    def _record_alignments(
        self, plan: StepPlan, attention: tuple[Array | Exception, ...], turn: _Turn
    ) -> None:
        """Store the computed attention, and end the searches whose alignments are complete."""
        for piece, weights in zip(plan.alignments, attention, strict=True):
            search = piece.row.search
            if isinstance(weights, Exception):
                turn.failed[search] = weights
                continue
            if search in turn.failed:
                continue
            search.ended[piece.place].attended.append(weights)
            fed = self.aligning[search].fed
            num_before = piece.first_position - (len(search.start_ids) - 1)
            if num_before + len(piece.target_ids) == len(fed[piece.place]):
                del fed[piece.place]
            if not fed:
                turn.ends.append(_end_of(search))
                turn.leavers.append(self.aligning.pop(search).row)

    def fail(self, sequences: tuple[Sequence, ...]) -> list[Finished]:
        """End the requests of an encode or a step that raised an exception."""
        error = EngineFailed("the engine failed on the step that ran this request")
        searches = dict.fromkeys(sequence.search for sequence in sequences)
        return self._abandon([(search, FinishReason.FAILED, error) for search in searches])

    def _turned_away(self, request: Request, reason: FinishReason, error: ServerError) -> Finished:
        """Returns the end of a request that never had a slot."""
        return Finished(Search(request, self._start_ids, finish_reason=reason), error)

    def _abandon(self, ends: list[_End]) -> list[Finished]:
        ending = {search for search, _, _ in ends}
        # Not the searches' own rows: an exception may have left these half changed.
        leavers = [sequence for sequence in self.slots.rows if sequence.search in ending] if ending else []
        for search, reason, _ in ends:
            self.aligning.pop(search, None)
            abandon(search, reason)
        return self._leave(leavers, ends)

    def _leave(
        self, leavers: list[Sequence], ends: list[_End], forks: list[Fork] | None = None
    ) -> list[Finished]:
        """Remove rows, give forks their rows, and end requests, which must not have rows any more."""
        # The order matters: moves that no plan has run yet, then moves that close the new holes, then copies
        # of the forks, whose parents may have been moved.
        self._moves += self.slots.remove(leavers)
        if forks:
            newcomers = [fork.child for fork in forks if fork.child.row is None]
            self.slots.add(newcomers)
            copied = set() if self.slots.shares_memory else set(newcomers)
            self._moves += tuple(_copy(fork, with_memory=fork.child in copied) for fork in forks)
        for search, reason, _ in ends:
            # A row that refers to its search must not be kept by it: only a collection would free the two.
            search.finish_reason, search.memory_owner = reason, None
            del self.running[search.request]
            self.streaming.pop(search, None)
            self.beginning.pop(search, None)
            self._count_draft(search.request, -1)
            self.slots.reserve(-search.num_slots)
        return [Finished(search, error) for search, _, error in ends]


def leaving_error(*, is_expired: bool) -> ServerError:
    """Returns the error of a request whose caller has left, or whose deadline has passed."""
    if is_expired:
        return DeadlineExceeded("the deadline passed before the target was complete")
    return Cancelled("the caller cancelled")


def _end_of(search: Search) -> _End:
    """Returns the end of a search whose hypotheses are complete."""
    return search, search.ended[min(search.ended)].finish_reason, None


def _copy(fork: Fork, *, with_memory: bool) -> Move:
    parent, child = fork.parent, fork.child
    assert parent.row is not None
    assert child.row is not None
    memory_length = child.memory_length if with_memory else 0
    return Move(parent.row, child.row, child.cache_length, memory_length, fork.num_shared)
