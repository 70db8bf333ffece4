"""Batches of similar lengths under a token budget, in an order that a seed decides.

Shapes: B batch rows, S source length, T target length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.config import BOS_ID, EOS_ID, PAD_ID
from training.encoded import EncodedCorpus, EncodedPair
from training.ranks import Ranks


@dataclass(frozen=True)
class Batch:
    """Padded ids, and what the decoder should answer.

    Attributes:
        label_ids: The targets' tokens one after the other, each target closed by eos.
        label_places: Where in the target they are answered, counted through all its rows.
    """

    source_ids: Tensor  # (B, S)
    source_mask: Tensor  # (B, S), True = a real token
    target_ids: Tensor  # (B, T), bos first
    label_ids: Tensor  # (labels,)
    label_places: Tensor  # (labels,)

    @property
    def num_labels(self) -> int:
        """How many tokens the decoder should answer."""
        return len(self.label_ids)

    def to(self, device: torch.device) -> Self:
        """The batch on a device."""
        return type(self)(
            self.source_ids.to(device),
            self.source_mask.to(device),
            self.target_ids.to(device),
            self.label_ids.to(device),
            self.label_places.to(device),
        )


@dataclass(frozen=True)
class BatchShare:
    """What one of several processes computes of a batch.

    Attributes:
        pieces: Its rows, in batches of as many as fit at once; empty where a batch has fewer rows than there
            are processes.
        num_labels: Of the whole batch.
        num_tokens: Of both sides of the whole batch.
    """

    pieces: list[Batch]
    num_labels: int
    num_tokens: int


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, longest row), pad at each row's end."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    padded = np.full((len(rows), lengths.max()), PAD_ID, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return torch.from_numpy(padded)


def make_batch(pairs: Sequence[EncodedPair]) -> Batch:
    """Pad some pairs to one length a side."""
    source_ids = pad_rows([pair.source_ids for pair in pairs])
    labels = pad_rows([[*pair.target_ids, EOS_ID] for pair in pairs]).flatten()
    (label_places,) = (labels != PAD_ID).nonzero(as_tuple=True)
    return Batch(
        source_ids=source_ids,
        source_mask=source_ids != PAD_ID,
        target_ids=pad_rows([[BOS_ID, *pair.target_ids] for pair in pairs]),
        label_ids=labels[label_places],
        label_places=label_places,
    )


def plan_epoch(
    pairs: Sequence[EncodedPair], batch_tokens: int, seed: int, epoch: int
) -> list[NDArray[np.int64]]:
    """Which pairs make each batch of one pass over the corpus, by their index.

    Pairs are sorted by length, those of equal lengths in random order, and cut where the padded longer side
    would pass the budget, but hold at least a pair; the batches are then shuffled. The same arguments give
    the same plan.

    Args:
        pairs: The corpus.
        batch_tokens: The most padded tokens of a batch's longer side.
        seed: Of the run.
        epoch: Which pass, from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    source_lengths, target_lengths = _lengths(pairs)
    order = np.lexsort((generator.random(len(pairs)), source_lengths, target_lengths))
    lengths = np.maximum(source_lengths, target_lengths)[order]
    starts, longest = list[int](), 0
    for place, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if not starts or longest * (place - starts[-1] + 1) > batch_tokens:
            starts.append(place)
            longest = length
    batches = np.split(order, starts[1:])
    generator.shuffle(batches)
    return batches


def batches_in_order(pairs: Sequence[EncodedPair], batch_tokens: int) -> Iterator[Batch]:
    """Every pair once, for evaluation: always the same batches."""
    for rows in plan_epoch(pairs, batch_tokens, seed=0, epoch=0):
        yield make_batch([pairs[row] for row in rows])


class BatchStream:
    """Batches without end, pass after pass. Owned by the training loop.

    Invariant: `epoch` and `batch_index` say which batch comes next; a stream made with them goes on there.
    Which pairs make a batch depends neither on the number of processes nor on what fits at once.

    Args:
        pairs_of: The corpus as each pass sees it, by the pass' number from 0.
        batch_tokens: See `plan_epoch`.
        seed: Of the run.
        epoch: Where to start.
        batch_index: Where in that pass to start.
        ranks: The processes that share each batch.
        piece_tokens: The most padded tokens of the longer side that one of them computes at once, but at
            least a pair; None is its whole share.
    """

    def __init__(
        self,
        pairs_of: Callable[[int], Sequence[EncodedPair]],
        batch_tokens: int,
        seed: int,
        epoch: int = 0,
        batch_index: int = 0,
        *,
        ranks: Ranks | None = None,
        piece_tokens: int | None = None,
    ) -> None:
        self._pairs_of = pairs_of
        self._batch_tokens = batch_tokens
        self._seed = seed
        self.epoch = epoch
        self.batch_index = batch_index
        self._ranks = ranks or Ranks()
        self._piece_tokens = piece_tokens or batch_tokens
        self._start_pass()

    def next_batch(self) -> BatchShare:
        """This process' share of the next batch, on the CPU."""
        if self.batch_index == len(self._plan):
            self.epoch += 1
            self.batch_index = 0
            self._start_pass()
        pairs = [self._pairs[row] for row in self._plan[self.batch_index]]
        self.batch_index += 1
        share = self._ranks.share(pairs)
        longest = max((max(len(pair.source_ids), pair.target_length) for pair in share), default=1)
        num_rows = max(self._piece_tokens // longest, 1)
        num_labels = sum(pair.target_length for pair in pairs)
        return BatchShare(
            [make_batch(share[start : start + num_rows]) for start in range(0, len(share), num_rows)],
            num_labels,
            num_labels + sum(len(pair.source_ids) for pair in pairs),
        )

    def any_batch(self) -> Batch:
        """One pair, for a process that has no share of a batch."""
        return make_batch([self._pairs[0]])

    def _start_pass(self) -> None:
        self._pairs = self._pairs_of(self.epoch)
        if not self._pairs:
            raise ValueError("the training corpus has 0 pairs left: nothing to train on")
        self._plan = plan_epoch(self._pairs, self._batch_tokens, self._seed, self.epoch)


def _lengths(pairs: Sequence[EncodedPair]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Of all sources, and of all targets as the decoder sees them."""
    if isinstance(pairs, EncodedCorpus):
        return pairs.source_lengths, pairs.target_lengths
    return (
        np.array([len(pair.source_ids) for pair in pairs], np.int32),
        np.array([pair.target_length for pair in pairs], np.int32),
    )
