"""Families under the real engine: the oracle's answers in every mode, alone and in any batch."""

import dataclasses
import json
import math
import random
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.bundle.names import FEATURES, SOUND, SOURCE_IDS, Precision, Verb
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.export.huggingface.exporter import export_checkpoint
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Beam, Constraints, Request, Sampling
from seq2seq_serve.server.engine.result import FinishReason, Result
from seq2seq_serve.server.errors import NO_NUMBERS
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.service.read.inputs import MAX_MAGNITUDE
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from seq2seq_serve.training.models.captioner import CaptionerConfig
from tests.bundle.test_manifest import write
from tests.models import RECURRENT, random_model
from tests.oracle import score_target
from tests.server.damage import make_graph_nan, make_weights_nan
from tests.server.driver import Driver
from tests.server.runner.test_runner import copies_of, sounds_of
from tests.server.runner.test_selection import (
    LIMIT,
    VOCAB_SIZE,
    oracle,
    random_constraints,
    random_request,
    run,
)

# The Transformer has a cache, and a graph that reads prefixes and given targets; the others go by steps.
QUICK = "transformer", "additive"
FAMILIES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT if name not in QUICK)]
PRECISIONS = Precision.FP32, Precision.INT8
BATCHES = [
    *(("transformer", precision) for precision in (*PRECISIONS, Precision.INT4)),
    ("additive", Precision.INT8),
]
BATCHES += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in product(RECURRENT, PRECISIONS)
    if case not in BATCHES
]


@pytest.fixture
def family(name, request, random_recurrent):
    if name == "transformer":
        return request.getfixturevalue("random_trained"), request.getfixturevalue("random_bundle")
    return random_recurrent(name)


def random_branching(chance: random.Random) -> Request:
    """Any source with a beam or several hypotheses, and any options beside."""
    source = np.array([*(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 20))), EOS_ID])
    request = Request(
        "r",
        {SOURCE_IDS: source},
        len(source),
        chance.randint(1, LIMIT),
        arrival=0.0,
        # Without a bias a random model hardly ever ends.
        constraints=Constraints(logit_bias={EOS_ID: chance.uniform(2, 6)}),
        log_probabilities=chance.random() < 0.5,
        stream=chance.random() < 0.5,
        prefix_ids=tuple(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.choice([0, 0, 1, 9]))),
    )
    if chance.random() < 0.5:
        request = dataclasses.replace(request, constraints=random_constraints(chance))
    kind = chance.random()
    if kind < 0.6:
        size = chance.randint(1, 6)
        beam = Beam(
            size,
            alpha=chance.choice([0.0, 0.6, 1.0, -0.5]),
            formula=chance.choice(["wu", "power"]),
            early_stopping=chance.choice([True, False, "never"]),
        )
        return dataclasses.replace(request, beam=beam, num_hypotheses=chance.randint(1, size))
    sampling = Sampling(1.0, chance.choice([0, 9]), chance.choice([1.0, 0.9]), 0.0, chance.getrandbits(64))
    return dataclasses.replace(
        request, sampling=sampling if kind < 0.8 else None, num_hypotheses=chance.randint(2, 5)
    )


def scored(chance: random.Random) -> Request:
    source = np.array([*(chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 30))), EOS_ID])
    target = tuple(chance.choices(range(3, VOCAB_SIZE), k=chance.choice([0, 1, 5, 30, 47])))
    return Request("r", {SOURCE_IDS: source}, len(source), 1, 0.0, prefix_ids=target, is_score=True)


def everything(seed: int) -> list[Request]:
    """Greedy, drawn, constrained and branching requests, prefixes and scores."""
    chance = random.Random(seed)
    makers = (random_request, random_branching, scored)
    return [makers[i % 3](chance) for i in range(60)]


def check_score(trained, request, result) -> None:
    source, target = request.sources[SOURCE_IDS].tolist(), list(request.prefix_ids)
    expected = score_target(trained.model, source, target, bos_id=BOS_ID, eos_id=EOS_ID)
    given = [each.log_probability for each in result.best.token_scores]
    np.testing.assert_allclose(given, expected, atol=1e-4)
    assert (result.best.token_ids, result.num_target_tokens) == (request.prefix_ids, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_in_one_batch_gives_what_the_oracle_gives(name, family):
    trained, bundle = family
    requests, reasons = everything(seed=1), set()
    for request, result in zip(requests, run(bundle, requests, num_slots=9), strict=True):
        if request.is_score:
            check_score(trained, request, result)
            continue
        expected = oracle(trained, request)
        assert [list(one.token_ids) for one in result.hypotheses] == [one.token_ids for one in expected]
        assert result.num_target_tokens == sum(len(one.log_probabilities) for one in expected)
        for one, other in zip(result.hypotheses, expected, strict=True):
            reasons.add(one.finish_reason)
            assert (one.finish_reason is FinishReason.EOS) == other.is_finished
            if request.beam is not None or request.num_hypotheses > 1:
                assert one.score == pytest.approx(other.score, abs=1e-4)
            wanted = other.log_probabilities if request.log_probabilities else []
            np.testing.assert_allclose([each.log_probability for each in one.token_scores], wanted, atol=1e-4)
    assert reasons == {FinishReason.EOS, FinishReason.LENGTH}


def check_equal(found: list[Result], expected: list[Result]) -> None:
    """The results are equal, numbers up to rounding and times apart."""
    for other, one in zip(found, expected, strict=True):
        assert other._replace(timings=one.timings, hypotheses=one.hypotheses) == one
        for ours, theirs in zip(other.hypotheses, one.hypotheses, strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
            assert ours.score == pytest.approx(theirs.score, abs=1e-5)
            for each, wanted in zip(ours.token_scores, theirs.token_scores, strict=True):
                assert each.log_probability == pytest.approx(wanted.log_probability, abs=1e-5)
                assert [i for i, _ in each.alternatives] == [i for i, _ in wanted.alternatives]


@pytest.mark.parametrize(("name", "precision"), BATCHES)
def test_a_request_gets_the_same_alone_and_in_any_batch(name, precision, family):
    _, bundle = family
    requests = everything(seed=2)
    alone = run(bundle, requests, num_slots=6, precision=precision)
    together = run(bundle, requests, num_slots=17, precision=precision, seed=1)
    check_equal(together, alone)


@pytest.mark.parametrize("name", ["transformer", "additive", pytest.param("dot", marks=pytest.mark.slow)])
def test_the_attention_of_an_answer_is_that_of_torch(name, family):
    """Also of the hypotheses of a beam, which fork, and after a prefix, which steps may read."""
    trained, bundle = family
    chance = random.Random(3)
    requests = [dataclasses.replace(random_branching(chance), attention=i % 3 != 0) for i in range(12)]
    num_compared = 0
    for request, result in zip(requests, run(bundle, requests, num_slots=9), strict=True):
        source = torch.from_numpy(request.sources[SOURCE_IDS])[None]
        for each in result.hypotheses:
            if not request.attention:
                assert each.attention is None
                continue
            length = len(each.attention)
            fed = torch.tensor([[BOS_ID, *each.token_ids][:length]])
            mask = torch.ones_like(source, dtype=torch.bool)
            with torch.inference_mode():
                memory = trained.model.encode(source, mask)
                expected = trained.model.alignment(trained.model.decode_with_attention(fed, memory, mask)[1])
            np.testing.assert_allclose(each.attention, expected[0].numpy(), atol=1e-5)
            num_compared += 1
    assert num_compared > 8


@pytest.fixture
def merged_bundle(imported) -> Bundle:
    return load_bundle(imported("t5gemma2") / "bundle")


def make_runner(bundle: Bundle, precision: Precision) -> OnnxRunner:
    return OnnxRunner(bundle, RunnerConfig(provider="cpu", precision=precision, num_threads=1, max_slots=9))


def answer(driver: Driver, requests: list[Request]) -> list:
    """The answers to requests that come one a turn."""
    for request in requests:
        driver.submit(request)
        driver.turn()
    driver.finish()
    results = [driver.results[request] for request in requests]
    return [content(result) for result in results]


def content(result: Result) -> list:
    return [(*one[:2], one.score, one.token_scores) for one in result.hypotheses]


with_and_without_operators = pytest.mark.parametrize("has_operators", [True, False])


@with_and_without_operators
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("random_bundle", Precision.FP32),
        ("random_bundle", Precision.INT8),
        ("random_bundle", Precision.INT4),
        pytest.param("merged_bundle", Precision.FP32, marks=pytest.mark.slow),  # its export takes long
    ],
)
def test_values_that_earlier_requests_left_in_the_buffers_change_no_answer(
    name, precision, has_operators, request, monkeypatch
):
    """NaN of a caller's features came to the next owner of its slot: a weight of zero does not remove it."""
    if not has_operators:
        monkeypatch.setattr(kernels, "add", lambda *_, **__: "they are not compiled")
    requests, bundle = everything(seed=5), request.getfixturevalue(name)
    answers = []
    for number in (0.0, math.nan):
        runner = make_runner(bundle, precision)
        for buffers in runner._groups_of_buffers:
            buffers._storage.fill(number)
        # A runner forgets the features of a request once it has encoded them.
        own = [dataclasses.replace(one, sources=dict(one.sources)) for one in requests]
        answers.append(answer(Driver(runner), own))
    assert answers[0] == answers[1]
    assert all(one[1] is not FinishReason.FAILED for hypotheses in answers[0] for one in hypotheses)


@with_and_without_operators
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8, Precision.INT4])
def test_nan_logits_fail_their_request_and_no_other(precision, has_operators, random_bundle, monkeypatch):
    """Greedy and drawn tokens of NaN were answers: token 0 again and again."""
    if not has_operators:
        monkeypatch.setattr(kernels, "add", lambda *_, **__: "they are not compiled")
    plain = Request("bad", {SOURCE_IDS: np.array([5, 6, EOS_ID])}, 3, 9, 0.0)
    sampling = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    bad = [
        plain,
        dataclasses.replace(plain, prefix_ids=(7, 8), stream=True),
        dataclasses.replace(plain, log_probabilities=True),
        dataclasses.replace(plain, constraints=Constraints(suppressed_token_ids=frozenset({4}))),
        *(dataclasses.replace(plain, sampling=dataclasses.replace(sampling, top_k=k)) for k in (0, 9)),
        dataclasses.replace(plain, sampling=dataclasses.replace(sampling, top_p=0.5)),
        dataclasses.replace(plain, sampling=sampling, num_hypotheses=3),
        dataclasses.replace(plain, beam=Beam(3)),
        dataclasses.replace(plain, beam=Beam(3), constraints=Constraints(min_new_tokens=2)),
        dataclasses.replace(plain, is_score=True, prefix_ids=(7, 8)),
    ]
    good = everything(seed=6)
    expected = answer(Driver(make_runner(random_bundle, precision)), good)
    runner = make_runner(random_bundle, precision)
    encode = runner.encode

    def spoil(first_row: int, requests: list[Request]) -> None:
        encode(first_row, requests)
        for row, request in enumerate(requests, first_row):
            for buffers in runner._groups_of_buffers if request in bad else ():
                buffers._positions[:, row] = math.nan

    monkeypatch.setattr(runner, "encode", spoil)
    driver = Driver(runner)
    together = [request for pair in zip(good, bad, strict=False) for request in pair] + good[len(bad) :]
    answer(driver, together)
    assert {str(driver.results[request].error) for request in bad} == {NO_NUMBERS}
    assert not any(driver.told(request) for request in bad)
    monkeypatch.setattr(runner, "encode", encode)
    again = Driver(runner)
    assert answer(again, good) == expected
    for request, hypotheses in zip(good, expected, strict=True):
        assert content(driver.results[request]) == hypotheses


@with_and_without_operators
@pytest.mark.parametrize(("name", "precision"), BATCHES)
def test_weights_that_are_not_numbers_are_refused_at_loading(
    name, precision, family, has_operators, tmp_path, monkeypatch
):
    """The warm-up looked at no number: such a bundle was loaded, and every call ended with INTERNAL."""
    if not has_operators:
        monkeypatch.setattr(kernels, "add", lambda *_, **__: "they are not compiled")
    damaged = shutil.copytree(family[1].path, tmp_path / "damaged")
    make_weights_nan(damaged)
    with pytest.raises(ValueError, match="the graph step computes is not a number: its weights are damaged"):
        make_runner(load_bundle(damaged), precision).warm_up()
    make_runner(family[1], precision).warm_up()


@pytest.mark.parametrize(
    ("case", "verb", "named"),
    [(case, verb, Verb.STEP) for case in ("t5", "whisper") for verb in (Verb.ENCODE, Verb.STEP)]
    + [("whisper", Verb.DECODE, Verb.DECODE)],
)
def test_each_graph_whose_numbers_are_damaged_is_refused_at_loading(case, verb, named, imported, tmp_path):
    """Also those of an encoder, which reach the steps through the memory."""
    damaged = shutil.copytree(imported(case) / "bundle", tmp_path / "damaged")
    make_graph_nan(damaged, verb)
    with pytest.raises(ValueError, match=f"the graph {named} computes is not a number"):
        make_runner(load_bundle(damaged), Precision.FP32).warm_up()


# slow: one more export
@pytest.mark.parametrize("precision", [Precision.FP32, pytest.param(Precision.INT8, marks=pytest.mark.slow)])
def test_windows_of_several_lengths_have_the_same_bits_alone_and_together(precision, imported, tmp_path):
    path = imported("whisper") / "bundle"
    if precision is not Precision.FP32:
        path = tmp_path / "bundle"
        export_checkpoint(imported("whisper") / "checkpoint", path, [precision])
    bundle = load_bundle(path)
    requests = sounds_of(bundle, [64, 20, 20, 33, 64, 64, 20, 2])
    together, alone = run(bundle, copies_of(requests), 5, precision), []
    for request in copies_of(requests):
        alone += run(bundle, [request], 1, precision)
    for request, one, other in zip(requests, alone, together, strict=True):
        assert one.best.token_ids == other.best.token_ids
        assert len(one.best.attention) >= len(one.best.token_ids) > 0
        assert one.best.attention.shape[-1] == request.memory_length
        np.testing.assert_array_equal(one.best.attention, other.best.attention)
    assert len({result.best.token_ids for result in alone}) > 4, "a model that hears nothing proves nothing"


def test_an_encode_call_takes_sounds_of_one_length(imported, monkeypatch):
    """Neighbours of one length are in one call; the rows of all calls follow each other."""
    bundle, calls = load_bundle(imported("whisper") / "bundle"), []
    encode = OnnxRunner._encode
    monkeypatch.setattr(
        OnnxRunner,
        "_encode",
        lambda self, row, requests, least: (
            calls.append((row, len(requests))),
            encode(self, row, requests, least),
        ),
    )
    make_runner(bundle, Precision.FP32).encode(1, sounds_of(bundle, [64, 20, 20, 19, 64, 64]))
    assert calls == [(1, 1), (2, 2), (4, 1), (5, 2)]


def test_a_bundle_of_an_earlier_version_takes_whole_windows(imported, tmp_path):
    path = Path(shutil.copytree(imported("whisper") / "bundle", tmp_path / "bundle"))
    new, manifest = load_bundle(path), json.loads((path / "manifest.json").read_text())
    manifest["format_version"] = 14
    manifest["memory"].pop("axis")
    [sound] = [
        each for each in manifest["variants"]["fp32"]["graphs"]["encode"]["inputs"] if each["name"] == SOUND
    ]
    sound["axes"][2] = 64
    write(path, manifest)
    old, requests = load_bundle(path), sounds_of(new, [64, 64, 64])
    found = [run(bundle, copies_of(requests), 2) for bundle in (old, new)]
    of_old, of_new = ([each.best.token_ids for each in results] for results in found)
    assert of_old == of_new
    OnnxRunner(old, RunnerConfig(provider="cpu", max_slots=2)).warm_up()


@pytest.mark.parametrize("attention", ["soft", pytest.param("mean", marks=pytest.mark.slow)])
def test_the_largest_features_leave_finite_memory(attention, tmp_path):
    """A captioner's step reads the whole room of a row without looking for NaN."""
    sizes = {"d_annotation": 24, "d_model": 24, "d_hidden": 24, "attention": attention}
    features = {"source": "features", "feature_width": 6, "max_source_length": 16}
    export_bundle(random_model(CaptionerConfig, sizes | features), tmp_path / "b", [Precision.FP32])
    runner = make_runner(load_bundle(tmp_path / "b"), Precision.FP32)
    signs = np.random.default_rng(0).choice([-1, 1], (9, 6)).astype(np.float32)
    largest = [signs, signs[:1], np.ones((16, 6), np.float32)]
    requests = [Request("r", {FEATURES: one * MAX_MAGNITUDE}, len(one), 8, 0.0) for one in largest]
    runner.encode(0, requests)
    for buffers in runner._groups_of_buffers:
        assert np.isfinite(buffers._storage).all()
        assert buffers._storage.any()
