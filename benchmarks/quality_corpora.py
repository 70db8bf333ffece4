"""The corpora of `benchmarks.quality`: what is trained on, and the test sets that are scored once.

Where they come from stands in `benchmarks/README.md`. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.comparison import MetricSettings
from training.corpus import CorpusFiles
from training.text_files import SentencePair, read_lines, read_parallel, write_lines

# Of the corpora that have no test set of their own: the share of the English sentences that go there.
_KSS_TEST, _TATOEBA_TEST, _TATOEBA_DEV = 0.04, 0.08, 0.04
_PUBLISHED = {  # of a text-only Transformer of this size, on these tokens
    "en-de": {"test2016": "41.02 (Wu et al. 2021)"},
    "en-fr": {"test2016": "61.80 (Wu et al. 2021, seen second-hand)"},
}
_KSS, _STYLE, _TATOEBA = "KSS", "StyleKQC", "Tatoeba"

EVERYDAY_SENTENCES = (
    "안녕하세요, 만나서 반갑습니다.",
    "오늘 날씨가 정말 좋네요.",
    "지금 몇 시예요?",
    "저는 매일 아침 커피를 마셔요.",
    "배가 너무 고파요.",
    "이거 얼마예요?",
    "화장실이 어디에 있어요?",
    "내일 비가 올까요?",
    "어제 친구와 영화를 봤어요.",
    "저는 한국어를 배우고 있어요.",
    "문 좀 닫아 주세요.",
    "늦어서 죄송합니다.",
    "우리 내일 저녁에 만날까요?",
    "그는 병원에서 일합니다.",
    "이 책은 별로 재미없어요.",
    "버스를 놓쳐서 택시를 탔어요.",
    "동생이 자고 있으니까 조용히 하세요.",
    "주말에 뭐 할 거예요?",
    "창문을 열어도 될까요?",
    "생일 축하해요!",
)


@dataclass(frozen=True)
class Detokenised:
    """What a test set's translations are compared with once Moses' tokens are undone.

    Attributes:
        language: Of the target.
        references: The texts that the tokens were made from.
    """

    language: str
    references: list[str]


@dataclass(frozen=True)
class ScoredSet:
    """Sentences that nothing was chosen on.

    Attributes:
        detokenised: None where the references are texts already.
    """

    name: str
    pairs: list[SentencePair]
    detokenised: Detokenised | None = None


@dataclass(frozen=True)
class Task:
    """A corpus to train on, what to score, and how.

    Attributes:
        files: With dev files.
        metric: Of the first score, by which averaging and length penalty are chosen on dev, too.
        sentences: To be translated and shown.
        published: The best comparable result in print, by test set.
    """

    name: str
    files: CorpusFiles
    metric: MetricSettings
    scored_sets: list[ScoredSet]
    sentences: Sequence[str] = ()
    published: dict[str, str] | None = None


def multi30k(data: Path, direction: str) -> Task:
    """Multi30k's lower-cased, normalised Moses tokens, as the corpus' repository has them.

    Args:
        data: Holds `tok/train.lc.norm.tok.en.gz` and its like, and the texts `test_2016_flickr.en.gz`.
        direction: Such as "en-de".

    Raises:
        ValueError: Files do not fit each other.
        OSError: One cannot be read.
    """
    source, target = direction.split("-")

    def tokens(part: str, language: str) -> Path:
        return data / "tok" / f"{part}.lc.norm.tok.{language}.gz"

    part = "test_2016_flickr"
    test = ScoredSet(
        "test2016",
        read_parallel(tokens(part, source), tokens(part, target)),
        Detokenised(target, read_lines(data / f"{part}.{target}.gz")),
    )
    files = [str(tokens(part, language)) for part in ("train", "val") for language in (source, target)]
    return Task(
        f"Multi30k {direction}",
        CorpusFiles(source=files[0], target=files[1], dev_source=files[2], dev_target=files[3]),
        MetricSettings(tokenization="none"),
        [test],
        published=_PUBLISHED.get(direction),
    )


def korean(data: Path, folder: Path) -> Task:
    """Three small Korean-English corpora, split so that no English or Korean sentence is in two parts.

    StyleKQC has splits of its own, and KSS a dev set; the rest is split by a hash of the English sentence. A
    pair whose English or Korean sentence is in a test set or among the everyday sentences is in no other
    part, nor one of dev in train.

    Args:
        data: Holds the folders `ko_en_kosp2e` and `tatoeba`.
        folder: Where the parts are written, for training to read.

    Raises:
        ValueError: A line has other columns than expected.
        OSError: A file cannot be read or written.
    """
    parts = _korean_parts(data)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "dev"):
        pairs = [pair for corpus in parts[name].values() for pair in corpus]
        write_lines(folder / f"{name}.tsv", [f"{pair.source}\t{pair.target}" for pair in pairs])
    return Task(
        "Korean-English",
        CorpusFiles(tsv=str(folder / "train.tsv"), dev_tsv=str(folder / "dev.tsv")),
        MetricSettings(),
        [ScoredSet(name, pairs) for name, pairs in parts["test"].items()],
        EVERYDAY_SENTENCES,
    )


def _korean_parts(data: Path) -> dict[str, dict[str, list[SentencePair]]]:
    """Pairs by part, then by corpus."""
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
    everyday = {_key(sentence) for sentence in EVERYDAY_SENTENCES}
    kept = {}
    for part, corpora in given.items():  # test first: it loses nothing
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
    """A sentence without what does not make it another one: case, spaces, punctuation."""
    return re.sub(r"[\W_]+", "", unicodedata.normalize("NFKC", text).casefold())


def _place(text: str) -> float:
    """Where a sentence falls in [0, 1): always at the same place, whatever else is in the corpus."""
    return int(hashlib.sha256(_key(text).encode()).hexdigest()[:8], 16) / 2**32
