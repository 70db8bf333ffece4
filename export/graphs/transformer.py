"""The three graphs of a Transformer, as small torch modules over its trained weights.

Each module lists its inputs and outputs as `TensorSpec`s, with their names, axes and roles, and expresses the
model in operators for which ONNX Runtime has fused kernels. `training.models.transformer` defines their
computation, and `export.parity` proves that the graphs compute the same. Inside a graph every token is one
row of a matrix; only attention separates batch and position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec
from seq2seq_serve.bundle.names import Axis, Role, Verb
from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.base import (
    TYPE_NAMES,
    Embedding,
    Graph,
    Projection,
    outs,
    source_specs,
    token_specs,
)
from seq2seq_serve.export.graphs.blocks import AddNorm, DecoderBlock, EncoderBlock
from seq2seq_serve.export.graphs.linear import Linear, LinearFactory
from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.models.base import Layers
from seq2seq_serve.training.models.transformer import DecoderLayer, EncoderLayer, Transformer, alignment_layer

# B batch rows   S source length   T target length   D d_model   H heads   K d_head
# V vocabulary   L layers   C cache capacity


class _TransformerGraph(Graph):
    """The common part of the three graphs."""

    def __init__(self, model: Transformer, linear: LinearFactory, embedding_weight: Tensor) -> None:
        super().__init__()
        self.config: TransformerConfig = model.config
        self.dtype = linear.dtype
        self.embedding = Embedding(embedding_weight, linear)
        self.positions = nn.Parameter(model.positions.detach())

    def _cache_specs(self) -> list[TensorSpec]:
        return self._layer_specs(names.cache_key, names.cache_value, Role.CACHE, Axis.CACHE_CAPACITY)

    def _memory_specs(self) -> list[TensorSpec]:
        return self._layer_specs(names.memory_key, names.memory_value, Role.MEMORY, Axis.MEMORY_CAPACITY)

    def _last_specs(self) -> list[TensorSpec]:
        axes = (Axis.BATCH, 1, self.config.d_model)
        return [
            TensorSpec(name(layer), TYPE_NAMES[self.dtype], axes, Role.MEMORY)
            for layer in range(self.config.num_decoder_layers)
            for name in (names.last_key, names.last_value)
        ]

    def _layer_specs(
        self, key_name: Callable[[int], str], value_name: Callable[[int], str], role: Role, capacity: Axis
    ) -> list[TensorSpec]:
        axes = (Axis.BATCH, self.config.num_heads, capacity, self.config.d_head)
        return [
            TensorSpec(name(layer), TYPE_NAMES[self.dtype], axes, role)
            for layer in range(self.config.num_decoder_layers)
            for name in (key_name, value_name)
        ]


def make_graphs(model: Transformer, linear: LinearFactory) -> dict[Verb, Graph]:
    """Create the three graphs, with maps from the factory."""
    decoder = Decoder(model, linear)
    layer = alignment_layer(model.config.num_decoder_layers)
    return {
        Verb.ENCODE: EncodeGraph(model, linear),
        Verb.STEP: StepGraph(model, linear, decoder),
        Verb.DECODE: DecodeGraph(model, linear, decoder, alignment_layer=layer),
    }


class EncodeGraph(_TransformerGraph):
    """Turns a source into its memory: the cross-attention keys and values of every decoder layer."""

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__(model, linear, model.source_weight)
        H = self.config.num_heads
        self.blocks = Layers[EncoderBlock](
            EncoderBlock(layer, f"encoder_layers.{i}", linear, H)
            for i, layer in enumerate(Layers[EncoderLayer](model.encoder_layers))
        )
        self.norms = _norms(model.encoder_layers, model.encoder_norm, self.blocks, linear)
        cross = [layer.cross_attention for layer in Layers[DecoderLayer](model.decoder_layers)]
        self.memory = linear(
            "decoder_layers.0.cross_attention.key", [module for a in cross for module in (a.key, a.value)]
        )
        memory = self._memory_specs()
        self.inputs = (*source_specs(), *memory)
        self.outputs = (*outs(memory), *self._last_specs())

    def forward(self, source_ids: Tensor, source_lengths: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        B, S = source_ids.shape
        D, H, K = self.config.d_model, self.config.num_heads, self.config.d_head
        x = (self.embedding(source_ids) + self.positions[:S]).view(-1, D)  # (B*S, D)
        norms = iter(self.norms)
        hidden, residual = _enter(x, norms, self.config)
        for block in self.blocks:
            hidden, residual = next(norms)(block.attend(hidden, source_lengths, S), residual)
            hidden, residual = next(norms)(block.feed_forward(hidden), residual)
        packed = self.memory(hidden).view(B, S, len(memory), D)  # (B, S, 2L, D)
        heads = packed.view(B, S, len(memory), H, K).permute(2, 0, 3, 1, 4)  # (2L, B, H, S, K)
        written = [operators.write_prefix(buffer, heads[i]) for i, buffer in enumerate(memory)]
        last_position = (source_lengths.to(torch.int64) - 1).view(-1, 1, 1, 1).expand(-1, 1, len(memory), D)
        last = packed.gather(1, last_position)  # (B, 1, 2L, D)
        return (*written, *(last[:, :, i] for i in range(len(memory))))


class StepGraph(_TransformerGraph):
    """One target position for all running rows, with cache and memory in place.

    The form for CUDA also writes the inputs of the next step, the most probable tokens and the lengths, so
    that a greedy step is one replayed graph.
    """

    def __init__(self, model: Transformer, linear: LinearFactory, decoder: Decoder) -> None:
        super().__init__(model, linear, model.embedding.weight)
        self.decoder = decoder
        self.feeds_itself = linear.is_fused
        cache, memory = self._cache_specs(), self._memory_specs()
        lengths = names.PREVIOUS_LENGTHS if self.feeds_itself else names.CACHE_LENGTHS
        columns = token_specs(lengths, names.LAST_SOURCE_POSITIONS)
        token_ids, cache_lengths, _ = columns
        self.inputs = (
            *columns,
            TensorSpec(names.CACHE_CAPACITY, "int32", (), Role.CAPACITY),
            TensorSpec(names.MEMORY_CAPACITY, "int32", (), Role.CAPACITY),
            *cache,
            *memory,
            *self._last_specs(),
        )
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, self.config.vocab_size), Role.LOGITS)
        following = [replace(token_ids, axes=(Axis.BATCH, 1)), cache_lengths] if self.feeds_itself else []
        self.outputs = (logits, *outs(following), *outs(cache), *outs(memory))

    def forward(
        self,
        token_ids: Tensor,
        cache_lengths: Tensor,
        last_source_positions: Tensor,
        cache_capacity: Tensor,
        memory_capacity: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        if self.feeds_itself:
            # All other nodes read the sum, so none can read the input after the write in place.
            cache_lengths = cache_lengths + 1
        num_tensors = 2 * self.config.num_decoder_layers
        cache, memory, last = (buffers[i : i + num_tensors] for i in range(0, 3 * num_tensors, num_tensors))
        x = self.embedding(token_ids) + nn.functional.embedding(cache_lengths, self.positions)  # (B, D)
        norms = iter(self.decoder.norms)
        hidden, residual = _enter(x, norms, self.config)
        new_cache: list[Tensor] = []
        new_memory: list[Tensor] = []
        for layer, block in enumerate(self.decoder.blocks):
            pair = slice(2 * layer, 2 * layer + 2)
            output, key, value = block.attend(
                hidden, (cache[2 * layer], cache[2 * layer + 1]), cache_lengths, cache_capacity, 1
            )
            new_cache += (key, value)
            hidden, residual = next(norms)(output, residual)
            output, key, value = block.attend_memory(
                hidden, (*memory[pair], *last[pair]), last_source_positions, memory_capacity
            )
            new_memory += (key, value)
            hidden, residual = next(norms)(output, residual)
            hidden, residual = next(norms)(block.feed_forward(hidden), residual)
        logits = self.decoder.logits(hidden, self.embedding)
        following: tuple[Tensor, ...] = ()
        if self.feeds_itself:
            following = (operators.most_probable(logits), cache_lengths)
        return (logits, *following, *new_cache, *new_memory)


class DecodeGraph(_TransformerGraph):
    """T target positions at once, after those in the cache: log-probabilities of labels, and the alignment.

    Only the first positions, as many as there are labels, are projected to logits. With an empty cache there
    may be any number of rows, otherwise only one.
    """

    def __init__(
        self, model: Transformer, linear: LinearFactory, decoder: Decoder, *, alignment_layer: int
    ) -> None:
        super().__init__(model, linear, model.embedding.weight)
        self.decoder = decoder
        self.alignment_layer = alignment_layer
        positions, labels = (Axis.BATCH, Axis.TARGET_LENGTH), (Axis.BATCH, Axis.LABEL_LENGTH)
        cache = self._cache_specs()
        self.inputs = (
            TensorSpec(names.TARGET_IDS, "int64", positions, Role.TOKEN),
            TensorSpec(names.LABEL_IDS, "int64", labels, Role.TOKEN),
            TensorSpec(names.FIRST_POSITION, "int32", (), Role.TOKEN),
            TensorSpec(names.SOURCE_LENGTHS, "int32", (Axis.BATCH,), Role.TOKEN),
            *cache,
            *self._memory_specs(),
        )
        self.outputs = (
            TensorSpec(names.LOG_PROBABILITIES, "float32", labels, Role.SCORE),
            TensorSpec(names.ATTENTION, "float32", (*positions, Axis.MEMORY_CAPACITY), Role.ATTENTION),
            *outs(cache),
        )

    def forward(
        self,
        target_ids: Tensor,
        label_ids: Tensor,
        first_position: Tensor,
        source_lengths: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        B, T = target_ids.shape
        P, D = label_ids.shape[1], self.config.d_model
        num_tensors = 2 * self.config.num_decoder_layers
        cache, memory = buffers[:num_tensors], buffers[num_tensors:]
        new_length = first_position + torch.scalar_tensor(T, dtype=torch.int32)
        last_position = (new_length - 1).expand(B)
        mask = torch.arange(memory[0].shape[2]) < source_lengths[:, None, None, None]  # (B, 1, 1, C)
        positions = nn.functional.embedding(first_position + torch.arange(T), self.positions)
        x = (self.embedding(target_ids) + positions).view(-1, D)  # (B*T, D)
        norms = iter(self.decoder.norms)
        hidden, residual = _enter(x, norms, self.config)
        new_cache: list[Tensor] = []
        alignment = x
        for layer, block in enumerate(self.decoder.blocks):
            output, key, value = block.attend(
                hidden, (cache[2 * layer], cache[2 * layer + 1]), last_position, new_length, T
            )
            new_cache += (key, value)
            hidden, residual = next(norms)(output, residual)
            output, weights = block.attend_memory_fully(
                hidden, memory[2 * layer], memory[2 * layer + 1], mask, T
            )
            if layer == self.alignment_layer:
                alignment = weights.to(torch.float32).mean(dim=1)  # (B, T, C)
            hidden, residual = next(norms)(output, residual)
            hidden, residual = next(norms)(block.feed_forward(hidden), residual)
        scored = operators.first(hidden.view(B, T, D), P).view(-1, D)
        logits = self.decoder.logits(scored, self.embedding)  # (B*P, V)
        scores = torch.log_softmax(logits, dim=-1).gather(1, label_ids.view(-1, 1)).view(B, P)
        return (scores, alignment, *new_cache)


class Decoder(nn.Module):
    """The common part of step and decode: the blocks, the norms between them, the output projection."""

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__()
        config = model.config
        self.blocks = Layers[DecoderBlock](
            DecoderBlock(layer, f"decoder_layers.{i}", linear, config.num_heads)
            for i, layer in enumerate(Layers[DecoderLayer](model.decoder_layers))
        )
        self.norms = _norms(model.decoder_layers, model.decoder_norm, self.blocks, linear)
        self.logits = Projection(model, linear)


def _norms(
    layers: nn.ModuleList,
    final: nn.Module,
    blocks: Iterable[EncoderBlock | DecoderBlock],
    linear: LinearFactory,
) -> Layers[AddNorm]:
    """The norms in the order of their use; `final` is a norm if the stack is pre-norm."""
    norms = [norm for layer in layers for norm in layer.children() if isinstance(norm, nn.LayerNorm)]
    ends = [pair for block in blocks for pair in block.ends()]
    firsts: list[Linear | None] = [first for first, _ in ends]
    lasts: list[Linear | None] = [last for _, last in ends]
    pre_norm = isinstance(final, nn.LayerNorm)
    if isinstance(final, nn.LayerNorm):
        norms, firsts, lasts = [*norms, final], [*firsts, None], [None, *lasts]
    else:
        firsts = [*firsts[1:], None]
    made: list[AddNorm] = []
    shift: Tensor | None = None  # of the residual that the next norm reads
    for norm, last, first in zip(norms, lasts, firsts, strict=True):
        made.append(AddNorm(norm, last, first, shift, pre_norm=pre_norm, linear=linear))
        shift = None if pre_norm else made[-1].shift
    return Layers(made)


def _enter(x: Tensor, norms: Iterator[AddNorm], config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """The input of the first sublayer, and the residual to which its output is added."""
    if config.norm == "post":
        return x, x
    return next(norms).enter(x), x
