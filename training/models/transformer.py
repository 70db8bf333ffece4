"""The Transformer of Vaswani et al. 2017 (arXiv:1706.03762), with a class for each box of its figure 1.

Shapes: B batch rows, S source length, T target length, D d_model, H heads, K d_head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.models.attention import MultiHeadAttention, causal_mask
from seq2seq_serve.training.models.base import EncoderDecoder, Layers, Memory, State
from seq2seq_serve.training.models.dropout import Dropout

LAYER_NORM_EPS = 1e-5


def sinusoidal_positions(max_length: int, d_model: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).

    Vaswani et al. 2017, section 3.5, arXiv:1706.03762. Returns (max_length, D), float32, computed in float64.
    """
    position = torch.arange(max_length, dtype=torch.float64)[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position / 10000 ** (even / d_model)  # (max_length, D / 2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1).float()


def alignment_layer(num_decoder_layers: int) -> int:
    """The layer whose mean over heads aligns best: the last but one (Garg et al. 2019, arXiv:1909.02074)."""
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
    """The common part of encoder and decoder layers: the residual sum around a sub-layer and its norm.

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
        """(B, S, D) to (B, S, D), and the self-attention weights (B, H, S, S) with `return_weights`."""
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
        """(B, T, D) to (B, T, D), and the cross-attention weights (B, H, T, S) with `return_weights`."""
        y = self._before(x, self.self_attention_norm)
        context, _ = self.self_attention(y, y, causal_mask)
        return self._finish(x, context, memory, memory_mask, return_weights)

    def step(
        self, x: Tensor, past: tuple[Tensor, Tensor], memory: Tensor, memory_mask: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """From one position (B, 1, D) and the keys and values before it: its output, and those up to it."""
        y = self._before(x, self.self_attention_norm)
        key, value = self.self_attention.keys_and_values(y)  # (B, H, 1, K)
        present = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)  # (B, H, T + 1, K)
        context, _ = self.self_attention.attend(self.self_attention.queries(y), *present, mask=None)
        return self._finish(x, context, memory, memory_mask, return_weights=False)[0], present

    def _finish(
        self, x: Tensor, context: Tensor, memory: Tensor, memory_mask: Tensor, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The rest of the layer after its self-attention."""
        x = self._after(x, context, self.self_attention_norm)
        y = self._before(x, self.cross_attention_norm)
        context, weights = self.cross_attention(y, memory, memory_mask, return_weights)
        x = self._after(x, context, self.cross_attention_norm)
        output = self.feed_forward(self._before(x, self.feed_forward_norm))
        return self._after(x, output, self.feed_forward_norm), weights


class Transformer(EncoderDecoder):
    """The whole of figure 1, without the softmax.

    Two options are not in the paper: with `norm="pre"` each stack ends in a norm, and `word_dropout` drops
    whole tokens. The memory is the encoder's output (B, S, D); the state holds the keys and the values of the
    positions so far, each (B, H, T, K), layer by layer.
    """

    config: TransformerConfig
    positions: Tensor
    encoder_layers: Layers[EncoderLayer]
    decoder_layers: Layers[DecoderLayer]

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        max_length = max(config.max_source_length, config.max_target_length)
        self.register_buffer("positions", sinusoidal_positions(max_length, config.d_model), persistent=False)
        self.dropout = Dropout(config.dropout)
        self.encoder_layers = Layers(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.decoder_layers = Layers(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.encoder_norm = self._final_norm()
        self.decoder_norm = self._final_norm()
        self._initialise()

    def encode(self, *source: Tensor) -> Memory:
        source_ids, source_mask = source
        return self._encode(source_ids, source_mask, return_weights=False)[0]

    def encode_with_attention(self, *source: Tensor) -> tuple[Memory, list[Tensor]]:
        source_ids, source_mask = source
        return self._encode(source_ids, source_mask, return_weights=True)

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        return self._decode_states(target_ids, memory, source_mask, return_weights=False)[0]

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        states, weights = self._decode_states(target_ids, memory, source_mask, return_weights=True)
        return self.project(states), weights

    def alignment(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The mean over the heads of the layer that aligns best, see `alignment_layer`."""
        return weights[alignment_layer(self.config.num_decoder_layers)].mean(dim=1)

    def start(self, memory: Memory, source_mask: Tensor) -> State:
        H, K = self.config.num_heads, self.config.d_head
        nothing = memory[0].new_zeros(len(source_mask), H, 0, K)
        return (nothing,) * 2 * self.config.num_decoder_layers

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        num_before = state[0].shape[2]
        x = self._embed(token_ids[:, None], self.embedding.weight, num_before)  # (B, 1, D)
        mask = source_mask[:, None, None, :]  # (B, 1, 1, S)
        new_state: list[Tensor] = []
        for layer, past in zip(self.decoder_layers, zip(state[::2], state[1::2], strict=True), strict=True):
            x, present = layer.step(x, past, memory[0], mask)
            new_state += present
        return self.decoder_norm(x)[:, 0], tuple(new_state)

    def _encode(
        self, source_ids: Tensor, source_mask: Tensor, return_weights: bool
    ) -> tuple[Memory, list[Tensor]]:
        x = self._embed(source_ids, self.source_weight)  # (B, S, D)
        mask = source_mask[:, None, None, :]  # (B, 1, 1, S)
        all_weights = []
        for layer in self.encoder_layers:
            x, weights = layer(x, mask, return_weights)
            all_weights.append(weights)
        return (self.encoder_norm(x),), all_weights

    def _decode_states(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor, return_weights: bool
    ) -> tuple[Tensor, list[Tensor]]:
        # Padding at a target's end needs no mask: no real position attends to later positions.
        x = self._embed(target_ids, self.embedding.weight)  # (B, T, D)
        causal = causal_mask(target_ids.shape[1], target_ids.device)  # (T, T)
        mask = source_mask[:, None, None, :]  # (B, 1, 1, S)
        all_weights = []
        for layer in self.decoder_layers:
            x, weights = layer(x, causal, memory[0], mask, return_weights)
            all_weights.append(weights)
        return self.decoder_norm(x), all_weights

    def _embed(self, token_ids: Tensor, weight: Tensor, num_before: int = 0) -> Tensor:
        end = num_before + token_ids.shape[1]
        if end > self.positions.shape[0]:
            raise ValueError(f"{end} positions, and the model has {self.positions.shape[0]}")
        embedded: Tensor = self.dropout(self._look_up(token_ids, weight) + self.positions[num_before:end])
        return embedded

    def _final_norm(self) -> nn.Module:
        if self.config.norm == "pre":
            return nn.LayerNorm(self.config.d_model, eps=LAYER_NORM_EPS)
        return nn.Identity()

    def _initialise(self) -> None:
        # The paper does not say how. This way keeps the variance from layer to layer (Glorot and Bengio
        # 2010).
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.output:
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        self._initialise_embeddings()
