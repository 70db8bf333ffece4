"""Layouts of a batch of sources: which of its places are rows of the matrix that an encoder's maps read.

Only attention and the memory need to know the batch row and the position of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from seq2seq_serve.export.graphs import operators

# B batch rows   S source length   N rows of the matrix   W width   H heads   G heads of keys and values
# K d_head   L layers   C memory capacity


class Layout(Protocol):
    """The places `(B, S)` of a batch as rows of a matrix `(N, W)`."""

    @property
    def lengths(self) -> Tensor | None:
        """The positions of each batch row `(B,)`; None if every one has S."""

    def tokens(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Selects the ids `(…)` to embed, and their vectors `(…, W)` of a table `(positions, W)`."""

    def places(self, rows: Tensor, num_parts: int = 1) -> Sequence[Tensor]:
        """The parts of `(N, parts · W)`, each as `(B, S, W)`. Padding may have any finite values."""

    def rows(self, places: Tensor) -> Tensor:
        """The rows `(N, W)` of `(B, S, W)`."""

    def spread(self, batch: Tensor) -> Tensor:
        """The numbers `(N,)` of the rows, from those of their batch rows `(B,)`."""

    def attend(self, packed: Tensor, bias: Tensor | None, *, num_heads: int, scale: float) -> Tensor:
        """The attention `(N, HK)` within each batch row, of queries, keys and values `(N, 3HK)`.

        A bias `(1, H, S, S)` is added to the scores, whose factor is `scale`.
        """

    def heads(self, rows: Tensor, sizes: tuple[int, int, int]) -> Sequence[Tensor]:
        """The 2L keys and values, `(…, K)` each, of `(N, 2L · GK)`; the sizes are 2L, G, K."""

    def write(self, buffers: Sequence[Tensor], heads: Sequence[Tensor]) -> list[Tensor]:
        """Write keys and values of `heads` into the buffers `(B, G, C, K)`, in place."""


class PaddedLayout:
    """Every place is a row, padding included.

    Args:
        shape: B and S.
        lengths: `(B,)` int32; None if every batch row has S positions.
    """

    def __init__(self, shape: tuple[int, int], lengths: Tensor | None) -> None:
        self.shape, self.lengths = shape, lengths

    def tokens(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return ids, None if positions is None else positions[: self.shape[1]]

    def places(self, rows: Tensor, num_parts: int = 1) -> Sequence[Tensor]:
        return rows.reshape(*self.shape, rows.shape[1]).chunk(num_parts, dim=2)

    def rows(self, places: Tensor) -> Tensor:
        return places.reshape(-1, places.shape[2])

    def spread(self, batch: Tensor) -> Tensor:
        return batch.unsqueeze(1).expand(self.shape).reshape(-1)

    def attend(self, packed: Tensor, bias: Tensor | None, *, num_heads: int, scale: float) -> Tensor:
        query, key, value = self.places(packed, 3)
        attended = operators.multi_head_attention(
            query, key, value, self.lengths, num_heads=num_heads, scale=scale, bias=bias
        )
        return self.rows(attended)

    def heads(self, rows: Tensor, sizes: tuple[int, int, int]) -> Sequence[Tensor]:
        return rows.view(*self.shape, *sizes).permute(2, 0, 3, 1, 4).unbind()  # (B, G, S, K) each

    def write(self, buffers: Sequence[Tensor], heads: Sequence[Tensor]) -> list[Tensor]:
        return [operators.write_prefix(buffer, x) for buffer, x in zip(buffers, heads, strict=True)]

    def last(self, rows: Tensor) -> Tensor:
        """The row of the last position of each batch row, `(B, 1, W)`."""
        [places] = self.places(rows)
        if self.lengths is None:
            return places[:, -1:]
        position = self.lengths.to(torch.int64) - 1
        return places.gather(1, position.view(-1, 1, 1).expand(-1, 1, rows.shape[1]))


class PackedLayout:
    """Only tokens are rows, so padding is computed in attention alone.

    The graph computes their number. On CUDA, ONNX Runtime would wait for it to reach the host.

    Args:
        lengths: `(B,)` int32.
    """

    def __init__(self, source_length: int, lengths: Tensor) -> None:
        self.lengths = lengths.to(torch.int64)
        positions, counts = torch.arange(source_length), self.lengths.unsqueeze(1)
        self._indices = (positions < counts).nonzero()  # (N, 2): batch row and position of each token
        ends = counts.cumsum(dim=0)  # (B, 1)
        # The row of each place `(B, S)`. Padding repeats the last token of its batch row.
        self._row_numbers = torch.minimum(ends - counts + positions, ends - 1)

    def tokens(self, ids: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if positions is not None:
            positions = nn.functional.embedding(self._indices[:, 1], positions)
        return self.rows(ids), positions

    def places(self, rows: Tensor, num_parts: int = 1) -> Sequence[Tensor]:
        parts, first = rows.view(-1, rows.shape[1] // num_parts), self._row_numbers * num_parts
        return [nn.functional.embedding(first + i, parts) for i in range(num_parts)]

    def rows(self, places: Tensor) -> Tensor:
        return operators.gather(places, self._indices)

    def spread(self, batch: Tensor) -> Tensor:
        return nn.functional.embedding(self._indices[:, 0], batch.unsqueeze(1)).squeeze(1)

    def attend(self, packed: Tensor, bias: Tensor | None, *, num_heads: int, scale: float) -> Tensor:
        if bias is None and operators.takes(packed.shape[1] // (3 * num_heads)):
            return operators.source_attention(
                packed, self.lengths, self._row_numbers, self._indices, num_heads=num_heads, scale=scale
            )
        query, key, value = self.places(packed, 3)
        attended = operators.attention(
            query, key, value, self.lengths, num_heads=num_heads, scale=scale, bias=bias
        )
        return self.rows(attended)

    def heads(self, rows: Tensor, sizes: tuple[int, int, int]) -> Sequence[Tensor]:
        return rows.view(-1, *sizes).chunk(sizes[0], dim=1)  # (N, 1, G, K) each

    def write(self, buffers: Sequence[Tensor], heads: Sequence[Tensor]) -> list[Tensor]:
        G = buffers[0].shape[1]
        token = self._indices.index_select(1, torch.tensor([0, 0, 1])) * torch.tensor([1, 0, 1])  # (N, 3)
        head = torch.arange(G).unsqueeze(1) * torch.tensor([0, 1, 0])  # (G, 3)
        indices = token[:, None, None] + head  # (N, 1, G, 3)
        return [operators.scatter(buffer, indices, x) for buffer, x in zip(buffers, heads, strict=True)]
