"""A plain training loop over `torch.nn.Transformer`, the peer of the training-speed benchmark."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional

from seq2seq_serve.training.config import PAD_ID, ModelConfig, TrainingConfig, TransformerConfig
from seq2seq_serve.training.data.batches import Batch, BatchShare
from seq2seq_serve.training.models.options import StackConfig
from seq2seq_serve.training.models.transformer import sinusoidal_positions
from seq2seq_serve.training.schedule import learning_rate


class PlainTransformer(nn.Module):
    """`torch.nn.Transformer` of the same sizes, with one matrix for both embeddings and the output.

    It has torch's dropout: like ours on embeddings and sub-layers, and also on attention weights and on the
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
        with warnings.catch_warnings():  # torch warns about nested tensors, which training does not use
            warnings.filterwarnings("ignore", message="enable_nested_tensor")
            self.transformer = nn.Transformer(
                config.d_model,
                config.num_heads,
                config.num_encoder_layers,
                config.num_decoder_layers,
                config.d_ff,
                config.dropout,
                layer_norm_eps=StackConfig.norm_epsilon,
                batch_first=True,
                norm_first=config.norm == "pre",
            )

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Returns the logits (B, T, V)."""
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
    """Trains a `PlainTransformer` with our recipe; owns the model and its optimizer.

    Args:
        model: Sizes of the model.
        recipe: Schedule, label smoothing and gradient clipping.
        device: Device of the model.
        dtype: Data type of the matrix products.
    """

    def __init__(
        self, model: ModelConfig, recipe: TrainingConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert isinstance(model, TransformerConfig)
        self.recipe = recipe
        self.device = device
        self.dtype = dtype
        self.d_model = model.d_model
        self.model = PlainTransformer(model).to(device).train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.step = 0

    def train_step(self, share: BatchShare) -> Tensor:
        """Make one update; returns the loss."""
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
        """Returns the mean loss over the target tokens."""
        labels = torch.full_like(batch.target_ids, PAD_ID).flatten()
        labels[batch.label_places] = batch.label_ids
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(batch.source[0], batch.target_ids)
        return functional.cross_entropy(
            logits.flatten(0, 1).float(),
            labels,
            ignore_index=PAD_ID,
            label_smoothing=self.recipe.label_smoothing,
        )
