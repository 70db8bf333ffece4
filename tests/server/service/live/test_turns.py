"""A sound is cut into segments in the same way, however it comes."""

from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, GrowingSound
from seq2seq_serve.server.runner import voice_activity
from seq2seq_serve.server.runner.voice_activity import SpeechRules
from seq2seq_serve.server.service.live.turns import SpeechChange, TurnRules, Turns

LIVE = TurnRules(SpeechRules(0.5, 0.5, 0.3), 0.3)
FILE = TurnRules(SpeechRules(0.8, 0.5, 0.4), 0.4, joins=True)
NO_SPEECH = TurnRules(None, 0.3)


@pytest.fixture(autouse=True)
def _by_loudness(monkeypatch):
    detect_by_loudness(monkeypatch)


def detect_by_loudness(monkeypatch) -> None:
    """Takes what is loud for speech, so that no model is needed."""

    def run(chunks, _state):
        return np.where(np.abs(chunks).max(axis=1) > 0.1, 0.9, 0.01).astype(np.float32)

    monkeypatch.setattr(voice_activity, "_session", lambda: None)
    monkeypatch.setattr(voice_activity, "_run", run)


def sound_of(*seconds: float) -> np.ndarray:
    """Noise that is loud, quiet, loud, ... for these seconds."""
    chance = np.random.default_rng(0)
    return np.concatenate(
        [
            (0.01 if number % 2 else 0.5) * chance.uniform(-1, 1, round(length * SAMPLE_RATE))
            for number, length in enumerate(seconds)
        ]
    ).astype(np.float32)


def heard(samples: np.ndarray, sizes, rules: TurnRules, longest_seconds: float = 9.0) -> tuple[list, list]:
    """The spans of the segments, in samples, and the changes."""
    sound = GrowingSound(8)
    turns = Turns(sound, rules, round(longest_seconds * SAMPLE_RATE))
    place, number, changes = 0, 0, list[SpeechChange]()
    while place < len(samples):
        size = sizes[number % len(sizes)]
        changes += turns.hear(samples[place : place + size])
        place, number = place + size, number + 1
    changes += turns.finish()
    assert all(segment.is_complete for segment in turns.segments)
    return [segment.spans for segment in turns.segments], changes


def test_a_pause_ends_a_segment_and_a_short_one_does_not():
    segments, changes = heard(sound_of(1, 0.4, 1, 0.7, 1, 2), [1600], LIVE)
    [[(begin, end)], [(second, last)]] = segments
    assert begin == 0
    assert end == pytest.approx(2.7 * SAMPLE_RATE, abs=600)
    assert second == pytest.approx(2.8 * SAMPLE_RATE, abs=600)
    assert last == pytest.approx(4.4 * SAMPLE_RATE, abs=600)
    assert [change.is_begin for change in changes] == [True, False, True, False]
    assert [change.place / SAMPLE_RATE for change in changes] == pytest.approx([0, 2.4, 3.1, 4.1], abs=0.04)


def test_a_long_segment_is_cut_where_it_is_quiet():
    samples = sound_of(30)
    samples[7 * SAMPLE_RATE : 7 * SAMPLE_RATE + 3000] *= 0.3
    segments, _ = heard(samples, [5000], LIVE)
    spans = [span for segment in segments for span in segment]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(samples)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert max(end - begin for begin, end in spans) <= 9 * SAMPLE_RATE
    assert spans[0][1] / SAMPLE_RATE == pytest.approx(7.1, abs=0.4)


def test_segments_of_a_file_join_as_many_spans_as_fit():
    segments, _ = heard(sound_of(2, 3, 2, 3, 2, 3, 2, 3, 20, 1), [1600], FILE)
    lengths = [sum(end - begin for begin, end in spans) / SAMPLE_RATE for spans in segments]
    assert [len(spans) for spans in segments][:2] == [3, 1]
    assert max(lengths) <= 9
    assert sum(lengths) == pytest.approx(8 + 20 + 4 * 0.8 + 0.4, abs=0.6)


def test_segments_of_a_file_do_not_wait_for_speech_that_does_not_come():
    """All silence was kept until the next speech, as a pause between two spans of one segment."""
    for size in (512, 1600, 99_999):
        segments, _ = heard(sound_of(1, 10, 1, 30, 1, 30, 1), [size], FILE)
        assert [len(spans) for spans in segments] == [2, 1, 1]
    sound, samples = GrowingSound(8), sound_of(1, 25)
    turns = Turns(sound, FILE, 9 * SAMPLE_RATE)
    [*_] = turns.hear(samples[: 18 * SAMPLE_RATE])
    assert not turns.segments[0].is_complete
    [*_] = turns.hear(samples[18 * SAMPLE_RATE :])
    assert turns.segments[0].is_complete


def test_without_turn_detection_all_sound_is_speech():
    segments, changes = heard(sound_of(0.01, 12), [999], NO_SPEECH)
    spans = [span for segment in segments for span in segment]
    assert changes == []
    assert (spans[0][0], spans[-1][1]) == (0, round(12.01 * SAMPLE_RATE))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.05, 3), min_size=1, max_size=12),
    st.lists(st.integers(1, 40_000), min_size=1, max_size=5),
    st.sampled_from([LIVE, FILE, NO_SPEECH]),
)
def test_pieces_change_nothing(seconds, sizes, rules):
    samples = sound_of(*seconds)
    of = partial(heard, samples, rules=rules, longest_seconds=2.5)
    segments, changes = of(sizes)
    assert (segments, changes) == of([512])
    spans = [span for segment in segments for span in segment]
    assert all(begin % HOP == 0 and begin <= end <= len(samples) for begin, end in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(sum(end - begin for begin, end in spans) <= 2.5 * SAMPLE_RATE for spans in segments)


def test_a_finished_segment_ends_now_and_the_next_one_begins_there():
    sound, samples = GrowingSound(8), sound_of(4)
    turns = Turns(sound, LIVE, 9 * SAMPLE_RATE)
    [*_] = turns.hear(samples[: 2 * SAMPLE_RATE])
    [*_] = turns.finish_segment()
    [*_] = turns.finish_segment()
    [*_] = turns.hear(samples[2 * SAMPLE_RATE :])
    assert [segment.spans for segment in turns.segments] == [
        [(0, 2 * SAMPLE_RATE)],
        [(2 * SAMPLE_RATE, 4 * SAMPLE_RATE)],
    ]
    assert [segment.is_complete for segment in turns.segments] == [True, False]


def test_a_dropped_segment_is_forgotten():
    sound, samples = GrowingSound(8), sound_of(3)
    turns = Turns(sound, LIVE, 9 * SAMPLE_RATE)
    [*_] = turns.hear(samples[:SAMPLE_RATE])
    turns.drop_segment()
    assert not turns.segments
    [*_] = turns.hear(samples[SAMPLE_RATE:])
    assert [segment.spans for segment in turns.segments] == [[(SAMPLE_RATE, 3 * SAMPLE_RATE)]]
