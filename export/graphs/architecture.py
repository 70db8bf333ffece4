"""A Transformer as its graphs read it: the trained layers, and the options in which models differ.

The graphs of the paper's Transformer and of imported models (`export.huggingface`) are created from this one
record.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from seq2seq_serve.training.models.transformer import Transformer

# B batch rows   V vocabulary   D d_model   H heads   K d_head   T, S positions   C channels

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings (Su et al. 2021, arXiv:2104.09864, section 3.2), with halves for pairs.

    Attributes:
        base: Pair i of K / 2 turns by base^(-2 i / K) from one position to the next.
        factor: Divides all angles, which stretches positions (Chen et al. 2023, arXiv:2306.15595).
    """

    base: float
    factor: float = 1.0

    def angles(self, positions: Tensor, d_head: int) -> Tensor:
        """The angles (…, K / 2) at positions (…)."""
        exponents = torch.arange(0, d_head, 2, dtype=torch.int64).float() / d_head
        return positions[..., None].float() * (1.0 / self.base**exponents / self.factor)


@dataclass(frozen=True)
class LayerKind:
    """How the self-attention of one layer treats positions; layers of a stack may differ in it.

    Attributes:
        window: The largest distances of a key before and after its query; None for all positions.
        rotary: Rotates queries and keys; None does not.
    """

    window: tuple[int, int] | None = None
    rotary: Rotary | None = None

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether each query (…, T) sees each key (S,), as far as the window is concerned: (…, T, S)."""
        assert self.window is not None
        before, after = self.window
        distances = queries[..., None] - keys
        return (distances <= before) & (distances >= -after)


@dataclass(frozen=True)
class Stack:
    """The encoder or the decoder.

    Its layers have the names of `training.models.transformer`: `self_attention` and, in a decoder,
    `cross_attention` with the maps `query`, `key`, `value` and `output`; `feed_forward` with `inner`, `outer`
    and, if it is gated, `gate`; and a norm for each, such as `feed_forward_norm`. Every map may lack a bias.
    A norm is a `LayerNorm`, or an `RMSNorm`. A layer may also have norms of its sublayers' outputs, such as
    `feed_forward_output_norm`. An attention may have norms of its heads, `query_norm` and `key_norm`.

    Attributes:
        embedding: `(V, D)`; None for the encoder of a model that reads sounds or pictures.
        front: What makes embeddings of a sound or a picture; None for the other stacks.
        embedding_scale: The factor of embeddings.
        positions: `(positions, D)`, added to scaled embeddings; None adds nothing.
        embedding_norm: The norm of that sum; None without.
        final_norm: The last norm of a pre-norm stack; None in post-norm.
        num_key_value_heads: G, which divides H: H / G heads have the same keys and values (Ainslie et al.
            2023, arXiv:2305.13245).
        attention_scale: The factor of attention scores.
        kinds: How each layer treats positions.
        num_positions: The most positions that rotary embeddings need.
        score_cap: c; scores s become c tanh(s / c); None leaves them.
        activation: The feed-forward network's function.
        relative_bias: `(2 M + 1, H)`, added to self-attention scores, see `relative_bias`; None without.
        zero_position_id: A token to which no position is added; None if there is none.
        unscaled: A token and its embedding `(D,)`, which is not in the matrix and not scaled; None if there
            is none.
    """

    embedding: Tensor | None
    embedding_scale: float
    positions: Tensor | None
    embedding_norm: nn.Module | None
    layers: nn.ModuleList
    final_norm: nn.Module | None
    num_heads: int
    num_key_value_heads: int
    d_head: int
    attention_scale: float
    kinds: tuple[LayerKind, ...]
    num_positions: int
    score_cap: float | None = None
    activation: Activation = "relu"
    relative_bias: Tensor | None = None
    zero_position_id: int | None = None
    unscaled: tuple[int, Tensor] | None = None
    front: SoundFront | PatchFront | None = None

    @property
    def d_model(self) -> int:
        if self.embedding is not None:
            return self.embedding.shape[1]
        assert self.front is not None
        return self.front.last.out_features

    @property
    def is_rms(self) -> bool:
        """Whether the norms divide by the root mean square, and neither subtract nor add anything."""
        return isinstance(self.final_norm, nn.RMSNorm)

    @property
    def has_plain_attention(self) -> bool:
        """Whether self-attention is as in Vaswani et al. 2017, except for scale and bias of its scores."""
        is_grouped = self.num_key_value_heads != self.num_heads
        return not is_grouped and self.score_cap is None and set(self.kinds) == {LayerKind()}


@dataclass(frozen=True)
class SoundFront:
    """The maps of a spectrogram to the encoder's embeddings: two convolutions of three neighbouring frames.

    The second one has a stride of 2, and each is followed by a GELU. As linear maps of `neighbours`, they are
    quantised like all others.

    Attributes:
        num_bands: The bands of the spectrogram.
        num_frames: Its frames, twice as many as there are positions of memory.
    """

    num_bands: int
    num_frames: int
    first: nn.Linear
    last: nn.Linear


@dataclass(frozen=True)
class PatchFront:
    """The map of a picture's `patches` to the encoder's embeddings, after those of tokens without a place.

    (Dosovitskiy et al. 2021, arXiv:2010.11929, equation 1.)

    Attributes:
        size: The pixels of a side of the picture.
        mean: `(3,)`, subtracted from the pixels of each colour.
        deviation: `(3,)`, divides the result.
        tokens: `(positions, D)`, before the patches.
    """

    size: int
    patch_size: int
    mean: Tensor
    deviation: Tensor
    tokens: Tensor
    last: nn.Linear


@dataclass(frozen=True)
class Architecture:
    """A whole model.

    Attributes:
        output_weight: `(V, D)`, the projection to logits; it may be the decoder's embedding itself.
        output_bias: `(V,)`, added to logits; None without.
        output_scale: The factor of decoder states before the projection.
        suppressed_token_ids: Tokens that a step that selects the next token itself never selects.
        logits_cap: c; logits z become c tanh(z / c); None leaves them.
        is_merged: Whether the decoder's self-attention reads the memory, too, in one softmax. Its layers then
            have no `cross_attention`, and the memory has keys and values of `self_attention`.
    """

    encoder: Stack
    decoder: Stack
    output_weight: Tensor
    output_bias: Tensor | None = None
    output_scale: float = 1.0
    suppressed_token_ids: tuple[int, ...] = ()
    logits_cap: float | None = None
    is_merged: bool = False


def architecture_of(model: Transformer) -> Architecture:
    """The paper's Transformer."""
    config = model.config

    def stack(embedding: Tensor, layers: nn.ModuleList, final_norm: nn.Module) -> Stack:
        return Stack(
            embedding=embedding,
            embedding_scale=math.sqrt(config.d_model),
            positions=model.positions,
            embedding_norm=None,
            layers=layers,
            final_norm=final_norm if config.norm == "pre" else None,
            num_heads=config.num_heads,
            num_key_value_heads=config.num_heads,
            d_head=config.d_head,
            attention_scale=1 / math.sqrt(config.d_head),
            kinds=(LayerKind(),) * len(layers),
            num_positions=len(model.positions),
        )

    return Architecture(
        encoder=stack(model.source_weight, model.encoder_layers, model.encoder_norm),
        decoder=stack(model.embedding.weight, model.decoder_layers, model.decoder_norm),
        output_weight=model.output_weight,
    )


def neighbours(x: Tensor, stride: int) -> Tensor:
    """Every frame of `(B, T, C)`, or every second one, between its neighbours: `(B, T / stride, 3 C)`.

    Zeros stand for the neighbours of the first and the last frame.
    """
    T = x.shape[1]
    padded = nn.functional.pad(x, (0, 0, 1, 1))
    return torch.cat([padded[:, i : i + T : stride] for i in range(3)], dim=2)


def patches(pictures: Tensor, patch_size: int) -> Tensor:
    """The patches of pictures `(B, size, size, 3)`, row by row: `(B, places, 3 * patch_size ** 2)`."""
    B, num = pictures.shape[0], pictures.shape[1] // patch_size
    squares = pictures.view(B, num, patch_size, num, patch_size, 3).transpose(2, 3)
    return squares.reshape(B, num * num, -1)


def relative_bias(table: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The bias `(…, T, S, H)` of the scores between positions `(…, T)` and `(S,)`.

    Row M + d of the table `(2 M + 1, H)` is for a key d positions before its query; distances beyond M have
    the bias of M.
    """
    most = len(table) // 2
    distances = queries[..., None] - keys  # (…, T, S)
    return nn.functional.embedding(torch.clamp(distances + most, 0, 2 * most), table)
