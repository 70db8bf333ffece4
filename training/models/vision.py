"""The encoders of pictures, clips and features: each returns annotations, a vector per place or frame.

An annotation is a_i = norm(f_i) + P p_i: the features f_i of place i, layer-normalised, and a code p_i of the
place, by which attention can tell left from right and first from last. `Annotations` adds the codes; the
other modules compute the features. No module mixes the rows of a batch, and padding frames do not change the
other frames.

Shapes: B batch rows, M annotations, A d_annotation, X pixels per side, F frames, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

STRIDE = 4
"""The pixels per side of a picture's place."""

_FREQUENCIES = 16  # per coordinate; each has a sine and a cosine
_LONGEST_PERIOD = 400.0


class PictureFeatures(nn.Module):
    """A convolutional network over pictures: (B, X, X, 3) uint8 to (B, (X / 4)^2, A), row after row.

    A place sees 32 x 32 pixels around its own 4 x 4.
    """

    def __init__(self, d_annotation: int, num_channels: int) -> None:
        super().__init__()
        C = num_channels
        self.first = nn.Conv2d(3, C, 4, stride=2, padding=1)
        self.second = nn.Conv2d(C, 2 * C, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(2 * C, 2 * C, 3, padding=1) for _ in range(3))
        self.project = nn.Linear(2 * C, d_annotation)

    def forward(self, picture: Tensor) -> Tensor:
        x = scaled(picture).permute(0, 3, 1, 2)  # (B, 3, X, X), channels last in memory
        x = self.second(self.first(x).relu()).relu()  # (B, 2 C, X / 4, X / 4)
        for block in self.blocks:
            x = x + block(x).relu()
        features: Tensor = self.project(x.flatten(2).transpose(1, 2))
        return features


class ClipFeatures(nn.Module):
    """A convolutional network over the frames of clips: (B, F, X, X, 3) uint8 to (B, F, A).

    The last map of a frame is flattened and projected as a whole, so that its annotation says where things
    are. With `is_local` the network is three-dimensional: a frame also sees two frames before and after
    itself (the spatio-temporal features of Yao et al. 2015, section 3.1). Frames outside the clip are zeros.
    """

    def __init__(self, size: int, d_annotation: int, num_channels: int, is_local: bool) -> None:
        super().__init__()
        C = num_channels
        window = 3 if is_local else 1

        def strided(d_input: int, d_output: int) -> nn.Conv3d:
            return nn.Conv3d(d_input, d_output, (window, 3, 3), (1, 2, 2), (window // 2, 1, 1))

        self.first = nn.Conv3d(3, C, (1, 4, 4), (1, 2, 2), (0, 1, 1))
        self.second, self.third = strided(C, 2 * C), strided(2 * C, 2 * C)
        self.project = nn.Linear(math.ceil(size / 8) ** 2 * 2 * C, d_annotation)

    def forward(self, clip: Tensor, mask: Tensor) -> Tensor:
        is_frame = mask[:, None, :, None, None]  # (B, 1, F, 1, 1)
        x = scaled(clip).permute(0, 4, 1, 2, 3)  # (B, 3, F, X, X)
        x = self.first(x).relu() * is_frame
        x = self.second(x).relu() * is_frame
        x = self.third(x).relu()  # (B, 2 C, F, X / 8, X / 8)
        features: Tensor = self.project(x.transpose(1, 2).flatten(2))
        return features


class Annotations(nn.Module):
    """Turns features (B, M, A) into annotations (B, M, A).

    Attributes:
        codes: p (places, width); a clip's or a feature map's first M places are used.
    """

    codes: Tensor

    def __init__(self, codes: Tensor, d_annotation: int) -> None:
        super().__init__()
        self.register_buffer("codes", codes, persistent=False)
        self.norm = nn.LayerNorm(d_annotation)
        self.place = nn.Linear(codes.shape[1], d_annotation, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        annotations: Tensor = self.norm(features) + self.place(self.codes[: features.shape[1]])
        return annotations


def scaled(pixels: Tensor) -> Tensor:
    """uint8 pixels as numbers from -1 to 1; the network sees them as zeros where it pads."""
    return pixels.float() / 127.5 - 1


def line_codes(length: int) -> Tensor:
    """Codes (length, 32) of places in a line: sines and cosines with periods from 2 pi to 400 places."""
    ratio = _LONGEST_PERIOD / (2 * math.pi)
    rates = ratio ** -(torch.arange(_FREQUENCIES) / (_FREQUENCIES - 1))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def grid_codes(side: int) -> Tensor:
    """Codes (side^2, 64) of places in a square, row after row: the code of the row, and of the column."""
    line = line_codes(side)
    rows, columns = line.repeat_interleave(side, dim=0), line.repeat(side, 1)
    return torch.cat([rows, columns], dim=1)
