"""The models that this process serves, and the table that finds one by its name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from bundle.manifest import LengthBound
from bundle.tokenizer import Tokenizer
from server.backlog import QueueLimits
from server.deliveries import Deliveries, Mailbox
from server.engine import Engine
from server.errors import InvalidRequest, Unavailable, UnknownModel
from server.metrics import Metrics
from server.records import Request


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One loaded model with its running engines.

    Attributes:
        engines: Alike, each with slots of its own; started by who loads the model.
        deliveries: What the engines deliver to.
        version: As callers name it (`server.shelf.Version`).
        provider: What runs the graphs: "cpu" or "cuda".
        cache_bytes: Cache and memory of all slots together.
        num_bytes: What counts against the memory limit: the same with the weights, as far as can be told.
        pad_id: The source token that only fills rows up.
        eos_id: The target token that ends a sequence.
        source_language: A BCP 47 tag, or empty where the bundle names none.
        queue_limits: The limits of each engine's queue.
        length_bound: The bound of targets whose requests do not set a limit; None leaves the model's limit.
    """

    engines: tuple[Engine, ...]
    deliveries: Deliveries
    version: str
    kind: str
    precision: str
    provider: str
    vocab_size: int
    cache_bytes: int
    num_bytes: int
    pad_id: int
    eos_id: int
    queue_limits: QueueLimits
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    source_language: str = ""
    length_bound: LengthBound | None = None
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

    @contextmanager
    def submitted(
        self, requests: Sequence[Request], is_expired: Callable[[], bool]
    ) -> Iterator[list[Mailbox]]:
        """Give each of a call's requests to the engine with the least to do.

        Each engine takes all that are given to it, or none.

        They are taken back when the block is left early.

        Raises:
            InvalidRequest: They could not wait together in an empty queue, however often they came again.
            ServerError: An engine refuses its part.
        """
        self.check_size(len(requests), sum(request.source_length for request in requests))
        with ExitStack() as stack:
            mailboxes: dict[Request, Mailbox] = {}
            for engine, part in self._shared_out(requests).items():
                mailboxes |= stack.enter_context(self.deliveries.submitted(engine, part, is_expired))
            yield [mailboxes[request] for request in requests]

    def check_size(self, num_requests: int, num_tokens: int) -> None:
        """Refuse a call of more requests or source tokens than an empty queue takes.

        Raises:
            InvalidRequest: It has more.
        """
        excess = self.queue_limits.excess(num_requests, num_tokens)
        if excess:
            raise InvalidRequest(f"the call has {excess} here: send less at once", field="sources")

    def _shared_out(self, requests: Sequence[Request]) -> dict[Engine, list[Request]]:
        """Returns the requests by the engine that gets them: one that may take some, if there is any."""
        engines = [engine for engine in self.engines if engine.may_take()] or self.engines
        num_slots = {engine: engine.num_slots_wanted() for engine in engines}
        parts: dict[Engine, list[Request]] = {}
        for request in requests:
            engine = min(num_slots, key=num_slots.__getitem__)
            num_slots[engine] += request.num_slots
            parts.setdefault(engine, []).append(request)
        return parts

    def silent_seconds(self) -> float:
        """Since the last sign of life of the engine that has been silent longest."""
        return max(engine.silent_seconds() for engine in self.engines)

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
    """The served models by name, the first one first, and who uses them.

    Owned by the app, changed on the event loop only. Empty while the models load.

    Args:
        metrics: Shows every model that is served.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_name: dict[str, ServedModel] = {}
        self._num_users: Counter[ServedModel] = Counter()
        self._left = asyncio.Event()

    def put(self, model: ServedModel) -> ServedModel | None:
        """Serve a model from now on; returns the one of its name that it takes the place of."""
        before = self._by_name.get(model.name)
        self._by_name[model.name] = model
        self._metrics.show_model(model)
        return before

    def remove(self, name: str) -> ServedModel | None:
        """Serve it no more; returns it, if it was served."""
        model = self._by_name.pop(name, None)
        if model is not None:
            self._metrics.hide_model(model)
        return model

    def get(self, name: str, version: str = "") -> ServedModel:
        """The model of that name; the empty name means the first, the empty version the one that is served.

        Raises:
            UnknownModel: There is none of that name or version; the message lists those there are.
            Unavailable: No model is served yet, or any more.
        """
        if not self._by_name:
            raise Unavailable("no model is served: the server is loading them, or they were unloaded")
        model = self._by_name.get(name) if name else next(iter(self._by_name.values()))
        if model is None:
            text = f"no model is named {name[:100]!r}: this server has {', '.join(self._by_name)}"
            raise UnknownModel(text, name=name, version=version)
        if version not in ("", model.version):
            text = f"{model.name} is not served in version {version[:100]!r}: {model.version} is"
            raise UnknownModel(text, name=model.name, version=version)
        return model

    @contextmanager
    def using(self, name: str, version: str = "") -> Iterator[ServedModel]:
        """The same for as long as the block runs: until then its engines are not stopped.

        Raises:
            UnknownModel: As `get`.
            Unavailable: As `get`.
        """
        model = self.get(name, version)
        self._num_users[model] += 1
        try:
            yield model
        finally:
            self._num_users[model] -= 1
            if not self._num_users[model]:
                del self._num_users[model]
                self._left.set()

    async def wait_until_unused(self, model: ServedModel) -> None:
        """Wait for all who use a model to leave."""
        while self._num_users[model]:
            self._left.clear()
            await self._left.wait()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)
