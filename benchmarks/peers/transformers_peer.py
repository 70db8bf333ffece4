"""Calls `generate` of transformers' models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.peers.marian import as_marian
from benchmarks.peers.work import Checkpoint, Search
from seq2seq_serve.training.run import TrainedModel

# The fastest of 32 to 256 on Multi30k; a batch runs until its last target ends.
_BATCH_SIZE = 32


def loaded(model: TrainedModel | Checkpoint, folder: Path) -> TransformersPeer:
    """Returns `generate` of a converted model, or of the checkpoint in `folder/checkpoint`."""
    if isinstance(model, Checkpoint):
        found = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "checkpoint")
        return TransformersPeer(found.eval())
    return TransformersPeer(as_marian(model.model, torch.device("cpu"), torch.float32))


class TransformersPeer:
    """Translates with `generate`, and with the settings of the model's `generation_config`.

    Args:
        model: The model, in eval mode on its device.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        settings = model.generation_config
        self._ends = settings.eos_token_id, settings.pad_token_id
        self._num_forced = int(settings.forced_bos_token_id is not None)

    def translate(self, sources: Sequence[Any], search: Search) -> list[list[int]]:
        """Returns the best target of each source, in batches of similar lengths; includes encoding."""
        targets: list[list[int]] = [[] for _ in sources]
        for group in search.groups(sources).values():
            by_length = sorted(group, key=lambda row: len(sources[row]))
            for start in range(0, len(by_length), _BATCH_SIZE):
                rows = by_length[start : start + _BATCH_SIZE]
                found = self.generate([sources[row] for row in rows], search)
                for row, target in zip(rows, found, strict=True):
                    targets[row] = target
        return targets

    @torch.inference_mode()
    def generate(self, sources: Sequence[Any], search: Search) -> list[list[int]]:
        """Returns the best target of each source, in one batch with one limit."""
        options = {"early_stopping": True, "length_penalty": 0.0} if search.beam_size > 1 else {}
        generated: Tensor = self._model.generate(
            **self._inputs(sources),
            num_beams=search.beam_size,
            do_sample=False,
            max_new_tokens=self._num_forced + search.most(sources[0]),
            **options,
        )  # (B, 1 + T)
        first = 1 + self._num_forced
        return [self._without_end(target[first:]) for target in generated.tolist()]

    def _inputs(self, sources: Sequence[Any]) -> dict[str, Tensor]:
        pad_id = self._ends[1]
        padded = pad_sequence(list(map(torch.tensor, sources)), batch_first=True, padding_value=pad_id)
        source_ids = padded.to(self._model.device)  # (B, S)
        return {"input_ids": source_ids, "attention_mask": (source_ids != pad_id).long()}

    def _without_end(self, target: list[int]) -> list[int]:
        return list(takewhile(lambda token_id: token_id not in self._ends, target))
