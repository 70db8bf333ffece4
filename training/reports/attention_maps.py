"""Computes what a trained model attends to; `drawing.heatmap` draws it.

Shapes: T target length, S source length, L layers, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seq2seq_serve.training.data.sources import pad_rows
from seq2seq_serve.training.models.base import EncoderDecoder
from seq2seq_serve.training.run import TrainedModel


@torch.inference_mode()
def alignment(run: TrainedModel, source_ids: list[int], target_ids: list[int]) -> Tensor:
    """(T, S): the model's attention over the source as one matrix; the last row chooses eos.

    Raises:
        ValueError: The model does not attend to its source.
    """
    matrix = attention_to(run.model, source_ids, target_ids, run.config.frame.start_ids)
    if matrix is None:
        raise ValueError("this model has no attention: its decoder reads the source from one vector")
    return matrix


def attention_to(
    model: EncoderDecoder, source_ids: Sequence[int], target_ids: Sequence[int], start_ids: Sequence[int]
) -> Tensor | None:
    """(T, S): the same of a model on any device; None if it does not attend to its source."""
    device = next(model.parameters()).device
    source = tuple(tensor.to(device) for tensor in model.source_kind.collate([source_ids]))
    memory = model.encode(*source)
    target = pad_rows([[*start_ids, *target_ids]]).to(device)
    _, weights = model.decode_with_attention(target, memory, source[-1])
    matrix = model.alignment(weights)
    return None if matrix is None else matrix[0, len(start_ids) - 1 :]


@torch.inference_mode()
def encoder_self_attention(run: TrainedModel, source_ids: list[int]) -> Tensor:
    """(L, H, S, S): what each position of the source, a row, takes from each, by encoder layer and head.

    Raises:
        ValueError: The model's encoder has no self-attention.
    """
    _, weights = run.model.encode_with_attention(*run.model.source_kind.collate([source_ids]))
    if not weights:
        raise ValueError("this model's encoder has no self-attention")
    return torch.cat(weights)
