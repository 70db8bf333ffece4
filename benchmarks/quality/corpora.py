"""The corpora of `benchmarks.quality`: the training and dev files, and the test sets, which are scored once.

`benchmarks/README.md` names the sources of the corpora. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seq2seq_serve.training.data.corpus import CorpusFiles
from seq2seq_serve.training.data.text_files import SentencePair, read_lines, read_parallel, write_lines
from seq2seq_serve.training.evaluation.comparison import MetricSettings

# Shares of the English sentences that become test and dev sets, for corpora without their own.
_KSS_TEST, _TATOEBA_TEST, _TATOEBA_DEV = 0.04, 0.08, 0.04
_PUBLISHED = {  # scores of a text-only Transformer of the size of `tiny`, on these tokens
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
    """The references of a test set as plain texts, for translations whose Moses tokens are joined again.

    Attributes:
        language: Target language.
        references: The texts that Moses tokenised.
    """

    language: str
    references: list[str]


@dataclass(frozen=True)
class ScoredSet:
    """A test set, on which nothing was chosen.

    Attributes:
        detokenised: Plain references; None if the pairs already hold plain texts.
    """

    name: str
    pairs: list[SentencePair]
    detokenised: Detokenised | None = None


@dataclass(frozen=True)
class Task:
    """A corpus to train on, its test sets, and their metric.

    Attributes:
        files: Training and dev files.
        metric: Settings of the first score; the same metric selects averaging and length penalty on dev.
        sentences: Sentences to translate and show without a score.
        published: The best comparable published result, by test set.
    """

    name: str
    files: CorpusFiles
    metric: MetricSettings
    scored_sets: list[ScoredSet]
    sentences: Sequence[str] = ()
    published: dict[str, str] | None = None


def multi30k(data: Path, direction: str) -> Task:
    """Returns the task of Multi30k, as lower-cased, normalised Moses tokens from the corpus' repository.

    Args:
        data: Folder with `tok/train.lc.norm.tok.en.gz`, its counterparts for the other parts and languages,
            and the plain texts, such as `test_2016_flickr.en.gz`.
        direction: Source and target language, such as "en-de".

    Raises:
        ValueError: A file is damaged or empty, or source and target differ in their number of lines.
        OSError: A file cannot be read.
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
    """Returns the task of three small Korean-English corpora; their parts do not share any sentence.

    StyleKQC has its own splits, and KSS has a dev set; the rest is split by a hash of the English sentence. A
    pair is removed from train and dev if one of its sentences is in a test set or among the everyday
    sentences, and from train if one is in dev.

    Args:
        data: Folder that contains `ko_en_kosp2e` and `tatoeba`.
        folder: Receives the training and dev files.

    Raises:
        ValueError: A line does not have 3 columns.
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
    everyday = {_key(sentence) for sentence in EVERYDAY_SENTENCES}
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
