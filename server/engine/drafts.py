"""Drafts of running rows: tokens that probably come next, which one step checks (speculative decoding).

A draft does not change a target. A step computes what follows every drafted token, and the scheduler uses it
only if the row has selected the tokens before it: Leviathan et al. 2023 (arXiv:2211.17192), for a draft that
is certain of its tokens. As draws depend on seed and position alone, this holds for sampling, too.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from seq2seq_serve.server.engine.ngrams import FIRST_RATE, Follower, Lookup
from seq2seq_serve.server.engine.state import Sequence

MAX_DRAFTED = 32  # positions of a step beside those of the running rows
_MAX_OF_A_ROW = 16
_SHARED_NEWS = 1 / 64  # the weight of a row in the averages of all rows
_TIME_NEWS = 1 / 64  # the weight of a step in the averages of times
_LEAST_GAIN = 1.25  # of the tokens a second that a drafted position must bring
_LEAST_CHANCE = 0.1  # of a drafted token
_FIXED_POSITIONS = 8  # the guess: a step takes as long as its own positions and these
# Following a row takes about 10 µs a turn, a tenth of a turn of a model as small as `tiny`. If drafts are
# expected to save less, the drafter follows a row in 8 of 64 turns, to measure the share of predicted tokens.
_FOLLOWING_SECONDS = 1e-5
_IDLE_TURNS, _FOLLOWED_TURNS = 64, 8
_GIVEN_RATE = 0.9  # of right predictions from a draft that a request brings, before there is one
_SOURCE, _TARGET, _GIVEN = range(3)  # what predicts tokens
_SELECTS_ONE = attrgetter("selects_one")  # of a row
_LEAST_SECONDS = 1e-9  # of a step, before there is one
_GUESS_WEIGHT = 2.0  # of the guess, as the variance of the numbers of positions with the same weight


class StepTimes:
    """The seconds of a step as a linear function of its positions, by running averages.

    The function is the ridge regression towards a guess, because steps often have equal numbers of positions.

    Attributes:
        seconds_of_position: The seconds that one position more takes; 0 before the first step.
    """

    def __init__(self) -> None:
        self._count = 0
        self._positions = self._seconds = self._squares = self._products = 0.0
        self.seconds_of_position = 0.0

    def add(self, num_positions: int, seconds: float) -> None:
        """Count a step; one that is much slower than expected counts as twice as slow."""
        if self._count:
            seconds = min(seconds, 2 * self.expected(num_positions))
        self._count += 1
        news = max(1 / self._count, _TIME_NEWS)
        self._positions += news * (num_positions - self._positions)
        self._seconds += news * (seconds - self._seconds)
        self._squares += news * (num_positions**2 - self._squares)
        self._products += news * (num_positions * seconds - self._products)
        variance = self._squares - self._positions**2
        covariance = self._products - self._positions * self._seconds
        guess = self._seconds / (self._positions + _FIXED_POSITIONS)
        slope = (covariance + _GUESS_WEIGHT * guess) / (variance + _GUESS_WEIGHT)
        self.seconds_of_position = min(max(slope, guess / 8), self._seconds / self._positions)

    def expected(self, num_positions: int) -> float:
        """Returns the seconds of a step."""
        return self._seconds + self.seconds_of_position * (num_positions - self._positions)


@dataclass(slots=True)
class Forecast:
    """The tokens that a step is expected to bring, and the seconds that it is expected to take."""

    num_tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / (self.seconds + _LEAST_SECONDS)

    def add(self, num_tokens: float, seconds: float, least_gain: float) -> bool:
        """Adds drafts if they bring `least_gain` times the speed of the step; returns whether they do."""
        pays = num_tokens * self.seconds >= least_gain * seconds * self.num_tokens
        if pays:
            self.num_tokens, self.seconds = self.num_tokens + num_tokens, self.seconds + seconds
        return pays


class Drafter:
    """Drafts the next tokens of rows, as many as the measured times of steps make worth their cost.

    Owned by the scheduler. A position is drafted if it raises the expected number of tokens a second of the
    whole batch: by the chance that the row selects all drafted tokens up to it, and by the time that one more
    position takes. So drafts become shorter in larger batches, and end where they do not pay.

    Args:
        eos_ids: The tokens that end a sequence.
        source_name: The source whose ids are those of targets, too; None if there is none.

    Attributes:
        times: The times of steps.
        num_given: The number of running requests that bring drafts.
    """

    def __init__(self, eos_ids: Collection[int], source_name: str | None) -> None:
        self._eos_ids = eos_ids
        self._source_name = source_name
        self.times = StepTimes()
        # Of right predictions, from sources, from targets, and from drafts that requests bring
        self._rates = [FIRST_RATE, FIRST_RATE, _GIVEN_RATE]
        self.num_given = 0
        self._share = FIRST_RATE  # of tokens that were predicted
        self._num_idle = 0  # turns since rows are no longer followed in each turn; 0 if they are

    def draft(self, rows: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Returns the drafted positions of running rows, each row's in order, as rows of the same slots."""
        if self._num_idle:
            self._num_idle += 1
        if not self._is_followed:
            if not self.num_given:
                return ()
            rows = tuple(row for row in rows if row.request.draft_ids)
        step, cost = self.forecast(rows), self.times.seconds_of_position
        if self._share * step.seconds >= _FOLLOWING_SECONDS:
            self._num_idle = 0
        elif not self._num_idle:
            self._num_idle = 1
        num_followed = None
        if (
            max(self._rates[: _GIVEN + (self.num_given > 0)]) * step.seconds
            < _LEAST_GAIN * cost * step.num_tokens
        ):
            num_followed = 1  # whose predictions are compared, so that the rates stay known
        drafts: list[Sequence] = []
        for row in islice(filter(_SELECTS_ONE, rows), num_followed):
            follower, chance, token_ids = self._follow(row), 1.0, row.token_ids
            most = min(_MAX_OF_A_ROW, MAX_DRAFTED - len(drafts), row.num_draftable)
            for token_id in follower.ids[follower.place : follower.place + most]:
                chance *= follower.rate
                is_likely = token_id not in self._eos_ids and chance >= _LEAST_CHANCE
                if not (is_likely and step.add(chance, cost, _LEAST_GAIN)):
                    break
                token_ids = [*token_ids, token_id]
                drafts.append(drafted(row, token_ids, chance))
        return tuple(drafts)

    def forecast(self, rows: Collection[Sequence], drafts: Collection[Sequence] = ()) -> Forecast:
        """Returns what a step of rows and of positions that were drafted for them brings and takes."""
        num_tokens = len(rows) + sum(position.chance for position in drafts)
        return Forecast(num_tokens, self.times.expected(len(rows) + len(drafts)))

    def record(self, num_positions: int, seconds: float) -> None:
        """Count the time of a step."""
        if self._is_followed:
            self.times.add(num_positions, seconds)

    @property
    def _is_followed(self) -> bool:
        """Whether a row is followed in this turn."""
        return self._num_idle % _IDLE_TURNS < _FOLLOWED_TURNS

    def _follow(self, row: Sequence) -> Follower:
        """Read what a row has selected since; returns the best prediction of its next tokens."""
        text, target = (_GIVEN if row.request.draft_ids else _SOURCE), _TARGET
        if row.lookup is None:
            ids: Ids[int] = ()
            if text == _GIVEN:
                ids = (*row.request.prefix_ids, *row.request.draft_ids)
            elif (source := row.request.sources.get(self._source_name or "")) is not None:
                ids = source.tolist()
            row.lookup = Lookup(ids, [self._rates[text], self._rates[target]])
        for is_predicted in row.lookup.read(row.token_ids):
            self._share += _SHARED_NEWS * (is_predicted - self._share)
        for i, follower in zip((text, target), row.lookup.followers, strict=True):
            self._rates[i] += _SHARED_NEWS * (follower.rate - self._rates[i])
        return row.lookup.best()


def drafted(row: Sequence, token_ids: list[int], chance: float = 1.0) -> Sequence:
    """Returns the row as it is if it selects these tokens, for which there is this chance."""
    return Sequence(
        row.search,
        next_token_id=token_ids[-1],
        row=row.row,
        index=row.index,
        token_ids=token_ids,
        is_plain=row.request.is_plain,
        chance=chance,
    )
