"""Beams whose targets must have terms, under the real engine against the oracle."""

import gc
import pickle
import random
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seq2seq_serve.bundle.words import (
    admits_placeholder,
    begins_inside,
    begins_with_mark,
    ends_with_bracket,
    opens,
)
from seq2seq_serve.server.engine import terms as terms_module
from seq2seq_serve.server.engine.request import Beam
from seq2seq_serve.server.engine.result import FinishReason
from seq2seq_serve.server.engine.search import shared
from seq2seq_serve.server.engine.stops import StopSequences
from seq2seq_serve.server.engine.terms import RequiredTerms, Spelling, Term, num_tokens
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from tests import oracle
from tests.oracle import random_model
from tests.server.driver import Driver
from tests.server.engine.test_search import LETTERS, TableRunner
from tests.server.fakes import FakeRunner, make_request

A, B, C = 3, 4, 5
# Token 0 is a bracket, 4 continues a word, no word may stand after 4 and 5, nor a placeholder after 3: the
# bytes of tokens.
TOKENS = (b"(", b"", b"", b" :", b"a", b".a")


def term(*spellings: tuple[int, ...], **options) -> Term:
    return Term(tuple(map(Spelling, spellings)), **options)


spelling = st.builds(
    Spelling,
    st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
some_terms = st.lists(
    st.builds(
        Term, st.lists(spelling, min_size=1, max_size=2).map(tuple), st.sampled_from([1, 1, 2]), st.booleans()
    ),
    min_size=1,
    max_size=3,
).map(tuple)


@pytest.mark.parametrize("num_terms", [1, 64])
@pytest.mark.parametrize("num_spellings", [1, 3])
@pytest.mark.parametrize("length", [1, 3, 32])
@pytest.mark.parametrize("is_exact", [False, True])
def test_terms_count_at_least_the_memory_that_they_take(num_terms, num_spellings, length, is_exact):
    """Exact ones took three times as much."""
    chance = random.Random(0)
    ways = [
        tuple(Spelling(tuple(chance.sample(range(300, 2**20), length)), True) for _ in range(num_spellings))
        for _ in range(num_terms)
    ]
    terms = RequiredTerms([Term(each, is_exact=is_exact) for each in ways], ())
    found, waiting = dict[int, int](), [terms]
    while waiting:
        one = waiting.pop()
        if id(one) not in found and not isinstance(one, type):
            found[id(one)] = sys.getsizeof(one)
            waiting += gc.get_referents(one)
    assert terms.num_bytes / 4 < sum(found.values()) < terms.num_bytes


def oracles(terms: tuple[Term, ...]) -> oracle.Terms:
    inside = frozenset(i for i in range(6) if begins_inside(TOKENS[i]))
    marks = frozenset(i for i in range(6) if begins_with_mark(TOKENS[i].strip(b" ")))
    gluing = frozenset(i for i in range(6) if not admits_placeholder(TOKENS[i]))
    brackets = frozenset(i for i in range(6) if ends_with_bracket(TOKENS[i]))
    closing = frozenset(i for i in range(6) if not opens(TOKENS[i]))
    return oracle.Terms(terms, inside, closing, marks, gluing, brackets)


@settings(max_examples=200)
@given(some_terms, st.lists(st.sampled_from([0, A, B, C]), max_size=9))
def test_the_progress_of_a_target_is_that_of_reading_all_of_it(terms, target):
    required, definition = RequiredTerms(terms, TOKENS), oracles(terms)
    progress = required.start
    for place, token_id in enumerate(target):
        spoils = required.spoils(progress, target[:place], token_id)
        progress = required.advance(progress, token_id)
        so_far = target[: place + 1]
        missing, rest = definition.read(so_far, has_ended=False)
        assert (list(progress.missing), list(required.tail(progress))) == (missing, rest)
        assert progress.num_left == definition.num_left(so_far)
        assert set(required.wanted(progress)) == definition.wanted(so_far)
        next_ids = [0, A, B, C]
        lefts = [definition.num_left([*so_far, next_id]) for next_id in next_ids]
        assert required.left_after(progress, next_ids) == lefts
        wanted = required.wanted(progress)
        assert [wanted.get(i, left) for i, left in zip(next_ids, lefts, strict=True)] == lefts
        assert wanted == {next_id: definition.num_left([*so_far, next_id]) for next_id in wanted}
        are_spoiling = [required.spoils(progress, so_far, next_id) for next_id in next_ids]
        places = required.spoiling(progress, so_far, lambda: [0, A, B, C])
        assert [place in places for place in range(4)] == are_spoiling
        assert spoils == definition.spoils(so_far)
        assert list(progress.at_end) == definition.read(so_far, has_ended=True)[0]
        assert any(progress.at_end) == (progress.num_left > 0)
    assert required.after(target) is progress


def test_what_was_found_is_forgotten_and_the_progress_stays_the_same(monkeypatch):
    monkeypatch.setattr(terms_module, "_MOST_KEPT", 3)
    terms = (term((A, A, A, B), (A, B, C)), term((B, A), is_exact=True), term((A,), number=2))
    required, definition, target = RequiredTerms(terms, TOKENS), oracles(terms), list[int]()
    progress = required.start
    for token_id in random.Random(0).choices([A, B, C], k=200):
        progress = required.advance(progress, token_id)
        target.append(token_id)
        assert list(progress.missing) == definition.read(target, has_ended=False)[0]
        assert set(required.wanted(progress)) == definition.wanted(target)
    assert len(required._known) < 20
    assert len(required._after) < 20


def test_long_terms_of_equal_tokens_take_little_memory_and_no_recursion():
    """Each beginning had its own tuple before: 16 MB for one of these terms."""
    length = 2000
    tracemalloc.start()
    required = RequiredTerms([term((*[A] * length, number)) for number in range(10, 14)], ())
    progress = required.after([A] * (length - 1))
    for _ in range(2):
        ended = required.after([*[A] * (length + 10), 12])
        assert ended.at_end == (1, 1, 0, 1)
        assert required.advance(progress, C).begun.length == 0
        required.forget()
    assert progress.num_left == 4 * (length + 1) - (length - 1)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 8e6


@pytest.mark.parametrize("seed", range(20))
def test_a_forced_end_leaves_one_token_less(seed):
    required = RequiredTerms([term((A, B)), term((C,))], ())
    request = make_request(
        (5,), beam=Beam(4), max_new_tokens=5, terms=required, ends_forced=True, num_hypotheses=4
    )
    model = random_model(seed, parts=2**20)
    logits = model.logits
    model.logits = lambda target: [*logits(target)[:EOS_ID], -9.0, *logits(target)[EOS_ID + 1 :]]
    driver = Driver(TableRunner(model, 4))
    driver.submit(request)
    driver.finish()
    found = driver.results[request].hypotheses
    assert [one.missing for one in found] == [()] * 4


def test_an_exact_term_may_stand_inside_of_a_longer_one_after_it():
    """It had to come last before, wherever the model wanted it."""
    want = [A, C, A, B, EOS_ID]

    def logits(target):
        is_on_the_way = list(target) == want[: len(target)]
        return [5.0 * (is_on_the_way and len(target) < 5 and i == want[len(target)]) for i in range(6)]

    terms = [term((A,), is_exact=True), term((A, B), is_exact=True)]
    request = make_request((5,), beam=Beam(2), max_new_tokens=12, terms=RequiredTerms(terms, ()))
    driver = Driver(TableRunner(oracle.PrescribedModel(logits), 2))
    driver.submit(request)
    driver.finish()
    assert driver.results[request].best.token_ids == (A, C, A, B)


def test_an_exact_term_is_not_left_behind_as_the_beginning_of_a_longer_one():
    required = RequiredTerms([term((A,), is_exact=True), term((A, B), is_exact=True)], ())
    progress = required.after([A, C, A])
    assert required.spoils(progress, [A, C, A], C)
    assert not required.spoils(progress, [A, C, A], B)
    assert not required.spoils(required.after([A, C]), [A, C], A)


@settings(max_examples=150)
@given(
    st.integers(0, 10**6),
    some_terms,
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.6, 1.0, -0.5]),
    st.sampled_from([True, False, "never"]),
    st.sampled_from(["wu", "power"]),
    st.lists(st.sampled_from([A, B, C]), max_size=3).map(tuple),
    st.integers(1, 5),
)
@example(1, (term((A,), is_exact=True), term((A, B)), term((B, C, A), (C,))), 4, 8, 0.6, False, "wu", (), 2)
def test_the_search_is_the_oracles(
    seed, terms, size, limit, alpha, early_stopping, formula, prefix_ids, num_hypotheses
):
    num_hypotheses = min(num_hypotheses, size)
    model = random_model(seed, parts=2**20)  # so fine that no two are equal
    expected = oracle.term_search(
        model,
        [5],
        oracles(terms),
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        beam_size=size,
        alpha=alpha,
        max_new_tokens=limit,
        early_stopping=early_stopping,
        formula=formula,
        constraints=oracle.Constraints(prefix_ids=prefix_ids),
        num_hypotheses=num_hypotheses,
    )
    driver = Driver(TableRunner(model, size))
    request = make_request(
        (5,),
        beam=Beam(size, alpha, formula, early_stopping),
        num_hypotheses=num_hypotheses,
        max_new_tokens=limit,
        prefix_ids=prefix_ids,
        stream=True,
        terms=RequiredTerms(terms, TOKENS),
    )
    driver.submit(request)
    driver.finish()
    found = driver.results[request].hypotheses
    assert [list(one.token_ids) for one in found] == [one.token_ids for one, _ in expected]
    assert [one.score for one in found] == pytest.approx([one.score for one, _ in expected], abs=1e-4)
    assert [sum(one.missing) for one in found] == [sum(missing) for _, missing in expected]
    assert tuple(driver.told(request)) == found[0].token_ids


@pytest.mark.parametrize("seed", range(20))
def test_every_target_with_room_has_every_term_and_others_have_the_tokens_that_they_have_alone(seed):
    terms = RequiredTerms([term((7, 8, 9)), term((7, 8), (10,), number=2), term((90,))], ())
    least = num_tokens(terms.terms)

    def requests():
        plain = [make_request((20, seed, i), beam=Beam(3), max_new_tokens=9) for i in range(2)]
        plain.append(make_request((20, seed), max_new_tokens=9, stream=True))
        return plain, [
            make_request((30, seed, i), beam=Beam(4), max_new_tokens=least + i, terms=terms, num_hypotheses=4)
            for i in range(3)
        ]

    plain, required = requests()
    driver = Driver(FakeRunner(18))
    driver.submit(*plain, *required)
    driver.finish()
    for request in required:
        for hypothesis in driver.results[request].hypotheses:
            assert not hypothesis.missing
            assert terms.after(hypothesis.token_ids).at_end == (0, 0, 0)
    alone, _ = requests()
    other = Driver(FakeRunner(18))
    other.submit(*alone)
    other.finish()
    for one, together in zip(alone, plain, strict=True):
        assert driver.results[together].hypotheses == other.results[one].hypotheses


def test_a_target_at_its_limit_has_as_many_terms_as_fit_and_names_the_others():
    terms = RequiredTerms([term((7, 8, 9)), term((10,))], ())
    request = make_request((20, 1), beam=Beam(3), max_new_tokens=2, terms=terms, num_hypotheses=2)
    driver = Driver(FakeRunner(3))
    driver.submit(request)
    driver.finish()
    best = driver.results[request].best
    assert best.missing == (1, 0)
    assert 10 in best.token_ids


def test_an_exact_term_is_written_once_where_the_model_would_repeat_it():
    model = oracle.PrescribedModel(lambda target: [0.0, 0.0, len(target) - 4.0, 5.0, 0.0, 4.0])
    for is_exact in (False, True):
        required = RequiredTerms([term((A,), is_exact=is_exact)], ())
        request = make_request((5,), beam=Beam(2), max_new_tokens=6, terms=required)
        driver = Driver(TableRunner(model, 2))
        driver.submit(request)
        driver.finish()
        count = driver.results[request].best.token_ids.count(A)
        assert count == 1 if is_exact else count > 1


@pytest.mark.parametrize("seed", range(20))
def test_a_stop_sequence_ends_a_target_only_when_it_has_all_terms(seed):
    required = RequiredTerms([term((4, 6)), term((7,))], ())
    request = make_request(
        (20, seed),
        beam=Beam(4),
        max_new_tokens=12,
        stops=StopSequences(["ab", "cc"], LETTERS),
        terms=required,
        num_hypotheses=4,
    )
    driver = Driver(FakeRunner(4))
    driver.submit(request)
    driver.finish()
    for hypothesis in driver.results[request].hypotheses:
        text = b"".join(LETTERS[token_id] for token_id in hypothesis.token_ids).decode()
        assert text.endswith(("ab", "cc")) == (hypothesis.finish_reason is FinishReason.STOP)
        assert not hypothesis.missing


@given(
    st.integers(1, 3).flatmap(
        lambda number: st.lists(
            st.lists(st.integers(-1, 4), min_size=number, max_size=number), min_size=1, max_size=4
        )
    ),
    st.integers(1, 12),
)
def test_the_shares_fill_the_beam_and_differ_only_for_banks_that_have_no_more(beams, size):
    """A bank of -1 may have no place."""
    banks = np.array(beams)
    has_place = shared(banks >= 0, np.maximum(banks, 0), size)
    for of_beam, has in zip(beams, has_place.tolist(), strict=True):
        counts = {bank: of_beam.count(bank) for bank in of_beam if bank >= 0}
        taken = {bank: sum(has[i] for i, each in enumerate(of_beam) if each == bank) for bank in counts}
        assert sum(has) == sum(taken.values()) == min(size, sum(counts.values()))
        most = max(taken.values(), default=0)
        for bank, count in counts.items():
            places = [has[i] for i, each in enumerate(of_beam) if each == bank]
            assert places == sorted(places, reverse=True)  # its best ones
            assert taken[bank] in (count, most, most - 1)
            if taken[bank] < min(count, most):  # those that need fewer tokens come first
                assert all(taken[other] < most for other in counts if other > bank)


def test_a_pickled_request_leaves_the_table_of_tokens_behind():
    required = RequiredTerms([term((A, B), (C,), number=2)], TOKENS)
    copied = pickle.loads(pickle.dumps(required))
    assert copied.token_bytes == ()
    copied.token_bytes = TOKENS
    assert copied.after([A, B, C]).missing == required.after([A, B, C]).missing
