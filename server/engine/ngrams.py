"""Predicts the next tokens of a target by n-grams: of its source, which it may copy, and of itself.

Prompt lookup decoding (Saxena 2023) searches the last tokens of a target anew at each step. Here the place
found is kept, and moved on with the target, as in aggressive decoding (Sun et al. 2021, arXiv:2106.04970):
each prediction is compared with the token that follows, so its share of right ones is known without a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

FIRST_RATE = 0.25  # of right predictions, before there is one
_NEWS = 1 / 16  # the weight of a prediction in the average
_NEAR = 4  # tokens of a text that a target may leave out


class Follower:
    """Follows a target through a text, and predicts that its next token is the text's.

    After a wrong prediction it skips some tokens that the target has left out, or goes to the place after
    the last occurrence of the target's last two tokens. Otherwise it stays, because the target has a token
    more than the text.

    Args:
        ids: The text; None is the target itself.
        rate: The expected share of right predictions.

    Attributes:
        ids: The text.
        place: The index of the next token in the text; its length without a prediction.
        rate: The share of right predictions, a running average.
    """

    def __init__(self, ids: Sequence[int] | None, rate: float) -> None:
        self._grows = ids is None
        self.ids, self.place, self.rate = list(ids or ()), 0, rate
        self._after = {pair: place for place, pair in enumerate(pairwise(self.ids), start=2)}

    def read(self, previous: int, token_id: int) -> None:
        """Compare the prediction with the target's next token, and go on; `previous` is the token before."""
        ids, place, pair = self.ids, self.place, (previous, token_id)
        is_right = place < len(ids) and ids[place] == token_id
        if place < len(ids):
            self.rate += _NEWS * (is_right - self.rate)
        if is_right:
            self.place += 1
        elif token_id in (near := ids[place + 1 : place + 1 + _NEAR]):
            self.place += 2 + near.index(token_id)
        else:
            self.place = self._after.get(pair, len(ids) + 1 if self._grows else place)
        if self._grows:
            ids.append(token_id)
            self._after[pair] = len(ids)


class Lookup:
    """The predictions for one target, from its source and from itself. Owned by its row.

    Args:
        source_ids: The source; empty if its ids are not those of targets.
        rates: The expected shares of right predictions, from the source and from the target.

    Attributes:
        followers: Through the source, and through the target.
    """

    def __init__(self, source_ids: Sequence[int], rates: Sequence[float]) -> None:
        source_rate, target_rate = rates
        self.followers = Follower(source_ids, source_rate), Follower(None, target_rate)
        self._num_read, self._last = 0, -1

    def read(self, token_ids: Sequence[int]) -> list[bool]:
        """Read the tokens of a target since the last call; returns of each whether it was predicted."""
        are_predicted = []
        for token_id in token_ids[self._num_read :]:
            best = self.best()
            are_predicted.append(token_id in best.ids[best.place : best.place + 1])
            for follower in self.followers:
                follower.read(self._last, token_id)
            self._last = token_id
        self._num_read = len(token_ids)
        return are_predicted

    def best(self) -> Follower:
        """Returns the follower with the best rate among those with a prediction."""
        source, target = self.followers
        has_prediction = target.place < len(target.ids)
        if has_prediction and (target.rate > source.rate or source.place >= len(source.ids)):
            return target
        return source
