"""The models that this process serves, and the table that finds a model by its name."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from seq2seq_serve.bundle.adapters import Adapter
from seq2seq_serve.bundle.manifest import Bundle, Manifest, TensorSpec
from seq2seq_serve.bundle.names import SOURCE_LANGUAGE, Axis, Form
from seq2seq_serve.bundle.pictures import Resampling
from seq2seq_serve.server.engine.async_engine import AsyncEngine
from seq2seq_serve.server.engine.request import NO_ADAPTER
from seq2seq_serve.server.errors import Forbidden, Unavailable, UnknownModel
from seq2seq_serve.server.models.kept import Kept
from seq2seq_serve.server.runner.sizing import Sizing, source_specs
from seq2seq_serve.server.telemetry.metrics import Metrics
from seq2seq_serve.server.telemetry.record import Caller, CallRecord
from seq2seq_serve.server.telemetry.statistics import Statistics

_ENGLISH = "en"
_MOST_OPTION_BYTES = 2**24  # of memory, of the options of all models
_NAMES_IN_MESSAGE = 20  # gRPC's metadata, in which a message is, is bounded


@dataclass(frozen=True)
class SourceSpec:
    """A named input of a model.

    Attributes:
        form: The form in which callers send it.
        tensor: The input of the `encode` graph; that of a sound has the length of a whole window.
        resampling: How the file of a picture is scaled.
    """

    form: Form
    tensor: TensorSpec
    resampling: Resampling

    @property
    def axes(self) -> tuple[int | str, ...]:
        """The axes of one request's array."""
        return self.tensor.axes[1:]


class ServedModel:
    """One loaded model with its engine.

    Owned by `Models`; only its `decodings` change.

    Args:
        engine: Decodes its requests.
        bundle: Its manifest and tokenizers.
        sizing: The sizes of each core.
        version: The version's name for callers (`server.models.folders.Version`); empty for the bundle's own.

    Attributes:
        engine: Decodes its requests.
        manifest: Describes it.
        sizing: The sizes of each core; a request can have the slots of one.
        name: The name that callers use.
        version: The version's name.
        source_tokenizer: Cuts texts of sources.
        target_tokenizer: Cuts and joins texts of targets.
        sources: Its inputs by name.
        pad_id: The source token that pads rows.
        eos_id: The target token that ends a target that is scored.
        reads_text: Whether its only source is a text.
        reads_sound: Whether its only source is a sound.
        takes_short_windows: Whether a sound may be shorter than a whole window.
        only_language: The tag of the language that it hears, if requests do not choose it; otherwise empty.
        max_memory_length: The largest number of positions of memory, for a source without a length the only
            one.
        num_target_positions: The number of positions that the decoder can read: start tokens and targets.
        max_target_length: The largest number of target tokens.
        base: The model that an adapter changes, which has the engine; None for a model.
        adapter: The place of the adapter in the engine.
        places: The adapters in the engine; none may be there if the graphs take none.
        decodings: How targets are decoded, by what it was read from; of all served models. None while the
            model is not one of them, because each refers to its model.
    """

    base: ServedModel | None = None
    decodings: Kept[ServedModel, Any] | None = None
    adapter = NO_ADAPTER

    def __init__(self, engine: AsyncEngine, bundle: Bundle, sizing: Sizing, version: str = "") -> None:
        manifest = bundle.manifest
        self.engine, self.manifest, self.sizing = engine, manifest, sizing
        self.name = engine.model_name
        self.version = version or bundle.version
        self.source_tokenizer = bundle.source_tokenizer
        self.target_tokenizer = bundle.target_tokenizer
        self.sources = {
            spec.name: SourceSpec(
                manifest.sources[spec.name], _with_whole_windows(spec, manifest), manifest.resampling
            )
            for spec in source_specs(manifest, sizing.precision)
        }
        self.pad_id = manifest.special_ids.pad_id
        self.eos_id = manifest.special_ids.eos_ids[0]
        forms = list(manifest.sources.values())
        self.reads_text, self.reads_sound = forms == [Form.TEXT], forms == [Form.SOUND]
        self.takes_short_windows = manifest.memory.axis is not None
        hears_one = self.reads_sound and SOURCE_LANGUAGE not in manifest.choices
        # Whisper's checkpoints without tokens of languages are those for English.
        default = _ENGLISH if manifest.timestamps else ""
        self.only_language = manifest.source_language or default if hears_one else ""
        self.max_memory_length = sizing.sizes[Axis.MEMORY_CAPACITY]
        self.num_target_positions = sizing.sizes[Axis.CACHE_CAPACITY]
        self.max_target_length = self.num_target_positions - (len(manifest.template.start) - 1)
        self.places: list[ServedModel | None] = [None] * sizing.num_adapters

    def adapted(self, name: str, adapter: Adapter, place: int) -> ServedModel:
        """Returns the model that is this one with an adapter, which the engine has in a place."""
        model = self.named(name)
        model.version, model.adapter = adapter.version, place
        return model

    def named(self, name: str) -> ServedModel:
        """Returns this model under the name of an adapter, which is not loaded."""
        model = copy.copy(self)
        model.base, model.name, model.places = self, name, []
        model.decodings = None
        return model


def _with_whole_windows(spec: TensorSpec, manifest: Manifest) -> TensorSpec:
    """Returns an input with a size in the place of a sound's named axis, for all who send whole windows."""
    length = manifest.memory.whole_length
    if length is None:
        return spec
    return replace(spec, axes=tuple(length if axis == Axis.SOUND_LENGTH else axis for axis in spec.axes))


async def _no_adapter(_name: str, _loads: bool) -> None:
    return None


def check_right(caller: Caller, name: str) -> None:
    """Raises Forbidden if a caller may not use, load or unload the model of a name."""
    if not caller.may_use(name):
        raise Forbidden(f"token {caller.name} may not use the model {name[:100]!r}")


class Models:
    """The served models by name, in the order in which they were first served, and their numbers of users.

    Owned by the app, changed on the event loop only. Empty while the models load.

    Args:
        metrics: Show the served models.

    Attributes:
        find_adapter: Loads the adapter of a name that is not served, if there is one, or only describes it.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.find_adapter: Callable[[str, bool], Awaitable[ServedModel | None]] = _no_adapter
        self._uses = itertools.count()
        self._last_uses: dict[ServedModel, int] = {}  # of the served adapters, by the count of all uses
        self._by_name: dict[str, ServedModel] = {}
        self._numbers: dict[str, str] = {}
        self._num_users: Counter[ServedModel] = Counter()
        self._left = asyncio.Event()
        self._decodings = Kept[ServedModel, Any](_MOST_OPTION_BYTES)

    def put(self, model: ServedModel, number: str = "") -> ServedModel | None:
        """Serve a model from now on; returns the model of the same name that it replaces.

        Args:
            model: The model.
            number: Another name of its version (`server.models.folders.Version.number`).
        """
        before = self._by_name.get(model.name)
        self._by_name[model.name], self._numbers[model.name] = model, number
        if before is not None:
            self._leave(before)
        model.decodings = self._decodings
        if model.base is not None:
            self._last_uses[model] = next(self._uses)
        self._metrics.show_model(model)
        return before

    def remove(self, name: str) -> ServedModel | None:
        """Stop serving a model; returns it if it was served."""
        model = self._by_name.pop(name, None)
        if model is not None:
            self._leave(model)
            self._metrics.hide_model(model)
        return model

    def _leave(self, model: ServedModel) -> None:
        self._last_uses.pop(model, None)
        self._decodings.forget(model)
        model.decodings = None

    def get(self, name: str) -> ServedModel | None:
        """Returns the model of that name, if it is served."""
        return self._by_name.get(name)

    @property
    def bases(self) -> list[ServedModel]:
        """The served models that are not adapters: each has an engine."""
        return [model for model in self if model.base is None]

    def seen_by(self, caller: Caller) -> list[ServedModel]:
        """Returns the served models that a caller may use."""
        return [model for model in self if caller.may_use(model.name)]

    def open_to(self, caller: Caller) -> list[ServedModel]:
        """Returns the models that a caller may use; those that its rights name come first, in their order.

        Among them are adapters that are not loaded, and that `use` would load: their bases with their names.
        """
        if caller.models is None:
            return list(self)
        named = dict[str, ServedModel]()
        for name in caller.models:
            base = self._by_name.get(name.rpartition("/")[0])
            if (model := self._by_name.get(name)) is not None:
                named[name] = model
            elif base is not None and not name.endswith("/*"):
                named[name] = base.named(name)
        return [*named.values(), *(model for model in self.seen_by(caller) if model.name not in named)]

    @asynccontextmanager
    async def use(
        self, call: CallRecord, name: str, version: str = "", *, loads: bool = True
    ) -> AsyncIterator[ServedModel]:
        """Yields the model of that name; its engine is not stopped before the block ends.

        Args:
            call: Is counted under the model's name.
            name: Empty for the first model, or the first one that can be served of those in the caller's
                rights.
            version: Empty for the served version; otherwise its name or number.
            loads: Whether an adapter that is not loaded is loaded; otherwise its description is returned.

        Raises:
            UnknownModel: No model has that name or version; the message lists the existing ones.
            Forbidden: The caller may not use it.
            LoadFailed: It is an adapter that cannot be loaded.
            Overloaded: It is an adapter, and all places for adapters are in use.
            Unavailable: No model is served at present.
        """
        if not self._by_name:
            raise Unavailable("no model is served: the server is loading them, or they were unloaded")
        caller = call.caller
        if name:
            check_right(caller, name)
            model = self._by_name.get(name) or await self.find_adapter(name, loads)
        elif caller.models is None:
            model = next(iter(self._by_name.values()))
        else:
            model = None
            for known in caller.models:
                model = model or self._by_name.get(known) or await self.find_adapter(known, loads)
        if model is None and not name:
            raise Forbidden(f"token {caller.name} has no default among the served models: name one")
        if model is None:
            raise self._unknown(caller, name, version)
        if version not in ("", model.version, self._numbers.get(model.name, "1")):
            text = f"{model.name} is not served in version {version[:100]!r}: ask for version {model.version}"
            raise UnknownModel(text, name=model.name, version=version)
        call.model = model.name
        self._num_users[model] += 1
        if model.base is not None:
            self._num_users[model.base] += 1
        try:
            yield model
        finally:
            if model in self._last_uses and loads:
                self._last_uses[model] = next(self._uses)
            for used in (model, model.base):
                if used is not None:
                    self._num_users[used] -= 1
                    if not self._num_users[used]:
                        del self._num_users[used]
                        self._left.set()

    def _unknown(self, caller: Caller, name: str, version: str) -> UnknownModel:
        """Returns the error of a name that is not served, with the first names that are."""
        known = [one.name for one in self.seen_by(caller)]
        text = ", ".join(known[:_NAMES_IN_MESSAGE]) + ", …" * (len(known) > _NAMES_IN_MESSAGE)
        text = f"no model is named {name[:100]!r}: this server has {text or 'none for this token'}"
        if self.find_adapter is not _no_adapter:
            text += ", and adapters that are loaded when they are asked for"
        return UnknownModel(text, name=name, version=version)

    def free_place(self, base: ServedModel, name: str) -> int | None:
        """Returns a place for an adapter; None if the adapters of all places are in use.

        The adapter that was not used for the longest time leaves its place, and is not served any more.

        Args:
            base: Has the places.
            name: Of the new adapter, which takes the place of its own old version rather than another's.
        """
        last_uses = dict[int, int]()
        for place, model in enumerate(base.places):
            if model is None:
                last_uses[place] = -1
            elif not self._num_users[model]:
                last_uses[place] = -1 if model.name == name else self._last_uses.get(model, -1)
        if not last_uses:
            return None
        place = min(last_uses, key=last_uses.__getitem__)
        if last_uses[place] >= 0 and (leaving := base.places[place]) is not None:
            self.remove(leaving.name)
            self.statistics_of(base).num_adapter_evictions += 1
        return place

    async def wait_until_unused(self, model: ServedModel) -> None:
        """Wait until all `use` blocks of a model have ended."""
        while self._num_users[model]:
            self._left.clear()
            await self._left.wait()

    def statistics_of(self, model: ServedModel) -> Statistics:
        """Returns the sums over the requests and turns of a model.

        An adapter has none of its own: those of its base count the requests of all adapters.
        """
        return Statistics() if model.base is not None else self._metrics.statistics_of(model.name)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)
