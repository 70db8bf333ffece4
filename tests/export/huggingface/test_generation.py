"""The settings of `generate` become the manifest's defaults."""

import pytest

from seq2seq_serve.bundle.manifest import Generation
from seq2seq_serve.export.huggingface.generation import generation_of, left_out
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, eos_ids


def test_without_settings_the_rules_are_those_of_generate():
    assert generation_of({"eos_token_id": 2}, 1, 512, 600) == Generation(
        length_penalty=1.0,
        length_penalty_formula="power",
        early_stopping=False,
        is_renormalized=False,
        penalizes_log_probabilities=True,
        repeats_start=True,
    )


def test_lengths_do_not_count_the_start_tokens():
    generation = generation_of({"eos_token_id": 2, "max_length": 142, "min_length": 56}, 1, 1024, 600)
    assert (generation.max_new_tokens, generation.min_new_tokens) == (141, 55)
    for settings, expected in (
        ({"max_length": 142, "max_new_tokens": 9}, (9, 0)),
        ({"max_length": 2000}, (1024, 0)),
        ({"min_length": 0}, (None, 0)),
    ):
        found = generation_of({"eos_token_id": 2, **settings}, 1, 1024, 600)
        assert (found.max_new_tokens, found.min_new_tokens) == expected


def test_settings_of_a_marian_checkpoint_become_defaults_of_requests():
    settings = {"num_beams": 6, "bad_words_ids": [[58100]], "renormalize_logits": True}
    settings |= dict.fromkeys(["eos_token_id", "forced_eos_token_id"], 0)
    generation = generation_of(settings, 1, 512, 58101)
    assert generation.beam_size == 6
    assert generation.suppressed_token_ids == (58100,)
    assert generation.is_renormalized
    assert generation.forced_eos_id == 0


@pytest.mark.parametrize(
    ("given", "expected"), [(True, True), (False, False), (None, False), ("never", "never")]
)
def test_early_stopping_has_three_values(given, expected):
    assert generation_of({"eos_token_id": 2, "early_stopping": given}, 1, 9, 9).early_stopping == expected


def test_an_unknown_early_stopping_is_refused():
    with pytest.raises(CheckpointError, match="early_stopping is 'soon'"):
        generation_of({"eos_token_id": 2, "early_stopping": "soon"}, 1, 9, 9)


def test_several_tokens_may_end_a_target():
    assert eos_ids({"eos_token_id": [2, 5]}, 9) == (2, 5)
    assert eos_ids({"eos_token_id": 2}, 9) == (2,)
    assert eos_ids({"eos_token_id": [2, 9, -1]}, 9) == (2,)  # no target has the others
    for none in ({}, {"eos_token_id": None}, {"eos_token_id": []}, {"eos_token_id": 9}):
        with pytest.raises(CheckpointError, match=r"eos_token_id .* 9 tokens"):
            eos_ids(none, 9)


def test_suppressed_tokens_that_no_target_has_are_ignored():
    """Many files of Whisper have [-1], and pruned vocabularies keep the old ids."""
    settings = {"suppress_tokens": [-1, 3, 99], "begin_suppress_tokens": [-1, 99, 4], "eos_token_id": 2}
    generation = generation_of(settings, 1, 9, 10)
    assert (generation.suppressed_token_ids, generation.begin_suppressed_token_ids) == ((3,), (4,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words_ids", [[3, 10]]),
        ("bad_words_ids", [[10]]),
        ("forced_bos_token_id", 10),
        ("forced_eos_token_id", 10),
        ("decoder_start_token_id", 10),
    ],
)
def test_tokens_that_generate_refuses_are_refused(name, value):
    with pytest.raises(CheckpointError, match=f"{name} has 10"):
        generation_of({"eos_token_id": 2, name: value}, 1, 9, 10)


def test_settings_that_are_not_taken_over_are_named():
    assert left_out({"num_beams": 4, "do_sample": False, "bad_words_ids": [[3]]}) == []
    assert left_out({"do_sample": True, "num_beam_groups": 2}) == ["do_sample", "num_beam_groups"]
    assert left_out({"num_return_sequences": 1, "stop_strings": None}) == []
    given = {"num_return_sequences": 2, "stop_strings": ["."], "max_time": 2.0}
    assert left_out(given) == list(given)


@pytest.mark.parametrize("given", [[-1, 8, 10, 10**9], [8, "9", None], 8, "8", {}])
def test_suppressed_tokens_that_targets_lack_are_ignored(given):
    generation = generation_of(
        {"eos_token_id": 2, "suppress_tokens": given, "begin_suppress_tokens": given}, 1, 9, 10
    )
    expected = (8,) if isinstance(given, list) else ()
    assert generation.suppressed_token_ids == generation.begin_suppressed_token_ids == expected


def test_bad_words_are_tokens_or_sequences_and_no_end():
    settings = {
        "bad_words_ids": [[9], [3, 4], [2], [2, 5, 7]],
        "eos_token_id": [1, 2],
        "suppress_tokens": [8],
    }
    generation = generation_of(settings, 1, 9, 10)
    assert generation.suppressed_token_ids == (8, 9)
    assert generation.forbidden_sequences == ((3, 4), (2, 5, 7))
