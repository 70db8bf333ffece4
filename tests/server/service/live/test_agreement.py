"""Words are stable once two decodings in a row begin with them."""

from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.server.service.live.agreement import Agreement


def test_two_decodings_that_agree_make_words_stable():
    agreement = Agreement()
    assert agreement.agreed([(1,), (2, 3)]) == 0
    assert agreement.agreed([(1,), (2, 4), (5,)]) == 1
    assert agreement.draft_ids == (2, 4, 5)
    assert agreement.agreed([(2, 4), (5,), (6,)]) == 2, "the first stable word is not among them any more"
    assert agreement.draft_ids == (6,)


def test_a_doubtful_decoding_agrees_with_nothing():
    agreement = Agreement()
    agreement.agreed([(1,)])
    agreement.doubt()
    assert agreement.draft_ids == ()
    assert agreement.agreed([(1,)]) == 0


@given(st.lists(st.lists(st.tuples(st.integers(0, 2)), max_size=6), max_size=12))
def test_stable_words_are_in_both_decodings(decodings):
    agreement, stable, before = Agreement(), [], []
    for following in decodings:
        words = [*stable, *following]
        num_stable = agreement.agreed(following)
        stable += following[:num_stable]
        assert words[: len(stable)] == stable
        assert before[: len(stable)] == stable[: len(before)]
        before = words
