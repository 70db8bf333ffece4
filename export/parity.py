"""The proof that a bundle's graphs compute what the trained model computes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from seq2seq_serve.bundle import names
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.training.config import BOS_ID
from seq2seq_serve.training.data.sources import Array, Inputs
from seq2seq_serve.training.models.base import EncoderDecoder

Shapes = Sequence[tuple[int, int, int]]  # (batch, source length, target length)

# The export's example sizes differ from all of them.
SHAPES = ((1, 1, 1), (1, 9, 6), (2, 17, 4), (4, 33, 12), (9, 24, 3))


def worst_difference(
    model: EncoderDecoder,
    graphs: Graphs,
    shapes: Shapes = SHAPES,
) -> float:
    """The largest difference of log-probabilities and alignments, over every position and token.

    Sources are random, and so are targets after bos; in a batch the first row is full and the others are
    padded. `step` is compared for the whole vocabulary at every position, and `decode`, if the model has it,
    for random labels. The alignment of the graph that computes it is compared, too.
    """
    worst = 0.0
    for rows, target_ids, label_ids in _random_batches(model, shapes):
        B, T = target_ids.shape
        sources = graphs.sources(rows)
        source_lengths, S = sources.lengths, int(sources.lengths.max())
        expected, alignment = _expected(model, rows, target_ids)
        memory = graphs.encode(sources, memory_capacity=S + 3)
        buffers = memory | graphs.empty_cache(B, T + 2)
        for position in range(T):
            cache_lengths = np.full(B, position, np.int32)
            logits = graphs.step(target_ids[:, position].copy(), cache_lengths, source_lengths, buffers)
            worst = max(worst, _distance(_log_softmax(logits), expected[:, position]))
            if names.ATTENTION in buffers:
                assert alignment is not None
                worst = max(worst, _distance(buffers[names.ATTENTION][..., :S], alignment[:, position]))
        if graphs.has_decode:
            scores, attention = _decoded(graphs, memory, source_lengths, target_ids, label_ids)
            labels = np.take_along_axis(expected, label_ids[:, :, None], axis=2)[:, :, 0]
            assert alignment is not None
            worst = max(worst, _distance(scores, labels), _distance(attention[..., :S], alignment))
    return worst


def rounding(model: EncoderDecoder, shapes: Shapes = SHAPES) -> float:
    """The largest difference of the log-probabilities of `model` in float32 and in float64.

    They are for the batches of `worst_difference`. A copy of the weights in float64 is made.
    """
    return between(model, copy.deepcopy(model).double(), shapes)


def between(model: EncoderDecoder, other: EncoderDecoder, shapes: Shapes = SHAPES) -> float:
    """The largest difference of log-probabilities of two models, for the batches of `worst_difference`."""
    worst = 0.0
    for rows, target_ids, _ in _random_batches(model, shapes):
        expected, _ = _expected(model, rows, target_ids)
        found, _ = _expected(other, rows, target_ids)
        worst = max(worst, _distance(found, expected))
    return worst


def mean_difference(
    model: EncoderDecoder,
    graphs: Graphs,
    pairs: Sequence[tuple[Inputs, Sequence[int]]],
) -> float:
    """The mean absolute difference of the log-probabilities of real targets' tokens.

    A pair is a source, and the target's token ids with the start token.
    """
    total, num_tokens = 0.0, 0
    for source, target in pairs:
        sources = graphs.sources([source])
        source_lengths = sources.lengths
        target_ids, label_ids = np.array([target[:-1]]), np.array([target[1:]])
        expected, _ = _expected(model, [source], target_ids)
        memory = graphs.encode(sources, memory_capacity=int(source_lengths.max()))
        if graphs.has_decode:
            scores, _ = _decoded(graphs, memory, source_lengths, target_ids, label_ids)
        else:
            scores = _stepped(graphs, memory, source_lengths, target_ids, label_ids)
        labels = np.take_along_axis(expected, label_ids[:, :, None], axis=2)[:, :, 0]
        total += float(np.abs(scores - labels).sum())
        num_tokens += label_ids.size
    return total / num_tokens


def equal_tokens(graphs: Graphs, pairs: Sequence[tuple[Inputs, Sequence[int]]], num_start: int) -> float:
    """The share of tokens of a model's own greedy targets that `step` selects after those before them.

    A pair is a source, and the target's token ids, the first `num_start` of which were given.
    """
    num_equal = num_tokens = 0
    for source, target in pairs:
        sources = graphs.sources([source])
        memory = graphs.encode(sources, memory_capacity=int(sources.lengths.max()))
        steps = _step_logits(graphs, memory, sources.lengths, np.array([target[:-1]]))
        selected = [int(logits[0].argmax()) for logits in steps][num_start - 1 :]
        num_equal += sum(map(operator.eq, selected, target[num_start:]))
        num_tokens += len(selected)
    return num_equal / num_tokens


def random_pairs(model: EncoderDecoder, shapes: Shapes) -> list[tuple[Inputs, list[int]]]:
    """Random sources with random targets, for `mean_difference`."""
    return [
        (source, target.tolist())
        for rows, target_ids, _ in _random_batches(model, shapes)
        for source, target in zip(rows, target_ids, strict=True)
    ]


def _random_batches(model: EncoderDecoder, shapes: Shapes) -> Iterator[tuple[list[Inputs], Array, Array]]:
    """Yields the sources, target ids `(B, T)` and label ids `(B, T)` of a batch for each shape."""
    rng = np.random.default_rng(0)
    config = model.config
    for B, longest_source, longest_target in shapes:
        S, T = min(longest_source, config.max_source_length), min(longest_target, config.max_target_length)
        lengths = [S, *rng.integers(1, S + 1, B - 1).tolist()]
        rows = [model.source_kind.random(rng, length, len(model.source_weight)) for length in lengths]
        target_ids = rng.integers(0, config.vocab_size, (B, T))
        target_ids[:, 0] = BOS_ID  # a model may treat the first position in its own way
        yield rows, target_ids, rng.integers(0, config.vocab_size, (B, T))


def _decoded(
    graphs: Graphs,
    memory: dict[str, Array],
    source_lengths: Array,
    target_ids: Array,
    label_ids: Array,
) -> tuple[Array, Array]:
    """Log-probabilities `(B, T)` of the labels and the alignment, by `decode` from an empty cache."""
    B, T = target_ids.shape
    return graphs.decode(target_ids, label_ids, source_lengths, graphs.empty_cache(B, T + 2) | memory)


def _stepped(
    graphs: Graphs,
    memory: dict[str, Array],
    source_lengths: Array,
    target_ids: Array,
    label_ids: Array,
) -> Array:
    """Log-probabilities `(B, T)` of the labels, by repeated `step`."""
    steps = _step_logits(graphs, memory, source_lengths, target_ids)
    columns = [
        np.take_along_axis(_log_softmax(logits), label_ids[:, position : position + 1], axis=1)
        for position, logits in enumerate(steps)
    ]
    return np.concatenate(columns, axis=1)


def _step_logits(
    graphs: Graphs, memory: dict[str, Array], source_lengths: Array, target_ids: Array
) -> Iterator[Array]:
    """Yields the logits `(B, V)` after each position of targets `(B, T)`, from an empty cache."""
    B, T = target_ids.shape
    buffers = memory | graphs.empty_cache(B, T)
    for position in range(T):
        lengths = np.full(B, position, np.int32)
        yield graphs.step(target_ids[:, position].copy(), lengths, source_lengths, buffers)


def _expected(model: EncoderDecoder, rows: Sequence[Inputs], target_ids: Array) -> tuple[Array, Array | None]:
    """The trained model's log-probabilities `(B, T, V)`, and its attention `(B, T, …, S)` if it has any."""
    dtype = next(model.parameters()).dtype
    source = [x.to(dtype) if x.is_floating_point() else x for x in model.source_kind.tensors(rows)]
    with torch.inference_mode(), default_dtype(dtype):
        memory = model.encode(*source)
        logits, weights = model.decode_with_attention(torch.from_numpy(target_ids), memory, source[-1])
        alignment = model.reported_attention(weights)
        return logits.log_softmax(-1).numpy(), None if alignment is None else alignment.numpy()


def _log_softmax(logits: Array) -> Array:
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def _distance(given: Array, expected: Array) -> float:
    difference = float(np.abs(given - expected).max())
    return difference if np.isfinite(difference) else float("inf")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Integers become numbers of this type, as pixels do in a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
