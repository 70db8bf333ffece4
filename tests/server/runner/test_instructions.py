"""Quantised models give the same bits whatever instructions multiply: the logits of whole models."""

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import Bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import source_specs

NUM_ROWS, NUM_STEPS = 7, 5  # more rows than one tile has

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="there are no compiled operators")


def logits_of(bundle: Bundle, precision: Precision) -> np.ndarray:
    """The logits `(steps, rows, V)` for random sources and random tokens."""
    config = RunnerConfig(provider="cpu", precision=precision, num_threads=2, max_slots=NUM_ROWS)
    runner = OnnxRunner(bundle, config)
    assert runner.device.has_operators
    rng = np.random.default_rng(0)
    rows, manifest = [], bundle.manifest
    for row in range(NUM_ROWS):
        sources = {}
        for spec in source_specs(manifest, precision):
            shape = [size if isinstance(size, int) else 2 + row for size in spec.axes[1:]]
            whole = np.issubdtype(np.dtype(spec.dtype), np.integer)
            array = rng.integers(4, 90, shape) if whole else rng.standard_normal(shape)
            sources[spec.name] = array.astype(spec.dtype)
        length = manifest.memory.memory_length({name: len(array) for name, array in sources.items()})
        request = Request("r", sources, length, NUM_STEPS, arrival=0.0)
        start_id = runner.start_ids[-1]
        rows.append(Sequence(Search(request, (start_id,)), start_id, row=row, is_plain=False))
    runner.encode(0, [row.search.request for row in rows])
    found = []
    for _ in range(NUM_STEPS):
        runner._columns.fill(tuple(rows), have_grown=False)
        runner._run_step(NUM_ROWS)
        found.append(runner._columns._logits[:NUM_ROWS].copy())
        for sequence, token_id in zip(rows, rng.integers(4, 90, NUM_ROWS).tolist(), strict=True):
            sequence.token_ids.append(token_id)
            sequence.next_token_id = token_id
    return np.array(found)


def check_bits(bundle: Bundle, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits_of(bundle, precision)
    assert np.isfinite(expected).all()
    for name in kernels.available_instructions():
        monkeypatch.setenv("SEQ2SEQ_ISA", name)
        np.testing.assert_array_equal(logits_of(bundle, precision), expected)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_a_transformer_has_the_same_bits_with_all_instructions(precision, random_bundle, monkeypatch):
    check_bits(random_bundle, precision, monkeypatch)


def test_a_recurrent_model_has_the_same_bits_with_all_instructions(random_recurrent, monkeypatch):
    check_bits(random_recurrent("additive")[1], Precision.INT8, monkeypatch)
