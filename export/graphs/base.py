"""The common parts of all families' graphs: their description, the embedding, the projection to logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec
from seq2seq_serve.bundle.names import Axis, Role, Verb
from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.linear import Linear, LinearFactory
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.fronts import PatchMap, SoundMaps

if TYPE_CHECKING:
    from seq2seq_serve.export.graphs.adapted import AdaptedMaps

# B batch rows   S source length   D d_model   V vocabulary

TYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Graph(nn.Module):
    """A graph to export: `forward` takes and returns tensors in the order of `inputs` and `outputs`.

    Attributes:
        adapted: The maps with low-rank terms; None without adapters.
        has_few_rows: Whether its matrices have a row for each running sequence, as in a step.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    adapted: AdaptedMaps | None = None
    has_few_rows = False


def in_type(graphs: dict[Verb, Graph], dtype: torch.dtype) -> dict[Verb, Graph]:
    """Graphs, which are in float32, in another type."""
    if dtype is torch.float32:  # the scales of int4 weights keep theirs
        return graphs
    return {verb: graph.to(dtype) for verb, graph in graphs.items()}


class Embedding(nn.Module):
    """Token embeddings times a constant, √D by default (Vaswani et al. 2017, section 3.4).

    Attributes:
        weight: `(V, D)`.
        weight_scale: The factor that `weight` already includes.
        table: Looks tokens up instead; None if `weight` is used.
    """

    def __init__(self, weight: Tensor, linear: LinearFactory, scale: float | None = None) -> None:
        super().__init__()
        self.scale = math.sqrt(weight.shape[1]) if scale is None else scale
        self.weight_scale = self.scale if linear.is_fused else 1.0
        scaled = weight.detach() if self.weight_scale == 1 else weight.detach() * self.weight_scale
        self.table = linear.table(scaled)
        self.weight = None if self.table else nn.Parameter(scaled, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        if self.table is not None:
            embedded = self.table(ids)
        else:
            assert self.weight is not None
            embedded = nn.functional.embedding(ids, self.weight)
        return embedded if self.weight_scale == self.scale else embedded * self.scale


class Projection(nn.Module):
    """Turns decoder states into logits; a tied matrix is the embedding's own, unless it is quantised.

    Args:
        weight: `(V, D)`.
        linear: The factory of the graph's maps.
        is_tied: Whether `weight` is the matrix that embeds target tokens.
        bias: `(V,)`, added to the logits; None without.
        scale: The factor of the products.
        cap: c; logits z become c tanh(z / c); None leaves them.
    """

    def __init__(
        self,
        weight: Tensor,
        linear: LinearFactory,
        *,
        is_tied: bool,
        bias: Tensor | None = None,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.cap = scale, cap
        self.linear: Linear | None = linear.output(weight, bias, scale=scale)
        untied = None if is_tied or self.linear else weight.detach()
        self.weight = None if untied is None else nn.Parameter(untied, requires_grad=False)
        self.bias = None if bias is None or self.linear else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def of(cls, model: EncoderDecoder, linear: LinearFactory) -> Projection:
        """The projection of a trained model."""
        return cls(model.output_weight, linear, is_tied=model.output_weight is model.embedding.weight)

    def forward(self, hidden: Tensor, embedding: Embedding) -> Tensor:
        """float32 logits `(rows, V)` of decoder states `(rows, D)`."""
        logits = self.products(hidden, embedding).to(torch.float32)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def products(self, hidden: Tensor, embedding: Embedding) -> Tensor:
        """The logits before the cap, in the type of the graph's maps; quantised maps give float32."""
        if self.linear is not None:
            return self.linear(hidden)
        weight, alpha = self.weight, self.scale
        if weight is None:
            assert embedding.weight is not None
            weight, alpha = embedding.weight, self.scale / embedding.weight_scale
        return operators.gemm(hidden, weight, self.bias, transposed=True, alpha=alpha)


def source_specs() -> tuple[TensorSpec, TensorSpec]:
    """The inputs of an `encode` graph over tokens."""
    return (
        TensorSpec(names.SOURCE_IDS, "int64", (Axis.BATCH, Axis.SOURCE_LENGTH), Role.SOURCE),
        TensorSpec(names.SOURCE_LENGTHS, "int32", (Axis.BATCH,), Role.SOURCE),
    )


def front_specs(front: SoundMaps | PatchMap) -> tuple[TensorSpec]:
    """The input of an `encode` graph over sounds or pictures."""
    if isinstance(front, SoundMaps):
        axes = (Axis.BATCH, front.num_bands, Axis.SOUND_LENGTH)
        return (TensorSpec(names.SOUND, "float32", axes, Role.SOURCE),)
    return (TensorSpec(names.PICTURE, "uint8", (Axis.BATCH, front.size, front.size, 3), Role.SOURCE),)


def token_specs(*columns: str) -> list[TensorSpec]:
    """The inputs of a `step` graph with one element per row: token ids, and int32 columns by name."""
    ids = TensorSpec(names.TOKEN_IDS, "int64", (Axis.BATCH,), Role.TOKEN)
    return [ids, *(TensorSpec(name, "int32", (Axis.BATCH,), Role.TOKEN) for name in columns)]


def outs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The outputs that share their buffers with these inputs."""
    return [TensorSpec(names.out(spec.name), spec.dtype, spec.axes, spec.role) for spec in specs]


def sizes_of(config: Any) -> dict[str, int]:
    """The integers of a model's configuration, except for its limits, for the manifest."""
    names_of_fields = [*config.__dataclass_fields__, "d_head"]
    fields = {name: getattr(config, name) for name in names_of_fields if hasattr(config, name)}
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("max_")
    }
