"""The graphs of each family of models, by its name.

To add a family, write a file like `recurrent.py` with `make_graphs` and `facts`, and add it to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.export.graphs import captioner, memory_network, recurrent, transformer
from seq2seq_serve.export.graphs.base import Graph
from seq2seq_serve.export.graphs.linear import LinearFactory
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.registry import kind_of


@dataclass(frozen=True)
class Family:
    """The export functions of a kind of model.

    Attributes:
        make_graphs: Creates the graphs of a trained model, with maps from a factory.
        facts: Returns the manifest's fields of a config, besides its sizes.
    """

    make_graphs: Callable[[Any, LinearFactory], dict[Verb, Graph]]
    facts: Callable[[Any], dict[str, Any]]


FAMILIES: dict[str, Family] = {
    "transformer": Family(transformer.make_graphs, transformer.facts),
    "recurrent": Family(recurrent.make_graphs, recurrent.facts),
    "memory-network": Family(memory_network.make_graphs, memory_network.facts),
    "captioner": Family(captioner.make_graphs, captioner.facts),
}


def make_modules(model: EncoderDecoder, linear: LinearFactory) -> dict[Verb, Graph]:
    """The torch modules of a model's graphs with maps of one kind."""
    graphs = FAMILIES[kind_of(model.config)].make_graphs(model, linear)
    return {verb: graph.to(linear.dtype) for verb, graph in graphs.items()}
