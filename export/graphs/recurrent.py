"""The two graphs of a recurrent encoder-decoder; `training.models.recurrent` defines their computation.

Each step replaces the state, so there is no `decode` graph: a given target goes through `step`, which also
returns the attention of its position. The encoder's recurrences are in float32 in every precision.
"""

from __future__ import annotations

from typing import Any, Self

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
from seq2seq_serve.export.graphs.linear import LinearFactory
from seq2seq_serve.training.models.attention import FUNCTIONS, additive_attention
from seq2seq_serve.training.models.recurrent import Recurrent, RecurrentConfig, reverse_rows

# B batch rows   S source length   D d_model   E d_hidden   G gates: 3 E or 4 E   C memory capacity

_STATES, _KEYS, _LAST = "states", "keys", "last"
# The places of ONNX's gates in torch's order: GRU z, r, n from r, z, n; LSTM i, o, f, g from i, f, g, o.
_GATES = {"gru": (1, 0, 2), "lstm": (0, 3, 1, 2)}


def make_graphs(model: Recurrent, linear: LinearFactory) -> dict[Verb, Graph]:
    """Create both graphs, with maps from the factory."""
    return {Verb.ENCODE: EncodeGraph(model, linear), Verb.STEP: StepGraph(model, linear)}


def _memory_specs(config: RecurrentConfig, dtype: torch.dtype) -> list[TensorSpec]:
    if config.attention == "none":
        axes: tuple[int | str, ...] = (Axis.BATCH, config.d_hidden)
        return [TensorSpec(names.memory(_LAST), TYPE_NAMES[dtype], axes, Role.MEMORY)]
    axes = (Axis.BATCH, Axis.MEMORY_CAPACITY, config.d_hidden)
    kinds = [_STATES, _KEYS] if config.attention == "additive" else [_STATES]
    return [TensorSpec(names.memory(name), TYPE_NAMES[dtype], axes, Role.MEMORY) for name in kinds]


def _state_specs(model: Recurrent, dtype: torch.dtype) -> list[TensorSpec]:
    config = model.config
    num_tensors = len(model.cells) * model.tensors_per_cell
    axes = (Axis.BATCH, config.d_hidden)
    return [
        TensorSpec(names.state(str(number)), TYPE_NAMES[dtype], axes, Role.STATE)
        for number in range(num_tensors)
    ]


class EncodeGraph(Graph):
    """Turns a source into its memory, and into the decoder's state before the first position."""

    def __init__(self, model: Recurrent, linear: LinearFactory) -> None:
        super().__init__()
        self.config = model.config
        self.dtype = linear.dtype
        self.embedding = Embedding(model.source_weight, linear)
        self.layers = nn.ModuleList(_EncoderLayer(model, i) for i in range(model.config.num_encoder_layers))
        self.initial = linear([model.initial])
        self.key = None if model.attention is None else linear([model.attention.key])
        self.num_tensors = len(model.cells) * model.tensors_per_cell
        memory = _memory_specs(model.config, self.dtype)
        in_place = [spec for spec in memory if Axis.MEMORY_CAPACITY in spec.axes]
        self.inputs = (*source_specs(), *in_place)
        self.outputs = (*(outs(in_place) or memory), *outs(_state_specs(model, self.dtype)))

    def forward(self, source_ids: Tensor, source_lengths: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        config = self.config
        B, S = source_ids.shape
        lengths = source_lengths.to(torch.int64)
        x = self.embedding(source_ids).to(torch.float32)  # (B, S, D)
        if config.reverses_source:
            x = reverse_rows(x, lengths)
        x = x.transpose(0, 1)  # (S, B, D)
        for layer in self.layers:
            x = layer(x, source_lengths)
        states = x.transpose(0, 1)  # (B, S, E)
        if config.reverses_source:
            states = reverse_rows(states, lengths)
        states = states.to(self.dtype)
        last = self._last(states, lengths)  # (B, E)
        state = torch.tanh(self.initial(last)).chunk(self.num_tensors, dim=1)
        if not memory:
            return (last, *state)
        written = [states]
        if self.key is not None:
            written.append(self.key(states.reshape(-1, config.d_hidden)).view(B, S, config.d_hidden))
        pairs = zip(memory, written, strict=True)
        return (*(operators.write_prefix(buffer, new, axis=1) for buffer, new in pairs), *state)

    def _last(self, states: Tensor, lengths: Tensor) -> Tensor:
        """`(B, E)`, each direction's state at the word that it reads last."""
        E = self.config.d_hidden
        places = (lengths - 1).view(-1, 1, 1).expand(-1, 1, E)
        at_end, at_start = states.gather(1, places)[:, 0], states[:, 0]
        if self.config.reverses_source:
            at_end, at_start = at_start, at_end
        if not self.config.is_bidirectional:
            return at_end
        return torch.cat([at_end[:, : E // 2], at_start[:, E // 2 :]], dim=1)


class _EncoderLayer(nn.Module):
    """One layer of the encoder, with one direction or two. Its weights stay in float32."""

    def __init__(self, model: Recurrent, layer: int) -> None:
        super().__init__()
        config = model.config
        self.operator = config.cell.upper()
        self.d_hidden = model.encoder.hidden_size
        ends = ("", "_reverse") if config.is_bidirectional else ("",)

        def stacked(name: str) -> Tensor:
            tensors = [getattr(model.encoder, f"{name}_l{layer}{end}").detach() for end in ends]
            return torch.stack([_reordered(tensor, config.cell) for tensor in tensors])

        self.input = nn.Parameter(stacked("weight_ih"))  # (R, G, I)
        self.hidden = nn.Parameter(stacked("weight_hh"))
        self.bias = nn.Parameter(torch.cat([stacked("bias_ih"), stacked("bias_hh")], dim=1))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:  # noqa: ARG002
        # `to` converts only the other weights. A conversion inside the graph would be computed while the
        # graph is loaded, from weights that are already on the GPU.
        return self

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """`(S, B, I)` to `(S, B, E)`."""
        weights = (self.input, self.hidden, self.bias)
        states = operators.recurrent_layer(self.operator, x, weights, lengths, d_hidden=self.d_hidden)
        return states.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)


class StepGraph(Graph):
    """One target position for all running rows: its logits, its attention, and the next state.

    The form for CUDA also writes the most probable tokens into the input of the next step.
    """

    def __init__(self, model: Recurrent, linear: LinearFactory) -> None:
        super().__init__()
        config = self.config = model.config
        self.embedding = Embedding(model.embedding.weight, linear)
        self.logits = Projection.of(model, linear)
        self.tensors_per_cell = model.tensors_per_cell
        cells = list(model.cells)
        top = cells[-1]
        # Each layer projects its own h by `hidden`; the query projects the h of the last layer, too.
        hidden = [[cell.hidden] for cell in cells]
        if model.attention is not None:
            hidden[-1] = [top.hidden, model.attention.query]
        self.hidden = nn.ModuleList(map(linear, hidden))
        self.input = nn.ModuleList(linear([cell.input]) for cell in cells)
        self.context = None if model.context is None else linear([model.context])
        self.readout = linear([model.readout])
        self.score = None if model.attention is None else nn.Parameter(model.attention.v.detach())
        self.feeds_itself = linear.is_fused
        memory, state = _memory_specs(config, linear.dtype), _state_specs(model, linear.dtype)
        self.num_memory = len(memory)
        columns = token_specs(*() if config.attention == "none" else (names.LAST_SOURCE_POSITIONS,))
        token_ids, *self.others = columns
        self.inputs = (*columns, *memory, *state)
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, config.vocab_size), Role.LOGITS)
        attention = TensorSpec(names.ATTENTION, "float32", (Axis.BATCH, Axis.MEMORY_CAPACITY), Role.ATTENTION)
        following = TensorSpec(token_ids.name, token_ids.dtype, (Axis.BATCH, 1), Role.TOKEN)
        self.outputs = (
            logits,
            *([] if config.attention == "none" else [attention]),
            *outs([following] if self.feeds_itself else []),
            *outs(state),
        )

    def forward(self, token_ids: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        num_others = len(self.others)
        memory = given[num_others : num_others + self.num_memory]
        state = list(given[num_others + self.num_memory :])
        word = self.embedding(token_ids)  # (B, D)
        n, E = self.tensors_per_cell, self.config.d_hidden
        from_hidden = [linear(state[i * n]) for i, linear in enumerate(self.hidden)]  # (B, G), or (B, G + E)
        mask = None
        if num_others:
            mask = torch.arange(memory[0].shape[1]) <= given[0][:, None]  # (B, C)
            mask = mask[:, None]
        weights: Tensor | None = None
        context = memory[0]  # (B, E) without attention
        if self.score is not None:
            query, from_hidden[-1] = from_hidden[-1][:, -E:], from_hidden[-1][:, :-E]
            values, keys = memory
            context, weights = additive_attention(query[:, None], keys, values, self.score, mask)
            context = context[:, 0]
        gates = self.input[0](word)
        if self.context is not None:
            gates = gates + self.context(context)
        new: list[Tensor] = []
        for i, linear in enumerate(self.input):
            if i:
                gates = linear(new[-n])
            new += self._cell(gates, from_hidden[i], state[i * n : (i + 1) * n])
        top = new[-n]
        if self.config.attention in FUNCTIONS:
            context, weights = FUNCTIONS[self.config.attention](top[:, None], memory[0], mask)
            context = context[:, 0]
        output = torch.tanh(self.readout(torch.cat([top, context, word], dim=1)))
        logits = self.logits(output, self.embedding)
        answers = [logits]
        if weights is not None:
            answers.append(weights[:, 0].to(torch.float32))
        if self.feeds_itself:
            answers.append(operators.most_probable(logits))
        return (*answers, *new)

    def _cell(self, gates: Tensor, from_hidden: Tensor, state: list[Tensor]) -> list[Tensor]:
        """The next state of a layer (`training.models.recurrent`: GRUCell, LSTMCell)."""
        if self.config.cell == "gru":
            E, (h,) = self.config.d_hidden, state
            both = torch.sigmoid(gates[:, : 2 * E] + from_hidden[:, : 2 * E])  # r and z
            r, z = both[:, :E], both[:, E:]
            n = torch.tanh(gates[:, 2 * E :] + r * from_hidden[:, 2 * E :])
            return [n + z * (h - n)]
        _, c = state
        i, f, g, o = (gates + from_hidden).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return [torch.sigmoid(o) * torch.tanh(c), c]


def _reordered(gates: Tensor, cell: str) -> Tensor:
    """The rows `(G, …)` of torch's gates in ONNX's order."""
    parts = gates.chunk(len(_GATES[cell]))
    return torch.cat([parts[i] for i in _GATES[cell]])
