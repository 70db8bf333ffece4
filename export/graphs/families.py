"""The graphs of each family of models, by its name.

To add a family, write a file like `recurrent.py` with `make_graphs`, and add it to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seq2seq_serve.bundle.names import Verb
from seq2seq_serve.export.graphs import captioner, memory_network, recurrent, transformer
from seq2seq_serve.export.graphs.base import Graph, in_type
from seq2seq_serve.export.graphs.linear import LinearFactory
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.models.registry import kind_of

FAMILIES: dict[str, Callable[[Any, LinearFactory], dict[Verb, Graph]]] = {
    "transformer": transformer.make_graphs,
    "recurrent": recurrent.make_graphs,
    "memory-network": memory_network.make_graphs,
    "captioner": captioner.make_graphs,
}


def make_modules(model: EncoderDecoder, linear: LinearFactory) -> dict[Verb, Graph]:
    """The torch modules of a model's graphs with maps of one kind."""
    return in_type(FAMILIES[kind_of(model.config)](model, linear), linear.dtype)
