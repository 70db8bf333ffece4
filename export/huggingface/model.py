"""The Transformer of imported checkpoints: one model with the options in which families differ.

It exists to be exported: it defines what the graphs compute, runs the calibration of int8, and is never
trained. The options of each family are in `export.huggingface.families`.

Shapes: B batch rows, S source length, T target length, D d_model, H heads, K d_head, F d_ff, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from seq2seq_serve.export.graphs.architecture import (
    Activation,
    Architecture,
    Front,
    Stack,
    neighbours,
    relative_bias,
)
from seq2seq_serve.export.huggingface.sounds import Sounds
from seq2seq_serve.training.config import ModelConfig
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.models.base import EncoderDecoder, Layers, Memory, State
from seq2seq_serve.training.models.transformer import alignment_layer

NormKind = Literal["layer", "rms"]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "silu": nn.functional.silu,
}


@dataclass(frozen=True)
class StackConfig:
    """The sizes of the encoder or the decoder; the heads together need not be as wide as the model."""

    num_layers: int
    num_heads: int
    d_head: int
    d_ff: int


@dataclass(frozen=True)
class ImportedConfig(ModelConfig):
    """The sizes and options of an imported model.

    Attributes:
        vocab_size: The number of target tokens.
        source_vocab_size: The number of source tokens; 0 for a model that reads sounds.
        sounds: The sounds that the model reads; None for a model that reads texts.
        has_source_embedding: Whether source tokens have a matrix of their own.
        has_output: Whether the projection to logits has a matrix of its own.
        has_output_bias: Whether a bias is added to logits.
        has_biases: Whether the linear maps of the layers have biases.
        has_key_biases: The same for the maps of attention's keys.
        is_pre_norm: Whether norms are before the sublayers, and one at the end of each stack.
        has_embedding_norm: Whether the sum of token and position has a norm.
        is_gated: Whether the feed-forward network multiplies two maps, of which one is activated.
        embedding_scale: The factor of token embeddings.
        attention_scale: The factor of attention scores; None is 1 / sqrt(K).
        output_scale: The factor of decoder states before the projection.
        num_positions: The rows of the tables of positions; None without such tables. For sounds, the source's
            table has a row for each position of memory.
        zero_position_id: The token whose position is a vector of zeros; None if all tokens have positions.
        max_distance: The distance from which on all distances have one bias; None without relative bias.
    """

    _: KW_ONLY
    source_vocab_size: int
    encoder: StackConfig
    decoder: StackConfig
    norm_kind: NormKind
    norm_epsilon: float
    activation: Activation
    has_source_embedding: bool = False
    has_output: bool = False
    has_output_bias: bool = False
    has_biases: bool = True
    has_key_biases: bool = True
    is_pre_norm: bool = True
    has_embedding_norm: bool = False
    is_gated: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    output_scale: float = 1.0
    num_positions: int | None = None
    zero_position_id: int | None = None
    max_distance: int | None = None
    sounds: Sounds | None = None

    @property
    def num_source_positions(self) -> int | None:
        """The rows of the source's table of positions; None without a table."""
        return self.num_positions if self.sounds is None else self.sounds.num_positions

    @property
    def sizes(self) -> dict[str, int]:
        """The architecture's sizes, for the manifest."""
        return {
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "d_ff": self.decoder.d_ff,
            "d_head": self.decoder.d_head,
            "num_heads": self.decoder.num_heads,
            "num_encoder_layers": self.encoder.num_layers,
            "num_decoder_layers": self.decoder.num_layers,
        }

    def make_norm(self) -> nn.Module:
        """A norm of the model's kind."""
        kind = nn.RMSNorm if self.norm_kind == "rms" else nn.LayerNorm
        return kind(self.d_model, eps=self.norm_epsilon)


class Attention(nn.Module):
    """Multi-head attention whose heads together may have another width than the model."""

    def __init__(self, config: ImportedConfig, sizes: StackConfig) -> None:
        super().__init__()
        D, width, bias = config.d_model, sizes.num_heads * sizes.d_head, config.has_biases
        self.num_heads = sizes.num_heads
        self.scale = scale_of(config, sizes)
        self.query = nn.Linear(D, width, bias=bias)
        self.key = nn.Linear(D, width, bias=bias and config.has_key_biases)
        self.value = nn.Linear(D, width, bias=bias)
        self.output = nn.Linear(width, D, bias=bias)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from `x` (B, T, D) over keys and values (B, H, S, K).

        The bias is added to the scores (B, H, T, S). Returns the output (B, T, D), and the weights.
        """
        scores = self._split_heads(self.query(x)) @ key.transpose(2, 3) * self.scale  # (B, H, T, S)
        weights = (scores + bias).softmax(dim=-1)
        output: Tensor = self.output((weights @ value).transpose(1, 2).flatten(2))  # (B, T, D)
        return output, weights

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and the values of `x` (B, S, D), each (B, H, S, K)."""
        return self._split_heads(self.key(x)), self._split_heads(self.value(x))

    def _split_heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, -1).transpose(1, 2)


class FeedForward(nn.Module):
    """`a(x W) W'`, or gated `(a(x G) * x W) W'` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: ImportedConfig, d_ff: int) -> None:
        super().__init__()
        D, bias = config.d_model, config.has_biases
        self.inner = nn.Linear(D, d_ff, bias=bias)
        self.gate = nn.Linear(D, d_ff, bias=bias) if config.is_gated else None
        self.outer = nn.Linear(d_ff, D, bias=bias)
        self.activate = _ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        hidden = self.inner(x)
        hidden = self.activate(hidden) if self.gate is None else self.activate(self.gate(x)) * hidden
        output: Tensor = self.outer(hidden)
        return output


class SoundFront(nn.Module):
    """Whisper's two convolutions over a spectrogram, as linear maps of three neighbouring frames.

    The width of each frame's neighbourhood is 3, and the second convolution has a stride of 2 (Radford et al.
    2022, arXiv:2212.04356, section 2.2).
    """

    def __init__(self, num_bands: int, d_model: int) -> None:
        super().__init__()
        self.first = nn.Linear(3 * num_bands, d_model)
        self.second = nn.Linear(3 * d_model, d_model)

    def forward(self, sound: Tensor) -> Tensor:
        """(B, bands, frames) to (B, frames / 2, D)."""
        x = nn.functional.gelu(self.first(neighbours(sound.transpose(1, 2), stride=1)))
        result: Tensor = nn.functional.gelu(self.second(neighbours(x, stride=2)))
        return result


class Layer(nn.Module):
    """A layer of the encoder, or with attention over the memory one of the decoder."""

    def __init__(self, config: ImportedConfig, sizes: StackConfig, *, reads_memory: bool) -> None:
        super().__init__()
        self.is_pre_norm = config.is_pre_norm
        self.self_attention = Attention(config, sizes)
        self.self_attention_norm = config.make_norm()
        if reads_memory:
            self.cross_attention = Attention(config, sizes)
            self.cross_attention_norm = config.make_norm()
        self.feed_forward = FeedForward(config, sizes.d_ff)
        self.feed_forward_norm = config.make_norm()

    def attend(
        self, x: Tensor, bias: Tensor, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Self-attention of `x` (B, T, D) over past positions and itself; returns all keys and values too."""
        y = self._before(x, self.self_attention_norm)
        present = self.self_attention.keys_and_values(y)
        if past is not None:
            present = torch.cat([past[0], present[0]], dim=2), torch.cat([past[1], present[1]], dim=2)
        output, _ = self.self_attention(y, *present, bias)
        return self._after(x, output, self.self_attention_norm), present

    def attend_memory(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Attention over the memory's keys and values (B, H, S, K), and its weights (B, H, T, S)."""
        y = self._before(x, self.cross_attention_norm)
        output, weights = self.cross_attention(y, key, value, bias)
        return self._after(x, output, self.cross_attention_norm), weights

    def finish(self, x: Tensor) -> Tensor:
        """The feed-forward network, the layer's last part."""
        output = self.feed_forward(self._before(x, self.feed_forward_norm))
        return self._after(x, output, self.feed_forward_norm)

    def _before(self, x: Tensor, norm: nn.Module) -> Tensor:
        return norm(x) if self.is_pre_norm else x

    def _after(self, x: Tensor, output: Tensor, norm: nn.Module) -> Tensor:
        total = x + output
        return total if self.is_pre_norm else norm(total)


class ImportedModel(EncoderDecoder):
    """An encoder-decoder Transformer with the options of `ImportedConfig`.

    The memory holds the keys and values (B, H, S, K) of each decoder layer's attention over the source, and
    the state those of the positions so far.

    Attributes:
        source_positions: (positions, D), added to source embeddings; None without a table.
        target_positions: The same for targets.
        source_bias: (2 * max_distance + 1, H), the bias of the scores at each distance from a key to its
            query, from the most negative one on (Raffel et al. 2020, arXiv:1910.10683, section 2.1); None
            without such biases.
        target_bias: The same for targets.
    """

    config: ImportedConfig
    encoder_layers: Layers[Layer]
    decoder_layers: Layers[Layer]

    def __init__(self, config: ImportedConfig) -> None:
        super().__init__(config)
        V, D = config.vocab_size, config.d_model
        if config.has_source_embedding:
            self.source_embedding = nn.Embedding(config.source_vocab_size, D)
        if config.has_output:
            self.output = nn.Linear(D, V, bias=False)
        self.output_bias = _table(V) if config.has_output_bias else None
        self.front = None if config.sounds is None else SoundFront(config.sounds.num_bands, D)
        num_source, num_target, distance = (
            config.num_source_positions,
            config.num_positions,
            config.max_distance,
        )
        assert (num_target is None) != (distance is None)
        self.source_positions = _table(num_source, D) if num_source else None
        self.target_positions = _table(num_target, D) if num_target else None
        self.source_bias = _table(2 * distance + 1, config.encoder.num_heads) if distance else None
        self.target_bias = _table(2 * distance + 1, config.decoder.num_heads) if distance else None
        self.encoder_layers = Layers(
            Layer(config, config.encoder, reads_memory=False) for _ in range(config.encoder.num_layers)
        )
        self.decoder_layers = Layers(
            Layer(config, config.decoder, reads_memory=True) for _ in range(config.decoder.num_layers)
        )
        self.source_norm = config.make_norm() if config.has_embedding_norm else nn.Identity()
        self.target_norm = config.make_norm() if config.has_embedding_norm else nn.Identity()
        self.encoder_norm = config.make_norm() if config.is_pre_norm else nn.Identity()
        self.decoder_norm = config.make_norm() if config.is_pre_norm else nn.Identity()

    @property
    def source_kind(self) -> SourceKind:
        return self.config.sounds or TOKENS

    @property
    def architecture(self) -> Architecture:
        """The model as its graphs read it."""
        return Architecture(
            encoder=self._stack(
                "encoder_layers",
                self.config.encoder,
                self.encoder_layers,
                self.encoder_norm,
                embedding=self.source_weight if self.front is None else None,
                positions=self.source_positions,
                embedding_norm=self.source_norm,
                relative_bias=self.source_bias,
                front=self._front(),
            ),
            decoder=self._stack(
                "decoder_layers",
                self.config.decoder,
                self.decoder_layers,
                self.decoder_norm,
                embedding=self.embedding.weight,
                positions=self.target_positions,
                embedding_norm=self.target_norm,
                relative_bias=self.target_bias,
            ),
            output_weight=self.output_weight,
            output_bias=self.output_bias,
            output_scale=self.config.output_scale,
        )

    def encode(self, *source: Tensor) -> Memory:
        given, source_mask = source
        if self.front is None:
            x = self._embed(given, self.source_weight, self.source_positions, 0, self.source_norm)
        else:
            x = self.source_norm(self.front(given) + self.source_positions)
        places = torch.arange(x.shape[1])
        bias = _masked(x, source_mask[:, None, None, :]) + _relative_bias(self.source_bias, places, places)
        for layer in self.encoder_layers:
            x, _ = layer.attend(x, bias)
            x = layer.finish(x)
        x = self.encoder_norm(x)  # (B, S, D)
        pairs = [layer.cross_attention.keys_and_values(x) for layer in self.decoder_layers]
        return tuple(tensor for pair in pairs for tensor in pair)

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        return self._decode(target_ids, None, memory, source_mask)[0]

    def project(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states * self.config.output_scale, self.output_weight, self.output_bias)

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        states, _, weights = self._decode(target_ids, None, memory, source_mask)
        return self.project(states), weights

    def alignment(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The mean over the heads of the layer that aligns best, see `alignment_layer`."""
        return weights[alignment_layer(len(self.decoder_layers))].mean(dim=1)

    def start(self, memory: Memory, source_mask: Tensor) -> State:
        nothing = memory[0].new_zeros(len(source_mask), *memory[0].shape[1:2], 0, memory[0].shape[3])
        return (nothing,) * len(memory)

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        states, new_state, _ = self._decode(token_ids[:, None], state, memory, source_mask)
        return states[:, 0], new_state

    def _decode(
        self, target_ids: Tensor, state: State | None, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State, list[Tensor]]:
        """Decoder states (B, T, D) of positions after those of the state, the new state, the weights."""
        num_before = 0 if state is None else state[0].shape[2]
        x = self._embed(
            target_ids, self.embedding.weight, self.target_positions, num_before, self.target_norm
        )
        keys = torch.arange(num_before + target_ids.shape[1])
        queries = keys[num_before:]
        bias = _masked(x, keys <= queries[:, None]) + _relative_bias(self.target_bias, queries, keys)
        memory_bias = _masked(x, source_mask[:, None, None, :])
        new_state: list[Tensor] = []
        all_weights = []
        for i, layer in enumerate(self.decoder_layers):
            past = None if state is None else (state[2 * i], state[2 * i + 1])
            x, present = layer.attend(x, bias, past)
            new_state += present
            x, weights = layer.attend_memory(x, memory[2 * i], memory[2 * i + 1], memory_bias)
            all_weights.append(weights)
            x = layer.finish(x)
        return self.decoder_norm(x), tuple(new_state), all_weights

    def _embed(
        self, ids: Tensor, weight: Tensor, positions: Tensor | None, num_before: int, norm: nn.Module
    ) -> Tensor:
        x = nn.functional.embedding(ids, weight) * self.config.embedding_scale  # (B, T, D)
        if positions is not None:
            end = num_before + ids.shape[1]
            if end > len(positions):
                raise ValueError(f"{end} positions, and the model has {len(positions)}")
            added = positions[num_before:end]
            if self.config.zero_position_id is not None:
                added = added * (ids != self.config.zero_position_id)[:, :, None]
            x = x + added
        result: Tensor = norm(x)
        return result

    def _front(self) -> Front | None:
        sounds, front = self.config.sounds, self.front
        if sounds is None or front is None:
            return None
        return Front("front", sounds.num_bands, sounds.num_frames, front.first, front.second)

    def _stack(
        self,
        name: str,
        sizes: StackConfig,
        layers: nn.ModuleList,
        final_norm: nn.Module,
        *,
        embedding: Tensor | None,
        positions: Tensor | None,
        embedding_norm: nn.Module,
        relative_bias: Tensor | None,
        front: Front | None = None,
    ) -> Stack:
        config = self.config
        return Stack(
            name=name,
            embedding=embedding,
            embedding_scale=config.embedding_scale,
            positions=positions,
            embedding_norm=embedding_norm if config.has_embedding_norm else None,
            layers=layers,
            final_norm=final_norm if config.is_pre_norm else None,
            num_heads=sizes.num_heads,
            d_head=sizes.d_head,
            attention_scale=scale_of(config, sizes),
            activation=config.activation,
            relative_bias=relative_bias,
            zero_position_id=config.zero_position_id,
            front=front,
        )


def scale_of(config: ImportedConfig, sizes: StackConfig) -> float:
    """The factor of attention scores in one half of the model."""
    return 1 / math.sqrt(sizes.d_head) if config.attention_scale is None else config.attention_scale


def _table(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """Zeros of the type of `x` where the mask is True, minus infinity elsewhere."""
    return torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -math.inf)


def _relative_bias(table: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor | float:
    """The bias (H, T, S) of the scores between positions (T,) and (S,)."""
    if table is None:
        return 0.0
    return relative_bias(table, queries, keys).movedim(-1, 0)
