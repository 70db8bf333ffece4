"""Words are stable once two decodings in a row begin with them."""

from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.server.service.live.agreement import Agreement


def test_two_decodings_that_agree_make_words_stable():
    agreement = Agreement()
    assert agreement.agreed([(1,), (2, 3)], 9) == 0
    assert agreement.agreed([(1,), (2, 4), (5,)], 9) == 1
    assert agreement.draft_ids == (2, 4, 5)
    assert agreement.agreed([(2, 4), (5,), (6,)], 9) == 2, "the first stable word is not among them any more"
    assert agreement.draft_ids == (6,)


def test_the_latest_words_are_held_back():
    agreement = Agreement()
    agreement.agreed([(1,), (2,), (3,)], 0)
    assert agreement.agreed([(1,), (2,), (3,)], 2) == 2
    assert agreement.draft_ids == (3,)


def test_a_doubtful_decoding_agrees_with_nothing():
    agreement = Agreement()
    agreement.agreed([(1,)], 9)
    agreement.doubt()
    assert agreement.draft_ids == ()
    assert agreement.agreed([(1,)], 9) == 0


@given(st.lists(st.lists(st.tuples(st.integers(0, 2)), max_size=6), max_size=12), st.integers(0, 3))
def test_stable_words_are_in_both_decodings(decodings, most):
    agreement, stable, before = Agreement(), [], []
    for following in decodings:
        words = [*stable, *following]
        num_stable = agreement.agreed(following, most)
        assert num_stable <= most
        stable += following[:num_stable]
        assert words[: len(stable)] == stable
        assert before[: len(stable)] == stable[: len(before)]
        before = words
