"""The three graphs of a Transformer, as small torch modules over its trained weights.

Each module says its inputs and outputs as `TensorSpec`s, so that names, axes and roles of a graph stand in
one place, and re-expresses the model with the operators that ONNX Runtime has fused kernels for. What the
modules compute is defined by `training.transformer`; `export.parity` proves that it is the same. Inside a
graph every token is one row of a matrix; only attention sees batch and position apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from bundle import names
from bundle.manifest import TensorSpec
from bundle.names import Axis, Role
from export import operators
from export.blocks import AddNorm, DecoderBlock, Embedding, EncoderBlock
from export.linear import Linear, LinearFactory
from training.config import TransformerConfig
from training.transformer import DecoderLayer, EncoderLayer, Transformer

# B batch rows   S source length   T target length   D d_model   H heads   K d_head
# V vocabulary   L layers   C cache capacity

_TYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


_Module = TypeVar("_Module", bound=nn.Module)


class _Modules(nn.ModuleList, Generic[_Module]):
    """A `ModuleList` that knows what it holds."""

    def __iter__(self) -> Iterator[_Module]:
        return super().__iter__()  # type: ignore[return-value]


class Graph(nn.Module):
    """A graph to export: `forward` takes and returns tensors in the order of `inputs` and `outputs`.

    Attributes:
        inputs: What it is given.
        outputs: What it answers.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __init__(self, model: Transformer, linear: LinearFactory, embedding_weight: Tensor) -> None:
        super().__init__()
        self.config: TransformerConfig = model.config
        self.dtype = linear.dtype
        self.embedding = Embedding(model, embedding_weight, linear)

    def _cache_specs(self) -> list[TensorSpec]:
        return self._layer_specs(names.cache_key, names.cache_value, Role.CACHE, Axis.CACHE_CAPACITY)

    def _memory_specs(self) -> list[TensorSpec]:
        return self._layer_specs(names.memory_key, names.memory_value, Role.MEMORY, Axis.MEMORY_CAPACITY)

    def _last_specs(self) -> list[TensorSpec]:
        axes = (Axis.BATCH, 1, self.config.d_model)
        return [
            TensorSpec(name(layer), _TYPE_NAMES[self.dtype], axes, Role.MEMORY)
            for layer in range(self.config.num_decoder_layers)
            for name in (names.last_key, names.last_value)
        ]

    def _layer_specs(
        self, key_name: Callable[[int], str], value_name: Callable[[int], str], role: Role, capacity: Axis
    ) -> list[TensorSpec]:
        axes = (Axis.BATCH, self.config.num_heads, capacity, self.config.d_head)
        return [
            TensorSpec(name(layer), _TYPE_NAMES[self.dtype], axes, role)
            for layer in range(self.config.num_decoder_layers)
            for name in (key_name, value_name)
        ]


class EncodeGraph(Graph):
    """Source to memory: the encoder, and the decoder's cross-attention keys and values of every layer."""

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__(model, linear, model.source_weight)
        H = self.config.num_heads
        self.blocks = _Modules[EncoderBlock](
            EncoderBlock(layer, f"encoder_layers.{i}", linear, H)
            for i, layer in enumerate(_Modules[EncoderLayer](model.encoder_layers))
        )
        self.norms = _norms(model.encoder_layers, model.encoder_norm, self.blocks, linear)
        cross = [layer.cross_attention for layer in _Modules[DecoderLayer](model.decoder_layers)]
        self.memory = linear("memory", [module for a in cross for module in (a.key, a.value)])
        memory = self._memory_specs()
        self.inputs = (
            TensorSpec(names.SOURCE_IDS, "int64", (Axis.BATCH, Axis.SOURCE_LENGTH), Role.SOURCE),
            TensorSpec(names.SOURCE_LENGTHS, "int32", (Axis.BATCH,), Role.SOURCE),
            *memory,
        )
        self.outputs = (*_outs(memory), *self._last_specs())

    def forward(self, source_ids: Tensor, source_lengths: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        B, S = source_ids.shape
        D, H, K = self.config.d_model, self.config.num_heads, self.config.d_head
        x = self.embedding(source_ids, self.embedding.positions[:S]).view(-1, D)  # (B*S, D)
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


class StepGraph(Graph):
    """One target position for all running rows, cache and memory in place.

    In the form for CUDA it also writes the inputs of the next step, the most probable tokens and the lengths,
    so that a greedy step is one replayed graph.
    """

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__(model, linear, model.embedding.weight)
        self.decoder = _Decoder(model, linear)
        self.feeds_itself = linear.is_fused
        cache, memory = self._cache_specs(), self._memory_specs()
        token_ids = TensorSpec(names.TOKEN_IDS, "int64", (Axis.BATCH,), Role.TOKEN)
        lengths = names.PREVIOUS_LENGTHS if self.feeds_itself else names.CACHE_LENGTHS
        cache_lengths = TensorSpec(lengths, "int32", (Axis.BATCH,), Role.TOKEN)
        self.inputs = (
            token_ids,
            cache_lengths,
            TensorSpec(names.LAST_SOURCE_POSITIONS, "int32", (Axis.BATCH,), Role.TOKEN),
            TensorSpec(names.CACHE_CAPACITY, "int32", (), Role.CAPACITY),
            TensorSpec(names.MEMORY_CAPACITY, "int32", (), Role.CAPACITY),
            *cache,
            *memory,
            *self._last_specs(),
        )
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, self.config.vocab_size), Role.LOGITS)
        following = [replace(token_ids, axes=(Axis.BATCH, 1)), cache_lengths] if self.feeds_itself else []
        self.outputs = (logits, *_outs(following), *_outs(cache), *_outs(memory))

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
            # Every other node reads the sum, so the write in place cannot overtake a reader.
            cache_lengths = cache_lengths + 1
        num_tensors = 2 * self.config.num_decoder_layers
        cache, memory, last = (buffers[i : i + num_tensors] for i in range(0, 3 * num_tensors, num_tensors))
        positions = nn.functional.embedding(cache_lengths, self.embedding.positions)
        x = self.embedding(token_ids, positions)  # (B, D)
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


class DecodeGraph(Graph):
    """T target positions at once, after those in the cache: log-probabilities of labels, and the alignment.

    Only as many of the positions as there are labels pay for the output projection. On an empty cache there
    may be any number of rows, and only one on another.
    """

    def __init__(self, model: Transformer, linear: LinearFactory, *, alignment_layer: int) -> None:
        super().__init__(model, linear, model.embedding.weight)
        self.decoder = _Decoder(model, linear)
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
            *_outs(cache),
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
        positions = nn.functional.embedding(first_position + torch.arange(T), self.embedding.positions)
        x = self.embedding(target_ids, positions).view(-1, D)  # (B*T, D)
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


class _Decoder(nn.Module):
    """What step and decode share: the blocks, the norms between them, the output projection."""

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__()
        config = model.config
        self.blocks = _Modules[DecoderBlock](
            DecoderBlock(layer, f"decoder_layers.{i}", linear, config.num_heads)
            for i, layer in enumerate(_Modules[DecoderLayer](model.decoder_layers))
        )
        self.norms = _norms(model.decoder_layers, model.decoder_norm, self.blocks, linear)
        self.output: Linear | None = linear.output(model.output_weight)
        is_tied = model.output_weight is model.embedding.weight
        untied = None if is_tied or self.output else model.output_weight.detach().to(linear.dtype)
        self.output_weight = None if untied is None else nn.Parameter(untied)

    def logits(self, hidden: Tensor, embedding: Embedding) -> Tensor:
        """float32 logits `(rows, V)`, by the embedding matrix itself where it is tied and may be."""
        if self.output is not None:
            return self.output(hidden)
        weight, alpha = self.output_weight, 1.0
        if weight is None:
            weight, alpha = embedding.weight, 1 / embedding.weight_scale
        return operators.gemm(hidden, weight, None, transposed=True, alpha=alpha).to(torch.float32)


def _outs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [TensorSpec(names.out(spec.name), spec.dtype, spec.axes, spec.role) for spec in specs]


def _norms(
    layers: nn.ModuleList,
    final: nn.Module,
    blocks: Iterable[EncoderBlock | DecoderBlock],
    linear: LinearFactory,
) -> _Modules[AddNorm]:
    """The norms in the order in which a graph meets them; `final` is one where the stack is pre-norm."""
    norms = [norm for layer in layers for norm in layer.children() if isinstance(norm, nn.LayerNorm)]
    lasts: list[Linear | None] = [last for block in blocks for last in block.lasts()]
    pre_norm = isinstance(final, nn.LayerNorm)
    if isinstance(final, nn.LayerNorm):
        norms, lasts = [*norms, final], [None, *lasts]
    return _Modules(
        AddNorm(norm, last, pre_norm=pre_norm, linear=linear) for norm, last in zip(norms, lasts, strict=True)
    )


def _enter(x: Tensor, norms: Iterator[AddNorm], config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """What the first sublayer reads, and what its output will be added to."""
    if config.norm == "post":
        return x, x
    return next(norms).enter(x), x
