"""Silero's model of voice activity, as a package ships it, and the rules by which speech is found."""

import math
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve.bundle.audio import SAMPLE_RATE
from seq2seq_serve.server.runner import voice_activity
from seq2seq_serve.server.runner.device import small_session
from seq2seq_serve.server.runner.voice_activity import (
    MissingVoiceActivityError,
    SpeechRules,
    SpeechStream,
    speech,
)
from seq2seq_serve.training.huggingface.sounds import Sounds

needs_model = pytest.mark.skipif(
    not (find_spec("faster_whisper") or find_spec("silero_vad")), reason="needs the extra speech"
)


def vowels(number: int = 1) -> np.ndarray:
    """Sounds that resemble speech: of 2.3, 5.3, 8.1 and 12.5 seconds."""
    return Sounds(80, 3_000).made_samples()[number]


def quiet(seconds: float) -> np.ndarray:
    noise = 0.002 * np.random.default_rng(0).standard_normal(int(seconds * SAMPLE_RATE))
    return noise.astype(np.float32)


@pytest.fixture
def found(monkeypatch):
    """Finds speech by the given probabilities of chunks, without the model."""

    def found(probabilities, rules, find=voice_activity._speech) -> list:
        following = iter(probabilities)

        def run(chunks, _state):
            return np.array([next(following) for _ in chunks], np.float32)

        monkeypatch.setattr(voice_activity, "_session", lambda: None)
        monkeypatch.setattr(voice_activity, "_run", run)
        return list(find(np.zeros(512 * len(probabilities), np.float32), rules, lambda: None))

    return found


@pytest.mark.parametrize(
    ("probabilities", "spans"),
    [
        ([], []),
        ([0.4] * 9, []),
        ([0.5], [(0, 1)]),
        ([0.1, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.6], [(1, 10)]),  # neither speech nor silence
        ([0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9], [(0, 7)]),  # a pause of less than 160 milliseconds
        ([0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9], [(0, 1), (7, 8)]),
        ([0.9, 0.9, 0.1, 0.1], [(0, 2)]),  # it ends before the last silence
    ],
)
def test_speech_begins_and_ends_at_two_probabilities(found, probabilities, spans):
    assert found(probabilities, SpeechRules(0.16)) == [(512 * begin, 512 * end) for begin, end in spans]


@pytest.mark.parametrize(("num_silent", "spans"), [(63, [(0, 65)]), (64, [(0, 1), (65, 66)])])
def test_speech_goes_on_after_a_pause_that_is_too_short(found, num_silent, spans):
    assert found([0.9, *[0.1] * num_silent, 0.9], SpeechRules(2.0)) == [
        (512 * begin, 512 * end) for begin, end in spans
    ]


def test_speech_begins_at_the_given_probability_and_ends_below_it(found):
    probabilities = [0.6, *[0.5] * 6, 0.8, 0.7, *[0.5] * 6, 0.9]
    assert found(probabilities, SpeechRules(0.16)) == [(0, 16 * 512)]
    assert found(probabilities, SpeechRules(0.16, 0.7)) == [(512 * 7, 512 * 9), (512 * 15, 512 * 16)]
    assert found(probabilities, SpeechRules(0.16, 0.0)) == [(0, 16 * 512)]


@pytest.mark.parametrize("margin", [0.0, 0.1])
def test_speech_has_the_given_margin_before_it(found, margin):
    probabilities = [*[0.0] * 40, 0.9, *[0.0] * 40]
    [(begin, end)] = found(probabilities, SpeechRules(0.16, margin_seconds=margin), speech)
    assert (begin, end) == (40 * 512 - int(margin * SAMPLE_RATE), 41 * 512 + voice_activity.SPEECH_MARGIN)


@needs_model
def test_speech_between_silences_is_found_with_a_margin():
    parts = [quiet(3), vowels(0), quiet(4), vowels(1), quiet(2.5)]
    samples = np.concatenate(parts)
    spans = speech(samples, SpeechRules(0.16))
    bounds = np.cumsum([len(part) for part in parts]) / SAMPLE_RATE
    seconds = [(begin / SAMPLE_RATE, end / SAMPLE_RATE) for begin, end in spans]
    assert all(begin < end for begin, end in seconds)
    assert all(before[1] <= after[0] for before, after in pairwise(seconds))
    first = [one for one in seconds if one[1] < bounds[1] + 1]
    last = seconds[len(first) :]
    assert first[0][0] == pytest.approx(bounds[0], abs=0.6)
    assert first[-1][1] == pytest.approx(bounds[1], abs=0.6)
    assert last[0][0] == pytest.approx(bounds[2], abs=0.6)
    assert last[-1][1] == pytest.approx(bounds[3], abs=0.6)


@needs_model
def test_nobody_speaks_in_silence_and_noise():
    for samples in (np.zeros(1, np.float32), np.zeros(70_000, np.float32), quiet(5)):
        assert speech(samples, SpeechRules(0.16)) == []


@needs_model
def test_blocks_do_not_change_what_is_found_and_an_error_after_one_ends_the_work(monkeypatch):
    samples, num_blocks = vowels(2), []
    whole = speech(samples, SpeechRules(0.16))
    monkeypatch.setattr(voice_activity, "_BLOCK", 7)
    assert speech(samples, SpeechRules(0.16), lambda: num_blocks.append(1)) == whole != []
    assert len(num_blocks) == math.ceil(len(samples) / 512 / 7)

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        speech(samples, SpeechRules(0.16), stop)


def test_without_the_file_of_the_model_the_error_is_our_own(monkeypatch):
    voice_activity._session.cache_clear()
    monkeypatch.setattr(voice_activity, "_FILES", (("numpy", "no.onnx"), ("no_such_package", "no.onnx")))
    try:
        with pytest.raises(MissingVoiceActivityError):
            speech(vowels(0), SpeechRules(0.16))
    finally:
        voice_activity._session.cache_clear()
    assert "faster_whisper" not in sys.modules


@needs_model
@pytest.mark.parametrize("sizes", [[1, 511, 3], [512], [40_000]])
def test_speech_of_a_stream_is_that_of_the_whole_sound(sizes):
    samples = np.concatenate([quiet(1), vowels(0), quiet(2), vowels(0), quiet(1.3)])
    samples = samples[: len(samples) // 512 * 512]
    rules, spans, place, number = SpeechRules(0.3), [], 0, 0
    stream = SpeechStream(rules)
    while place < len(samples):
        size = sizes[number % len(sizes)]
        for ended, begin in stream.push(samples[place : place + size]):
            assert begin == stream.begin
            spans += [] if ended is None else [ended]
        place, number = place + size, number + 1
    spans += [ended for ended, _ in stream.finish() if ended is not None]
    assert spans == list(voice_activity._speech(samples, rules, lambda: None)) != []


@needs_model
def test_the_servers_own_graph_has_the_probabilities_of_the_models():
    spec = find_spec("faster_whisper")
    if spec is None or spec.origin is None:
        pytest.skip("another package has another version of the model")
    model = (Path(spec.origin).parent / "assets" / "silero_vad_v6.onnx").read_bytes()
    arranged = voice_activity._arranged(model)
    assert arranged != model
    heard = np.concatenate([np.zeros(64, np.float32), vowels(3), quiet(1)])
    chunks = np.lib.stride_tricks.sliding_window_view(heard, 576)[::512]
    own, given = small_session(arranged), small_session(model)
    states = {session: voice_activity._first_state() for session in (own, given)}
    for first, count in ((0, 1), (1, 7), (8, len(chunks) - 8)):
        feed = {"input": chunks[first : first + count].copy()}
        its, expected = (session.run(None, feed | states[session]) for session in (own, given))
        for one, other in zip(its, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)  # sums of another order
        states = {
            own: dict(zip("hc", its[1:], strict=True)),
            given: dict(zip("hc", expected[1:], strict=True)),
        }
    assert its[0].max() > 0.5 > its[0].min()


def test_another_version_of_the_model_runs_by_its_own_graph():
    assert voice_activity._arranged(b"another") == b"another"
