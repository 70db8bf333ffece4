"""The graphs of memory networks, run by ONNX Runtime, against the trained model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
import torch
from torch import Tensor

from seq2seq_serve import kernels
from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.export import convert
from seq2seq_serve.export.graphs.base import Graph
from seq2seq_serve.export.graphs.families import make_modules
from seq2seq_serve.export.graphs.linear import FloatFactory, Int8Factory, LinearFactory
from seq2seq_serve.training.config import BOS_ID, PAD_ID
from seq2seq_serve.training.models.memory_network import MemoryNetwork, MemoryNetworkConfig

Array = npt.NDArray[Any]
V, D = 60, 12
# Rows, sentences, words of a sentence, words of the question; none of them is an example size of the export.
SHAPES = ((1, 1, 1, 1), (2, 8, 4, 6), (5, 33, 9, 10), (4, 4, 12, 1))
KINDS: dict[str, dict[str, Any]] = {
    "adjacent": {"num_hops": 2},
    "layer-wise": {"tying": "layer-wise", "num_hops": 2, "relu": "half", "has_empty_memories": False},
    "bag": {"has_position_encoding": False, "num_hops": 1, "relu": "all"},
}


@dataclass(frozen=True)
class Batch:
    story: Array
    lengths: Array
    question: Array

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.story.shape[1]) < torch.from_numpy(self.lengths)[:, None]


def draw(shape: tuple[int, int, int, int]) -> Batch:
    """Random stories and questions with padding in all rows but the first."""
    B, N, J, Q = shape
    rng = np.random.default_rng(0)
    story, question = rng.integers(PAD_ID + 1, V, (B, N, J)), rng.integers(PAD_ID + 1, V, (B, Q))
    lengths = np.array([N, *rng.integers(1, N + 1, B - 1)], np.int32)
    story[np.arange(J) >= rng.integers(1, J + 1, (B, N, 1))] = PAD_ID
    story[np.arange(N) >= lengths[:, None]] = PAD_ID
    question[1:][np.arange(Q) >= rng.integers(1, Q + 1, (B - 1, 1))] = PAD_ID
    return Batch(story, lengths, question)


class Exported:
    """Sessions over the files of a model's graphs."""

    def __init__(self, model: MemoryNetwork, linear: LinearFactory, folder: Path) -> None:
        self.model = model
        self.modules = make_modules(model, linear)
        paths = convert.save({verb: convert.convert(module) for verb, module in self.modules.items()}, folder)
        options = ort.SessionOptions()
        kernels.register(options)
        self.sessions = {verb: ort.InferenceSession(path, options) for verb, path in paths.items()}

    def run(self, verb: Verb, feeds: dict[str, Array]) -> dict[str, Array]:
        graph: Graph = self.modules[verb]
        outputs = [spec.name for spec in graph.outputs]
        wanted = {spec.name: feeds[spec.name] for spec in graph.inputs}
        return dict(zip(outputs, self.sessions[verb].run(outputs, wanted), strict=True))

    def memory(self, batch: Batch) -> dict[str, Array]:
        """The memory in buffers that are longer than the stories, with other values where encode writes."""
        capacity = batch.story.shape[1] + 3
        sizes = {names.Axis.BATCH: len(batch.story), names.Axis.MEMORY_CAPACITY: capacity}
        specs = [spec for spec in self.modules[Verb.ENCODE].inputs if spec.role is names.Role.MEMORY]
        buffers = {spec.name: np.full(spec.shape(sizes), 7, spec.storage) for spec in specs}
        sources = {"story": batch.story, "story_lengths": batch.lengths, "question": batch.question}
        answers = self.run(Verb.ENCODE, sources | buffers)
        return {names.buffer_of(name): value for name, value in answers.items()}

    def step(self, batch: Batch, memory: dict[str, Array], token_id: int) -> dict[str, Array]:
        token_ids = np.full(len(batch.story), token_id)
        columns = {names.TOKEN_IDS: token_ids, names.LAST_SOURCE_POSITIONS: batch.lengths - 1}
        return self.run(Verb.STEP, columns | memory)


def make(kind: str) -> MemoryNetwork:
    torch.manual_seed(0)
    model = MemoryNetwork(MemoryNetworkConfig(V, D, max_source_length=40, **KINDS[kind])).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def expected(model: MemoryNetwork, batch: Batch, token_id: int) -> tuple[Array, Array]:
    """Log-probabilities (B, V) after a token, and the attention (B, K, N), or (B, N) of one hop."""
    target = torch.full((len(batch.story), 1), token_id)
    with torch.inference_mode():
        memory = model.encode(torch.from_numpy(batch.story), torch.from_numpy(batch.question), batch.mask)
        logits, weights = model.decode_with_attention(target, memory, batch.mask)
        return logits[:, 0].log_softmax(-1).numpy(), model.reported_attention(weights)[:, 0].numpy()


def log_softmax(logits: Array) -> Array:
    return torch.from_numpy(logits).log_softmax(-1).numpy()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, LinearFactory], Exported]:
    """The graphs of a kind of model in fp32 or fp16; the same again without another conversion."""

    @functools.cache
    def exported(kind: str, linear: LinearFactory) -> Exported:
        return Exported(make(kind), linear, tmp_path_factory.mktemp(kind))

    return exported


def compare(exported: Exported, tolerance: float) -> None:
    for shape in SHAPES:
        batch = draw(shape)
        memory = exported.memory(batch)
        for token_id in (BOS_ID, 9):  # the answer, and the token after it
            log_probabilities, weights = expected(exported.model, batch, token_id)
            answers = exported.step(batch, memory, token_id)
            found = log_softmax(answers[names.LOGITS])
            np.testing.assert_allclose(found, log_probabilities, atol=tolerance, rtol=0)
            N = batch.story.shape[1]
            attention = answers[names.ATTENTION]
            np.testing.assert_allclose(attention[..., :N], weights, atol=tolerance, rtol=0)
            assert not attention[..., N:].any()


# slow: adjacent tying is that of the form for CUDA below, and of the story that the server's tests export
@pytest.mark.parametrize("kind", [pytest.param("adjacent", marks=pytest.mark.slow), "layer-wise", "bag"])
def test_graphs_equal_the_model_at_sizes_never_seen(kind, exported):
    # Sums in another order; measured 1e-6.
    compare(exported(kind, FloatFactory(torch.float32)), 1e-4)


def test_quantised_maps_are_close(tmp_path):
    # 255 levels for each row of a map's inputs; measured 0.05.
    compare(Exported(make("layer-wise"), Int8Factory(), tmp_path), 0.15)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 0.02),  # 11 significant bits; measured 0.002
        # The same form, checked more exactly.
        pytest.param(torch.float32, 1e-4, marks=pytest.mark.slow),
    ],
)
def test_the_form_for_cuda_is_close_and_writes_the_answers_into_the_next_step(dtype, tolerance, exported):
    cuda = exported("adjacent", FloatFactory(dtype, is_fused=True))
    batch = draw(SHAPES[1])
    answers = cuda.step(batch, cuda.memory(batch), BOS_ID)
    best = answers[names.LOGITS].argmax(axis=1)
    np.testing.assert_array_equal(answers[names.out(names.TOKEN_IDS)][:, 0], best)
    compare(cuda, tolerance)


def test_a_row_gets_the_same_alone_and_in_a_batch(exported):
    graphs = exported("layer-wise", FloatFactory(torch.float32))
    batch = draw(SHAPES[2])
    together = graphs.step(batch, graphs.memory(batch), BOS_ID)
    for row, length in enumerate(batch.lengths):
        alone = Batch(batch.story[row, None, :length], batch.lengths[row, None], batch.question[row, None])
        one = graphs.step(alone, graphs.memory(alone), BOS_ID)
        np.testing.assert_allclose(one[names.LOGITS][0], together[names.LOGITS][row], atol=1e-5)
