"""A text ends before its first stop sequence, and no piece is taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.stopping import StoppedText
from tests.server.service.harness import byte_tokenizer

TOKENIZER = byte_tokenizer()


def pieces(text: str, stops: list[str], prefix: str = "") -> tuple[list[str], bool]:
    """What a text gives, pushed a byte at a time."""
    ids, num_prefix = TOKENIZER.encode(prefix + text), len(TOKENIZER.encode(prefix))
    stopped = StoppedText(TOKENIZER.stream(), stops, num_prefix)
    given = [stopped.push([token_id]) for token_id in ids]
    return [*given, stopped.finish()], stopped.is_stopped


def expected(text: str, stops: list[str]) -> str:
    """The text before the stop sequence that is complete first, by definition."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("one two", [" two", "wo"], "one"),
        ("aab", ["ab"], "a"),
        ("오늘은 금요일", ["금"], "오늘은 "),
        ("x", ["x"], ""),
        ("abc", [], "abc"),
    ],
)
def test_the_text_ends_before_the_stop_sequence(text, stops, before):
    given, is_stopped = pieces(text, stops)
    assert "".join(given) == before
    assert is_stopped is (before != text)


@given(
    st.text(alphabet="ab금", max_size=12),
    st.lists(st.text(alphabet="ab금", min_size=1, max_size=4), max_size=3),
)
def test_pieces_joined_are_the_text_before_the_first_stop_sequence(text, stops):
    given, is_stopped = pieces(text, stops)
    assert "".join(given) == expected(text, stops)
    assert is_stopped is any(stop in text for stop in stops)


def test_stop_sequences_are_not_looked_for_in_the_prefix():
    assert "".join(pieces("cab", ["ab"], prefix="ab")[0]) == "abc"
    assert "".join(pieces("b", ["ab"], prefix="a")[0]) == "ab"


def test_only_what_may_begin_a_stop_sequence_is_held_back():
    given, _ = pieces("abxab", ["abc"])
    assert given == ["", "", "abx", "", "", "ab"]
