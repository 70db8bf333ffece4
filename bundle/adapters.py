"""Adapters: low-rank terms for the maps of a bundle's graphs, in a folder of their own, and in memory.

A folder has `adapter.json` and one file of weights. The weights of all loaded adapters are one array, which
the graphs read: `Places` knows where in it the weights of each map are.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from seq2seq_serve.bundle.checked import problems_of
from seq2seq_serve.bundle.files import new_memory, read_small_file
from seq2seq_serve.bundle.manifest.schema import AdaptedMap, Count, FileSpec, Manifest, Parity

ADAPTER_FILE = "adapter.json"
WEIGHTS_FILE = "adapter.bin"
ADAPTER_VERSION = 1
MAX_RANK = 1024
_MOST_BYTES = 4 << 20  # of adapter.json
_MOST_WEIGHT_BYTES = 4 << 30

Array = npt.NDArray[Any]
Weights = Mapping[str, tuple[Array, Array]]
"""By the name of a part A `(r, I)` and B `(r, O)`, which has the scale; both are float16."""


class AdapterError(ValueError):
    """A folder is not a usable adapter, or not one of this model; the message says why."""


@dataclass(frozen=True)
class AdaptedShape:
    """The shape of one part's weights."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    num_inputs: Count
    num_outputs: Count

    @property
    def num_bytes(self) -> int:
        return self.rank * (self.num_inputs + self.num_outputs) * 2


@dataclass(frozen=True)
class AdapterManifest:
    """What `adapter.json` says.

    Attributes:
        base: The name of the checkpoint or run that it adapts.
        base_checksum: The `adapted_checksum` of that model's bundles.
        parts: The adapted layers, by their names in the model, in the order of the file of weights, which has
            A `(r, I)` and then B `(r, O)` of each.
        parity: The export's comparison with the model that peft makes of both, in float32.
        provenance: As that of a bundle.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    format_version: int
    base: str
    base_checksum: str
    parts: Annotated[dict[str, AdaptedShape], Field(min_length=1)]
    weights: FileSpec
    parity: Parity
    provenance: dict[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(shape.rank for shape in self.parts.values())


_MANIFEST = TypeAdapter(AdapterManifest)


class SharedWeights(dict[str, tuple[Array, Array]]):
    """`Weights` in a file in memory: a pickle has its name, and other processes map it.

    A process that reads the pickle after this object is gone gets no weights: others have taken their place.

    Args:
        parts: In the order of the content.
        content: A, then B of each part, in float16.
    """

    def __init__(self, parts: Mapping[str, AdaptedShape], content: bytes) -> None:
        descriptor = os.memfd_create("adapter")
        weakref.finalize(self, os.close, descriptor)
        memory = new_memory(len(content), descriptor)
        memory[:] = content
        super().__init__(_arrays(parts, memory))
        self._parts, self._file = dict(parts), f"/proc/{os.getpid()}/fd/{descriptor}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (self._parts, self._file)


def _mapped(parts: Mapping[str, AdaptedShape], file: str) -> Weights:
    try:
        with Path(file).open("rb") as stream:
            return _arrays(parts, memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)))
    except (OSError, ValueError):
        return {}


def _arrays(parts: Mapping[str, AdaptedShape], content: memoryview) -> dict[str, tuple[Array, Array]]:
    """Returns A `(r, I)` and B `(r, O)` of each part, which lie one after the other."""
    numbers, start = np.frombuffer(content, np.float16), 0
    arrays = {}
    for name, shape in parts.items():
        middle = start + shape.rank * shape.num_inputs
        end = middle + shape.rank * shape.num_outputs
        arrays[name] = (
            numbers[start:middle].reshape(shape.rank, -1),
            numbers[middle:end].reshape(shape.rank, -1),
        )
        start = end
    return arrays


@dataclass(frozen=True)
class Adapter:
    """An adapter that `load_adapter` has checked.

    Attributes:
        version: The first characters of the checksum of `adapter.json`.
    """

    path: Path
    manifest: AdapterManifest
    version: str
    weights: Weights


class Places:
    """The places of maps in an array of adapters `(K, R * units)`, where R is the largest rank.

    A map with P parts, I inputs and O outputs of all parts begins at `R * first_unit`, with A `(P, R, I)`
    and then B `(R, O)`. Rows of A and B beyond an adapter's rank are zeros.

    Attributes:
        first_units: By map.
        first_parts: By map, the number of parts of all maps before it.
        num_units: The units of all maps.
        num_parts: The parts of all maps.
    """

    def __init__(self, maps: Sequence[AdaptedMap]) -> None:
        self._maps = maps
        *self.first_units, self.num_units = accumulate((one.num_units for one in maps), initial=0)
        *self.first_parts, self.num_parts = accumulate((len(one.parts) for one in maps), initial=0)

    def num_bytes(self, num_adapters: int, max_rank: int) -> int:
        """The bytes of the array of all adapters."""
        return 2 * num_adapters * max_rank * self.num_units

    def write(
        self, weights: Weights, scales: Mapping[str, float], adapter: Array, ranks: Array, max_rank: int
    ) -> None:
        """Write an adapter over another one.

        Args:
            weights: Those of the new one; without any, the place becomes empty.
            scales: By part, the factor of its outputs in the graphs, if not 1.
            adapter: The array's row `(R * units,)`.
            ranks: The row `(parts,)` of ranks, which are those of the adapter that is there.
            max_rank: R.
        """
        for one, unit, first in zip(self._maps, self.first_units, self.first_parts, strict=True):
            num_parts, num_inputs = len(one.parts), one.num_inputs
            here = adapter[max_rank * unit : max_rank * (unit + one.num_units)]
            a = here[: max_rank * num_parts * num_inputs].reshape(num_parts, max_rank, num_inputs)
            b = here[max_rank * num_parts * num_inputs :].reshape(max_rank, -1)
            end = 0
            for number, part in enumerate(one.parts):
                its = slice(end, end := end + part.num_outputs)
                before = ranks[first + number]
                a[number, :before], b[:before, its] = 0, 0
                ranks[first + number] = 0
                if part.name in weights:
                    new_a, new_b = weights[part.name]
                    rank = len(new_a)
                    a[number, :rank] = new_a
                    scale = scales.get(part.name)
                    b[:rank, its] = new_b if scale is None else new_b * np.float32(scale)
                    ranks[first + number] = rank


def fits(adapter: AdapterManifest, model: Manifest, max_rank: int) -> list[str]:
    """Returns why an adapter cannot change a model's bundle; nothing if it can."""
    if not model.adapted_maps:
        return ["the model takes no adapters: export it with --adapters"]
    if adapter.base_checksum != model.adapted_checksum:
        name = model.provenance.get("checkpoint") or model.provenance.get("preset") or "another model"
        return [
            f"it is for {adapter.base!r} (checksum {adapter.base_checksum[:12]}), and the model is {name} "
            f"(checksum {model.adapted_checksum[:12]})"
        ]
    if adapter.rank > max_rank:
        return [f"its rank is {adapter.rank}: serve with --max-rank {adapter.rank} (now {max_rank})"]
    return shape_problems(adapter.parts, model.adapted_maps)


def shape_problems(parts: Mapping[str, AdaptedShape], maps: Sequence[AdaptedMap]) -> list[str]:
    """Returns the parts that no map has in these sizes."""
    known = {part.name: (one.num_inputs, part.num_outputs) for one in maps for part in one.parts}
    problems = []
    for name, shape in parts.items():
        given = shape.num_inputs, shape.num_outputs
        if name not in known:
            problems.append(f"it changes {name}, which the model's graphs do not adapt")
        elif given != known[name]:
            problems.append(
                f"it changes {name} with {given[0]} inputs and {given[1]} outputs, and the model's has "
                "{} and {}".format(*known[name])
            )
    return problems


def write_adapter(folder: Path, manifest: AdapterManifest, weights: Weights) -> None:
    """Write an adapter's files into a folder; the manifest's description of its weights is replaced."""
    content = b"".join(
        np.ascontiguousarray(array, np.float16).tobytes()
        for name in manifest.parts
        for array in weights[name]
    )
    (folder / WEIGHTS_FILE).write_bytes(content)
    described = FileSpec(WEIGHTS_FILE, hashlib.sha256(content).hexdigest(), len(content))
    record = _MANIFEST.dump_json(replace(manifest, weights=described), indent=2)
    (folder / ADAPTER_FILE).write_bytes(record + b"\n")


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter that `write_adapter` wrote."""
    return os.path.isfile(folder / ADAPTER_FILE)  # noqa: PTH113 (pathlib's raises for a name that is too long)


def adapter_version(folder: Path) -> str:
    """Returns the version of an adapter without a look at its content; empty if it cannot be read."""
    try:
        return _version(read_small_file(folder / ADAPTER_FILE, _MOST_BYTES))
    except (OSError, ValueError):
        return ""


def _version(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:12]


def load_adapter(folder: Path, check: Callable[[AdapterManifest], None] = lambda _: None) -> Adapter:
    """Read and check an adapter.

    Args:
        folder: Has its files.
        check: Raises AdapterError if it cannot be used, before its weights are read.

    Raises:
        AdapterError: It is not one, or a file is damaged.
    """
    try:
        raw = read_small_file(folder / ADAPTER_FILE, _MOST_BYTES)
        content = json.loads(raw)
        version = content.get("format_version") if isinstance(content, dict) else None
        if version != ADAPTER_VERSION:
            raise AdapterError(
                f"{folder} has format_version {version!r}, and this program reads {ADAPTER_VERSION}: export "
                "the adapter again"
            )
        manifest = _MANIFEST.validate_json(raw)
        expected = sum(shape.num_bytes for shape in manifest.parts.values())
        spec = manifest.weights
        if spec.file != WEIGHTS_FILE or spec.size_bytes != expected:
            raise AdapterError(
                f"{folder}: its parts have {expected} bytes, and its weights {spec.size_bytes}"
            )
        check(manifest)
        weights = read_small_file(folder / WEIGHTS_FILE, min(expected, _MOST_WEIGHT_BYTES))
    except ValidationError as error:
        raise AdapterError(f"{folder / ADAPTER_FILE}: {'; '.join(problems_of(error))}") from error
    except FileNotFoundError as error:
        if not folder.exists():
            raise AdapterError(f"{folder}: there is no such folder") from error
        kind = "an adapter of peft" if (folder / "adapter_config.json").exists() else "not an adapter"
        raise AdapterError(
            f"{folder} is {kind}, it has no {Path(error.filename).name}: write one by "
            f"`python -m export adapter {folder} BUNDLE OUT`"
        ) from error
    except OSError as error:
        raise AdapterError(f"{error.filename}: {error.strerror}") from error
    except AdapterError:
        raise
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{folder / ADAPTER_FILE}: {error}") from error
    if (found := hashlib.sha256(weights).hexdigest()) != manifest.weights.sha256:
        raise AdapterError(
            f"{folder / WEIGHTS_FILE} was changed: its sha256 is {found[:12]}…, not "
            f"{manifest.weights.sha256[:12]}…"
        )
    if not np.isfinite(np.frombuffer(weights, np.float16)).all():
        raise AdapterError(f"{folder / WEIGHTS_FILE} has numbers that are NaN or infinite")
    return Adapter(folder, manifest, _version(raw), SharedWeights(manifest.parts, weights))
