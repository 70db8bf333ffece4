"""The Transformer of Vaswani et al. 2017 (arXiv:1706.03762), with a class for each box of its figure 1.

The same classes compute published models, which differ from the paper in options (`models.options`); in a
model of the paper, none of their parts exists.

Shapes: B batch rows, S source length, T target length, D d_model, H heads, G heads of keys and values,
K d_head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seq2seq_serve.training.config import ModelConfig, TransformerConfig
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.models.attention import MultiHeadAttention, causal_mask
from seq2seq_serve.training.models.base import EncoderDecoder, Layers, Memory, Metric, State
from seq2seq_serve.training.models.dropout import Dropout
from seq2seq_serve.training.models.fronts import PatchMap, SoundMaps
from seq2seq_serve.training.models.options import (
    Activation,
    LayerKind,
    PublishedConfig,
    StackConfig,
    architecture_of,
)
from seq2seq_serve.training.models.positions import RelativeBias, position_table

Config = TransformerConfig | PublishedConfig

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "silu": nn.functional.silu,
}


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
    """max(0, x W_1 + b_1) W_2 + b_2, the same at every position: equation 2.

    With another activation a it is a(x W_1 + b_1) W_2 + b_2, and gated (a(x W_g) * x W_1) W_2 (Shazeer 2020,
    arXiv:2002.05202).
    """

    def __init__(self, d_model: int, d_ff: int, stack: StackConfig | None = None) -> None:
        super().__init__()
        unbiased = stack.unbiased if stack else frozenset()
        self.inner = nn.Linear(d_model, d_ff, bias="inner" not in unbiased)
        self.gate: nn.Linear | None = None
        if stack and stack.is_gated:
            self.gate = nn.Linear(d_model, d_ff, bias="gate" not in unbiased)
        self.outer = nn.Linear(d_ff, d_model, bias="outer" not in unbiased)
        self.activate = _ACTIVATIONS[stack.activation if stack else "relu"]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        hidden = self.inner(x)
        hidden = self.activate(hidden) if self.gate is None else self.activate(self.gate(x)) * hidden
        output: Tensor = self.outer(hidden)
        return output


class View(NamedTuple):
    """What the self-attention of a layer sees.

    Attributes:
        mask: Broadcast to (B, H, T, S); True = may attend.
        bias: (H, T, S), added to the scores; None in the paper.
        angles: (T, K / 2), by which queries and keys are rotated; None in the paper.
    """

    mask: Tensor
    bias: Tensor | None = None
    angles: Tensor | None = None


class _Layer(nn.Module):
    """The common part of encoder and decoder layers: the residual sum around a sub-layer and its norm.

    Post-norm is the paper's LayerNorm(x + Sublayer(x)), section 3.1; pre-norm is x + Sublayer(LayerNorm(x))
    of Xiong et al. 2020, arXiv:2002.04745. Dropout is on the sub-layer's output, section 5.4. In the paper,
    outputs of sub-layers do not have norms of their own.
    """

    def __init__(self, config: Config, stack: StackConfig, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.is_pre_norm = stack.is_pre_norm
        self.dropout = Dropout(config.dropout)
        self.self_attention = self._attention(config, stack, stack.d_model)
        self.self_attention_norm = stack.make_norm(stack.d_model)
        self.self_attention_output_norm = self._output_norm(stack)

    def _attention(self, config: Config, stack: StackConfig, d_memory: int) -> MultiHeadAttention:
        dropout = config.attention_dropout
        return MultiHeadAttention(stack.d_model, stack.num_heads, dropout, stack=stack, d_memory=d_memory)

    @staticmethod
    def _output_norm(stack: StackConfig) -> nn.Module:
        return stack.make_norm(stack.d_model, exists=stack.has_output_norms)

    def _add_feed_forward(self, stack: StackConfig) -> None:
        self.feed_forward = FeedForward(stack.d_model, stack.d_ff, stack)
        self.feed_forward_norm = stack.make_norm(stack.d_model)
        self.feed_forward_output_norm = self._output_norm(stack)

    def _attended(
        self, y: Tensor, view: View, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The queries of self-attention, and the keys and values before and at their positions."""
        query = self.self_attention.queries(y, view.angles)
        key, value = self.self_attention.keys_and_values(y, view.angles)  # (B, G, T, K)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        return query, (key, value)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        normed: Tensor = norm(x) if self.is_pre_norm else x
        return normed

    def _after(self, x: Tensor, output: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(output)
        return x if self.is_pre_norm else norm(x)

    def _finish(self, x: Tensor) -> Tensor:
        """The last sub-layer."""
        output = self.feed_forward(self._before(x, self.feed_forward_norm))
        return self._after(x, self.feed_forward_output_norm(output), self.feed_forward_norm)


class EncoderLayer(_Layer):
    """Self-attention over the source, then the feed-forward network: figure 1, left."""

    def __init__(self, config: Config, kind: LayerKind = LayerKind()) -> None:  # noqa: B008
        stack = architecture_of(config).encoder
        super().__init__(config, stack, kind)
        self._add_feed_forward(stack)

    def forward(self, x: Tensor, view: View, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """(B, S, D) to (B, S, D), and the self-attention weights (B, H, S, S) with `return_weights`."""
        y = self._before(x, self.self_attention_norm)
        query, (key, value) = self._attended(y, view)
        context, weights = self.self_attention.attend(query, key, value, view.mask, view.bias, return_weights)
        x = self._after(x, self.self_attention_output_norm(context), self.self_attention_norm)
        return self._finish(x), weights


class DecoderLayer(_Layer):
    """Masked self-attention, attention over the memory, then the feed-forward network: figure 1, right."""

    def __init__(self, config: Config, kind: LayerKind = LayerKind()) -> None:  # noqa: B008
        architecture = architecture_of(config)
        stack = architecture.decoder
        super().__init__(config, stack, kind)
        self.cross_attention = self._attention(config, stack, architecture.encoder.d_model)
        self.cross_attention_norm = stack.make_norm(stack.d_model)
        self.cross_attention_output_norm = self._output_norm(stack)
        self._add_feed_forward(stack)

    @property
    def memory_attention(self) -> MultiHeadAttention:
        """The attention that reads the memory."""
        return self.cross_attention

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: tuple[Tensor, Tensor],
        memory_mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]:
        """One or several positions (B, T, D) after those whose keys and values, (B, G, N, K) each, are given.

        Returns:
            (B, T, D), the keys and values of all positions, and with `return_weights` the cross-attention
            weights (B, H, T, S).
        """
        y = self._before(x, self.self_attention_norm)
        query, present = self._attended(y, view, past)
        context, _ = self.self_attention.attend(query, *present, view.mask, view.bias)
        x = self._after(x, self.self_attention_output_norm(context), self.self_attention_norm)
        y = self._before(x, self.cross_attention_norm)
        query = self.cross_attention.queries(y)
        context, weights = self.cross_attention.attend(query, *memory, memory_mask, None, return_weights)
        x = self._after(x, self.cross_attention_output_norm(context), self.cross_attention_norm)
        return self._finish(x), present, weights


class MergedDecoderLayer(_Layer):
    """One attention over the positions so far and the memory, in one softmax: T5Gemma 2, not the paper."""

    def __init__(self, config: Config, kind: LayerKind) -> None:
        stack = architecture_of(config).decoder
        super().__init__(config, stack, kind)
        self._add_feed_forward(stack)

    @property
    def memory_attention(self) -> MultiHeadAttention:
        """The attention that reads the memory."""
        return self.self_attention

    def forward(
        self,
        x: Tensor,
        view: View,
        memory: tuple[Tensor, Tensor],
        memory_mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor | None]:
        """As `DecoderLayer.forward`; the weights are the part that the memory has."""
        y = self._before(x, self.self_attention_norm)
        query, present = self._attended(y, view, past)
        key, value = (torch.cat(pair, dim=2) for pair in zip(present, memory, strict=True))
        (B, _, _, S), (T, N) = memory_mask.shape, view.mask.shape[-2:]
        mask = torch.cat([view.mask.expand(B, 1, T, N), memory_mask.expand(B, 1, T, S)], dim=3)
        context, weights = self.self_attention.attend(query, key, value, mask, None, return_weights)
        x = self._after(x, self.self_attention_output_norm(context), self.self_attention_norm)
        return self._finish(x), present, None if weights is None else weights[..., N:]


@dataclass(frozen=True)
class Stack:
    """The encoder or the decoder of a model: its options and its parts, also for the graphs of an export.

    Attributes:
        embedding: (V, D); None for the encoder of a model that reads sounds or pictures.
        front: What makes embeddings of a sound or a picture; None for other stacks.
        unscaled: (D,), the embedding of `unscaled_id`; None if there is none.
        positions: (positions, D), added to scaled embeddings; None adds nothing.
        embedding_norm: The norm of that sum, or the identity.
        final_norm: The last norm of a pre-norm stack, or the identity.
        relative_bias: That of self-attention scores; None without.
        max_positions: The most positions of a text.
    """

    config: StackConfig
    embedding: Tensor | None
    front: SoundMaps | PatchMap | None
    unscaled: Tensor | None
    positions: Tensor | None
    embedding_norm: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module
    relative_bias: RelativeBias | None
    max_positions: int

    def views(self, queries: Tensor, keys: Tensor, mask: Tensor) -> dict[LayerKind, View]:
        """What the layers of each kind see: queries at positions (T,) of keys at positions (S,)."""
        bias = None if self.relative_bias is None else self.relative_bias(queries, keys)
        views = {}
        for kind in self.config.layer_kinds:
            seen = mask if kind.window is None else mask & kind.sees(queries, keys)
            angles = None if kind.rotary is None else kind.rotary.angles(queries, self.config.d_head)
            views[kind] = View(seen, bias, angles)
        return views


class Transformer(EncoderDecoder):
    """The whole of figure 1, without the softmax.

    Two options of our own models are not in the paper: with `norm="pre"` each stack ends in a norm, and
    `word_dropout` drops whole tokens. The memory holds the keys and the values of the source for each decoder
    layer, (B, G, S, K) each, and the state those of the target's positions so far.

    Attributes:
        source_positions: (positions, D), added to source embeddings; None without a table.
        target_positions: The same for targets.
        output_bias: (V,), added to logits; None in the paper.
        front, source_bias, source_norm, source_unscaled: See `Stack`; None or the identity in the paper.
    """

    config: Config
    source_positions: Tensor | None
    target_positions: Tensor | None
    encoder_layers: Layers[EncoderLayer]
    decoder_layers: Layers[DecoderLayer | MergedDecoderLayer]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.architecture = architecture = architecture_of(config)
        encoder, decoder = architecture.encoder, architecture.decoder
        if isinstance(config, PublishedConfig):
            self.origin = "imported"
            if architecture.has_source_embedding:
                self.source_embedding = nn.Embedding(architecture.source_vocab_size, encoder.d_model)
            if architecture.has_output:
                self.output = nn.Linear(decoder.d_model, config.vocab_size, bias=False)
        self.output_bias = _fixed(config.vocab_size) if architecture.has_output_bias else None
        media = architecture.media
        self.front = None if media is None else media.make_front(encoder.d_model)
        self._add_positions("source_positions", encoder)
        self._add_positions("target_positions", decoder)
        self.source_unscaled, self.target_unscaled = (
            None if stack.unscaled_id is None else nn.Parameter(torch.zeros(stack.d_model))
            for stack in (encoder, decoder)
        )
        self.source_bias, self.target_bias = (
            None if stack.buckets is None else RelativeBias(stack.buckets, stack.num_heads)
            for stack in (encoder, decoder)
        )
        self.dropout = Dropout(config.dropout)
        make_layer = MergedDecoderLayer if architecture.is_merged else DecoderLayer
        self.encoder_layers = Layers(EncoderLayer(config, kind) for kind in encoder.layer_kinds)
        self.decoder_layers = Layers(make_layer(config, kind) for kind in decoder.layer_kinds)
        self.source_norm, self.target_norm = (
            stack.make_norm(stack.d_model, exists=stack.has_embedding_norm) for stack in (encoder, decoder)
        )
        self.encoder_norm, self.decoder_norm = (
            stack.make_norm(stack.d_model, exists=stack.is_pre_norm) for stack in (encoder, decoder)
        )
        self._initialise()

    @classmethod
    def source_kind_of(cls, config: ModelConfig) -> SourceKind:
        media = config.media if isinstance(config, PublishedConfig) else None
        return media or TOKENS

    @property
    def metric(self) -> Metric:
        return "bleu" if self.front is None else "cer"

    @property
    def encoder(self) -> Stack:
        """The parts that read the source."""
        return Stack(
            self.architecture.encoder,
            self.source_weight if self.front is None else None,
            self.front,
            self.source_unscaled,
            self.source_positions,
            self.source_norm,
            self.encoder_layers,
            self.encoder_norm,
            self.source_bias,
            self.config.max_source_length,
        )

    @property
    def decoder(self) -> Stack:
        """The parts that write the target."""
        return Stack(
            self.architecture.decoder,
            self.embedding.weight,
            None,
            self.target_unscaled,
            self.target_positions,
            self.target_norm,
            self.decoder_layers,
            self.decoder_norm,
            self.target_bias,
            self.config.max_target_length,
        )

    def encode(self, *source: Tensor) -> Memory:
        return self._encode(*source, return_weights=False)[0]

    def encode_with_attention(self, *source: Tensor) -> tuple[Memory, list[Tensor]]:
        return self._encode(*source, return_weights=True)

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        return self._decode(target_ids, None, memory, source_mask)[0]

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        states, _, weights = self._decode(target_ids, None, memory, source_mask, return_weights=True)
        return self.project(states), weights

    def project(self, states: Tensor) -> Tensor:
        logits = nn.functional.linear(
            states * self.architecture.output_scale, self.output_weight, self.output_bias
        )
        cap = self.architecture.logits_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def logit_factors(self, states: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.architecture.logits_cap is not None:
            return None
        states, weight = states * self.architecture.output_scale, self.output_weight
        if self.output_bias is None:
            return states, weight
        ones = torch.ones_like(states[..., :1])
        return torch.cat([states, ones], dim=-1), torch.cat([weight, self.output_bias[:, None]], dim=1)

    def alignment(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The mean over the heads of the layer that aligns best, see `alignment_layer`, `(B, T, S)`.

        Of a model with `alignment_heads`, the attention of these, `(B, T, heads, S)`.
        """
        if heads := self.architecture.alignment_heads:
            return torch.stack([weights[layer][:, head] for layer, head in heads], dim=2)
        return weights[alignment_layer(len(self.decoder_layers))].mean(dim=1)

    def start(self, memory: Memory, source_mask: Tensor) -> State:  # noqa: ARG002
        B, G, _, K = memory[0].shape
        return (memory[0].new_zeros(B, G, 0, K),) * len(memory)

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        states, new_state, _ = self._decode(token_ids[:, None], state, memory, source_mask)
        return states[:, 0], new_state

    def _encode(self, *source: Tensor, return_weights: bool) -> tuple[Memory, list[Tensor]]:
        given, source_mask = source
        x = self._embed(given, self.encoder)  # (B, S, D)
        places = torch.arange(x.shape[1], device=x.device)
        views = self.encoder.views(places, places, source_mask[:, None, None, :])
        all_weights = []
        for layer in self.encoder_layers:
            x, weights = layer(x, views[layer.kind], return_weights)
            all_weights.append(weights)
        x = self.encoder_norm(x)
        pairs = [layer.memory_attention.keys_and_values(x) for layer in self.decoder_layers]
        return tuple(tensor for pair in pairs for tensor in pair), all_weights

    def _decode(
        self,
        target_ids: Tensor,
        state: State | None,
        memory: Memory,
        source_mask: Tensor,
        return_weights: bool = False,
    ) -> tuple[Tensor, State, list[Tensor]]:
        """Decoder states (B, T, D) of positions after those of the state, the new state, and the weights."""
        # Padding at a target's end needs no mask: no real position attends to later positions.
        num_before = 0 if state is None else state[0].shape[2]
        x = self._embed(target_ids, self.decoder, num_before)  # (B, T, D)
        keys = torch.arange(num_before + target_ids.shape[1], device=x.device)
        causal = causal_mask(len(keys), x.device)[num_before:]  # (T, all positions)
        views = self.decoder.views(keys[num_before:], keys, causal)
        mask = source_mask[:, None, None, :]  # (B, 1, 1, S)
        new_state: list[Tensor] = []
        all_weights = []
        for i, layer in enumerate(self.decoder_layers):
            past = None if state is None else (state[2 * i], state[2 * i + 1])
            pair = memory[2 * i], memory[2 * i + 1]
            x, present, weights = layer(x, views[layer.kind], pair, mask, past, return_weights)
            new_state += present
            all_weights.append(weights)
        return self.decoder_norm(x), tuple(new_state), all_weights

    def _embed(self, given: Tensor, stack: Stack, num_before: int = 0) -> Tensor:
        """The embeddings (B, T, D) of tokens (B, T) after a number of positions, or of sounds or pictures."""
        if stack.embedding is None:
            assert stack.front is not None
            x = stack.front(given)
        else:
            x = self._look_up(given, stack.embedding, stack.config.embedding_scale)
            if stack.unscaled is not None:
                assert stack.config.unscaled_id is not None
                x = torch.where(given.eq(stack.config.unscaled_id)[:, :, None], stack.unscaled, x)
        if stack.positions is not None:
            end = num_before + x.shape[1]
            if end > len(stack.positions):
                raise ValueError(f"{end} positions, and the model has {len(stack.positions)}")
            added = stack.positions[num_before:end]
            if stack.config.zero_position_id is not None:
                added = added * given.ne(stack.config.zero_position_id)[:, :, None]
            x = x + added
        embedded: Tensor = self.dropout(stack.embedding_norm(x))
        return embedded

    def _add_positions(self, name: str, stack: StackConfig) -> None:
        """Add a table of positions: learned ones are weights, and the others can be computed."""
        positions = stack.positions
        if positions is None:
            setattr(self, name, None)
        elif positions.kind == "learned":
            setattr(self, name, nn.Parameter(torch.zeros(positions.count, stack.d_model)))
        else:
            if positions.kind == "paper":
                table = sinusoidal_positions(positions.count, stack.d_model)
            else:
                table = position_table(positions.kind, positions.count, stack.d_model, positions.first)
            self.register_buffer(name, table, persistent=False)

    def _initialise(self) -> None:
        # The paper does not say how. This way keeps the variance from layer to layer (Glorot and Bengio
        # 2010).
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.output:
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self._initialise_embeddings()


def _fixed(*shape: int) -> nn.Parameter:
    """Weights that training leaves as they are."""
    return nn.Parameter(torch.zeros(*shape), requires_grad=False)
