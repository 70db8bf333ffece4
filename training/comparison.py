"""Translations from anywhere compared with references, and how far the choice of sentences decides the score.

What a trained model scores on its own dev pairs stands in `training.scoring`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest, Result

# Those that need no download.
TOKENIZATIONS = "13a", "intl", "none", "char", "zh", "ja-mecab", "ko-mecab"

NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class MetricSettings:
    """What a score depends on besides the texts; its signature names it.

    Attributes:
        tokenization: Of BLEU, one of `TOKENIZATIONS`; "none" for texts that are tokens already.
        is_lower_cased: Whether both sides are lower-cased first.
        num_resamples: Of the bootstrap; 0 for none.
    """

    tokenization: str = "13a"
    is_lower_cased: bool = False
    num_resamples: int = NUM_RESAMPLES

    def metrics(self) -> dict[str, BLEU | CHRF]:
        """BLEU (Papineni et al. 2002) and chrF (Popovic 2015) by name."""
        return {
            "BLEU": BLEU(lowercase=self.is_lower_cased, tokenize=self.tokenization),
            "chrF": CHRF(lowercase=self.is_lower_cased),
        }


@dataclass(frozen=True)
class MetricScore:
    """One metric of one system.

    Attributes:
        metric: As sacreBLEU names it.
        details: sacreBLEU's: for BLEU its n-gram precisions, brevity penalty and lengths.
        mean: Of the scores of resampled test sets (Koehn 2004); None without a bootstrap.
        half_interval: Half the width of the interval around it that 95 % of them lie in.
        p_value: The probability of such a difference from the baseline if there were none; None where nothing
            is compared.
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
    """Score each system, and test whether each differs from the first by more than chance.

    Args:
        systems: The translations of one or more; the first is the baseline of the others.
        references: One or more translations of everything by people.
        settings: Of the metrics.

    Raises:
        ValueError: Systems and references have different numbers of sentences, or none, or the tokenization
            lacks its library.
    """
    lengths = [len(texts) for texts in (*systems, *references)]
    if len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"hypotheses and references have {', '.join(map(str, lengths))} sentences")
    try:
        metrics = settings.metrics()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{settings.tokenization}: {' '.join(str(error).split())}") from error
    scores = [_score(metrics, texts, references) for texts in systems]
    if not settings.num_resamples:
        return scores
    test = PairedTest(
        [(str(number), texts) for number, texts in enumerate(systems)],
        metrics,
        references,
        test_type="bs",
        n_samples=settings.num_resamples,
    )
    signatures, columns = test()

    def with_bootstrap(number: int, score: MetricScore) -> MetricScore:
        result = columns[score.metric][number]
        assert isinstance(result, Result)
        p_value = None if result.p_value is None else float(result.p_value)
        if number and systems[number] == systems[0]:
            p_value = 1.0  # where nothing differs, sacreBLEU counts no resampled set and gives almost 0
        return replace(
            score,
            signature=str(signatures[score.metric]),
            mean=float(result.mean or 0.0),
            half_interval=float(result.ci or 0.0),
            p_value=p_value,
        )

    return [[with_bootstrap(number, score) for score in row] for number, row in enumerate(scores)]


def _score(
    metrics: dict[str, BLEU | CHRF], texts: Sequence[str], references: Sequence[Sequence[str]]
) -> list[MetricScore]:
    results = [(metric, metric.corpus_score(texts, references)) for metric in metrics.values()]
    return [
        MetricScore(result.name, result.score, getattr(result, "_verbose", ""), str(metric.get_signature()))
        for metric, result in results
    ]
