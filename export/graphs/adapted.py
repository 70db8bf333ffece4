"""Graphs whose rows may name an adapter: low-rank terms of maps (LoRA, Hu et al. 2021, arXiv:2106.09685).

An adapter of rank r adds `(x Aᵀ) Bᵀ` to the outputs of a map, with A `(r, I)` and B `(O, r)`. The weights of
all adapters are one input of a graph, so that a server can load and drop adapters while the graph is in use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.adapters import Places
from seq2seq_serve.bundle.manifest import AdaptedMap, AdaptedPart, TensorSpec
from seq2seq_serve.bundle.names import Axis, Role, Verb
from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.base import Graph
from seq2seq_serve.export.graphs.linear import Linear, LinearFactory, Table
from seq2seq_serve.training.models.base import EncoderDecoder

_FRONT = "front."  # the maps of sounds and pictures: they are convolutions elsewhere


class AdaptedMaps:
    """The maps of a model's graphs that adapters change, in the order of their places.

    Maps of the same trained layers have one place, in the graphs of all precisions.

    Attributes:
        maps: All maps so far.
        scales: By the name of a part, the factor of its outputs in the graphs made last, if not 1.
        adapters: `(K, R * units)` while a graph is traced, as the two that follow.
        ranks: `(K, parts)`.
        ids: `(N,)`, the adapter of each row of the maps' inputs; -1 for none.
    """

    adapters: Tensor
    ranks: Tensor
    ids: Tensor

    def __init__(self, model: EncoderDecoder) -> None:
        self.maps: list[AdaptedMap] = []
        self.scales: dict[str, float] = {}
        self._names = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and _FRONT not in f"{name}."
        }

    def place(self, layers: Sequence[nn.Linear]) -> int | None:
        """Returns the index of a map, which becomes the last one if it is new; None if none adapts it."""
        if not all(layer in self._names for layer in layers):
            return None
        parts = tuple(AdaptedPart(self._names[layer], layer.out_features) for layer in layers)
        one = AdaptedMap(layers[0].in_features, parts)
        if one not in self.maps:
            self.maps.append(one)
        return self.maps.index(one)

    def spread(self, over_rows: Callable[[Tensor], Tensor]) -> None:
        """Gives each row of a graph's matrix the adapter of its batch row, by a function of `(B,)`."""
        self.ids = over_rows(self.ids)


def checksum_of(model: EncoderDecoder) -> str:
    """Returns the checksum of a model's weights, with their names and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().float().contiguous().numpy().data)
    return digest.hexdigest()


class AdaptedLinear(Linear):
    """A linear map with the low-rank terms of each row's adapter.

    Args:
        linear: The map of the trained layers.
        maps: The maps of the graph, and while it is traced the adapters.
        index: The map's own place among them.
    """

    parts: Tensor

    def __init__(self, linear: Linear, maps: AdaptedMaps, index: int) -> None:
        super().__init__()
        self.linear, self._maps, self._index = linear, maps, index
        widths = [part.num_outputs for part in maps.maps[index].parts]
        numbers = [torch.full((width,), number) for number, width in enumerate(widths)]
        self.register_buffer("parts", torch.cat(numbers))  # (O,) int64

    def scale_parts(self, scale: float, first: int) -> None:
        """Multiplies the terms of all parts from an output on by a constant."""
        end = 0
        for part in self._maps.maps[self._index].parts:
            if end >= first:
                self._maps.scales[part.name] = self._maps.scales.get(part.name, 1.0) * scale
            end += part.num_outputs

    def forward(self, x: Tensor) -> Tensor:
        places, maps = Places(self._maps.maps), self._maps
        return operators.low_rank(
            x,
            self.linear(x),
            maps.adapters,
            maps.ranks,
            maps.ids,
            self.parts,
            first_unit=places.first_units[self._index],
            first_part=places.first_parts[self._index],
            num_units=places.num_units,
        )


@dataclass(frozen=True)
class AdaptedFactory:
    """Maps of another factory with low-rank terms; a ReLU beside a map is a node of its own."""

    linear: LinearFactory
    maps: AdaptedMaps

    @property
    def dtype(self) -> torch.dtype:
        return self.linear.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.linear.cache_dtype

    @property
    def is_fused(self) -> bool:
        return self.linear.is_fused

    def __call__(
        self, layers: Sequence[nn.Linear], *, follows_relu: bool = False, precedes_relu: bool = False
    ) -> Linear:
        index = self.maps.place(layers)
        if index is None:
            return self.linear(layers, follows_relu=follows_relu, precedes_relu=precedes_relu)
        return AdaptedLinear(self.linear(layers), self.maps, index)

    def output(self, weight: Tensor, bias: Tensor | None = None, *, scale: float = 1.0) -> Linear | None:
        return self.linear.output(weight, bias, scale=scale)

    def table(self, weight: Tensor) -> Table | None:
        return self.linear.table(weight)


class AdaptedGraph(Graph):
    """A graph with three further inputs: the adapters, their ranks, and each row's adapter."""

    def __init__(self, graph: Graph, maps: AdaptedMaps) -> None:
        super().__init__()
        self.plain = graph  # torch keeps the name `graph` for itself
        graph.adapted = self.adapted = maps
        self.has_few_rows = graph.has_few_rows
        num_parts = sum(len(one.parts) for one in maps.maps)
        self.inputs = (
            *graph.inputs,
            TensorSpec(names.ADAPTERS, "float16", (Axis.NUM_ADAPTERS, Axis.ADAPTER_SIZE), Role.ADAPTER),
            TensorSpec(names.ADAPTER_RANKS, "int32", (Axis.NUM_ADAPTERS, num_parts), Role.ADAPTER),
            TensorSpec(names.ADAPTER_IDS, "int64", (Axis.BATCH,), Role.TOKEN),
        )
        self.outputs = graph.outputs

    def forward(self, *given: Any) -> Any:
        assert self.adapted is not None
        *rest, self.adapted.adapters, self.adapted.ranks, self.adapted.ids = given
        try:
            return self.plain(*rest)
        finally:  # a trace ends with them
            del self.adapted.adapters, self.adapted.ranks, self.adapted.ids


def with_adapters(graphs: dict[Verb, Graph], maps: AdaptedMaps | None) -> dict[Verb, Graph]:
    """The graphs of a model, made by an `AdaptedFactory` of these maps, if any, with adapters as inputs."""
    if maps is None:
        return graphs
    return {verb: AdaptedGraph(graph, maps) for verb, graph in graphs.items()}
