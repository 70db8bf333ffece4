"""The proof that a bundle's graphs compute what the trained model computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bundle.names import Role
from export.graphs import DecodeGraph
from export.runtime import Array, Graphs, pad
from training.transformer import Transformer

# (batch, source length, target length), none of which the export's examples have.
SHAPES = ((1, 1, 1), (1, 9, 6), (2, 17, 4), (4, 33, 12), (9, 24, 3))


def worst_difference(
    model: Transformer, graphs: Graphs, decode: DecodeGraph, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> float:
    """The largest difference of log-probabilities and alignments, over every position and token.

    Sources and targets are random; in a batch the first row is full and the others are padded. `step` is
    compared for the whole vocabulary at every position, `decode` for random labels, with its alignment.
    """
    rng = np.random.default_rng(0)
    worst = 0.0
    for shape in shapes:
        B, S, T = (
            shape[0],
            min(shape[1], model.config.max_source_length),
            min(shape[2], model.config.max_target_length),
        )
        source_ids = rng.integers(0, model.config.vocab_size, (B, S))
        source_lengths = np.array([S, *rng.integers(1, S + 1, B - 1)], np.int32)
        target_ids = rng.integers(0, model.config.vocab_size, (B, T))
        label_ids = rng.integers(0, model.config.vocab_size, (B, T))
        expected, alignment = _expected(model, decode, source_ids, source_lengths, target_ids)
        memory = graphs.encode(source_ids, source_lengths, memory_capacity=S + 3)
        buffers = memory | graphs.empty_cache(B, T + 2)
        for position in range(T):
            cache_lengths = np.full(B, position, np.int32)
            logits = graphs.step(target_ids[:, position].copy(), cache_lengths, source_lengths, buffers)
            worst = max(worst, _distance(_log_softmax(logits), expected[:, position]))
        scores, attention = _decoded(graphs, decode, memory, source_lengths, target_ids, label_ids)
        labels = np.take_along_axis(expected, label_ids[:, :, None], axis=2)[:, :, 0]
        worst = max(worst, _distance(scores, labels), _distance(attention[:, :, :S], alignment))
    return worst


def mean_difference(
    model: Transformer,
    graphs: Graphs,
    decode: DecodeGraph,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> float:
    """The mean absolute difference of the log-probabilities of real targets' tokens, by `decode`.

    Args:
        model: In eval mode.
        graphs: What it is compared with.
        decode: The module of the decode graph.
        pairs: `(source token ids, target token ids with the start token)`.
    """
    total, num_tokens = 0.0, 0
    for source, target in pairs:
        source_ids, source_lengths = pad([source])
        target_ids, label_ids = np.array([target[:-1]]), np.array([target[1:]])
        expected, _ = _expected(model, decode, source_ids, source_lengths, target_ids)
        memory = graphs.encode(source_ids, source_lengths, memory_capacity=len(source))
        scores, _ = _decoded(graphs, decode, memory, source_lengths, target_ids, label_ids)
        labels = np.take_along_axis(expected, label_ids[:, :, None], axis=2)[:, :, 0]
        total += float(np.abs(scores - labels).sum())
        num_tokens += label_ids.size
    return total / num_tokens


def _decoded(
    graphs: Graphs,
    decode: DecodeGraph,
    memory: dict[str, Array],
    source_lengths: Array,
    target_ids: Array,
    label_ids: Array,
) -> tuple[Array, Array]:
    """Log-probabilities `(B, T)` of the labels and the alignment, from an empty cache."""
    B, T = target_ids.shape
    read = {spec.name: memory[spec.name] for spec in decode.inputs if spec.role is Role.MEMORY}
    buffers = graphs.empty_cache(B, T + 2) | read
    return graphs.decode(target_ids, label_ids, source_lengths, buffers)


def _expected(
    model: Transformer, decode: DecodeGraph, source_ids: Array, source_lengths: Array, target_ids: Array
) -> tuple[Array, Array]:
    """Log-probabilities `(B, T, V)` and alignment `(B, T, S)` of the trained model."""
    source_mask = torch.arange(source_ids.shape[1]) < torch.from_numpy(source_lengths)[:, None]  # (B, S)
    with torch.inference_mode():
        memory = model.encode(torch.from_numpy(source_ids), source_mask)
        logits, weights = model.decode_with_attention(torch.from_numpy(target_ids), memory, source_mask)
        alignment = weights[decode.alignment_layer].mean(dim=1)
        return logits.log_softmax(-1).numpy(), alignment.numpy()


def _log_softmax(logits: Array) -> Array:
    return torch.from_numpy(logits).log_softmax(-1).numpy()


def _distance(given: Array, expected: Array) -> float:
    difference = float(np.abs(given - expected).max())
    return difference if np.isfinite(difference) else float("inf")
