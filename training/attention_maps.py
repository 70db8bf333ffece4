"""What a trained model attends to, as numbers; how they are drawn stands in `training.heatmap`.

Shapes: T target length, S source length, L layers, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.batches import pad_rows
from training.config import BOS_ID
from training.run import TrainedModel
from training.transformer import alignment_layer


@torch.inference_mode()
def alignment(run: TrainedModel, source_ids: list[int], target_ids: list[int]) -> Tensor:
    """(T, S): cross-attention of the layer that aligns, mean over its heads; the last row chooses eos."""
    source = pad_rows([source_ids])
    source_mask = torch.ones_like(source, dtype=torch.bool)
    memory = run.model.encode(source, source_mask)
    _, weights = run.model.decode_with_attention(pad_rows([[BOS_ID, *target_ids]]), memory, source_mask)
    return weights[alignment_layer(run.config.num_decoder_layers)][0].mean(dim=0)


@torch.inference_mode()
def encoder_self_attention(run: TrainedModel, source_ids: list[int]) -> Tensor:
    """(L, H, S, S): what each position of the source, a row, takes from each, by encoder layer and head."""
    source = pad_rows([source_ids])
    _, weights = run.model.encode_with_attention(source, torch.ones_like(source, dtype=torch.bool))
    return torch.cat(weights)
