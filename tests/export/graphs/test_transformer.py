"""The three verbs agree with each other and with torch."""

import numpy as np
import pytest
import torch

from seq2seq_serve.bundle.names import SOURCE_IDS, SOURCE_LENGTHS, memory_key, memory_value
from seq2seq_serve.export.runtime import Sources

B, S, T = 4, 14, 9
LENGTHS = np.array([S, 1, 6, 11], np.int32)
# `step` and `decode` attend with different kernels: float32 sums in another order (measured 2e-6). In int8
# such a difference can tip a value to the next of 256 levels.
TOLERANCES = {"post_fp32": 1e-5, "pre_fp32": 1e-5, "post_int8": 1e-5}


def encode(exported, source_ids):
    sources = Sources({SOURCE_IDS: source_ids, SOURCE_LENGTHS: LENGTHS}, LENGTHS)
    return exported.graphs.encode(sources, memory_capacity=S + 5)


@pytest.fixture
def case(exported, request):
    rng = np.random.default_rng(3)
    V = exported.trained.config.vocab_size
    ids = {name: rng.integers(0, V, shape) for name, shape in (("source", (B, S)), ("target", (B, T)))}
    memory = encode(exported, ids["source"])
    return (
        exported,
        memory,
        ids["source"],
        ids["target"],
        TOLERANCES[request.node.callspec.params["exported"]],
    )


def keys_and_values(exported, memory):
    layers = range(exported.trained.config.num_decoder_layers)
    return {name(layer): memory[name(layer)] for layer in layers for name in (memory_key, memory_value)}


def decode_once(exported, memory, target_ids, label_ids):
    buffers = exported.graphs.empty_cache(B, T + 3)
    scores, attention = exported.graphs.decode(
        target_ids, label_ids, LENGTHS, buffers | keys_and_values(exported, memory)
    )
    return scores, attention, buffers


def log_softmax(logits):
    return torch.from_numpy(logits).log_softmax(-1).numpy()


@pytest.mark.parametrize("exported", TOLERANCES, indirect=True)
def test_step_repeated_equals_decode_once(case):
    exported, memory, _, target_ids, tolerance = case
    label_ids = np.roll(target_ids, -1, axis=1)
    scores, _, once = decode_once(exported, memory, target_ids, label_ids)
    repeated = exported.graphs.empty_cache(B, T + 3)
    for position in range(T):
        logits = exported.graphs.step(
            target_ids[:, position].copy(), np.full(B, position, np.int32), LENGTHS, repeated | memory
        )
        given = log_softmax(logits)[np.arange(B), label_ids[:, position]]
        np.testing.assert_allclose(given, scores[:, position], atol=tolerance)
    for name, cache in once.items():
        assert np.abs(cache[:, :, :T]).max() > 0.1
        np.testing.assert_allclose(repeated[name][:, :, :T], cache[:, :, :T], atol=tolerance)
        assert not repeated[name][:, :, T:].any(), "a step wrote past its position"


@pytest.mark.parametrize("exported", TOLERANCES, indirect=True)
def test_only_labelled_positions_are_scored(case):
    exported, memory, _, target_ids, _ = case
    scores, attention, _ = decode_once(exported, memory, target_ids, target_ids)
    for num_labels in (0, 1, 4):
        label_ids = np.ascontiguousarray(target_ids[:, :num_labels])
        some, same_attention, _ = decode_once(exported, memory, target_ids, label_ids)
        assert some.shape == (B, num_labels)
        np.testing.assert_allclose(some, scores[:, :num_labels], atol=1e-5)
        np.testing.assert_array_equal(same_attention, attention)


@pytest.mark.parametrize("exported", TOLERANCES, indirect=True)
def test_positions_in_pieces_are_the_same_as_at_once(case):
    exported, memory, _, target_ids, tolerance = case
    scores, attention, cache = decode_once(exported, memory, target_ids, target_ids)
    for row in range(B):
        here = slice(row, row + 1)
        buffers = exported.graphs.empty_cache(1, T + 3)
        own = {name: array[here].copy() for name, array in keys_and_values(exported, memory).items()}
        for first, end in ((0, 4), (4, 5), (5, T)):
            piece = target_ids[here, first:end].copy()
            some, weights = exported.graphs.decode(
                piece, piece, LENGTHS[here], buffers | own, first_position=first
            )
            np.testing.assert_allclose(some[0], scores[row, first:end], atol=tolerance)
            np.testing.assert_allclose(weights[0], attention[row, first:end], atol=tolerance)
        for name, array in buffers.items():
            np.testing.assert_allclose(array[0, :, :T], cache[name][row, :, :T], atol=tolerance)


@pytest.mark.parametrize("exported", TOLERANCES, indirect=True)
def test_a_row_reads_the_equal_memory_of_its_owner(case):
    exported, memory, _, target_ids, _ = case
    rows, lengths = np.array([1, 1, 2, 1, 2]), np.array([0, 8, 3, 5, 3], np.int32)
    _, _, cache = decode_once(exported, memory, target_ids, target_ids)
    buffers = {name: array[rows].copy() for name, array in (cache | memory).items()}
    fed, source_lengths = target_ids[rows, lengths].copy(), LENGTHS[rows].copy()
    own = {name: array.copy() for name, array in buffers.items()}
    alone = exported.graphs.step(fed, lengths, source_lengths, own)
    owners = np.array([0, 0, 2, 0, 2])
    np.testing.assert_array_equal(exported.graphs.step(fed, lengths, source_lengths, buffers, owners), alone)


@pytest.mark.parametrize("exported", TOLERANCES, indirect=True)
def test_padding_and_what_a_row_held_before_do_not_matter(case):
    """Nobody reads ids or memory past a source's end, nor cache past a row's length."""
    exported, memory, source_ids, target_ids, _ = case
    other_ids = source_ids.copy()
    for row, length in enumerate(LENGTHS):
        other_ids[row, length:] = 7
    other_memory = encode(exported, other_ids)
    rng = np.random.default_rng(4)
    for name, array in other_memory.items():
        if array.ndim == 4:
            for row, length in enumerate(LENGTHS):
                array[row, :, length:] = rng.normal(0, 100, array[row, :, length:].shape)
        else:
            np.testing.assert_allclose(array, memory[name], atol=1e-5)
    other_cache = {
        name: rng.normal(0, 100, array.shape).astype(array.dtype)
        for name, array in exported.graphs.empty_cache(B, T + 3).items()
    }
    start = np.zeros(B, np.int32)
    cache = exported.graphs.empty_cache(B, T + 3)
    for position in range(2):
        fed = target_ids[:, position].copy()
        logits = exported.graphs.step(fed, start + position, LENGTHS, cache | memory)
        others = exported.graphs.step(fed, start + position, LENGTHS, other_cache | other_memory)
        np.testing.assert_allclose(others, logits, atol=1e-5)
    _, attention, _ = decode_once(exported, memory, target_ids, target_ids)
    _, other_attention, _ = decode_once(exported, other_memory, target_ids, target_ids)
    np.testing.assert_allclose(other_attention, attention, atol=1e-6)


@pytest.mark.parametrize("exported", ["post_fp32", "pre_fp32"], indirect=True)
def test_alignment_is_the_mean_of_the_heads_of_torch(case):
    exported, memory, source_ids, target_ids, _ = case
    model, layer = exported.trained.model, exported.decode.alignment_layer
    source_mask = torch.arange(S) < torch.from_numpy(LENGTHS)[:, None]
    with torch.no_grad():
        states = model.encode(torch.from_numpy(source_ids), source_mask)
        weights = model.decode_with_attention(torch.from_numpy(target_ids), states, source_mask)[1]
    _, attention, _ = decode_once(exported, memory, target_ids, target_ids)
    np.testing.assert_allclose(attention[:, :, :S], weights[layer].mean(dim=1), atol=1e-5)
    np.testing.assert_allclose(attention.sum(axis=2), 1, atol=1e-5)
    for row, length in enumerate(LENGTHS):
        assert not attention[row, :, length:].any()


@pytest.mark.parametrize("exported", TOLERANCES, indirect=True)
def test_the_plain_greedy_search_of_the_export_is_a_loop_over_step(case):
    exported, _, source_ids, _, _ = case
    sources = [row[:length].tolist() for row, length in zip(source_ids, LENGTHS, strict=True)]
    limits = range(4, 4 + len(sources))
    together = exported.graphs.greedy(sources, start_id=1, eos_id=2, max_new_tokens=limits)
    alone = [
        exported.graphs.greedy([source], start_id=1, eos_id=2, max_new_tokens=[limit])[0]
        for source, limit in zip(sources, limits, strict=True)
    ]
    assert together == alone
    assert any(together)
    assert len({tuple(target) for target in together}) > 1
