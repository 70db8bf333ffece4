"""Positions of rows are copied alike with the library and without it."""

import random

import numpy as np
import pytest

from seq2seq_serve import kernels


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
def test_moves_are_carried_out_in_order(dtype, has_library, monkeypatch):
    if not has_library:
        monkeypatch.setattr(kernels, "_function", lambda name: None)
    elif kernels._function("copy_positions") is None:
        pytest.skip("the library is not compiled")
    chance = random.Random(0)
    for _ in range(50):
        G, N, outer, positions, inner = (chance.randint(1, 6) for _ in range(5))
        whole = np.random.default_rng(1).integers(0, 200, (G, N, outer, positions + 2, inner)).astype(dtype)
        tensors = whole[:, :, :, :positions]  # a part of each row, as in memory with room
        moves = []
        for _ in range(chance.randint(0, 8)):
            first = chance.randrange(positions)
            count = chance.randint(1, positions - first)
            moves.append((chance.randrange(N), chance.randrange(N), first, count))
        expected = whole.copy()
        for from_row, to_row, first, count in moves:
            live = slice(first, first + count)
            expected[:, to_row, :, live] = expected[:, from_row, :, live]
        kernels.copy_positions(tensors, np.array(moves, np.int64).reshape(-1, 4))
        np.testing.assert_array_equal(whole, expected)
