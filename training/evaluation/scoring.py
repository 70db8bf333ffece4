"""Targets that a trained model generates, their BLEU, chrF and accuracy, and the loss of given targets."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from rapidfuzz.distance import Levenshtein

from seq2seq_serve.bundle.manifest import LengthBound
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import Tokenization
from seq2seq_serve.training.data.batches import batches_in_order
from seq2seq_serve.training.data.encoded import EncodedPair
from seq2seq_serve.training.data.lengths import target_limits
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.evaluation.comparison import MetricSettings
from seq2seq_serve.training.evaluation.search import (
    BeamRules,
    beam_searches,
    check_sources,
    greedy_search,
)
from seq2seq_serve.training.loss import BatchLoss
from seq2seq_serve.training.models.base import EncoderDecoder, Metric


@dataclass(frozen=True)
class Score:
    """BLEU (Papineni et al. 2002) and chrF (Popovic 2015) by sacreBLEU (Post 2018), accuracy and error rates.

    Attributes:
        accuracy: The percentage of targets that equal one of their references.
        wer: Words that were left out, added or replaced, in percent of the references' words.
        cer: The same for characters.
    """

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str
    accuracy: float
    wer: float
    cer: float

    def by(self, metric: Metric) -> float:
        """The score by a metric of generated targets."""
        return {"bleu": self.bleu, "chrf": self.chrf, "accuracy": self.accuracy, "cer": -self.cer}[metric]

    @property
    def error_rates(self) -> str:
        """Both in one line."""
        return f"WER {self.wer:.2f} %, CER {self.cer:.2f} %"


def by_source(pairs: Sequence[SentencePair]) -> dict[str, list[str]]:
    """The targets of each source, in the order of the sources' first pairs."""
    targets: dict[str, list[str]] = {}
    for pair in pairs:
        targets.setdefault(pair.source, []).append(pair.target)
    return targets


def score(
    hypotheses: Sequence[str],
    references: Sequence[str | Sequence[str]],
    tokenization: Tokenization | None = None,
) -> Score:
    """Score targets against one or several references each; raise ValueError if counts differ or are 0.

    BLEU is that of a tokenizer of sacreBLEU, by default the one for the references' script.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    groups = [[given] if isinstance(given, str) else given for given in references]
    streams = list(zip_longest(*groups))  # the first of each, the second, ...; None where it lacks one
    bleu, chrf = MetricSettings(tokenization).metrics(streams[0]).values()
    bleu_score = bleu.corpus_score(hypotheses, streams).score
    chrf_score = chrf.corpus_score(hypotheses, streams).score
    num_right = sum(given in group for given, group in zip(hypotheses, groups, strict=True))
    accuracy = 100 * num_right / len(hypotheses)
    words = [[text.split() for text in texts] for texts in (hypotheses, *groups)]
    characters = [[" ".join(each) for each in texts] for texts in words]
    return Score(
        bleu_score,
        str(bleu.get_signature()),
        chrf_score,
        str(chrf.get_signature()),
        accuracy,
        wer=_error_rate(words),
        cer=_error_rate(characters),
    )


def _error_rate(texts: Sequence[Sequence[Sequence[Hashable]]]) -> float:
    """Edits of hypotheses, the first texts, in percent of the nearest references, those of each after it."""
    hypotheses, *groups = texts
    nearest = [
        min((Levenshtein.distance(given, reference), len(reference)) for reference in group)
        for given, group in zip(hypotheses, groups, strict=True)
    ]
    num_edits, length = map(sum, zip(*nearest, strict=True))
    return 100 * num_edits / max(length, 1)


def translate(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    beam_size: int = 1,
    alpha: float = 0.6,
    length_bound: LengthBound | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> list[str]:
    """Generate targets with `training.evaluation.search`, within the length limits that the server applies.

    `texts` are sources as a corpus has them.

    Beam size 1 is greedy search, without length penalty. `before_step` is called before each step of greedy
    search, and may raise to end it.

    Raises:
        SourceLengthError: A source is longer than the model's limit.
        ValueError: The file of a source cannot be read.
    """
    kind = model.source_kind
    sources = kind.encode(texts, tokenizer)
    check_sources(model, sources)  # all of them before the first is searched
    limits = target_limits(map(kind.length, sources), model.config, length_bound)
    (bos_id, *prefix_ids), eos_id = model.config.frame
    if beam_size == 1:
        targets = greedy_search(
            model,
            sources,
            bos_id=bos_id,
            eos_id=eos_id,
            max_new_tokens=limits,
            prefix_ids=prefix_ids,
            before_step=before_step,
        )
        return tokenizer.decode_batch(targets)
    found = beam_searches(
        model,
        sources,
        BeamRules(eos_id, beam_size, alpha),
        bos_id=bos_id,
        max_new_tokens=limits,
        prefix_ids=prefix_ids,
    )
    return tokenizer.decode_batch([best.token_ids[len(prefix_ids) :] for best, *_ in found])


@torch.no_grad()
def total_loss(
    batch_loss: BatchLoss,
    pairs: Sequence[EncodedPair],
    batch_tokens: int,
    before_batch: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """The cross-entropy of all target tokens, without smoothing, summed; and the number of the tokens.

    The model of `batch_loss` is in eval mode. `before_batch` is called before each batch, and may raise to
    end the computation.
    """
    model = batch_loss.model
    total, num_labels = 0.0, 0
    kind, frame = model.source_kind, model.config.frame
    for batch in batches_in_order(pairs, batch_tokens, kind, frame) if pairs else ():
        before_batch()
        mean = batch_loss(batch.to(model.embedding.weight.device), label_smoothing=0.0)
        total += mean.item() * batch.num_labels
        num_labels += batch.num_labels
    return total, num_labels
