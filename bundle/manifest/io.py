"""Reads, checks and writes the files of a bundle."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import TypeAdapter, ValidationError

from seq2seq_serve.bundle.checked import problems_of
from seq2seq_serve.bundle.files import new_memory, read_small_file
from seq2seq_serve.bundle.manifest.check import contradictions
from seq2seq_serve.bundle.manifest.schema import FileSpec, Manifest
from seq2seq_serve.bundle.names import (
    CHECKSUM_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    OLDER_VERSIONS,
    Precision,
    Verb,
)
from seq2seq_serve.bundle.tokenizer import Tokenizer

# Larger files are refused before they are parsed, which takes many times as much memory.
MAX_MANIFEST_BYTES = 4 << 20  # the manifest of a Transformer-base in two precisions has 80 KB
MAX_TOKENIZER_BYTES = 64 << 20  # tokenizers of 250,000 tokens have 20 MB

_READ_BYTES = 16 << 20  # at once, of a file that is checked while it is read
_VERSION_DIGITS = 12
_MANIFEST = TypeAdapter(Manifest)


class BundleError(ValueError):
    """A folder is not a usable bundle.

    Args:
        path: The folder.
        problems: One message per problem.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        listing = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"{path} is not a usable bundle: {listing}")
        self.path = path
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, list(self.problems))


@dataclass(frozen=True)
class VariantFiles:
    """The content of one variant's files in memory; the weights begin at a page boundary."""

    graphs: dict[Verb, bytes]
    weights: memoryview


class Extent(NamedTuple):
    """The next bytes of a file, and their place in memory."""

    num_bytes: int
    place: int


class WeightsLayout(Protocol):
    """Where the weights of a variant lie in memory.

    Attributes:
        num_bytes: The size of the memory.
        extents: All of the file, in order.
    """

    num_bytes: int
    extents: Sequence[Extent]

    def finish(self, content: memoryview, wait: Callable[[int], None]) -> VariantFiles:
        """Returns the files to use.

        Args:
            content: The memory, into which the file is being read.
            wait: Waits until that many bytes of the file are there and checked, or reading fails: then what
                is returned is dropped.
        """


class _AsItIs(WeightsLayout):
    def __init__(self, graphs: Mapping[Verb, bytes], num_bytes: int) -> None:
        self._graphs = dict(graphs)
        self.num_bytes, self.extents = num_bytes, [Extent(num_bytes, 0)]

    def finish(self, content: memoryview, wait: Callable[[int], None]) -> VariantFiles:  # noqa: ARG002
        return VariantFiles(self._graphs, content)


@dataclass(frozen=True)
class Bundle:
    """A bundle that `load_bundle` has checked.

    Attributes:
        version: The first characters of the manifest's sha256, so that other weights have another version.
    """

    path: Path
    manifest: Manifest
    version: str
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer

    def read_variant(
        self,
        precision: Precision,
        layout: Callable[[Mapping[Verb, bytes], int], WeightsLayout] = _AsItIs,
        memory: int | None = None,
    ) -> VariantFiles:
        """Read the files of a precision, each once.

        Args:
            precision: One of the manifest's.
            layout: Returns where the weights lie in memory, given the graphs and the size of the weights.
            memory: The descriptor of a file in memory to read them into, as for `new_memory`.

        Raises:
            BundleError: A file is not that of the manifest.
        """
        variant = self.manifest.variants[precision]
        graphs = {verb: bytes(_read(self.path, graph.file)) for verb, graph in variant.graphs.items()}
        return _read_as(layout(graphs, variant.weights.size_bytes), self.path, variant.weights, memory)


def file_spec(folder: Path, file: str) -> FileSpec:
    """Describe a file in a bundle's folder."""
    path = folder / file
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return FileSpec(file, digest, path.stat().st_size)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, last of all files, and its checksum in the format of `sha256sum`."""
    raw = _MANIFEST.dump_json(manifest, indent=2, by_alias=True) + b"\n"
    (folder / MANIFEST_FILE).write_bytes(raw)
    (folder / CHECKSUM_FILE).write_text(f"{hashlib.sha256(raw).hexdigest()}  {MANIFEST_FILE}\n")


def bundle_version(path: Path) -> str:
    """The version of the bundle in a folder, without a check of its files; empty without a bundle."""
    try:
        raw = _read_manifest(path)
    except (OSError, BundleError):
        return ""
    return hashlib.sha256(raw).hexdigest()[:_VERSION_DIGITS]


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a `config.json` of Hugging Face, which names the type of a model."""
    try:
        content = json.loads(read_small_file(path / "config.json", MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "model_type" in content


def load_bundle(path: Path, *, checks_content: bool = True) -> Bundle:
    """Read a bundle and check all of its files.

    Args:
        path: Its folder.
        checks_content: Whether graphs and weights are read, to compare their checksums. Otherwise only their
            sizes are checked: `Bundle.read_variant` compares the checksums of those that it reads.

    Raises:
        BundleError: Something is missing, changed or contradictory; one message reports all problems.
    """
    if not path.is_dir():
        raise BundleError(path, ["it is a file" if path.exists() else "there is no such folder"])
    if not (path / MANIFEST_FILE).is_file():
        command = "python -m export huggingface" if is_checkpoint(path) else "python -m export"
        has_bundles = any(path.glob(f"*/{MANIFEST_FILE}"))
        advice = "name one of the bundles in it" if has_bundles else f"make one with `{command}`"
        raise BundleError(path, [f"there is no {MANIFEST_FILE} ({advice})"])
    raw = _read_manifest(path)
    manifest = _parse(path, raw)
    digest = hashlib.sha256(raw).hexdigest()
    problems = _checksum_problems(path, digest) + contradictions(manifest)
    problems_of = _file_problems if checks_content else _place_problems
    for spec in _graph_files(manifest):
        problems += problems_of(path, spec)
    tokenizers: dict[FileSpec, Tokenizer] = {}
    users = (
        (manifest.source_tokenizer, manifest.source_vocab_size),
        (manifest.target_tokenizer, manifest.target_vocab_size),
    )
    for spec, vocab_size in users:
        try:
            tokenizer = tokenizers[spec] = tokenizers.get(spec) or _read_tokenizer(path, spec)
        except BundleError as error:
            problems += error.problems
            continue
        if vocab_size and tokenizer.max_text_id >= vocab_size:
            problems.append(
                f"{spec.file} has tokens up to the id {tokenizer.max_text_id}, beyond the model's vocabulary "
                f"of {vocab_size}"
            )
    if problems:
        raise BundleError(path, list(dict.fromkeys(problems)))
    source_tokenizer = tokenizers[manifest.source_tokenizer]
    target_tokenizer = tokenizers[manifest.target_tokenizer]
    return Bundle(path, manifest, digest[:_VERSION_DIGITS], source_tokenizer, target_tokenizer)


def _read_manifest(folder: Path) -> bytes:
    try:
        return read_small_file(folder / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise BundleError(folder, [str(error)]) from error


def _read_tokenizer(folder: Path, spec: FileSpec) -> Tokenizer:
    if spec.size_bytes > MAX_TOKENIZER_BYTES:
        problem = f"{spec.file} has {spec.size_bytes} bytes, and {MAX_TOKENIZER_BYTES} is the limit"
        raise BundleError(folder, [problem])
    content = bytes(_read(folder, spec))
    try:
        return Tokenizer.from_bytes(content, spec.file)
    except ValueError as error:
        raise BundleError(folder, [str(error)]) from error


def _read(folder: Path, spec: FileSpec) -> memoryview:
    """Read a file, and check the checksum of the bytes that are returned."""
    return _read_as(_AsItIs({}, spec.size_bytes), folder, spec).weights


def _read_as(layout: WeightsLayout, folder: Path, spec: FileSpec, memory: int | None = None) -> VariantFiles:
    """Read a file as a layout tells, which uses it while it is read and its checksum is compared.

    Raises:
        BundleError: The file is not that of the manifest.
    """
    if problems := _place_problems(folder, spec):
        raise BundleError(folder, problems)
    content, sha256, num_checked = new_memory(layout.num_bytes, memory), hashlib.sha256(), 0
    news = threading.Condition()

    def check(part: memoryview) -> None:
        nonlocal num_checked
        sha256.update(part)
        with news:  # not when it is read: the layout may write there from now on
            num_checked += len(part)
            news.notify_all()

    def read() -> None:
        with (folder / spec.file).open("rb") as stream, ThreadPoolExecutor(1) as checking:
            for num_bytes, place in layout.extents:
                for first in range(place, place + num_bytes, _READ_BYTES):
                    part = content[first : min(first + _READ_BYTES, place + num_bytes)]
                    count = stream.readinto(part)
                    checking.submit(check, part[:count])  # while the next ones are read

    def end_waiting(_: Future[None]) -> None:
        with news:
            news.notify_all()

    def wait(num_bytes: int) -> None:
        with news:
            news.wait_for(lambda: num_checked >= num_bytes or reading.done())

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        reading.add_done_callback(end_waiting)
        files = layout.finish(content, wait)
    reading.result()
    digest = sha256.hexdigest()
    if digest != spec.sha256:
        raise BundleError(folder, [_changed(spec.file, digest, spec.sha256)])
    return files


def _parse(path: Path, raw: bytes) -> Manifest:
    try:
        content: Any = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BundleError(path, [f"{MANIFEST_FILE} is not JSON: {error}"]) from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if version not in (*OLDER_VERSIONS, FORMAT_VERSION):
        raise BundleError(
            path,
            [
                f"format_version is {version!r}, and this program reads format_version {FORMAT_VERSION}: "
                "export the run again with this version of `python -m export`"
            ],
        )
    try:
        return _MANIFEST.validate_json(raw)
    except ValidationError as error:
        raise BundleError(path, [f"{MANIFEST_FILE}: {each}" for each in problems_of(error)]) from error


def _checksum_problems(folder: Path, digest: str) -> list[str]:
    path = folder / CHECKSUM_FILE
    if not path.is_file():
        return [f"{CHECKSUM_FILE} is missing"]
    with path.open(encoding="ascii", errors="replace") as stream:
        expected = stream.read(len(digest))
    return [] if digest == expected else [_changed(MANIFEST_FILE, digest, expected)]


def _changed(file: str, found: str, expected: str) -> str:
    return f"{file} was changed: its sha256 is {found[:12]}…, not {expected[:12]}…"


def _graph_files(manifest: Manifest) -> list[FileSpec]:
    files = []
    for variant in manifest.variants.values():
        files.append(variant.weights)
        files += [graph.file for graph in variant.graphs.values()]
    return list(dict.fromkeys(files))


def _place_problems(folder: Path, spec: FileSpec) -> list[str]:
    """The problems of a file that can be found without reading it."""
    path = folder / spec.file
    if not path.resolve().is_relative_to(folder.resolve()):
        return [f"{spec.file} lies outside the bundle"]
    if not path.is_file():
        return [f"{spec.file} is missing"]
    size_bytes = path.stat().st_size
    if size_bytes != spec.size_bytes:
        return [f"{spec.file} has {size_bytes} bytes, and the manifest says {spec.size_bytes}"]
    return []


def _file_problems(folder: Path, spec: FileSpec) -> list[str]:
    if problems := _place_problems(folder, spec):
        return problems
    found = file_spec(folder, spec.file)
    return [] if found.sha256 == spec.sha256 else [_changed(spec.file, found.sha256, spec.sha256)]
