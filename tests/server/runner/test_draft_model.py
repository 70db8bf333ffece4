"""A draft model under the real engine: it changes no answer, keeps up with the rows, and may fail."""

import asyncio
import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.server.config import RunnerConfig, ServerConfig, Speculation
from seq2seq_serve.server.engine.draft_model import DraftModel
from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up
from seq2seq_serve.training.config import EOS_ID
from tests.models import make_random_trained
from tests.server.driver import Driver
from tests.server.engine.test_drafts import drafter_of
from tests.server.fakes import FakeRunner
from tests.server.runner.test_families import everything
from tests.server.runner.test_selection import run

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="the operators are not compiled")

PRECISIONS = Precision.FP32, Precision.INT8


@pytest.fixture(scope="session")
def draft_path(made_once) -> Path:
    """Another model of the same tokens, with one layer."""
    trained = make_random_trained(num_encoder_layers=1, num_decoder_layers=1)
    make = lambda folder: export_bundle(trained, folder / "draft", [Precision.INT8])  # noqa: E731
    return made_once("draft", make) / "draft"


def draft_runner(path: Path, num_slots: int, precision: Precision) -> OnnxRunner:
    config = RunnerConfig(provider="cpu", precision=precision, num_threads=1, max_slots=num_slots)
    return OnnxRunner(load_bundle(path), config, is_draft=True)


def check_drafts(bundle, draft: OnnxRunner, requests: list[Request], precision: Precision) -> float:
    """The draft model changes no answer. Returns the share of right drafts."""
    copies = [dataclasses.replace(request, sources=dict(request.sources)) for request in requests]
    alone = run(bundle, copies, draft.num_slots, precision=precision)
    options = {"drafter": Drafter((EOS_ID,), None), "draft_runner": draft}
    drafted = run(bundle, requests, draft.num_slots, precision=precision, seed=1, **options)
    for one, other in zip(alone, drafted, strict=True):
        assert [each.token_ids for each in other.hypotheses] == [each.token_ids for each in one.hypotheses]
        assert other.finish_reason == one.finish_reason
    num_drafted = sum(result.timings.draft_tokens for result in drafted)
    assert num_drafted > 100
    return sum(result.timings.accepted_tokens for result in drafted) / num_drafted


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_draft_model_changes_no_answer(precision, random_bundle, draft_path):
    draft = draft_runner(draft_path, 9, Precision.INT8)
    assert check_drafts(random_bundle, draft, everything(seed=4), precision) < 0.5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_model_drafts_what_a_row_selects_wherever_the_row_moves(
    precision, random_bundle, bundle_path
):
    """Rows come, go and are moved, with long sources and short ones, and drafts are cut at their limits."""
    chance, requests = random.Random(3), []
    for _ in range(60):
        source = np.array([*(chance.randrange(3, 300) for _ in range(chance.choice([2, 5, 40]))), EOS_ID])
        limit = chance.choice([1, 2, 5, 47])
        requests.append(Request("r", {SOURCE_IDS: source}, len(source), limit, arrival=0.0))
    assert check_drafts(random_bundle, draft_runner(bundle_path, 5, precision), requests, precision) == 1


def test_if_a_draft_model_fails_requests_go_on_without_it(random_bundle, bundle_path, monkeypatch, caplog):
    config = RunnerConfig(provider="cpu", precision=Precision.INT8, num_threads=1, max_slots=3)
    draft = draft_runner(bundle_path, 3, Precision.INT8)
    driver = Driver(OnnxRunner(random_bundle, config), drafter=Drafter((EOS_ID,), None), draft_runner=draft)
    requests = [Request("r", {SOURCE_IDS: np.array([5, 6, 2])}, 3, 12, arrival=0.0) for _ in range(6)]
    driver.submit(*requests)
    driver.turn()
    monkeypatch.setattr(draft, "step", None)
    driver.finish()
    monkeypatch.undo()
    assert len({driver.results[request].best.token_ids for request in requests}) == 1
    assert not any(driver.results[request].error for request in requests)
    assert [record.message for record in caplog.records] == [
        "model fake: its draft model failed, and is no longer used"
    ]


@pytest.mark.parametrize("num_instances", [1, 2])
def test_a_server_loads_the_draft_model_of_a_model(num_instances, bundle_path, draft_path):
    runner = RunnerConfig(
        provider="cpu", num_threads=2, max_slots=4, num_instances=num_instances, draft=draft_path
    )
    alone = size_up(load_bundle(bundle_path), dataclasses.replace(runner, draft=None))
    bundle = load_bundle(bundle_path)
    assert size_up(bundle, runner).total_bytes > alone.total_bytes + (draft_path / "int8").stat().st_size

    async def decode() -> int:
        model = load_model(bundle_path, ServerConfig(runner=runner), "random", lambda _: None)
        await model.engine.start()
        request = Request("r", {SOURCE_IDS: np.array([5, 6, 2])}, 3, 47, arrival=0.0)
        with model.engine.submitted([request]) as (stream,):
            result = await asyncio.wait_for(stream.wait(), 20)
        await model.engine.stop()
        return result.timings.draft_tokens

    assert asyncio.run(decode()) > 0


def test_a_draft_model_that_does_not_fit_is_refused_with_the_reason(
    bundle_path, draft_path, random_recurrent, toy_paths, tmp_path
):
    def problem(path: Path, draft: Path, **settings) -> str:
        config = ServerConfig(runner=RunnerConfig(provider="cpu", draft=draft, **settings))
        with pytest.raises(ValueError, match="does not fit: ") as caught:
            load_model(path, config, "random", lambda _: None)
        return str(caught.value).partition("does not fit: ")[2]

    assert problem(bundle_path, toy_paths["text"]) == "its targets have other tokens"
    recurrent = random_recurrent("dot")[1].path
    assert problem(bundle_path, recurrent).endswith("cannot read several tokens of a target")
    assert "no such folder" in problem(bundle_path, tmp_path / "none").lower()
    assert "the memory budget has" in problem(draft_path, bundle_path, memory_budget_bytes=200_000)
    with pytest.raises(ValueError, match="speculative is off"):
        RunnerConfig(draft=draft_path, speculative=Speculation.OFF)


def test_drafts_end_where_they_do_not_pay():
    """A step takes 1 second, a position of it 0.1, and a draft 0.05."""
    model = DraftModel(FakeRunner(64), drafter_of(seconds_of_position=0.1), "fake", lambda: 0.0)
    for _ in range(200):
        model._times.add(1, 0.05)
    assert model._num_to_draft(1, 1, rate=0.9) > 3
    assert 0 < model._num_to_draft(1, 1, rate=0.5) <= 3
    assert model._num_to_draft(1, 1, rate=0.1) == 0
    assert model._num_to_draft(40, 30, rate=0.9) == 0
