"""Batches of pairs of similar length, within a token budget and in an order that the seed decides.

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

from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID
from seq2seq_serve.training.data.encoded import EncodedCorpus, EncodedPair
from seq2seq_serve.training.ranks import Ranks


@dataclass(frozen=True)
class Batch:
    """Padded source and target ids, and the labels that the decoder should predict.

    Attributes:
        label_ids: The tokens of all targets one after the other, each target with eos at its end.
        label_places: The position of each label in the flattened `target_ids`.
    """

    source_ids: Tensor  # (B, S)
    source_mask: Tensor  # (B, S), True = a real token
    target_ids: Tensor  # (B, T), bos first
    label_ids: Tensor  # (labels,)
    label_places: Tensor  # (labels,)

    @property
    def num_labels(self) -> int:
        return len(self.label_ids)

    def to(self, device: torch.device) -> Self:
        """The batch on a device."""
        return type(self)(*(tensor.to(device) for tensor in vars(self).values()))


@dataclass(frozen=True)
class BatchShare:
    """The part of a batch that one of several processes computes.

    Attributes:
        pieces: The process' rows, cut into batches that fit at once; empty if there are more processes than
            rows.
        num_labels: Labels of the whole batch.
        num_tokens: Tokens of both sides of the whole batch.
    """

    pieces: list[Batch]
    num_labels: int
    num_tokens: int


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, length of the longest row), with pad at the end of shorter rows."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    padded = np.full((len(rows), lengths.max()), PAD_ID, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return torch.from_numpy(padded)


def make_batch(pairs: Sequence[EncodedPair]) -> Batch:
    """Pad pairs to one length per side."""
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
    """The indices of the pairs in each batch of one pass (`epoch`, from 0) over the corpus.

    Pairs are sorted by length, equal lengths in random order, and cut into batches whose longer side has at
    most `batch_tokens` padded tokens, or a single pair. The batches are then shuffled. The same arguments
    give the same plan.
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
    """The batches of an evaluation: every pair once, always in the same order."""
    for rows in plan_epoch(pairs, batch_tokens, seed=0, epoch=0):
        yield make_batch([pairs[row] for row in rows])


class BatchStream:
    """Batches without end, pass after pass. Owned by the training loop.

    Invariant: `epoch` and `batch_index` are those of the next batch; a stream created with them continues
    there. The pairs of a batch depend neither on the number of processes nor on `piece_tokens`.

    `pairs_of` returns the corpus as a pass sees it, by the pass' number from 0. `piece_tokens` is the most
    padded tokens of the longer side that a process computes at once, or a single pair; None does not cut its
    share.
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
        """A batch of one pair, for a process whose share is empty."""
        return make_batch([self._pairs[0]])

    def _start_pass(self) -> None:
        self._pairs = self._pairs_of(self.epoch)
        if not self._pairs:
            raise ValueError("the training corpus has 0 pairs left: nothing to train on")
        self._plan = plan_epoch(self._pairs, self._batch_tokens, self._seed, self.epoch)


def _lengths(pairs: Sequence[EncodedPair]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The lengths of all sources with eos, and of all targets with bos or eos."""
    if isinstance(pairs, EncodedCorpus):
        return pairs.source_lengths, pairs.target_lengths
    return (
        np.array([len(pair.source_ids) for pair in pairs], np.int32),
        np.array([pair.target_length for pair in pairs], np.int32),
    )
