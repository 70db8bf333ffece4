"""Computes what a trained model attends to; `drawing.heatmap` draws it.

Shapes: T target length, S source length, L layers, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from seq2seq_serve.training.config import BOS_ID
from seq2seq_serve.training.data.batches import pad_rows
from seq2seq_serve.training.run import TrainedModel


@torch.inference_mode()
def alignment(run: TrainedModel, source_ids: list[int], target_ids: list[int]) -> Tensor:
    """(T, S): the model's attention over the source as one matrix; the last row chooses eos.

    Raises:
        ValueError: The model does not attend to its source.
    """
    source = pad_rows([source_ids])
    source_mask = torch.ones_like(source, dtype=torch.bool)
    memory = run.model.encode(source, source_mask)
    _, weights = run.model.decode_with_attention(pad_rows([[BOS_ID, *target_ids]]), memory, source_mask)
    matrix = run.model.alignment(weights)
    if matrix is None:
        raise ValueError("this model has no attention: its decoder reads the source from one vector")
    return matrix[0]


@torch.inference_mode()
def encoder_self_attention(run: TrainedModel, source_ids: list[int]) -> Tensor:
    """(L, H, S, S): what each position of the source, a row, takes from each, by encoder layer and head.

    Raises:
        ValueError: The model's encoder has no self-attention.
    """
    source = pad_rows([source_ids])
    _, weights = run.model.encode_with_attention(source, torch.ones_like(source, dtype=torch.bool))
    if not weights:
        raise ValueError("this model's encoder has no self-attention")
    return torch.cat(weights)
