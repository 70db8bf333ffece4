"""Beams whose targets must have terms, under the real runner against the oracle, beside other requests."""

import dataclasses
import random

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Beam, Request
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.engine.terms import RequiredTerms, Spelling, Term
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from tests import oracle
from tests.server.driver import Driver
from tests.server.runner.test_selection import (
    VOCAB_SIZE,
    oracles_constraints,
    random_constraints,
    random_request,
    run,
)


def random_term(chance: random.Random) -> Term:
    spellings = tuple(
        Spelling(tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 3))))
        for _ in range(chance.randint(1, 2))
    )
    return Term(spellings, chance.choice([1, 1, 2]), chance.random() < 0.3)


def random_required(chance: random.Random) -> Request:
    """Any source whose target must have some terms; half of the requests have other constraints, too."""
    source = np.array([*(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 20))), EOS_ID])
    size = chance.randint(1, 5)
    request = Request(
        "r",
        {SOURCE_IDS: source},
        len(source),
        chance.randint(4, 14),
        arrival=0.0,
        beam=Beam(size, chance.choice([0.0, 0.6, 1.0]), early_stopping=chance.choice([True, False, "never"])),
        num_hypotheses=chance.randint(1, size),
        log_probabilities=True,
        num_alternatives=chance.choice([0, 2]),
        stream=chance.random() < 0.5,
        prefix_ids=tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.choice([0, 0, 3]))),
        terms=RequiredTerms([random_term(chance) for _ in range(chance.randint(1, 3))], ()),
    )
    return dataclasses.replace(request, constraints=random_constraints(chance))


def targets(results: list[Result]) -> list[list[tuple[int, ...]]]:
    return [[hypothesis.token_ids for hypothesis in result.hypotheses] for result in results]


@pytest.fixture(scope="module")
def required() -> list[Request]:
    chance = random.Random(5)
    return [random_required(chance) for _ in range(40)]


def test_the_search_is_the_oracles(random_trained, random_bundle, required):
    chance = random.Random(2)
    others = [random_request(chance) for _ in range(20)]
    others += [
        dataclasses.replace(request, terms=None, constraints=random_constraints(chance))
        for request in required[:9]
    ]
    found = run(random_bundle, [*required, *others], num_slots=14)
    for request, result in zip(required, found, strict=False):
        expected = oracle.term_search(
            random_trained.model,
            request.sources[SOURCE_IDS].tolist(),
            oracle.Terms(request.terms.terms),
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            beam_size=request.beam.size,
            alpha=request.beam.alpha,
            max_new_tokens=request.max_new_tokens,
            early_stopping=request.beam.early_stopping,
            constraints=oracles_constraints(request),
            num_hypotheses=request.num_hypotheses,
        )
        assert [list(one.token_ids) for one in result.hypotheses] == [one.token_ids for one, _ in expected]
        assert [sum(one.missing) for one in result.hypotheses] == [sum(missing) for _, missing in expected]
        for one, (hypothesis, _) in zip(result.hypotheses, expected, strict=True):
            assert one.score == pytest.approx(hypothesis.score, abs=1e-4)
            given = [choice.log_probability for choice in one.token_scores]
            np.testing.assert_allclose(given, hypothesis.log_probabilities, atol=1e-4)
    alone = run(random_bundle, others, num_slots=14)
    assert targets(found[len(required) :]) == targets(alone)


@pytest.mark.skipif(kernels.library() is None, reason="the step computes logits")
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4])
def test_the_step_selects_for_any_mix_what_it_selects_for_each_alone(
    random_bundle, required, precision, monkeypatch
):
    """A step whose graph looks nothing up, as in older bundles, gives logits where terms want tokens."""
    free = {"constraints": Request.constraints, "num_alternatives": 0}
    with_terms = [dataclasses.replace(request, **free) for request in required[:12]]
    beams = [dataclasses.replace(request, terms=None) for request in with_terms[4:8]]
    greedy = [
        dataclasses.replace(request, terms=None, beam=None, num_hypotheses=1, log_probabilities=False)
        for request in with_terms[8:]
    ]
    assert all(request.is_plain for request in greedy)
    given = [*with_terms, *beams, *greedy]
    answers = []
    for looks_up, groups in ((True, [given]), (True, [[each] for each in given]), (False, [given])):
        config = RunnerConfig("cpu", precision, num_threads=1, max_slots=24)
        runner = OnnxRunner(random_bundle, config)
        assert runner.chooses_tokens
        assert runner._looks_up
        runner._looks_up = looks_up
        driver, found = Driver(runner), []
        with monkeypatch.context() as patch:
            if looks_up:
                patch.setattr(runner._selector, "select", None)
            for group in groups:
                requests = [dataclasses.replace(request) for request in group]
                driver.submit(*requests)
                driver.finish()
                found += [driver.results[request].hypotheses for request in requests]
        answers.append(found)
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.skipif(kernels.library() is None, reason="the step computes logits")
def test_beams_beside_it_have_the_tokens_and_scores_that_the_step_selects_alone(random_bundle, required):
    beams = [
        dataclasses.replace(request, terms=None, constraints=Request.constraints, num_alternatives=0)
        for request in required[:12]
    ]
    answers = []
    for beside in (required[12:16], []):
        runner = OnnxRunner(random_bundle, RunnerConfig("cpu", Precision.INT8, num_threads=1, max_slots=16))
        assert runner.chooses_tokens
        driver = Driver(runner)
        requests = [dataclasses.replace(request) for request in beams]
        driver.submit(*beside, *requests)
        driver.finish()
        answers.append([driver.results[request].hypotheses for request in requests])
    assert answers[0] == answers[1]
