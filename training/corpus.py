"""Parallel corpora: files of pairs, the built-in one, and what is dropped from them.

A corpus is texts; how they become batches stands in `training.batches`.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import random
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bundle.tokenizer import Tokenizer
from training import grammar

_MAX_HELD_OUT_PAIRS = 1000
_HELD_OUT_SHARE = 0.05


class SentencePair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


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
class Corpus:
    """Pairs to train on and pairs held out.

    Attributes:
        description: Where it comes from, in one line.
        test: Empty where the corpus has none.
    """

    description: str
    train: tuple[SentencePair, ...]
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
    train = _read_pairs(files.source, files.target, files.tsv)
    names = [name for name in dataclasses.astuple(files) if name is not None]
    if files.dev_source is None and files.dev_tsv is None:
        train, dev = _hold_out(train, seed)
        names.append(f"{len(dev)} pairs held out")
    else:
        dev = _read_pairs(files.dev_source, files.dev_target, files.dev_tsv)
    return Corpus(", ".join(names), tuple(train), tuple(dev))


def built_in_corpus() -> Corpus:
    """The Korean-English corpus of `training.grammar`; always the same."""
    built = grammar.build_corpus(seed=0)
    train, dev, test = (
        tuple(SentencePair(pair.source, pair.target) for pair in part)
        for part in (built.train, built.dev, built.test)
    )
    return Corpus("built-in Korean-English", train, dev, test)


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text file, gzip if its name ends in .gz, without their ends.

    Only a line feed (or carriage return and line feed) ends a line: other separators of Unicode belong to
    the text. A byte order mark at the start is dropped.

    Raises:
        ValueError: The file is not gzip, or not UTF-8; the message says where.
        OSError: It is missing, a folder, or cannot be read.
    """
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error})") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [_decode_line(path, number, line) for number, line in enumerate(lines, start=1)]


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write what `read_lines` reads."""
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())


def read_parallel(source: Path, target: Path) -> list[SentencePair]:
    """Pairs from two files, line by line.

    Raises:
        ValueError: The files have different numbers of lines, or none, or are no text.
        OSError: A file cannot be read.
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"{source} has {len(sources)} lines and {target} has {len(targets)}: not a parallel corpus"
        )
    if not sources:
        raise ValueError(f"{source} and {target} have 0 lines: the corpus is empty")
    return [SentencePair(*texts) for texts in zip(sources, targets, strict=True)]


def read_tsv(path: Path) -> list[SentencePair]:
    """Pairs from one file, source and target separated by a tab.

    Raises:
        ValueError: A line has not exactly two columns, or the file has no line or is no text.
        OSError: The file cannot be read.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise ValueError(
                f"{path}, line {number}: expected 2 columns, source and target, found {len(columns)}"
            )
        pairs.append(SentencePair(*columns))
    if not pairs:
        raise ValueError(f"{path} has 0 lines: the corpus is empty")
    return pairs


@dataclass(frozen=True)
class FilterReport:
    """How many pairs came, and how many each filter dropped."""

    num_given: int
    dropped: dict[str, int]

    @property
    def num_kept(self) -> int:
        """How many pairs are left."""
        return self.num_given - sum(self.dropped.values())

    def table(self) -> str:
        """The counts, a line each."""
        rows = [("pairs given", self.num_given)]
        rows += [(f"  dropped: {reason}", count) for reason, count in self.dropped.items()]
        rows.append(("pairs kept", self.num_kept))
        return "\n".join(f"{label:<32}{count:>10,}" for label, count in rows)


@dataclass(frozen=True)
class CorpusFilters:
    """Which pairs are not trained on. A pair counts for the first filter that it fails.

    Attributes:
        max_source_length: In tokens, with eos.
        max_target_length: In tokens, with eos.
        max_length_ratio: Tokens of the longer side over the other's; None keeps all.
    """

    max_source_length: int
    max_target_length: int
    max_length_ratio: float | None = None

    def apply(
        self, pairs: Sequence[SentencePair], tokenizer: Tokenizer
    ) -> tuple[list[SentencePair], FilterReport]:
        """The pairs that pass, in their order, and what was dropped."""
        source_lengths = [len(ids) + 1 for ids in tokenizer.encode_batch([pair.source for pair in pairs])]
        target_lengths = [len(ids) + 1 for ids in tokenizer.encode_batch([pair.target for pair in pairs])]
        dropped: Counter[str] = Counter({"empty": 0, "duplicate": 0, "too long": 0, "length ratio": 0})
        kept: dict[SentencePair, None] = {}
        for pair, source_length, target_length in zip(pairs, source_lengths, target_lengths, strict=True):
            shorter, longer = sorted((source_length, target_length))
            if not pair.source.strip() or not pair.target.strip():
                dropped["empty"] += 1
            elif pair in kept:
                dropped["duplicate"] += 1
            elif source_length > self.max_source_length or target_length > self.max_target_length:
                dropped["too long"] += 1
            elif self.max_length_ratio is not None and longer > self.max_length_ratio * shorter:
                dropped["length ratio"] += 1
            else:
                kept[pair] = None
        return list(kept), FilterReport(len(pairs), dict(dropped))


def _read_pairs(source: str | None, target: str | None, tsv: str | None) -> list[SentencePair]:
    if source is not None and target is not None:
        return read_parallel(Path(source), Path(target))
    assert tsv is not None
    return read_tsv(Path(tsv))


def _hold_out(pairs: list[SentencePair], seed: int) -> tuple[list[SentencePair], list[SentencePair]]:
    """Split off dev pairs; no source or target of theirs stays in training."""
    distinct = [pair for pair in dict.fromkeys(pairs) if pair.source.strip() and pair.target.strip()]
    if not distinct:
        raise ValueError(f"all {len(pairs)} pairs have an empty side: nothing to train on")
    num_held_out = min(_MAX_HELD_OUT_PAIRS, int(len(distinct) * _HELD_OUT_SHARE))
    if num_held_out == 0:
        raise ValueError(f"{len(distinct)} distinct pairs are too few to hold any out: give dev files")
    dev = random.Random(seed).sample(distinct, num_held_out)
    sources, targets = {pair.source for pair in dev}, {pair.target for pair in dev}
    return [pair for pair in pairs if pair.source not in sources and pair.target not in targets], dev


def _decode_line(path: Path, number: int, line: bytes) -> str:
    try:
        return line.removesuffix(b"\r").decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1})"
        ) from error
