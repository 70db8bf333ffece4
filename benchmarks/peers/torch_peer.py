"""A greedy loop over the trained model in PyTorch: the peer for models that no other library decodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.peers.work import Search
from seq2seq_serve.training.config import BOS_ID, PAD_ID
from seq2seq_serve.training.data.sources import pad_rows
from seq2seq_serve.training.models.base import EncoderDecoder


class TorchPeer:
    """Calls `step` in a loop for all sources at once, without gradients.

    Args:
        model: The model, in eval mode.
        num_threads: Number of threads that torch may use.
    """

    def __init__(self, model: EncoderDecoder, num_threads: int) -> None:
        self._model = model
        self._num_threads = num_threads

    def translate(self, sources: Sequence[Any], search: Search) -> list[list[int]]:
        """Returns exactly `max_new_tokens` most probable tokens of each source; includes encoding."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            return self._translate(sources, search)
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def _translate(self, sources: Sequence[Sequence[int]], search: Search) -> list[list[int]]:
        source_ids = pad_rows(sources)  # (B, S)
        source_mask = source_ids != PAD_ID
        memory = self._model.encode(source_ids, source_mask)
        state = self._model.start(memory, source_mask)
        token_ids = torch.full((len(sources),), BOS_ID)
        columns = []
        for _ in range(max(map(search.most, sources))):
            states, state = self._model.step(token_ids, state, memory, source_mask)
            token_ids = self._model.project(states).argmax(dim=-1)  # (B,)
            columns.append(token_ids)
        targets: list[list[int]] = torch.stack(columns, dim=1).tolist()
        return targets
