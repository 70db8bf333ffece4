"""Words are stable once two decodings in a row begin with them, or enough sound follows them."""

from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.server.service.live.agreement import Agreement, Heard


def heard(*texts: str) -> list[Heard]:
    """Returns words whose tokens are their characters; sound follows those in brackets."""
    return [Heard(tuple(map(ord, text)), text.strip("[]"), text.startswith("[")) for text in texts]


def test_two_decodings_that_agree_make_words_stable():
    agreement = Agreement()
    assert agreement.agreed(heard("a", "bc")) == 0
    assert agreement.agreed(heard("a", "bd", "e")) == 1
    assert agreement.draft_ids == tuple(map(ord, "bde"))
    assert agreement.agreed(heard("bd", "e", "f")) == 2, "the first stable word is not among them any more"
    assert agreement.draft_ids == (ord("f"),)


def test_marks_and_case_do_not_matter():
    agreement = Agreement()
    agreement.agreed(heard("Well", " I", " go."))
    assert agreement.agreed(heard("well,", " I", " go")) == 3
    agreement.agreed(heard(" it's"))
    assert agreement.agreed(heard(" is")) == 0


def test_words_that_sound_follows_are_stable_at_once():
    agreement = Agreement()
    assert agreement.agreed(heard("[a]", "[b]", "c")) == 2
    assert agreement.agreed(heard("d", "[e]")) == 0, "a word is not stable before the ones before it"


def test_a_doubtful_decoding_agrees_with_nothing():
    agreement = Agreement()
    agreement.agreed(heard("a"))
    agreement.doubt()
    assert agreement.draft_ids == ()
    assert agreement.agreed(heard("a")) == 0


@given(st.lists(st.lists(st.sampled_from(["a", "b", "[a]", "[b]"]), max_size=6), max_size=12))
def test_every_stable_word_is_in_both_decodings_or_followed(decodings):
    agreement, before = Agreement(), list[Heard]()
    for texts in decodings:
        words = heard(*texts)
        num_stable = agreement.agreed(words)
        for place, word in enumerate(words[: num_stable + 1]):
            repeats = place < len(before) and before[place].text == word.text
            assert (repeats or word.is_followed) == (place < num_stable)
        before = words[num_stable:]
