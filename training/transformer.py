"""The Transformer of Vaswani et al. 2017 (arXiv:1706.03762): one class a box of its figure 1.

Its two verbs are `encode` and `decode`; how a target is searched for stands in `training.search`.

Shapes: B batch rows, S source length, T target length, D d_model, H heads, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from training.attention import MultiHeadAttention, causal_mask
from training.config import TransformerConfig
from training.dropout import Dropout, dropout

LAYER_NORM_EPS = 1e-5


def sinusoidal_positions(max_length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).

    Vaswani et al. 2017, section 3.5, arXiv:1706.03762. `(max_length, D)`, float32, computed in
    float64.
    """
    position = torch.arange(max_length, dtype=torch.float64)[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position / 10000 ** (even / d_model)  # (max_length, D / 2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()


def alignment_layer(num_decoder_layers: int) -> int:
    """The layer whose heads' mean aligns best: the last but one (Garg et al. 2019, arXiv:1909.02074)."""
    return max(num_decoder_layers - 2, 0)


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2, the same at every position: equation 2."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.inner = nn.Linear(d_model, d_ff)
        self.outer = nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        output: Tensor = self.outer(self.inner(x).relu())
        return output


class _Layer(nn.Module):
    """What encoder and decoder layers share: the residual sum around a sub-layer and its norm.

    "post" is the paper's LayerNorm(x + Sublayer(x)), section 3.1; "pre" is x + Sublayer(LayerNorm(x)) of
    Xiong et al. 2020, arXiv:2002.04745. Dropout is on the sub-layer's output, section 5.4.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.is_pre_norm = config.norm == "pre"
        self.dropout = Dropout(config.dropout)

    def _attention(self, config: TransformerConfig) -> MultiHeadAttention:
        return MultiHeadAttention(config.d_model, config.num_heads, config.attention_dropout)

    def _before(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        return norm(x) if self.is_pre_norm else x

    def _after(self, x: Tensor, output: Tensor, norm: nn.LayerNorm) -> Tensor:
        x = x + self.dropout(output)
        return x if self.is_pre_norm else norm(x)


class EncoderLayer(_Layer):
    """Self-attention over the source, then the feed-forward network: figure 1, left."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.self_attention = self._attention(config)
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, mask: Tensor, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """(B, S, D) to (B, S, D), and the self-attention weights (B, H, S, S) if asked for."""
        y = self._before(x, self.self_attention_norm)
        context, weights = self.self_attention(y, y, mask, return_weights)
        x = self._after(x, context, self.self_attention_norm)
        output = self.feed_forward(self._before(x, self.feed_forward_norm))
        return self._after(x, output, self.feed_forward_norm), weights


class DecoderLayer(_Layer):
    """Masked self-attention, attention over the memory, then the feed-forward network: figure 1, right."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.self_attention = self._attention(config)
        self.self_attention_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.cross_attention = self._attention(config)
        self.cross_attention_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.feed_forward_norm = nn.LayerNorm(config.d_model, eps=LAYER_NORM_EPS)

    def forward(
        self,
        x: Tensor,
        causal_mask: Tensor,
        memory: Tensor,
        memory_mask: Tensor,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) to (B, T, D), and the cross-attention weights (B, H, T, S) if asked for."""
        y = self._before(x, self.self_attention_norm)
        context, _ = self.self_attention(y, y, causal_mask)
        x = self._after(x, context, self.self_attention_norm)
        y = self._before(x, self.cross_attention_norm)
        context, weights = self.cross_attention(y, memory, memory_mask, return_weights)
        x = self._after(x, context, self.cross_attention_norm)
        output = self.feed_forward(self._before(x, self.feed_forward_norm))
        return self._after(x, output, self.feed_forward_norm), weights


class Transformer(nn.Module):
    """The whole of figure 1, without the softmax.

    One matrix is the embedding of source and target and the output projection (section 3.4), unless
    `config.tied` says otherwise; embeddings are multiplied by sqrt(D). Differs from the paper in two options:
    with `norm="pre"` each stack ends in a norm, and `word_dropout` leaves out whole tokens.

    Attributes:
        embedding: Of the target, and of whatever else is tied to it.
        source_embedding: None where it is `embedding`.
        output: The projection to logits; None where it is by `embedding`.
    """

    positions: Tensor
    source_embedding: nn.Embedding | None
    output: nn.Linear | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        V, D = config.vocab_size, config.d_model
        self.embedding = nn.Embedding(V, D)
        self.source_embedding = None if config.tied == "all" else nn.Embedding(V, D)
        self.output = nn.Linear(D, V, bias=False) if config.tied == "none" else None
        max_length = max(config.max_source_length, config.max_target_length)
        self.register_buffer("positions", sinusoidal_positions(max_length, config.d_model), persistent=False)
        self.dropout = Dropout(config.dropout)
        self.encoder_layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.encoder_norm = self._final_norm()
        self.decoder_norm = self._final_norm()
        self._initialise()

    @property
    def source_weight(self) -> Tensor:
        """The matrix (V, D) that embeds source tokens."""
        return (self.source_embedding or self.embedding).weight

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) that turns decoder states into logits."""
        return (self.output or self.embedding).weight

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        """Source (B, S), its mask (B, S) with True = a real token, to the memory (B, S, D)."""
        return self._encode(source_ids, source_mask, return_weights=False)[0]

    def encode_with_attention(self, source_ids: Tensor, source_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`encode`, and each layer's self-attention weights (B, H, S, S)."""
        return self._encode(source_ids, source_mask, return_weights=True)

    def decode(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """Logits (B, T, V) of what follows each position of the target (B, T), which starts with bos."""
        return self.project(self.decode_states(target_ids, memory, source_mask))

    def decode_with_attention(
        self, target_ids: Tensor, memory: Tensor, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """`decode`, and each layer's cross-attention weights (B, H, T, S)."""
        states, weights = self._decode_states(target_ids, memory, source_mask, return_weights=True)
        return self.project(states), weights

    def decode_states(self, target_ids: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """`decode` before the output projection, (B, T, D), for callers that need logits of few positions."""
        return self._decode_states(target_ids, memory, source_mask, return_weights=False)[0]

    def project(self, states: Tensor) -> Tensor:
        """Logits (..., V) of decoder states (..., D)."""
        return nn.functional.linear(states, self.output_weight)

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """`encode`, then `decode`: logits (B, T, V)."""
        return self.decode(target_ids, self.encode(source_ids, source_mask), source_mask)

    def _encode(
        self, source_ids: Tensor, source_mask: Tensor, return_weights: bool
    ) -> tuple[Tensor, list[Tensor]]:
        x = self._embed(source_ids, self.source_weight)  # (B, S, D)
        mask = source_mask[:, None, None, :]  # (B, 1, 1, S)
        all_weights = []
        for layer in self.encoder_layers:
            x, weights = layer(x, mask, return_weights)
            all_weights.append(weights)
        return self.encoder_norm(x), all_weights

    def _decode_states(
        self, target_ids: Tensor, memory: Tensor, source_mask: Tensor, return_weights: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # Padding at a target's end needs no mask: no real position sees what stands after it.
        x = self._embed(target_ids, self.embedding.weight)  # (B, T, D)
        causal = causal_mask(target_ids.shape[1], target_ids.device)  # (T, T)
        mask = source_mask[:, None, None, :]  # (B, 1, 1, S)
        all_weights = []
        for layer in self.decoder_layers:
            x, weights = layer(x, causal, memory, mask, return_weights)
            all_weights.append(weights)
        return self.decoder_norm(x), all_weights

    def _embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        length = token_ids.shape[1]
        if length > self.positions.shape[0]:
            raise ValueError(f"{length} positions, and the model has {self.positions.shape[0]}")
        x = nn.functional.embedding(token_ids, weight) * math.sqrt(self.config.d_model)  # (B, length, D)
        if self.training and self.config.word_dropout:
            is_word = torch.ones(*token_ids.shape, 1, device=x.device)
            x = x * dropout(is_word, self.config.word_dropout)
        embedded: Tensor = self.dropout(x + self.positions[:length])
        return embedded

    def _final_norm(self) -> nn.Module:
        if self.config.norm == "pre":
            return nn.LayerNorm(self.config.d_model, eps=LAYER_NORM_EPS)
        return nn.Identity()

    def _initialise(self) -> None:
        # The paper does not say how. Glorot and Bengio 2010 keep each layer's variance; the embedding, times
        # sqrt(D), starts with variance 1, and as the output projection with logits of variance about 1.
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.output:
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for matrix in (self.embedding, self.source_embedding, self.output):
            if matrix is not None:
                nn.init.normal_(matrix.weight, std=self.config.d_model**-0.5)
