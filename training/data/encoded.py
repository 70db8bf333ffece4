"""The training corpus as token ids, written once to files; each batch reads its pairs from them.

So a corpus may be larger than memory. Writing it, and planning its batches (`training.data.batches`), each
takes about 40 bytes of memory per pair.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.data.filters import CorpusFilters, FilterReport
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.data.text_files import SentencePair, pair_hash

_CHUNK_PAIRS = 10_000  # encoded at once, by all cores
_RECORD = np.dtype([("hash", "u8"), ("start", "i8"), ("lengths", "i4", 2), ("position", "i4")])
_pack_record = struct.Struct("=Qqiii").pack
_POSITIONS_FILE = "positions.npy"  # of each source, unless they are as many as its numbers


class EncodedPair(NamedTuple):
    """A source as its kind encodes it, texts with eos, and the target's token ids without bos and eos."""

    source_ids: Sequence[int]
    target_ids: Sequence[int]

    @property
    def target_length(self) -> int:
        """Decoder positions: the decoder reads bos and the text, and predicts the text and eos."""
        return len(self.target_ids) + 1


def encode_pairs(
    pairs: Sequence[SentencePair], tokenizer: Tokenizer, kind: SourceKind = TOKENS
) -> list[EncodedPair]:
    """Encode the sources and targets of pairs."""
    sources = kind.encode([pair.source for pair in pairs], tokenizer)
    targets = tokenizer.encode_batch([pair.target for pair in pairs])
    return [EncodedPair(*ids) for ids in zip(sources, targets, strict=True)]


class EncodedCorpus(Sequence[EncodedPair]):
    """The pairs that `write_encoded` wrote to a folder; raises ValueError if a file is cut off."""

    def __init__(self, folder: Path) -> None:
        self._starts: NDArray[np.int64] = np.load(folder / "starts.npy", mmap_mode="r")
        self._lengths: NDArray[np.int32] = np.load(folder / "lengths.npy", mmap_mode="r")  # (pairs, 2)
        positions = folder / _POSITIONS_FILE
        self._positions: NDArray[np.int32] | None = (
            np.load(positions, mmap_mode="r") if positions.is_file() else None
        )
        (ids_file,) = folder.glob("ids.*")
        dtype = np.dtype(ids_file.suffix[1:])
        num_ids = ids_file.stat().st_size // dtype.itemsize
        self._ids = np.memmap(ids_file, dtype, mode="r") if num_ids else np.zeros(0, dtype)
        if len(self._starts) and self._starts[-1] + self._lengths[-1].sum() > num_ids:
            raise ValueError(f"{folder}: damaged; remove it, and give the corpus again")

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, row: int) -> EncodedPair: ...
    @overload
    def __getitem__(self, row: slice) -> list[EncodedPair]: ...
    def __getitem__(self, row: int | slice) -> EncodedPair | list[EncodedPair]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        start, (source_length, target_length) = self._starts[row], self._lengths[row]
        ids = self._ids[start : start + source_length + target_length].tolist()
        return EncodedPair(ids[:source_length], ids[source_length:])

    def lengths(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The source lengths of some pairs, for texts with eos, and their target lengths, with bos or eos."""
        positions = self._lengths[rows, 0] if self._positions is None else self._positions[rows]
        return positions, self._lengths[rows, 1] + 1

    @property
    def source_lengths(self) -> NDArray[np.int32]:
        """The source length of each pair, for texts with eos."""
        return self._lengths[:, 0] if self._positions is None else self._positions

    @property
    def target_lengths(self) -> NDArray[np.int32]:
        """The target length of each pair, with bos or eos."""
        return self._lengths[:, 1] + 1

    def texts(self, tokenizer: Tokenizer) -> Iterator[SentencePair]:
        """The normalised texts of the pairs; byte-pair encoding loses nothing of them."""
        for start in range(0, len(self), _CHUNK_PAIRS):
            pairs = self[start : start + _CHUNK_PAIRS]
            sources = tokenizer.decode_batch([pair.source_ids for pair in pairs])
            targets = tokenizer.decode_batch([pair.target_ids for pair in pairs])
            yield from map(SentencePair, sources, targets)


def write_encoded(
    folder: Path,
    pairs: Iterable[SentencePair],
    tokenizer: Tokenizer,
    filters: CorpusFilters,
    kind: SourceKind = TOKENS,
) -> FilterReport:
    """Encode the pairs that pass the filters, equal pairs once; return the report of dropped pairs.

    The pairs are read once. The folder appears when everything is written.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    report = FilterReport()
    num_pairs = num_ids = 0
    records_file = temporary / "records"
    with (temporary / f"ids.{dtype.name}").open("wb") as ids_stream, records_file.open("wb") as stream:
        for pair, (source_ids, target_ids), length in _encode_passing(
            pairs, tokenizer, filters, kind, report
        ):
            lengths = len(source_ids), len(target_ids)
            stream.write(_pack_record(pair_hash(pair), num_ids, *lengths, length))
            ids_stream.write(np.array([*source_ids, *target_ids], dtype).tobytes())
            num_pairs += 1
            num_ids += sum(lengths)
    records = np.memmap(records_file, _RECORD, mode="r") if num_pairs else np.zeros(0, _RECORD)
    is_kept = are_first(records["hash"])
    report.drop("duplicate", num_pairs - int(np.count_nonzero(is_kept)))
    np.save(temporary / "starts.npy", records["start"][is_kept])
    np.save(temporary / "lengths.npy", records["lengths"][is_kept])
    if kind is not TOKENS:
        np.save(temporary / _POSITIONS_FILE, records["position"][is_kept])
    records_file.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return report


def are_first(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each hash is the first of its value."""
    are = np.zeros(len(hashes), np.bool_)
    are[np.unique(hashes, return_index=True)[1]] = True
    return are


def passing_pairs(
    pairs: Iterable[SentencePair], tokenizer: Tokenizer, filters: CorpusFilters, kind: SourceKind = TOKENS
) -> tuple[list[SentencePair], FilterReport]:
    """The pairs that pass the filters, normalised, each once and in order; and the report of dropped pairs.

    A model writes only normalised text, so its references are normalised, too: with other code points, an
    equal reference would count as a different text.
    """
    report = FilterReport()
    passed = [pair for pair, _, _ in _encode_passing(pairs, tokenizer, filters, kind, report)]
    kept = list(dict.fromkeys(passed))
    report.drop("duplicate", len(passed) - len(kept))
    return kept, report


def _encode_passing(
    pairs: Iterable[SentencePair],
    tokenizer: Tokenizer,
    filters: CorpusFilters,
    kind: SourceKind,
    report: FilterReport,
) -> Iterator[tuple[SentencePair, EncodedPair, int]]:
    """The pairs that pass, encoded, and the lengths of their sources."""
    remaining = iter(pairs)
    while chunk := list(islice(remaining, _CHUNK_PAIRS)):
        report.num_given += len(chunk)
        readable = []
        for given in chunk:
            source = tokenizer.normalize(given.source) if kind.is_text else given.source
            pair = SentencePair(source, tokenizer.normalize(given.target))
            if reason := filters.text_reason(given) or filters.text_reason(pair):
                report.drop(reason)
            else:
                readable.append(pair)
        for pair, encoded in zip(readable, encode_pairs(readable, tokenizer, kind), strict=True):
            length = kind.length(encoded.source_ids)
            reason = kind.drop_reason(encoded.source_ids)
            if reason := reason or filters.length_reason(length, encoded.target_length):
                report.drop(reason)
            else:
                yield pair, encoded, length
