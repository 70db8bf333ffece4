"""Which bundles there are, which of them are served, and how one takes another's place."""

from __future__ import annotations

import asyncio
import enum
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from server.errors import LoadFailed, UnknownModel
from server.models import Models, ServedModel

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"

Load = Callable[[str, str, Path], ServedModel]


class State(enum.StrEnum):
    """Of a version, in the words of the Open Inference Protocol."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(frozen=True)
class Version:
    """A bundle that could be served.

    Attributes:
        model_name: Whose.
        version: The name of its folder; empty where the model's folder is the bundle.
        path: The bundle's folder.
    """

    model_name: str
    version: str
    path: Path


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
        bundles: Folders by the name of their model: a bundle each, or one for each version in it.
        folder: Has a folder like these for each model; looked at anew whenever it is asked for.
        models: What is served.
        load: Loads one version, on a thread of its own, and starts its engines; raises ValueError.
    """

    def __init__(self, bundles: Mapping[str, Path], folder: Path | None, models: Models, load: Load) -> None:
        self._bundles = dict(bundles)
        self._folder = folder
        self._models = models
        self._load = load
        self._status: dict[Version, Status] = {}
        self._served: dict[str, Version] = {}
        self._changing = asyncio.Lock()  # one after the other, so that each knows what there is room for
        self._ending: dict[asyncio.Task[None], ServedModel] = {}

    @property
    def names(self) -> list[str]:
        """Of all models that there are on disk."""
        found = [] if self._folder is None else [path.name for path in sorted(self._folder.iterdir())]
        return [
            *self._bundles,
            *(name for name in found if name not in self._bundles and self._versions(name)),
        ]

    @property
    def num_bytes(self) -> int:
        """Of all that is loaded, also of what is served no more and still has callers."""
        return sum(model.num_bytes for model in (*self._models, *self._ending.values()))

    def index(self) -> list[tuple[Version, Status]]:
        """Every version that there is, and what became of it."""
        found = {version: None for name in self.names for version in self._versions(name)}
        return [(one, self._status.get(one, Status(State.UNAVAILABLE))) for one in {**found, **self._status}]

    async def load(self, name: str, version: str = "") -> ServedModel:
        """Serve a version of a model, or its newest one; one that is served already is loaded anew.

        Raises:
            UnknownModel: There is none on disk.
            LoadFailed: Its bundle cannot be used here; what was served before still is.
        """
        async with self._changing:
            wanted = self._find(name, version)
            self._status[wanted] = Status(State.LOADING)
            try:
                model = await asyncio.to_thread(self._load, name, wanted.version, wanted.path)
            except ValueError as error:
                is_served = self._served.get(name) == wanted
                self._status[wanted] = Status(State.READY if is_served else State.UNAVAILABLE, str(error))
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
                raise UnknownModel(f"no model is named {name[:100]!r}: there is nothing to unload")
            self._end(model, self._served.pop(name))

    async def stop(self) -> None:
        """End every engine; what is unfinished ends with `Unavailable`."""
        for model in self._models:
            await asyncio.to_thread(model.stop)
        for task in self._ending:
            task.cancel()

    def _end(self, model: ServedModel, version: Version | None) -> None:
        """Stop a model that is served no more, once nobody uses it."""
        if version is not None:
            self._status[version] = Status(State.UNLOADING)

        async def end() -> None:
            try:
                await self._models.wait_until_unused(model)
            finally:
                await asyncio.shield(asyncio.to_thread(model.stop))
            if version is not None:
                self._status[version] = Status(State.UNAVAILABLE, "unloaded")
            _log.info("model %s: version %s is stopped", model.name, model.version)

        task = asyncio.create_task(end())
        self._ending[task] = model
        task.add_done_callback(self._ending.pop)

    def _find(self, name: str, version: str) -> Version:
        versions = self._versions(name)
        if not versions:
            raise UnknownModel(f"there is no bundle of a model named {name[:100]!r}")
        found = next((one for one in versions if one.version == version), None) if version else versions[-1]
        if found is None:
            there_are = ", ".join(one.version for one in versions if one.version) or "only one without a name"
            raise UnknownModel(f"{name} has no version {version[:100]!r} on disk: there is {there_are}")
        return found

    def _versions(self, name: str) -> list[Version]:
        """The versions of a model on disk, the newest last: numbers in their names count as numbers."""
        path = self._bundles.get(name)
        if path is None and self._folder is not None and _is_plain(name):
            path = self._folder / name
        if path is None:
            return []
        children = list(path.iterdir()) if path.is_dir() and not (path / _MANIFEST).is_file() else []
        folders = sorted((child for child in children if (child / _MANIFEST).is_file()), key=_in_order)
        if not folders and (name in self._bundles or (path / _MANIFEST).is_file()):
            return [Version(name, "", path)]
        return [Version(name, child.name, child) for child in folders]


def _in_order(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _is_plain(name: str) -> bool:
    """Whether a name is one folder's, and no way out of the repository."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
