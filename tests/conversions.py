"""Graphs that were converted before, so that torch traces an equal graph once and not in every test.

Exports run as ever: they prove and report what they read from here. Only the tracing of a graph that has not
changed, by sources that have not changed, is left out.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import onnx_ir as ir
import torch

from seq2seq_serve.export.graphs.base import Graph

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".pytest_cache" / "converted"
SOURCES = [ROOT / name for name in ("bundle", "export", "kernels", "training")]
_PACKAGES = "onnx", "onnx-ir", "onnxscript", "torch"
_MAX_FILES = 1000  # several times the graphs of all tests


class Conversions:
    """Converted graphs in the files of a folder, which several processes may use at once.

    A file's name is the digest of all that decides its content: the sources, the versions of the packages,
    and the graph with its weights. It gets this name when it is complete, and is not written again. What runs
    graphs is not in the digest, because each test runs them itself.

    Args:
        folder: Holds the files; those that were not read for longest are deleted.
        convert: Traces a graph, as `export.convert.convert` does.
        sources: The folders with the code of graphs and of their conversion.
    """

    def __init__(
        self, folder: Path, convert: Callable[[Graph], ir.Model], sources: Iterable[Path] = SOURCES
    ) -> None:
        self._folder = folder
        self._convert = convert
        self._digest = _digest_of(sources)
        folder.mkdir(parents=True, exist_ok=True)
        _delete_oldest(folder)

    def convert(self, graph: Graph) -> ir.Model:
        """Return the graph as `convert` made it, now or before."""
        if not _is_of_package(graph):
            return self._convert(graph)
        file = self._folder / f"{self._digest_with(graph.eval())}.onnx"
        with suppress(FileNotFoundError):
            os.utime(file)
            return ir.load(file)
        model = self._convert(graph)
        partial = file.with_suffix(f".{os.getpid()}")
        ir.save(model, partial, format="protobuf")
        partial.replace(file)
        return model

    def _digest_with(self, graph: Graph) -> str:
        stream = io.BytesIO()
        torch.save(graph, stream)
        return hashlib.sha256(self._digest + stream.getvalue()).hexdigest()


def _is_of_package(graph: Graph) -> bool:
    """Whether no class of it is one of the tests', whose sources are not in the digest."""
    return all(type(module).__module__.startswith(("seq2seq_serve.", "torch.")) for module in graph.modules())


def _digest_of(sources: Iterable[Path]) -> bytes:
    digest = hashlib.sha256(repr([version(package) for package in _PACKAGES]).encode())
    for file in sorted(file for folder in sources for file in folder.rglob("*.py")):
        digest.update(f"{file} {file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.digest()


def _delete_oldest(folder: Path) -> None:
    with suppress(FileNotFoundError):  # another process deletes them, too
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[_MAX_FILES:]:
            file.unlink()
