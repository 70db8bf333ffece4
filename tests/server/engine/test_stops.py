"""Stop sequences are found where their definition says, whatever the text and the sequences are."""

from hypothesis import example, given
from hypothesis import strategies as st

from seq2seq_serve.server.engine.stops import StopSequences

TEXTS = st.text(st.sampled_from("ab\u00e9"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("ab\u00e9"), min_size=1, max_size=9), min_size=1, max_size=5)


def found(data: bytes, stops: list[bytes], num_searched: int) -> int | None:
    """Where the sequence begins that is complete first, the longest of several, by definition."""
    for end in range(num_searched + 1, len(data) + 1):
        if complete := [stop for stop in stops if data[:end].endswith(stop)]:
            return end - max(map(len, complete))
    return None


def uncertain(data: bytes, stops: list[bytes]) -> int:
    """The longest end of the text that is the beginning of a sequence and not all of it, by definition."""
    return max(
        length
        for length in range(len(data) + 1)
        if any(stop.startswith(data[len(data) - length :]) and len(stop) > length for stop in stops)
    )


@given(TEXTS, STOPS, st.integers(0, 24))
@example("aab", ["ab", "aab", "b"], 0)
@example("abab", ["ab"], 2)
@example("abab", ["ab"], 3)
def test_the_sequence_that_is_complete_first_is_found(text, texts, num_searched):
    data, stops = text.encode(), [text.encode() for text in texts]
    assert StopSequences(texts, ()).find(data, num_searched) == found(data, stops, num_searched)


@given(TEXTS, STOPS)
@example("aaaab", ["aaaaab", "aabaab"])
def test_the_end_that_may_begin_a_sequence_is_uncertain(text, texts):
    """A text that contains no sequence: its reader has been given the rest."""
    data, stops = text.encode(), [text.encode() for text in texts]
    assert StopSequences(texts, ()).num_uncertain(data) == uncertain(data, stops)


@given(TEXTS, STOPS)
def test_a_sequence_is_found_token_by_token_where_it_is_in_the_text(text, texts):
    """Each token is a byte, so that sequences begin and end inside characters and between tokens."""
    rule, data = StopSequences(texts, tuple(bytes([octet]) for octet in range(256))), text.encode()
    tail, num_read = b"", 0
    for octet in data:
        tail, num_read = rule.advance(tail, octet), num_read + 1
        if tail is None:
            break
    first = found(data, [text.encode() for text in texts], 0)
    assert (tail is None) == (first is not None)
    if first is not None:
        assert found(data[:num_read], [text.encode() for text in texts], 0) == first
        assert found(data[: num_read - 1], [text.encode() for text in texts], 0) is None
