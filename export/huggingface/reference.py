"""The proof that an imported model computes what `transformers` computes for the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from seq2seq_serve.export.huggingface.model import ImportedConfig, ImportedModel

# (batch, source length, target length); the last ones are longer than the distances of relative positions.
_SHAPES = ((1, 1, 1), (1, 8, 6), (3, 21, 11), (2, 47, 29), (1, 150, 140))


@dataclass(frozen=True)
class Batch:
    """Random sources with their mask (B, S), and random targets (B, T)."""

    source_ids: Tensor
    source_mask: Tensor
    target_ids: Tensor


def random_batches(config: ImportedConfig, pad_id: int, other_id: int) -> list[Batch]:
    """Batches of several sizes; the first row is full, and other rows are padded.

    No other token is pad, because some models do not count it as a position; `other_id` stands in its place.
    """
    generator = torch.Generator().manual_seed(0)
    batches = []
    for B, longest_source, longest_target in _SHAPES:
        S = min(longest_source, config.max_source_length)
        T = min(longest_target, config.max_target_length)
        lengths = torch.tensor([S, *torch.randint(1, S + 1, (B - 1,), generator=generator).tolist()])
        mask = torch.arange(S) < lengths[:, None]
        source_ids = torch.randint(config.source_vocab_size, (B, S), generator=generator)
        target_ids = torch.randint(config.vocab_size, (B, T), generator=generator)
        source_ids[source_ids == pad_id] = other_id
        target_ids[target_ids == pad_id] = other_id
        batches.append(Batch(source_ids.masked_fill(~mask, pad_id), mask, target_ids))
    return batches


def reference(path: Path, batches: Sequence[Batch]) -> list[Tensor]:
    """The log-probabilities (B, T, V) of `transformers` in float32; it runs no code of the checkpoint."""
    from transformers import AutoModelForSeq2SeqLM  # takes seconds
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForSeq2SeqLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()
    with torch.inference_mode():
        return [
            model(
                input_ids=batch.source_ids,
                attention_mask=batch.source_mask.long(),
                decoder_input_ids=batch.target_ids,
            ).logits.log_softmax(-1)
            for batch in batches
        ]


def worst_difference(model: ImportedModel, batches: Sequence[Batch], expected: Sequence[Tensor]) -> float:
    """The largest difference of a log-probability; infinite if one is not a number."""
    worst = 0.0
    with torch.inference_mode():
        for batch, log_probabilities in zip(batches, expected, strict=True):
            memory = model.encode(batch.source_ids, batch.source_mask)
            ours = model.decode(batch.target_ids, memory, batch.source_mask).log_softmax(-1)
            difference = (ours - log_probabilities).abs().max()
            worst = max(worst, float(difference) if difference.isfinite() else float("inf"))
    return worst
