"""The models that this process serves, and the table that finds one by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from bundle.tokenizer import Tokenizer
from server.deliveries import Deliveries, Mailbox
from server.engine import Engine
from server.errors import Unavailable, UnknownModel
from server.records import Request


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One loaded model with its running engine.

    Attributes:
        engine: Started by who loads the model, stopped by the app.
        deliveries: What the engine delivers to.
        version: The first characters of the manifest's hash.
        provider: What runs the graphs: "cpu" or "cuda".
        cache_bytes: Cache and memory of all slots together.
        eos_id: The target token that ends a sequence.
    """

    engine: Engine
    deliveries: Deliveries
    version: str
    kind: str
    precision: str
    provider: str
    vocab_size: int
    cache_bytes: int
    eos_id: int
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    provenance: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What callers call it."""
        return self.engine.model_name

    def submitted(self, request: Request, is_expired: Callable[[], bool]) -> AbstractContextManager[Mailbox]:
        """Give `request` to the engine, and take it back when the block is left before the end.

        Raises:
            ServerError: The engine refuses it.
        """
        return self.deliveries.submitted(self.engine, request, is_expired)


class Models:
    """The served models by name, the first one first.

    Owned by the app, changed on the event loop only. Empty while the models load.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, ServedModel] = {}

    def add(self, model: ServedModel) -> None:
        """Serve one more."""
        self._by_name[model.name] = model

    def get(self, name: str) -> ServedModel:
        """The model of that name; the empty name means the first.

        Raises:
            UnknownModel: There is none of that name; the message lists those there are.
            Unavailable: The models are still loading.
        """
        if not self._by_name:
            raise Unavailable("the server is loading its models: try again in a moment")
        if not name:
            return next(iter(self._by_name.values()))
        if name not in self._by_name:
            raise UnknownModel(
                f"no model is named {name[:100]!r}: this server has {', '.join(self._by_name)}"
            )
        return self._by_name[name]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)
