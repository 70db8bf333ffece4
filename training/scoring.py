"""Translations compared with references: sacreBLEU and chrF, and the signatures that name their settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from bundle.manifest import LengthBound
from bundle.tokenizer import Tokenizer
from training.config import BOS_ID, EOS_ID
from training.lengths import target_limits
from training.search import beam_search, check_sources, greedy_search
from training.transformer import Transformer


@dataclass(frozen=True)
class Score:
    """BLEU (Papineni et al. 2002) and chrF (Popovic 2015) as sacreBLEU computes them (Post 2018)."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """Score translations against one reference each.

    Raises:
        ValueError: There are none, or not as many as references.
    """
    if len(hypotheses) != len(references) or not references:
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    bleu, chrf = BLEU(force=True), CHRF()  # no warning where a corpus consists of tokens
    bleu_score = bleu.corpus_score(hypotheses, [references]).score
    chrf_score = chrf.corpus_score(hypotheses, [references]).score
    return Score(bleu_score, str(bleu.get_signature()), chrf_score, str(chrf.get_signature()))


def translate(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    beam_size: int = 1,
    alpha: float = 0.6,
    length_bound: LengthBound | None = None,
    before_step: Callable[[], None] = lambda: None,
) -> list[str]:
    """Translations by the oracle of `training.search`, each as long as the server lets it become.

    Args:
        model: In eval mode.
        tokenizer: Of source and target.
        texts: What to translate.
        beam_size: 1 is greedy search, many sentences at once; beams are searched one sentence at a time.
        alpha: Of the length penalty; greedy search has none.
        length_bound: Of targets; None leaves the model's limit.
        before_step: Is called before each step of greedy search; what it raises ends the search.

    Raises:
        SourceLengthError: A text is longer than the model's limit.
    """
    sources = tokenizer.encode_sources(texts)
    check_sources(model, sources)  # all of them: beams are searched one source at a time
    limits = target_limits(sources, model.config, length_bound)
    if beam_size == 1:
        targets = greedy_search(
            model,
            sources,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            max_new_tokens=limits,
            before_step=before_step,
        )
    else:
        targets = [
            beam_search(
                model,
                source,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                beam_size=beam_size,
                alpha=alpha,
                max_new_tokens=limit,
            )[0].token_ids
            for source, limit in zip(sources, limits, strict=True)
        ]
    return tokenizer.decode_batch(targets)
