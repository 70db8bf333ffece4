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
    """One loaded model with its running engines.

    Attributes:
        engines: Alike, each with slots of its own; started by who loads the model.
        deliveries: What the engines deliver to.
        version: The first characters of the manifest's hash.
        provider: What runs the graphs: "cpu" or "cuda".
        cache_bytes: Cache and memory of all slots together.
        eos_id: The target token that ends a sequence.
    """

    engines: tuple[Engine, ...]
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
        return self.engines[0].model_name

    @property
    def max_source_length(self) -> int:
        """Tokens."""
        return self.engines[0].max_source_length

    @property
    def max_target_length(self) -> int:
        """Tokens."""
        return self.engines[0].max_target_length

    @property
    def max_request_slots(self) -> int:
        """Slots that one request can have: all of its rows are in one engine."""
        return self.engines[0].num_slots

    @property
    def num_slots(self) -> int:
        """Sequences that can be decoded at once."""
        return sum(engine.num_slots for engine in self.engines)

    @property
    def is_healthy(self) -> bool:
        """Whether the steps of every engine succeed."""
        return all(engine.is_healthy for engine in self.engines)

    def submitted(self, request: Request, is_expired: Callable[[], bool]) -> AbstractContextManager[Mailbox]:
        """Give `request` to the engine with the least to do, and take it back when the block is left early.

        Raises:
            ServerError: The engine refuses it.
        """
        engine = min(self.engines, key=Engine.num_slots_wanted)
        return self.deliveries.submitted(engine, request, is_expired)

    def heartbeat(self) -> float:
        """Unix time of the last sign of life of the engine that has been silent longest."""
        return min(engine.heartbeat() for engine in self.engines)

    def num_running(self) -> int:
        """Requests being decoded."""
        return sum(engine.num_running() for engine in self.engines)

    def num_waiting(self) -> int:
        """Requests that were accepted and have no slot yet."""
        return sum(engine.num_waiting() for engine in self.engines)

    def num_slots_in_use(self) -> int:
        """Slots that running requests hold."""
        return sum(engine.num_slots_in_use() for engine in self.engines)

    def cache_usage(self) -> float:
        """Cache positions in use over those of all slots."""
        num_cached = sum(engine.num_cached() for engine in self.engines)
        return num_cached / (self.num_slots * self.max_target_length)

    def drain(self) -> None:
        """Refuse newcomers from now on, and finish who is in."""
        for engine in self.engines:
            engine.drain()

    def stop(self) -> None:
        """End the engines' threads; what is unfinished ends with `Unavailable`."""
        for engine in self.engines:
            engine.stop()


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
