"""What the dialects of checkpoints have in common: how some families name their settings and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from seq2seq_serve.training.huggingface.checkpoint import CheckpointError, CheckpointFolder
from seq2seq_serve.training.models.options import Activation, PositionKind, PublishedConfig

_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
# Parts of names that several dialects have
PROJECTIONS = (
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
)
EMBEDDINGS = (
    (r"^encoder\.embed_tokens\.", "source_embedding."),
    (r"^decoder\.embed_tokens\.", "target_embedding."),
)


@dataclass(frozen=True)
class Dialect:
    """How some families name their settings and weights.

    Attributes:
        options: Reads the settings of a family from those of a checkpoint.
        names: Patterns of a weight's name and their replacements by this project's names, in order.
        unused: The names, after replacement, of weights that are computed instead, or that texts do not need,
            besides those of every family.
        norm_offset: Added to the weights of norms.
    """

    options: Callable[[PublishedFamily, CheckpointFolder, Limits], PublishedConfig]
    names: tuple[tuple[str, str], ...]
    unused: str = ""
    norm_offset: float = 0.0


@dataclass(frozen=True)
class PositionRule:
    """The vectors that a family adds to embeddings.

    Attributes:
        kind: "learned" vectors are weights of the checkpoint.
        offset: The row of the table of the first position.
        is_limited: Whether `max_position_embeddings` is the most positions that the model has.
        skips_pad: Whether the pad token has no position.
    """

    kind: PositionKind
    offset: int = 0
    is_limited: bool = True
    skips_pad: bool = False


@dataclass(frozen=True)
class PublishedFamily:
    """Models that differ in sizes only.

    Attributes:
        name: Also that of its tokenizer's recipe.
        model_type: Of `config.json`.
        dialect: How it names settings and weights.
        positions: The vectors that are added to embeddings.
        tokenizer_class: The class that tells the family from others of its `model_type`; empty for any class.
        activation: The default of `config.json`.
        scales_embedding: The default of `scale_embedding`.
        scales_output: Whether a tied projection divides decoder states by √D.
        shares_embedding: The default of `share_encoder_decoder_embeddings`.
        is_merged: Whether decoder layers read cache and memory at once, and heads have norms.
        longest: The most tokens of a source and of a target by default, for a model without a limit.
        translates_sentences: Whether the models were trained to translate single sentences.
    """

    name: str
    model_type: str
    dialect: Dialect
    positions: PositionRule | None = None
    tokenizer_class: str = ""
    is_pre_norm: bool = True
    has_embedding_norm: bool = False
    activation: str = "gelu"
    scales_embedding: bool = False
    scales_output: bool = False
    shares_embedding: bool = True
    is_merged: bool = False
    longest: int = 1024
    translates_sentences: bool = False


@dataclass(frozen=True)
class Limits:
    """The most tokens of a source, and the most positions of a target; 0 is the family's default."""

    max_source_length: int = 0
    max_target_length: int = 0

    def filled(self, default: int, most: int | None) -> Limits:
        """The limits with the default; a CheckpointError names one above the most positions of the model."""
        for name, given in vars(self).items():
            if most is not None and given > most:
                flag = name.replace("_", "-")
                raise CheckpointError(f"--{flag} is {given}, and the model has {most} positions")
        return Limits(*(given or default for given in vars(self).values()))


def activation_of(name: str) -> Activation:
    """The activation of a name in `config.json`."""
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"the activation {name!r} is not supported; there are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def head_width(d_model: int, num_heads: int) -> int:
    """The width of each head; CheckpointError if the heads do not divide the model's."""
    if d_model % num_heads:
        raise CheckpointError(f"the model is {d_model} wide, and {num_heads} heads do not divide it")
    return d_model // num_heads


def target_limit(limits: Limits, most: int) -> int:
    """The limit of targets of a model that does not read texts."""
    if limits.max_source_length:
        raise CheckpointError("--max-source-length is for texts: all sources of this model are equally long")
    return limits.filled(most, most).max_target_length
