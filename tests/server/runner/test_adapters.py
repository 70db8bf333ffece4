"""Rows of several adapters in the real runner, under the real engine."""

import dataclasses
import random

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.core import WriteAdapter
from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.engine.request import Beam, Constraints, Request, Sampling
from seq2seq_serve.server.engine.scheduler import SchedulerLimits
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up
from seq2seq_serve.training.config import EOS_ID
from tests.models import random_adapter
from tests.server.driver import Driver
from tests.server.fakes import KnowingDrafter
from tests.server.runner.test_runner import make_request

PLACES, RANK = 3, 8


def config(num_slots: int = 4, precision=Precision.FP32, **options) -> RunnerConfig:
    settings = {"provider": "cpu", "precision": precision, "num_threads": 2, "max_slots": num_slots}
    return RunnerConfig(
        **settings | {"max_adapters": PLACES, "max_rank": RANK, "has_adapters": True} | options
    )


def driver_of(bundle, num_slots: int, precision, adapters, **options) -> Driver:
    driver = Driver(OnnxRunner(bundle, config(num_slots, precision)), **options)
    for place, weights in enumerate(adapters):
        driver.core.send(WriteAdapter(place, weights))
    return driver


def requests_of_every_kind(bundle, chance: random.Random) -> list[Request]:
    """Greedy, beams, samples, n-best, prefixes, scores and alignments, each with any adapter or none."""
    kinds = [
        {},
        {"beam": Beam(3)},
        {"sampling": Sampling(1.0, 0, 0.9, 0.0, seed=3)},
        {"num_hypotheses": 2, "log_probabilities": True},
        {"prefix_ids": (7, 9, 11)},
        {"prefix_ids": (7, 9, 11, 8), "is_score": True},
        {"attention": True},
        {"constraints": Constraints(repetition_penalty=1.3)},
    ]
    size = bundle.manifest.sizes["vocab_size"]
    requests = []
    for kind in kinds:
        source = [chance.randrange(3, size) for _ in range(chance.randint(1, 12))]
        for adapter in range(-1, PLACES):
            requests.append(make_request(source, 10, adapter=adapter, **kind))
    return requests


def content(result) -> list:
    return [
        (one.token_ids, one.score, [score.log_probability for score in one.token_scores])
        for one in result.hypotheses
    ] + [None if one.attention is None else one.attention.tobytes() for one in result.hypotheses]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_request_has_the_bits_alone_that_it_has_beside_requests_of_other_adapters(
    precision, adapted_bundle
):
    """In every mode, whoever else comes and goes; two of three adapters change each other's targets."""
    adapters = [random_adapter(adapted_bundle, seed, RANK) for seed in range(PLACES)]
    requests = requests_of_every_kind(adapted_bundle, random.Random(1))
    alone = []
    driver = driver_of(adapted_bundle, 4, precision, adapters)
    for request in requests:
        driver.submit(request)
        driver.finish()
        alone.append(content(driver.results[request]))
    assert len({one[0][0] for one in alone[: PLACES + 1]}) > 2, "adapters change targets"
    for seed in range(2):
        chance = random.Random(seed)
        limits = SchedulerLimits(max_encode_tokens=chance.choice([10, 1000]))
        driver = driver_of(adapted_bundle, 12, precision, adapters, limits=limits)
        copies = [dataclasses.replace(one, sources=dict(one.sources)) for one in requests]
        waiting = copies[:]
        chance.shuffle(waiting)
        while waiting:
            for _ in range(chance.randint(0, 6)):
                if waiting:
                    driver.submit(waiting.pop())
            driver.turn(chance.randint(0, 3))
        driver.finish()
        for copy, expected in zip(copies, alone, strict=True):
            assert content(driver.results[copy]) == expected


@pytest.mark.skipif(kernels.library() is None, reason="the operators are not compiled")
@pytest.mark.parametrize("drafts_by_model", [False, True])
def test_drafts_change_no_target_of_a_row_with_an_adapter(drafts_by_model, adapted_bundle):
    """Right and wrong ones; and those of a draft model that takes adapters itself, and has none."""
    adapters = [random_adapter(adapted_bundle, seed, RANK) for seed in range(PLACES)]
    requests = requests_of_every_kind(adapted_bundle, random.Random(2))
    answers = []
    for drafts in (False, True):
        options = {}
        copies = [dataclasses.replace(one, sources=dict(one.sources)) for one in requests]
        if drafts and drafts_by_model:
            draft = OnnxRunner(adapted_bundle, config(12, has_adapters=False), is_draft=True)
            options = {"drafter": Drafter((EOS_ID,), None), "draft_runner": draft}
        elif drafts:
            targets = dict(zip(copies, answers[0], strict=True))
            size = adapted_bundle.manifest.target_vocab_size
            options = {"drafter": KnowingDrafter(targets, size, seed=7)}
        driver = driver_of(adapted_bundle, 12, Precision.FP32, adapters, **options)
        driver.submit(*copies)
        driver.finish()
        results = [driver.results[copy] for copy in copies]
        answers.append([[one.token_ids for one in result.hypotheses] for result in results])
    assert answers[0] == answers[1]
    assert sum(result.timings.draft_tokens for result in results) > 20


def test_an_adapter_is_replaced_between_two_turns_and_others_go_on(adapted_bundle):
    adapters = [random_adapter(adapted_bundle, seed, RANK) for seed in range(2)]
    sources = [make_request([4, 5, 6], 12, adapter=adapter) for adapter in (0, 1, -1)]

    def targets(adapters, requests) -> list[tuple[int, ...]]:
        driver = driver_of(adapted_bundle, 4, Precision.FP32, adapters)
        copies = [dataclasses.replace(one, sources=dict(one.sources)) for one in requests]
        driver.submit(*copies)
        driver.finish()
        return [driver.results[one].best.token_ids for one in copies]

    before = targets(adapters, sources)
    after = targets([adapters[1], adapters[1]], sources)
    driver = driver_of(adapted_bundle, 4, Precision.FP32, adapters)
    ends, runs, plain = sources
    driver.submit(runs, plain)
    driver.turn(3)
    driver.core.send(WriteAdapter(0, adapters[1]))
    driver.submit(ends)
    driver.finish()
    found = [driver.results[one].best.token_ids for one in sources]
    assert found == [after[0], before[1], before[2]]
    assert found[0] == found[1] != before[0]


@pytest.mark.parametrize("num_instances", [1, 2])
def test_sizes_count_the_places_of_adapters_only_if_there_may_be_some(
    num_instances, adapted_bundle, random_bundle
):
    """The copies from which an engine starts instances again were not counted."""
    with_places = size_up(adapted_bundle, config(num_instances=num_instances))
    without = size_up(adapted_bundle, config(num_instances=num_instances, has_adapters=False))
    plain = size_up(random_bundle, config(num_instances=num_instances))
    assert (with_places.num_adapters, with_places.max_rank) == (PLACES, RANK)
    assert (without.num_adapters, plain.num_adapters) == (1, 0)
    assert with_places.adapter_bytes == PLACES * RANK * without.adapter_bytes
    assert plain.adapter_bytes == 0
    grown = with_places.limited_bytes - without.limited_bytes
    assert grown == (num_instances + 1) * (with_places.adapter_bytes - without.adapter_bytes)
    assert np.isclose(without.total_bytes, plain.total_bytes, rtol=0.1)
