"""The graphs of a Transformer whose decoder attends to its cache and its memory in one softmax (T5Gemma 2).

No operator of ONNX Runtime reads two buffers, so attention is by its definition. Its cost follows the
capacities of both buffers, and not, as in `export.graphs.transformer`, the lengths of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.export.graphs.base import Graph, outs
from seq2seq_serve.export.graphs.linear import LinearFactory
from seq2seq_serve.export.graphs.transformer import (
    DecodeGraph,
    Decoder,
    EncodeGraph,
    OneStepGraph,
    TransformerGraph,
)
from seq2seq_serve.training.models.transformer import Transformer, alignment_layer

# B batch rows   T target length   D d_model   V vocabulary   L layers   C cache capacity   S memory capacity


def make_merged_graphs(
    model: Transformer, linear: LinearFactory, suppressed_token_ids: Sequence[int] = ()
) -> dict[Verb, Graph]:
    """Create the three graphs of a Transformer with merged attention, see `make_graphs`."""
    decoder, layer = Decoder(model, linear), alignment_layer(len(model.decoder_layers))
    return {
        Verb.ENCODE: EncodeGraph(model, linear),
        Verb.STEP: MergedStepGraph(model, linear, decoder, suppressed_token_ids),
        Verb.DECODE: MergedDecodeGraph(model, linear, decoder, alignment_layer=layer),
    }


class MergedStepGraph(OneStepGraph):
    """One target position for all running rows, with the cache in place; the memory is only read."""

    def __init__(
        self,
        model: Transformer,
        linear: LinearFactory,
        decoder: Decoder,
        suppressed_token_ids: Sequence[int] = (),
    ) -> None:
        super().__init__(model, linear, decoder, suppressed_token_ids)
        cache = self._cache_specs()
        self.inputs = (*self.columns, *cache, *self._memory_specs())
        self.outputs = (*self.answers, *outs(cache))

    def forward(
        self, token_ids: Tensor, cache_lengths: Tensor, last_source_positions: Tensor, *buffers: Tensor
    ) -> tuple[Tensor, ...]:
        cache_lengths = self.lengths(cache_lengths)
        positions = cache_lengths.to(torch.int64).unsqueeze(1)  # (B, 1)
        hidden, _, cache = _states(
            self, self.decoder, token_ids.unsqueeze(1), positions, last_source_positions + 1, buffers
        )
        return (*self.answer(hidden, cache_lengths), *cache)


class MergedDecodeGraph(DecodeGraph):
    """T target positions at once, as in `DecodeGraph`."""

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
        positions = (first_position.to(torch.int64) + torch.arange(T)).expand(B, T)
        hidden, weights, cache = _states(self, self.decoder, target_ids, positions, source_lengths, buffers)
        alignment = weights[self.alignment_layer].to(torch.float32).mean(dim=1)  # (B, T, S)
        return (self._scores(hidden, label_ids, B, T), alignment, *cache)


def _states(
    graph: TransformerGraph,
    decoder: Decoder,
    ids: Tensor,
    positions: Tensor,
    source_lengths: Tensor,
    buffers: tuple[Tensor, ...],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Decoder states `(B·T, D)` of ids at positions, both `(B, T)`, the memory's weights, and the cache."""
    num_tensors = 2 * graph.num_layers
    cache, memory = buffers[:num_tensors], buffers[num_tensors:]
    slots = torch.arange(cache[0].shape[2])
    seen = slots <= positions[:, None, :, None]  # (B, 1, T, C)
    masks = {
        kind.window: seen if kind.window is None else seen & kind.sees(positions[:, None], slots)
        for kind in graph.kinds
    }
    memory_mask = torch.arange(memory[0].shape[2]) < source_lengths[:, None, None, None]  # (B, 1, 1, S)
    norms = iter(decoder.norms)
    hidden, residual = graph.enter(graph.embed(ids, None), norms)
    new_cache: list[Tensor] = []
    all_weights = []
    for layer, (block, kind) in enumerate(zip(decoder.blocks, graph.kinds, strict=True)):
        first, second = 2 * layer, 2 * layer + 1
        output, key, value, weights = block.attend(
            hidden,
            positions,
            (cache[first], cache[second]),
            masks[kind.window],
            seen[:, :, -1:],
            (memory[first], memory[second]),
            memory_mask,
            graph.rotation(layer),
        )
        new_cache += (key, value)
        all_weights.append(weights)
        hidden, residual = next(norms)(output, residual)
        hidden, residual = next(norms)(block.feed_forward(hidden), residual)
    return hidden, all_weights, new_cache
