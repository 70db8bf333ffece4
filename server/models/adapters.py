"""The adapters on disk, and how one becomes a model that is served beside its base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from seq2seq_serve.bundle.adapters import (
    Adapter,
    AdapterError,
    AdapterManifest,
    adapter_version,
    fits,
    is_adapter,
    load_adapter,
)
from seq2seq_serve.bundle.manifest import Manifest
from seq2seq_serve.server.errors import UnknownModel
from seq2seq_serve.server.models.folders import Version, is_text

# The last parts of the paths of pages of the model BASE, which hide an adapter of that name over HTTP
PAGE_NAMES = (
    *("config", "generate", "generate_stream", "infer", "load", "ready", "stats", "unload", "versions"),
)


class AdapterFolders:
    """The folders of adapters; every call looks at them again.

    The name of an adapter for callers is `BASE/NAME`, with the name of a served model that it fits.

    Args:
        named: Adapters by their names; a name that has the base's is for this one only.
        folder: Contains further adapters, each in a folder of its name; None is off.

    Raises:
        ValueError: Two adapters have the same name, a name is not UTF-8, or `folder` is not a folder.
    """

    def __init__(self, named: Sequence[tuple[str, Path]], folder: Path | None) -> None:
        self.named = dict(named)
        self._folder = folder
        if len(self.named) < len(named):
            raise ValueError("two adapters have the same name: give each --adapter a name of its own")
        for name in self.named:
            if not _is_usable(name.rpartition("/")[2]):
                raise ValueError(
                    f"the name of the adapter {name!a} is not UTF-8, begins with a dot, or is that of a "
                    "page: give it another one"
                )
        if folder is not None and not folder.is_dir():
            raise ValueError(f"the folder of adapters {folder} is not a folder: name an existing one")

    def __bool__(self) -> bool:
        return bool(self.named) or self._folder is not None

    def names_for(self, base: str) -> list[str]:
        """Returns the full names of the adapters given by name that a base may have."""
        names = [name if "/" in name else f"{base}/{name}" for name in self.named]
        return list(dict.fromkeys(name for name in names if name.rpartition("/")[0] == base))

    def path(self, name: str) -> Path | None:
        """Returns the folder of an adapter by its full name; None if there is none."""
        base, _, short = name.rpartition("/")
        if not base or not _is_usable(short):
            return None
        if (path := self.named.get(name) or self.named.get(short)) is not None:
            return path
        if self._folder is not None and is_adapter(self._folder / short):
            return self._folder / short
        return None

    def remarks(self) -> list[str]:
        """Returns why the folder has nothing to serve, if so."""
        if self._folder is None or self._names_in_folder():
            return []
        if is_adapter(self._folder):
            return [f"{self._folder} is an adapter itself: give its parent as --adapters, or --adapter NAME="]
        return [
            f"there is no adapter in {self._folder}: each has a folder that `python -m export adapter` wrote"
        ]

    def find(self, name: str) -> Version:
        """Returns an adapter on disk; raises UnknownModel."""
        path = self.path(name)
        if path is None:
            raise UnknownModel(f"there is no adapter named {name[:100]!r}", name=name)
        return _version(name, path)

    def all(self, bases: Iterable[str]) -> list[Version]:
        """Returns every adapter for each of these bases, also those that do not fit."""
        shorts = self._names_in_folder()
        names = [
            name
            for base in bases
            for name in (*self.names_for(base), *(f"{base}/{short}" for short in shorts))
        ]
        paths = {name: self.path(name) for name in names}
        return [_version(name, path) for name, path in paths.items() if path is not None]

    def _names_in_folder(self) -> list[str]:
        """Returns the names of the folder's adapters; none if it cannot be listed."""
        try:
            children = [] if self._folder is None else sorted(self._folder.iterdir())
        except OSError:
            return []
        return [child.name for child in children if _is_usable(child.name) and is_adapter(child)]


def _is_usable(short: str) -> bool:
    """Whether an adapter may have a name: folders that are being written begin with a dot."""
    return (
        is_text(short) and not short.startswith(".") and short not in ("", *PAGE_NAMES) and "\0" not in short
    )


def _version(name: str, path: Path) -> Version:
    return Version(name, adapter_version(path), path, "1")


NO_ADAPTERS = AdapterFolders((), None)


def read_adapter(path: Path, name: str, model: Manifest, max_rank: int) -> Adapter:
    """Read an adapter for a model.

    Args:
        path: The adapter's folder.
        name: The model's.
        model: Its manifest.
        max_rank: The largest rank that it takes.

    Raises:
        ValueError: It is not one, or does not fit this model.
    """
    return load_adapter(path, lambda manifest: check_fits(manifest, path, name, model, max_rank))


def check_fits(adapter: AdapterManifest, path: Path, name: str, model: Manifest, max_rank: int) -> None:
    """Raises AdapterError if the adapter in a folder does not fit a model; see `read_adapter`."""
    if problems := fits(adapter, model, max_rank):
        raise AdapterError(f"{path} does not fit the model {name}: {'; '.join(problems)}")
