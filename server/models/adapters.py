"""The adapters on disk, and how one becomes a model that is served beside its base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from seq2seq_serve.bundle.adapters import Adapter, adapter_version, fits, is_adapter, load_adapter
from seq2seq_serve.server.errors import UnknownModel
from seq2seq_serve.server.models.folders import Version
from seq2seq_serve.server.models.served import ServedModel


class AdapterFolders:
    """The folders of adapters; every call looks at them again.

    The name of an adapter for callers is `BASE/NAME`, with the name of a served model that it fits.

    Args:
        named: Adapters by their names; a name that has the base's is for this one only.
        folder: Contains further adapters, each in a folder of its name; None is off.

    Raises:
        ValueError: Two adapters have the same name, or `folder` is not a folder.
    """

    def __init__(self, named: Sequence[tuple[str, Path]], folder: Path | None) -> None:
        self.named = dict(named)
        self._folder = folder
        if len(self.named) < len(named):
            raise ValueError("two adapters have the same name: give each --adapter a name of its own")
        if folder is not None and not folder.is_dir():
            raise ValueError(f"the folder of adapters {folder} is not a folder: name an existing one")

    def __bool__(self) -> bool:
        return bool(self.named) or self._folder is not None

    def names_for(self, base: str) -> list[str]:
        """Returns the full names of the adapters given by name that a base may have."""
        names = [name if "/" in name else f"{base}/{name}" for name in self.named]
        return [name for name in names if name.startswith(f"{base}/")]

    def path(self, name: str) -> Path | None:
        """Returns the folder of an adapter by its full name; None if there is none."""
        base, _, short = name.rpartition("/")
        if not base or short in ("", ".", "..") or "\0" in name:
            return None
        if (path := self.named.get(name) or self.named.get(short)) is not None:
            return path
        if self._folder is not None and is_adapter(self._folder / short):
            return self._folder / short
        return None

    def find(self, name: str) -> Version:
        """Returns an adapter on disk; raises UnknownModel."""
        path = self.path(name)
        if path is None:
            raise UnknownModel(f"there is no adapter named {name[:100]!r}", name=name)
        return Version(name, adapter_version(path), path, "1")

    def all(self, bases: Iterable[str]) -> list[Version]:
        """Returns every adapter for each of these bases, also those that do not fit."""
        children = [] if self._folder is None else sorted(filter(is_adapter, self._folder.iterdir()))
        found = list[Version]()
        for base in bases:
            names = [*self.names_for(base), *(f"{base}/{child.name}" for child in children)]
            found += [self.find(name) for name in dict.fromkeys(names)]
        return found


NO_ADAPTERS = AdapterFolders((), None)


def read_adapter(path: Path, base: ServedModel) -> Adapter:
    """Read an adapter for a model.

    Raises:
        ValueError: It is not one, or does not fit this model.
    """
    adapter = load_adapter(path)
    if problems := fits(adapter.manifest, base.manifest, base.sizing.max_rank):
        raise ValueError(f"{path} does not fit the model {base.name}: {'; '.join(problems)}")
    return adapter
