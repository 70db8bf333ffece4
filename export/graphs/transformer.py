"""The three graphs of a Transformer, as small torch modules over trained weights.

Each module lists its inputs and outputs as `TensorSpec`s, with their names, axes and roles, and expresses the
model in operators for which ONNX Runtime has fused kernels. `training.models.transformer` defines their
computation, and `export.parity` proves that the graphs compute the same. Inside a graph every token is one
row of a matrix; only attention separates batch and position. `export.graphs.layout` decides whether padding
is a row, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
    front_specs,
    outs,
    source_specs,
    token_specs,
)
from seq2seq_serve.export.graphs.blocks import (
    AddNorm,
    DecoderBlock,
    EncoderBlock,
    HeadNorm,
    MergedBlock,
)
from seq2seq_serve.export.graphs.layout import Layout, PackedLayout, PaddedLayout
from seq2seq_serve.export.graphs.linear import Chooser, Linear, LinearFactory
from seq2seq_serve.training.models.base import Layers
from seq2seq_serve.training.models.fronts import PatchMap, SoundMaps, neighbours, patches
from seq2seq_serve.training.models.options import Rotary, StackConfig
from seq2seq_serve.training.models.positions import relative_bias
from seq2seq_serve.training.models.transformer import Stack, Transformer, alignment_layer

# B batch rows   S source length   T target length   D d_model   H heads   K d_head
# G heads of keys and values   V vocabulary   L layers   C cache capacity

_FLOAT16_SCALE = 1 / 64  # a power of two, so that it is exact


class TransformerGraph(Graph):
    """The common part of the three graphs, which begin with the embedding of one stack.

    Attributes:
        has_own_operators: Whether a step's self-attention is in the project's own operators.
        distance_bias: The bias `(H, D)` of a step's self-attention by distance, if such an operator adds it.
        cache_dtype: The type of the cache.
        memory_dtype: The type of the memory.
    """

    def __init__(self, model: Transformer, stack: Stack, linear: LinearFactory) -> None:
        super().__init__()
        self.dtype = linear.dtype
        config, scale = stack.config, _residual_scale(stack.config, linear)
        self.is_pre_norm = config.is_pre_norm
        if stack.embedding is not None:
            self.embedding = Embedding(stack.embedding, linear, config.embedding_scale * scale)
        self.positions = _constant(stack.positions)
        bias = stack.relative_bias
        self.relative_bias = None if bias is None else _constant(bias.table())
        self.distance_bias: nn.Parameter | None = None
        self.zero_position_id, self.unscaled_id = config.zero_position_id, config.unscaled_id
        self.unscaled = None if stack.unscaled is None else _constant(stack.unscaled * scale)
        self.kinds = config.layer_kinds
        self.rotaries = list(dict.fromkeys(kind.rotary for kind in self.kinds if kind.rotary))
        self.rotations = Layers[_Rotation](_Rotation(rotary, stack) for rotary in self.rotaries)
        self.embedding_norm: AddNorm | None = None
        if config.has_embedding_norm:
            self.embedding_norm = AddNorm(
                stack.embedding_norm, None, None, None, pre_norm=False, linear=linear
            )
        decoder = model.decoder.config
        is_merged = model.architecture.is_merged
        self.has_own_operators = (
            not is_merged and _is_plain(model.decoder) and model.decoder.relative_bias is None
        )
        self.cache_dtype = linear.cache_dtype if self.has_own_operators else linear.dtype
        self.memory_dtype = linear.dtype if is_merged else linear.cache_dtype
        self.num_layers = decoder.num_layers
        self.num_key_value_heads, self.d_head = decoder.num_key_value_heads, decoder.d_head
        self.d_model = config.d_model
        self.vocab_size = len(model.output_weight)

    def embed(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """The first residual `(rows, D)` of token ids with their positions `(…, D)`."""
        if positions is not None and self.zero_position_id is not None:
            positions = positions * (ids != self.zero_position_id).unsqueeze(-1)
        x = self.embedding(ids)
        if self.unscaled is not None:
            assert self.unscaled_id is not None
            x = torch.where(ids.eq(self.unscaled_id).unsqueeze(-1), self.unscaled, x)
        return self.placed(x, positions)

    def placed(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """The first residual `(rows, D)` of embeddings with their positions, both `(…, D)`."""
        if positions is not None:
            x = x + positions
        rows: Tensor = x if x.dim() == 2 else x.view(-1, self.d_model)
        return rows if self.embedding_norm is None else self.embedding_norm.enter(rows)

    def enter(self, x: Tensor, norms: Iterator[AddNorm]) -> tuple[Tensor, Tensor]:
        """The input of the first sublayer, and the residual to which its output is added."""
        return (next(norms).enter(x) if self.is_pre_norm else x), x

    def _bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """The bias `(B or 1, H, T, S)` of self-attention scores between positions `(…, T)` and `(S,)`."""
        if self.relative_bias is None:
            return None
        bias = relative_bias(self.relative_bias, queries, keys).movedim(-1, -3)
        return bias if bias.dim() == 4 else bias.unsqueeze(0)

    def rotation(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The cosines and sines of a layer's rotary embeddings."""
        rotary = self.kinds[layer].rotary
        return None if rotary is None else self.rotations[self.rotaries.index(rotary)]()

    def _cache_specs(self) -> list[TensorSpec]:
        key, value = names.cache_key, names.cache_value
        return self._layer_specs(key, value, Role.CACHE, Axis.CACHE_CAPACITY, self.cache_dtype)

    def _memory_specs(self) -> list[TensorSpec]:
        key, value = names.memory_key, names.memory_value
        return self._layer_specs(key, value, Role.MEMORY, Axis.MEMORY_CAPACITY, self.memory_dtype)

    def _last_specs(self) -> list[TensorSpec]:
        axes = (Axis.BATCH, 1, self.num_key_value_heads * self.d_head)
        return [
            TensorSpec(name(layer), TYPE_NAMES[self.dtype], axes, Role.MEMORY)
            for layer in range(self.num_layers)
            for name in (names.last_key, names.last_value)
        ]

    def _layer_specs(
        self,
        key_name: Callable[[int], str],
        value_name: Callable[[int], str],
        role: Role,
        capacity: Axis,
        dtype: torch.dtype,
    ) -> list[TensorSpec]:
        axes = (Axis.BATCH, self.num_key_value_heads, capacity, self.d_head)
        return [
            TensorSpec(name(layer), TYPE_NAMES[dtype], axes, role)
            for layer in range(self.num_layers)
            for name in (key_name, value_name)
        ]


def make_graphs(
    model: Transformer, linear: LinearFactory, suppressed_token_ids: Sequence[int] = ()
) -> dict[Verb, Graph]:
    """Create the three graphs of a Transformer, with maps from the factory.

    A step that selects the next token itself never selects a suppressed one.
    """
    decoder = Decoder(model, linear)
    layer = alignment_layer(len(model.decoder_layers))
    step = SeparateStepGraph if linear.is_fused else SharingStepGraph
    return {
        Verb.ENCODE: EncodeGraph(model, linear),
        Verb.STEP: step(model, linear, decoder, suppressed_token_ids),
        Verb.DECODE: DecodeGraph(
            model, linear, decoder, alignment_layer=layer, heads=model.architecture.alignment_heads
        ),
    }


class EncodeGraph(TransformerGraph):
    """Turns a source into its memory: the cross-attention keys and values of every decoder layer.

    A source is a text, or a sound or picture, which has the same number of positions in every row of a batch.
    """

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        stack, config = model.encoder, model.encoder.config
        super().__init__(model, stack, linear)
        scale, is_merged = _residual_scale(config, linear), model.architecture.is_merged
        self.front = None if stack.front is None else _front(stack.front, linear)
        self.is_packed = not linear.is_fused
        self.blocks = Layers[EncoderBlock](
            EncoderBlock(layer, config, linear, scale) for layer in stack.layers
        )
        self.has_plain_attention = config.has_plain_attention
        self.norms = _norms(stack, self.blocks, linear)
        cross = [layer.memory_attention for layer in model.decoder_layers]
        self.memory = linear([module for attention in cross for module in (attention.key, attention.value)])
        norms = [norm for attention in cross if (norm := HeadNorm.of(attention, "key_norm"))]
        self.key_norms = Layers[HeadNorm](norms)
        self.has_last = linear.is_fused and not is_merged
        memory = self._memory_specs()
        sources = source_specs() if stack.front is None else front_specs(stack.front)
        self.inputs = (*sources, *memory)
        self.outputs = (*outs(memory), *(self._last_specs() if self.has_last else ()))

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        G, K = self.num_key_value_heads, self.d_head
        layout: Layout
        if self.front is None:
            ids, lengths, *memory = given
            B, S = ids.shape
            layout = PackedLayout(S, lengths) if self.is_packed else PaddedLayout((B, S), lengths)
            x = self.embed(*layout.tokens(ids, self.positions))  # (N, D)
        else:
            source, *memory = given
            embedded = self.front(source)
            B, S, _ = embedded.shape
            positions = None if self.positions is None else self.positions[:S]
            layout, x = PaddedLayout((B, S), None), self.placed(embedded, positions)  # (N, D)
        if self.adapted is not None:
            self.adapted.spread(layout.spread)
        places = torch.arange(S)
        bias = self._bias(places, places)
        masks = self._masks(places, layout.lengths)
        norms = iter(self.norms)
        hidden, residual = self.enter(x, norms)
        for layer, block in enumerate(self.blocks):
            if self.has_plain_attention:
                output = block.attend(hidden, layout, bias)
            else:
                mask = masks[self.kinds[layer].window]
                output = block.attend_fully(hidden, layout, mask, self.rotation(layer))
            hidden, residual = next(norms)(output, residual)
            hidden, residual = next(norms)(block.feed_forward(hidden), residual)
        keys_and_values = self.memory(hidden)  # (N, 2L * GK)
        if not self.key_norms:  # one node for all of them
            keys_and_values = keys_and_values.to(self.memory_dtype)
        heads = list(layout.heads(keys_and_values, (len(memory), G, K)))
        for layer, norm in enumerate(self.key_norms):
            heads[2 * layer] = norm(heads[2 * layer])
        written = layout.write(memory, [head.to(self.memory_dtype) for head in heads])
        if not self.has_last:
            return tuple(written)
        assert isinstance(layout, PaddedLayout)
        return (*written, *layout.last(keys_and_values).chunk(len(memory), dim=2))  # (B, 1, GK) each

    def _masks(self, places: Tensor, lengths: Tensor | None) -> dict[tuple[int, int] | None, Tensor]:
        """The mask `(B, 1, 1 or S, S)` of each window, True = may attend; none in plain attention."""
        if lengths is None or self.has_plain_attention:
            return {}
        mask = places < lengths[:, None, None, None]
        return {
            kind.window: mask if kind.window is None else mask & kind.sees(places, places)
            for kind in self.kinds
        }


def _front(front: SoundMaps | PatchMap, linear: LinearFactory) -> nn.Module:
    return _SoundMaps(front, linear) if isinstance(front, SoundMaps) else _PatchMap(front, linear)


class _SoundMaps(nn.Module):
    """The maps of a spectrogram `(B, bands, frames)` to embeddings `(B, frames / 2, D)`."""

    def __init__(self, front: SoundMaps, linear: LinearFactory) -> None:
        super().__init__()
        self.dtype = linear.dtype
        self.first = linear([front.first])
        self.last = linear([front.last])

    def forward(self, sound: Tensor) -> Tensor:
        x = sound.to(self.dtype).transpose(1, 2)  # (B, T, C)
        for stride, linear in ((1, self.first), (2, self.last)):
            near = neighbours(x, stride)
            B, T, width = near.shape
            x = operators.gelu(linear(near.reshape(-1, width))).view(B, T, -1)
        return x


class _PatchMap(nn.Module):
    """The map of pictures `(B, size, size, 3)` to the embeddings `(B, S, D)` of tokens and patches."""

    def __init__(self, front: PatchMap, linear: LinearFactory) -> None:
        super().__init__()
        self.dtype, self.patch_size = linear.dtype, front.patch_size
        self.mean, self.deviation, self.tokens = (
            nn.Parameter(values.detach(), requires_grad=False)
            for values in (torch.tensor(front.mean), torch.tensor(front.deviation), front.tokens)
        )
        self.last = linear([front.last])

    def forward(self, pictures: Tensor) -> Tensor:
        normal = (pictures.to(self.dtype) - self.mean) / self.deviation
        squares = patches(normal, self.patch_size)
        B, num_places, width = squares.shape
        places = self.last(squares.reshape(-1, width)).view(B, num_places, -1)
        return torch.cat([self.tokens.expand(B, -1, -1), places], dim=1)


class OneStepGraph(TransformerGraph):
    """One target position for all running rows.

    The form for CUDA also writes the inputs of the next step, the most probable tokens and the lengths, so
    that a greedy step is one replayed graph.
    """

    has_few_rows = True

    def __init__(
        self,
        model: Transformer,
        linear: LinearFactory,
        decoder: Decoder,
        suppressed_token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(model, model.decoder, linear)
        self.decoder = decoder
        self.feeds_itself = linear.is_fused
        added = torch.zeros(self.vocab_size)
        added[list(suppressed_token_ids)] = -math.inf
        self.is_suppressed = _constant(added < 0) if suppressed_token_ids else None
        self.added = nn.Parameter(added, requires_grad=False)  # to the logits, before a choice
        lengths = names.PREVIOUS_LENGTHS if self.feeds_itself else names.CACHE_LENGTHS
        self.columns = token_specs(lengths, names.LAST_SOURCE_POSITIONS)
        token_ids, cache_lengths, _ = self.columns
        following = [replace(token_ids, axes=(Axis.BATCH, 1)), cache_lengths] if self.feeds_itself else []
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, self.vocab_size), Role.LOGITS)
        self.answers = (logits, *outs(following))

    def lengths(self, given: Tensor) -> Tensor:
        """The positions in the cache of each row, of the graph's input."""
        # All other nodes read the sum, so none can read the input after the write in place.
        return given + 1 if self.feeds_itself else given

    def answer(self, hidden: Tensor, cache_lengths: Tensor) -> tuple[Tensor, ...]:
        """The logits of decoder states `(B, D)`, and the inputs of the next step."""
        projection = self.decoder.logits
        if not self.feeds_itself:
            return (projection(hidden, self.embedding),)
        if projection.cap is None:
            scores = projection.products(hidden, self.embedding)
            return *operators.choice(scores, self.added), cache_lengths
        allowed = logits = projection(hidden, self.embedding)
        if self.is_suppressed is not None:
            allowed = logits.masked_fill(self.is_suppressed, -math.inf)
        return logits, operators.most_probable(allowed), cache_lengths


class StepGraph(OneStepGraph):
    """One target position for all running rows, with the cache in place."""

    def begin(self, token_ids: Tensor, given_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The first residual `(B, D)`, and the positions in the cache of each row, of the graph's inputs."""
        table, is_plain = self.embedding.weight, self.zero_position_id is None and self.unscaled_id is None
        is_one_kernel = self.feeds_itself and is_plain and operators.takes(self.d_model)
        if is_one_kernel and table is not None and self.positions is not None:
            x, lengths = operators.cuda_embedding(token_ids, given_lengths, table, self.positions)
            return self.placed(x, None), lengths
        lengths, positions = self.lengths(given_lengths), None
        if self.positions is not None:
            positions = nn.functional.embedding(lengths, self.positions)
        return self.embed(token_ids, positions), lengths

    def states(
        self,
        x: Tensor,
        cache_lengths: Tensor,
        cache_rows: Tensor | None,
        cache_capacity: Tensor,
        cache: Sequence[Tensor],
        attend_memory: Callable[[int, DecoderBlock, Tensor], Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """The decoder's states `(B, D)` of the first residual `(B, D)`, and the new cache.

        Cross-attention takes a layer's number, its block, and the input `(B, D)`; it returns `(B, D)`.
        """
        bias = self._bias(cache_lengths[:, None], torch.arange(cache[0].shape[2]))
        norms = iter(self.decoder.norms)
        hidden, residual = self.enter(x, norms)
        new_cache: list[Tensor] = []
        for layer, block in enumerate(self.decoder.blocks):
            buffers, rotation = (cache[2 * layer], cache[2 * layer + 1]), self.rotation(layer)
            if self.has_own_operators:
                output, key, value = block.attend_once(
                    hidden, buffers, cache_lengths, cache_rows, cache_capacity, self.distance_bias
                )
            else:
                output, key, value = block.attend(
                    hidden, buffers, cache_lengths, cache_capacity, 1, bias, rotation
                )
            new_cache += (key, value)
            hidden, residual = next(norms)(output, residual)
            hidden, residual = next(norms)(attend_memory(layer, block, hidden), residual)
            hidden, residual = next(norms)(block.feed_forward(hidden), residual)
        return hidden, new_cache


class SharingStepGraph(StepGraph):
    """The step for the CPU, in which rows may read the memory of another row of their request.

    With the project's own operators a row may have several positions in a step, such as those of a draft.
    If its weights are quantised it also finds the most probable tokens, which callers may want instead of
    logits, and the log-probabilities of the tokens that they name.
    """

    def __init__(
        self,
        model: Transformer,
        linear: LinearFactory,
        decoder: Decoder,
        suppressed_token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(model, linear, decoder, suppressed_token_ids)
        cache = self._cache_specs()
        linear_map, is_capped = decoder.logits.linear, decoder.logits.cap is not None
        self.chooser = linear_map if isinstance(linear_map, Chooser) and not is_capped else None
        rows = TensorSpec(names.CACHE_ROWS, "int64", (Axis.BATCH,), Role.TOKEN)
        places = [rows] if self.has_own_operators else []
        choice: list[TensorSpec] = []
        if self.chooser is not None:
            choice = [
                TensorSpec(names.NUM_CANDIDATES, "int64", (1,), Role.CANDIDATES),
                TensorSpec(names.PLACES, "int64", (Axis.PLACES, 2), Role.CANDIDATES),
            ]
            axes = (Axis.BATCH, Axis.CANDIDATES)
            self.answers = (
                *self.answers,
                TensorSpec(names.CANDIDATE_IDS, "int64", axes, Role.CANDIDATES),
                TensorSpec(names.LOG_PROBABILITIES, "float32", axes, Role.CANDIDATES),
                TensorSpec(names.FOUND, "float32", (Axis.PLACES,), Role.CANDIDATES),
            )
        self.inputs = (
            *self.columns,
            TensorSpec(names.OWNERS, "int64", (Axis.BATCH,), Role.TOKEN),
            TensorSpec(names.CACHE_CAPACITY, "int32", (), Role.CAPACITY),
            TensorSpec(names.MEMORY_CAPACITY, "int32", (), Role.CAPACITY),
            *cache,
            *self._memory_specs(),
            *places,
            *choice,
        )
        self.outputs = (*self.answers, *outs(cache))

    def forward(
        self,
        token_ids: Tensor,
        cache_lengths: Tensor,
        last_source_positions: Tensor,
        owners: Tensor,
        cache_capacity: Tensor,
        memory_capacity: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        num_tensors = 2 * self.num_layers
        cache, memory = buffers[:num_tensors], buffers[num_tensors : 2 * num_tensors]
        cache_rows = buffers[2 * num_tensors] if self.has_own_operators else None

        def attend_memory(layer: int, block: DecoderBlock, x: Tensor) -> Tensor:
            pair = memory[2 * layer : 2 * layer + 2]
            return block.attend_memory(x, pair, last_source_positions, owners, memory_capacity)

        x, cache_lengths = self.begin(token_ids, cache_lengths)
        hidden, new_cache = self.states(x, cache_lengths, cache_rows, cache_capacity, cache, attend_memory)
        if self.chooser is None:
            return (*self.answer(hidden, cache_lengths), *new_cache)
        chosen = self.chooser.choose(hidden, self.added, *buffers[-2:])
        return (*chosen, *new_cache)


class SeparateStepGraph(StepGraph):
    """The step for CUDA, in which every row reads its own memory.

    A captured step has no branches and its shapes are fixed. Its operator appends a position to the memory,
    so it gets the last source position again and rewrites it in place.
    """

    def __init__(
        self,
        model: Transformer,
        linear: LinearFactory,
        decoder: Decoder,
        suppressed_token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(model, linear, decoder, suppressed_token_ids)
        has_operators = operators.takes_on_cuda(self.d_head)
        if self.relative_bias is not None and has_operators and _is_plain(model.decoder):
            by_distance = self.relative_bias[len(self.relative_bias) // 2 :].t()  # (H, D)
            self.distance_bias, self.relative_bias = _constant(by_distance.contiguous()), None
            self.has_own_operators = True
        self.has_own_operators &= has_operators
        cache, memory = self._cache_specs(), self._memory_specs()
        self.inputs = (
            *self.columns,
            TensorSpec(names.CACHE_CAPACITY, "int32", (), Role.CAPACITY),
            TensorSpec(names.MEMORY_CAPACITY, "int32", (), Role.CAPACITY),
            *cache,
            *memory,
            *self._last_specs(),
        )
        self.outputs = (*self.answers, *outs(cache), *outs(memory))

    def forward(
        self,
        token_ids: Tensor,
        cache_lengths: Tensor,
        last_source_positions: Tensor,
        cache_capacity: Tensor,
        memory_capacity: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        x, cache_lengths = self.begin(token_ids, cache_lengths)
        num_tensors = 2 * self.num_layers
        cache, memory, last = (buffers[i : i + num_tensors] for i in range(0, 3 * num_tensors, num_tensors))
        new_memory: list[Tensor] = []

        def attend_memory(layer: int, block: DecoderBlock, x: Tensor) -> Tensor:
            pair = slice(2 * layer, 2 * layer + 2)
            output, key, value = block.attend_memory_in_place(
                x, (*memory[pair], *last[pair]), last_source_positions, memory_capacity
            )
            new_memory.extend((key, value))
            return output

        hidden, new_cache = self.states(x, cache_lengths, None, cache_capacity, cache, attend_memory)
        return (*self.answer(hidden, cache_lengths), *new_cache, *new_memory)


class DecodeGraph(TransformerGraph):
    """T target positions at once, after those in the cache: log-probabilities of labels, and the alignment.

    Only the first positions, as many as there are labels, are projected to logits. With an empty cache there
    may be any number of rows, otherwise only one.
    """

    def __init__(
        self,
        model: Transformer,
        linear: LinearFactory,
        decoder: Decoder,
        *,
        alignment_layer: int,
        heads: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(model, model.decoder, linear)
        self.decoder = decoder
        self.alignment_layer, self.alignment_heads = alignment_layer, heads
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
            TensorSpec(
                names.ATTENTION,
                "float32",
                (*positions, *([len(heads)] if heads else []), Axis.MEMORY_CAPACITY),
                Role.ATTENTION,
            ),
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
        self._spread(B, T)
        num_tensors = 2 * self.num_layers
        cache, memory = buffers[:num_tensors], buffers[num_tensors:]
        new_length = first_position + torch.scalar_tensor(T, dtype=torch.int32)
        last_position = (new_length - 1).expand(B)
        mask = torch.arange(memory[0].shape[2]) < source_lengths[:, None, None, None]  # (B, 1, 1, C)
        places = first_position + torch.arange(T)
        positions = None if self.positions is None else nn.functional.embedding(places, self.positions)
        x = self.embed(target_ids, positions)  # (B*T, D)
        bias = self._bias(places, torch.arange(cache[0].shape[2]))
        if bias is not None:
            bias = operators.first(bias, new_length, axis=3)
        norms = iter(self.decoder.norms)
        hidden, residual = self.enter(x, norms)
        new_cache: list[Tensor] = []
        alignment, heads = x, list[Tensor]()
        for layer, block in enumerate(self.decoder.blocks):
            output, key, value = block.attend(
                hidden,
                (cache[2 * layer], cache[2 * layer + 1]),
                last_position,
                new_length,
                T,
                bias,
                self.rotation(layer),
            )
            new_cache += (key, value)
            hidden, residual = next(norms)(output, residual)
            output, weights = block.attend_memory_fully(
                hidden, memory[2 * layer], memory[2 * layer + 1], mask, T
            )
            if layer == self.alignment_layer:
                alignment = weights.to(torch.float32).mean(dim=1)  # (B, T, C)
            heads += [weights[:, head] for one, head in self.alignment_heads if one == layer]
            hidden, residual = next(norms)(output, residual)
            hidden, residual = next(norms)(block.feed_forward(hidden), residual)
        if heads:
            alignment = torch.stack(heads, dim=2).to(torch.float32)  # (B, T, heads, C)
        return (self._scores(hidden, label_ids, B, T), alignment, *new_cache)

    def _spread(self, B: int, T: int) -> None:
        """Gives all positions of a batch row its adapter."""
        if self.adapted is not None:
            self.adapted.spread(lambda ids: ids.unsqueeze(1).expand(B, T).reshape(-1))

    def _scores(self, hidden: Tensor, label_ids: Tensor, B: int, T: int) -> Tensor:
        """The log-probabilities `(B, P)` of labels, after the first P of T states of each row."""
        P, D = label_ids.shape[1], self.d_model
        scored = operators.first(hidden.view(B, T, D), P).view(-1, D)
        logits = self.decoder.logits(scored, self.embedding)  # (B*P, V)
        return torch.log_softmax(logits, dim=-1).gather(1, label_ids.view(-1, 1)).view(B, P)


class Decoder(nn.Module):
    """The common part of step and decode: the blocks, the norms between them, the output projection."""

    def __init__(self, model: Transformer, linear: LinearFactory) -> None:
        super().__init__()
        stack, config = model.decoder, model.decoder.config
        architecture, scale = model.architecture, _residual_scale(config, linear)
        self.blocks = Layers[Any](
            MergedBlock(layer, config, linear, scale)
            if architecture.is_merged
            else DecoderBlock(layer, config, layer.kind, linear, scale)
            for layer in model.decoder_layers
        )
        self.norms = _norms(stack, self.blocks, linear)
        self.logits = Projection(
            model.output_weight,
            linear,
            is_tied=model.output_weight is stack.embedding,
            bias=model.output_bias,
            scale=architecture.output_scale,
            cap=architecture.logits_cap,
        )


class _Rotation(nn.Module):
    """The tables of rotary embeddings, which the layers of a stack share: cosines and sines of angles."""

    def __init__(self, rotary: Rotary, stack: Stack) -> None:
        super().__init__()
        places = torch.arange(stack.max_positions)
        angles = rotary.angles(places, stack.config.d_head)  # (positions, K / 2)
        self.cosines = nn.Parameter(angles.cos(), requires_grad=False)
        self.sines = nn.Parameter(angles.sin(), requires_grad=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.cosines, self.sines


def _is_plain(decoder: Stack) -> bool:
    """Whether the project's operators can compute the self-attention: without rotation and window."""
    return all(kind.rotary is None and kind.window is None for kind in decoder.config.layer_kinds)


def _residual_scale(stack: StackConfig, linear: LinearFactory) -> float:
    """The factor of the residual in the graph. The norms remove it, so it does not change the results.

    In models with RMS norms the residual and the products of gated networks can exceed the range of float16.
    """
    return _FLOAT16_SCALE if stack.norm_kind == "rms" and linear.dtype is torch.float16 else 1.0


def _norms(
    stack: Stack, blocks: Iterable[EncoderBlock | DecoderBlock | MergedBlock], linear: LinearFactory
) -> Layers[AddNorm]:
    """The norms in the order of their use."""
    kinds = ("self_attention_norm", "cross_attention_norm", "feed_forward_norm")
    norms = [getattr(layer, kind) for layer in stack.layers for kind in kinds if hasattr(layer, kind)]
    ends = [pair for block in blocks for pair in block.ends()]
    firsts: list[Linear | None] = [first for first, _ in ends]
    lasts: list[Linear | None] = [last for _, last in ends]
    pre_norm = stack.config.is_pre_norm
    if pre_norm:
        norms, firsts, lasts = [*norms, stack.final_norm], [*firsts, None], [None, *lasts]
    else:
        firsts = [*firsts[1:], None]
    made: list[AddNorm] = []
    shift: Tensor | None = None  # of the residual that the next norm reads
    for norm, last, first in zip(norms, lasts, firsts, strict=True):
        made.append(
            AddNorm(
                norm,
                last,
                first,
                shift,
                pre_norm=pre_norm,
                linear=linear,
                residual_scale=_residual_scale(stack.config, linear),
            )
        )
        shift = None if pre_norm else made[-1].shift
    return Layers(made)


def _constant(table: Tensor | None) -> nn.Parameter | None:
    return None if table is None else nn.Parameter(table.detach(), requires_grad=False)
