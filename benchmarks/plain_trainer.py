"""`torch.nn.Transformer` in a plain loop, as people write it first: the peer of the training speed."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.batches import Batch, BatchShare
from training.config import PAD_ID, TrainingConfig, TransformerConfig
from training.schedule import learning_rate
from training.transformer import LAYER_NORM_EPS, sinusoidal_positions


class PlainTransformer(nn.Module):
    """`torch.nn.Transformer` of the same sizes, with one matrix for both embeddings and the output.

    It has torch's own dropout: besides ours of embeddings and sub-layers, of attention weights and of the
    inner layer of the feed-forward network.
    """

    positions: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        max_length = max(config.max_source_length, config.max_target_length)
        self.register_buffer("positions", sinusoidal_positions(max_length, config.d_model), persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        with warnings.catch_warnings():  # of a faster way, which is not for training
            warnings.filterwarnings("ignore", message="enable_nested_tensor")
            self.transformer = nn.Transformer(
                config.d_model,
                config.num_heads,
                config.num_encoder_layers,
                config.num_decoder_layers,
                config.d_ff,
                config.dropout,
                layer_norm_eps=LAYER_NORM_EPS,
                batch_first=True,
                norm_first=config.norm == "pre",
            )

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Logits (B, T, V)."""
        is_padding = source_ids == PAD_ID
        states = self.transformer(
            self._embed(source_ids),
            self._embed(target_ids),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(
                target_ids.shape[1], source_ids.device, torch.bool
            ),
            src_key_padding_mask=is_padding,
            memory_key_padding_mask=is_padding,
            tgt_is_causal=True,
        )
        return functional.linear(states, self.embedding.weight)

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        embedded: Tensor = self.dropout(x + self.positions[: ids.shape[1]])
        return embedded


class PlainTrainer:
    """Owns such a model and its optimizer: the same recipe step by step.

    Args:
        model: Its sizes.
        recipe: Schedule, label smoothing, clipping.
        device: Where.
        dtype: What matrices are multiplied in.
    """

    def __init__(
        self, model: TransformerConfig, recipe: TrainingConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.dtype = dtype
        self.d_model = model.d_model
        self.model = PlainTransformer(model).to(device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.step = 0

    def train_step(self, share: BatchShare) -> Tensor:
        """One update; gives the loss."""
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.d_model, self.recipe)
        (batch,) = share.pieces
        loss = self.loss(batch.to(self.device))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        """Mean over the target's tokens."""
        labels = torch.full_like(batch.target_ids, PAD_ID).flatten()
        labels[batch.label_places] = batch.label_ids
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(batch.source_ids, batch.target_ids)
        return functional.cross_entropy(
            logits.flatten(0, 1).float(),
            labels,
            ignore_index=PAD_ID,
            label_smoothing=self.recipe.label_smoothing,
        )
