"""Makes `server.app` and `seq2seq_serve.server.app` one module in a clone.

`python -m server` imports `server` from the root of the clone. Python would load a file once for each name,
and the two modules would have classes of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_PREFIX = "seq2seq_serve."


def share_module(name: str) -> None:
    """Replaces a part that is imported without the prefix by the one with it, and so each module in it."""
    if not name.startswith(_PREFIX):
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
        sys.modules[name] = import_module(_PREFIX + name)


class _Loader(SourceFileLoader):
    """Loads the module with the prefix. `python -m` runs the code, which the base class reads."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_PREFIX + module.__name__)


class _Finder:
    """Finds the modules in a part that `share_module` replaced."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        part, _, rest = name.partition(".")
        if not rest or getattr(sys.modules.get(part), "__name__", "") != _PREFIX + part:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec
