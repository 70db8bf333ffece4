"""Loads, replaces and unloads the served versions of models."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from seq2seq_serve.server.errors import LoadFailed, Overloaded, ServerError, Unavailable, UnknownModel
from seq2seq_serve.server.models.adapters import NO_ADAPTERS, AdapterFolders, read_adapter
from seq2seq_serve.server.models.folders import ModelFolders, Version
from seq2seq_serve.server.models.served import Models, ServedModel

_LOADING_SECONDS = 1.0  # a load cannot be interrupted
_RETRY_SECONDS = 1.0
_NOT_LOADED, _UNLOADED = "not loaded; whether its files are sound shows when it is", "unloaded"

_log = logging.getLogger(__name__)

LoadModel = Callable[[str, str, Path, int], ServedModel]


class VersionState(enum.StrEnum):
    """States of a version, with the names of the Open Inference Protocol."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Repository:
    """Keeps one version of each model served.

    Owned by the app; used on the event loop only. A version is loaded beside the served one and replaces it
    as soon as it is warm; the old version stops when its last caller has left. No call fails meanwhile.

    Args:
        folders: The bundles on disk.
        models: The served models.
        load: Loads one version, on its own thread; the last argument is the memory of the other models.
        changed: Is called after a model was served, replaced or unloaded.
        adapters: Those on disk. Those given by their names are loaded with their base, and others when a
            caller first asks for them.
    """

    def __init__(
        self,
        folders: ModelFolders,
        models: Models,
        load: LoadModel,
        changed: Callable[[], None],
        adapters: AdapterFolders = NO_ADAPTERS,
    ) -> None:
        self._folders, self._adapters = folders, adapters
        if adapters:
            models.find_adapter = self._find_adapter
        self._unloaded: set[str] = set()  # adapters that callers do not load again by asking for them
        self._writing: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # one adapter of a base at a time
        self._asked: dict[str, asyncio.Task[ServedModel]] = {}  # loads of adapters that callers wait for
        self._problems: dict[str, str] = {}  # why adapters could not be loaded
        self._has_started = False
        self._models = models
        self._load = load
        self._changed = changed
        self._served: dict[str, Version] = {}
        self._reasons: dict[Version, str] = {}  # why a version is not served
        self._changing = asyncio.Lock()  # one change at a time, so that each knows the free memory
        self._is_draining = False
        self._loading: set[asyncio.Task[ServedModel]] = set()
        self._loading_now: Version | None = None
        self._ending: dict[asyncio.Task[None], tuple[ServedModel, Version]] = {}

    @property
    def is_loading(self) -> bool:
        """Whether a version is being loaded."""
        return bool(self._loading)

    async def index(self) -> list[tuple[Version, VersionState, str]]:
        """Returns every version on disk or in use, its state, and the reason if it is unavailable."""
        found = await asyncio.to_thread(self._folders.all)
        if self._adapters:
            bases = [model.name for model in self._models.bases]
            found += await asyncio.to_thread(self._adapters.all, bases)
        ending = [version for _, version in self._ending.values()]
        states = {one: self._state(one, ending) for one in (*found, *ending, *self._served.values())}
        known = {(one.model_name, one.version) for one in found}
        for model in self._models:  # an adapter whose folder has another version by now, or is gone
            if model.base is not None and (model.name, model.version) not in known:
                states[Version(model.name, model.version, Path())] = VersionState.READY
        return [(one, state, self._reason(one, state)) for one, state in states.items()]

    def _reason(self, version: Version, state: VersionState) -> str:
        if state is VersionState.UNAVAILABLE and version.model_name in self._unloaded:
            return _UNLOADED
        return self._reasons.get(version, _NOT_LOADED if state is VersionState.UNAVAILABLE else "")

    def _state(self, version: Version, ending: Collection[Version]) -> VersionState:
        if self._served.get(version.model_name) == version:
            return VersionState.READY
        model = self._models.get(version.model_name)
        if model is not None and model.base is not None and model.version == version.version:
            return VersionState.READY
        if version == self._loading_now:
            return VersionState.LOADING
        return VersionState.UNLOADING if version in ending else VersionState.UNAVAILABLE

    async def load_one(self, name: str) -> ServedModel:
        """Serve the newest version of a model that can be served.

        Raises:
            UnknownModel: The model is not on disk.
            LoadFailed: No version can be served; the message is that of the oldest, and the log has the
                others.
        """
        oldest, *newer = await asyncio.to_thread(self._folders.versions, name) or [Version(name, "", Path())]
        for one in reversed(newer):
            try:
                return await self.load(name, one.version)
            except LoadFailed as error:
                _log.error("model %s: trying a version before %s, which failed: %s", name, one.version, error)
        return await self.load(name, oldest.version)

    async def load(self, name: str, version: str = "") -> ServedModel:
        """Serve a version of a model, or its newest one; a served version is loaded again.

        A load that is cancelled while another one runs does not begin. One that runs goes on; its caller does
        not get a result.

        Raises:
            UnknownModel: It is not on disk.
            LoadFailed: Its bundle cannot be used here; the version served before stays.
            Unavailable: The server is shutting down.
        """
        if await self._is_adapter(name):
            return await self._load_adapter(name, version)
        await self._changing.acquire()
        loading = asyncio.create_task(self._load_and_put(name, version))
        self._loading.add(loading)
        loading.add_done_callback(self._end_load)
        return await asyncio.shield(loading)

    def _end_load(self, loading: asyncio.Task[ServedModel]) -> None:
        self._changing.release()
        self._loading.discard(loading)
        if not loading.cancelled():
            loading.exception()  # asyncio would log it, if the caller has left

    async def _load_and_put(self, name: str, version: str) -> ServedModel:
        """Loads a version and serves it; the caller holds the lock of changes."""
        self._check_not_draining()
        wanted = await asyncio.to_thread(self._folders.find, name, version)
        self._loading_now = wanted
        try:
            model = await asyncio.to_thread(self._load, name, wanted.version, wanted.path, self._num_bytes())
            await model.engine.start()
        except Exception as error:
            self._reasons[wanted] = str(error)
            if not isinstance(error, (OSError, ValueError)):
                _log.exception("model %s: version %s cannot be loaded", name, wanted.version)
            raise LoadFailed(str(error)) from error
        finally:
            self._loading_now = None
        if self._is_draining:
            await model.engine.stop()
        self._check_not_draining()
        before, old = self._served.get(name), self._models.put(model, wanted.number)
        self._served[name] = wanted
        self._reasons.pop(wanted, None)
        self._changed()
        _log.info("model %s: version %s is served", name, model.version)
        if old is not None and before is not None:
            try:
                await self._take_over(old, model)
            finally:
                self._end(old, before)
        for adapter in self._adapters.names_for(name):
            if adapter not in self._unloaded:
                try:
                    await self._load_adapter(adapter, is_asked=True)
                except ServerError as error:
                    self._report(adapter, error)
        return model

    def check_adapters(self) -> None:
        """Check that every adapter given by its name can be served.

        Raises:
            ValueError: One does not fit any served model.
        """
        self._has_started = True
        for text in self._adapters.remarks():
            _log.warning("%s", text)
        tried = list[str]()
        for model in self._models.bases:
            named = self._adapters.names_for(model.name)
            tried += named
            if len(named) > len(model.places) > 0:
                raise ValueError(
                    f"{len(named)} adapters of {model.name} are given by their names, and --max-adapters is "
                    f"{len(model.places)}: raise it"
                )
            if self._adapters and not model.places:
                _log.warning("model %s takes no adapters: export it with --adapters", model.name)
        for name in self._adapters.named:
            its = [full for full in tried if name in (full, full.rpartition("/")[2])]
            if all(full in self._problems for full in its):
                problems = "; ".join(self._problems[full] for full in its)
                problems = problems or "its model is not served, or has another adapter of the name"
                raise ValueError(f"the adapter {name}: {problems}")

    async def _take_over(self, old: ServedModel, new: ServedModel) -> None:
        """Serves the loaded adapters of a model with the model that replaces it, as far as they fit."""
        for adapter in (one for one in self._models if one.base is old):
            try:
                await self._load_adapter(adapter.name, is_asked=True)
            except ServerError as error:
                if self._models.get(adapter.name) is adapter:
                    self._models.remove(adapter.name)
                    self._changed()
                text = "model %s: not served any more with version %s of %s: %s"
                _log.error(text, adapter.name, new.version, new.name, error)

    def _report(self, name: str, error: ServerError) -> None:
        """Logs why an adapter cannot be loaded, once: callers may ask for it again and again."""
        if self._problems.get(name) != str(error):
            # At a start, an adapter is tried with every model.
            level = logging.ERROR if self._has_started else logging.INFO
            _log.log(level, "model %s: not served: %s", name, error)
        self._problems[name] = str(error)

    def _base_of(self, name: str) -> ServedModel | None:
        """Returns the served model with whose name that of an adapter begins."""
        model = self._models.get(name.rpartition("/")[0])
        return None if model is None or model.base is not None else model

    async def _is_adapter(self, name: str) -> bool:
        """Whether a name is that of an adapter, served or on disk, of a served model."""
        if (model := self._models.get(name)) is not None:
            return model.base is not None
        return (
            self._base_of(name) is not None and await asyncio.to_thread(self._adapters.path, name) is not None
        )

    async def _find_adapter(self, name: str, loads: bool) -> ServedModel | None:
        """Loads an adapter that a caller asks for; returns None if there is none of that name.

        Callers who ask at once wait for one load, which goes on when they leave. Without `loads`, the adapter
        is only described.
        """
        base = self._base_of(name)
        if base is None or name in self._unloaded or not await self._is_adapter(name):
            return None
        if not loads:
            return base.named(name)
        loading = self._asked.get(name)
        if loading is None:
            loading = self._asked[name] = asyncio.create_task(self._load_adapter(name, is_asked=True))
            loading.add_done_callback(partial(self._end_asked, name))
        try:
            return await asyncio.shield(loading)
        except LoadFailed as error:  # the text is not for callers: it has paths
            self._report(name, error)
            raise LoadFailed(f"the adapter {name} cannot be loaded: the server's log says why") from error

    def _end_asked(self, name: str, loading: asyncio.Task[ServedModel]) -> None:
        del self._asked[name]
        if not loading.cancelled():
            loading.exception()  # asyncio would log it, if all callers have left

    async def _load_adapter(self, name: str, version: str = "", *, is_asked: bool = False) -> ServedModel:
        """Loads an adapter beside the one that it replaces, which stays for its callers.

        Args:
            name: Its full name.
            version: The version that the folder must have; empty for any.
            is_asked: Whether one that is served already will do, and none that was unloaded.

        Raises:
            UnknownModel: It is not on disk, it was unloaded, or its base is not served.
            LoadFailed: It cannot be used here.
            Overloaded: All places are in use.
            Unavailable: The server is shutting down.
        """
        async with self._writing[name.rpartition("/")[0]]:
            while True:
                base, served = self._base_of(name), self._models.get(name)
                if base is None or (is_asked and name in self._unloaded):
                    raise UnknownModel(f"no adapter named {name[:100]!r} is served", name=name)
                if served is not None and served.base is None:
                    raise LoadFailed(f"a model has the name of the adapter {name}: give one of them another")
                if is_asked and served is not None and served.base is base:
                    return served
                found = await asyncio.to_thread(self._adapters.find, name)
                if version and not found.is_named(version):
                    text = f"{name} has no version {version[:100]!r} on disk: there is {found.version}"
                    raise UnknownModel(text, name=name, version=version)
                if is_asked and (known := self._reasons.get(found)):  # its files are not read again
                    raise LoadFailed(known)
                try:
                    adapter = await asyncio.to_thread(
                        read_adapter, found.path, base.name, base.manifest, base.sizing.max_rank
                    )
                except ValueError as error:
                    self._reasons[found] = str(error)
                    raise LoadFailed(str(error)) from error
                self._check_not_draining()
                if self._base_of(name) is base:  # otherwise it was replaced meanwhile
                    break
            place = self._models.free_place(base, name)
            if place is None:
                raise Overloaded(
                    f"all places for adapters of {base.name} ({len(base.places)}) are in use: ask again, or "
                    "serve with more --max-adapters",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            base.engine.write_adapter(place, adapter.weights)
            self._models.statistics_of(base).num_adapter_loads += 1
            model = base.places[place] = base.adapted(name, adapter, place)
            self._models.put(model, found.number)
            self._unloaded.discard(name)
            self._reasons.pop(found, None)
            self._problems.pop(name, None)
            self._changed()
            _log.info("model %s: version %s is served, an adapter of %s", name, model.version, base.name)
            return model

    def _check_not_draining(self) -> None:
        if self._is_draining:
            raise Unavailable("the server is shutting down")

    async def unload(self, name: str) -> None:
        """Stop serving a model, and its adapters, or one adapter, and let the callers finish.

        An unloaded adapter is not loaded by callers who ask for it, but by `load`.

        Raises:
            UnknownModel: It is not served.
        """
        if name not in self._unloaded and await self._is_adapter(name):
            async with self._writing[name.rpartition("/")[0]]:  # one that is being loaded is unloaded, too
                self._models.remove(name)
                self._unloaded.add(name)
            self._changed()
            return
        async with self._changing:
            model = self._models.remove(name)
            if model is None:
                raise UnknownModel(f"no model is named {name[:100]!r}: there is nothing to unload", name=name)
            for adapter in [one.name for one in self._models if one.base is model]:
                self._models.remove(adapter)
            self._changed()
            version = self._served.pop(name)
            self._reasons[version] = _UNLOADED
            self._end(model, version)

    def drain(self) -> None:
        """Refuse further loads; a version that is being loaded will not be served."""
        self._is_draining = True

    async def stop(self) -> None:
        """Stop every engine; unfinished requests end with `Unavailable`. A load may keep running."""
        self.drain()
        if self._loading:
            await asyncio.wait(self._loading, timeout=_LOADING_SECONDS)
        ending = dict(self._ending)
        for model in (*self._models.bases, *(model for model, _ in ending.values())):
            await model.engine.stop()
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def _num_bytes(self) -> int:
        """Returns the bytes of all loaded models, including unloaded ones that still have callers."""
        ending = [model for model, _ in self._ending.values()]
        return sum(model.sizing.limited_bytes for model in (*self._models.bases, *ending))

    def _end(self, model: ServedModel, version: Version) -> None:
        """Stop a model that is not served any more as soon as its last caller has left."""

        async def end() -> None:
            try:
                await self._models.wait_until_unused(model)
            finally:
                await asyncio.shield(model.engine.stop())
            _log.info("model %s: version %s is stopped", model.name, model.version)

        task = asyncio.create_task(end())
        self._ending[task] = model, version
        task.add_done_callback(self._ending.pop)
