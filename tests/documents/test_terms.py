"""Translations of terms are whole in documents: no formatting, link or note begins or ends within one."""

import unicodedata

import pytest

from seq2seq_serve.documents.terms import WholeTerms
from seq2seq_serve.protos.seq2seq_v1_pb2 import Term
from tests.documents.answers import aligned, translated

TERMS = {
    "ki": "machine learning",
    "maschinelles lernen": "machine learning",
    "z.B.": "e.g.",
    "Äpfel": "all  apples",
    "사과": "사 과일",
}


def whole(**options) -> WholeTerms:
    return WholeTerms(Term(source=one, target=other, **options) for one, other in TERMS.items())


@pytest.mark.parametrize(
    ("text", "target", "links", "written"),
    [
        ("<b>KI</b> hilft", "machine learning helps", "0 1 1", "<b>machine learning</b> helps"),
        ("<b>KI</b> hilft", "machine learning helps", "", "<b>machine learning</b> helps"),
        ("Siehe <b>z.B.</b>: hier", "See e.g.: here", "0 1 2", "See <b>e.g.</b>: here"),
        ("Hier z.B.<i>, ja</i>", "Here e.g. yes", "0 1 2", "Here e.g. <i>yes</i>"),
        # Even if no word of it is aligned with the term
        (
            "<i>so</i> <b>viele</b> KI",
            "machine learning so many",
            "0 1 0 1",
            "machine learning <i>so</i> <b>many</b>",
        ),
        # As often as it occurs
        (
            "<b>KI</b> und <b>KI</b> ja",
            "machine learning and machine learning yes",
            "0 1 1 2 3 3",
            "<b>machine learning</b> and <b>machine learning</b> yes",
        ),
        ("<b>A\u0308p\u00adfel</b> da", "all apples there", "0 1 1", "<b>all apples</b> there"),
        ("<b>사과</b>는 맛", "사 과일는 맛", "0 1 1", "<b>사 과일</b>는 맛"),
        (
            unicodedata.normalize("NFD", "<b>사과</b>는 맛"),
            "사 과일는 맛",
            "0 1 1",
            "<b>사 과일</b>는 맛",
        ),
    ],
)
def test_a_term_has_the_formatting_that_it_has_in_the_source(text, target, links, written):
    answer = aligned(target, links)
    assert translated("a.html", f"<p>{text}</p>", answer, whole())[1] == f"<p>{written}</p>"


def test_a_term_that_is_split_in_the_source_may_be_split():
    text, target = "<i>Das</i> <b>maschinelles</b> Lernen hilft", "machine learning helps"
    for links, written in (
        ("1 2 3", "<b>machine</b> learning helps"),
        ("0 1 3", "<b>machine learning</b> helps"),  # but not by the formatting of another word
    ):
        content = translated("a.html", f"<p>{text}</p>", aligned(target, links), whole())[1]
        assert content.endswith(f"{written}</p>")


def test_only_words_of_terms_in_the_source_are_kept_together():
    text, answer = "<p><b>Ki</b> hilft</p>", aligned("machine learning", "0 1")
    assert translated("a.html", text, answer, whole())[1] == "<p><b>machine learning</b></p>"
    for other, terms in ((text, whole(case_sensitive=True)), ("<p><b>Kino</b> hilft</p>", whole())):
        assert translated("a.html", other, answer, terms)[1] == "<p><b>machine</b> learning</p>"


@pytest.mark.parametrize(
    ("text", "links", "written"),
    [
        ("KI[^1] hilft sehr.", "0 1 2", "machine learning[^1] helps."),
        ("KI[^1] hilft sehr.", "", "machine learning[^1] helps."),
        ("KI `x` hilft.", "0 1 2", "machine learning `x` helps."),
    ],
)
def test_no_note_or_code_stands_within_a_term(text, links, written):
    note = "\n\n[^1]: 1.\n" if "[^1]" in text else "\n"
    assert (
        translated("a.md", text + note, aligned("machine learning helps.", links), whole())[1]
        == written + note
    )


def test_a_link_does_not_vanish_for_a_term():
    for text, target, written in (
        ("<a>Klick</a> KI", "machine learning", "<a>machine learning</a>"),
        ("KI <a>ja</a> KI", "machine learning", "<a>machine learning</a>"),
    ):
        assert translated("a.html", text, aligned(target, "0 1"), whole())[1] == written
