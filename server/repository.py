"""Which versions of the models are served, and how one takes another's place."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.errors import LoadFailed, UnknownModel
from server.models import Models, ServedModel
from server.shelf import Shelf, Version

_log = logging.getLogger(__name__)

Load = Callable[[str, str, Path, int], ServedModel]


class State(enum.StrEnum):
    """Of a version, in the words of the Open Inference Protocol."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass
class Status:
    """What became of a version, and why.

    Attributes:
        version: As callers name it, where it is served; also that of a bundle without a folder of its own.
    """

    state: State
    reason: str = ""
    version: str = ""


class Repository:
    """The bundles on disk, and the versions of them that are served: of each model one.

    Owned by the app; used on the event loop only. A version is loaded beside the one that is served, takes
    its place at once when it is warm, and the old one ends when its last caller has left: no call fails.

    Args:
        shelf: The bundles on disk.
        models: What is served.
        load: Loads one version, on a thread of its own, and starts its engines; is told what others take.
    """

    def __init__(self, shelf: Shelf, models: Models, load: Load) -> None:
        self._shelf = shelf
        self._models = models
        self._load = load
        self._status: dict[Version, Status] = {}
        self._served: dict[str, Version] = {}
        self._changing = asyncio.Lock()  # one after the other, so that each knows what there is room for
        self._loading: set[asyncio.Task[ServedModel]] = set()
        self._ending: dict[asyncio.Task[None], ServedModel] = {}

    async def index(self) -> list[tuple[Version, Status]]:
        """Every version that there is, and what became of it."""
        found = dict.fromkeys(await asyncio.to_thread(self._shelf.all))
        return [(one, self._status.get(one, Status(State.UNAVAILABLE))) for one in {**found, **self._status}]

    async def load(self, name: str, version: str = "") -> ServedModel:
        """Serve a version of a model, or its newest one; one that is served already is loaded anew.

        Who is cancelled meanwhile only hears nothing more of it.

        Raises:
            UnknownModel: There is none on disk.
            LoadFailed: Its bundle cannot be used here; what was served before still is.
        """
        loading = asyncio.create_task(self._load_and_put(name, version))
        self._loading.add(loading)
        loading.add_done_callback(self._loading.discard)
        return await asyncio.shield(loading)

    async def _load_and_put(self, name: str, version: str) -> ServedModel:
        async with self._changing:
            wanted = await asyncio.to_thread(self._shelf.find, name, version)
            known = self._status.get(wanted, Status(State.UNAVAILABLE))
            self._status[wanted] = Status(State.LOADING)
            try:
                model = await asyncio.to_thread(
                    self._load, name, wanted.version, wanted.path, self._num_bytes()
                )
            except Exception as error:
                self._status[wanted] = Status(known.state, str(error), known.version)
                if not isinstance(error, (OSError, ValueError)):
                    _log.exception("model %s: version %s cannot be loaded", name, wanted.version)
                raise LoadFailed(str(error)) from error
            before, old = self._served.get(name), self._models.put(model)
            self._served[name] = wanted
            self._status[wanted] = Status(State.READY, version=model.version)
            if old is not None and before is not None:
                self._end(old, before if before != wanted else None)
            return model

    async def unload(self, name: str) -> None:
        """Serve a model no more, and let who uses it finish.

        Raises:
            UnknownModel: It is not served.
        """
        async with self._changing:
            model = self._models.remove(name)
            if model is None:
                raise UnknownModel(f"no model is named {name[:100]!r}: there is nothing to unload", name=name)
            self._end(model, self._served.pop(name))

    async def stop(self) -> None:
        """End every engine; what is unfinished ends with `Unavailable`."""
        await asyncio.gather(*self._loading, return_exceptions=True)
        ending = dict(self._ending)
        for model in (*self._models, *ending.values()):
            await asyncio.to_thread(model.stop)
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def _num_bytes(self) -> int:
        """Of all that is loaded, also of what is served no more and still has callers."""
        return sum(model.num_bytes for model in (*self._models, *self._ending.values()))

    def _end(self, model: ServedModel, version: Version | None) -> None:
        """Stop a model that is served no more, once nobody uses it."""
        if version is not None and self._served.get(version.model_name) != version:
            self._status[version] = Status(State.UNLOADING)

        async def end() -> None:
            try:
                await self._models.wait_until_unused(model)
            finally:
                await asyncio.shield(asyncio.to_thread(model.stop))
            if version is not None and self._served.get(version.model_name) != version:
                self._status[version] = Status(State.UNAVAILABLE, "unloaded")
            _log.info("model %s: version %s is stopped", model.name, model.version)

        task = asyncio.create_task(end())
        self._ending[task] = model
        task.add_done_callback(self._ending.pop)
