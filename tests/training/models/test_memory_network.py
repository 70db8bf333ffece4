import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from seq2seq_serve.training.config import BOS_ID, PAD_ID
from seq2seq_serve.training.models.memory_network import MemoryNetwork, MemoryNetworkConfig

Array = npt.NDArray[np.float64]
CONFIG = MemoryNetworkConfig(50, 12, max_source_length=9)
NUMBERS_OF_WORDS = [[5, 1, 3, 2], [4, 6, 0, 0]]  # of the sentences of two stories
MASK = torch.tensor(NUMBERS_OF_WORDS) > 0
TARGET = torch.tensor([[BOS_ID, 7], [BOS_ID, 9]])


def make(**settings: Any) -> MemoryNetwork:
    torch.manual_seed(0)
    model = MemoryNetwork(dataclasses.replace(CONFIG, **settings)).eval()
    for parameter in model.parameters():  # larger weights, so that the softmax is far from a mean
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def stories() -> tuple[Tensor, Tensor, Tensor]:
    """Two stories (B, N, J), their questions of 4 words and of 2, and the mask of sentences."""
    generator = torch.Generator().manual_seed(1)
    story = torch.randint(4, 50, (2, 4, 6), generator=generator)
    story[torch.arange(6) >= torch.tensor(NUMBERS_OF_WORDS)[:, :, None]] = PAD_ID
    question = torch.randint(4, 50, (2, 4), generator=generator)
    question[1, 2:] = PAD_ID
    return story, question, MASK


def numpy(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def embedded(words: list[int], matrix: Array, *, has_order: bool) -> Array:
    """sum_j l_j * E x_j with twice the factors of section 4.1 of the paper."""
    J, D = len(words), matrix.shape[1]
    total = np.zeros(D)
    for j, word in enumerate(words, start=1):
        for k in range(1, D + 1):
            factor = 2 * ((1 - j / J) - (k / D) * (1 - 2 * j / J)) if has_order else 1.0
            total[k - 1] += factor * matrix[word, k - 1]
    return total


def answer_by_hand(
    model: MemoryNetwork, story: Tensor, question: Tensor, *, is_linear: bool = False
) -> tuple[Array, list[Array]]:
    """Logits (V,) of the answer and the weights (N,) of each hop, for one story, by the paper."""
    config = model.config
    sentences = [[word for word in words if word != PAD_ID] for words in story.tolist()]
    sentences = [words for words in sentences if words]
    A = [numpy(layer.weight) for layer in model.words]
    T = [numpy(layer.weight) for layer in model.times]
    W = numpy(model.embedding.weight)
    is_adjacent = config.tying == "adjacent"
    C, T_C = ([*A[1:], W], T[1:]) if is_adjacent else ([A[1]] * config.num_hops, [T[1]] * config.num_hops)
    A, T_A = (A, T[:-1]) if is_adjacent else ([A[0]] * config.num_hops, [T[0]] * config.num_hops)
    B = A[0] if model.query is None else numpy(model.query.weight)

    def memories(matrix: Array, times: Array) -> Array:
        order = config.has_position_encoding
        ages = range(len(sentences) - 1, -1, -1)
        pairs = zip(sentences, ages, strict=True)
        return np.array([embedded(words, matrix, has_order=order) + times[age] for words, age in pairs])

    words = [word for word in question.tolist() if word != PAD_ID]
    u = embedded(words, B, has_order=config.has_position_encoding)
    all_weights = []
    for hop in range(config.num_hops):
        scores = memories(A[hop], T_A[hop]) @ u
        num_empty = config.max_source_length - len(sentences) if config.has_empty_memories else 0
        p = scores if is_linear else np.exp(scores) / (np.exp(scores).sum() + num_empty)
        o = p @ memories(C[hop], T_C[hop])
        u = o + (u if model.transition is None else numpy(model.transition.weight) @ u)
        all_weights.append(p)
    return W @ u, all_weights


EVERY_KIND: list[dict[str, Any]] = [
    {"tying": tying, "num_hops": num_hops} for tying in ("adjacent", "layer-wise") for num_hops in (1, 2, 3)
] + [
    {"has_position_encoding": False},
    {"has_empty_memories": False},
    {"max_source_length": 4},  # a full memory, and one of two sentences
]


@pytest.mark.parametrize("settings", EVERY_KIND, ids=str)
def test_the_model_computes_the_papers_equations(settings: dict[str, Any]) -> None:
    model = make(**settings)
    source = stories()
    logits, weights = model.decode_with_attention(TARGET, model.encode(*source), MASK)
    assert [hop.shape for hop in weights] == [(2, 1, 2, 4)] * model.config.num_hops
    for row, (story, question, _) in enumerate(zip(*source, strict=True)):
        expected, hops = answer_by_hand(model, story, question)
        np.testing.assert_allclose(numpy(logits[row, 0]), expected, rtol=1e-5, atol=1e-5)
        for found, hop in zip(weights, hops, strict=True):
            np.testing.assert_allclose(numpy(found[row, 0, 0, : len(hop)]), hop, atol=1e-5)
            assert found[row, 0, :, len(hop) :].abs().sum() == 0
            assert torch.equal(found[row, 0, 0], found[row, 0, 1])
    assert torch.equal(model.alignment(weights), weights[-1][:, 0])
    # After the answer comes the learned vector, whatever the story.
    states = model.decode_states(TARGET, model.encode(*source), MASK)
    torch.testing.assert_close(states[:, 1], model.end.expand(2, -1))


def test_a_linear_start_leaves_out_the_softmax_until_its_last_step_and_never_in_evaluation() -> None:
    model = make(num_linear_steps=5, time_noise=0.0)
    source = stories()

    def logits() -> Array:
        return numpy(model.decode(TARGET, model.encode(*source), MASK)[0, 0])

    expected = {
        is_linear: answer_by_hand(model, source[0][0], source[1][0], is_linear=is_linear)[0]
        for is_linear in (True, False)
    }
    for step, is_linear in ((1, True), (5, True), (6, False)):
        model.train().begin_step(step)
        np.testing.assert_allclose(logits(), expected[is_linear], rtol=1e-4, atol=1e-4)
        model.eval()
        np.testing.assert_allclose(logits(), expected[False], rtol=1e-5, atol=1e-5)


def test_time_noise_shifts_the_indices_of_earlier_sentences_and_keeps_their_order() -> None:
    model = make(time_noise=0.3, max_source_length=20)
    mask = torch.arange(10) < torch.tensor([10, 4, 1])[:, None]
    plain = model._ages(mask)
    model.train()
    torch.manual_seed(3)
    drawn = torch.stack([model._ages(mask) for _ in range(300)])
    torch.manual_seed(3)
    assert torch.equal(drawn[0], model._ages(mask))  # the generator of torch decides
    for row, length in enumerate([10, 4, 1]):
        ages = drawn[:, row, :length]
        assert (ages[:, :-1] > ages[:, 1:]).all()
        shift = ages - plain[row, :length]
        num_inserted = int(np.ceil(0.3 * length))
        # An empty memory may stand at either end, too.
        assert (shift.min(), shift.max()) == (0, num_inserted)
        assert (shift[:, :-1] >= shift[:, 1:]).all()
        assert set(shift.flatten().tolist()) == set(range(num_inserted + 1))
    assert torch.equal(model.eval()._ages(mask), plain)


def test_time_noise_at_the_longest_story_stays_within_the_table() -> None:
    model = make(time_noise=0.5, max_source_length=4).train()
    source = stories()
    assert all(model.encode(*source)[0].isfinite().all() for _ in range(50))


@pytest.mark.parametrize("settings", [{"dropout": 0.5}, {"word_dropout": 0.5}, {"time_noise": 0.5}], ids=str)
def test_regularisation_changes_two_passes_and_evaluation_has_none(settings: dict[str, Any]) -> None:
    model = make(**{"time_noise": 0.0} | settings).train()
    source = stories()
    passes = [model.encode(*source)[0] for _ in range(8)]
    assert not all(torch.equal(passes[0], each) for each in passes)
    model.eval()
    torch.testing.assert_close(model.encode(*source), model.encode(*source))


def test_weights_start_small_as_in_the_paper() -> None:
    model = MemoryNetwork(dataclasses.replace(CONFIG, vocab_size=500, d_model=50, max_source_length=50))
    for parameter in model.parameters():
        assert parameter.std().item() == pytest.approx(0.1, rel=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hops": 0}, "num_hops is 0"),
        ({"num_linear_steps": -1}, "num_linear_steps is -1"),
        ({"time_noise": 1.0}, "time_noise is 1.0"),
        ({"tying": "all"}, "tying is 'all', and must be 'adjacent' or 'layer-wise'"),
        ({"has_position_encoding": 1}, "has_position_encoding is 1, and must be true or false"),
        ({"has_empty_memories": None}, "has_empty_memories is None, and must be true or false"),
        ({"tied": "none"}, 'tied is .none., and must be "all" for a memory network'),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **settings)
