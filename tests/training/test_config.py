import dataclasses
from typing import Any

import pytest

from seq2seq_serve.bundle.checked import from_json
from seq2seq_serve.training.config import TrainingConfig, TransformerConfig
from seq2seq_serve.training.presets import preset_named


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 3, "vocab_size is 3, and must be at least 4"),
        ("d_model", 36, "d_model is 36, and must be a multiple of 8 x num_heads, 16"),
        ("num_heads", 1.5, "num_heads is 1.5"),
        ("num_decoder_layers", True, "num_decoder_layers is True"),
        ("dropout", 1.0, "dropout is 1.0, and must be less than 1"),
        ("norm", "both", "norm is 'both', and must be 'post' or 'pre'"),
        ("tied", "source", "tied is 'source', and must be 'all', 'target' or 'none'"),
        ("word_dropout", None, "word_dropout is None, and must be a number"),
    ],
)
def test_wrong_sizes_are_refused_by_name(
    model_config: TransformerConfig, field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(model_config, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_steps", 0),
        ("label_smoothing", 1),
        ("bpe_dropout", 1.0),
        ("source_vectors", 3),
        ("are_vectors_frozen", True),  # without a file of them
        ("learning_rate_scale", 0),
        ("max_gradient_norm", "1"),
        ("patience", 0),
        ("max_length_ratio", 1.0),
        ("seed", -1),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} is"):
        dataclasses.replace(TrainingConfig(), **{field: value})


def test_json_with_a_missing_or_unknown_field_is_refused() -> None:
    content = dataclasses.asdict(TrainingConfig()) | {"learning_rat": 1.0}
    with pytest.raises(ValueError, match=r"^learning_rat is unknown$"):
        from_json(TrainingConfig, content)
    with pytest.raises(ValueError, match=r"vocab_size is missing; .*d_ff is missing"):
        from_json(TransformerConfig, {})
    with pytest.raises(ValueError, match=r"it is \[\], and must be an object"):
        from_json(TrainingConfig, [])


def test_a_field_that_is_younger_than_the_file_has_its_default() -> None:
    content = dataclasses.asdict(TrainingConfig(max_steps=7, bpe_dropout=0.2))
    del content["bpe_dropout"]
    assert from_json(TrainingConfig, content) == TrainingConfig(max_steps=7)


def test_presets_have_the_papers_sizes() -> None:
    base, big, tiny = (preset_named(name).model for name in ("base", "big", "tiny"))
    assert (base.num_encoder_layers, base.d_model, base.d_ff, base.num_heads) == (6, 512, 2048, 8)
    assert (big.num_decoder_layers, big.d_model, big.d_ff, big.num_heads, big.dropout) == (
        6,
        1024,
        4096,
        16,
        0.3,
    )
    assert (tiny.num_encoder_layers, tiny.num_decoder_layers, tiny.d_model, tiny.d_ff) == (4, 4, 128, 512)
    assert base.d_head == 64
