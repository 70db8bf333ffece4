"""Times of tokens are those of transformers' dynamic time warping, and words are joined from tokens."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from seq2seq_serve.bundle.manifest import Timestamps
from seq2seq_serve.server.errors import Cancelled
from seq2seq_serve.server.service.write.word_times import token_starts, token_times, words_of
from tests.server.service.harness import byte_tokenizer

TIMES = Timestamps(100, 150, 0.02, 99)


def go_on() -> None:
    """Work is not ended."""


def random_attention(num_tokens: int, num_heads: int, num_positions: int, seed: int) -> np.ndarray:
    """Attention that moves forward, with noise, as softmax makes it."""
    chance = np.random.default_rng(seed)
    near = -(
        ((np.arange(num_positions) / num_positions - np.arange(num_tokens)[:, None] / num_tokens) * 6) ** 2
    )
    scores = near[:, None] + chance.standard_normal((num_tokens, num_heads, num_positions))
    return torch.tensor(scores).softmax(-1).float().numpy()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 9), (5, 1, 4), (9, 3, 40), (30, 6, 200), (200, 2, 20)])
def test_tokens_begin_where_transformers_path_enters_their_rows(shape):
    for seed in range(3):
        attention = random_attention(*shape, seed)
        weights = torch.tensor(attention.astype(np.float64)).permute(1, 0, 2)  # (H, T, S)
        weights = weights / weights.sum(-1, keepdim=True)
        deviation = weights.std(-2, unbiased=False, keepdim=True)
        weights = (weights - weights.mean(-2, keepdim=True)) / deviation.where(deviation > 0, 1)
        rows, columns = _dynamic_time_warping(
            -_median_filter(weights, min(7, 2 * shape[2] - 1)).mean(0).numpy()
        )
        entered = np.r_[True, np.diff(rows) > 0]
        assert token_starts(attention, shape[2], go_on) == columns[entered].tolist()


def test_padding_after_the_sound_and_times_in_the_target_do_not_count():
    attention = random_attention(8, 2, 50, 0)
    ids = [100, 5, 6, 104, 104, 7, 108]  # the last row is that of the end of sequence
    rows = [1, 2, 5, 7]
    starts = [0.02 * start for start in token_starts(attention[rows], 30, go_on)]
    times = token_times(attention, ids, TIMES, 0.59, 0.02, go_on)
    assert times == {
        1: (starts[0], starts[1]),
        2: (starts[1], starts[2]),
        5: (starts[2], min(starts[3], 0.59)),
    }
    without_end = token_times(attention[:7], ids, TIMES, 0.59, 0.02, go_on)
    assert without_end[5][1] == 0.59
    assert token_times(attention, [100, 101], TIMES, 0.59, 0.02, go_on) == {}


def test_the_work_ends_between_two_heads():
    checks = []

    def end_before_the_second():
        checks.append(None)
        if len(checks) == 2:
            raise Cancelled("the caller has left")

    with pytest.raises(Cancelled):
        token_times(random_attention(8, 3, 50, 0), range(8), TIMES, 0.59, 0.02, end_before_the_second)
    assert len(checks) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" We hold (these) truths", [" We", " hold", " (these)", " truths"]),
        (' He said: "yes!" ...', [" He", " said:", ' "yes!" ...']),
        (" - a self-evident 3.5%", [" - a", " self-evident", " 3.5%"]),
        (" ¿Qué tal? ¡Hola!", [" ¿Qué", " tal?", " ¡Hola!"]),
        ("在北京。他说：「好的」，走", ["在", "北", "京。", "他", "说：", "「好", "的」，", "走"]),
        ("コーヒーを飲む。", ["コ", "ー", "ヒ", "ー", "を", "飲", "む。"]),
        ("สวัสดี ผม", ["ส", "วั", "ส", "ดี", " ผ", "ม"]),
        (" 오늘은 좋다, 그렇지?", [" 오늘은", " 좋다,", " 그렇지?"]),
        (" ok好ok", [" ok", "好", "ok"]),
        (" ♪♪", [" ♪♪"]),
        ("", []),
    ],
)
def test_words_have_the_marks_beside_them_and_the_tokens_of_their_letters(text, words):
    tokenizer = byte_tokenizer()
    token_ids = tokenizer.encode(text)
    found = words_of(token_ids, tokenizer)
    assert [word.text for word in found] == words
    assert "".join(words) == tokenizer.decode(token_ids)
    for before, word in pairwise(found):
        assert before.last < word.first
    for word in found:
        letters = tokenizer.decode(token_ids[word.first : word.last + 1])
        assert letters in word.text
        assert "♪" in text or (letters[0].isalnum() and letters[-1] not in ".,:!?。，：")


def test_a_character_that_is_not_complete_ends_the_last_word():
    tokenizer = byte_tokenizer()
    token_ids = [*tokenizer.encode(" a"), *tokenizer.encode("é")[:1]]
    assert [word.text for word in words_of(token_ids, tokenizer)] == [" a\ufffd"]
