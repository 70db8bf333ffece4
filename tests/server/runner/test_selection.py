"""Rows that ask for more than the most probable token, under the real engine, against the oracle."""

import dataclasses
import random

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.constraints import adjustments
from seq2seq_serve.server.engine.request import NO_CONSTRAINTS, Beam, Constraints, Request, Sampling
from seq2seq_serve.server.errors import EngineFailed
from seq2seq_serve.server.runner.buffers import Columns
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.selection import Selector, uniform
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from tests import oracle as definition
from tests.server.driver import Driver
from tests.server.runner.test_runner import FarDevice, use_device

VOCAB_SIZE, LIMIT = 300, 12


def random_constraints(chance: random.Random) -> Constraints:
    if chance.random() < 0.4:
        return NO_CONSTRAINTS
    ids = [chance.randrange(3, VOCAB_SIZE) for _ in range(40)]
    return Constraints(
        min_new_tokens=chance.choice([0, 0, 3, LIMIT]),
        repetition_penalty=chance.choice([1.0, 1.3, 3.0, 0.7]),
        no_repeat_ngram_size=chance.choice([0, 0, 1, 2, 3]),
        suppressed_token_ids=frozenset(ids[: chance.choice([0, 5, 30])]),
        # The end of sequence is rare in a random model.
        logit_bias={token_id: chance.uniform(-3, 3) for token_id in ids[30:]}
        | {EOS_ID: chance.uniform(0, 6)},
    )


def random_request(chance: random.Random) -> Request:
    """Any source with any options; a third of the requests are plain."""
    source = np.array([*(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 20))), EOS_ID])
    request = Request("r", {SOURCE_IDS: source}, len(source), chance.randint(1, LIMIT), arrival=0.0)
    if chance.random() < 0.33:
        return request
    sampling = Sampling(
        temperature=chance.choice([0.3, 1.0, 2.0]),
        top_k=chance.choice([0, 0, 1, 7, 1000]),
        top_p=chance.choice([1.0, 1.0, 0.9, 0.3]),
        min_p=chance.choice([0.0, 0.0, 0.1]),
        seed=chance.getrandbits(64),
    )
    return dataclasses.replace(
        request,
        constraints=random_constraints(chance),
        sampling=sampling if chance.random() < 0.6 else None,
        log_probabilities=True,
        num_alternatives=chance.choice([0, 0, 1, 5]),
        stream=chance.random() < 0.5,
        prefix_ids=tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.choice([0, 0, 1, 2, 9]))),
    )


def run(bundle, requests, num_slots, precision=Precision.FP32, seed=0, **options):
    """The result of each, who come in any order."""
    config = RunnerConfig(provider="cpu", precision=precision, num_threads=1, max_slots=num_slots)
    driver = Driver(OnnxRunner(bundle, config), **options)
    chance, waiting = random.Random(seed), list(requests)
    chance.shuffle(waiting)
    while waiting:
        for _ in range(min(len(waiting), chance.randint(0, 4))):
            driver.submit(waiting.pop())
        driver.turn(chance.randint(0, 3))
    driver.finish()
    for request in requests:
        if request.stream:
            assert tuple(driver.told(request)) == driver.results[request].best.token_ids
    return [driver.results[request] for request in requests]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    chance = random.Random(11)
    return [random_request(chance) for _ in range(60)]


def oracles_constraints(request: Request) -> definition.Constraints:
    """The constraints of a request as the oracle knows them."""
    names = [each.name for each in dataclasses.fields(definition.Constraints) if each.name != "prefix_ids"]
    given = {name: getattr(request.constraints, name) for name in names}
    return definition.Constraints(**given, prefix_ids=request.prefix_ids)


def oracle(trained, request) -> list[definition.Hypothesis]:
    """The hypotheses of a request by definition."""
    source = request.sources[SOURCE_IDS].tolist()
    constraints = oracles_constraints(request)
    common = {"bos_id": BOS_ID, "eos_id": EOS_ID, "max_new_tokens": request.max_new_tokens}
    if request.beam is not None:
        found = definition.beam_search(
            trained.model,
            source,
            beam_size=request.beam.size,
            alpha=request.beam.alpha,
            early_stopping=request.beam.early_stopping,
            formula=request.beam.formula,
            constraints=constraints,
            **common,
        )
        return found[: request.num_hypotheses]
    if request.sampling is not None:
        options = dict(vars(request.sampling))
        seed = options.pop("seed")
        return [
            definition.sample_search(
                trained.model,
                source,
                sampling=definition.Sampling(**options),
                uniforms=lambda position, sample=sample: uniform(seed, sample, position),
                constraints=constraints,
                **common,
            )
            for sample in range(request.num_hypotheses)
        ]
    if request.num_hypotheses == 1:
        return [definition.greedy_hypothesis(trained.model, source, constraints=constraints, **common)]
    # Several greedy ones: a beam of one token says with which tokens they begin.
    firsts = definition.beam_search(
        trained.model,
        source,
        beam_size=request.num_hypotheses,
        alpha=0,
        constraints=constraints,
        **(common | {"max_new_tokens": 1}),
    )
    found = []
    for first in firsts:
        if first.is_finished or request.max_new_tokens == 1:
            found.append(first)
            continue
        forced = dataclasses.replace(
            constraints,
            prefix_ids=tuple(first.token_ids),
            min_new_tokens=max(constraints.min_new_tokens - 1, 0),
        )
        rest = definition.greedy_hypothesis(
            trained.model,
            source,
            constraints=forced,
            **(common | {"max_new_tokens": request.max_new_tokens - 1}),
        )
        log_probabilities = first.log_probabilities + rest.log_probabilities
        found.append(
            dataclasses.replace(rest, log_probabilities=log_probabilities, score=sum(log_probabilities))
        )
    return found


def test_alternatives_are_the_best_tokens_and_the_greedy_one_is_the_first(random_bundle, requests):
    num_seen = 0
    for request, result in zip(requests, run(random_bundle, requests, num_slots=5), strict=True):
        target = [*result.best.token_ids, EOS_ID][len(request.prefix_ids) :][: result.num_target_tokens]
        for token_id, choice in zip(target, result.best.token_scores, strict=bool(result.best.token_scores)):
            assert len(choice.alternatives) == request.num_alternatives
            given = [log_probability for _, log_probability in choice.alternatives]
            assert given == sorted(given, reverse=True)
            if request.num_alternatives and request.sampling is None:
                assert choice.alternatives[0] == (token_id, choice.log_probability)
                num_seen += 1
            elif request.num_alternatives:
                assert choice.log_probability <= given[0] + 1e-6  # another graph rounded it
    assert num_seen > 20


def test_a_plain_request_with_a_prefix_goes_on_as_the_oracle_does(random_trained, random_bundle):
    """Up to the last position of the cache, and beside rows without a prefix, filled in the same call."""
    chance = random.Random(3)
    requests = []
    for length in (0, 1, 2, 0, 17, 40, 47, 5):
        source = np.array([*(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 30))), EOS_ID])
        prefix = tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(length))
        requests.append(
            Request(
                "r",
                {SOURCE_IDS: source},
                len(source),
                48 - length,
                0.0,
                prefix_ids=prefix,
                stream=True,
                attention=True,
            )
        )
    for request, result in zip(requests, run(random_bundle, requests, num_slots=8), strict=True):
        [expected] = oracle(random_trained, request)
        assert list(result.best.token_ids) == expected.token_ids
        assert result.best.token_ids[: len(request.prefix_ids)] == request.prefix_ids
        assert result.num_target_tokens == len(expected.log_probabilities)
        assert len(result.best.attention) == len(request.prefix_ids) + result.num_target_tokens


def test_on_a_device_that_is_not_the_host_penalties_are_written_there(random_bundle, requests, monkeypatch):
    near = run(random_bundle, requests, num_slots=6)
    use_device(FarDevice, monkeypatch)
    for one, other in zip(near, run(random_bundle, requests, num_slots=6), strict=True):
        assert other.best.token_ids == one.best.token_ids


def test_requests_with_equal_penalties_share_a_row_and_each_row_is_written_once(
    random_bundle, requests, monkeypatch
):
    """512 items of a batch with 1,024 biases and 1,024 suppressed ids each built them anew, in one step."""
    written = []
    write = Columns.write_penalties

    def noted(columns, row, penalties):
        written.append(row)
        write(columns, row, penalties)

    monkeypatch.setattr(Columns, "write_penalties", noted)
    first, second = (
        Constraints(suppressed_token_ids=frozenset(range(30 * i + 3, 30 * i + 13)), logit_bias={290: 2.0 + i})
        for i in (1, 2)
    )
    shared = [
        dataclasses.replace(request, constraints=dataclasses.replace(constraints), sampling=None, beam=None)
        for request in requests[:20]
        for constraints in (first, second)
    ]
    alone = [run(random_bundle, [request], num_slots=2)[0].best.token_ids for request in shared]
    assert len(written) == len(shared)
    written.clear()
    together = run(random_bundle, shared, num_slots=4)
    assert [result.best.token_ids for result in together] == alone
    assert len(written) < len(shared) / 4


def suppressing(bundle, never_ids):
    generation = dataclasses.replace(bundle.manifest.generation, suppressed_token_ids=tuple(never_ids))
    return dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, generation=generation))


def only_suppressing(request, more):
    """A request with the same suppressed tokens, and more, and without biases."""
    suppressed = request.constraints.suppressed_token_ids | more
    constraints = dataclasses.replace(request.constraints, suppressed_token_ids=suppressed, logit_bias={})
    return dataclasses.replace(request, constraints=constraints)


def test_tokens_that_the_model_never_selects_are_forbidden_in_every_mode(
    random_trained, random_bundle, requests
):
    constrained = [request for request in requests if request.constraints != NO_CONSTRAINTS]
    few_and_many = [
        only_suppressing(request, {EOS_ID} if i % 2 else set()) for i, request in enumerate(constrained)
    ]
    requests = [*requests, *few_and_many]
    assert {len(request.constraints.suppressed_token_ids) > 16 for request in few_and_many} == {True, False}
    before = [
        token_id for result in run(random_bundle, requests, num_slots=7) for token_id in result.best.token_ids
    ]
    never_ids = sorted({*before} - {EOS_ID})[::2]
    found = run(suppressing(random_bundle, never_ids), requests, num_slots=7)
    for request, result in zip(requests, found, strict=True):
        constraints = request.constraints
        suppressed = constraints.suppressed_token_ids | {*never_ids}
        request = dataclasses.replace(
            request, constraints=dataclasses.replace(constraints, suppressed_token_ids=suppressed)
        )
        [expected] = oracle(random_trained, request)
        assert list(result.best.token_ids) == expected.token_ids
        if request.log_probabilities:
            given = [choice.log_probability for choice in result.best.token_scores]
            np.testing.assert_allclose(given, expected.log_probabilities, atol=1e-4)


@pytest.mark.skipif(kernels.library() is None, reason="the step computes logits")
@pytest.mark.parametrize("beam", [None, Beam(3), Beam(1, alpha=0.0)])
def test_a_step_that_selects_tokens_equals_selection_from_logits(beam, random_bundle, monkeypatch):
    """In int8 a step writes no logits if all rows are plain or beams without constraints."""
    sources = [np.array([*range(3, 4 + i), EOS_ID]) for i in range(9)]
    answers = []
    for chooses in (True, False):
        runner = OnnxRunner(random_bundle, RunnerConfig("cpu", Precision.INT8, num_threads=1, max_slots=8))
        assert runner.chooses_tokens
        runner.chooses_tokens = chooses
        driver = Driver(runner)
        requests = [
            Request("r", {SOURCE_IDS: source}, len(source), 1 + i, arrival=0.0, beam=beam, stream=True)
            for i, source in enumerate(sources)
        ]
        driver.submit(*requests)
        with monkeypatch.context() as patch:
            if chooses:
                patch.setattr(Selector, "select", None)
                patch.setattr(Columns, "pick", None)
            driver.finish()
        answers.append([driver.results[request].hypotheses for request in requests])
    assert answers[0] == answers[1]  # scores, too


def test_a_device_whose_step_does_not_select_tokens_refuses_to_suppress_some(random_bundle, monkeypatch):
    use_device(FarDevice, monkeypatch)
    with pytest.raises(ValueError, match=r"suppresses tokens, and its step in int8 does not select tokens"):
        OnnxRunner(suppressing(random_bundle, [7]), RunnerConfig(provider="cpu", num_threads=1, max_slots=1))


def test_a_top_p_row_not_covered_by_the_likely_candidates_samples_from_all_tokens(
    random_bundle, requests, monkeypatch
):
    sampled = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, top_k=0, top_p=0.6))
        for request in requests
        if request.sampling
    ]
    expected = run(random_bundle, sampled, num_slots=2)
    asked, draw = [], Selector._draw
    monkeypatch.setattr(
        Selector,
        "_draw",
        lambda self, kind, *given: (asked.append(kind.num_candidates), draw(self, kind, *given))[1],
    )
    monkeypatch.setattr("seq2seq_serve.server.runner.selection._NUM_LIKELY", 30)
    for one, other in zip(run(random_bundle, sampled, num_slots=2), expected, strict=True):
        assert one.best == other.best
    assert set(asked) == {30, VOCAB_SIZE}
    assert asked.count(30) > asked.count(VOCAB_SIZE), "some steps need no more"


def test_constraints_that_raise_for_one_row_end_its_request_only(random_bundle, requests, monkeypatch):
    expected = run(random_bundle, requests, num_slots=7)
    broken = dataclasses.replace(requests[1], log_probabilities=True)

    def fail(row, *given):
        if row.request.constraints is broken.constraints:
            raise RuntimeError("these constraints were told to fail")
        return adjustments(row, *given)

    broken = dataclasses.replace(broken, constraints=Constraints(min_new_tokens=1))
    monkeypatch.setattr("seq2seq_serve.server.runner.selection.adjustments", fail)
    *others, result = run(random_bundle, [*requests, broken], num_slots=7)
    assert isinstance(result.error, EngineFailed)
    for one, other in zip(expected, others, strict=True):
        assert other.best.token_ids == one.best.token_ids


def test_uniform_numbers_are_spread_evenly_and_depend_on_seed_and_position():
    numbers = np.array(
        [
            uniform(seed, sample, position)
            for seed in range(10)
            for sample in range(5)
            for position in range(200)
        ]
    )
    assert len(set(numbers)) == len(numbers)
    assert 0 <= numbers.min() < 0.001
    assert 0.999 < numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts - 500).max() < 5 * np.sqrt(500)  # five standard deviations
    assert uniform(7, 1, 3) == uniform(7, 1, 3)
    assert uniform(2**64 - 1, 0, 0) < 1
