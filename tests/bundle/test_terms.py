from seq2seq_serve.bundle.terms import FoundTerm, TermTable
from seq2seq_serve.bundle.words import phrase, words


def test_a_term_is_found_where_its_words_are_and_the_longest_comes_first():
    exact = {phrase(["US"]): "USA"}
    folded = {phrase(words(term)): target for term, target in (("us", "uns"), ("a us", "x"), ("us a", "y"))}
    found = TermTable(exact, folded).find(words("US, us a us"))
    assert found == [FoundTerm(2, 4, "y"), FoundTerm(0, 1, "USA"), FoundTerm(4, 5, "uns")]
    assert not TermTable({}, {})
    assert TermTable({}, {}).find(["a"]) == []
