"""A draft model: a smaller model with the same target tokens, which drafts the next tokens of rows.

A step of the served model checks the drafts, as those of `server.engine.drafts`, so no target changes. The
draft model decodes greedily in the slots of the rows that it drafts for, where it has memory and a cache of
its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby

from seq2seq_serve.server.engine.drafts import MAX_DRAFTED, Drafter, Forecast, StepTimes, drafted
from seq2seq_serve.server.engine.plan import Move, Runner, StepPlan
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import FinishReason
from seq2seq_serve.server.engine.state import Search, Sequence

_log = logging.getLogger(__name__)

_FIRST_RATE = 0.7  # of right drafts, before there is one
_NEWS = 1 / 64  # the weight of a draft in the average
_LENGTH_NEWS = 1 / 16  # the weight of a target in the average of their lengths
_MOST_OF_A_ROW = 8
_LEAST_GAIN = 1.1  # of the tokens a second that drafts must bring
# The share of the time that goes into drafts which do not pay, so that their rate and times stay known; and
# how many tokens are drafted then.
_TRIAL_SHARE, _TRIAL_TOKENS = 0.01, 2
_END = -1  # the end of sequence in a target, whichever token it was


@dataclass(slots=True)
class _Row:
    """A row of the served model, with the state that the draft model keeps for it.

    Attributes:
        sequence: The row, also after its end.
        own: The row in the draft model's own slot.
        fed: The tokens in the draft model's cache, by position.
        num_read: The tokens that the row had read, or was about to read, when the last ones were drafted.
        token_ids: The last drafts, perhaps with an end of sequence after them.
    """

    sequence: Sequence
    own: Sequence
    fed: list[int] = field(default_factory=list)
    num_read: int = 0
    token_ids: list[int] = field(default_factory=list)


class DraftModel:
    """Drafts tokens for rows that n-grams predict worse, as many as the measured times make worth their cost.

    Owned by the core; used on its thread. Rows of beams, and of requests with several answers, are left out,
    and those that were admitted when drafts did not pay. Invariant: what it knows of a slot is of the row in
    it, or of a row that has ended.

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
        self._step_times, self._encode_times = StepTimes(), StepTimes()  # by positions, and by source tokens
        self._rate = _FIRST_RATE
        self._mean_length: float | None = None  # of targets
        self._rows: list[_Row | None] = [None] * runner.num_slots
        self._pending: list[_Row] = []  # whose drafts are being checked
        self._trial_seconds = self._most_trial_seconds = 0.0  # that may be spent on drafts that do not pay
        self._has_failed = False

    def warm_up(self) -> None:
        """Do first-time work; raises RuntimeError if the graphs do not run."""
        try:
            self.runner.warm_up()
        except Exception as error:
            raise RuntimeError(f"those of its draft model: {error}") from error

    def extend(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with drafts for more of its rows.

        Called before the served model's own encode call, after which requests lack their arrays. If the draft
        model raises, it is not used any more, and requests go on.
        """
        if self._has_failed:
            return plan
        try:
            self._learn()
            self._follow(plan.moves)
            if plan.admitted:
                self._admit(plan)
            return self._draft(plan)
        except Exception:
            _log.exception("model %s: its draft model failed, and is no longer used", self._model_name)
            self._has_failed = True
            return plan

    def _learn(self) -> None:
        """Compare the last drafts with what their rows have selected, also those that have ended."""
        for row in self._pending:
            selected = [*row.sequence.search.start_ids, *_target_of(row.sequence)][row.num_read :]
            for token_id, other_id in zip(row.token_ids, selected, strict=False):
                is_right = token_id == other_id or (other_id == _END and token_id in self.runner.eos_ids)
                self._rate += _NEWS * (is_right - self._rate)
                if not is_right:
                    break
        self._pending = []

    def _follow(self, moves: Iterable[Move]) -> None:
        """Move the rows as the plan does."""
        known = list[Move]()
        for move in moves:
            row = self._rows[move.from_row]
            if row is not None:
                known.append(move)
                row.own.row, row.fed = move.to_row, row.fed[: move.cache_length]
            self._rows[move.from_row] = None
            self._forget(move.to_row)
            self._rows[move.to_row] = row
        if known:
            self.runner.move(known)

    def _forget(self, slot: int) -> None:
        row, self._rows[slot] = self._rows[slot], None
        if row is not None:
            length = len(_target_of(row.sequence)) - len(row.sequence.request.prefix_ids)
            before = length if self._mean_length is None else self._mean_length
            self._mean_length = before + _LENGTH_NEWS * (length - before)

    def _admit(self, plan: StepPlan) -> None:
        """Encode the newcomers in neighbouring slots for which drafts will pay."""
        first = len(plan.rows) - len(plan.admitted)
        for slot in range(first, len(self._rows)):
            self._forget(slot)
        num_rows = min(sum(map(_can_be_known, plan.rows)), MAX_DRAFTED)
        step = self._drafter.forecast(plan.rows)
        speed = step.speed
        self._lengthen(step, num_rows, MAX_DRAFTED)
        pays = step.speed >= _LEAST_GAIN * speed
        saved = 1 / speed - 1 / step.speed if pays else 0.0  # seconds of a token
        numbered = enumerate(plan.admitted, start=first)
        for is_known, group in groupby(numbered, key=lambda one: _can_be_known(one[1])):
            newcomers = list(group)
            if not is_known:
                continue
            if self._encode_cost(newcomers) > saved * sum(map(self._expected_length, newcomers)):
                newcomers = newcomers[:1]
                if not self._may_try(self._encode_cost(newcomers)):
                    continue
            self._encode(newcomers)

    def _encode_cost(self, newcomers: list[tuple[int, Sequence]]) -> float:
        return self._encode_times.expected(sum(each.request.encode_tokens for _, each in newcomers))

    def _expected_length(self, newcomer: tuple[int, Sequence]) -> float:
        request = newcomer[1].request
        length = request.memory_length if self._mean_length is None else self._mean_length
        return min(request.max_new_tokens, length)

    def _may_try(self, seconds: float) -> bool:
        """Whether so much time may be spent on what does not pay; if so, it is spent."""
        if seconds > self._trial_seconds:
            return False
        self._trial_seconds -= seconds
        return True

    def _encode(self, newcomers: list[tuple[int, Sequence]]) -> None:
        requests = list[Request]()
        for slot, sequence in newcomers:
            its, start_ids = sequence.request, self.runner.start_ids[-1:]
            sources = dict(its.sources)
            request = Request(its.request_id, sources, its.memory_length, its.max_new_tokens, its.arrival)
            requests.append(request)
            self._rows[slot] = _Row(sequence, Sequence(Search(request, start_ids), start_ids[0], row=slot))
        num_tokens, began = sum(request.encode_tokens for request in requests), self._clock()
        self.runner.encode(newcomers[0][0], requests)
        self._encode_times.add(num_tokens, self._clock() - began)
        self._most_trial_seconds = self._encode_cost(newcomers[:1])

    def _draft(self, plan: StepPlan) -> StepPlan:
        known = [
            row
            for sequence, row in zip(plan.rows, self._rows, strict=False)
            if row is not None
            and row.sequence is sequence
            and sequence.selects_one
            and sequence.num_draftable > 0
        ]
        if not known:
            self._save_up(plan)
            return plan
        by_ngrams = {position.row for position in plan.drafts}
        free = [row for row in known if row.sequence.row not in by_ngrams]
        worse = [
            row
            for row in known
            if row.sequence.row in by_ngrams
            and (row.sequence.lookup is None or row.sequence.lookup.best().rate < self._rate)
        ]
        best_speed = _LEAST_GAIN * self._drafter.forecast(plan.rows, plan.drafts).speed
        number, rows, drafts = 0, free, plan.drafts
        for candidates in (free, free + worse) if worse else (free,):
            kept = _without(plan.drafts, candidates)
            room, step = MAX_DRAFTED - len(kept), self._drafter.forecast(plan.rows, kept)
            its_number = self._lengthen(step, len(candidates[:room]), room)
            if its_number and step.speed > best_speed:
                best_speed, number, rows, drafts = step.speed, its_number, candidates[:room], kept
        if number:
            self._trial_seconds = 0.0
        else:
            cost = self._save_up(plan)
            rows = (free or known)[:1]
            drafts = _without(plan.drafts, rows)
            number = min(_TRIAL_TOKENS, MAX_DRAFTED - len(drafts))
            if not (rows and number and self._may_try(cost)):
                return plan
        self._propose(rows, [min(number, row.sequence.num_draftable) for row in rows])
        self._pending = rows
        own = list[Sequence]()
        for row in rows:
            token_ids = row.sequence.token_ids
            for token_id in row.token_ids:
                if token_id in self.runner.eos_ids:
                    break
                token_ids = [*token_ids, token_id]
                own.append(drafted(row.sequence, token_ids))
        return replace(plan, drafts=(*drafts, *own), num_steps=1)

    def _save_up(self, plan: StepPlan) -> float:
        """Save time for a trial, of at most one encode call and one trial; returns the cost of the second."""
        cost = _TRIAL_TOKENS * self._seconds_of_draft(1)
        seconds = self._trial_seconds + _TRIAL_SHARE * self._drafter.times.expected(len(plan.rows))
        self._trial_seconds = min(seconds, cost + self._most_trial_seconds)
        return cost

    def _seconds_of_draft(self, num_rows: int) -> float:
        """Returns the time that one more draft of each row takes, and the positions that check them."""
        return self._step_times.expected(num_rows) + num_rows * self._drafter.times.seconds_of_position

    def _lengthen(self, step: Forecast, num_rows: int, most_tokens: int) -> int:
        """Adds drafts of rows to a step, one more of each while they pay; returns their number for a row."""
        most = min(_MOST_OF_A_ROW, most_tokens // num_rows) if num_rows else 0
        number, chance, cost = 0, self._rate, self._seconds_of_draft(num_rows)
        while number < most and step.add(num_rows * chance, cost, 1.0):
            number, chance = number + 1, chance * self._rate
        return number

    def _propose(self, rows: list[_Row], most: list[int]) -> None:
        """Read the tokens that each row has selected since, then draft at most `most` of its next ones."""
        unread = list[tuple[_Row, int]]()
        for row in rows:
            read = [*row.sequence.search.start_ids, *row.sequence.token_ids]  # and what the next step reads
            known = min(row.num_read, len(row.fed), len(read) - 1)
            while known < min(len(row.fed), len(read) - 1) and row.fed[known] == read[known]:
                known += 1
            row.fed, row.num_read, row.token_ids = read, len(read), []
            unread += [(row, position) for position in range(known, len(read))]
        size = self.runner.num_slots + MAX_DRAFTED
        for start in range(0, len(unread), size):
            self._step(unread[start : start + size])
        for number in range(1, max(most)):
            going = [
                row
                for row, its in zip(rows, most, strict=True)
                if number < its and row.token_ids[-1] not in self.runner.eos_ids
            ]
            if not going:
                break
            for row in going:
                row.fed.append(row.token_ids[-1])
            self._step([(row, len(row.fed) - 1) for row in going])

    def _step(self, positions: list[tuple[_Row, int]]) -> None:
        """Feed positions of rows, each row's in order; the last fed token of a row is followed by a draft."""
        began = self._clock()
        fed = tuple(
            Sequence(row.own.search, row.fed[position], row.own.row, token_ids=row.fed[:position])
            for row, position in positions
        )
        token_ids = self.runner.step(fed).token_ids
        if max(token_ids) >= self.runner.vocab_size:
            raise ValueError(f"it drafted the token {max(token_ids)} of {self.runner.vocab_size}")
        for (row, position), token_id in zip(positions, token_ids, strict=True):
            if position == len(row.fed) - 1:
                row.token_ids.append(token_id if token_id >= 0 else self.runner.eos_ids[0])
        self._step_times.add(len(positions), self._clock() - began)


def _can_be_known(sequence: Sequence) -> bool:
    """Whether a row keeps one slot, and selects tokens that can be drafted."""
    request = sequence.request
    return (
        request.num_slots == 1
        and request.max_new_tokens > 1
        and request.beam is None
        and not request.is_score
    )


def _without(drafts: tuple[Sequence, ...], rows: list[_Row]) -> tuple[Sequence, ...]:
    """Returns the drafts of n-grams that are not of these rows."""
    slots = {row.sequence.row for row in rows}
    return tuple(position for position in drafts if position.row not in slots)


def _target_of(sequence: Sequence) -> list[int]:
    """Returns the tokens that a row has selected, also after its end, which is one of them."""
    ended = sequence.search.ended
    if not ended:
        return sequence.token_ids
    hypothesis = ended[min(ended)]
    return [*hypothesis.token_ids, *([_END] if hypothesis.finish_reason is FinishReason.EOS else [])]
