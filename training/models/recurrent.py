"""Recurrent encoder-decoders without attention and with it: the models for which attention was invented.

    encoder   h_j = f(h_{j-1}, x_j), and of two directions h_j = [fwd_j; bwd_j]  Bahdanau et al. 2015, 3.2
    start     s_0 = tanh(W h_last), h_last = the last state of each direction    the same, A.2.2, has bwd_1
    none      s_t = f(s_{t-1}, [y_{t-1}; c]), with c = h_last at every t         Cho et al. 2014, 2.2
    additive  c_t = attend(s_{t-1}, h), then s_t = f(s_{t-1}, [y_{t-1}; c_t])    Bahdanau et al. 2015, 3.1
    dot       s_t = f(s_{t-1}, y_{t-1}), then c_t = attend(s_t, h)               Luong et al. 2015, 3.1
    output    o_t = tanh(W [s_t; c_t; y_{t-1}]), logits = V o_t                  Luong et al. 2015, equation 5

Bahdanau is arXiv:1409.0473, Cho arXiv:1406.1078, Luong arXiv:1508.04025. Unlike in the papers, all three
models start from both directions, and all three have Luong's output (a tanh instead of Bahdanau's maxout),
which here reads y_{t-1} as Bahdanau's does.

Shapes: B batch rows, S source length, T target length, D d_model, E d_hidden, G a cell's gates: 3 E or 4 E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from seq2seq_serve.bundle.checked import checked
from seq2seq_serve.training.config import Count, ModelConfig
from seq2seq_serve.training.models.attention import FUNCTIONS, AdditiveAttention
from seq2seq_serve.training.models.base import EncoderDecoder, Layers, Memory, State
from seq2seq_serve.training.models.dropout import Dropout

CellName = Literal["gru", "lstm"]
AttentionName = str  # "none", "additive", or a key of `attention.FUNCTIONS`


@checked(strict=True)
class RecurrentConfig(ModelConfig):
    """The sizes of a recurrent encoder-decoder.

    `dropout` applies between layers and not between positions (Zaremba et al. 2014, arXiv:1409.2329): to the
    embeddings, to the encoder's states, between the decoder's layers, and to o_t.

    Attributes:
        d_hidden: E, the width of the encoder's and the decoder's states; with two directions, each has half.
        cell: "gru" (Cho et al. 2014) or "lstm" (Hochreiter and Schmidhuber 1997).
        attention: "none", "additive", or a function without parameters (`attention.FUNCTIONS`): "dot".
        is_bidirectional: Whether a second encoder reads the source from its end.
        reverses_source: Whether the encoder reads the source from its end, which brings the first words of
            both sides close together (Sutskever et al. 2014, section 3.3, arXiv:1409.3215).
    """

    d_hidden: Count
    num_encoder_layers: Count
    num_decoder_layers: Count
    _: KW_ONLY
    cell: CellName = "gru"
    attention: AttentionName = "additive"
    is_bidirectional: bool = True
    reverses_source: bool = False

    def __post_init__(self) -> None:
        attentions = "none", "additive", *FUNCTIONS
        self.require(self.attention in attentions, "attention", f"one of {', '.join(attentions)}")
        is_even = self.d_hidden % 2 == 0
        self.require(is_even or not self.is_bidirectional, "d_hidden", "even for two directions")


class Cell(nn.Module):
    """The recurrence f of one decoder layer, as `nn.GRUCell` and `nn.LSTMCell` compute it.

    The caller computes the input's part of the gates, `input(x)`, for all positions at once if possible.

    Attributes:
        num_tensors: The number of tensors (B, E) in a layer's state; the first is the layer's output h.
        input: Projects the layer's input to the gates (B, G).
        hidden: Projects h to the gates (B, G).
    """

    num_gates: ClassVar[int]
    num_tensors: ClassVar[int]

    def __init__(self, d_input: int, d_hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(d_input, self.num_gates * d_hidden)
        self.hidden = nn.Linear(d_hidden, self.num_gates * d_hidden)


class GRUCell(Cell):
    """h' = (1 - z) n + z h; z = sigmoid(W_z x + U_z h), r likewise, n = tanh(W_n x + r (U_n h)).

    Cho et al. 2014, arXiv:1406.1078, who multiply h by r before U_n; z is 1 - z in Bahdanau et al. 2015.
    """

    num_gates, num_tensors = 3, 1

    def forward(self, gates: Tensor, state: State) -> State:
        """The next state, from the input's part of r, z, n (B, G) and the state (h,)."""
        (h,) = state
        r_of_input, z_of_input, n_of_input = gates.chunk(3, dim=-1)  # (B, E)
        r_of_h, z_of_h, n_of_h = self.hidden(h).chunk(3, dim=-1)
        r, z = (r_of_input + r_of_h).sigmoid(), (z_of_input + z_of_h).sigmoid()
        n = (n_of_input + r * n_of_h).tanh()
        return (n + z * (h - n),)


class LSTMCell(Cell):
    """h' = o tanh(c'), c' = f c + i g; i = sigmoid(W_i x + U_i h), f and o likewise, g = tanh(W_g x + U_g h).

    Hochreiter and Schmidhuber 1997, with the forget gate f of Gers et al. 2000.
    """

    num_gates, num_tensors = 4, 2

    def forward(self, gates: Tensor, state: State) -> State:
        """The next state, from the input's part of i, f, g, o (B, G) and the state (h, c)."""
        h, c = state
        i, f, g, o = (gates + self.hidden(h)).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Recurrent(EncoderDecoder):
    """The model of the module's docstring.

    The memory is the encoder's states h (B, S, E) and, with additive attention, their keys (B, S, E); without
    attention it is only h_last, (B, E). The state holds the state of each decoder layer's cell, layer by
    layer.

    Attributes:
        encoder: `nn.GRU` or `nn.LSTM`.
        initial: Projects h_last to the state of all decoder layers.
        cells: The decoder's layers. The first reads y_{t-1}; `context` adds to its gates.
        context: Projects c to the gates; None with one of `FUNCTIONS`.
        attention: None if the attention has no parameters.
        readout: Projects [s_t; c_t; y_{t-1}] to o_t.
        tensors_per_cell: The number of tensors of the state per decoder layer.
    """

    is_compilable = False  # the loop over positions would be compiled again for each length
    config: RecurrentConfig
    encoder: nn.GRU | nn.LSTM
    context: nn.Linear | None
    attention: AdditiveAttention | None

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        D, E = config.d_model, config.d_hidden
        encoder, cell = (nn.GRU, GRUCell) if config.cell == "gru" else (nn.LSTM, LSTMCell)
        G = cell.num_gates * E
        self.encoder = encoder(
            D,
            E // 2 if config.is_bidirectional else E,
            config.num_encoder_layers,
            batch_first=True,
            dropout=config.dropout if config.num_encoder_layers > 1 else 0.0,
            bidirectional=config.is_bidirectional,
        )
        self.initial = nn.Linear(E, config.num_decoder_layers * cell.num_tensors * E)
        self.cells = Layers[Cell](cell(E if layer else D, E) for layer in range(config.num_decoder_layers))
        self.context = None if config.attention in FUNCTIONS else nn.Linear(E, G, bias=False)
        self.attention = AdditiveAttention(E) if config.attention == "additive" else None
        self.readout = nn.Linear(2 * E + D, D)
        self.dropout = Dropout(config.dropout)
        self.tensors_per_cell = cell.num_tensors
        self._initialise()

    def encode(self, *source: Tensor) -> Memory:
        source_ids, source_mask = source
        lengths = source_mask.sum(dim=1)  # (B,)
        words = self.dropout(self._look_up(source_ids, self.source_weight))  # (B, S, D)
        if self.config.reverses_source:
            words = reverse_rows(words, lengths)
        packed = pack_padded_sequence(words, lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(
            self.encoder(packed)[0], batch_first=True, total_length=source_ids.shape[1]
        )
        if self.config.reverses_source:
            states = reverse_rows(states, lengths)
        states = self.dropout(states)  # (B, S, E), in the order of the source
        if self.config.attention == "none":
            return (self._last(states, source_mask),)
        return (states,) if self.attention is None else (states, self.attention.key(states))

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        return self._run(target_ids, memory, source_mask)[0]

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        states, weights = self._run(target_ids, memory, source_mask)
        return self.project(states), [matrix[:, None] for matrix in weights]  # it has one head

    def alignment(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The weights of the only attention, or None without attention."""
        return weights[0][:, 0] if weights else None

    def start(self, memory: Memory, source_mask: Tensor) -> State:
        last = memory[0] if self.config.attention == "none" else self._last(memory[0], source_mask)
        num_tensors = len(self.cells) * self.tensors_per_cell
        return tuple(self.initial(last).tanh().chunk(num_tensors, dim=-1))  # each (B, E)

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        """The equations of the module's docstring for one position; `_run` computes many at once."""
        y = self.dropout(self._look_up(token_ids, self.embedding.weight))  # y_{t-1}, (B, D)
        n = self.tensors_per_cell
        gates = next(iter(self.cells)).input(y)  # (B, G)
        if self.context is not None:  # f reads c_t
            c = self._context_of(state[-n], memory, source_mask)  # from s_{t-1}
            gates = gates + self.context(c)
        state = self._recur(gates, state)
        s = state[-n]  # s_t, (B, E)
        if self.context is None:
            c = self._context_of(s, memory, source_mask)
        o = self.readout(torch.cat([s, c, y], dim=-1)).tanh()  # (B, D)
        return self.dropout(o), state

    def _context_of(self, s: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        """c_t (B, E): what the state (B, E) attends to, and without attention h_last."""
        if self.config.attention == "none":
            return memory[0]
        return self._attend(s[:, None], memory, source_mask)[0][:, 0]

    def _run(self, token_ids: Tensor, memory: Memory, source_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`step` of tokens (B, T) in few large products; returns o_t (B, T, D), and the weights (B, T, S)."""
        cells = self.start(memory, source_mask)
        words = self.dropout(self._look_up(token_ids, self.embedding.weight))  # (B, T, D)
        known = next(iter(self.cells)).input(words)  # (B, T, G), the part known before the loop
        if self.context is not None and self.attention is None:
            known = known + self.context(memory[0])[:, None]
        tops, contexts, all_weights = list[Tensor](), list[Tensor](), list[Tensor]()
        for gates in known.unbind(dim=1):  # (B, G)
            if self.context is not None and self.attention is not None:
                query = cells[-self.tensors_per_cell][:, None]  # s_{t-1}, (B, 1, E)
                context, weights = self._attend(query, memory, source_mask)
                gates = gates + self.context(context[:, 0])
                contexts.append(context)
                all_weights.append(weights)
            cells = self._recur(gates, cells)
            tops.append(cells[-self.tensors_per_cell])
        top = torch.stack(tops, dim=1)  # s_t, (B, T, E)
        if self.attention is not None:
            context, joined = torch.cat(contexts, dim=1), [torch.cat(all_weights, dim=1)]
        elif self.config.attention in FUNCTIONS:
            context, weights = self._attend(top, memory, source_mask)
            joined = [weights]
        else:
            context, joined = memory[0][:, None].expand_as(top), []
        return self.dropout(self.readout(torch.cat([top, context, words], dim=-1)).tanh()), joined

    def _recur(self, gates: Tensor, cells: State) -> State:
        """Advance all layers by one position."""
        n = self.tensors_per_cell
        new = list[Tensor]()
        for layer, cell in enumerate(self.cells):
            if layer:
                gates = cell.input(self.dropout(new[-n]))
            new += cell(gates, cells[layer * n : (layer + 1) * n])
        return tuple(new)

    def _attend(self, queries: Tensor, memory: Memory, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The context (B, T, E) of decoder states (B, T, E), and the weights (B, T, S)."""
        mask = source_mask[:, None]  # (B, 1, S)
        if self.attention is None:
            return FUNCTIONS[self.config.attention](queries, memory[0], mask)
        states, keys = memory
        context, weights = self.attention(queries, keys, states, mask)
        return context, weights

    def _last(self, states: Tensor, source_mask: Tensor) -> Tensor:
        """h_last (B, E): each direction's state at the word that it reads last."""
        rows = torch.arange(len(states), device=states.device)
        at_end, at_start = states[rows, source_mask.sum(dim=1) - 1], states[:, 0]  # (B, E)
        if self.config.reverses_source:
            at_end, at_start = at_start, at_end
        if not self.config.is_bidirectional:
            return at_end
        half = self.config.d_hidden // 2
        return torch.cat([at_end[:, :half], at_start[:, half:]], dim=-1)

    def _initialise(self) -> None:
        # Matrices from state to state are orthogonal, as in Bahdanau et al. 2015, B.1. The others have
        # Xavier's variance, for which all gates of a cell count as one output.
        for name, weight in self.named_parameters():
            if name.startswith("encoder.weight_hh") or name.endswith("hidden.weight"):
                for gate in weight.data.chunk(len(weight) // weight.shape[1]):
                    nn.init.orthogonal_(gate)
            elif weight.dim() == 2:
                nn.init.xavier_uniform_(weight)
            elif "bias" in name:
                nn.init.zeros_(weight)
        self._initialise_embeddings()


def reverse_rows(x: Tensor, lengths: Tensor) -> Tensor:
    """The rows (B, S, any width) with the first `lengths` (B,) positions of each in reverse order."""
    positions = torch.arange(x.shape[1], device=x.device)  # (S,)
    mirrored = lengths[:, None] - 1 - positions  # (B, S)
    places = torch.where(mirrored >= 0, mirrored, positions)
    return x.gather(1, places[:, :, None].expand_as(x))
