"""The two graphs of a captioner; `training.models.captioner` defines their computation.

The convolutions are in float32 in every precision: they run once per request. As in a recurrent model, there
is no `decode` graph.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec
from seq2seq_serve.bundle.names import Axis, Role, Verb
from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.base import TYPE_NAMES, Embedding, Graph, Projection, outs, token_specs
from seq2seq_serve.export.graphs.linear import LinearFactory
from seq2seq_serve.training.models.attention import additive_attention
from seq2seq_serve.training.models.captioner import Captioner, CaptionerConfig, mean_annotation

# B batch rows   M annotations   A d_annotation   D d_model   E d_hidden   C memory capacity

_ANNOTATIONS, _KEYS, _MEAN = "annotations", "keys", "mean"


def make_graphs(model: Captioner, linear: LinearFactory) -> dict[Verb, Graph]:
    """Create both graphs, with maps from the factory."""
    return {Verb.ENCODE: EncodeGraph(model, linear), Verb.STEP: StepGraph(model, linear)}


def _source_specs(config: CaptionerConfig) -> list[TensorSpec]:
    frame = (config.size, config.size, 3)
    if config.source == "picture":
        return [TensorSpec(names.PICTURE, "uint8", (Axis.BATCH, *frame), Role.SOURCE)]
    if config.source == "clip":
        axis = Axis.CLIP_LENGTH
        source = TensorSpec(names.CLIP, "uint8", (Axis.BATCH, axis, *frame), Role.SOURCE)
    else:
        assert config.feature_width is not None
        axis = Axis.FEATURE_LENGTH
        axes = (Axis.BATCH, axis, config.feature_width)
        source = TensorSpec(names.FEATURES, "float32", axes, Role.SOURCE)
    return [source, TensorSpec(names.lengths_of(axis), "int32", (Axis.BATCH,), Role.SOURCE)]


def _memory_specs(config: CaptionerConfig, dtype: torch.dtype) -> list[TensorSpec]:
    if config.attention == "mean":
        axes: tuple[int | str, ...] = (Axis.BATCH, config.d_annotation)
        return [TensorSpec(names.memory(_MEAN), TYPE_NAMES[dtype], axes, Role.MEMORY)]
    axes = (Axis.BATCH, Axis.MEMORY_CAPACITY, config.d_annotation)
    kinds = (_ANNOTATIONS, _KEYS)
    return [TensorSpec(names.memory(kind), TYPE_NAMES[dtype], axes, Role.MEMORY) for kind in kinds]


def _state_specs(config: CaptionerConfig, dtype: torch.dtype) -> list[TensorSpec]:
    axes = (Axis.BATCH, config.d_hidden)
    return [TensorSpec(names.state(name), TYPE_NAMES[dtype], axes, Role.STATE) for name in ("h", "c")]


class EncodeGraph(Graph):
    """Turns a source into its annotations, and into the decoder's state before the first position."""

    def __init__(self, model: Captioner, linear: LinearFactory) -> None:
        super().__init__()
        self.config = model.config
        self.dtype = linear.dtype
        self.annotate = _Annotate(model)
        self.initial = linear([model.initial])
        self.key = None if model.attention is None else linear([model.attention.key])
        memory = _memory_specs(model.config, self.dtype)
        in_place = [] if model.attention is None else memory
        self.inputs = (*_source_specs(model.config), *in_place)
        self.outputs = (*(outs(in_place) or memory), *outs(_state_specs(model.config, self.dtype)))

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        num_sources = 1 if self.config.source == "picture" else 2
        source, memory = given[0], given[num_sources:]
        mask: Tensor | None = None
        if num_sources == 2:
            mask = torch.arange(source.shape[1]) < given[1][:, None]  # (B, M)
        annotations = self.annotate(source)  # (B, M, A)
        mean = annotations.mean(dim=1) if mask is None else mean_annotation(annotations, mask)
        annotations, mean = annotations.to(self.dtype), mean.to(self.dtype)
        state = torch.tanh(self.initial(mean)).chunk(2, dim=1)
        if self.key is None:
            return (mean, *state)
        B, M, A = annotations.shape
        keys = self.key(annotations.reshape(-1, A)).view(B, M, A)
        pairs = zip(memory, (annotations, keys), strict=True)
        return (*(operators.write_prefix(buffer, new, axis=1) for buffer, new in pairs), *state)


class _Annotate(nn.Module):
    """The annotations `(B, M, A)` of a source. The weights are the trained model's, and stay in float32."""

    def __init__(self, model: Captioner) -> None:
        super().__init__()
        self.features = model.features
        self.is_picture = model.config.source == "picture"
        self.norm = model.annotations.norm
        table = model.annotations.place(model.annotations.codes)
        self.places = nn.Parameter(table.detach())  # (the most places, A)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:  # noqa: ARG002
        # `to` converts only the other weights.
        return self

    def forward(self, source: Tensor) -> Tensor:
        places: Tensor = self.places
        if not self.is_picture:
            places = nn.functional.embedding(torch.arange(source.shape[1]), places)
        annotations: Tensor = self.norm(self.features(source)) + places
        return annotations


class StepGraph(Graph):
    """One target position for all running rows: its logits, its attention, and the next state.

    The form for CUDA also writes the most probable tokens into the input of the next step.
    """

    def __init__(self, model: Captioner, linear: LinearFactory) -> None:
        super().__init__()
        config = self.config = model.config
        self.embedding = Embedding(model.embedding.weight, linear)
        self.logits = Projection.of(model, linear)
        readers = [model.cell.hidden, model.gate]
        if model.attention is not None:
            readers.append(model.attention.query)
        self.hidden = linear(readers)
        self.input = linear([model.cell.input])
        self.context = linear([model.context])
        self.readout = linear([model.readout])
        self.score = None if model.attention is None else nn.Parameter(model.attention.v.detach())
        self.feeds_itself = linear.is_fused
        memory, state = _memory_specs(config, linear.dtype), _state_specs(config, linear.dtype)
        has_attention = model.attention is not None
        columns = token_specs(*([names.LAST_SOURCE_POSITIONS] if has_attention else []))
        token_ids = columns[0]
        self.inputs = (*columns, *memory, *state)
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, config.vocab_size), Role.LOGITS)
        attention = TensorSpec(names.ATTENTION, "float32", (Axis.BATCH, Axis.MEMORY_CAPACITY), Role.ATTENTION)
        following = TensorSpec(token_ids.name, token_ids.dtype, (Axis.BATCH, 1), Role.TOKEN)
        self.outputs = (
            logits,
            *([attention] if has_attention else []),
            *outs([following] if self.feeds_itself else []),
            *outs(state),
        )

    def forward(self, token_ids: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        h, c = given[-2:]
        word = self.embedding(token_ids)  # (B, D)
        G = 4 * self.config.d_hidden
        from_hidden = self.hidden(h)  # (B, G + 1), or (B, G + 1 + A)
        weights: Tensor | None = None
        context = given[0]  # (B, A) without attention
        if self.score is not None:
            context, weights = self._attend(from_hidden[:, G + 1 :], *given[:3])
        context = torch.sigmoid(from_hidden[:, G : G + 1]) * context
        gates = self.input(word) + self.context(context) + from_hidden[:, :G]
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        output = torch.tanh(word + self.readout(torch.cat([h, context], dim=1)))
        logits = self.logits(output, self.embedding)
        answers = [logits]
        if weights is not None:
            answers.append(weights.to(torch.float32))
        if self.feeds_itself:
            answers.append(operators.most_probable(logits))
        return (*answers, h, c)

    def _attend(
        self, query: Tensor, last: Tensor, annotations: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The context `(B, A)`, and alpha `(B, C)`."""
        assert self.score is not None
        mask = torch.arange(keys.shape[1]) <= last[:, None]  # (B, C)
        context, weights = additive_attention(query[:, None], keys, annotations, self.score, mask[:, None])
        context, weights = context[:, 0], weights[:, 0]
        if self.config.attention == "hard":
            places = weights.argmax(dim=1, keepdim=True)[:, :, None]  # (B, 1, 1)
            context = annotations.gather(1, places.expand(-1, 1, self.config.d_annotation))[:, 0]
        return context, weights
