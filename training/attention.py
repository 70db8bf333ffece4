"""Attention as Vaswani et al. 2017 define it; knows nothing of layers around it.

Shapes: B batch rows, T query positions, S key positions, D d_model, H heads, K d_head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.dropout import dropout


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_probability: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k)) V: Vaswani et al. 2017, equation 1, arXiv:1706.03762.

    Args:
        query: (..., T, K).
        key: (..., S, K).
        value: (..., S, any width).
        mask: Broadcast to (..., T, S); True = may attend.
        scale: What the scores are multiplied by; None is the paper's 1 / sqrt(K).
        dropout_probability: Of each weight before the sum; the returned weights are those without dropout.

    Returns:
        The context, (..., T, width of value), and the weights, (..., T, S).
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale  # (..., T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim=-1)
    return dropout(weights, dropout_probability) @ value, weights


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Vaswani et al. 2017, section 3.2.2, arXiv:1706.03762. The heads' matrices stand side by side in one
    `nn.Linear` each: head h has the outputs h*K to (h+1)*K. Unlike the paper's, they have biases.

    Args:
        d_model: D.
        num_heads: H.
        dropout: Probability of leaving out a weight while training.

    Attributes:
        is_fused: Whether torch's fused operator is taken where no weights are asked for; None is on a GPU.
            Beside oneDNN's products (`fast_matmul`) a CPU's takes several times as long as the definition.
    """

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.is_fused: bool | None = None
        self.query = nn.Linear(d_model, d_model)  # W^Q
        self.key = nn.Linear(d_model, d_model)  # W^K
        # It adds the same to all scores of a query, which softmax cancels: its gradient is nothing but
        # rounding, of which Adam would make whole steps.
        self.key.bias.requires_grad_(False)
        self.value = nn.Linear(d_model, d_model)  # W^V
        self.output = nn.Linear(d_model, d_model)  # W^O

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None, return_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `x` over `memory`.

        Args:
            x: What asks, (B, T, D).
            memory: What is asked, (B, S, D); `x` itself in self-attention.
            mask: Broadcast to (B, H, T, S); True = may attend.
            return_weights: Give the weights too.

        Returns:
            The output (B, T, D), and the weights (B, H, T, S) or None.
        """
        query = self._split_heads(self.query(x))  # (B, H, T, K)
        key = self._split_heads(self.key(memory))  # (B, H, S, K)
        value = self._split_heads(self.value(memory))  # (B, H, S, K)
        dropout_probability = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        is_fused = x.is_cuda if self.is_fused is None else self.is_fused
        if is_fused and not return_weights:
            context = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout_probability
            )
        else:
            context, weights = scaled_dot_product_attention(
                query, key, value, mask, dropout_probability=dropout_probability
            )
        output: Tensor = self.output(context.transpose(1, 2).flatten(2))  # (B, T, D)
        return output, weights if return_weights else None

    def _split_heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, -1).transpose(1, 2)  # (B, H, T, K)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(T, T), True where a position may attend: to itself and to what stands before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
