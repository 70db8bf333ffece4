"""The attention functions and their modules; nothing here knows the layers around them.

Every function scores each query against each key, and sums the values weighted by the softmax of the scores.
The functions differ in the score:

    additive              e = v^T tanh(W s + U h)     Bahdanau et al. 2015
    dot                   e = s^T h                   Luong et al. 2015
    scaled dot-product    e = q^T k / sqrt(d_k)       Vaswani et al. 2017

Shapes: B batch rows, T query positions, S key positions, D d_model, H heads, K d_head, E width of recurrent
states.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from seq2seq_serve.training.models.dropout import dropout
from seq2seq_serve.training.models.options import StackConfig


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_probability: float = 0.0,
    *,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k)) V: Vaswani et al. 2017, equation 1, arXiv:1706.03762.

    Args:
        query: (..., T, K).
        key: (..., S, K).
        value: (..., S, any width).
        mask: Broadcast to (..., T, S); True = may attend.
        scale: The factor of the scores; None is the paper's 1 / sqrt(K).
        dropout_probability: Dropout of the weights before the sum; the returned weights are without dropout.
        bias: Added to the scores, broadcast to (..., T, S); None adds nothing.
        cap: c; scores s become c tanh(s / c) before the bias; None leaves them.

    Returns:
        The context, (..., T, width of value), and the weights, (..., T, S).
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale  # (..., T, S)
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if bias is not None:
        scores = scores + bias
    weights = _softmax(scores, mask)
    return dropout(weights, dropout_probability) @ value, weights


def dot_attention(query: Tensor, memory: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """c_t = sum_j a_tj h_j, a_t = softmax_j(s_t^T h_j): Luong et al. 2015, section 3.1, arXiv:1508.04025.

    The query is the decoder's states s, (..., T, E), the memory the encoder's states h, (..., S, E). Returns
    the context c, (..., T, E), and the weights a, (..., T, S).
    """
    return scaled_dot_product_attention(query, memory, memory, mask, scale=1.0)


AttentionFunction = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]

FUNCTIONS: dict[str, AttentionFunction] = {"dot": dot_attention}
"""The attention functions without parameters that a recurrent model can have, by their names in its config.

Each takes the decoder's states (..., T, E), the encoder's states (..., S, E) and the mask, as `dot_attention`
does. Training, search and the exported graphs call it.
"""


def additive_attention(
    query: Tensor, keys: Tensor, values: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """c_t = sum_j a_tj h_j, a_t = softmax_j(e_tj), e_tj = v^T tanh(W s_t + U h_j).

    Bahdanau et al. 2015, appendix A.1.2, arXiv:1409.0473. U h_j does not depend on t, so the caller computes
    it once per source.

    Args:
        query: W s, (..., T, any width).
        keys: U h, (..., S, the same width).
        values: h, (..., S, any width).
        v: (the same width,).
        mask: Broadcast to (..., T, S); True = may attend.

    Returns:
        The context c, (..., T, width of values), and the weights a, (..., T, S).
    """
    hidden = (query.unsqueeze(-2) + keys.unsqueeze(-3)).tanh()  # (..., T, S, width)
    # The product hidden @ v, in the order that ONNX Runtime computes three times as fast.
    scores = functional.linear(v[None], hidden.flatten(end_dim=-2)).view(hidden.shape[:-1])
    weights = _softmax(scores, mask)  # (..., T, S)
    return weights @ values, weights


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Weights (..., T, S) that sum to 1 over the positions that may be attended to."""
    if mask is not None:
        scores = scores.masked_fill(~mask, _lowest(scores.dtype))
    return scores.softmax(dim=-1)


def _lowest(dtype: torch.dtype) -> float:
    """A score whose exponential is 0. It is finite, because padding may see no position at all."""
    return torch.finfo(dtype).min


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Vaswani et al. 2017, section 3.2.2, arXiv:1706.03762. One `nn.Linear` holds the matrices of all heads side
    by side: head h has the outputs h*K to (h+1)*K. Unlike the paper's, they have biases. `dropout` is that of
    the weights in training.

    Args:
        d_model: The width of the states that attend.
        num_heads: H.
        dropout: See above.
        stack: Options of published models, such as G heads of keys and values; None is the paper's attention,
            in which G is H.
        d_memory: The width of the states that are attended to; None is `d_model`.

    Attributes:
        is_fused: Whether torch's fused operator computes calls without `return_weights`; None does so on a
            GPU. On a CPU the operator takes several times as long as the definition with oneDNN
            (`fast_matmul`).
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        dropout: float = 0.0,
        *,
        stack: StackConfig | None = None,
        d_memory: int | None = None,
    ) -> None:
        super().__init__()
        stack = stack or StackConfig.of_paper(d_model, num_heads)
        K, G = stack.d_head, stack.num_key_value_heads
        self.d_head, self.num_sharing = K, num_heads // G
        self.scale, self.cap = stack.attention_scale, stack.score_cap
        self.dropout = dropout
        self.is_fused: bool | None = None
        d_memory = d_memory or d_model

        def linear(name: str, d_input: int, d_output: int) -> nn.Linear:
            return nn.Linear(d_input, d_output, bias=name not in stack.unbiased)

        self.query = linear("query", d_model, num_heads * K)  # W^Q
        self.key = linear("key", d_memory, G * K)  # W^K
        is_rotated = any(kind.rotary is not None for kind in stack.layer_kinds)
        if self.key.bias is not None and not (is_rotated or stack.has_head_norms or stack.score_cap):
            # This bias adds the same to all scores of a query, which softmax cancels. Its gradient is only
            # rounding error, which Adam would turn into full steps.
            self.key.bias.requires_grad_(False)
        self.value = linear("value", d_memory, G * K)  # W^V
        self.output = linear("output", num_heads * K, d_model)  # W^O
        self.query_norm = stack.make_norm(K, exists=stack.has_head_norms)
        self.key_norm = stack.make_norm(K, exists=stack.has_head_norms)

    def forward(
        self, x: Tensor, memory: Tensor, mask: Tensor | None, return_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `x` (B, T, D) over `memory` (B, S, D), which is `x` itself in self-attention.

        The mask is broadcast to (B, H, T, S); True = may attend. Returns the output (B, T, D), and the
        weights (B, H, T, S) or None.
        """
        return self.attend(self.queries(x), *self.keys_and_values(memory), mask, None, return_weights)

    def queries(self, x: Tensor, angles: Tensor | None = None) -> Tensor:
        """The queries (B, H, T, K) of `x` (B, T, D), rotated by angles (T, K / 2)."""
        return rotated(self.query_norm(self._split_heads(self.query(x))), angles)

    def keys_and_values(self, memory: Tensor, angles: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The keys and the values of the memory (B, S, D), each (B, G, S, K).

        Keys are rotated by angles (S, K / 2).
        """
        key = self.key_norm(self._split_heads(self.key(memory)))
        return rotated(key, angles), self._split_heads(self.value(memory))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The rest of `forward` after its three projections; the bias (H, T, S) is added to the scores."""
        dropout_probability = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if self.num_sharing > 1:
            key, value = (each.repeat_interleave(self.num_sharing, dim=1) for each in (key, value))
        is_fused = query.is_cuda if self.is_fused is None else self.is_fused
        if is_fused and not return_weights and self.cap is None:
            if bias is not None:
                bias = bias.to(query.dtype)
                mask = bias if mask is None else torch.where(mask, bias, _lowest(bias.dtype))
            context = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout_probability, scale=self.scale
            )
        else:
            context, weights = scaled_dot_product_attention(
                query, key, value, mask, self.scale, dropout_probability, bias=bias, cap=self.cap
            )
        output: Tensor = self.output(context.transpose(1, 2).flatten(2))  # (B, T, D)
        return output, weights if return_weights else None

    def _split_heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, -1, self.d_head).transpose(1, 2)  # (B, H, T, K)


def rotated(x: Tensor, angles: Tensor | None) -> Tensor:
    """(B, H, T, K) whose vectors are rotated, each pair of halves by one angle of (T, K / 2)."""
    if angles is None:
        return x
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


class AdditiveAttention(nn.Module):
    """`additive_attention` with its parameters: W is `query`, U is `key` and v is `gain` times `score`.

    Unlike the paper's, the hidden layer has a bias, that of `key`.

    Args:
        d_query: The width of the states that attend.
        d_memory: The width of the memory; None is `d_query`.
        d_attention: The width of the hidden layer; None is `d_query`.
        gain: v starts the same with any gain. With a large one Adam, whose steps do not depend on the scale
            of a parameter, changes v faster, so that attention becomes sharp sooner.
    """

    def __init__(
        self, d_query: int, d_memory: int | None = None, d_attention: int | None = None, gain: float = 1.0
    ) -> None:
        super().__init__()
        width = d_attention or d_query
        self.query = nn.Linear(d_query, width, bias=False)
        self.key = nn.Linear(d_memory or d_query, width)
        self.gain = gain
        self.score = nn.Parameter(torch.empty(width).uniform_(-(width**-0.5), width**-0.5) / gain)

    @property
    def v(self) -> Tensor:
        return self.gain * self.score

    def forward(self, x: Tensor, keys: Tensor, memory: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from `x` (B, T, d_query) over the memory (B, S, d_memory), whose keys are `key(memory)`.

        Returns the context (B, T, d_memory), and the weights (B, T, S).
        """
        return additive_attention(self.query(x), keys, memory, self.v, mask)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """(T, T), True where a row's position may attend: to itself and to the positions before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()
