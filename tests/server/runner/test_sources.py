"""Every form of source, and memory of another length than its source, in the real engine."""

import random

import numpy as np
import pytest

from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.bundle.names import Axis
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up
from tests.server.driver import Driver
from tests.server.toys import KINDS, MAX_TARGET_LENGTH, Kind


@pytest.fixture(scope="module", params=KINDS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def kind(name: str) -> Kind:
    return KINDS[name]


@pytest.fixture(scope="module")
def bundle(name: str, toy_paths) -> Bundle:
    return load_bundle(toy_paths[name])


def make_runner(bundle: Bundle, **options) -> OnnxRunner:
    return OnnxRunner(bundle, RunnerConfig(provider="cpu", num_threads=1, **options))


def test_each_request_gets_its_own_tokens_and_attention_alone_and_in_any_batch(kind, bundle):
    rng, chance = np.random.default_rng(0), random.Random(0)
    runner = make_runner(bundle, max_slots=5)
    runner.warm_up()
    requests, sources_of = [], {}
    for length in [1, kind.max_source_length, *rng.integers(1, kind.max_source_length + 1, 22)]:
        sources = kind.draw(rng, length)
        count = chance.randint(1, MAX_TARGET_LENGTH)
        request = kind.request(sources, count, attention=chance.random() < 0.5)
        requests.append(request)
        sources_of[request] = sources
    for batch, pauses in ((requests[:4], [MAX_TARGET_LENGTH + 1]), (requests[4:], [0, 0, 1, 3])):
        driver = Driver(runner)
        for request in batch:
            driver.submit(request)
            driver.turn(chance.choice(pauses))
        driver.finish()
        for request in batch:
            assert all(array.ndim == 1 for array in request.sources.values()), "kept while it decoded"
            sources, count = sources_of[request], request.max_new_tokens
            [hypothesis] = driver.results[request].hypotheses
            assert list(hypothesis.token_ids) == kind.tokens(sources, count)
            if request.attention:
                assert hypothesis.attention.tolist() == kind.attention(sources, count)


def test_memory_has_room_for_the_longest_source_and_no_more(kind, bundle):
    sizing = size_up(bundle, RunnerConfig(provider="cpu", num_threads=1))
    assert sizing.sizes[Axis.MEMORY_CAPACITY] == kind.memory_capacity
    assert sizing.slot_bytes == 4 * (kind.memory_capacity + 2)  # the state has two copies
    runner = make_runner(bundle, max_slots=2, max_source_length=5)
    assert runner.max_source_length == 5
    assert runner.slot_bytes == 4 * (kind.rule.memory_length({kind.rule.source: 5}) + 2)
