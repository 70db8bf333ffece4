"""Whisper's published weights beside faster-whisper, which has the same ones: `PUBLISHED_MODELS=FOLDER`.

FOLDER holds `whisper-tiny.en` in Hugging Face's format, `ct2-tiny.en` as CTranslate2 loads it, and `jfk.wav`.
"""

import os
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve import load
from seq2seq_serve.bundle.audio import SAMPLE_RATE, read_sound
from seq2seq_serve.bundle.names import Precision
from tests.bundle.test_audio import encoded

pytestmark = pytest.mark.slow  # an export of 38 million weights


@pytest.fixture(scope="module")
def folder():
    if not (folder := os.environ.get("PUBLISHED_MODELS")):
        pytest.skip("PUBLISHED_MODELS does not name a folder of whisper-tiny.en, ct2-tiny.en and jfk.wav")
    return Path(folder)


@pytest.fixture(scope="module")
def model(folder, tmp_path_factory):
    from seq2seq_serve.export.huggingface.exporter import export_checkpoint  # imports transformers

    bundle = tmp_path_factory.mktemp("published") / "bundle"
    export_checkpoint(folder / "whisper-tiny.en", bundle, [Precision.FP32])
    with load(bundle) as model:
        yield model


def words_of(segments):
    return [
        (word.text.strip(), word.begin_seconds, word.end_seconds) for one in segments for word in one.words
    ]


def test_words_have_the_times_of_faster_whisper_within_40_milliseconds(folder, model):
    faster_whisper = pytest.importorskip("faster_whisper")
    theirs = faster_whisper.WhisperModel(str(folder / "ct2-tiny.en"), device="cpu", cpu_threads=1)
    segments, _ = theirs.transcribe(str(folder / "jfk.wav"), beam_size=1, word_timestamps=True)
    expected = [(word.word.strip(), word.start, word.end) for one in segments for word in one.words]
    content = (folder / "jfk.wav").read_bytes()
    [answer] = model.generate([content], long_source="sequential", word_timestamps=True)
    found = words_of(answer.hypotheses[0].segments)
    pairs = SequenceMatcher(None, [word for word, *_ in found], [word for word, *_ in expected])
    errors = [
        abs(time - other)
        for block in pairs.get_matching_blocks()
        for place in range(block.size)
        for time, other in zip(found[block.a + place][1:], expected[block.b + place][1:], strict=True)
    ]
    assert len(errors) >= 2 * 20  # of 22 words
    assert np.median(errors) <= 0.04
    assert np.mean(errors) <= 0.1


@pytest.mark.parametrize("long_source", ["sequential", "split"])
def test_voice_activity_leaves_out_noise_and_keeps_the_times(folder, model, long_source):
    pytest.importorskip("faster_whisper")
    speech = read_sound((folder / "jfk.wav").read_bytes(), 30)
    noise = 0.003 * np.random.default_rng(0).standard_normal(40 * SAMPLE_RATE)
    sound = encoded(np.concatenate([noise, speech, noise, speech]), form="FLAC")
    given = {"long_source": long_source, "voice_activity": True, "word_timestamps": True}
    [answer, silent] = model.generate([sound, encoded(noise)], **given)
    words = words_of(answer.hypotheses[0].segments)
    half = len(words) // 2
    assert 20 <= half <= 24
    for first, second in zip(words[:half], words[half:], strict=True):
        assert first[0].casefold().strip(".,") == second[0].casefold().strip(".,")
        assert second[1] - first[1] == pytest.approx(40 + len(speech) / SAMPLE_RATE, abs=0.7)
    assert words[0][1] == pytest.approx(40.3, abs=0.7)
    assert silent.hypotheses[0].text == ""
