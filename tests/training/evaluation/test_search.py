import math
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from seq2seq_serve.bundle.manifest import EarlyStopping
from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID, TransformerConfig
from seq2seq_serve.training.evaluation import search
from seq2seq_serve.training.evaluation.search import greedy_search, length_penalty
from seq2seq_serve.training.models.transformer import Transformer
from tests.oracle import (
    Constraints,
    PrescribedModel,
    Sampling,
    beam_search,
    greedy_hypothesis,
    random_model,
    score_target,
)


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


def test_long_sources_are_searched_a_few_at_a_time(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = random_sources(model, 20)
    expected = greedy(model, sources)
    encode, rows = model.encode, list[int]()
    monkeypatch.setattr(model, "encode", lambda *source: rows.append(len(source[0])) or encode(*source))
    monkeypatch.setattr(search, "_SCORES_AT_ONCE", 3 * 8**2)  # the longest have 8 tokens
    assert greedy(model, sources) == expected
    assert (max(rows), sum(rows)) == (3, 20)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("prefix_ids", [(), (4, 5)])
@pytest.mark.parametrize("rows_at_once", [8, 256])
def test_many_sources_have_the_hypotheses_that_each_has_alone(
    tiny_vocabulary_model: Transformer,
    early_stopping: EarlyStopping,
    prefix_ids: tuple[int, ...],
    rows_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "_ROWS_AT_ONCE", rows_at_once)
    model, sources = tiny_vocabulary_model, random_sources(tiny_vocabulary_model, 12)
    rules = search.BeamRules(EOS_ID, 3, 0.6, early_stopping)
    limits = [1 + number % 9 for number in range(len(sources))]
    together = search.beam_searches(
        model, sources, rules, bos_id=BOS_ID, max_new_tokens=limits, prefix_ids=prefix_ids
    )
    for source, limit, found in zip(sources, limits, together, strict=True):
        alone = search.beam_search(
            model,
            source,
            **SEARCH,
            beam_size=3,
            alpha=0.6,
            max_new_tokens=limit,
            prefix_ids=prefix_ids,
            early_stopping=early_stopping,
        )
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        assert [one.score for one in found] == pytest.approx([one.score for one in alone], abs=1e-5)
        assert [one.is_finished for one in found] == [one.is_finished for one in alone]


def log_probabilities(model: Transformer, source: list[int], target: list[int]) -> Tensor:
    """(T, V): of what follows bos and each target token."""
    source_ids = torch.tensor([source])
    with torch.inference_mode():
        logits = model(
            source_ids, torch.ones_like(source_ids, dtype=torch.bool), torch.tensor([[BOS_ID, *target]])
        )
    return logits[0].double().log_softmax(-1)


def test_every_source_has_a_limit_of_its_own(model: Transformer) -> None:
    sources = random_sources(model, 5)
    limits = [3, 8, 1, 5, 8]
    given = greedy_search(model, sources, bos_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=limits)
    assert given == [greedy(model, [source], limit)[0] for source, limit in zip(sources, limits, strict=True)]
    assert [len(target) for target in given] == limits
    with pytest.raises(ValueError, match="max_new_tokens is 0, and the model's limit is"):
        greedy_search(model, sources, bos_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=[3, 8, 1, 0, 8])


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


@pytest.mark.parametrize("max_new_tokens", [0, 25])
def test_limits_beyond_the_models_are_refused(model: Transformer, max_new_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"max_new_tokens is {max_new_tokens}, and the model's limit is 24"):
        greedy(model, [[5, EOS_ID]], max_new_tokens)


@pytest.mark.parametrize("length", [0, 25])
def test_empty_and_long_sources_are_refused(model: Transformer, length: int) -> None:
    with pytest.raises(ValueError, match=f"a source has {length} tokens, and the model takes 1 to 24"):
        greedy(model, [[5] * length])


def test_beam_size_0_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match="beam_size is 0, and must be at least 1"):
        beam_search(model, [5, EOS_ID], bos_id=1, eos_id=2, beam_size=0, alpha=0, max_new_tokens=3)


def adjusted_by_definition(
    logits: list[float], target: tuple[int, ...], constraints: Constraints
) -> dict[int, float]:
    """The adjusted logit of each token that is allowed."""
    allowed = {}
    size, num_new = constraints.no_repeat_ngram_size, len(target) - len(constraints.prefix_ids)
    for token_id, logit in enumerate(logits):
        x = logit
        if token_id in target:
            x *= 1 / constraints.repetition_penalty if x > 0 else constraints.repetition_penalty
        x += constraints.logit_bias.get(token_id, 0.0)
        longer = (*target, token_id)
        ngrams = [longer[start : start + size] for start in range(len(longer) - size + 1)]
        repeats = size > 0 and len(ngrams) > 0 and ngrams[-1] in ngrams[:-1]
        is_early = token_id == EOS_ID and num_new < constraints.min_new_tokens
        if not (repeats or is_early or token_id in constraints.suppressed_token_ids):
            allowed[token_id] = x
    return allowed or {EOS_ID: 0.0}


def log_softmax(logits: dict[int, float]) -> dict[int, float]:
    log_sum = math.log(sum(map(math.exp, logits.values())))
    return {token_id: logit - log_sum for token_id, logit in logits.items()}


def greedy_by_definition(
    model: PrescribedModel, constraints: Constraints, limit: int
) -> tuple[list[int], list[float], bool]:
    target, log_probs = constraints.prefix_ids, []
    while len(log_probs) < limit:
        allowed = log_softmax(adjusted_by_definition(model.logits(target), target, constraints))
        best = min(allowed, key=lambda token_id: (-allowed[token_id], token_id))
        log_probs.append(allowed[best])
        if best == EOS_ID:
            return list(target), log_probs, True
        target = (*target, best)
    return list(target), log_probs, False


def beam_by_definition(
    model: PrescribedModel,
    constraints: Constraints,
    limit: int,
    beam_size: int,
    alpha: float,
    early_stopping: EarlyStopping,
) -> list[tuple[tuple[int, ...], bool, float]]:
    """(target, whether it is finished, score), best first; "never" runs to the limit."""
    running, finished = [(constraints.prefix_ids, 0.0)], []
    for num_tokens in range(1, limit + 1):
        extensions = []
        for target, total in running:
            allowed = log_softmax(adjusted_by_definition(model.logits(target), target, constraints))
            extensions += [(total + added, target, token_id) for token_id, added in allowed.items()]
        extensions.sort(key=lambda extension: -extension[0])
        running = [
            ((*target, token_id), total)
            for total, target, token_id in extensions[: 2 * beam_size]
            if token_id != EOS_ID
        ][:beam_size]
        finished += [
            (target, True, total / length_penalty(num_tokens, alpha))
            for total, target, token_id in extensions[:beam_size]
            if token_id == EOS_ID
        ]
        if early_stopping != "never" and len(finished) >= beam_size and running:
            now = running[0][1] / length_penalty(num_tokens, alpha)
            worst = sorted(score for _, _, score in finished)[-beam_size]
            if early_stopping or now <= worst:
                running = []
    cut_short = [(target, False, total / length_penalty(limit, alpha)) for target, total in running]
    return sorted(finished + cut_short, key=lambda result: -result[2])[:beam_size]


token_ids = st.integers(0, 5)
any_constraints = st.builds(
    Constraints,
    min_new_tokens=st.integers(0, 6),
    repetition_penalty=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    no_repeat_ngram_size=st.integers(0, 3),
    suppressed_token_ids=st.lists(token_ids, max_size=5).map(tuple),
    logit_bias=st.dictionaries(token_ids, st.integers(-8, 8).map(lambda eighths: eighths / 8)),
    prefix_ids=st.lists(token_ids.filter(lambda token_id: token_id != EOS_ID), max_size=6).map(tuple),
)
SEARCH = {"bos_id": BOS_ID, "eos_id": EOS_ID}


@given(seed=st.integers(0, 10**6), constraints=any_constraints, limit=st.integers(1, 8))
def test_greedy_and_a_beam_of_one_are_the_definition_under_every_constraint(
    seed: int, constraints: Constraints, limit: int
) -> None:
    model = random_model(seed)
    target, log_probs, is_finished = greedy_by_definition(model, constraints, limit)
    found = greedy_hypothesis(model, [4, EOS_ID], **SEARCH, max_new_tokens=limit, constraints=constraints)
    assert (found.token_ids, found.is_finished) == (target, is_finished)
    assert found.log_probabilities == pytest.approx(log_probs, abs=1e-12)
    assert found.score == found.log_probability == sum(found.log_probabilities)
    beam = beam_search(
        model,
        [4, EOS_ID],
        **SEARCH,
        beam_size=1,
        alpha=0.0,
        max_new_tokens=limit,
        constraints=constraints,
    )
    assert beam == [found]


@given(
    seed=st.integers(0, 10**6),
    constraints=any_constraints,
    limit=st.integers(1, 8),
    beam_size=st.integers(1, 5),
    alpha=st.sampled_from([-0.5, 0.0, 0.6, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
@example(  # at the limit, what runs is as good as it is, and not as it would be with one more token
    seed=536,
    constraints=Constraints(repetition_penalty=0.5, no_repeat_ngram_size=1, prefix_ids=(4, 0)),
    limit=3,
    beam_size=4,
    alpha=-0.5,
    early_stopping="never",
)
def test_a_beam_is_the_definition_under_every_constraint(
    seed: int,
    constraints: Constraints,
    limit: int,
    beam_size: int,
    alpha: float,
    early_stopping: EarlyStopping,
) -> None:
    model = random_model(seed, parts=2**20)  # so fine that no two are equal
    expected = beam_by_definition(model, constraints, limit, beam_size, alpha, early_stopping)
    found = beam_search(
        model,
        [4, EOS_ID],
        **SEARCH,
        beam_size=beam_size,
        alpha=alpha,
        max_new_tokens=limit,
        early_stopping=early_stopping,
        constraints=constraints,
    )
    assert [(tuple(each.token_ids), each.is_finished) for each in found] == [each[:2] for each in expected]
    assert [each.score for each in found] == pytest.approx([each[2] for each in expected], abs=1e-12)


def test_greedy_with_log_probabilities_takes_the_tokens_of_greedy_without(
    tiny_vocabulary_model: Transformer,
) -> None:
    sources = random_sources(tiny_vocabulary_model, 12)
    num_finished = 0
    for source, expected in zip(sources, greedy(tiny_vocabulary_model, sources), strict=True):
        found = greedy_hypothesis(tiny_vocabulary_model, source, **SEARCH, max_new_tokens=8)
        table = log_probabilities(tiny_vocabulary_model, source, expected)
        chosen = [*expected, EOS_ID][:8]
        scored = [table[place, token_id].item() for place, token_id in enumerate(chosen)]
        assert found.token_ids == expected
        assert found.log_probabilities == pytest.approx(scored, abs=1e-5)  # another order of float32 sums
        num_finished += found.is_finished
    assert 0 < num_finished < 12


def test_a_given_target_is_scored_token_by_token_and_its_eos(tiny_vocabulary_model: Transformer) -> None:
    source = [4, 5, EOS_ID]
    for target in ([], [3], [4, 4, 0, 5]):
        table = log_probabilities(tiny_vocabulary_model, source, target)
        expected = [table[place, token_id].item() for place, token_id in enumerate([*target, EOS_ID])]
        assert score_target(tiny_vocabulary_model, source, target, **SEARCH) == pytest.approx(expected)
    prescribed = PrescribedModel(lambda target: [float(len(target) == 1), 0.0, 0.0, 0.0, 0.0, 0.0])
    scored = score_target(prescribed, source, [3, 0], **SEARCH)
    assert scored == pytest.approx([-math.log(6), 1 - math.log(5 + math.e), -math.log(6)])


PROBABILITIES = [0.1, 0.3, 0.05, 0.3, 0.05, 0.2]
LOGITS = torch.tensor(PROBABILITIES, dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("sampling", "draws"),
    [
        # All, in the order of ids: running sums 0.1, 0.4, 0.45, 0.75, 0.8, 1.
        (Sampling(), {0.0: 0, 0.09: 0, 0.11: 1, 0.39: 1, 0.41: 2, 0.46: 3, 0.76: 4, 0.81: 5, 0.999: 5}),
        # 1, 3 (equal: the lower id first), 5 with 0.3, 0.3, 0.2 of 0.8.
        (Sampling(top_k=3), {0.0: 1, 0.37: 1, 0.38: 3, 0.74: 3, 0.76: 5, 0.999: 5}),
        (Sampling(top_k=1), {0.0: 1, 0.999: 1}),
        (Sampling(top_k=9), {0.29: 1, 0.31: 3, 0.61: 5, 0.81: 0, 0.91: 2, 0.96: 4}),
        # Before 5 stands 0.6: kept at 0.61, not at 0.59.
        (Sampling(top_p=0.59), {0.49: 1, 0.51: 3, 0.999: 3}),
        (Sampling(top_p=0.61), {0.37: 1, 0.38: 3, 0.74: 3, 0.76: 5}),
        (Sampling(top_p=1e-9), {0.0: 1, 0.999: 1}),
        # Of the three candidates' own probabilities 0.75 stands before 5.
        (Sampling(top_k=3, top_p=0.7), {0.49: 1, 0.51: 3, 0.999: 3}),
        # At least 0.06: 0, 1, 3, 5 in the order of ids, of 0.9.
        (Sampling(min_p=0.2), {0.11: 0, 0.112: 1, 0.44: 1, 0.45: 3, 0.77: 3, 0.78: 5}),
        (Sampling(min_p=1.0), {0.49: 1, 0.51: 3}),
        # The same tokens in descending order.
        (Sampling(top_p=0.999, min_p=0.2), {0.33: 1, 0.34: 3, 0.66: 3, 0.67: 5, 0.88: 5, 0.89: 0}),
        # Probabilities squared: 0.01, 0.09, 0.0025, 0.09, 0.0025, 0.04 of 0.235; min_p then leaves out 0.
        (Sampling(temperature=0.5), {0.042: 0, 0.043: 1, 0.425: 1, 0.426: 2, 0.437: 3, 0.82: 4, 0.83: 5}),
        (Sampling(temperature=0.5, min_p=0.2), {0.0: 1, 0.40: 1, 0.42: 3, 0.81: 3, 0.82: 5}),
        (Sampling(temperature=1e-320), {0.49: 1, 0.51: 3}),
    ],
)
def test_draws_worked_by_hand(sampling: Sampling, draws: dict[float, int]) -> None:
    assert {uniform: sampling.draw(LOGITS, uniform) for uniform in draws} == draws


def test_the_prefix_counts_towards_the_models_limit() -> None:
    limits = SEARCH | {"constraints": Constraints(prefix_ids=(3,) * 10, suppressed_token_ids=(EOS_ID,))}
    found = greedy_hypothesis(random_model(0), [4, EOS_ID], **limits, max_new_tokens=6)
    assert len(found.token_ids) == 16
    with pytest.raises(
        ValueError, match="max_new_tokens is 7 after a prefix of 10, and the model's limit is 16"
    ):
        greedy_hypothesis(random_model(0), [4, EOS_ID], **limits, max_new_tokens=7)
