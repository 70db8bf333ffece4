"""Batches of similar lengths under a token budget, in an order that a seed decides.

Shapes: B batch rows, S source length, T target length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from bundle.tokenizer import Tokenizer
from training.config import BOS_ID, EOS_ID, PAD_ID
from training.text_files import SentencePair


class EncodedPair(NamedTuple):
    """A pair as token ids.

    Attributes:
        source_ids: Framed as the encoder expects it: text and eos.
        target_ids: The text alone.
    """

    source_ids: list[int]
    target_ids: list[int]

    @property
    def target_length(self) -> int:
        """Decoder positions: bos and the text going in, the text and eos coming out."""
        return len(self.target_ids) + 1


def encode_pairs(pairs: Sequence[SentencePair], tokenizer: Tokenizer) -> list[EncodedPair]:
    """Turn texts into ids."""
    sources = tokenizer.encode_sources([pair.source for pair in pairs])
    targets = tokenizer.encode_batch([pair.target for pair in pairs])
    return [EncodedPair(*ids) for ids in zip(sources, targets, strict=True)]


@dataclass(frozen=True)
class Batch:
    """Padded ids. Labels are what the decoder should answer at each position; pad where there is none.

    Attributes:
        num_tokens: Real ones, of both sides.
    """

    source_ids: Tensor  # (B, S)
    source_mask: Tensor  # (B, S), True = a real token
    target_ids: Tensor  # (B, T), bos first
    label_ids: Tensor  # (B, T), eos last
    num_tokens: int

    def to(self, device: torch.device) -> Self:
        """The batch on a device."""
        return type(self)(
            self.source_ids.to(device),
            self.source_mask.to(device),
            self.target_ids.to(device),
            self.label_ids.to(device),
            self.num_tokens,
        )


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, longest row), pad at each row's end."""
    length = max(map(len, rows))
    return torch.tensor([[*row, *[PAD_ID] * (length - len(row))] for row in rows])


def make_batch(pairs: Sequence[EncodedPair]) -> Batch:
    """Pad some pairs to one length a side."""
    source_ids = pad_rows([pair.source_ids for pair in pairs])
    return Batch(
        source_ids=source_ids,
        source_mask=source_ids != PAD_ID,
        target_ids=pad_rows([[BOS_ID, *pair.target_ids] for pair in pairs]),
        label_ids=pad_rows([[*pair.target_ids, EOS_ID] for pair in pairs]),
        num_tokens=sum(len(pair.source_ids) + pair.target_length for pair in pairs),
    )


def plan_epoch(pairs: Sequence[EncodedPair], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which pairs make each batch of one pass over the corpus, by their index.

    Pairs are sorted by length, those of equal lengths in random order, and cut where the padded longer side
    would pass the budget; the batches are then shuffled. The same arguments give the same plan.

    Args:
        pairs: The corpus.
        batch_tokens: The most padded tokens of a batch's longer side.
        seed: Of the run.
        epoch: Which pass, from 0.

    Raises:
        ValueError: One pair alone is over the budget.
    """
    generator = np.random.default_rng([seed, epoch])
    source_lengths = np.array([len(pair.source_ids) for pair in pairs])
    target_lengths = np.array([pair.target_length for pair in pairs])
    order = np.lexsort((generator.random(len(pairs)), source_lengths, target_lengths))
    batches: list[list[int]] = []
    rows: list[int] = []
    longest = 0
    for index in order.tolist():
        length = max(source_lengths[index], target_lengths[index])
        if length > batch_tokens:
            raise ValueError(f"a pair of {length} tokens is over batch_tokens, {batch_tokens}")
        if max(longest, length) * (len(rows) + 1) > batch_tokens:
            batches.append(rows)
            rows, longest = [], 0
        rows.append(index)
        longest = max(longest, length)
    batches.append(rows)
    generator.shuffle(batches)
    return batches


def batches_in_order(pairs: Sequence[EncodedPair], batch_tokens: int) -> Iterator[Batch]:
    """Every pair once, for evaluation: always the same batches."""
    for rows in plan_epoch(pairs, batch_tokens, seed=0, epoch=0):
        yield make_batch([pairs[row] for row in rows])


class BatchStream:
    """Batches without end, pass after pass. Owned by the training loop.

    Invariant: `epoch` and `batch_index` say which batch comes next; a stream made with them goes on there.

    Args:
        pairs_of: The corpus as each pass sees it, by the pass' number from 0.
        batch_tokens: See `plan_epoch`.
        seed: Of the run.
        epoch: Where to start.
        batch_index: Where in that pass to start.
    """

    def __init__(
        self,
        pairs_of: Callable[[int], Sequence[EncodedPair]],
        batch_tokens: int,
        seed: int,
        epoch: int = 0,
        batch_index: int = 0,
    ) -> None:
        self._pairs_of = pairs_of
        self._batch_tokens = batch_tokens
        self._seed = seed
        self.epoch = epoch
        self.batch_index = batch_index
        self._start_pass()

    def next_batch(self) -> Batch:
        """The next batch, on the CPU."""
        if self.batch_index == len(self._plan):
            self.epoch += 1
            self.batch_index = 0
            self._start_pass()
        rows = self._plan[self.batch_index]
        self.batch_index += 1
        return make_batch([self._pairs[row] for row in rows])

    def _start_pass(self) -> None:
        self._pairs = self._pairs_of(self.epoch)
        if not self._pairs:
            raise ValueError("the training corpus has 0 pairs left: nothing to train on")
        self._plan = plan_epoch(self._pairs, self._batch_tokens, self._seed, self.epoch)
