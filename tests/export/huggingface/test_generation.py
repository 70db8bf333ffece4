"""The settings of `generate` become the manifest's defaults."""

import pytest

from seq2seq_serve.bundle.manifest import Generation
from seq2seq_serve.export.huggingface.checkpoint import CheckpointError
from seq2seq_serve.export.huggingface.generation import eos_ids, generation_of, left_out


def test_without_settings_the_rules_are_those_of_generate():
    assert generation_of({}, 1, 512) == Generation(
        length_penalty=1.0,
        length_penalty_formula="power",
        early_stopping=False,
        is_renormalized=False,
        penalizes_log_probabilities=True,
        repeats_start=True,
    )


def test_lengths_do_not_count_the_start_tokens():
    generation = generation_of({"max_length": 142, "min_length": 56}, 1, 1024)
    assert (generation.max_new_tokens, generation.min_new_tokens) == (141, 55)
    assert generation_of({"max_length": 142, "max_new_tokens": 9}, 1, 1024).max_new_tokens == 9
    assert generation_of({"max_length": 2000}, 1, 1024).max_new_tokens == 1024
    assert generation_of({"min_length": 0}, 1, 1024).min_new_tokens == 0


def test_settings_of_a_marian_checkpoint():
    generation = generation_of(
        {"num_beams": 6, "bad_words_ids": [[58100]], "renormalize_logits": True, "forced_eos_token_id": 0},
        1,
        512,
    )
    assert generation.beam_size == 6
    assert generation.suppressed_token_ids == (58100,)
    assert generation.is_renormalized
    assert generation.forced_eos_id == 0


@pytest.mark.parametrize(
    ("given", "expected"), [(True, True), (False, False), (None, False), ("never", "never")]
)
def test_early_stopping_has_three_values(given, expected):
    assert generation_of({"early_stopping": given}, 1, 9).early_stopping == expected


def test_an_unknown_early_stopping_is_refused():
    with pytest.raises(
        CheckpointError, match=r"early_stopping is 'soon', and must be true, false or 'never'"
    ):
        generation_of({"early_stopping": "soon"}, 1, 9)


def test_several_tokens_may_end_a_target():
    assert eos_ids({"eos_token_id": [2, 5]}, {}) == (2, 5)
    assert eos_ids({"eos_token_id": 2}, {"eos_token_id": 3}) == (2,)
    assert eos_ids({}, {"eos_token_id": 3}) == (3,)
    with pytest.raises(CheckpointError, match=r"has no eos_token_id"):
        eos_ids({}, {})


def test_settings_that_are_not_taken_over_are_named():
    assert left_out({"num_beams": 4, "do_sample": False, "bad_words_ids": [[3]]}) == []
    assert left_out({"do_sample": True, "num_beam_groups": 2}) == ["do_sample", "num_beam_groups"]


def test_bad_words_are_tokens_or_sequences_and_no_end():
    settings = {
        "bad_words_ids": [[9], [3, 4], [2], [2, 5, 7]],
        "eos_token_id": [1, 2],
        "suppress_tokens": [8],
    }
    generation = generation_of(settings, 1, 9)
    assert generation.suppressed_token_ids == (8, 9)
    assert generation.forbidden_sequences == ((3, 4), (2, 5, 7))
