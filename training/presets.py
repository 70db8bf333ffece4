"""The presets: each returns the whole configuration of a run, which flags can then change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from seq2seq_serve.training.config import ModelConfig, TrainingConfig, TransformerConfig
from seq2seq_serve.training.models.captioner import CaptionerConfig
from seq2seq_serve.training.models.memory_network import MemoryNetworkConfig
from seq2seq_serve.training.models.recurrent import AttentionName, RecurrentConfig


@dataclass(frozen=True)
class Preset:
    """A model with the recipe that trains it.

    Attributes:
        model: Its `vocab_size` is the tokenizer's maximum. A small corpus gives fewer tokens, and the trained
            model has exactly as many as the tokenizer.
    """

    name: str
    model: ModelConfig
    training: TrainingConfig

    def scaled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings with `learning_rate`, the highest one, as the `learning_rate_scale` that gives it.

        Raises:
            ValueError: It is not a number above 0, both are given, or as `changed`.
        """
        given = dict(settings)
        if (rate := given.pop("learning_rate", None)) is None:
            return given
        if "learning_rate_scale" in given:
            raise ValueError("learning_rate and learning_rate_scale set the same: give one of them")
        if not isinstance(rate, int | float) or not rate > 0:
            raise ValueError(f"learning_rate is {rate!r}, and must be a number above 0")
        preset = self.changed(given)
        # The scale of `training.schedule.learning_rate`, whose highest value is that of step `warmup_steps`.
        scale = rate * math.sqrt(preset.model.d_model * preset.training.warmup_steps)
        return given | {"learning_rate_scale": scale}

    def changed(self, settings: Mapping[str, Any]) -> Preset:
        """Replace fields of the model or recipe; raise ValueError for an unknown field or a wrong value."""
        settings = self.scaled(settings)
        parts: dict[str, Any] = {"model": self.model, "training": self.training}
        owners = {field.name: part for part in parts for field in dataclasses.fields(parts[part])}
        unknown = sorted(settings.keys() - owners)
        if unknown:
            near = dict.fromkeys(name for wrong in unknown for name in get_close_matches(wrong, owners, n=1))
            guess = f" (meant: {', '.join(near)}?)" if near else ""
            raise ValueError(f"unknown settings {', '.join(unknown)}{guess}; there are {', '.join(owners)}")
        for part, config in parts.items():
            changes = {name: value for name, value in settings.items() if owners[name] == part}
            parts[part] = dataclasses.replace(config, **changes)
        return dataclasses.replace(self, **parts)


def demo() -> Preset:
    """The built-in corpus, in minutes on two CPU cores.

    Pre-norm, small batches and no dropout learn most in few steps from a corpus without noise: after 500
    steps of 3000 tokens, post-norm had 91 BLEU on the held-out pairs and pre-norm 98; with pre-norm, after
    450,000 tokens in batches of 1500, dev had 88, and in batches of 750 it had 97. The cool-down helps with
    combinations of words that training never saw: without it, some of them depend on the seed.
    """
    model = _transformer(4000, d_model=128, d_ff=256, num_heads=4, num_layers=2, dropout=0.0, norm="pre")
    training = TrainingConfig(
        max_steps=750,
        batch_tokens=750,
        learning_rate_scale=0.4,
        warmup_steps=200,
        cooldown_share=0.4,
        eval_interval_steps=250,
        checkpoint_interval_steps=50,
        max_length_ratio=None,
    )
    return Preset("demo", model, training)


def tiny() -> Preset:
    """A corpus of some ten thousand pairs, on a CPU.

    The sizes are close to those with which Wu et al. 2021 (arXiv:2105.14462) found that the smallest model is
    the best one for so little text: 2.6 million parameters, with a smaller vocabulary and wider feed-forward
    layers. Their dropout was 0.3; together with BPE dropout that is too much for so few parameters.
    """
    model = _transformer(6000, d_model=128, d_ff=512, num_heads=4, num_layers=4, dropout=0.15, norm="pre")
    training = TrainingConfig(
        max_steps=50_000,
        batch_tokens=2000,
        learning_rate_scale=1.25,
        warmup_steps=2000,
        cooldown_share=0.2,
        eval_interval_steps=1200,
        checkpoint_interval_steps=300,
        num_averaged=10,
        bpe_dropout=0.1,
    )
    return Preset("tiny", model, training)


def small() -> Preset:
    """A corpus of some hundred thousand pairs, on one GPU."""
    model = _transformer(16_000, d_model=256, d_ff=1024, num_heads=4, num_layers=6)
    return Preset("small", model, TrainingConfig(max_steps=50_000, batch_tokens=12_000))


def base() -> Preset:
    """The base model of Vaswani et al. 2017, table 3."""
    model = _transformer(32_000, d_model=512, d_ff=2048, num_heads=8, num_layers=6)
    return Preset("base", model, TrainingConfig())


def big() -> Preset:
    """The big model of Vaswani et al. 2017, table 3."""
    model = _transformer(32_000, d_model=1024, d_ff=4096, num_heads=16, num_layers=6, dropout=0.3)
    return Preset("big", model, TrainingConfig(max_steps=300_000, num_averaged=20))


def _transformer(vocab_size: int, *, num_layers: int, **sizes: Any) -> TransformerConfig:
    """A Transformer with as many encoder layers as decoder layers."""
    return TransformerConfig(
        vocab_size=vocab_size, num_encoder_layers=num_layers, num_decoder_layers=num_layers, **sizes
    )


def recurrent() -> Preset:
    """A recurrent encoder-decoder without attention, for a corpus of some ten thousand pairs, on a CPU.

    Its states are wider than those of the models with attention, because h_last is all that the decoder has
    of the source.
    """
    return _recurrent("recurrent", "none", d_hidden=640)


def recurrent_dot() -> Preset:
    """One with the attention of Luong et al. 2015."""
    return _recurrent("recurrent-dot", "dot", d_hidden=384)


def recurrent_additive() -> Preset:
    """One with the attention of Bahdanau et al. 2015."""
    return _recurrent("recurrent-additive", "additive", d_hidden=384)


def _recurrent(name: str, attention: AttentionName, d_hidden: int) -> Preset:
    """One recipe for all.

    Small batches learn more from the same text: on Multi30k, German to English, the model without attention
    had 14.6 BLEU on dev after a million tokens in batches of 1000, and in batches of 2000, with BPE dropout
    and states of 384, it had 8.8 after twice as many.
    """
    model = RecurrentConfig(
        vocab_size=6000,
        d_model=256,
        d_hidden=d_hidden,
        num_encoder_layers=1,
        num_decoder_layers=1,
        attention=attention,
        dropout=0.3,
    )
    training = TrainingConfig(
        max_steps=6000,
        batch_tokens=1000,
        learning_rate_scale=0.45,
        warmup_steps=600,
        cooldown_share=0.3,
        eval_interval_steps=1000,
        checkpoint_interval_steps=100,
    )
    return Preset(name, model, training)


def memory_network() -> Preset:
    """Questions about stories of all kinds in one model, for the built-in stories.

    With the linear start, and batches of mixed lengths that have all kinds of questions, the model learns
    colours by analogy.
    """
    model = MemoryNetworkConfig(500, 100, max_source_length=50, max_target_length=2, num_linear_steps=1500)
    training = TrainingConfig(
        max_steps=6000,
        batch_tokens=2000,
        mixes_lengths=True,
        label_smoothing=0.0,
        learning_rate_scale=2.8,
        warmup_steps=2000,
        cooldown_share=0.5,
        eval_interval_steps=1000,
        checkpoint_interval_steps=50,
        max_length_ratio=None,
    )
    return Preset("memory-network", model, training)


def memory_network_babi() -> Preset:
    """All tasks of bAbI in one model, as in table 1 of Sukhbaatar et al. 2015, with another recipe.

    benchmarks/LOG.md lists the differences.

    The learning rate is low during the linear start, and highest long after it: with 0.002 and more in the
    linear start, task 16 is not learned. Batches of mixed lengths have all tasks in every batch; with the
    same model and steps, batches of one length had 15.1 % errors instead of 13.7.
    """
    changes = {
        "num_linear_steps": 4200,
        "max_steps": 28_000,
        "batch_tokens": 6400,
        "warmup_steps": 8000,
        "eval_interval_steps": 2000,
        "num_averaged": 10,
        "patience": None,
    }
    return dataclasses.replace(memory_network().changed(changes), name="memory-network-babi")


def captioner() -> Preset:
    """Captions of pictures with the attention of Xu et al. 2015, for the built-in pictures, on a CPU."""
    model = CaptionerConfig(
        vocab_size=400, d_model=128, d_annotation=96, size=56, max_source_length=196, max_target_length=64
    )
    return Preset("captioner", model, _CAPTIONS)


def clip_captioner() -> Preset:
    """Captions of clips with local features and global attention, both of Yao et al. 2015."""
    model = CaptionerConfig(
        vocab_size=400,
        d_model=128,
        d_annotation=96,
        source="clip",
        size=32,
        num_channels=16,
        is_local=True,
        max_source_length=64,
        max_target_length=64,
    )
    return Preset(
        "clip-captioner", model, dataclasses.replace(_CAPTIONS, max_steps=2500, batch_tokens=32 * 24)
    )


_CAPTIONS = TrainingConfig(
    max_steps=8000,
    batch_tokens=32 * 196,
    learning_rate_scale=0.6,
    warmup_steps=400,
    cooldown_share=0.35,
    eval_interval_steps=1000,
    checkpoint_interval_steps=100,
    max_length_ratio=None,
)


PRESETS: dict[str, Callable[[], Preset]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(demo, tiny, small, base, big),
        *(recurrent, recurrent_dot, recurrent_additive),
        *(memory_network, memory_network_babi, captioner, clip_captioner),
    )
}


def preset_named(name: str) -> Preset:
    """The preset of that name; ValueError lists the names that exist."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]()
