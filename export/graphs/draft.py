"""The graph of a draft: several steps of a shallow decoder, each fed what the one before it selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec
from seq2seq_serve.bundle.names import Axis, Role
from seq2seq_serve.export.graphs.blocks import DecoderBlock
from seq2seq_serve.export.graphs.linear import Int8Factory, Int8Linear
from seq2seq_serve.export.graphs.transformer import Decoder, StepGraph
from seq2seq_serve.training.models.transformer import Transformer

# P positions   R rows   D d_model

NUM_DRAFTED = 4  # tokens of a row: more are rarely all right, and each takes a step


class DraftGraph(StepGraph):
    """Drafts the next tokens of some rows, for the CPU.

    It reads the memory of the model's last layers, so it needs no encoder. Its own cache first grows by the
    positions that the rows have selected since the last call. It is in int8 in bundles of every precision,
    because a draft does not change what the model selects.

    Args:
        draft: The draft.
        num_layers: Those of the model's decoder.
        proposed_ids: The tokens that it proposes.
    """

    def __init__(self, draft: Transformer, num_layers: int, proposed_ids: Sequence[int]) -> None:
        linear = Int8Factory()
        super().__init__(draft, linear, Decoder(draft, linear))
        if not self.has_own_operators:
            raise ValueError("a model with relative positions, rotary ones or windows cannot draft")
        ids, bias = torch.tensor(proposed_ids), draft.output_bias
        weight = draft.output_weight[ids] * draft.architecture.output_scale
        self.chooser = Int8Linear(weight.detach().t(), None if bias is None else bias.detach()[ids])
        self.proposed_ids = nn.Parameter(ids, requires_grad=False)
        self.none_added = nn.Parameter(torch.zeros(len(ids)), requires_grad=False)
        first = num_layers - self.num_layers
        cache = self._layer_specs(names.draft_key, names.draft_value, Role.CACHE, Axis.CACHE_CAPACITY)
        memory = self._layer_specs(
            lambda layer: names.memory_key(first + layer),
            lambda layer: names.memory_value(first + layer),
            Role.MEMORY,
            Axis.MEMORY_CAPACITY,
        )
        rows = TensorSpec(names.OWNERS, "int64", (Axis.BATCH,), Role.TOKEN)
        self.inputs = (
            *self.columns,
            rows,
            replace(rows, name=names.CACHE_ROWS),
            TensorSpec(names.ENDS, "int64", (Axis.DRAFTS,), Role.TOKEN),
            TensorSpec(names.CACHE_CAPACITY, "int32", (), Role.CAPACITY),
            TensorSpec(names.MEMORY_CAPACITY, "int32", (), Role.CAPACITY),
            *cache,
            *memory,
        )
        self.outputs = (TensorSpec(names.DRAFTED_IDS, "int64", (Axis.DRAFTS, NUM_DRAFTED), Role.CANDIDATES),)

    def forward(
        self,
        token_ids: Tensor,
        cache_lengths: Tensor,
        last_source_positions: Tensor,
        owners: Tensor,
        cache_rows: Tensor,
        ends: Tensor,
        cache_capacity: Tensor,
        memory_capacity: Tensor,
        *buffers: Tensor,
    ) -> tuple[Tensor, ...]:
        cache, memory = buffers[: 2 * self.num_layers], buffers[2 * self.num_layers :]
        one = torch.ones(1, dtype=torch.int64)
        places = cache_lengths, cache_rows, last_source_positions, owners
        drafted: list[Tensor] = []
        for _ in range(NUM_DRAFTED):
            lengths, rows, lasts, keepers = places

            def attend_memory(
                layer: int, block: DecoderBlock, x: Tensor, lasts: Tensor = lasts, keepers: Tensor = keepers
            ) -> Tensor:
                return block.attend_memory(
                    x, memory[2 * layer : 2 * layer + 2], lasts, keepers, memory_capacity
                )

            # Nothing reads the cache that they return, so it grows in place.
            hidden, _ = self.states(token_ids, lengths, rows, cache_capacity, cache, attend_memory)
            if not drafted:
                hidden = hidden.index_select(0, ends)
                lengths, rows, lasts, keepers = (place.index_select(0, ends) for place in places)
            _, best, _ = self.chooser.choose(hidden, self.none_added, one)
            token_ids = self.proposed_ids[best.view(-1)]
            drafted.append(token_ids)
            places = lengths + 1, rows, lasts, keepers
        return (torch.stack(drafted, dim=1),)
