"""Live speech decodes what it heard in a short window, and in a whole one where the model repeats itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from seq2seq_serve.bundle.audio import HOP, SAMPLE_RATE, GrowingSound
from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.bundle.names import SOUND
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import FinishReason, Hypothesis, Result, Timings
from seq2seq_serve.server.service.live.short_windows import decode_short
from seq2seq_serve.server.service.read.inputs import position_seconds, short_window
from seq2seq_serve.server.service.write.word_times import token_times

NUM_MELS, NUM_FRAMES = 12, 3_000
TIMES = Timestamps(50, 60, 0.02, 49)
GOOD, LOOP = "one two three", "and so on " * 20


class Tokenizer:
    texts = GOOD, LOOP

    def decode(self, token_ids):
        return self.texts[token_ids[0]]


def whisper(*, takes_short_windows=True, num_frames=NUM_FRAMES):
    return SimpleNamespace(
        sources={SOUND: SimpleNamespace(axes=(NUM_MELS, num_frames))},
        takes_short_windows=takes_short_windows,
        max_memory_length=num_frames // 2,
        target_tokenizer=Tokenizer(),
        manifest=SimpleNamespace(timestamps=TIMES),
    )


RULES = SimpleNamespace(max_compression_ratio=2.4)


@pytest.mark.parametrize(
    ("seconds", "window"),
    [(0.1, 10), (3, 10), (8, 10), (8.01, 11), (12.3, 15), (28, 30), (29.9, 30), (31, 30)],
)
def test_a_window_has_two_seconds_of_silence_and_few_lengths(seconds, window):
    num_samples = round(seconds * SAMPLE_RATE)
    assert short_window(num_samples, whisper()) == window * SAMPLE_RATE / HOP
    assert short_window(num_samples, whisper(takes_short_windows=False)) == NUM_FRAMES
    assert short_window(num_samples, whisper(num_frames=400)) == 400, "a model with shorter windows"


def heard(seconds: float, num_frames: int) -> np.ndarray:
    sound = GrowingSound(NUM_MELS)
    sound.push(np.random.default_rng(0).uniform(-1, 1, int(seconds * SAMPLE_RATE)).astype(np.float32))
    return sound.log_mel(0, sound.num_samples, num_frames)


async def decoded(place, reason=FinishReason.EOS, num_frames=500, **options):
    """The windows that are decoded of three seconds, and whether each is one more of the same sound."""
    calls = []

    async def decode(request, is_repeated):
        calls.append((dict(request.sources), request.memory_length, is_repeated))
        request.drop_arrays()
        best = Hypothesis((place if len(calls) == 1 else 0,), reason, [])
        return Result(reason, (best,), 0, request.memory_length, Timings(0, 0, 0, 0))

    request = Request("r", {SOUND: heard(3, num_frames)}, num_frames // 2, 80, 0.0, **options)
    result = await decode_short(decode, whisper(), RULES, request, False)
    assert result.num_source_tokens == calls[-1][1]
    return calls


async def test_a_text_that_repeats_itself_is_decoded_again_in_a_whole_window():
    for place, reason in ((1, FinishReason.EOS), (0, FinishReason.LENGTH)):
        short, whole = await decoded(place, reason)
        assert (short[1:], whole[1:]) == ((250, False), (1_500, True))
        np.testing.assert_array_equal(short[0][SOUND], heard(3, 500))
        np.testing.assert_array_equal(whole[0][SOUND], heard(3, NUM_FRAMES))


async def test_other_texts_are_decoded_once():
    assert len(await decoded(0)) == 1
    assert len(await decoded(1, num_frames=NUM_FRAMES)) == 1, "there is no longer window"
    assert len(await decoded(1, FinishReason.LENGTH, is_score=True)) == 1, "its text is given"


def test_times_of_words_do_not_depend_on_the_window():
    starts = [0, 40, 100, 149]  # a position has 20 milliseconds
    attention = np.full((5, 2, 1_500), 1e-3, np.float32)
    for row, begin in enumerate([*starts, 150]):
        attention[row, :, begin : [*starts, 150, 1_500][row + 1]] = 1
    short, whole = (
        token_times(
            attention[..., :length], [1, 2, 3, 4], TIMES, 3.0, position_seconds(whisper()), lambda: None
        )
        for length in (250, 1_500)
    )
    assert short == whole
    assert [round(begin / 0.02) for begin, _ in whole.values()] == pytest.approx(starts, abs=4)
