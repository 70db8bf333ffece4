"""The options in which Transformers differ. The defaults are those of the paper.

`training.config.TransformerConfig` is the configuration of the paper's Transformer, and `PublishedConfig`
that of models that others published (`training.huggingface`); `training.models.transformer` reads both as
`Architecture`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle.checked import checked
from seq2seq_serve.training.config import AtLeast0, Count, ModelConfig, Share, TargetFrame, TransformerConfig
from seq2seq_serve.training.huggingface.pictures import Patches
from seq2seq_serve.training.huggingface.sounds import Sounds

# T query positions   S key positions   H heads   K d_head

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
NormKind = Literal["layer", "rms"]
PositionKind = Literal["paper", "halves", "tensor2tensor", "learned"]

ALL_MAPS = frozenset({"query", "key", "value", "output", "gate", "inner", "outer"})


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings (Su et al. 2021, arXiv:2104.09864, section 3.2), with halves for pairs.

    Attributes:
        base: Pair i of K / 2 turns by base^(-2 i / K) from one position to the next.
        factor: Divides all angles, which stretches positions (Chen et al. 2023, arXiv:2306.15595).
    """

    base: float
    factor: float = 1.0

    def angles(self, positions: Tensor, d_head: int) -> Tensor:
        """The angles (…, K / 2) at positions (…)."""
        exponents = torch.arange(0, d_head, 2, dtype=torch.int64, device=positions.device).float() / d_head
        return positions[..., None].float() * (1.0 / self.base**exponents / self.factor)


@dataclass(frozen=True)
class LayerKind:
    """How the self-attention of one layer treats positions; layers of a stack may differ in it.

    Attributes:
        window: The largest distances of a key before and after its query; None for all positions.
        rotary: Rotates queries and keys; None does not.
    """

    window: tuple[int, int] | None = None
    rotary: Rotary | None = None

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query (…, T) sees each key (S,), as far as the window is concerned: (…, T, S)."""
        assert self.window is not None
        before, after = self.window
        distances = queries[..., None] - keys
        return (distances <= before) & (distances >= -after)


@dataclass(frozen=True)
class Positions:
    """The vectors that are added to embeddings.

    Attributes:
        kind: "learned", or a formula: the paper's, or one of `training.models.positions`.
        count: The most positions.
        first: The number of the first position in the formula, or its row in a published table.
    """

    kind: PositionKind
    count: int
    first: int = 0


@dataclass(frozen=True)
class Buckets:
    """The distances that share a bias of attention scores.

    Raffel et al. 2020, arXiv:1910.10683, section 2.1.

    Attributes:
        count: The number of buckets.
        max_distance: The distance from which on all distances have one bias.
        is_two_sided: Whether keys after their query have buckets of their own, half of all.
    """

    count: int
    max_distance: int
    is_two_sided: bool


@checked(strict=True)
class StackConfig:
    """The encoder or the decoder.

    Attributes:
        num_heads: The heads together need not be as wide as the model.
        num_key_value_heads: G, which divides H: H / G heads have the same keys and values (Ainslie et al.
            2023, arXiv:2305.13245).
        activation: The feed-forward network's function.
        is_gated: Whether the feed-forward network multiplies two maps, of which one is activated.
        norm_epsilon: Added to the variance in norms.
        norm_kind: The kind of the norms.
        is_pre_norm: Whether norms are before the sublayers, and one at the end of the stack.
        has_embedding_norm: Whether the sum of token and position has a norm.
        has_output_norms: Whether the outputs of sublayers have norms, too.
        has_head_norms: Whether queries and keys have norms, each head for itself.
        attention_scale: The factor of attention scores.
        score_cap: c; scores s of attentions become c tanh(s / c); None leaves them.
        embedding_scale: The factor of token embeddings.
        unbiased: The maps of the layers that have no bias, of `ALL_MAPS`.
        kinds: How each layer treats positions; () if it is all the same to all of them.
        positions: The vectors that are added to embeddings; None adds none.
        zero_position_id: The token whose position is a vector of zeros; None if all tokens have positions.
        buckets: Those of the bias of self-attention scores; None without such a bias.
        unscaled_id: The token whose embedding is not in the matrix, and is not scaled; None if there is none.
    """

    d_model: Count
    num_layers: Count
    num_heads: Count
    num_key_value_heads: Count
    d_head: Count
    d_ff: Count
    _: KW_ONLY
    attention_scale: float
    activation: Activation = "relu"
    is_gated: bool = False
    norm_epsilon: AtLeast0 = 1e-5
    norm_kind: NormKind = "layer"
    is_pre_norm: bool = False
    has_embedding_norm: bool = False
    has_output_norms: bool = False
    has_head_norms: bool = False
    score_cap: float | None = None
    embedding_scale: float = 1.0
    unbiased: frozenset[str] = frozenset()
    kinds: tuple[LayerKind, ...] = ()
    positions: Positions | None = None
    zero_position_id: int | None = None
    buckets: Buckets | None = None
    unscaled_id: int | None = None

    @classmethod
    def of_paper(
        cls, d_model: int, num_heads: int, d_ff: int = 1, num_layers: int = 1, **options: Any
    ) -> StackConfig:
        """A stack of Vaswani et al. 2017, whose heads together are as wide as the model."""
        K = d_model // num_heads
        return cls(
            d_model,
            num_layers,
            num_heads,
            num_heads,
            K,
            d_ff,
            attention_scale=1 / math.sqrt(K),
            embedding_scale=math.sqrt(d_model),
            **options,
        )

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """`kinds`, one for each layer."""
        return self.kinds or (LayerKind(),) * self.num_layers

    @property
    def has_plain_attention(self) -> bool:
        """Whether self-attention is as in Vaswani et al. 2017, except for scale and bias of its scores."""
        is_grouped = self.num_key_value_heads != self.num_heads
        return not is_grouped and self.score_cap is None and set(self.layer_kinds) == {LayerKind()}

    def make_norm(self, width: int, *, exists: bool = True) -> nn.Module:
        """A norm of the stack's kind; the identity if there is none."""
        if not exists:
            return nn.Identity()
        kind = nn.RMSNorm if self.norm_kind == "rms" else nn.LayerNorm
        return kind(width, eps=self.norm_epsilon)


@dataclass(frozen=True)
class Architecture:
    """What a Transformer is, besides the sizes that every family of models has.

    Attributes:
        source_vocab_size: The number of source tokens; 0 for a model that does not read texts.
        media: The sounds or pictures that the model reads; None for a model that reads texts.
        alignment_heads: The (layer, head) pairs of the decoder whose attention aligns targets with sources,
            in order; empty for the mean over the heads of one layer.
        has_source_embedding: Whether source tokens have a matrix of their own.
        has_output: Whether the projection to logits has a matrix of its own.
        has_output_bias: Whether a bias is added to logits.
        output_scale: The factor of decoder states before the projection.
        logits_cap: c; logits z become c tanh(z / c); None leaves them.
        is_merged: Whether the decoder's self-attention reads the memory, too, in one softmax. Its layers then
            have no `cross_attention`, and the memory has keys and values of `self_attention`.
    """

    _: KW_ONLY
    source_vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    has_source_embedding: bool = False
    has_output: bool = False
    has_output_bias: bool = False
    output_scale: float = 1.0
    logits_cap: float | None = None
    is_merged: bool = False
    media: Sounds | Patches | None = None
    alignment_heads: tuple[tuple[int, int], ...] = ()


@checked(strict=True)
class PublishedConfig(Architecture, ModelConfig):
    """The configuration of a model that others published.

    Attributes:
        attention_dropout: Dropout of the attention weights.
        target_frame: The tokens around targets; None if the model is only exported.
    """

    _: KW_ONLY
    attention_dropout: Share = 0.0
    target_frame: TargetFrame | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name; those of `media` with the name of its class, and without a folder."""
        content = super().to_json()
        if self.media is not None:
            content["media"] |= {"kind": type(self.media).__name__}
            del content["media"]["folder"]
        for name in ("encoder", "decoder"):
            content[name]["unbiased"] = sorted(content[name]["unbiased"])
        return content

    @property
    def frame(self) -> TargetFrame:
        assert self.target_frame is not None
        return self.target_frame

    @property
    def sizes(self) -> dict[str, int]:
        """The model's sizes, for the manifest."""
        return {
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "d_ff": self.decoder.d_ff,
            "d_head": self.decoder.d_head,
            "num_heads": self.decoder.num_heads,
            "num_encoder_layers": self.encoder.num_layers,
            "num_decoder_layers": self.decoder.num_layers,
        }

    @property
    def free_in_a_child(self) -> tuple[str, ...]:
        """Not the limits of lengths, by which the tables of positions are made."""
        return "dropout", "word_dropout", "attention_dropout"


def architecture_of(config: TransformerConfig | PublishedConfig) -> Architecture:
    """The options of the paper's Transformer, or those of a published model."""
    if isinstance(config, PublishedConfig):
        return config
    positions = Positions("paper", max(config.max_source_length, config.max_target_length))
    encoder, decoder = (
        StackConfig.of_paper(
            config.d_model,
            config.num_heads,
            config.d_ff,
            num_layers,
            is_pre_norm=config.norm == "pre",
            positions=positions,
        )
        for num_layers in (config.num_encoder_layers, config.num_decoder_layers)
    )
    return Architecture(source_vocab_size=config.vocab_size, encoder=encoder, decoder=decoder)
