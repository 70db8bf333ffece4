"""Which logits change: by hand, and against a definition that looks at every token of the vocabulary."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.server.engine import constraints as module
from seq2seq_serve.server.engine.request import Constraints
from seq2seq_serve.server.engine.state import Search, Sequence
from tests.server.fakes import make_request

EOS = 2
FORBIDDEN = (1.0, -math.inf)


def adjustments(constraints, target_ids, vocab_size=100, num_prefix=0):
    """What changes in all, because of the target so far and at every position."""
    request = make_request((7,), constraints=constraints, prefix_ids=tuple(target_ids[:num_prefix]))
    row = Sequence(Search(request, start_ids=(1,)), next_token_id=1, token_ids=list(target_ids))
    changes = module.adjustments(row, (EOS,), vocab_size)
    for token_id, penalty in module.penalties(constraints, (EOS,)).items():
        factor, bias = changes.get(token_id, (1.0, 0.0))
        is_forbidden = bias - penalty == -math.inf
        changes[token_id] = FORBIDDEN if is_forbidden else (factor, bias - penalty)
    return changes


def test_eos_is_forbidden_until_min_new_tokens():
    constraints = Constraints(min_new_tokens=2)
    assert adjustments(constraints, []) == adjustments(constraints, [7]) == {EOS: FORBIDDEN}
    assert adjustments(constraints, [7, 8]) == {}
    assert adjustments(constraints, [7, 8], num_prefix=1) == {EOS: FORBIDDEN}


def test_generated_tokens_get_the_repetition_penalty_and_their_bias():
    constraints = Constraints(repetition_penalty=1.5, logit_bias={7: -2.0, 9: 3.0})
    assert adjustments(constraints, [7, 8, 7]) == {7: (1.5, -2.0), 8: (1.5, 0.0), 9: (1.0, 3.0)}


def test_a_suppressed_token_stays_forbidden_whatever_else_is_asked():
    constraints = Constraints(
        repetition_penalty=2.0, logit_bias={7: 900.0}, suppressed_token_ids=frozenset({7})
    )
    assert adjustments(constraints, [7]) == {7: FORBIDDEN}


def test_eos_is_allowed_when_every_other_token_is_forbidden():
    constraints = Constraints(min_new_tokens=9, suppressed_token_ids=frozenset({0, 1, 3}))
    assert adjustments(constraints, [], vocab_size=4) == dict.fromkeys((0, 1, 3), FORBIDDEN)
    assert adjustments(constraints, [], vocab_size=5) == dict.fromkeys((0, 1, 2, 3), FORBIDDEN)


def test_a_token_that_the_model_never_selects_counts_as_forbidden_and_does_not_change():
    request = make_request((7,), constraints=Constraints(min_new_tokens=9, no_repeat_ngram_size=1))
    row = Sequence(Search(request, start_ids=(1,)), next_token_id=1, token_ids=[3])
    assert module.adjustments(row, (EOS,), 5, frozenset({0, 1})) == dict.fromkeys((EOS, 3), FORBIDDEN)
    assert module.adjustments(row, (EOS,), 4, frozenset({0, 1})) == {3: FORBIDDEN}


def test_a_suppressed_eos_is_allowed_when_all_else_is_forbidden():
    constraints = Constraints(suppressed_token_ids=frozenset({0, 1, EOS}), logit_bias={EOS: 1.5})
    assert adjustments(constraints, [])[EOS] == FORBIDDEN
    constraints = Constraints(
        suppressed_token_ids=frozenset({0, 1, EOS}), no_repeat_ngram_size=1, logit_bias={EOS: 1.5}
    )
    assert adjustments(constraints, [3], vocab_size=4) == {
        0: FORBIDDEN,
        1: FORBIDDEN,
        EOS: (1.0, 1.5),
        3: FORBIDDEN,
    }


def test_tokens_are_forbidden_after_beginnings_of_any_length():
    after = {(): frozenset({9}), (5,): frozenset({6, 7}), (5, 6, 5): frozenset({8}), (5,) * 9: frozenset({4})}
    constraints = Constraints(forbidden_after=after)
    for target_ids, forbidden in (([], {9}), ([6, 5], {9, 6, 7}), ([5, 6, 5], {9, 6, 7, 8})):
        assert adjustments(constraints, target_ids) == dict.fromkeys(forbidden, FORBIDDEN)


@given(st.lists(st.integers(3, 6), max_size=12), st.integers(1, 5))
def test_a_token_is_forbidden_just_when_it_would_repeat_an_ngram(target_ids, size):
    def ngrams(ids):
        return [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]

    changed = adjustments(Constraints(no_repeat_ngram_size=size), target_ids)
    for token_id in range(8):
        repeats = len(target_ids) >= size and ngrams([*target_ids, token_id])[-1] in ngrams(target_ids)
        assert (changed.get(token_id) == FORBIDDEN) is repeats


FIRST = 90  # of the times in a vocabulary of 100


def test_every_rule_of_constraints_changes_logits():
    """A new field must be listed in `change_logits`, or here among those that are no rules of their own."""
    values = {
        "min_new_tokens": 1,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "suppressed_token_ids": frozenset({3}),
        "logit_bias": {3: 1.0},
        "forbidden_after": {(3,): frozenset({4})},
        "times": Timestamps(FIRST, FIRST + 9, 0.02, FIRST - 1),
    }
    no_rules = {"repeats_start": True, "is_renormalized": False, "penalizes_log_probabilities": True}
    assert {
        field.name for field in dataclasses.fields(Constraints) if field.init
    } == values.keys() | no_rules.keys()
    assert not Constraints(**no_rules).change_logits
    for name, value in values.items():
        assert Constraints(**{name: value}).change_logits
