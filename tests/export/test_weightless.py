"""The graphs without weights that the server ships are what the exporter makes, and do what they say."""

import numpy as np
import onnxruntime as ort
import pytest

from export import weightless


def session(name: str) -> ort.InferenceSession:
    return ort.InferenceSession(weightless.FOLDER / f"{name}.onnx", providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def greedy() -> ort.InferenceSession:
    return session("greedy")


def test_the_committed_graphs_are_those_made_anew(tmp_path, monkeypatch):
    committed = {path.name: path.read_bytes() for path in weightless.FOLDER.iterdir()}
    monkeypatch.setattr(weightless, "FOLDER", tmp_path / "new")
    weightless.main()
    made = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert made == committed, "run `make stubs`"


@pytest.mark.parametrize(("B", "V"), [(1, 5), (7, 300), (33, 4097)])
def test_greedy_takes_the_best_of_each_row(greedy, B, V):
    logits = np.random.default_rng(0).normal(size=(B, V)).astype(np.float32)
    [token_ids] = greedy.run(None, {"logits": logits})
    np.testing.assert_array_equal(token_ids[:, 0], logits.argmax(axis=1))


@pytest.mark.parametrize("V", [5, 300, 4097])
def test_of_equals_the_lowest_id_is_taken(greedy, V):
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 3, (40, V)).astype(np.float32)
    logits[0] = 0
    [token_ids] = greedy.run(None, {"logits": logits})
    np.testing.assert_array_equal(token_ids[:, 0], logits.argmax(axis=1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_move_copies_rows_over_others_and_reads_before_it_writes(dtype):
    rows = np.arange(20, dtype=dtype).reshape(5, 4)
    feeds = {"buffer": rows, "from_rows": np.array([4, 1]), "to_rows": np.array([[1], [0]])}
    [moved] = session(f"move_{dtype}").run(None, feeds)
    np.testing.assert_array_equal(moved, rows[[1, 4, 2, 3, 4]])
