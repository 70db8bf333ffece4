"""Lists the models on disk and their versions; it reads folder names and manifests only."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seq2seq_serve.bundle.manifest import bundle_version
from seq2seq_serve.bundle.names import MANIFEST_FILE
from seq2seq_serve.server.errors import UnknownModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Version:
    """A bundle that could be served.

    Attributes:
        model_name: The model's name.
        version: The name of its folder; if the model's folder is the bundle, the first characters of the
            manifest's hash.
        path: The bundle's folder.
        number: Its number among the model's versions, the oldest being 1, for callers who know versions as
            numbers; empty if the name of any of them is a number.
    """

    model_name: str
    version: str
    path: Path
    number: str = field(default="", compare=False)

    def is_named(self, name: str) -> bool:
        """Whether callers mean this version by a name."""
        return name in (self.version, self.number) and name != ""


class ModelFolders:
    """The folders of all models; every call reads them again.

    A folder whose name is not UTF-8 is skipped, because no protocol could name it, and logged once.

    Args:
        bundles: One folder for each model, whose name is the folder's: a bundle, or a folder with one bundle
            for each version.
        folder: A repository: it contains such a folder for each further model; None is off.
        named: Such folders, each after the name of its model; they come first.

    Raises:
        ValueError: Two bundles have the same name, a name is not UTF-8, or `folder` is not a folder.
    """

    def __init__(
        self, bundles: Sequence[Path], folder: Path | None, named: Sequence[tuple[str, Path]] = ()
    ) -> None:
        given = [*named, *((path.resolve().name, path) for path in bundles)]
        self._bundles = dict(given)
        self._folder = folder
        self._skipped: set[Path] = set()
        for name in self._bundles:
            if not is_text(name):
                raise ValueError(f"the name of the bundle {name!a} is not UTF-8: rename the folder")
        if len(self._bundles) < len(given):
            raise ValueError("two bundles have the same name: name one of them by --model-name NAME=FOLDER")
        if folder is not None and not folder.is_dir():
            raise ValueError(f"the repository {folder} is not a folder: name an existing one")
        hidden = [path.name for path in self._children(folder)] if folder is not None else []
        both = sorted(self._bundles.keys() & set(hidden))
        if both:
            raise ValueError(
                f"{', '.join(both)}: a bundle and a model of the repository have the same name: rename one"
            )

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return list(dict.fromkeys(version.model_name for version in self.all()))

    def check_names(self, names: Iterable[str]) -> None:
        """Check that models of these names can exist, and warn about those without a bundle.

        Raises:
            ValueError: A model does not exist, and there is no repository to which it could be added later.
        """
        if not self.names:
            _log.warning(
                "there is no model in %s: each has a folder, with a manifest.json or one folder per version",
                self._folder,
            )
        for name in names:
            if self._folder is None and name not in self._bundles:
                raise ValueError(
                    f"there are settings for a model {name!r}, and only bundles of {', '.join(self._bundles)}"
                    ": correct the name, or add its bundle"
                )
            if not self.versions(name):
                _log.warning("there are settings for a model %r, and no bundle yet", name)

    def is_given(self, name: str) -> bool:
        """Whether a model's own folder was given, not only the repository."""
        return name in self._bundles

    def versions(self, name: str) -> list[Version]:
        """Returns the versions of a model, the newest last; numbers in names are compared as numbers."""
        path = self._bundles.get(name)
        if path is None and self._folder is not None and _is_plain(name):
            path = self._folder / name
        if path is None:
            return []
        is_bundle = _is_bundle(path)
        folders = [] if is_bundle else sorted(filter(_is_bundle, self._children(path)), key=_in_order)
        if not folders and (name in self._bundles or is_bundle):
            return [Version(name, bundle_version(path), path, "1")]
        has_numbers = any(child.name.isdecimal() for child in folders)
        return [
            Version(name, child.name, child, "" if has_numbers else str(place))
            for place, child in enumerate(folders, 1)
        ]

    def all(self) -> list[Version]:
        """Returns every version of every model."""
        found = [] if self._folder is None else [path.name for path in sorted(self._children(self._folder))]
        names = dict.fromkeys([*self._bundles, *found])
        return [version for name in names for version in self.versions(name)]

    def find(self, name: str, version: str = "") -> Version:
        """Returns a version of a model; an empty `version` means the newest.

        Raises:
            UnknownModel: It does not exist; the message lists the existing versions.
        """
        versions = self.versions(name)
        if not versions:
            raise UnknownModel(f"there is no bundle of a model named {name[:100]!r}", name=name)
        found = next((one for one in versions if one.is_named(version)), None) if version else versions[-1]
        if found is None:
            there_are = ", ".join(one.version for one in versions)
            text = f"{name} has no version {version[:100]!r} on disk: there is {there_are}"
            raise UnknownModel(text, name=name, version=version)
        return found

    def _children(self, path: Path) -> list[Path]:
        """Returns the content of a folder; an empty list if it cannot be listed."""
        try:
            children = list(path.iterdir())
        except OSError:
            return []
        for child in children:
            if not is_text(child.name) and child not in self._skipped:
                self._skipped.add(child)
                _log.warning("%a is skipped: its name is not UTF-8", str(child))
        return [child for child in children if is_text(child.name)]


def _is_bundle(path: Path) -> bool:
    return os.path.isfile(path / MANIFEST_FILE)  # noqa: PTH113 (pathlib's raises if we may not read the folder)


def _in_order(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def is_text(name: str) -> bool:
    """Returns whether a file's name is UTF-8; Python keeps other bytes as surrogates, which are not text."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


def _is_plain(name: str) -> bool:
    """Returns whether a name is that of one folder, and cannot lead out of the repository."""
    return name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
