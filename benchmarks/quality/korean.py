"""Splits three small Korean-English corpora: `python -m benchmarks.quality.korean DATA FOLDER`.

DATA has `ko_en_kosp2e` and `tatoeba`; FOLDER gets `train.tsv`, `dev.tsv`, and the files `.ko` and `.en` of
three test sets. No sentence is in two parts. StyleKQC has its own splits, and KSS has a dev set; the rest is
split by a hash of the English sentence. A pair is removed from train and dev if one of its sentences is in a
test set or in `everyday.ko.txt`, and from train if one is in dev. `korean.sh` calls this.
"""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from seq2seq_serve.training.data.text_files import SentencePair, read_lines, write_lines

EVERYDAY = Path(__file__).with_name("everyday.ko.txt")
# Shares of the English sentences that become test and dev sets, for corpora without their own.
_KSS_TEST, _TATOEBA_TEST, _TATOEBA_DEV = 0.04, 0.08, 0.04
_KSS, _STYLE, _TATOEBA = "KSS", "StyleKQC", "Tatoeba"


def split(data: Path, folder: Path) -> None:
    """Write the parts of the corpora.

    Raises:
        ValueError: A line does not have 3 columns.
        OSError: A file cannot be read or written.
    """
    parts = _parts(data)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "dev"):
        pairs = [pair for corpus in parts[name].values() for pair in corpus]
        write_lines(folder / f"{name}.tsv", [f"{pair.source}\t{pair.target}" for pair in pairs])
    for name, pairs in parts["test"].items():
        write_lines(folder / f"{name}.ko", [pair.source for pair in pairs])
        write_lines(folder / f"{name}.en", [pair.target for pair in pairs])


def _parts(data: Path) -> dict[str, dict[str, list[SentencePair]]]:
    """Returns the pairs by part, then by corpus."""
    kosp2e, tatoeba = data / "ko_en_kosp2e", data / "tatoeba" / "kor-eng.2023-02-20.txt.gz"
    given: dict[str, dict[str, list[SentencePair]]] = {
        "test": {_KSS: [], _STYLE: list(_columns(kosp2e / "stylekqc.test.tsv", 1, 2)), _TATOEBA: []},
        "dev": {
            _KSS: list(_columns(kosp2e / "kss.dev.tsv", 1, 2)),
            _STYLE: list(_columns(kosp2e / "stylekqc.dev.tsv", 1, 2)),
            _TATOEBA: [],
        },
        "train": {_KSS: [], _STYLE: list(_columns(kosp2e / "stylekqc.train.tsv.gz", 1, 2)), _TATOEBA: []},
    }
    for pair in _columns(kosp2e / "kss.train.tsv.gz", 1, 2):
        given["test" if _place(pair.target) < _KSS_TEST else "train"][_KSS].append(pair)
    for pair in _columns(tatoeba, 1, 0):
        place = _place(pair.target)
        is_dev = place < _TATOEBA_TEST + _TATOEBA_DEV
        part = "test" if place < _TATOEBA_TEST else "dev" if is_dev else "train"
        given[part][_TATOEBA].append(pair)
    taken: set[str] = set()
    everyday = {_key(sentence) for sentence in read_lines(EVERYDAY)}
    kept = {}
    for part, corpora in given.items():  # test comes first, so it keeps all its pairs
        kept[part] = {
            name: [pair for pair in pairs if not taken & _keys(pair)] for name, pairs in corpora.items()
        }
        taken |= {key for pairs in kept[part].values() for pair in pairs for key in _keys(pair)}
        taken |= everyday
    return kept


def _columns(path: Path, source: int, target: int) -> Iterator[SentencePair]:
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) != 3:
            raise ValueError(f"{path}, line {number}: expected 3 columns, found {len(columns)}")
        yield SentencePair(columns[source], columns[target])


def _keys(pair: SentencePair) -> set[str]:
    return {_key(text) for text in pair}


def _key(text: str) -> str:
    """Returns a sentence without case, spaces and punctuation, to recognise duplicates."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())


def _place(text: str) -> float:
    """Returns a number in [0, 1) that depends on the sentence alone, not on the rest of the corpus."""
    return int(hashlib.sha256(_key(text).encode()).hexdigest()[:8], 16) / 2**32


if __name__ == "__main__":
    try:
        split(*map(Path, sys.argv[1:]))
    except (OSError, TypeError, ValueError) as error:
        sys.exit(f"error: {error} (python -m benchmarks.quality.korean DATA FOLDER)")
