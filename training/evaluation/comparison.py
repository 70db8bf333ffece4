"""Scores of any translations against references, with confidence intervals and significance tests.

The scores of a model in training are in `training.evaluation.scoring`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import get_args

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

from seq2seq_serve.bundle.characters import HAN, KANA, SOUTH_EAST_ASIAN, TIBETAN
from seq2seq_serve.training.config import Tokenization
from seq2seq_serve.training.models.base import Metric

TOKENIZATIONS: tuple[Tokenization, ...] = get_args(Tokenization)
_BLEU_ORDER = 4
_NUM_TEXTS = 1000  # whose script decides
_HAN, _KANA, _OTHERS = f"[{HAN}]", f"[{KANA}]", f"[{SOUTH_EAST_ASIAN}{TIBETAN}]"


def tokenization_for(references: Iterable[str | None]) -> Tokenization:
    """Returns the tokenizer of BLEU for the script of some texts: "13a", the usual one, cuts at spaces.

    That is "zh" for Chinese, and "char" for Japanese and other scripts without spaces between words: the
    tokenizer of words for Japanese, "ja-mecab", needs a library that need not be installed.
    """
    text = " ".join(filter(None, islice(references, _NUM_TEXTS)))
    num_han, num_kana, num_others = (len(re.findall(each, text)) for each in (_HAN, _KANA, _OTHERS))
    if 2 * (num_han + num_kana + num_others) <= len(re.findall(r"\w", text)):
        return "13a"
    return "zh" if num_han > 4 * num_kana + num_others else "char"


@dataclass(frozen=True)
class MetricSettings:
    """The settings of the metrics, which a score's signature names.

    Attributes:
        tokenization: BLEU's tokenizer; "none" for texts that are tokens already, and None for the one of the
            references' script.
        is_lower_cased: Whether both sides are lower-cased first.
        num_resamples: The number of test sets that the bootstrap draws; 0 for no bootstrap.
    """

    tokenization: Tokenization | None = None
    is_lower_cased: bool = False
    num_resamples: int = 1000

    def check(self) -> None:
        """Raise ValueError if this installation lacks what the tokenizer needs."""
        try:
            self.metrics([])
        except RuntimeError as error:  # sacreBLEU's, with lines of its own
            library = str(self.tokenization).partition("-")[0]
            raise ValueError(
                f"BLEU's tokenizer {self.tokenization} is not installed: choose another one, or "
                f"pip install 'sacrebleu[{library}]'"
            ) from error

    def metrics(self, references: Sequence[str | None]) -> dict[str, BLEU | CHRF]:
        """BLEU (Papineni et al. 2002) and chrF (Popovic 2015) by name."""
        tokenization = self.tokenization or tokenization_for(references)
        return {
            # force: no warning about texts that look tokenized
            "BLEU": BLEU(lowercase=self.is_lower_cased, force=True, tokenize=tokenization),
            "chrF": CHRF(lowercase=self.is_lower_cased),
        }


def metric_for(metric: Metric, references: Sequence[str], settings: MetricSettings) -> Metric:
    """Returns a model's metric; chrF in place of BLEU if that is 0 for most references.

    It is 0 for texts of fewer tokens than its longest n-grams.
    """
    bleu = settings.metrics(references)["BLEU"]
    assert isinstance(bleu, BLEU)
    num_short = sum(len(bleu.tokenizer(text).split()) < _BLEU_ORDER for text in references)
    return "chrf" if metric == "bleu" and 2 * num_short > len(references) else metric


@dataclass(frozen=True)
class MetricScore:
    """The score of one system by one metric.

    Attributes:
        metric: sacreBLEU's name of the metric.
        details: sacreBLEU's details: for BLEU its n-gram precisions, brevity penalty and lengths.
        mean: The mean score of resampled test sets (Koehn 2004); None without a bootstrap.
        half_interval: Half the width of the interval around the mean that holds 95 % of those scores.
        p_value: The probability of a difference this large from the baseline by chance; None without one.
    """

    metric: str
    score: float
    details: str
    signature: str
    mean: float | None = None
    half_interval: float | None = None
    p_value: float | None = None

    def __str__(self) -> str:
        text = f"{self.metric} {self.score:.2f}"
        if self.half_interval is not None:
            text += f" (95 % of resampled sets: {self.mean:.2f} ± {self.half_interval:.2f})"
        if self.p_value is not None:
            text += f", p = {self.p_value:.4f}"
        return "\n  ".join(filter(None, [text, self.details, self.signature]))


def compare(
    systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]], settings: MetricSettings
) -> list[list[MetricScore]]:
    """Score the translations of each system, and test whether each differs from the first one's.

    `references` are the first reference of every sentence, the second of every sentence, and so on; None for
    sentences that have fewer.

    Raises:
        ValueError: Systems and references have different numbers of sentences, or none, or the library of the
            tokenization is not installed.
    """
    lengths = [len(texts) for texts in (*systems, *references)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"hypotheses and references have {', '.join(map(str, lengths))} sentences")
    try:
        metrics = settings.metrics(references[0])
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{settings.tokenization}: {' '.join(str(error).split())}") from error
    scores = [_score(metrics, texts, references) for texts in systems]
    if not settings.num_resamples:
        return scores
    named = [(str(number), texts) for number, texts in enumerate(systems)]
    test = PairedTest(named, metrics, references, test_type="bs", n_samples=settings.num_resamples)
    signatures, columns = test()

    def with_bootstrap(number: int, score: MetricScore) -> MetricScore:
        result = columns[score.metric][number]
        assert isinstance(result, Result)
        p_value = None if result.p_value is None else float(result.p_value)
        if number and systems[number] == systems[0]:
            p_value = 1.0  # equal translations: sacreBLEU would return almost 0
        return replace(
            score,
            signature=str(signatures[score.metric]),
            mean=float(result.mean or 0.0),
            half_interval=float(result.ci or 0.0),
            p_value=p_value,
        )

    return [[with_bootstrap(number, score) for score in row] for number, row in enumerate(scores)]


def _details(result: str) -> str:
    """Returns what sacreBLEU writes after the score, as in `BLEU = 41.00 60.0/40.0 (BP = 1.000 …)`."""
    return result.partition(" = ")[2].partition(" ")[2]


def _score(
    metrics: dict[str, BLEU | CHRF], texts: Sequence[str], references: Sequence[Sequence[str]]
) -> list[MetricScore]:
    results = [(metric, metric.corpus_score(texts, references)) for metric in metrics.values()]
    return [
        MetricScore(result.name, result.score, _details(str(result)), str(metric.get_signature()))
        for metric, result in results
    ]
