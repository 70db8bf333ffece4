"""What a model writes for a few dev sources while it learns, and where it looks: `samples.jsonl` of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.data.sources import NOTHING, TOKENS
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.evaluation.search import greedy_search
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.reports.attention_maps import attention_to

NUM_SAMPLES = 3
_MOST_PAIRS = 200  # that are considered: the length of a clip is in its file
_MOST_CHARACTERS = 60  # of a text that is preferred, so that a heatmap can be read
_MOST_TOKENS = 24  # of other sources, and of a target


def choose_samples(
    pairs: Sequence[SentencePair], model: EncoderDecoder, tokenizer: Tokenizer
) -> list[SentencePair]:
    """The dev pairs that are followed: the same in every session of a run, and of different lengths.

    Texts are chosen by their characters, so that runs with other tokenizers follow the same ones.
    """
    kind = model.source_kind
    if kind is NOTHING:
        return []
    pairs = pairs[:_MOST_PAIRS]
    sources = [pair.source for pair in pairs]
    if kind.is_text:
        lengths, most = [len(source) for source in sources], _MOST_CHARACTERS
    else:
        lengths, most = [kind.length(source) for source in kind.encode(sources, tokenizer)], _MOST_TOKENS
    fitting = [number for number, length in enumerate(lengths) if length <= most]
    ordered = sorted(fitting or range(len(pairs)), key=lambda number: (lengths[number], number))
    count = min(NUM_SAMPLES, len(ordered))
    return [pairs[ordered[(2 * number + 1) * len(ordered) // (2 * count)]] for number in range(count)]


@torch.inference_mode()
def decode_samples(
    pairs: Sequence[SentencePair], model: EncoderDecoder, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The most probable targets of these pairs, and for texts the attention `weights` (T, S) of each.

    The model is left in eval mode.
    """
    model.eval()
    kind = model.source_kind
    sources = kind.encode([pair.source for pair in pairs], tokenizer)
    limit = min(_MOST_TOKENS, model.config.max_target_tokens - 1)
    start_ids, eos_id = model.config.frame
    bos_id, *prefix_ids = start_ids
    targets = greedy_search(
        model, sources, bos_id=bos_id, eos_id=eos_id, max_new_tokens=limit, prefix_ids=prefix_ids
    )
    samples = []
    for pair, source, target in zip(pairs, sources, targets, strict=True):
        sample: dict[str, Any] = {
            "source": pair.source,
            "reference": pair.target,
            "target": tokenizer.decode(target),
        }
        weights = attention_to(model, source, target, start_ids) if kind is TOKENS else None
        if weights is not None:
            shown = [*target, eos_id] if len(target) < limit else target
            sample |= {
                "source_tokens": tokenizer.source_pieces(source),
                "target_tokens": tokenizer.pieces(shown),
                "weights": [[round(weight, 3) for weight in row] for row in weights[: len(shown)].tolist()],
            }
        samples.append(sample)
    return samples
