"""The core over a fake runner: an answer depends on its request alone, and every slot is given back."""

import gc
import queue
import random
import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from seq2seq_serve.server.engine.core import Admit, Core, Stop
from seq2seq_serve.server.engine.drafts import Drafter
from seq2seq_serve.server.engine.request import Beam, Request, Sampling
from seq2seq_serve.server.engine.result import FinishReason
from seq2seq_serve.server.engine.scheduler import SchedulerLimits
from seq2seq_serve.server.engine.terms import Progress, RequiredTerms, Spelling, Term
from seq2seq_serve.server.errors import EngineFailed
from tests.server.driver import Driver
from tests.server.fakes import (
    EOS_ID,
    START_ID,
    FakeRunner,
    KnowingDrafter,
    detected_id,
    expected_tokens,
    make_request,
)

SAMPLING = Sampling(1.0, 0, 1.0, 0.0, seed=3)
STARTS = ((), (5,), (4, 3, START_ID))  # the model's start token, and those of requests


class EndsAfter:
    """A stop rule: a token of some ids ends a target."""

    token_bytes = ()

    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def advance(self, tail: bytes, token_id: int) -> bytes | None:
        return None if token_id in self.ids else tail


sources = st.lists(
    st.lists(st.integers(3, 96), min_size=1, max_size=9).map(tuple), min_size=1, max_size=25, unique=True
)


@given(sources, st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32))
def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(sources, num_slots, max_encode_tokens, seed):
    chance = random.Random(seed)
    driver = Driver(FakeRunner(num_slots), limits=SchedulerLimits(max_encode_tokens=max_encode_tokens))
    requests = [
        make_request(
            source, max_new_tokens=chance.randint(1, 12), stream=True, start_ids=chance.choice(STARTS)
        )
        for source in sources
    ]
    waiting = list(requests)
    while waiting:
        for _ in range(chance.randint(0, 4)):
            if waiting:
                driver.submit(waiting.pop())
        driver.turn(chance.randint(0, 3))
    driver.finish()
    for request, source in zip(requests, sources, strict=True):
        expected = expected_tokens(source, request.max_new_tokens, request.start_ids)
        result = driver.results[request]
        assert list(result.best.token_ids) == expected
        assert driver.told(request) == expected
        is_cut = len(expected) == request.max_new_tokens
        assert result.finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.EOS)
        assert result.num_target_tokens == len(expected) + (not is_cut)


@given(sources, st.integers(1, 9), st.integers(0, 2**32))
def test_drafts_right_or_wrong_change_no_result(sources, num_slots, seed):
    """Beside beams, scored targets and neighbours that come and leave; a draft may go on after an end."""
    chance = random.Random(seed)
    requests = [
        make_request(
            source,
            max_new_tokens=chance.randint(1, 12),
            stream=True,
            start_ids=chance.choice(STARTS),
            prefix_ids=chance.choice([(), (9, 3)]),
            stops=chance.choice([None, EndsAfter(*range(3, chance.randrange(4, 40)))]),
            **chance.choice(
                [
                    {},
                    {"log_probabilities": True, "num_alternatives": 2},
                    {"sampling": SAMPLING, "num_hypotheses": min(3, num_slots)},
                    {"is_score": True},
                    {"beam": Beam(min(3, num_slots))},
                ]
            ),
        )
        for source in sources
    ]
    results: list[list[Any]] = []
    accepted = 0
    targets: dict[Request, list[tuple[int, ...]]] = {}
    for drafter in (None, KnowingDrafter(targets, vocab_size=97, seed=seed)):
        driver = Driver(FakeRunner(num_slots, shares_memory=chance.random() < 0.5), drafter=drafter)
        waiting = list(requests)
        while waiting:
            driver.submit(*(waiting.pop() for _ in range(min(len(waiting), chance.randint(0, 4)))))
            driver.turn(chance.randint(0, 3))
        driver.finish()
        results.append([])
        for request in requests:
            result = driver.results[request]
            targets[request] = [each.token_ids for each in result.hypotheses]
            results[-1].append(result._replace(timings=None))
            if request.beam is None and not request.is_score:
                for place, target in enumerate(targets[request]):
                    assert tuple(driver.told(request, place)) == target
            accepted += result.timings.accepted_tokens
            assert result.timings.accepted_tokens <= result.timings.draft_tokens
            assert drafter is not None or not result.timings.draft_tokens
    assert results[0] == results[1]
    event("drafts accepted" if accepted else "nothing drafted")


@given(sources, st.integers(1, 6), st.integers(0, 2**32))
def test_after_cancels_deadlines_and_failures_every_slot_is_back(sources, num_slots, seed):
    chance = random.Random(seed)
    runner = FakeRunner(num_slots, fail_encode=sources[-1][0], fail_steps=[chance.randint(0, 20)])
    driver = Driver(runner)
    requests = {}
    for source in sources:
        request = make_request(source, arrival=driver.now)
        driver.submit(request)
        requests[request] = source
        if chance.random() < 0.3:
            driver.cancel(chance.choice(list(requests)), is_expired=chance.random() < 0.5)
        driver.turn(chance.randint(0, 2))
    driver.finish()
    assert driver.results.keys() == requests.keys()
    for request, source in requests.items():
        result = driver.results[request]
        expected = expected_tokens(source, request.max_new_tokens)
        for hypothesis in result.hypotheses:  # none where it never had a slot
            assert list(hypothesis.token_ids) == expected[: len(hypothesis.token_ids)]
        if result.error is None:
            assert list(result.best.token_ids) == expected
    ends = [update for turn in driver.turns for update in turn.updates if update.result is not None]
    assert len(ends) == len(requests)


def random_options(chance: random.Random) -> dict[str, Any]:
    """Options of any kind of request."""
    prefix_ids = tuple(chance.choices(range(3, 50), k=chance.choice([0, 0, 1, 5])))
    if chance.random() < 0.2:
        return {"is_score": True, "prefix_ids": prefix_ids, "max_new_tokens": 1}
    kind = chance.choice(["greedy", "beam", "hypotheses", "detailed"])
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "beam": {"beam": Beam(chance.randint(2, 4))},
        "hypotheses": {"num_hypotheses": chance.randint(2, 3)},
        "detailed": {"log_probabilities": True},
    }
    options = kinds[kind] | {"prefix_ids": prefix_ids, "stream": chance.random() < 0.5}
    return options | {"attention": chance.random() < 0.5, "max_new_tokens": chance.randint(1, 12)}


def described(driver: Driver, request: Request) -> list[Any]:
    """Everything about an answer but its timings, attention as one list."""
    result = driver.results[request]
    hypotheses = [
        each._replace(attended=[] if each.attention is None else each.attention.tolist())
        for each in result.hypotheses
    ]
    return [result.finish_reason, result.num_target_tokens, hypotheses]


@given(sources, st.integers(4, 9), st.integers(0, 2**32))
def test_runners_with_states_or_shared_memory_answer_as_one_with_a_cache_does(sources, num_slots, seed):
    """State follows forks and moves whole; prefixes, scores and attention go by steps.

    Where memory is shared, it follows the owner of its request's memory.
    """
    answers = []
    for settings in ({}, {"is_recurrent": True}, {"shares_memory": True}):
        chance = random.Random(seed)
        driver = Driver(FakeRunner(num_slots, **settings))
        requests = [make_request(source, **random_options(chance)) for source in sources]
        cancelled = chance.randrange(2 * len(requests))
        for request in requests:
            driver.submit(request)
            driver.turn(chance.randint(0, 3))
        if cancelled < len(requests):
            driver.cancel(requests[cancelled])
        driver.finish()
        answers.append([described(driver, request) for i, request in enumerate(requests) if i != cancelled])
    assert answers[0] == answers[1] == answers[2]


def test_an_ended_request_is_freed_without_a_garbage_collection():
    """Its sources may be megabytes, and the server collects garbage seldom.

    What a search found of its terms may be megabytes, too, and stayed until then before.
    """
    driver = Driver(FakeRunner(4))
    terms = RequiredTerms([Term((Spelling((7, 8)), Spelling((7,)))), Term((Spelling((8, 9)),), 2)], ())
    requests = [
        make_request((10, 5)),
        make_request((10, 6), beam=Beam(3), terms=terms),
        make_request((10, 7)),
    ]
    left = [weakref.ref(each) for each in (*requests, terms)]
    num_before = _num_progresses()
    gc.disable()
    try:
        for request in requests:
            driver.submit(request)
        driver.turn(2)
        assert _num_progresses() > num_before
        driver.cancel(requests[2])
        driver.finish()
        driver.results.clear()
        driver.turns.clear()
        del request, requests, terms
        assert [each() for each in left] == [None] * 4
        assert _num_progresses() == num_before
    finally:
        gc.enable()


def test_a_core_that_sleeps_has_nothing_of_the_requests_that_ended(monkeypatch):
    """It kept those of the command that had woken it."""
    driver, request = Driver(FakeRunner(4)), make_request((10, 5))
    left, is_freed = weakref.ref(request), list[bool]()

    class Inbox(queue.SimpleQueue):
        def get(self):
            if self.empty():
                driver.results.clear()
                driver.turns.clear()
                is_freed.append(left() is None)
                self.put(Stop())
            return super().get()

    monkeypatch.setattr(driver.core, "_inbox", Inbox())
    driver.submit(request)
    del request
    gc.disable()
    try:
        driver.core._loop()
    finally:
        gc.enable()
    assert is_freed == [True]


def _num_progresses() -> int:
    return sum(type(each) is Progress for each in gc.get_objects())


DETECTED_IDS = (50, 60, 70)
DETECTING = ((4, None), (4, None, 3), (5, 4, None, 3, START_ID))


@given(sources, st.integers(4, 9), st.integers(0, 2**32))
def test_a_request_whose_start_is_detected_answers_as_one_that_gives_it(sources, num_slots, seed):
    """In any batch, with beams, prefixes, streams and alignments."""
    answers = []
    for is_given in (False, True):
        chance = random.Random(seed)
        driver = Driver(FakeRunner(num_slots))
        requests = []
        for source in sources:
            options, start_ids = random_options(chance), chance.choice(DETECTING)
            language = detected_id(source, DETECTED_IDS)
            if is_given or options.get("is_score"):
                start_ids = tuple(language if one is None else one for one in start_ids)
            else:
                options["detected_ids"] = DETECTED_IDS
            requests.append(make_request(source, **options, start_ids=start_ids))
            driver.submit(requests[-1])
            driver.turn(chance.randint(0, 3))
        driver.finish()
        answers.append(
            [[*described(driver, one), driver.told(one), driver.results[one].start_ids] for one in requests]
        )
    assert answers[0] == answers[1]
    assert all(None not in start_ids for *_, start_ids in answers[0])


@pytest.mark.parametrize("num_turns", range(8))
def test_a_request_that_is_cancelled_while_its_start_is_read_returns_its_slots(num_turns):
    driver = Driver(FakeRunner(5))
    other = make_request((10, 5))
    detecting = make_request(
        (10, 6),
        start_ids=(5, None, 4, 3),
        detected_ids=DETECTED_IDS,
        prefix_ids=(8,),
        beam=Beam(3),
        stream=True,
    )
    driver.submit(detecting, other)
    driver.turn(num_turns)
    driver.cancel(detecting)
    driver.finish()
    assert driver.results[detecting].finish_reason is FinishReason.CANCELLED
    assert list(driver.results[other].best.token_ids) == expected_tokens((10, 5), 8)


def test_steps_that_read_a_start_count_neither_as_generated_nor_as_the_first_token():
    driver = Driver(FakeRunner(1))
    request = make_request((10, 6), start_ids=(5, None, 4), detected_ids=DETECTED_IDS, max_new_tokens=1)
    driver.submit(request)
    driver.finish()
    result = driver.results[request]
    assert (result.num_target_tokens, result.timings.first_token_seconds) == (1, 3.0)
    assert result.start_ids == (5, detected_id((10, 6), DETECTED_IDS), 4)


def test_a_scored_target_ends_after_one_turn_and_leaves_the_others_alone():
    driver = Driver(FakeRunner(3))
    other = make_request((10, 5))
    scored = make_request((13, 4), prefix_ids=(7, 8), is_score=True)
    empty = make_request((12, 4), is_score=True)
    driver.submit(other, scored, empty)
    driver.turn()
    assert driver.results.keys() == {scored, empty}
    assert driver.turns[0].num_rows == 1  # prefill has scored the two
    best = {name: result.best.token_scores for name, result in driver.results.items()}
    assert [each.log_probability for each in best[scored]] == [-7, -8, -EOS_ID]
    assert [each.log_probability for each in best[empty]] == [-EOS_ID]
    assert driver.results[scored].num_target_tokens == 0
    driver.finish()
    assert list(driver.results[other].best.token_ids) == expected_tokens((10, 5), 8)


@pytest.mark.parametrize("is_score", [False, True])
def test_prefix_tokens_that_steps_read_do_not_count_as_generated(is_score):
    driver = Driver(FakeRunner(1, is_recurrent=True))
    request = make_request((10, 5), prefix_ids=tuple(range(10, 20)), max_new_tokens=2, is_score=is_score)
    driver.submit(request)
    driver.turn(3)
    driver.cancel(request)
    driver.finish()
    assert driver.results[request].finish_reason is FinishReason.CANCELLED
    assert driver.results[request].num_target_tokens == 0
    assert driver.results[request].timings.first_token_seconds == 0
    whole = replace(request, arrival=driver.now)
    before = len(driver.turns)
    driver.submit(whole)
    driver.finish()
    turns = driver.turns[before:]
    first = [turn.first_token_seconds for turn in turns]
    assert first == [()] * 10 + [(11.0,)] + [()] * (len(turns) - 11)
    assert driver.results[whole].timings.first_token_seconds == 11.0
    assert [turn.inter_token_seconds for turn in turns] == [{}] * 11 + [{1.0: 1}] * (len(turns) - 11)


def test_a_newcomer_joins_the_running_batch_at_the_next_step():
    driver = Driver(FakeRunner(4))
    driver.submit(make_request((10, 5)))
    driver.turn(2)
    driver.submit(make_request((10, 6)))
    driver.turn(1)
    assert driver.runner.batch_sizes == [1, 1, 2]
    driver.finish()


def test_a_step_that_raises_fails_its_sequences_only_and_the_engine_goes_on(caplog):
    driver = Driver(FakeRunner(2, fail_steps=[1]))
    running = [make_request((10, 5)), make_request((10, 6))]
    waiting = make_request((10, 7))
    driver.submit(*running, waiting)
    driver.finish()
    for request in running:
        assert isinstance(driver.results[request].error, EngineFailed)
    assert list(driver.results[waiting].best.token_ids) == expected_tokens((10, 7), 8)
    assert not driver.is_failing
    assert running[0].request_id in caplog.text


def test_an_encode_that_raises_fails_its_newcomers_only():
    driver = Driver(FakeRunner(3, fail_encode=20))
    running, broken, later = make_request((10, 5)), make_request((20, 5)), make_request((10, 6))
    driver.submit(running)
    driver.turn()
    driver.submit(broken)
    driver.turn()
    driver.submit(later)
    driver.finish()
    assert isinstance(driver.results[broken].error, EngineFailed)
    for request, source in ((running, (10, 5)), (later, (10, 6))):
        assert list(driver.results[request].best.token_ids) == expected_tokens(source, 8)


class BrokenStops:
    """Raises at a request's n-th token."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    def advance(self, tail, token_id):
        self.num_left -= 1
        if not self.num_left:
            raise RuntimeError("this matcher was told to fail")
        return tail


@pytest.mark.parametrize(
    "options", [{}, {"beam": Beam(3)}, {"num_hypotheses": 3}, {"stream": True}, {"attention": True}]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("tick", [0.0, 1e-5])  # then a turn has several steps
def test_an_exception_for_one_request_fails_that_one_only(options, num_tokens, tick, caplog):
    driver = Driver(FakeRunner(9), tick=tick)
    neighbours = [make_request((10, i), stream=True) for i in range(5, 10)]
    broken = make_request((10, 4), stops=BrokenStops(num_tokens), **options)
    driver.submit(*neighbours[:2], broken, *neighbours[2:])
    driver.finish()
    assert (max(turn.num_steps for turn in driver.turns) > 1) is bool(tick)
    assert isinstance(driver.results[broken].error, EngineFailed)
    assert driver.results[broken].finish_reason is FinishReason.FAILED
    for request, i in zip(neighbours, range(5, 10), strict=True):
        assert driver.results[request].error is None
        assert list(driver.results[request].best.token_ids) == expected_tokens((10, i), 8)
    assert not driver.is_failing
    assert "this matcher was told to fail" in caplog.text
    assert broken.request_id in caplog.text


def test_turns_that_nobody_waits_for_are_delivered_together():
    driver = Driver(FakeRunner(2), held_seconds=0.01)
    silent, streaming = make_request((10, 4)), make_request((10, 5), stream=True)
    driver.submit(silent)
    driver.turn(6, seconds=0.003)
    assert driver.delivered_at == pytest.approx([0.012])
    assert [turn.load and turn.load.num_running for turn in driver.turns] == [None, None, None, 1]
    driver.submit(streaming)
    driver.turn(seconds=0.003)
    assert driver.delivered_at[1:] == pytest.approx([0.021])
    assert driver.told(streaming) == expected_tokens((10, 5), 1)
    assert len(driver.turns) == 7
    driver.finish(seconds=0.003)
    assert driver.turns[-1].load.num_running == 0
    assert sum(turn.num_rows for turn in driver.turns) == 16
    for request, source in ((silent, (10, 4)), (streaming, (10, 5))):
        assert list(driver.results[request].best.token_ids) == expected_tokens(source, 8)


@pytest.mark.parametrize(("num_rows", "delivered_at"), [(40, 0.002), (10, 0.001), (1, 0.001)])
def test_an_end_waits_for_those_of_the_next_steps_where_many_rows_run(num_rows, delivered_at):
    """To wake the handlers takes longer than a step of a small model takes for a few rows."""
    driver = Driver(FakeRunner(40), held_seconds=0.01)
    short = make_request((20, 4), max_new_tokens=1)
    driver.submit(short, *(make_request((10, i)) for i in range(num_rows - 1)))
    while short not in driver.results:
        driver.turn(seconds=0.001)
    assert driver.delivered_at == pytest.approx([delivered_at])


def test_ends_do_not_wait_for_a_core_that_falls_asleep():
    for ends_by in ("length", "cancellation"):
        driver = Driver(FakeRunner(40), held_seconds=0.01)
        short = [make_request((10, i), max_new_tokens=1) for i in range(39)]
        long = make_request((20, 4))
        driver.submit(*short, *([] if ends_by == "length" else [long]))
        driver.turn(seconds=0.001)
        if ends_by == "cancellation":
            driver.cancel(long)
            driver.turn(seconds=0.0)
        assert all(request in driver.results for request in short), ends_by
        assert all(driver.results[request].error is None for request in short), ends_by


def test_ends_that_wait_are_delivered_when_the_core_stops():
    delivered, is_slow = [], threading.Event()
    runner = FakeRunner(40)
    step = runner.step

    def slow_step(rows, num_steps):
        if len(rows) == 1:
            is_slow.set()
        return step(rows, num_steps)

    runner.step = slow_step
    core = Core(runner, model_name="fake", deliver=delivered.extend, clock=lambda: 0.0, held_seconds=0.01)
    core.start()
    short = [make_request((10, i), max_new_tokens=1) for i in range(39)]
    core.send(Admit((*short, make_request((60, 4), max_new_tokens=60))))
    assert is_slow.wait(20)
    core.stop()
    assert {update.request for turn in delivered for update in turn.updates if update.result} >= {*short}


def test_ends_do_not_wait_where_encoding_takes_long():
    runner = FakeRunner(40)
    driver, encode = Driver(runner, held_seconds=0.01), runner.encode

    def slow_encode(first_row, requests):
        driver.now += 0.01
        encode(first_row, requests)

    runner.encode = slow_encode
    short = make_request((20, 4), max_new_tokens=2)
    driver.submit(short, *(make_request((10, i)) for i in range(39)))
    driver.turn(2, seconds=0.0001)
    assert driver.delivered_at == pytest.approx([0.0101, 0.0102])
    assert short in driver.results


def test_a_stream_that_ends_early_gets_the_tokens_that_it_has():
    driver = Driver(FakeRunner(16))
    streams = [make_request((10, i), stream=True) for i in range(15)]
    beam = make_request((20, 4), stream=True, beam=Beam(1))
    driver.submit(*streams, beam)
    driver.turn(4, seconds=0.001)
    assert len(driver.told(streams[0])) == 1
    for request in (streams[0], beam):
        driver.cancel(request, is_expired=True)
    driver.turn(seconds=0.001)
    assert driver.results[streams[0]].finish_reason is FinishReason.DEADLINE
    assert driver.told(streams[0]) == expected_tokens((10, 0), 4)
    driver.finish()


@pytest.mark.parametrize(("num_streams", "num_pieces"), [(1, 10), (2, 10), (8, 5), (16, 3)])
def test_the_more_streams_the_more_tokens_are_in_their_pieces(num_streams, num_pieces):
    """To send a piece takes a handler longer than a small model takes for a token."""
    driver = Driver(FakeRunner(16))
    streams = {make_request((10, i), stream=True, max_new_tokens=10): i for i in range(num_streams)}
    driver.submit(*streams)
    driver.turn(seconds=0.001)
    assert all(len(driver.told(stream)) == 1 for stream in streams)  # nobody waits for a first token
    driver.finish(seconds=0.001)
    for stream, i in streams.items():
        assert driver.told(stream) == expected_tokens((10, i), 10)
        pieces = [update for turn in driver.turns for update in turn.updates if update.request is stream]
        assert sum(bool(piece.token_ids) for piece in pieces) == num_pieces


def test_a_turn_without_a_step_does_not_make_the_next_one_long():
    """After a score, or with newcomers, it is not known that steps are short."""
    runner = FakeRunner(2)
    driver, step = Driver(runner, tick=1e-5), runner.step

    def slow_step(rows, num_steps=1):
        driver.now += 0.15 * num_steps
        return step(rows, num_steps)

    runner.step = slow_step
    driver.submit(make_request((10, 5), prefix_ids=(7, 8), is_score=True))
    driver.turn()
    driver.submit(make_request((10, 6), stream=True))
    driver.finish()
    assert {turn.num_steps for turn in driver.turns} == {1}


def test_encodes_that_keep_failing_show_although_the_steps_beside_them_succeed():
    driver = Driver(FakeRunner(2, fail_encode=20))
    driver.submit(make_request((10, 5), max_new_tokens=30))
    for i in range(3):
        driver.turn()
        assert not driver.is_failing
        driver.submit(make_request((20, i + 3)))
    driver.turn()
    assert driver.is_failing
    driver.turn()
    assert not driver.is_failing


def test_an_idle_core_reports_no_silence_and_a_hung_core_does(monkeypatch):
    runner = FakeRunner(1)
    stepping, go_on, is_done = threading.Event(), threading.Event(), threading.Event()
    step = runner.step

    def hang(rows, num_steps):
        stepping.set()
        assert go_on.wait(20)
        return step(rows, num_steps)

    runner.step = hang
    now = 0.0
    core = Core(runner, model_name="fake", deliver=lambda turns: is_done.set(), clock=lambda: now)
    core.start()
    core.send(Admit((make_request((10, 4), max_new_tokens=1),)))
    assert stepping.wait(20)
    assert core.turn_seconds() == 0.0
    for _ in range(3601):
        core.watch()
    assert core.turn_seconds() == 3600.0
    go_on.set()
    assert is_done.wait(20)
    for _ in range(1000):
        core.watch()
        if core.turn_seconds() == 0.0:
            break
        threading.Event().wait(0.01)
    assert core.turn_seconds() == 0.0
    core.stop()


def test_one_encode_call_is_bounded_but_a_long_source_is_still_encoded():
    driver = Driver(FakeRunner(8), limits=SchedulerLimits(max_encode_tokens=6, max_encode_tokens_beside=6))
    driver.submit(*(make_request((10, i)) for i in range(3, 8)), make_request((10, *range(3, 20))))
    driver.finish()
    assert [len(batch) for batch in driver.runner.encoded] == [3, 2, 1]


@pytest.mark.parametrize(
    ("array", "cost"),
    [
        (np.ones((20, 64), np.int64), 20 * 64 // 8),  # words of a story
        (np.zeros((8, 16, 16, 3), np.uint8), 8 * 4 * 4),  # places of frames
        (np.zeros((40, 512), np.float32), 40),  # annotations
    ],
)
def test_the_cost_of_an_encode_call_is_not_the_length_of_its_memory(array, cost):
    """A frame of any size counted as one token, and so did a sentence of any length."""
    requests = []
    for number in range(3, 8):
        request = make_request((10, number, 8))
        length = 40 if array.dtype == np.float32 else 3
        requests.append(replace(request, sources={**request.sources, "b": array}, memory_length=length))
    assert {request.encode_tokens for request in requests} == {cost}
    limits = SchedulerLimits(max_encode_tokens=2 * cost, max_encode_tokens_beside=2 * cost)
    driver = Driver(FakeRunner(8), limits=limits)
    driver.submit(*requests)
    driver.finish()
    assert [len(batch) for batch in driver.runner.encoded] == [2, 2, 1]
    plain = make_request((10, 3, 8))
    assert requests[0].cost(feeds_prefix=True).work >= plain.cost(feeds_prefix=True).num_steps + cost // 32


@pytest.mark.parametrize(
    ("encode_seconds", "max_tokens", "sizes"),
    [(0.020, 100, [6, 2, 1, 1]), (0.001, 100, [6, 4]), (1e-6, 12, [6, 3, 1])],
)
def test_an_encode_call_beside_running_rows_has_a_lower_token_bound_unless_calls_are_short(
    encode_seconds, max_tokens, sizes
):
    limits = SchedulerLimits(max_encode_tokens=max_tokens, max_encode_tokens_beside=4)
    driver = Driver(FakeRunner(20), limits=limits, tick=encode_seconds)
    driver.submit(*(make_request((20, i)) for i in range(3, 9)))
    driver.turn()
    driver.submit(*(make_request((20, i)) for i in range(9, 12)), make_request((20, 3), prefix_ids=(4,) * 5))
    driver.finish()
    assert [len(batch) for batch in driver.runner.encoded] == sizes


def test_after_a_long_encode_call_the_next_one_has_the_lower_token_bound():
    runner = FakeRunner(20)
    driver, encode = Driver(runner, limits=SchedulerLimits(max_encode_tokens_beside=4)), runner.encode
    seconds = iter([0.001, 0.5, 0.5, 0.5])

    def timed_encode(first_row, requests):
        driver.now += next(seconds)
        encode(first_row, requests)

    runner.encode = timed_encode
    for count in (6, 4, 4):
        driver.submit(*(make_request((20, i), prefix_ids=(5,)) for i in range(3, 3 + count)))
        driver.turn()
    driver.finish()
    assert [len(batch) for batch in driver.runner.encoded] == [6, 4, 2, 2]


def test_a_full_engine_admits_several_requests_at_once_in_their_order():
    driver = Driver(FakeRunner(10))
    sources_of_many_lengths = [(i, 5) for i in range(60)]  # the first id decides how long a target gets
    driver.submit(*map(make_request, sources_of_many_lengths))
    driver.finish()
    encoded = driver.runner.encoded
    assert [source for batch in encoded for source in batch] == sources_of_many_lengths
    assert len(encoded[0]) == 10
    assert all(len(batch) >= 2 for batch in encoded[:-1])


@pytest.mark.parametrize("num_new", [3, 4, 40])
def test_requests_for_few_free_slots_are_gathered_for_a_bounded_time(num_new):
    """Fewer free slots than one in eight, and more requests than those: none was admitted for 400 turns."""
    driver = Driver(FakeRunner(32), tick=0.001)
    driver.submit(*(make_request((80, i), max_new_tokens=70) for i in range(3, 32)))
    driver.turn(2)
    driver.submit(*(make_request((80, i % 60), max_new_tokens=2) for i in range(3, 3 + num_new)))
    driver.turn(16)
    assert [len(batch) for batch in driver.runner.encoded[:2]] == [29, 3]
    driver.finish()


def test_padding_counts_a_part_of_what_it_adds():
    driver = Driver(FakeRunner(64), limits=SchedulerLimits(max_encode_tokens=100))
    driver.submit(*(make_request((3,) * length) for length in (40, 20, 20, 20)))
    driver.finish()
    # Three are 80 tokens and 40 of padding, which count 90; a fourth would make 100 and 60, which count 115.
    assert [len(batch) for batch in driver.runner.encoded] == [3, 1]


def test_a_prefix_that_steps_read_does_not_bound_an_encode_call():
    for is_recurrent, num_encoded in ((False, [1, 1]), (True, [2])):
        driver = Driver(FakeRunner(2, is_recurrent=is_recurrent), limits=SchedulerLimits(max_encode_tokens=8))
        driver.submit(*(make_request((20, i), prefix_ids=(4,) * 5, max_new_tokens=2) for i in (3, 4)))
        driver.finish()
        assert [len(batch) for batch in driver.runner.encoded] == num_encoded


def expected_alignment(source: tuple[int, ...], fed: list[int]) -> np.ndarray:
    runner = FakeRunner(1)
    runner.memory[0] = source
    return runner.align(0, 0, tuple(fed), len(source))


@given(
    st.lists(st.tuples(st.integers(3, 90), st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
    st.integers(4, 12),
    st.integers(1, 9),
    st.integers(0, 2**32),
)
def test_alignments_are_the_same_in_pieces_beside_any_neighbours(wanted, num_slots, max_align_tokens, seed):
    chance = random.Random(seed)
    driver = Driver(FakeRunner(num_slots), limits=SchedulerLimits(max_align_tokens=max_align_tokens))
    requests = []
    for i, (first, count, is_beam) in enumerate(wanted):
        source = (first, i + 3)
        prefix = (7,) * chance.randint(0, 3)
        kind = {"beam": Beam(count)} if is_beam else {}
        options = {"num_hypotheses": count, "attention": True, "prefix_ids": prefix, "stream": True} | kind
        options["start_ids"] = chance.choice(STARTS)
        requests.append((make_request(source, max_new_tokens=chance.randint(1, 12), **options), source))
        driver.submit(requests[-1][0], make_request((chance.randint(3, 90), 5)))
        if chance.random() < 0.2:
            driver.cancel(chance.choice(requests)[0])
        driver.turn(chance.randint(0, 4))
    driver.finish()
    for request, source in requests:
        result = driver.results[request]
        for hypothesis in result.hypotheses if result.error is None else ():
            start_ids = request.start_ids or (START_ID,)
            fed = [*start_ids, *hypothesis.token_ids]
            fed = fed if hypothesis.finish_reason is FinishReason.EOS else fed[:-1]
            expected = expected_alignment(source, fed)[len(start_ids) - 1 :]
            np.testing.assert_array_equal(hypothesis.attention, expected)


def test_a_turn_computes_a_bounded_part_of_the_alignments_and_everybody_goes_on_meanwhile():
    driver = Driver(FakeRunner(7), limits=SchedulerLimits(max_align_tokens=4))
    pieces = []
    align = driver.runner.align

    def look(row, first_position, target_ids, memory_length, adapter):
        pieces.append((driver.now, len(target_ids)))
        return align(row, first_position, target_ids, memory_length, adapter)

    driver.runner.align = look
    costly = make_request((20, 4), attention=True, num_hypotheses=4, max_new_tokens=8)
    victim = make_request((20, 5), stream=True, max_new_tokens=30)
    driver.submit(costly, victim)
    driver.turn(8)
    assert len(driver.told(victim)) == 8
    assert driver.core.scheduler.load().num_slots_in_use == 2  # one keeps the memory of the four
    for turn in range(8):
        later = make_request((10, turn + 6), max_new_tokens=1)
        driver.submit(later)
        driver.turn()
        assert driver.results[later].error is None
        assert len(driver.told(victim)) == min(9 + turn, len(expected_tokens((20, 5), 30)))
    driver.finish()
    assert [size for _, size in pieces] == [4, 4] * 4
    assert len({now for now, _ in pieces}) == 8
    assert all(len(one.attention) == 8 for one in driver.results[costly].hypotheses)


def test_an_alignment_that_raises_fails_its_request_only():
    driver = Driver(FakeRunner(4))
    align = driver.runner.align

    def fail(row, *arguments):
        if driver.runner.memory[row] == (13, 4):
            raise RuntimeError("this alignment was told to fail")
        return align(row, *arguments)

    driver.runner.align = fail
    broken, other = make_request((13, 4), attention=True), make_request((13, 5), attention=True)
    plain = make_request((20, 6))
    driver.submit(broken, other, plain)
    driver.finish()
    assert isinstance(driver.results[broken].error, EngineFailed)
    assert driver.results[other].best.attention is not None
    assert list(driver.results[plain].best.token_ids) == expected_tokens((20, 6), 8)


def test_the_time_in_the_queue_is_part_of_the_time_to_the_first_token():
    driver = Driver(FakeRunner(1))
    first, second = make_request((10, 5), max_new_tokens=2), make_request((10, 6), max_new_tokens=1)
    driver.submit(first, second)
    driver.finish()
    timings = driver.results[second].timings
    assert timings.queue_seconds == 3.0
    assert timings.first_token_seconds == timings.total_seconds == 3.0
    assert driver.turns[1].inter_token_seconds == {1.0: 1}


@pytest.mark.parametrize(("tick", "drafts"), [(0.0, False), (0.0, True), (1e-5, False)])
def test_every_token_but_the_first_of_a_request_has_a_gap(tick, drafts):
    """Gaps were those of turns: a turn with four tokens counted one, four times as long."""
    requests = [make_request((10, i), max_new_tokens=3 * i, arrival=0.0) for i in range(3, 8)]
    targets = {each: [tuple(expected_tokens((10, i), 3 * i))] for i, each in enumerate(requests, start=3)}
    drafter = KnowingDrafter(targets, vocab_size=97, seed=5) if drafts else None
    driver = Driver(FakeRunner(4), tick=tick, drafter=drafter)
    driver.submit(*requests)
    driver.finish()
    results = driver.results.values()
    num_tokens = sum(result.num_target_tokens for result in results)
    assert (max(turn.num_steps for turn in driver.turns) > 1) is bool(tick)
    assert any(result.timings.accepted_tokens for result in results) is drafts
    gaps = [gap for turn in driver.turns for gap in turn.inter_token_seconds.items()]
    assert sum(count for _, count in gaps) == num_tokens - len(requests)
    seconds = sum(result.timings.total_seconds - result.timings.first_token_seconds for result in results)
    assert sum(gap * count for gap, count in gaps) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_draft_that_a_request_brings_saves_steps_and_changes_no_token(is_right):
    request = make_request((10, 7), max_new_tokens=12, arrival=0.0, prefix_ids=(5,))
    targets, num_turns = [], []
    for draft_ids in ((), None):
        drafter = Drafter((EOS_ID,), None)
        driver = Driver(FakeRunner(4), drafter=drafter)
        if draft_ids is None:
            best = targets[0][1:]
            draft_ids = best if is_right else tuple(token_id + 1 for token_id in best)
        asked = replace(request, draft_ids=draft_ids)
        driver.submit(asked)
        driver.finish()
        assert drafter.num_given == 0
        targets.append(driver.results[asked].best.token_ids)
        num_turns.append(len(driver.turns))
    assert targets[0] == targets[1]
    assert num_turns[1] < num_turns[0] / 2 if is_right else num_turns[1] <= num_turns[0]


def test_hypotheses_side_by_side_do_not_shorten_the_gaps_of_their_request():
    """With drafts, the tokens of all hypotheses counted, so that gaps were as many times as short."""
    request = make_request((10, 7), max_new_tokens=12, arrival=0.0, sampling=SAMPLING, num_hypotheses=4)
    targets: dict[Request, list[tuple[int, ...]]] = {}
    for drafter in (None, KnowingDrafter(targets, vocab_size=97, seed=5)):
        driver = Driver(FakeRunner(4), drafter=drafter)
        driver.submit(request)
        driver.turn(2)
        before = driver.core.scheduler.running[request].num_further_tokens
        driver.turn()
        search = driver.core.scheduler.running[request]
        num_tokens = 1 + (search.num_further_tokens - before) / 4
        assert driver.turns[-1].inter_token_seconds == {1 / num_tokens: round(num_tokens)}
        driver.finish()
        targets[request] = [each.token_ids for each in driver.results[request].hypotheses]
    assert num_tokens > 2


def test_its_thread_closes_the_runner_at_the_end_also_where_that_cannot_warm_up(caplog):
    """Memory that another thread frees at any time could break a capture on a device."""
    threads: list[threading.Thread] = []

    class NotingRunner(FakeRunner):
        def close(self):
            super().close()
            threads.append(threading.current_thread())

    class ColdRunner(NotingRunner):
        def warm_up(self):
            raise RuntimeError("too cold")

        def close(self):
            super().close()
            raise RuntimeError("and cannot be closed")

    core = Core(NotingRunner(1), model_name="fake", deliver=lambda turns: None)
    core.start()
    assert not threads
    core.stop()
    cold = Core(ColdRunner(1), model_name="fake", deliver=lambda turns: None)
    with pytest.raises(RuntimeError, match="too cold"):
        cold.start()
    assert threads == [core._thread, cold._thread]
    assert "and cannot be closed" in caplog.text
