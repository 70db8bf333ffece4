"""The settings of `generate` become the manifest's defaults."""

import pytest

from seq2seq_serve.bundle.manifest import Generation
from seq2seq_serve.export.huggingface.generation import generation_of, left_out
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, eos_ids


def generation(settings, vocab_size=600):
    return generation_of({"eos_token_id": 2} | settings, 1, 1024, vocab_size)


def test_without_settings_the_rules_are_those_of_generate():
    assert generation({}) == Generation(
        length_penalty=1.0,
        length_penalty_formula="power",
        early_stopping=False,
        is_renormalized=False,
        penalizes_log_probabilities=True,
        repeats_start=True,
    )


# Many files of Whisper suppress [-1], and pruned vocabularies keep the old ids.
IGNORED = ([-1, 8, 600, 10**9], [8, "9", None], 8, "8", {})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Lengths do not count the start token.
        ({"max_length": 142, "min_length": 56}, {"max_new_tokens": 141, "min_new_tokens": 55}),
        ({"max_length": 142, "max_new_tokens": 9}, {"max_new_tokens": 9, "min_new_tokens": 0}),
        ({"max_length": 2000}, {"max_new_tokens": 1024}),
        ({"min_length": 0}, {"max_new_tokens": None, "min_new_tokens": 0}),
        ({"num_beams": 6, "bad_words_ids": [[581]]}, {"beam_size": 6, "suppressed_token_ids": (581,)}),
        ({"renormalize_logits": True}, {"is_renormalized": True}),
        ({"forced_eos_token_id": 0, "eos_token_id": 0}, {"forced_eos_id": 0}),
        *(({"early_stopping": given}, {"early_stopping": given}) for given in (True, False, "never")),
        ({"early_stopping": None}, {"early_stopping": False}),
        *(
            (
                {"suppress_tokens": given, "begin_suppress_tokens": given},
                dict.fromkeys(
                    ["suppressed_token_ids", "begin_suppressed_token_ids"], (8,) * isinstance(given, list)
                ),
            )
            for given in IGNORED
        ),
        (  # bad words are tokens or sequences and no end
            {
                "bad_words_ids": [[9], [3, 4], [2], [2, 5, 7]],
                "eos_token_id": [1, 2],
                "suppress_tokens": [8],
            },
            {"suppressed_token_ids": (8, 9), "forbidden_sequences": ((3, 4), (2, 5, 7))},
        ),
    ],
)
def test_settings_become_defaults_of_requests(settings, expected):
    found = vars(generation(settings))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        *(({"bad_words_ids": ids}, "bad_words_ids has 10") for ids in ([[3, 10]], [[10]])),
        *(
            ({name: 10}, f"{name} has 10")
            for name in ("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id")
        ),
    ],
)
def test_settings_that_generate_refuses_are_refused(settings, match):
    with pytest.raises(CheckpointError, match=match):
        generation(settings, vocab_size=10)


def test_several_tokens_may_end_a_target():
    assert eos_ids({"eos_token_id": [2, 5]}, 9) == (2, 5)
    assert eos_ids({"eos_token_id": 2}, 9) == (2,)
    assert eos_ids({"eos_token_id": [2, 9, -1]}, 9) == (2,)  # no target has the others
    for none in ({}, {"eos_token_id": None}, {"eos_token_id": []}, {"eos_token_id": 9}):
        with pytest.raises(CheckpointError, match=r"eos_token_id .* 9 tokens"):
            eos_ids(none, 9)


def test_settings_that_are_not_taken_over_are_named():
    assert left_out({"num_beams": 4, "do_sample": False, "bad_words_ids": [[3]]}) == []
    assert left_out({"do_sample": True, "num_beam_groups": 2}) == ["do_sample", "num_beam_groups"]
    assert left_out({"num_return_sequences": 1, "stop_strings": None}) == []
    given = {"num_return_sequences": 2, "stop_strings": ["."], "max_time": 2.0}
    assert left_out(given) == list(given)
