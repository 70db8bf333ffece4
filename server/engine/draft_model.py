"""A draft model: a smaller model with the same target tokens, which drafts the next tokens of rows.

As in `server.engine.drafts`, a step of the served model checks the drafts, so no target changes. The draft
model decodes greedily in the slots of the rows that it drafts for: it has their memory and caches of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace
from itertools import groupby

from seq2seq_serve.server.engine.drafts import MAX_DRAFTED, Drafter, StepTimes, drafted, may_be_drafted
from seq2seq_serve.server.engine.plan import Move, Runner, StepPlan
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.state import Search, Sequence

_log = logging.getLogger(__name__)

_FIRST_RATE = 0.7  # of right drafts, before there is one
_ROW_NEWS, _SHARED_NEWS = 1 / 16, 1 / 64  # the weights of a draft in the average of its row, and of all rows
_MOST_OF_A_ROW = 8
_LEAST_GAIN = 1.05  # of the tokens a second that drafts must bring
_IDLE_TURNS = 64  # after as many turns without drafts there is one, so that their cost and rate stay known


@dataclass(slots=True)
class _Row:
    """What the draft model knows of the row in a slot.

    Attributes:
        request: The request that the row decodes.
        keeper: The row in the draft model's own slot.
        rate: The share of right drafts, a running average.
        fed: The tokens in the draft model's cache, by position.
        num_read: How many tokens the row had read, or was about to read, when the last ones were drafted.
        token_ids: The last drafts.
    """

    request: Request
    keeper: Sequence
    rate: float
    fed: list[int] = field(default_factory=list)
    num_read: int = 0
    token_ids: list[int] = field(default_factory=list)


class DraftModel:
    """Drafts tokens for rows that n-grams predict worse, as many as the measured times make worth their cost.

    Owned by the core; used on its thread. Invariant: what it knows of a slot is of the row that is in it, or
    of a row that has ended.

    Args:
        runner: Runs the draft model, with as many slots as the served model's.
        drafter: Drafts by n-grams, and knows the times of the served model's steps.
        model_name: For the log.
        clock: Returns monotonic seconds.
    """

    def __init__(self, runner: Runner, drafter: Drafter, model_name: str, clock: Callable[[], float]) -> None:
        self.runner = runner
        self._drafter = drafter
        self._model_name = model_name
        self._clock = clock
        self._times = StepTimes()
        self._rate = _FIRST_RATE
        self._rows: list[_Row | None] = [None] * runner.num_slots
        self._num_idle = 0  # turns without drafts
        self._has_failed = False

    def extend(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with drafts for more of its rows.

        Called before the served model's own encode call, after which requests lack their arrays. If the draft
        model raises, it is not used any more, and requests go on.
        """
        if self._has_failed:
            return plan
        try:
            self._follow(plan)
            return self._draft(plan)
        except Exception:
            _log.exception("model %s: its draft model failed, and is no longer used", self._model_name)
            self._has_failed, self._drafter.least_rate = True, 0.0
            return plan

    def _follow(self, plan: StepPlan) -> None:
        """Move the rows as the plan does, and encode the newcomers for which drafts would pay."""
        rows, moves = self._rows, list[Move]()
        for move in plan.moves:
            row = rows[move.from_row]
            if row is not None:
                moves.append(move)
                row = replace(row, keeper=self._keeper(row.keeper.request, move.to_row), fed=row.fed.copy())
            rows[move.to_row] = row
        if moves:
            self.runner.move(moves)
        pays = self._num_to_draft(len(plan.rows), 1, self._rate) > 0
        self._drafter.least_rate = self._rate if pays else 0.0
        if not plan.admitted:
            return
        first = len(plan.rows) - len(plan.admitted)
        rows[first:] = [None] * (len(rows) - first)
        if not pays and self._num_idle <= _IDLE_TURNS:
            return
        numbered = enumerate(plan.admitted, start=first)
        for can_be_drafted, group in groupby(numbered, key=lambda one: _is_single(one[1])):
            if can_be_drafted:
                self._encode(list(group))

    def _draft(self, plan: StepPlan) -> StepPlan:
        self._num_idle += 1
        room = MAX_DRAFTED - len(plan.drafts)
        rows = self._rows_to_draft(plan)[:room]
        if not rows:
            return plan
        mean_rate = sum(row.rate for _, row in rows) / len(rows)
        number = self._num_to_draft(len(plan.rows) + len(plan.drafts), len(rows), mean_rate)
        if not number and self._num_idle > _IDLE_TURNS:
            rows, number = rows[:1], 1
        number = min(number, room // len(rows))
        if not number:
            return plan
        self._num_idle = 0
        most = [min(number, sequence.num_draftable) for sequence, _ in rows]
        self._propose(rows, most)
        drafts = list[Sequence]()
        for sequence, row in rows:
            token_ids = sequence.token_ids
            for token_id in row.token_ids:
                if token_id in self.runner.eos_ids:
                    break
                token_ids = [*token_ids, token_id]
                drafts.append(drafted(sequence, token_ids))
        return replace(plan, drafts=plan.drafts + tuple(drafts), num_steps=1)

    def _rows_to_draft(self, plan: StepPlan) -> list[tuple[Sequence, _Row]]:
        """Compare the last drafts of all rows; returns those to draft now, which n-grams do not draft."""
        have_drafts = {position.row for position in plan.drafts}
        rows = list[tuple[Sequence, _Row]]()
        for sequence, row in zip(plan.rows, self._rows, strict=False):
            if row is None or row.request is not sequence.request:
                continue
            self._learn(sequence, row)
            if may_be_drafted(sequence) and sequence.num_draftable > 0 and sequence.row not in have_drafts:
                rows.append((sequence, row))
        return rows

    def _encode(self, numbered: list[tuple[int, Sequence]]) -> None:
        """Encode newcomers in neighbouring slots."""
        requests = list[Request]()
        for slot, sequence in numbered:
            its = sequence.request
            sources = dict(its.sources)
            request = Request(its.request_id, sources, its.memory_length, its.max_new_tokens, its.arrival)
            requests.append(request)
            self._rows[slot] = _Row(its, self._keeper(request, slot), self._rate)
        self.runner.encode(numbered[0][0], requests)

    def _keeper(self, request: Request, slot: int) -> Sequence:
        start_ids = self.runner.start_ids[-1:]
        return Sequence(Search(request, start_ids), start_ids[0], row=slot)

    def _learn(self, sequence: Sequence, row: _Row) -> None:
        """Compare the last drafts with what their row has selected."""
        selected = _read_by(sequence)[row.num_read :]
        for token_id, other_id in zip(row.token_ids, selected, strict=False):
            is_right = token_id == other_id
            row.rate += _ROW_NEWS * (is_right - row.rate)
            self._rate += _SHARED_NEWS * (is_right - self._rate)
            if not is_right:
                break
        row.token_ids = []

    def _num_to_draft(self, num_positions: int, num_rows: int, rate: float) -> int:
        """Returns how many tokens of each row bring the most tokens a second; 0 if drafts do not pay.

        Args:
            num_positions: The positions of the step without them, all of which may select a token.
            num_rows: The number of rows to draft for.
            rate: The share of right drafts.
        """
        of_model, of_draft = self._drafter.times, self._times.expected(num_rows)
        seconds, num_tokens, chance = of_model.expected(num_positions), float(num_positions), 1.0
        best, most = 0, min(_MOST_OF_A_ROW, MAX_DRAFTED // num_rows)
        best_speed = _LEAST_GAIN * num_tokens / seconds if seconds else 0.0
        for number in range(1, most + 1):
            chance *= rate
            num_tokens += num_rows * chance
            seconds += of_draft + num_rows * of_model.seconds_of_position
            speed = num_tokens / seconds if seconds else float(number)
            if speed > best_speed:
                best, best_speed = number, speed
        return best

    def _propose(self, rows: Several[tuple[Sequence, _Row]], most: Several[int]) -> None:
        """Draft a number of tokens of each row, after reading what the row has selected since."""
        unread = list[tuple[_Row, int]]()
        for sequence, row in rows:
            read = _read_by(sequence)
            num_known = min(row.num_read, len(read) - 1)
            while num_known < min(len(row.fed), len(read) - 1) and row.fed[num_known] == read[num_known]:
                num_known += 1
            row.fed, row.num_read, row.token_ids = read, len(read), []
            unread += [(row, position) for position in range(num_known, len(read))]
        size = self.runner.num_slots + MAX_DRAFTED
        for start in range(0, len(unread), size):
            self._step(unread[start : start + size])
        for number in range(1, max(most)):
            going = [row for (_, row), its_most in zip(rows, most, strict=True) if number < its_most]
            for row in going:
                row.fed.append(row.token_ids[-1])
            self._step([(row, len(row.fed) - 1) for row in going])

    def _step(self, positions: Several[tuple[_Row, int]]) -> None:
        """Feed positions of rows, each row's in order; the last fed token of a row is followed by a draft."""
        began = self._clock()
        fed = tuple(
            Sequence(row.keeper.search, row.fed[position], row.keeper.row, token_ids=row.fed[:position])
            for row, position in positions
        )
        selected = self.runner.step(fed)
        for (row, position), token_id in zip(positions, selected.token_ids, strict=True):
            if position == len(row.fed) - 1:
                row.token_ids.append(token_id if token_id >= 0 else self.runner.eos_ids[0])
        self._times.add(len(positions), self._clock() - began)


def _is_single(sequence: Sequence) -> bool:
    """Whether a newcomer keeps one slot, and selects tokens that can be drafted."""
    request = sequence.request
    return request.num_slots == 1 and request.beam is None and not request.is_score


def _read_by(sequence: Sequence) -> list[int]:
    """Returns the tokens that a row has read, and the one that its next step reads."""
    return [*sequence.search.start_ids, *sequence.token_ids]
