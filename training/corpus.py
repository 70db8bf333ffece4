"""Parallel corpora: pairs in files, the built-in ones, and which of them are held out.

A corpus is texts; which pairs are dropped stands in `training.filters`, how files are read in
`training.text_files`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from training import grammar
from training.text_files import SentencePair, iterate_parallel, iterate_tsv, pair_hash

_MAX_HELD_OUT_PAIRS = 1000
_HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class CorpusFiles:
    """Where a corpus lies; with nothing given it is the built-in one.

    Attributes:
        source: Source sentences, one a line. A name that ends in .gz is gzip, here and below.
        target: Their translations, line by line.
        tsv: Instead of the two: source, a tab, target on each line.
        dev_source: Held-out source sentences; without any, some training pairs are held out.
        dev_target: Their translations.
        dev_tsv: Instead of the two.
    """

    source: str | None = None
    target: str | None = None
    tsv: str | None = None
    dev_source: str | None = None
    dev_target: str | None = None
    dev_tsv: str | None = None

    def __post_init__(self) -> None:
        for prefix in ("", "dev_"):
            source, target, tsv = (getattr(self, prefix + name) for name in ("source", "target", "tsv"))
            if (source is None) != (target is None):
                raise ValueError(f"{prefix}source and {prefix}target are given together, or neither")
            if tsv is not None and source is not None:
                raise ValueError(f"{prefix}tsv is given instead of {prefix}source and {prefix}target")
        if self.is_built_in and any(dataclasses.astuple(self)):
            raise ValueError("dev files are given without a training corpus")

    @property
    def is_built_in(self) -> bool:
        """Whether the built-in corpus is meant."""
        return self.source is None and self.tsv is None


@dataclass(frozen=True)
class PairFiles(Collection[SentencePair]):
    """The pairs of files too large for memory: read anew by each pass over them.

    Attributes:
        source: See `CorpusFiles`.
        target: See `CorpusFiles`.
        tsv: See `CorpusFiles`.
        num_pairs: How many there are.
        left_out: Pairs whose source or target is that of one of these are passed over.
    """

    source: str | None
    target: str | None
    tsv: str | None
    num_pairs: int
    left_out: tuple[SentencePair, ...] = ()

    def __len__(self) -> int:
        return self.num_pairs

    def __iter__(self) -> Iterator[SentencePair]:
        num_pairs = 0
        for pair in _without(_iterate_pairs(self.source, self.target, self.tsv), self.left_out):
            num_pairs += 1
            yield pair
        if num_pairs != self.num_pairs:
            raise ValueError(
                f"{self.tsv or self.source} changed while it was read: "
                f"{num_pairs} pairs, before {self.num_pairs}"
            )

    def __contains__(self, pair: object) -> bool:
        return any(pair == each for each in self)


@dataclass(frozen=True)
class Corpus:
    """Pairs to train on and pairs held out.

    Attributes:
        description: Where it comes from, in one line: its files, without their folders. Bundles have it, too.
        train: Possibly more than memory holds.
        test: Empty where the corpus has none.
    """

    description: str
    train: Collection[SentencePair]
    dev: tuple[SentencePair, ...]
    test: tuple[SentencePair, ...] = ()

    def sha256(self) -> str:
        """A hash of every pair, that says whether two corpora are the same."""
        digest = hashlib.sha256()
        for part in (self.train, self.dev, self.test):
            digest.update(f"{len(part)}\n".encode())
            for pair in part:
                digest.update(f"{pair.source}\t{pair.target}\n".encode())
        return digest.hexdigest()


def load_corpus(files: CorpusFiles, seed: int) -> Corpus:
    """Read a corpus, or build the built-in one.

    Args:
        files: Where it lies.
        seed: Chooses the held-out pairs where no dev files are given.

    Raises:
        ValueError: A file is empty, not UTF-8, or does not fit its other half.
        OSError: A file cannot be read.
    """
    if files.is_built_in:
        return built_in_corpus()
    train = _train_pairs(files)
    names = [Path(name).name for name in dataclasses.astuple(files) if name is not None]
    if files.dev_source is None and files.dev_tsv is None:
        num_given = len(train)
        train, dev = _hold_out(train, seed)
        names.append(f"{len(dev)} pairs held out")
        if num_sharing := num_given - len(train) - len(dev):
            names.append(f"{num_sharing} left out that share a sentence with them")
    else:
        dev = tuple(_iterate_pairs(files.dev_source, files.dev_target, files.dev_tsv))
    return Corpus(", ".join(names), train, dev)


def built_in_corpus() -> Corpus:
    """The Korean-English corpus of `training.grammar`; always the same."""
    built = grammar.build_corpus(seed=0)
    train, dev, test = (
        tuple(SentencePair(pair.source, pair.target) for pair in part)
        for part in (built.train, built.dev, built.test)
    )
    return Corpus("built-in Korean-English", train, dev, test)


def _iterate_pairs(source: str | None, target: str | None, tsv: str | None) -> Iterator[SentencePair]:
    if source is not None and target is not None:
        return iterate_parallel(Path(source), Path(target))
    assert tsv is not None
    return iterate_tsv(Path(tsv))


def _train_pairs(files: CorpusFiles) -> Collection[SentencePair]:
    """What can be read again stays in its files; a pipe cannot."""
    pairs = _iterate_pairs(files.source, files.target, files.tsv)
    names = [name for name in (files.source, files.target, files.tsv) if name is not None]
    if not all(Path(name).is_file() for name in names):
        return tuple(pairs)
    return PairFiles(files.source, files.target, files.tsv, num_pairs=sum(1 for _ in pairs))


def _hold_out(
    pairs: Collection[SentencePair], seed: int
) -> tuple[Collection[SentencePair], tuple[SentencePair, ...]]:
    """Split off dev pairs; no source or target of theirs stays in training."""
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


def _distinct_rows(pairs: Iterable[SentencePair]) -> NDArray[np.int64]:
    """The rows of the pairs with two texts that do not stand further up, by hashes of 8 bytes a pair."""
    hashes, rows = array("Q"), array("q")
    for row, pair in enumerate(pairs):
        if pair.source.strip() and pair.target.strip():
            hashes.append(pair_hash(pair))
            rows.append(row)
    _, first = np.unique(np.array(hashes), return_index=True)
    return np.array(rows)[np.sort(first)]


def _without(pairs: Iterable[SentencePair], left_out: tuple[SentencePair, ...]) -> Iterator[SentencePair]:
    sources, targets = {pair.source for pair in left_out}, {pair.target for pair in left_out}
    return (pair for pair in pairs if pair.source not in sources and pair.target not in targets)
