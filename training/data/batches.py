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

from seq2seq_serve.training.config import PAD_ID, TargetFrame
from seq2seq_serve.training.data.encoded import EncodedCorpus, EncodedPair
from seq2seq_serve.training.data.sources import TOKENS, Source, SourceKind, pad_rows
from seq2seq_serve.training.ranks import Ranks

OWN_FRAME = TargetFrame()


@dataclass(frozen=True)
class Batch:
    """A batch of sources, padded target ids, and the labels that the decoder should predict.

    Attributes:
        source: As `SourceKind.collate` returns it.
        label_ids: The tokens of all targets one after the other, each target with eos at its end.
        label_places: The position of each label in the flattened `target_ids`.
    """

    source: Source
    target_ids: Tensor  # (B, T), bos first
    label_ids: Tensor  # (labels,)
    label_places: Tensor  # (labels,)

    @property
    def num_labels(self) -> int:
        return len(self.label_ids)

    @property
    def padded_labels(self) -> Tensor:
        """The label of each position (B, T), and pad after the end of a target."""
        padded = torch.full_like(self.target_ids, PAD_ID).flatten()
        padded[self.label_places] = self.label_ids
        return padded.view_as(self.target_ids)

    def to(self, device: torch.device) -> Self:
        """The batch on a device."""
        source = tuple(tensor.to(device) for tensor in self.source)
        ids = self.target_ids, self.label_ids, self.label_places
        return type(self)(source, *(tensor.to(device) for tensor in ids))


@dataclass(frozen=True)
class BatchShare:
    """The part of a batch that one of several processes computes.

    Attributes:
        pieces: The process' rows, cut into batches that fit at once; empty if there are more processes than
            rows.
        num_labels: Labels of the whole batch.
        num_tokens: Target tokens and positions of sources of the whole batch.
    """

    pieces: list[Batch]
    num_labels: int
    num_tokens: int


def make_batch(
    pairs: Sequence[EncodedPair], kind: SourceKind = TOKENS, frame: TargetFrame = OWN_FRAME
) -> Batch:
    """Pad pairs to one length per side."""
    target_ids = pad_rows([[*frame.start_ids, *pair.target_ids] for pair in pairs])  # (B, T)
    first, (_, T) = len(frame.start_ids) - 1, target_ids.shape
    places = torch.arange(T) - first
    is_label = (places >= 0) & (places < torch.tensor([[pair.target_length] for pair in pairs]))  # (B, T)
    (label_places,) = is_label.flatten().nonzero(as_tuple=True)
    labels = chain.from_iterable((*pair.target_ids, frame.eos_id) for pair in pairs)
    return Batch(
        source=kind.collate([pair.source_ids for pair in pairs]),
        target_ids=target_ids,
        label_ids=torch.tensor(list(labels)),
        label_places=label_places,
    )


def plan_pass(
    pairs: Sequence[EncodedPair],
    batch_tokens: int,
    seed: int,
    epoch: int,
    kind: SourceKind = TOKENS,
    *,
    mixes_lengths: bool = False,
) -> list[NDArray[np.int64]]:
    """The indices of the pairs in each batch of a pass (`epoch`, from 0) over the corpus.

    Pairs are sorted by the length of the target, then of the source, equal lengths in random order. Clips and
    features are sorted by their own length alone: captions of one length often have one form, such as "a red
    cross jumps", and batches of one form taught a captioner of clips half as fast. With `mixes_lengths`, all
    pairs are in random order.

    They are cut into batches whose longer side has at most `batch_tokens` padded tokens, or a single pair.
    The batches are then shuffled. The same arguments give the same plan.
    """
    rows = np.arange(len(pairs))
    generator = np.random.default_rng([seed, epoch])
    source_lengths, target_lengths = _lengths(pairs, rows, kind)
    keys = generator.random(len(rows))
    if mixes_lengths:
        order = np.argsort(keys)
    elif kind.is_text or len(np.unique(source_lengths)) <= 1:
        order = np.lexsort((keys, source_lengths, target_lengths))
    else:
        order = np.lexsort((keys, source_lengths))
    del keys
    lengths = np.maximum(source_lengths, target_lengths)[order]
    starts, longest = list[int](), 0
    for place, length in enumerate(lengths.data):  # a list of them would take twice their memory
        longest = max(longest, length)
        if not starts or longest * (place - starts[-1] + 1) > batch_tokens:
            starts.append(place)
            longest = length
    batches = np.split(rows[order], starts[1:])
    generator.shuffle(batches)
    return batches


def batches_in_order(
    pairs: Sequence[EncodedPair],
    batch_tokens: int,
    kind: SourceKind = TOKENS,
    frame: TargetFrame = OWN_FRAME,
) -> Iterator[Batch]:
    """The batches of an evaluation: every pair once, always in the same order."""
    for rows in plan_pass(pairs, batch_tokens, 0, 0, kind):
        yield make_batch([pairs[row] for row in rows], kind, frame)


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
        kind: SourceKind = TOKENS,
        frame: TargetFrame = OWN_FRAME,
        mixes_lengths: bool = False,
    ) -> None:
        self._pairs_of = pairs_of
        self._kind = kind
        self._frame = frame
        self._mixes_lengths = mixes_lengths
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
            self.batch_index = 0
            self.epoch += 1
            self._start_pass()
        rows = self._plan[self.batch_index]
        pairs = [self._pairs[row] for row in rows]
        self.batch_index += 1
        share = self._ranks.share(pairs)
        lengths = _lengths(self._pairs, rows, self._kind)[0].tolist()
        longest = max((*self._ranks.share(lengths), *(pair.target_length for pair in share)), default=1)
        num_rows = max(self._piece_tokens // longest, 1)
        num_labels = sum(pair.target_length for pair in pairs)
        return BatchShare(
            [
                make_batch(share[start : start + num_rows], self._kind, self._frame)
                for start in range(0, len(share), num_rows)
            ],
            num_labels,
            num_labels + sum(lengths),
        )

    def any_batch(self) -> Batch:
        """A batch of one pair, for a process whose share is empty."""
        return make_batch([self._pairs[0]], self._kind, self._frame)

    def _start_pass(self) -> None:
        self._pairs = self._pairs_of(self.epoch)
        if not self._pairs:
            raise ValueError("the training corpus has 0 pairs left: nothing to train on")
        self._plan: list[NDArray[np.int64]] = []  # the last plan goes before the next one comes
        self._plan = plan_pass(
            self._pairs,
            self._batch_tokens,
            self._seed,
            self.epoch,
            self._kind,
            mixes_lengths=self._mixes_lengths,
        )


def _lengths(
    pairs: Sequence[EncodedPair], rows: NDArray[np.int64], kind: SourceKind
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The lengths of some pairs' sources, of texts with eos, and of their targets with bos or eos."""
    if isinstance(pairs, EncodedCorpus):
        return pairs.lengths(rows)
    chosen = [pairs[row] for row in rows]
    return (
        np.array([kind.length(pair.source_ids) for pair in chosen], np.int32),
        np.array([pair.target_length for pair in chosen], np.int32),
    )
