"""The graphs of memory networks, run by ONNX Runtime, against the trained model."""

from typing import Any

import numpy as np
import pytest
import torch

from seq2seq_serve.bundle import names
from seq2seq_serve.export import parity
from seq2seq_serve.export.graphs.linear import FloatFactory, QuantizedFactory
from seq2seq_serve.export.runtime import Graphs
from seq2seq_serve.training.models.memory_network import MemoryNetwork, MemoryNetworkConfig
from tests.export.graphs.test_captioner import FP16, FP32, graphs_of

# Rows, sentences, target positions: the answer, and the token after it; no example size of the export.
SHAPES = ((1, 1, 2), (2, 8, 2), (5, 33, 2), (4, 4, 2))
KINDS: dict[str, dict[str, Any]] = {
    "adjacent": {"num_hops": 2},
    "layer-wise": {"tying": "layer-wise", "num_hops": 2, "has_empty_memories": False},
    "bag": {"has_position_encoding": False, "num_hops": 1},
}


def make(kind: str) -> MemoryNetwork:
    torch.manual_seed(0)
    model = MemoryNetwork(MemoryNetworkConfig(60, 12, max_source_length=40, **KINDS[kind])).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    ("kind", "linear", "tolerance"),
    [
        # Adjacent tying in fp32 is that of the story that the server's tests export.
        ("layer-wise", FP32, 1e-4),  # sums in another order; measured 1e-6
        # 255 levels for each row of a map's inputs; measured 0.05
        pytest.param("bag", QuantizedFactory(8), 0.15, marks=pytest.mark.slow),
        # The form for CUDA: 11 significant bits, measured 0.002; and checked more exactly.
        pytest.param("adjacent", FP16, 0.02, marks=pytest.mark.slow),
        pytest.param("adjacent", FloatFactory(torch.float32, is_fused=True), 1e-4, marks=pytest.mark.slow),
    ],
)
def test_graphs_equal_the_model_at_sizes_never_seen(kind, linear, tolerance, tmp_path, monkeypatch):
    model, answers, run = make(kind), [], Graphs._run
    monkeypatch.setattr(Graphs, "_run", lambda *given: answers.append(run(*given)) or answers[-1])
    graphs = graphs_of(model, linear, tmp_path)
    assert parity.worst_difference(model, graphs, SHAPES) <= tolerance
    # The form for CUDA writes the answer into the next step.
    selected = [answer for answer in answers if names.TOKEN_IDS in answer]
    assert bool(selected) == (kind == "adjacent")
    for answer in selected:
        best = answer[names.LOGITS].argmax(axis=1)
        np.testing.assert_array_equal(answer[names.TOKEN_IDS][:, 0], best)
