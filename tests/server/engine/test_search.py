"""Requests with several hypotheses: under the real engine against the oracle, and over the fake runner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.server.engine.plan import Branches
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.result import FinishReason
from seq2seq_serve.server.engine.stops import StopSequences
from seq2seq_serve.server.errors import EngineFailed
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from seq2seq_serve.training.evaluation import search
from tests.oracle import PrescribedModel, random_model
from tests.server.driver import Driver
from tests.server.fakes import FakeRunner, make_request, selected


def test_a_request_for_more_slots_than_are_free_waits_and_is_not_overtaken():
    driver = Driver(FakeRunner(4))
    first = make_request((20, 5), max_new_tokens=3)
    wide = make_request((20, 6), beam=Beam(4), max_new_tokens=3)
    behind = make_request((20, 7), max_new_tokens=3)
    driver.submit(first, wide, behind)
    driver.turn()
    assert driver.core.scheduler.load().num_running == 1
    driver.turn(3)
    assert list(driver.core.scheduler.running) == [wide]
    assert driver.core.scheduler.load().num_slots_in_use == 4
    driver.finish()
    assert all(driver.results[request].error is None for request in (first, wide, behind))


LETTERS = [b"a", b"b", b"c"] * 40  # of every token of the fake runner


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_sequence_ends_a_hypothesis_of_a_beam_and_all_of_several(seed):
    driver = Driver(FakeRunner(4))
    kinds = ({"beam": Beam(4), "num_hypotheses": 4}, {"num_hypotheses": 4})
    for kind in kinds:
        request = make_request(
            (20, seed),
            max_new_tokens=12,
            stream=True,
            stops=StopSequences(["ab", "cc"], LETTERS),
            **kind,
        )
        driver.submit(request)
        driver.finish()
        for hypothesis in driver.results[request].hypotheses:
            text = b"".join(LETTERS[token_id] for token_id in hypothesis.token_ids).decode()
            is_stopped = text.endswith(("ab", "cc"))
            assert is_stopped == (hypothesis.finish_reason is FinishReason.STOP)
            assert "ab" not in text[:-1]
            assert "cc" not in text[:-1]


class TableRunner(FakeRunner):
    """The oracle's model under the engine."""

    start_ids, eos_ids = (BOS_ID,), (EOS_ID,)

    def __init__(self, model: PrescribedModel, num_slots: int) -> None:
        super().__init__(num_slots)
        self.model = model

    def step(self, rows, num_steps=1):
        branches, wanted = {}, {}
        for row, sequence in enumerate(rows):
            self.cache[row] = [*self.cache[row][: sequence.cache_length], sequence.next_token_id]
            logits = torch.tensor(self.model.logits(tuple(self.cache[row][1:])), dtype=torch.float64)
            log_probabilities = logits.log_softmax(0)
            best = log_probabilities.sort(descending=True, stable=True)
            count = sequence.num_branches
            branches[row] = Branches(best.indices[:count].tolist(), best.values[:count].tolist())
            if sequence.progress is not None:
                ids = sequence.request.terms.wanted(sequence.progress)
                wanted[row] = {token_id: float(log_probabilities[token_id]) for token_id in ids}
        return selected(rows, [EOS_ID] * len(rows), branches, wanted=wanted)


@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.6, 1.0, -0.5]),
    st.sampled_from([True, False, "never"]),
    st.sampled_from(["wu", "power"]),
)
def test_the_rules_of_the_beam_are_the_oracles_up_to_the_limit(
    seed, size, limit, alpha, early_stopping, formula
):
    model = random_model(seed, parts=2**20)  # so fine that no two are equal
    expected = search.beam_search(
        model,
        [5],
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        beam_size=size,
        alpha=alpha,
        max_new_tokens=limit,
        early_stopping=early_stopping,
        formula=formula,
    )
    driver = Driver(TableRunner(model, size))
    beam = Beam(size, alpha, formula, early_stopping)
    request = make_request((5,), beam=beam, num_hypotheses=size, max_new_tokens=limit)
    driver.submit(request)
    driver.finish()
    found = driver.results[request].hypotheses
    assert [list(one.token_ids) for one in found] == [one.token_ids for one in expected]
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)


def test_an_exception_inside_beam_search_frees_all_rows(monkeypatch, caplog):
    driver = Driver(FakeRunner(6))
    requests = [make_request((20, i), beam=Beam(2), stream=True, max_new_tokens=6) for i in (4, 5)]
    other = make_request((20, 6))
    driver.submit(*requests, other)
    driver.turn(2)

    def fail(search, ranked, eos_ids):
        search.rows.clear()
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("seq2seq_serve.server.engine.scheduler.extend_beam", fail)
        driver.turn()
    assert all(isinstance(driver.results[request].error, EngineFailed) for request in requests)
    assert driver.core.scheduler.load().num_slots_in_use == 1
    driver.finish()
    assert driver.results[other].error is None
    later = make_request((20, 7), beam=Beam(4), max_new_tokens=3)
    driver.submit(later)
    driver.finish()
    assert driver.results[later].error is None


@pytest.mark.parametrize("beam", [None, Beam(2)])
def test_a_forced_eos_has_log_probability_0_and_no_alternatives(beam):
    request = make_request(
        (5, 6), max_new_tokens=1, num_hypotheses=2, beam=beam, ends_forced=True, num_alternatives=1
    )
    driver = Driver(FakeRunner(2))
    driver.submit(request)
    driver.finish()
    first, *others = driver.results[request].hypotheses
    assert (first.token_ids, first.finish_reason, first.score) == ((), FinishReason.EOS, 0)
    assert [(each.log_probability, each.alternatives) for each in first.token_scores] == [(0, ())]
    assert not others
