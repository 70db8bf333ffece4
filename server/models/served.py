"""The models that this process serves, and the table that finds a model by its name."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from seq2seq_serve.bundle.manifest import (
    Choice,
    Frames,
    Generation,
    LengthBound,
    LengthRule,
    TensorSpec,
    Timestamps,
)
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.bundle.pictures import Resampling
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.server.engine.async_engine import AsyncEngine
from seq2seq_serve.server.errors import Unavailable, UnknownModel
from seq2seq_serve.server.telemetry.metrics import Metrics


@dataclass(frozen=True)
class SourceSpec:
    """A named input of a model.

    Attributes:
        form: The form in which callers send it.
        tensor: The input of the `encode` graph.
        resampling: How the file of a picture is scaled.
    """

    form: Form
    tensor: TensorSpec
    resampling: Resampling

    @property
    def axes(self) -> tuple[int | str, ...]:
        """The axes of one request's array."""
        return self.tensor.axes[1:]


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One loaded model with its engine.

    Attributes:
        engine: Decodes its requests.
        version: The version's name for callers (`server.models.folders.Version`).
        provider: The provider that runs the graphs: "cpu" or "cuda".
        cache_bytes: Cache and memory of all slots.
        max_request_slots: The number of slots that one request can have: those of one core.
        max_source_length: The largest length of the source that memory depends on: tokens, sentences, frames,
            annotations.
        num_target_positions: The number of positions that the decoder can read: start tokens and targets.
        num_bytes: Estimate of the bytes that count against the memory limit: `cache_bytes` and the weights.
        source_vocab_size: The number of token ids of sources.
        pad_id: The source token that pads rows.
        eos_ids: The target tokens that end a sequence; the first one ends a target that is scored.
        frames: The tokens around texts.
        sources: Its inputs by name.
        memory: Computes the positions of memory that a request takes.
        has_attention: Whether it can align targets with sources.
        num_hops: The number of times that it attends to each position of memory for one token.
        source_language: A BCP 47 tag; empty if the bundle does not name one.
        target_language: The same of targets.
        choices: What a request may choose by a name, by the name of its option.
        generation: The options of requests that do not set them.
        timestamps: The tokens of times; None for a model without them.
        length_bound: The bound of targets whose requests do not set a limit; None applies the model's limit.
        name: The name that callers use.
        eos_id: The target token that ends a target that is scored.
        reads_text: Whether its only source is a text.
        reads_sound: Whether its only source is a sound.
        max_memory_length: The largest number of positions of memory, for a source without a length the only
            one.
        max_target_length: The largest number of target tokens.
    """

    engine: AsyncEngine
    version: str
    kind: str
    precision: str
    provider: str
    vocab_size: int
    cache_bytes: int
    num_bytes: int
    max_request_slots: int
    max_source_length: int
    num_target_positions: int
    source_vocab_size: int
    pad_id: int
    eos_ids: tuple[int, ...]
    frames: Frames
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    sources: Mapping[str, SourceSpec]
    memory: LengthRule
    has_attention: bool = True
    num_hops: int = 1
    source_language: str = ""
    target_language: str = ""
    choices: Mapping[str, Choice] = field(default_factory=dict)
    generation: Generation = field(default_factory=Generation)
    timestamps: Timestamps | None = None
    length_bound: LengthBound | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)

    name: str = field(init=False)
    eos_id: int = field(init=False)
    reads_text: bool = field(init=False)
    reads_sound: bool = field(init=False)
    max_memory_length: int = field(init=False)
    max_target_length: int = field(init=False)

    def __post_init__(self) -> None:
        forms = [source.form for source in self.sources.values()]
        derived = {
            "name": self.engine.model_name,
            "eos_id": self.eos_ids[0],
            "reads_text": forms == [Form.TEXT],
            "reads_sound": forms == [Form.SOUND],
            "max_memory_length": self.memory.memory_length({self.memory.source: self.max_source_length}),
            "max_target_length": self.num_target_positions - (len(self.frames.start) - 1),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def num_slots(self) -> int:
        """The number of sequences that can be decoded at once."""
        return self.engine.num_slots


class Models:
    """The served models by name, in the order in which they were first served, and their numbers of users.

    Owned by the app, changed on the event loop only. Empty while the models load.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_name: dict[str, ServedModel] = {}
        self._num_users: Counter[ServedModel] = Counter()
        self._left = asyncio.Event()

    def put(self, model: ServedModel) -> ServedModel | None:
        """Serve a model from now on; returns the model of the same name that it replaces."""
        before = self._by_name.get(model.name)
        self._by_name[model.name] = model
        self._metrics.show_model(model)
        return before

    def remove(self, name: str) -> ServedModel | None:
        """Stop serving a model; returns it if it was served."""
        model = self._by_name.pop(name, None)
        if model is not None:
            self._metrics.hide_model(model)
        return model

    @contextmanager
    def use(self, name: str, version: str = "") -> Iterator[ServedModel]:
        """Yields the model of that name; its engine is not stopped before the block ends.

        Args:
            name: Empty for the first model.
            version: Empty for the served version.

        Raises:
            UnknownModel: No model has that name or version; the message lists the existing ones.
            Unavailable: No model is served at present.
        """
        if not self._by_name:
            raise Unavailable("no model is served: the server is loading them, or they were unloaded")
        model = self._by_name.get(name) if name else next(iter(self._by_name.values()))
        if model is None:
            text = f"no model is named {name[:100]!r}: this server has {', '.join(self._by_name)}"
            raise UnknownModel(text, name=name, version=version)
        if version not in ("", model.version):
            text = f"{model.name} is not served in version {version[:100]!r}: ask for version {model.version}"
            raise UnknownModel(text, name=model.name, version=version)
        self._num_users[model] += 1
        try:
            yield model
        finally:
            self._num_users[model] -= 1
            if not self._num_users[model]:
                del self._num_users[model]
                self._left.set()

    async def wait_until_unused(self, model: ServedModel) -> None:
        """Wait until all `use` blocks of a model have ended."""
        while self._num_users[model]:
            self._left.clear()
            await self._left.wait()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)
