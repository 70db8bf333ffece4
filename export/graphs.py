"""The three graphs of a Transformer, as small torch modules over its trained weights.

Each module says its inputs and outputs as `TensorSpec`s, so that names, axes and roles of a graph stand in
one place, and re-expresses the model with the operators that ONNX Runtime has fused kernels for. What the
modules compute is defined by `training.transformer`; `export.parity` proves that it is the same. Inside a
graph every token is one row of a matrix; only attention sees batch and position apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from bundle import names
from bundle.manifest import TensorSpec
from bundle.names import Axis, Role
from export import operators
from export.linear import Linear, LinearFactory
from training.config import TransformerConfig
from training.transformer import DecoderLayer, EncoderLayer, Transformer

# B batch rows   S source length   T target length   D d_model   H heads   K d_head
# F d_ff   V vocabulary   L layers   N slots   C cache capacity

_NUMPY_NAMES = {torch.float32: "float32", torch.float16: "float16"}


_Module = TypeVar("_Module", bound=nn.Module)


class _Modules(nn.ModuleList, Generic[_Module]):
    """A `ModuleList` that knows what it holds."""

    def __iter__(self) -> Iterator[_Module]:
        return super().__iter__()  # type: ignore[return-value]


class AddNorm(nn.Module):
    """The residual connection around a sublayer, with the layer norm that follows it.

    Post-norm (Vaswani et al. 2017, section 3.1) goes on with the norm alone; pre-norm (Xiong et al. 2020,
    arXiv:2002.04745) keeps the sum as the residual and takes the norm of the next sublayer.
    """

    def __init__(self, norm: nn.LayerNorm, *, pre_norm: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.detach().to(dtype))
        self.bias = nn.Parameter(norm.bias.detach().to(dtype))
        self.epsilon = norm.eps
        self.pre_norm = pre_norm

    def enter(self, x: Tensor) -> Tensor:
        """The norm alone: what the first sublayer of a pre-norm stack reads."""
        return operators.layer_normalization(x, self.weight, self.bias, epsilon=self.epsilon)

    def forward(self, output: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What the next sublayer reads, and what its output will be added to."""
        # Not SkipLayerNormalization: ONNX Runtime 1.31 takes 6 times as long for it on the CPU.
        total = output + residual
        normalized = self.enter(total)
        return normalized, total if self.pre_norm else normalized


class FeedForward(nn.Module):
    """FFN(x) = max(0, xW₁ + b₁)W₂ + b₂ (Vaswani et al. 2017, equation 2)."""

    def __init__(self, layer: EncoderLayer | DecoderLayer, path: str, linear: LinearFactory) -> None:
        super().__init__()
        self.inner = linear(f"{path}.feed_forward.inner", [layer.feed_forward.inner])
        self.outer = linear(f"{path}.feed_forward.outer", [layer.feed_forward.outer])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return self.outer(hidden if self.outer.clamps_negative else torch.relu(hidden))


class Embedding(nn.Module):
    """Token embeddings scaled by √D, plus sinusoidal positions (Vaswani et al. 2017, sections 3.4, 3.5)."""

    def __init__(self, model: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(model.embedding.weight.detach().to(dtype))
        self.positions = nn.Parameter(model.positions.detach().to(dtype))
        self.scale = math.sqrt(model.config.d_model)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight) * self.scale + positions


class EncoderBlock(nn.Module):
    """One encoder layer over `(B·S, D)` rows."""

    def __init__(self, layer: EncoderLayer, path: str, linear: LinearFactory, num_heads: int) -> None:
        super().__init__()
        attention = layer.self_attention
        packed = [attention.query, attention.key, attention.value]
        self.query_key_value = linear(f"{path}.self_attention.query", packed)
        self.output = linear(f"{path}.self_attention.output", [attention.output])
        self.feed_forward = FeedForward(layer, path, linear)
        self.num_heads = num_heads

    def attend(self, x: Tensor, lengths: Tensor, source_length: int) -> Tensor:
        """Self-attention within each row of `(B, S)`."""
        packed = self.query_key_value(x)  # (B*S, 3D)
        packed = packed.reshape(-1, source_length, packed.shape[1])  # (B, S, 3D)
        query, key, value = packed.chunk(3, dim=2)
        attended = operators.multi_head_attention(query, key, value, lengths, num_heads=self.num_heads)
        return self.output(attended.reshape(-1, x.shape[1]))


class DecoderBlock(nn.Module):
    """One decoder layer, for one position a row and for several."""

    def __init__(self, layer: DecoderLayer, path: str, linear: LinearFactory, num_heads: int) -> None:
        super().__init__()
        attention, cross = layer.self_attention, layer.cross_attention
        packed = [attention.query, attention.key, attention.value]
        self.query_key_value = linear(f"{path}.self_attention.query", packed)
        self.output = linear(f"{path}.self_attention.output", [attention.output])
        self.cross_query = linear(f"{path}.cross_attention.query", [cross.query])
        self.cross_output = linear(f"{path}.cross_attention.output", [cross.output])
        self.feed_forward = FeedForward(layer, path, linear)
        self.num_heads = num_heads

    def attend(
        self, x: Tensor, cache: tuple[Tensor, Tensor], lengths: Tensor, capacity: Tensor, target_length: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Masked self-attention of `(B·T, D)` rows; the cache grows by T positions."""
        packed = self.query_key_value(x)  # (B*T, 3D)
        packed = packed.view(-1, target_length, packed.shape[1])  # (B, T, 3D)
        attended, key, value = operators.group_query_attention(
            packed, None, None, *cache, lengths, capacity, num_heads=self.num_heads
        )
        return self.output(attended.reshape(-1, x.shape[1])), key, value

    def attend_memory(
        self, x: Tensor, memory: Sequence[Tensor], lengths: Tensor, capacity: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-attention of one position a row, over the row's own source positions.

        The operator always appends; it is handed the last source position again, which lands where it is.
        """
        key, value, last_key, last_value = memory
        query = self.cross_query(x).unsqueeze(1)  # (B, 1, D)
        attended, key, value = operators.group_query_attention(
            query, last_key, last_value, key, value, lengths, capacity, num_heads=self.num_heads
        )
        return self.cross_output(attended.squeeze(1)), key, value

    def attend_memory_fully(
        self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor, target_length: int
    ) -> tuple[Tensor, Tensor]:
        """Cross-attention of T positions a row by its definition (equation 1); also its weights.

        Args:
            x: `(B·T, D)`.
            key: `(B, H, C, K)`.
            value: `(B, H, C, K)`.
            mask: `(B, 1, 1, C)`, True = may attend.
            target_length: T.
        """
        H, K = self.num_heads, key.shape[3]
        query = self.cross_query(x).view(-1, target_length, H, K).transpose(1, 2)  # (B, H, T, K)
        scores = query @ key.transpose(2, 3) / math.sqrt(K)  # (B, H, T, C)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        attended = (weights @ value).transpose(1, 2).reshape(-1, x.shape[1])  # (B*T, D)
        return self.cross_output(attended), weights


class Graph(nn.Module):
    """A graph to export: `forward` takes and returns tensors in the order of `inputs` and `outputs`.

    Attributes:
        inputs: What it is given.
        outputs: What it answers.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__()
        self.config: TransformerConfig = model.config
        self.dtype = linear.dtype
        self.embedding = Embedding(model, self.dtype)

    def _cache_specs(self) -> list[TensorSpec]:
        return self._layer_specs(names.cache_key, names.cache_value, Role.CACHE, Axis.CACHE_CAPACITY)

    def _memory_specs(self) -> list[TensorSpec]:
        return self._layer_specs(names.memory_key, names.memory_value, Role.MEMORY, Axis.MEMORY_CAPACITY)

    def _last_specs(self) -> list[TensorSpec]:
        axes = (Axis.BATCH, 1, self.config.d_model)
        return [
            TensorSpec(name(layer), _NUMPY_NAMES[self.dtype], axes, Role.MEMORY)
            for layer in range(self.config.num_decoder_layers)
            for name in (names.last_key, names.last_value)
        ]

    def _layer_specs(
        self, key_name: Callable[[int], str], value_name: Callable[[int], str], role: Role, capacity: Axis
    ) -> list[TensorSpec]:
        axes = (Axis.BATCH, self.config.num_heads, capacity, self.config.d_head)
        return [
            TensorSpec(name(layer), _NUMPY_NAMES[self.dtype], axes, role)
            for layer in range(self.config.num_decoder_layers)
            for name in (key_name, value_name)
        ]


class EncodeGraph(Graph):
    """Source to memory: the encoder, and the decoder's cross-attention keys and values of every layer."""

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__(model, linear)
        H = self.config.num_heads
        self.blocks = _Modules[EncoderBlock](
            EncoderBlock(layer, f"encoder_layers.{i}", linear, H)
            for i, layer in enumerate(_Modules[EncoderLayer](model.encoder_layers))
        )
        self.norms = _norms(
            self.config, _sublayer_norms(model.encoder_layers), model.encoder_norm, self.dtype
        )
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
    """One target position for all running rows, cache and memory in place."""

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__(model, linear)
        self.decoder = _Decoder(model, linear)
        cache, memory = self._cache_specs(), self._memory_specs()
        self.inputs = (
            TensorSpec(names.TOKEN_IDS, "int64", (Axis.BATCH,), Role.TOKEN),
            TensorSpec(names.CACHE_LENGTHS, "int32", (Axis.BATCH,), Role.TOKEN),
            TensorSpec(names.SOURCE_LENGTHS, "int32", (Axis.BATCH,), Role.TOKEN),
            TensorSpec(names.CACHE_CAPACITY, "int32", (), Role.CAPACITY),
            TensorSpec(names.MEMORY_CAPACITY, "int32", (), Role.CAPACITY),
            *cache,
            *memory,
            *self._last_specs(),
        )
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, self.config.vocab_size), Role.LOGITS)
        self.outputs = (logits, *_outs(cache), *_outs(memory))

    def forward(
        self,
        token_ids: Tensor,
        cache_lengths: Tensor,
        source_lengths: Tensor,
        cache_capacity: Tensor,
        memory_capacity: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, ...]:
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
                hidden, (*memory[pair], *last[pair]), source_lengths - 1, memory_capacity
            )
            new_memory += (key, value)
            hidden, residual = next(norms)(output, residual)
            hidden, residual = next(norms)(block.feed_forward(hidden), residual)
        return (self.decoder.logits(hidden, self.embedding), *new_cache, *new_memory)


class DecodeGraph(Graph):
    """T target positions at once on an empty cache: their labels' log-probabilities, and the alignment."""

    def __init__(self, model: Transformer, linear: LinearFactory, *, alignment_layer: int) -> None:
        super().__init__(model, linear)
        self.decoder = _Decoder(model, linear)
        self.alignment_layer = alignment_layer
        positions = (Axis.BATCH, Axis.TARGET_LENGTH)
        cache = self._cache_specs()
        self.inputs = (
            TensorSpec(names.TARGET_IDS, "int64", positions, Role.TOKEN),
            TensorSpec(names.LABEL_IDS, "int64", positions, Role.TOKEN),
            TensorSpec(names.SOURCE_LENGTHS, "int32", (Axis.BATCH,), Role.TOKEN),
            *cache,
            *self._memory_specs(),
        )
        self.outputs = (
            TensorSpec(names.LOG_PROBABILITIES, "float32", positions, Role.SCORE),
            TensorSpec(names.ATTENTION, "float32", (*positions, Axis.MEMORY_CAPACITY), Role.ATTENTION),
            *_outs(cache),
        )

    def forward(
        self, target_ids: Tensor, label_ids: Tensor, source_lengths: Tensor, *buffers: Tensor
    ) -> tuple[Tensor, ...]:
        B, T = target_ids.shape
        num_tensors = 2 * self.config.num_decoder_layers
        cache, memory = buffers[:num_tensors], buffers[num_tensors:]
        last_position = torch.full_like(source_lengths, T - 1)
        new_length = torch.scalar_tensor(T, dtype=torch.int32)
        mask = torch.arange(memory[0].shape[2]) < source_lengths[:, None, None, None]  # (B, 1, 1, C)
        x = self.embedding(target_ids, self.embedding.positions[:T]).view(-1, self.config.d_model)  # (B*T, D)
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
        logits = self.decoder.logits(hidden, self.embedding)  # (B*T, V)
        scores = torch.log_softmax(logits, dim=-1).gather(1, label_ids.view(-1, 1)).view(B, T)
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
        self.norms = _norms(config, _sublayer_norms(model.decoder_layers), model.decoder_norm, linear.dtype)
        self.output: Linear | None = linear.tied_output(model.embedding)

    def logits(self, hidden: Tensor, embedding: Embedding) -> Tensor:
        """float32 logits `(rows, V)`, by the embedding matrix itself where the precision allows."""
        if self.output is not None:
            return self.output(hidden)
        return operators.gemm(hidden, embedding.weight, None, transposed=True).to(torch.float32)


def _outs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [TensorSpec(names.out(spec.name), spec.dtype, spec.axes, spec.role) for spec in specs]


def _sublayer_norms(layers: nn.ModuleList) -> list[nn.LayerNorm]:
    return [norm for layer in layers for norm in layer.children() if isinstance(norm, nn.LayerNorm)]


def _norms(
    config: TransformerConfig, norms: list[nn.LayerNorm], final: nn.Module, dtype: torch.dtype
) -> _Modules[AddNorm]:
    """The norms in the order in which a graph meets them."""
    pre_norm = config.norm == "pre"
    if pre_norm:
        assert isinstance(final, nn.LayerNorm)
        norms = [*norms, final]
    return _Modules(AddNorm(norm, pre_norm=pre_norm, dtype=dtype) for norm in norms)


def _enter(x: Tensor, norms: Iterator[AddNorm], config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """What the first sublayer reads, and what its output will be added to."""
    if config.norm == "post":
        return x, x
    return next(norms).enter(x), x
