"""Drafts of running rows: tokens that probably come next, which one step checks (speculative decoding).

A draft does not change a target. A step computes what follows every drafted token, and the scheduler uses it
only if the row has selected the tokens before it: Leviathan et al. 2023 (arXiv:2211.17192), for a draft that
is certain of its tokens. As draws depend on seed and position alone, this holds for sampling, too.
"""

from __future__ import annotations

from collections.abc import Collection

from seq2seq_serve.server.engine.ngrams import FIRST_RATE, Follower, Lookup
from seq2seq_serve.server.engine.state import Proposal, Sequence

MAX_DRAFTED = 32  # positions of a step beside those of the running rows
_MAX_OF_A_ROW = 16
_ROW_NEWS = 1 / 16  # the weight of a proposed token in the average of its row
_SHARED_NEWS = 1 / 64  # the weight of a row in the averages of all rows
_TIME_NEWS = 1 / 64  # the weight of a step in the averages of times
_LEAST_GAIN = 1.25  # of the tokens a second that a drafted position must bring
_LEAST_CHANCE = 0.1  # of a drafted token
_FIRST_MODEL_RATE = 0.6  # of right tokens of a draft model, before there is one
_LEAST_MODEL_GAIN = 1.02  # of the tokens a second that a draft model must bring
_TRIAL = 16  # turns in a row that are compared: the first ones are slower, because other weights were read
_TURNS_BETWEEN = 512  # from the end of a trial to the next one
_TURN_NEWS = 1 / 16  # the weight of a turn in the averages of a trial
_FIXED_POSITIONS = 8  # the guess: a step takes as long as its own positions and these
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


class Payoff:
    """Compares the tokens a second with and without proposals of a draft model, for one size of batches.

    It tries both for some turns, then takes the better, and from time to time tries the other again.
    """

    def __init__(self) -> None:
        self._num_turns = 0
        self._tokens, self._seconds = [0.0, 0.0], [0.0, 0.0]  # averages of turns without, and with proposals

    def choose(self) -> bool:
        """Returns whether the model proposes in the next turn."""
        place, is_first = self._num_turns % (_TRIAL + _TURNS_BETWEEN), self._num_turns < 2 * _TRIAL
        self._num_turns += 1
        if is_first:
            return place < _TRIAL
        (tokens, more_tokens), (seconds, more_seconds) = self._tokens, self._seconds
        is_better = more_tokens * seconds > _LEAST_MODEL_GAIN * tokens * more_seconds
        return is_better != (place < _TRIAL)

    def count(self, num_tokens: int, seconds: float, *, has_proposals: bool) -> None:
        """Count a turn."""
        for averages, value in ((self._tokens, num_tokens), (self._seconds, seconds)):
            averages[has_proposals] += _TURN_NEWS * (value - averages[has_proposals])


class Drafter:
    """Drafts the next tokens of rows, as many as the measured times of steps make worth their cost.

    Owned by the scheduler. A position is drafted if it raises the expected number of tokens a second of the
    whole batch: by the chance that the row selects all drafted tokens up to it, and by the time that one more
    position takes. So drafts become shorter in larger batches, and end where they do not pay.

    A draft model, if there is one, drafts for the rows that n-grams predict worse, while that is faster.

    Args:
        eos_ids: The tokens that end a sequence.
        source_name: The source whose ids are those of targets, too; None if there is none.
        num_proposed: The tokens that a draft model proposes for a row; 0 without one.
    """

    def __init__(self, eos_ids: Collection[int], source_name: str | None, num_proposed: int = 0) -> None:
        self._eos_ids = eos_ids
        self._source_name = source_name
        self._num_proposed = num_proposed
        self.times = StepTimes()
        self._rates = [FIRST_RATE, FIRST_RATE]  # of right predictions, from sources and from targets
        self._model_rate = _FIRST_MODEL_RATE if num_proposed else 0.0
        self._payoffs: dict[int, Payoff] = {}  # by the binary digits of the number of rows
        self._payoff: Payoff | None = None  # of the turn, if the model may propose
        self._proposal_seconds: float | None = None  # of the turn, if the model has proposed
        self._seconds = self._num_tokens = 0.0  # both are expectations of the turn that is planned

    def draft(self, rows: tuple[Sequence, ...]) -> tuple[tuple[Sequence, ...], tuple[Sequence, ...]]:
        """Draft by n-grams.

        Returns:
            The drafted positions of running rows, each row's in order, as rows of the same slots; and the
            rows for which the draft model is to propose tokens.
        """
        self._seconds, self._num_tokens = self.times.expected(len(rows)), float(len(rows))
        least = _LEAST_GAIN * self.times.seconds_of_position * self._num_tokens
        rows = tuple(filter(_may_be_drafted, rows))
        if max(*self._rates, self._model_rate) * self._seconds < least:
            rows = rows[:1]  # whose predictions are compared, so that the rates stay known
        drafts, asking = list[Sequence](), list[Sequence]()
        for row in rows:
            follower = self._follow(row)
            predicted = follower.ids[follower.place : follower.place + _MAX_OF_A_ROW]
            if self._is_modelled(row, follower.rate if predicted else 0.0):
                asking.append(row)
            else:
                drafts += self._drafted(row, predicted, follower.rate, MAX_DRAFTED - len(drafts))
        self._payoff, self._proposal_seconds = None, None
        if not asking:
            return tuple(drafts), ()
        self._payoff = self._payoffs.setdefault(len(rows).bit_length(), Payoff())
        most = (MAX_DRAFTED - len(drafts)) // self._num_proposed
        return tuple(drafts), tuple(asking[:most]) if self._payoff.choose() else ()

    def measure(self, num_positions: int, seconds: float, num_tokens: int) -> None:
        """Count a step that has selected tokens."""
        self.times.add(num_positions, seconds)
        if self._payoff is not None:
            has_proposals = self._proposal_seconds is not None
            seconds += self._proposal_seconds or 0.0
            self._payoff.count(num_tokens, seconds, has_proposals=has_proposals)

    def propose(
        self, rows: tuple[Sequence, ...], proposals: list[list[int]], seconds: float
    ) -> tuple[Sequence, ...]:
        """Returns the drafted positions of rows for which the model has proposed tokens."""
        self._proposal_seconds = seconds
        drafts = list[Sequence]()
        for row, token_ids in zip(rows, proposals, strict=True):
            proposal = row.proposal
            assert proposal is not None
            proposal.num_read, proposal.token_ids, proposal.is_compared = (
                row.cache_length + 1,
                token_ids,
                False,
            )
            drafts += self._drafted(row, token_ids, proposal.rate, len(token_ids), is_modelled=True)
        return tuple(drafts)

    def _drafted(
        self, row: Sequence, predicted: list[int], rate: float, room: int, *, is_modelled: bool = False
    ) -> list[Sequence]:
        """Returns the positions of a row's predicted tokens that are worth their time."""
        drafts, chance, token_ids = list[Sequence](), 1.0, row.token_ids
        seconds_of_position = self.times.seconds_of_position
        left = row.request.max_new_tokens - row.num_generated - 1  # the last token is not fed
        for token_id in predicted[: min(room, left)]:
            chance *= rate
            pays = chance * self._seconds >= _LEAST_GAIN * seconds_of_position * self._num_tokens
            if token_id in self._eos_ids or not pays or chance < _LEAST_CHANCE:
                break
            token_ids = [*token_ids, token_id]
            drafts.append(_position(row, token_ids, is_modelled=is_modelled))
            self._num_tokens += chance
            self._seconds += seconds_of_position
        return drafts

    def _is_modelled(self, row: Sequence, other_rate: float) -> bool:
        """Compare the last proposal with what a row has selected; returns whether the next one may help."""
        if row.request.max_new_tokens - row.num_generated < self._num_proposed or not self._num_proposed:
            return False
        proposal = row.proposal = row.proposal or Proposal(self._model_rate)
        if not proposal.is_compared:
            proposal.is_compared = True
            selected = row.token_ids[proposal.num_read - len(row.search.start_ids) :]
            for proposed_id, token_id in zip(proposal.token_ids, selected, strict=False):
                proposal.rate += _ROW_NEWS * ((proposed_id == token_id) - proposal.rate)
                if proposed_id != token_id:
                    break
            self._model_rate += _SHARED_NEWS * (proposal.rate - self._model_rate)
        return proposal.rate > other_rate

    def _follow(self, row: Sequence) -> Follower:
        """Read what a row has selected since; returns the best prediction of its next tokens."""
        if row.lookup is None:
            source = row.request.sources.get(self._source_name or "")
            row.lookup = Lookup(() if source is None else source.tolist(), self._rates)
        row.lookup.read(row.token_ids)
        for i, follower in enumerate(row.lookup.followers):
            self._rates[i] += _SHARED_NEWS * (follower.rate - self._rates[i])
        return row.lookup.best()


def _may_be_drafted(row: Sequence) -> bool:
    """Returns whether a row's next step selects one token, of a target that is not given."""
    request = row.request
    is_generated = row.num_branches == 1 and not (row.num_forced or row.detects or request.is_score)
    return is_generated and request.beam is None


def _position(row: Sequence, token_ids: list[int], *, is_modelled: bool) -> Sequence:
    """Returns the row as it is if it selects these tokens."""
    return Sequence(
        row.search,
        next_token_id=token_ids[-1],
        row=row.row,
        index=row.index,
        token_ids=token_ids,
        is_plain=row.request.is_plain,
        is_modelled=is_modelled,
    )
