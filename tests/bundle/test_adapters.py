"""Adapters in memory."""

import pickle

import numpy as np

from seq2seq_serve.bundle.adapters import AdaptedShape, SharedWeights

PARTS = {"a": AdaptedShape(2, 3, 4), "b": AdaptedShape(1, 5, 2)}
CONTENT = np.arange(21, dtype=np.float16).tobytes()


def test_a_pickle_of_weights_is_small_and_has_the_same_numbers():
    """The event loop of a server pickled all weights for each of its processes, in up to two seconds."""
    weights = SharedWeights(PARTS, CONTENT)
    pickled = pickle.dumps(weights)
    assert len(pickled) < 1000 + 40 * len(PARTS)
    for name, pair in pickle.loads(pickled).items():
        for one, other in zip(pair, weights[name], strict=True):
            np.testing.assert_array_equal(one, other)
    a, b = weights["b"]
    assert (a.tolist(), b.tolist()) == ([[14, 15, 16, 17, 18]], [[19, 20]])


def test_weights_that_are_gone_are_none():
    pickled = pickle.dumps(SharedWeights(PARTS, CONTENT))
    assert pickle.loads(pickled) == {}
