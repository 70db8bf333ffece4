"""Parallel corpora as texts: pairs from files or the built-in ones, and the choice of held-out pairs.

Filters are in `training.data.filters`, the reading of files in `training.data.text_files`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import unicodedata
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.training.data.built_in import built_in_parts
from seq2seq_serve.training.data.encoded import are_first
from seq2seq_serve.training.data.records import Records, data_files
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.data.text_files import SentencePair, iterate_parallel, iterate_tsv, pair_hash

_MAX_HELD_OUT_PAIRS = 1000
_HELD_OUT_SHARE = 0.05
_NAMES = "source", "target", "tsv", "data"  # of a part's files


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus; without any, it is the built-in corpus.

    `source` has a sentence per line and `target` their translations; instead of both, `tsv` has source, a tab
    and target on each line, or `data` records with named fields (`training.data.records`). A file whose name
    ends in .gz is gzip. The dev files are the same for the held-out pairs; without them, some training pairs
    are held out.

    Attributes:
        source_field: The field of the source in records.
        target_field: The field of the target.
    """

    source: str | None = None
    target: str | None = None
    tsv: str | None = None
    data: str | None = None
    dev_source: str | None = None
    dev_target: str | None = None
    dev_tsv: str | None = None
    dev_data: str | None = None
    source_field: str = "source"
    target_field: str = "target"

    def __post_init__(self) -> None:
        for prefix in ("", "dev_"):
            source, target, tsv, data = (getattr(self, prefix + name) for name in _NAMES)
            if (source is None) != (target is None):
                raise ValueError(f"give both {prefix}source and {prefix}target, or neither")
            if sum(name is not None for name in (source, tsv, data)) > 1:
                raise ValueError(
                    f"give one of {prefix}source with {prefix}target, {prefix}tsv and {prefix}data"
                )
        if self.is_built_in and self.names:
            raise ValueError("dev files need a training corpus: give source and target, tsv or data")
        has_fields = (self.source_field, self.target_field) != (
            type(self).source_field,
            type(self).target_field,
        )
        if has_fields and self.data is None and self.dev_data is None:
            raise ValueError("source_field and target_field are of records: they go with data")

    @property
    def is_built_in(self) -> bool:
        return self.source is None and self.tsv is None and self.data is None

    @property
    def names(self) -> list[str]:
        """The names of all files."""
        given = (getattr(self, prefix + name) for prefix in ("", "dev_") for name in _NAMES)
        return [name for name in given if name is not None]

    def paths(self, prefix: str = "") -> list[Path]:
        """The files of the training pairs, or with the prefix "dev_" of the held-out ones, one by one.

        Raises:
            ValueError: A folder has no records.
            OSError: It cannot be read.
        """
        *names, data = (getattr(self, prefix + name) for name in _NAMES)
        return [Path(name) for name in names if name is not None] + (data_files(data) if data else [])

    def pairs(self, prefix: str = "", media: Path | None = None) -> Iterator[SentencePair]:
        """The training pairs, or with the prefix "dev_" the held-out ones; `media` is that of `Records`.

        Raises:
            ValueError: A file is damaged, or is not a corpus.
            OSError: A file cannot be read.
        """
        source, target, tsv, data = (getattr(self, prefix + name) for name in _NAMES)
        if data is not None:
            return self._records(data, media).pairs()
        return iterate_tsv(Path(tsv)) if tsv is not None else iterate_parallel(Path(source), Path(target))

    def folder(self, prefix: str, media: Path) -> Path:
        """The folder from which the sources' names start; `media` is for sources that lie in records."""
        source, _, tsv, data = (getattr(self, prefix + name) for name in _NAMES)
        if data is None:
            return Path(source or tsv).parent.resolve()
        records = self._records(data, media)
        return (media.parent if records.has_media else records.folder).resolve()

    def _records(self, data: str, media: Path | None) -> Records:
        return Records(data, self.source_field, self.target_field, media)


@dataclass(frozen=True)
class PairFiles(Collection[SentencePair]):
    """The training pairs of files that may be larger than memory: every pass reads the files again.

    Pairs that share their source or target with one of `left_out` are skipped.
    """

    files: CorpusFiles
    num_pairs: int
    left_out: tuple[SentencePair, ...] = ()

    def __len__(self) -> int:
        return self.num_pairs

    def __iter__(self) -> Iterator[SentencePair]:
        num_pairs = 0
        for pair in _without(self.files.pairs(), self.left_out):
            num_pairs += 1
            yield pair
        if num_pairs != self.num_pairs:
            raise ValueError(
                f"{self.files.names[0]} changed while it was read: {num_pairs} pairs, before {self.num_pairs}"
            )

    def __contains__(self, pair: object) -> bool:
        return any(pair == each for each in self)


@dataclass(frozen=True)
class Corpus:
    """Training pairs, possibly more than memory holds, and held-out pairs.

    `description` is one line about the origin: the names of its files without their folders. It becomes part
    of bundles. If sources are names of files, relative ones start from `folder`.
    """

    description: str
    train: Collection[SentencePair]
    dev: tuple[SentencePair, ...]
    test: tuple[SentencePair, ...] = ()
    folder: Path = Path()

    def sha256(self) -> str:
        """A hash over every pair, which is equal for equal corpora."""
        digest = hashlib.sha256()
        for part in (self.train, self.dev, self.test):
            digest.update(f"{len(part)}\n".encode())
            for pair in part:
                digest.update(f"{pair.source}\t{pair.target}\n".encode())
        return digest.hexdigest()


def load_corpus(
    files: CorpusFiles, seed: int, kind: SourceKind = TOKENS, pictures: Path = Path("pictures")
) -> Corpus:
    """Read a corpus, or build the built-in one; without dev files, the seed chooses the held-out pairs.

    In a text file that names files of pictures, clips or features, relative names start from the text file's
    folder; in the corpus, they start from the folder of the training file. The folder `pictures` gets the
    files of a built-in corpus, and of sources that lie in records.

    Raises:
        ValueError: A file is empty or not UTF-8, or source and target have different numbers of lines.
        OSError: A file cannot be read.
    """
    if files.is_built_in:
        return built_in_corpus(kind, pictures)
    names = [Path(name).name for name in files.names]
    has_dev = bool(files.paths("dev_"))
    if kind is not TOKENS:
        media, dev_media = (None if kind.is_text else pictures / part for part in ("train", "dev"))
        folder = files.folder("", pictures / "train")
        pairs = tuple(files.pairs("", media))
        if not has_dev:
            pairs, dev = _hold_out_sources(pairs, seed)
            return Corpus(", ".join([*names, f"{len(dev)} pairs held out"]), pairs, dev, folder=folder)
        dev = tuple(files.pairs("dev_", dev_media))
        dev_folder = files.folder("dev_", pictures / "dev")
        if not kind.is_text and dev_folder != folder:
            steps = Path(os.path.relpath(dev_folder, folder))
            dev = tuple(SentencePair(str(steps / pair.source), pair.target) for pair in dev)
        return Corpus(", ".join(names), pairs, dev, folder=folder)
    train = _train_pairs(files)
    if not has_dev:
        num_given = len(train)
        train, dev = _hold_out(train, seed)
        names.append(f"{len(dev)} pairs held out")
        if num_sharing := num_given - len(train) - len(dev):
            names.append(f"{num_sharing} left out that share a sentence with them")
    else:
        dev = tuple(files.pairs("dev_"))
    return Corpus(", ".join(names), train, dev)


def built_in_corpus(kind: SourceKind = TOKENS, pictures: Path = Path("pictures")) -> Corpus:
    """The built-in corpus of a kind of sources, which is always the same; `pictures` gets its files."""
    name, parts = built_in_parts(kind, pictures)
    return Corpus(name, parts["train"], parts["dev"], parts["test"], pictures)


def _train_pairs(files: CorpusFiles) -> Collection[SentencePair]:
    """The training pairs: in memory if they come from a pipe, which cannot be read again."""
    if not all(path.is_file() for path in files.paths()):
        return tuple(files.pairs())
    return PairFiles(files, num_pairs=sum(1 for _ in files.pairs()))


def _hold_out(
    pairs: Collection[SentencePair], seed: int
) -> tuple[Collection[SentencePair], tuple[SentencePair, ...]]:
    """Split off dev pairs; training keeps no pair that shares its source or target with one of them."""
    first_rows = _distinct_rows(pairs)
    if not len(first_rows):
        raise ValueError(f"all {len(pairs)} pairs have an empty side: nothing to train on")
    num_held_out = min(_MAX_HELD_OUT_PAIRS, int(len(first_rows) * _HELD_OUT_SHARE))
    if num_held_out == 0:
        raise ValueError(f"{len(first_rows)} distinct pairs are too few to hold any out: give dev files")
    rows = [int(first_rows[i]) for i in random.Random(seed).sample(range(len(first_rows)), num_held_out)]
    wanted = set(rows)
    found = {row: pair for row, pair in enumerate(pairs) if row in wanted}
    dev = tuple(found[row] for row in rows)
    if isinstance(pairs, PairFiles):
        num_left = sum(1 for _ in _without(pairs, dev))
        return dataclasses.replace(pairs, num_pairs=num_left, left_out=dev), dev
    return tuple(_without(pairs, dev)), dev


def _hold_out_sources(
    pairs: Sequence[SentencePair], seed: int
) -> tuple[tuple[SentencePair, ...], tuple[SentencePair, ...]]:
    """Split off the pairs of some sources, and return the other pairs and these."""
    sources = list(dict.fromkeys(pair.source for pair in pairs))
    num_held_out = min(_MAX_HELD_OUT_PAIRS, int(len(sources) * _HELD_OUT_SHARE))
    if num_held_out == 0:
        raise ValueError(f"{len(sources)} distinct sources are too few to hold any out: give dev files")
    held_out = set(random.Random(seed).sample(sources, num_held_out))
    train, dev = (
        tuple(pair for pair in pairs if (pair.source in held_out) == is_dev) for is_dev in (False, True)
    )
    return train, dev


def _distinct_rows(pairs: Iterable[SentencePair]) -> NDArray[np.int64]:
    """The row of the first of each set of equal pairs, without pairs that have an empty side."""
    hashes, rows = array("Q"), array("q")
    for row, pair in enumerate(pairs):
        if pair.source.strip() and pair.target.strip():
            hashes.append(pair_hash(pair))
            rows.append(row)
    return np.frombuffer(rows, np.int64)[are_first(np.frombuffer(hashes, np.uint64))]


def _without(pairs: Iterable[SentencePair], left_out: tuple[SentencePair, ...]) -> Iterator[SentencePair]:
    sources = {as_read(pair.source) for pair in left_out}
    targets = {as_read(pair.target) for pair in left_out}
    return (
        pair for pair in pairs if as_read(pair.source) not in sources and as_read(pair.target) not in targets
    )


def as_read(text: str) -> str:
    """Returns a text without what a tokenizer may not see: the form of Unicode, and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).split())
