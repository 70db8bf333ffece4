"""Warnings of targets that lack terms, or whose placeholders are not those of their sources."""

from seq2seq_serve.client.files.flaws import Flaws
from seq2seq_serve.client.rpcs import Translated
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb


def answer(text: str, *missing: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(hypotheses=[pb.Hypothesis(text=text, missing_terms=missing)])


def warnings(flaws: Flaws) -> list[tuple[int, int, str]]:
    found = flaws.warnings(pb.GenerateOptions())
    return [(number, num_more, problem.split(": ", 1)[-1]) for _, number, num_more, problem in found]


def test_terms_and_placeholders_are_reported_apart():
    """A text without a term said nothing of its tags, and a streamed one nothing of its placeholders."""
    flaws, other = Flaws(), Flaws()
    flaws.add("", 1, Translated("<b>x</b> y", answer("</b>x<b>", "Y")), keeps_placeholders=True)
    flaws.add("", 2, Translated("{n}", answer("{{n}}", "{n}", "{{n}}")), keeps_placeholders=True)
    other.add_limits("", 3, answer("%%s", "%s", "Z"))
    flaws.merge(other)
    assert warnings(flaws) == [(1, 1, "Y, Z"), (1, 2, "correct it ({n}, {{n}}, %s)")]
