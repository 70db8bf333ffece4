"""The rules of times are those of transformers: the bounds of the engine, and the graph that applies them."""

from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import WhisperTimeStampLogitsProcessor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.export.graphs import weightless
from seq2seq_serve.server.engine.constraints import time_bounds
from seq2seq_serve.server.engine.state import Search, Sequence
from tests.server.fakes import make_request

V, EOS_ID, OFF_ID, FIRST_ID = 60, 40, 44, 45  # of transformers, where all tokens from FIRST_ID on are times
NUM_ADDED = 3  # words after the last time, of a model that was tuned with them
START_IDS = (41, 42, 43)


@pytest.fixture(scope="module")
def graph():
    return onnxruntime.InferenceSession(weightless.FOLDER / "times.onnx", providers=["CPUExecutionProvider"])


def history(chance: np.random.Generator) -> list[int]:
    """Texts and times in any order, mostly in the usual one."""
    token_ids, time = [], FIRST_ID
    for _ in range(chance.integers(0, 7)):
        kind = chance.random()
        if kind < 0.5:
            time = min(time + int(chance.integers(0, 5)), V - 1)
            token_ids += [time] * int(chance.integers(1, 3))
        elif kind < 0.9:
            token_ids += chance.integers(0, EOS_ID, chance.integers(1, 4)).tolist()
        else:
            token_ids.append(int(chance.integers(0, V)))
    return token_ids


@pytest.mark.parametrize("max_first", [None, 0, 5])
def test_the_allowed_tokens_are_those_of_transformers(graph, max_first):
    settings = SimpleNamespace(
        no_timestamps_token_id=OFF_ID,
        eos_token_id=EOS_ID,
        bos_token_id=EOS_ID,
        max_initial_timestamp_index=max_first,
    )
    theirs = WhisperTimeStampLogitsProcessor(settings, begin_index=len(START_IDS))
    chance, num_preferring = np.random.default_rng(0), 0
    for _ in range(400):
        token_ids = history(chance)
        logits = (2 * chance.standard_normal((1, V))).astype(np.float32)
        logits[chance.random((1, V)) < 0.2] = -np.inf
        logits[0, [EOS_ID, 3]] = 1  # something is left
        logits[0, FIRST_ID:] += chance.choice([-9, 0, 2])
        logits[0, OFF_ID] = -np.inf  # which the service suppresses
        expected = theirs(torch.tensor([[*START_IDS, *token_ids]]), torch.tensor(logits)).numpy()
        row = Sequence(Search(make_request((7,)), START_IDS), next_token_id=1, token_ids=token_ids)
        times = Timestamps(FIRST_ID, V - 1, 0.02, OFF_ID, max_first)
        bounds = time_bounds(row, times, (EOS_ID,), V + NUM_ADDED)
        values = FIRST_ID, V - 1, *bounds
        feeds = {name: np.array([[each]]) for name, each in zip(names.TIME_COLUMNS, values, strict=True)}
        added = np.full((1, NUM_ADDED), -50, np.float32)  # too improbable to change what is compared
        [changed] = graph.run(None, {names.LOGITS: np.concatenate([logits, added], axis=1), **feeds})
        np.testing.assert_array_equal(changed[:, :V], expected, err_msg=str(token_ids))
        has_words = bounds.least_text == 0 and np.isfinite(changed[0, :EOS_ID]).any()
        assert (changed[0, V:] == (-50 if has_words else -np.inf)).all(), token_ids
        num_preferring += bool(bounds.least_text < EOS_ID and not np.isfinite(changed[0, :EOS_ID]).any())
    assert num_preferring > 10, "the sum of the times decided"
