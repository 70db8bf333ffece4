"""A draft model under the real engine: it changes no answer, keeps up with the rows, and may fail."""

import asyncio
import dataclasses
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.export.convert import WEIGHTS_FILE
from seq2seq_serve.export.draft import cut_bundle
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.server.check import check
from seq2seq_serve.server.config import RunnerConfig, ServerConfig, Speculation
from seq2seq_serve.server.engine.draft_model import DraftModel
from seq2seq_serve.server.engine.drafts import MAX_DRAFTED, Drafter, drafted
from seq2seq_serve.server.engine.ngrams import Lookup
from seq2seq_serve.server.engine.plan import Selected, StepPlan
from seq2seq_serve.server.engine.request import Beam, Request
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.engine.state import Search, Sequence
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up
from seq2seq_serve.training.config import EOS_ID
from tests.models import make_random_trained
from tests.server.driver import Driver
from tests.server.engine.test_drafts import drafter_of
from tests.server.fakes import SOURCE, START_ID, FakeRunner
from tests.server.runner.test_families import check_equal, everything
from tests.server.runner.test_selection import run

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="the operators are not compiled")

PRECISIONS = Precision.FP32, Precision.INT8


@pytest.fixture(scope="session")
def draft_path(made_once) -> Path:
    """Another model of the same tokens, with one layer."""
    trained = make_random_trained(num_encoder_layers=1, num_decoder_layers=1)
    make = lambda folder: export_bundle(trained, folder / "draft", [Precision.INT8])  # noqa: E731
    return made_once("draft", make) / "draft"


@pytest.fixture(scope="session")
def cut_path(draft_path, made_once) -> Path:
    """The same with a half of the tokens."""
    tokenizer = load_bundle(draft_path).target_tokenizer
    texts = [tokenizer.decode([token_id]) for token_id in range(4, 300, 2)]
    return made_once("cut", lambda folder: cut_bundle(draft_path, folder / "draft", texts)) / "draft"


def draft_runner(path: Path, num_slots: int, precision: Precision) -> OnnxRunner:
    config = RunnerConfig(provider="cpu", precision=precision, num_threads=1, max_slots=num_slots)
    return OnnxRunner(load_bundle(path), config, is_draft=True)


def check_drafts(bundle, draft: OnnxRunner, requests: list[Request], precision: Precision) -> float:
    """The draft model changes no answer. Returns the share of right drafts."""
    copies = [dataclasses.replace(request, sources=dict(request.sources)) for request in requests]
    alone = run(bundle, copies, draft.num_slots, precision=precision)
    options = {"drafter": Drafter((EOS_ID,), None), "draft_runner": draft}
    drafted = run(bundle, requests, draft.num_slots, precision=precision, seed=1, **options)
    check_equal(drafted, alone)
    num_drafted = sum(result.timings.draft_tokens for result in drafted)
    assert num_drafted > 100
    return sum(result.timings.accepted_tokens for result in drafted) / num_drafted


@pytest.mark.parametrize("path", ["draft_path", "cut_path"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_draft_model_changes_no_answer(precision, path, random_bundle, request):
    draft = draft_runner(request.getfixturevalue(path), 9, Precision.INT8)
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


@pytest.mark.parametrize("is_stray", [False, True])
def test_a_draft_model_that_fails_or_drafts_what_is_no_token_is_not_used_any_more(
    is_stray, random_bundle, bundle_path, monkeypatch, caplog
):
    """An id beyond the vocabulary failed the steps of the served model, again and again."""
    config = RunnerConfig(provider="cpu", precision=Precision.INT8, num_threads=1, max_slots=3)
    draft = draft_runner(bundle_path, 3, Precision.INT8)
    step = draft.step

    def stray(rows: tuple[Sequence, ...], num_steps: int = 1) -> Selected:
        for row in rows:
            row.next_token_id = min(row.next_token_id, 9)  # the draft model itself does not fail
        return Selected([draft.vocab_size + 5] * len(step(rows, num_steps).token_ids))

    driver = Driver(OnnxRunner(random_bundle, config), drafter=Drafter((EOS_ID,), None), draft_runner=draft)
    requests = [Request("r", {SOURCE_IDS: np.array([5, 6, 2])}, 3, 12, arrival=0.0) for _ in range(6)]
    driver.submit(*requests)
    driver.turn()
    monkeypatch.setattr(draft, "step", stray if is_stray else None)
    driver.finish()
    monkeypatch.undo()
    assert len({driver.results[request].best.token_ids for request in requests}) == 1
    assert not any(driver.results[request].error for request in requests)
    assert [record.message for record in caplog.records] == [
        "model fake: its draft model failed, and is no longer used"
    ]


@pytest.mark.parametrize(("num_instances", "path"), [(1, "draft_path"), (2, "cut_path")])
def test_a_server_loads_the_draft_model_of_a_model(num_instances, path, bundle_path, request):
    draft_path = request.getfixturevalue(path)
    runner = RunnerConfig(
        provider="cpu", num_threads=2, max_slots=4, num_instances=num_instances, draft=draft_path
    )
    bundle = load_bundle(bundle_path)
    alone = size_up(bundle, dataclasses.replace(runner, draft=None))
    both = size_up(bundle, runner)
    of_draft = both.draft.sizing
    slots_bytes = num_instances * of_draft.num_slots * of_draft.slot_bytes
    assert both.total_bytes == alone.total_bytes + of_draft.weight_bytes + slots_bytes

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
    bundle_path, draft_path, random_recurrent, toy_paths, tmp_path, caplog
):
    def problem(path: Path, draft: Path, **settings) -> str:
        config = ServerConfig(runner=RunnerConfig(provider="cpu", draft=draft, **settings))
        with pytest.raises(ValueError, match="does not fit: ") as caught:
            load_model(path, config, "random", lambda _: None)
        return str(caught.value).partition("does not fit: ")[2]

    assert problem(bundle_path, toy_paths["text"]).startswith("its targets have other tokens")
    recurrent = random_recurrent("additive")[1].path
    assert problem(bundle_path, recurrent) == "it cannot read several tokens of a target in a step"
    missing = ServerConfig(runner=RunnerConfig(provider="cpu", draft=tmp_path / "none"))
    missing_draft = r"the draft model: .*none is not a usable bundle: there is no such folder"
    with pytest.raises(ValueError, match=missing_draft):
        load_model(bundle_path, missing, "random", lambda _: None)
    assert "--max-slots-size has room for" in problem(draft_path, bundle_path, max_slots_size_bytes=200_000)
    off = RunnerConfig(provider="cpu", draft=tmp_path / "none", speculative=Speculation.OFF)
    own = RunnerConfig(provider="cpu", draft=bundle_path)
    for runner in (off, own):
        assert size_up(load_bundle(bundle_path), runner).draft is None
    assert "is not used" not in caplog.text
    for runner in (off, own):
        load_model(bundle_path, ServerConfig(runner=runner), "random", lambda _: None)
    records = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.message.partition(": ")[2] for record in records] == [
        f"{reason}, so a draft model is not used"
        for reason in ("speculative is off", "it is the draft model itself")
    ]


def test_a_server_says_how_many_tokens_a_cut_draft_model_has(bundle_path, draft_path, cut_path, caplog):
    for path, cut in ((draft_path, ""), (cut_path, r", \d+ of 300 tokens")):
        config = ServerConfig(runner=RunnerConfig(provider="cpu", draft=path))
        said = f"drafts by {path} in int8{cut}$"
        [line] = check([bundle_path], config)
        assert re.search(said, line)
        with caplog.at_level("INFO"):
            load_model(bundle_path, config, "random", lambda _: None)
        assert re.search(said, caplog.messages[-1])


@pytest.mark.parametrize("num_instances", [1, 2])
def test_the_changed_weights_of_a_draft_model_are_reported_as_its_own(
    num_instances, bundle_path, draft_path, tmp_path
):
    """The error had the folder of the bundle alone."""
    changed = shutil.copytree(draft_path, tmp_path / "changed")
    weights = changed / "int8" / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    config = ServerConfig(
        runner=RunnerConfig(provider="cpu", num_threads=2, num_instances=num_instances, draft=changed)
    )
    message = r"the draft model: .*changed is not a usable bundle: int8"
    with pytest.raises(ValueError, match=message):
        load_model(bundle_path, config, "random", lambda _: None)
    with pytest.raises(ValueError, match=message):
        list(check([bundle_path], config))


class TimedRunner(OnnxRunner):
    """A runner whose calls take seconds of a driver's clock.

    Attributes:
        step_cost: The seconds of a step, and of each of its positions.
        encode_cost: The seconds of each encoded row.
        wrong_share: The share of selected tokens that are replaced.
        driver: Its clock.
    """

    step_cost = (1.0, 0.03)
    encode_cost = wrong_share = 0.0
    driver: Driver
    chance = random.Random(0)

    def encode(self, first_row: int, requests: list[Request]) -> None:
        super().encode(first_row, requests)
        self.driver.now += self.encode_cost * len(requests)

    def step(self, rows, num_steps: int = 1):
        fixed, of_position = self.step_cost
        self.driver.now += fixed + of_position * len(rows)
        selected = super().step(rows, num_steps)
        token_ids = [
            3 if self.chance.random() < self.wrong_share else token_id for token_id in selected.token_ids
        ]
        return dataclasses.replace(selected, token_ids=token_ids)


def seconds_of(
    model: Path, draft: Path | None, requests: list[Request], in_flight: int, *, speculative=True, **costs
) -> tuple[float, list[Result]]:
    """Keeps `in_flight` requests in the engine; returns the seconds until the last ends, and the results."""
    config = RunnerConfig(provider="cpu", precision=Precision.INT8, num_threads=1, max_slots=40)
    runner, options = TimedRunner(load_bundle(model), config), {}
    runner.step_cost = costs.get("step_cost", runner.step_cost)
    if speculative:
        options["drafter"] = Drafter((EOS_ID,), None)
    if draft is not None:
        options["draft_runner"] = drafting = TimedRunner(load_bundle(draft), config, is_draft=True)
        drafting.step_cost = costs.get("draft_cost", (0.08, 0.004))
        drafting.encode_cost = costs.get("encode_cost", 0.0)
        drafting.wrong_share = costs.get("wrong_share", 0.0)
    driver = Driver(runner, **options)
    runner.driver = driver
    if draft is not None:
        drafting.driver = driver
    waiting = [dataclasses.replace(request, sources=dict(request.sources)) for request in requests]
    order = list(waiting)
    while waiting:
        num_open = len(order) - len(waiting) - len(driver.results)
        driver.submit(*(waiting.pop(0) for _ in range(min(in_flight - num_open, len(waiting)))))
        driver.turn(seconds=0.0)
    driver.finish(seconds=0.0)
    return driver.now, [driver.results[request] for request in order]


def plain_requests(count: int, lengths: tuple[int, int]) -> list[Request]:
    chance = random.Random(7)
    sources = [[*(chance.randrange(3, 300) for _ in range(9)), EOS_ID] for _ in range(count)]
    return [
        Request("r", {SOURCE_IDS: np.array(source)}, 10, chance.randint(*lengths), arrival=0.0)
        for source in sources
    ]


@pytest.mark.parametrize(
    ("in_flight", "gain", "wrong_share", "attention"),
    [
        (1, 3.0, 0.0, True),
        (8, 1.1, 0.3, False),
        pytest.param(1, 3.0, 0.0, False, marks=pytest.mark.slow),
        pytest.param(4, 2.2, 0.0, False, marks=pytest.mark.slow),
        pytest.param(8, 1.7, 0.0, False, marks=pytest.mark.slow),
    ],
)
def test_drafts_go_on_while_requests_come_and_go(in_flight, gain, wrong_share, attention, bundle_path):
    """Each newcomer is drafted, because drafts for all rows together pay, also where those of one do not."""
    requests = [dataclasses.replace(request, attention=attention) for request in plain_requests(40, (20, 40))]
    without, _ = seconds_of(bundle_path, None, requests, in_flight, speculative=False)
    costs = {"encode_cost": 0.6, "wrong_share": wrong_share}
    drafted, results = seconds_of(bundle_path, bundle_path, requests, in_flight, **costs)
    assert without / drafted > gain
    shares = [result.timings.accepted_tokens / result.num_target_tokens for result in results]
    assert min(shares[1:]) > 0.3 - 0.5 * wrong_share


@pytest.mark.parametrize(
    ("in_flight", "draft", "costs"),
    [
        (1, "bundle_path", {"draft_cost": (2.0, 0.1)}),
        (32, "draft_path", {"step_cost": (1.0, 0.2)}),  # most of its drafts are wrong
        (1, "bundle_path", {"encode_cost": 40.0}),
        pytest.param(32, "bundle_path", {"step_cost": (1.0, 0.2)}, marks=pytest.mark.slow),
        pytest.param(3, "draft_path", {}, marks=pytest.mark.slow),
    ],
)
def test_where_drafts_do_not_pay_they_take_two_hundredths_of_the_time(
    in_flight, draft, costs, bundle_path, request
):
    requests = plain_requests(240, (10, 40))
    ngrams, _ = seconds_of(bundle_path, None, requests, in_flight, **costs)
    drafted, _ = seconds_of(bundle_path, request.getfixturevalue(draft), requests, in_flight, **costs)
    assert ngrams / drafted > 0.98


@pytest.mark.slow  # the same as above, after three hundred requests
def test_time_without_rows_to_draft_is_not_saved_up_for_trials(bundle_path):
    beams = [dataclasses.replace(request, beam=Beam(2)) for request in plain_requests(150, (10, 40))]
    beams = [*plain_requests(3, (10, 40)), *beams]  # the first ones show what drafts cost
    requests, costs = [*beams, *plain_requests(30, (10, 40))], {"draft_cost": (2.0, 0.1)}
    of_beams, _ = seconds_of(bundle_path, bundle_path, beams, 1, **costs)
    ngrams, _ = seconds_of(bundle_path, None, requests, 1, **costs)
    drafted, _ = seconds_of(bundle_path, bundle_path, requests, 1, **costs)
    assert (ngrams - of_beams) / (drafted - of_beams) > 0.97


def planned(model: DraftModel, rates: list[float], num_drafted: list[int]) -> StepPlan:
    """A plan of rows that the draft model knows, with drafts of n-grams that are right at these rates."""
    rows, drafts = list[Sequence](), list[Sequence]()
    for slot, (rate, number) in enumerate(zip(rates, num_drafted, strict=True)):
        request = Request("r", {SOURCE: np.array((20, 21))}, 2, 60, arrival=0.0)
        row = Sequence(Search(request, (START_ID,)), START_ID, row=slot, lookup=Lookup((), (rate, 0.0)))
        rows.append(row)
        model._encode([(slot, row)])
        drafts += [drafted(row, [20] * count, rate**count) for count in range(1, number + 1)]
    return StepPlan((), (), tuple(rows), drafts=tuple(drafts))


@pytest.mark.parametrize("num_drafted", [[0, 16, 16], [0, 15, 16], [0, 0, 16], [16, 0, 16]])
@pytest.mark.parametrize("seconds", [0.01, 50.0])
def test_a_step_never_has_more_drafts_than_room(num_drafted, seconds):
    """Also where a trial drafts for a row beside those that n-grams draft."""
    model = DraftModel(FakeRunner(3), drafter_of(seconds_of_position=0.01), "fake", lambda: 0.0)
    plan = planned(model, [0.9] * 3, num_drafted)
    for _ in range(100):
        model._step_times.add(1, seconds)
    model._most_trial_seconds = model._trial_seconds = 1000.0
    extended = model._draft(plan)
    assert len(extended.drafts) <= MAX_DRAFTED
    assert extended.drafts != plan.drafts or sum(num_drafted) == MAX_DRAFTED or seconds > 1


def test_n_grams_that_bring_more_than_the_draft_model_are_kept():
    """They cost nothing, so a model that is right a little more often is slower."""
    model = DraftModel(FakeRunner(1), drafter_of(seconds_of_position=0.03), "fake", lambda: 0.0)
    model._rate = 0.97
    for _ in range(100):
        model._step_times.add(1, 0.3)
    plan = planned(model, [0.95], [16])
    assert model._draft(plan) is plan
    poor = planned(model, [0.3], [3])
    extended = model._draft(poor)
    assert extended.drafts
    assert {position.token_ids[0] for position in extended.drafts} != {20}


def test_short_targets_that_are_always_right_are_drafted(bundle_path):
    """The draft model also learns from the drafts of targets that have ended."""
    requests = plain_requests(100, (3, 4))
    without, _ = seconds_of(bundle_path, None, requests, 1, speculative=False)
    drafted, results = seconds_of(bundle_path, bundle_path, requests, 1)
    assert without / drafted > 1.5
    assert sum(result.timings.accepted_tokens for result in results[50:]) > 70


def test_drafts_of_n_grams_stay_where_the_draft_model_knows_no_row(bundle_path):
    """Requests with several answers get no drafts of a model, whose rate is better than that of n-grams."""
    requests = plain_requests(30, (40, 47))
    several = [dataclasses.replace(request, num_hypotheses=3) for request in requests]
    _, expected = seconds_of(bundle_path, None, several, 6)
    _, results = seconds_of(bundle_path, bundle_path, several, 6)
    num_drafted = sum(result.timings.draft_tokens for result in expected)
    assert sum(result.timings.draft_tokens for result in results) == num_drafted > 100
