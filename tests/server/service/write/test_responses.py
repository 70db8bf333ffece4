"""A text ends before its first stop sequence, and no piece is taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.bundle.tokenizer import TextStream
from seq2seq_serve.protos.seq2seq_v1_pb2 import Segment, Word
from seq2seq_serve.server.engine.stops import StopSequences
from seq2seq_serve.server.service.write.responses import StoppedText, _in_a_row, _times_of_words
from tests.server.service.harness import byte_tokenizer

TOKENIZER = byte_tokenizer()


def pieces(text: str, stops: list[str], prefix: str = "") -> tuple[list[str], bool]:
    """What a text gives, pushed a byte at a time."""
    ids, num_prefix = TOKENIZER.encode(prefix + text), len(TOKENIZER.encode(prefix))
    sequences = StopSequences(stops, TOKENIZER.token_bytes) if stops else None
    stopped = StoppedText(TOKENIZER.stream(), sequences, num_prefix)
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


WORDS = [
    b"",
    *(bytes([byte]) for byte in b"abc\xea\xb8\x88"),
    b"ab",
    b"bca",
    b"\xb8\x88a",
    b"c\xea",
    b"cabca",
]


@given(
    st.lists(st.integers(0, len(WORDS)), max_size=12),
    st.lists(st.text(alphabet="abc금", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_engine_and_handler_stop_at_the_same_token_which_completes_the_first_stop_sequence(ids, texts):
    stops = StopSequences(texts, WORDS)
    num_taken, tail = 0, b""
    for token_id in ids:
        num_taken += 1
        after = stops.advance(tail, token_id)
        if after is None:
            break
        tail = after
        assert len(tail) < max(len(text.encode()) for text in texts)
    joined = b"".join(WORDS[token_id] for token_id in ids[:num_taken] if token_id < len(WORDS))
    assert (num_taken > 0 and after is None) == any(text.encode() in joined for text in texts)
    whole, piecewise = (
        StoppedText(TextStream(WORDS, strips_space=False), stops, num_prefix=0) for _ in range(2)
    )
    text = whole.push(ids[:num_taken]) + whole.finish()
    assert whole.is_stopped == any(text.encode() in joined for text in texts)
    assert "".join(piecewise.push([token_id]) for token_id in ids) + piecewise.finish() == text
    ends = [end for end in range(len(joined) + 1) if joined.endswith(tuple(map(str.encode, texts)), 0, end)]
    if ends:
        longest = max(len(stop) for stop in map(str.encode, texts) if joined.endswith(stop, 0, ends[0]))
        joined = joined[: ends[0] - longest]
    assert text == joined.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([(1.0, 1.5), (1.5, 2.4)], [(1.0, 1.5), (1.5, 2.4)]),  # the segment grows
        ([(1.2, 1.5), (1.5, 1.8)], [(1.2, 1.5), (1.5, 1.8)]),  # or shrinks
        ([(0.4, 1.5), (1.5, 2.6)], [(1.0, 1.5), (1.5, 2.0)]),  # words go on in pauses
        ([(0.3, 0.9), (2.1, 2.9)], [(0.3, 0.9), (2.1, 2.9)]),  # all of a word is outside
        ([(0.1, 3.0)], [(1.0, 2.0)]),
    ],
)
def test_a_segment_has_the_times_of_its_words_without_the_pauses_around_it(words, expected):
    given = [Word(begin_seconds=begin, end_seconds=end) for begin, end in words]
    times = _times_of_words(given, 1.0, 2.0)
    found = [(word.begin_seconds, word.end_seconds) for word in given]
    assert found == [pytest.approx(one) for one in expected]
    assert times == (found[0][0], found[-1][1])


def test_a_replacement_character_is_found_where_the_model_wrote_one_and_not_for_half_a_character():
    stops = StopSequences(["\ufffd"], [b"\xea", "\ufffd".encode()])
    tail = stops.advance(b"", 0)
    assert tail is not None
    assert stops.advance(tail, 1) is None


def test_a_segment_ends_where_the_next_one_begins():
    """The last word of a window reached into the next window, and so did its subtitle."""
    times = [(0.0, 4.4, [(0.0, 1.0), (1.0, 3.6), (3.6, 4.4)]), (3.5, 4.1, [(3.5, 4.1)]), (4.8, 9.0, [])]
    segments = _in_a_row(
        [
            Segment(
                begin_seconds=begin,
                end_seconds=end,
                words=[Word(begin_seconds=first, end_seconds=last) for first, last in words],
            )
            for begin, end, words in times
        ]
    )
    assert [(each.begin_seconds, each.end_seconds) for each in segments] == [(0, 3.5), (3.5, 4.1), (4.8, 9)]
    first = [(word.begin_seconds, word.end_seconds) for word in segments[0].words]
    assert first == [(0, 1), (1, 3.5), (3.5, 3.5)]
