from itertools import product

import pytest
import torch
from torch import Tensor

from training.config import BOS_ID, EOS_ID, PAD_ID, TransformerConfig
from training.search import beam_search, greedy_search, length_penalty
from training.transformer import Transformer


@pytest.fixture
def tiny_vocabulary_model() -> Transformer:
    """Few tokens, so that every target can be listed; this seed ends some targets early and others not."""
    torch.manual_seed(6)
    config = TransformerConfig(
        vocab_size=6, d_model=16, d_ff=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1
    )
    return Transformer(config).eval()


def greedy(model: Transformer, sources: list[list[int]], max_new_tokens: int = 8) -> list[list[int]]:
    return greedy_search(model, sources, bos_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=max_new_tokens)


def random_sources(model: Transformer, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [*torch.randint(4, model.config.vocab_size, (1 + row % 7,), generator=generator).tolist(), EOS_ID]
        for row in range(count)
    ]


def log_probabilities(model: Transformer, source: list[int], target: list[int]) -> Tensor:
    """(T, V): of what follows bos and each target token."""
    source_ids = torch.tensor([source])
    with torch.inference_mode():
        logits = model(
            source_ids, torch.ones_like(source_ids, dtype=torch.bool), torch.tensor([[BOS_ID, *target]])
        )
    return logits[0].double().log_softmax(-1)


def test_greedy_takes_the_most_probable_token_at_each_step(model: Transformer) -> None:
    (source,) = random_sources(model, 1)
    (found,) = greedy(model, [source])
    expected: list[int] = []
    while len(expected) < 8:
        token_id = int(log_probabilities(model, source, expected)[-1].argmax())
        if token_id == EOS_ID:
            break
        expected.append(token_id)
    assert found == expected
    assert found


def test_greedy_gives_a_source_the_same_target_alone_and_in_a_batch(
    tiny_vocabulary_model: Transformer,
) -> None:
    sources = random_sources(tiny_vocabulary_model, 300)
    together = greedy(tiny_vocabulary_model, sources)
    assert len({tuple(target) for target in together}) > 1
    assert len({len(target) for target in together}) > 1
    for row in (0, 5, 13, 299):
        assert greedy(tiny_vocabulary_model, [sources[row]]) == [together[row]]


def test_of_equal_tokens_the_lowest_id_is_taken(tiny_vocabulary_model: Transformer) -> None:
    torch.nn.init.zeros_(tiny_vocabulary_model.embedding.weight)
    assert greedy(tiny_vocabulary_model, [[4, EOS_ID]], max_new_tokens=3) == [[PAD_ID] * 3]


def test_beam_of_one_is_greedy(model: Transformer, tiny_vocabulary_model: Transformer) -> None:
    num_finished = 0
    for searched in (model, tiny_vocabulary_model):
        sources = random_sources(searched, 20)
        for source, expected in zip(sources, greedy(searched, sources), strict=True):
            (hypothesis,) = beam_search(
                searched, source, bos_id=BOS_ID, eos_id=EOS_ID, beam_size=1, alpha=0.6, max_new_tokens=8
            )
            assert hypothesis.token_ids == expected
            num_finished += hypothesis.is_finished
    assert num_finished > 0


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_beam_that_holds_everything_is_exhaustive_search(
    tiny_vocabulary_model: Transformer, alpha: float
) -> None:
    source, limit = [4, 5, 4, EOS_ID], 3
    others = [token_id for token_id in range(6) if token_id != EOS_ID]
    every = {}
    for length in range(limit + 1):
        for target in product(others, repeat=length):
            table = log_probabilities(tiny_vocabulary_model, source, list(target))
            total = sum(table[place, token_id].item() for place, token_id in enumerate(target))
            if length < limit:  # ends with eos, which counts as a token
                every[target] = (total + table[length, EOS_ID].item()) / length_penalty(length + 1, alpha)
            else:  # cut off by the limit
                every[target] = total / length_penalty(length, alpha)
    found = beam_search(
        tiny_vocabulary_model,
        source,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        beam_size=200,
        alpha=alpha,
        max_new_tokens=limit,
    )
    assert [tuple(hypothesis.token_ids) for hypothesis in found] == sorted(every, key=lambda key: -every[key])
    for hypothesis in found:
        assert hypothesis.score == pytest.approx(every[tuple(hypothesis.token_ids)], abs=1e-5)
        assert hypothesis.is_finished == (len(hypothesis.token_ids) < limit)


@pytest.mark.parametrize("early_stopping", [True, False])
def test_hypotheses_come_best_first_and_are_distinct(
    tiny_vocabulary_model: Transformer, early_stopping: bool
) -> None:
    for source in random_sources(tiny_vocabulary_model, 6):
        found = beam_search(
            tiny_vocabulary_model,
            source,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            beam_size=4,
            alpha=0.6,
            max_new_tokens=10,
            early_stopping=early_stopping,
        )
        scores = [hypothesis.score for hypothesis in found]
        assert scores == sorted(scores, reverse=True)
        assert len({(tuple(each.token_ids), each.is_finished) for each in found}) == len(found) == 4
        for hypothesis in found:
            num_tokens = len(hypothesis.token_ids) + hypothesis.is_finished
            assert hypothesis.score == hypothesis.log_probability / length_penalty(num_tokens, 0.6)


def test_searching_on_never_gives_a_worse_best_than_stopping_early(
    tiny_vocabulary_model: Transformer,
) -> None:
    differences = []
    for source in random_sources(tiny_vocabulary_model, 20):
        early, late = (
            beam_search(
                tiny_vocabulary_model,
                source,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                beam_size=2,
                alpha=1.0,
                max_new_tokens=12,
                early_stopping=early_stopping,
            )[0].score
            for early_stopping in (True, False)
        )
        differences.append(late - early)
    assert min(differences) >= 0
    assert max(differences) > 0


def test_length_penalty_is_the_published_formula() -> None:
    assert length_penalty(1, 0.6) == 1.0
    assert length_penalty(7, 0.6) == pytest.approx((12 / 6) ** 0.6)
    assert length_penalty(7, 0.0) == 1.0


@pytest.mark.parametrize("max_new_tokens", [0, 25])
def test_limits_beyond_the_models_are_refused(model: Transformer, max_new_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_new_tokens is {max_new_tokens}, and the model's limit is 24"):
        greedy(model, [[5, EOS_ID]], max_new_tokens)


@pytest.mark.parametrize("length", [0, 25])
def test_empty_and_long_sources_are_refused(model: Transformer, length: int) -> None:
    with pytest.raises(ValueError, match=f"a source has {length} tokens, and the model takes 1 to 24"):
        greedy(model, [[5] * length])


def test_a_beam_of_none_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="beam_size is 0, and must be at least 1"):
        beam_search(model, [5, EOS_ID], bos_id=1, eos_id=2, beam_size=0, alpha=0, max_new_tokens=3)


def test_nothing_to_search_for_gives_nothing(model: Transformer) -> None:
    assert greedy(model, []) == []
