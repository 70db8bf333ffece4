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

from seq2seq_serve.training.data.sources import STRIDE

_FREQUENCIES = 16  # per coordinate; each has a sine and a cosine
_LONGEST_PERIOD = 400.0
_TINY = 1e-6  # the square root has a gradient at 0
_HEADS = 4  # each sums up one part of a frame
_FAINT = 0.5  # added to the divisor, so that noise (up to 6 of 255 levels) is not amplified


class PictureFeatures(nn.Module):
    """A convolutional network over pictures: (B, X, X, 3) uint8 to (B, (X / 4)^2, A), row after row.

    Two paths meet only at the end. The colours of a place are those of its own 4 x 4 pixels. Its forms come
    from 40 x 40 pixels around it, through `Contours`, which do not know colours. In one path, the network
    learns forms of each colour by themselves: of pictures with a colour and a shape that training never had
    together, a captioner named no shape right.
    """

    def __init__(self, d_annotation: int, num_channels: int) -> None:
        super().__init__()
        C = num_channels
        self.colours = _colours(C)
        self.contours = Contours(C // 2)
        self.second = nn.Conv2d(C // 2, 2 * C, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(2 * C, 2 * C, 3, padding=1) for _ in range(3))
        self.project = nn.Linear(3 * C, d_annotation)

    def forward(self, picture: Tensor) -> Tensor:
        pixels = scaled(picture).permute(0, 3, 1, 2)  # (B, 3, X, X), channels last in memory
        x = self.second(self.contours(pixels)).relu()  # (B, 2 C, X / 4, X / 4)
        for block in self.blocks:
            x = x + block(x).relu()
        x = torch.cat([self.colours(pixels), x], dim=1)  # (B, 3 C, X / 4, X / 4)
        features: Tensor = self.project(_places(x))
        return features


class Contours(nn.Module):
    """How pixels differ from their neighbours, whatever their colours: (B, 3, X, X) to (B, C, X / 2, X / 2).

    Each filter looks for a pattern of contrast in red, green and blue alike. Its answer is the length of the
    three, divided by the mean answer of all filters around the place, so that faint contours count as much
    as strong ones (Jarrett et al. 2009, "What is the best multi-stage architecture", section 2.1).
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.filters = nn.Conv2d(1, num_channels, 4, stride=2, padding=1, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        B, _, X, _ = pixels.shape
        weight = self.filters.weight
        weight = weight - weight.mean(dim=(2, 3), keepdim=True)  # blind to even surfaces
        answers = nn.functional.conv2d(pixels.reshape(B * 3, 1, X, X), weight, stride=2, padding=1)
        squares = answers.view(B, 3, -1, X // 2, X // 2).square()
        energy = squares.sum(dim=1).add(_TINY).sqrt()  # (B, C, X / 2, X / 2)
        around = nn.functional.avg_pool2d(energy.mean(dim=1, keepdim=True), 5, stride=1, padding=2)
        return energy / (around + _FAINT)


class ClipFeatures(nn.Module):
    """A convolutional network over the frames of clips: (B, F, X, X, 3) uint8 to (B, F, A).

    Colours and forms have paths of their own, as in `PictureFeatures`. With `is_local` a third path is
    three-dimensional: it sees how contours changed in the last two frames (the spatio-temporal features of
    Yao et al. 2015, section 3.1). Then four heads look at the frame, each with weights over its places that
    sum to 1. A frame's features are the weighted means of the paths' features and of coordinates; the means
    of coordinates alone are the "spatial softmax" of Finn et al. 2016, arXiv:1509.06113, section III.

    With `is_local` the weights depend on motion alone. So a frame has the colour, the form and the place of
    the moving figure, and a frame without motion has means over all places. If the weights depended on all
    features, a frame without motion would also show which colour has which form, and the decoder would read
    the form there, outside the event. For the same reason, no path sees a later frame.

    Attributes:
        motion: None without `is_local`.
        scores: Projects motion, or all features of a place, to the logit of each head's weight.
        grid: The coordinates y and x of each place, (places, 2), from -1 to 1.
    """

    grid: Tensor

    def __init__(self, size: int, d_annotation: int, num_channels: int, is_local: bool) -> None:
        super().__init__()
        C = num_channels
        self.colours = _colours(C)
        self.contours = Contours(C // 2)
        self.second = nn.Conv2d(C // 2, 2 * C, 3, stride=2, padding=1)
        self.third = nn.Conv2d(2 * C, 2 * C, 3, padding=1)
        self.motion = nn.Conv3d(C // 2, 2 * C, (2, 3, 3), (1, 2, 2), (0, 1, 1)) if is_local else None
        self.scores = nn.Linear(2 * C if is_local else 3 * C, _HEADS)
        line = torch.linspace(-1, 1, size // STRIDE)
        self.register_buffer("grid", torch.cartesian_prod(line, line), persistent=False)
        self.project = nn.Linear(_HEADS * ((5 if is_local else 3) * C + 2), d_annotation)

    def forward(self, clip: Tensor) -> Tensor:
        shape = clip.shape[:2]
        pixels = scaled(clip.flatten(0, 1)).permute(0, 3, 1, 2)  # (B F, 3, X, X)
        contours = self.contours(pixels)  # (B F, C / 2, X / 2, X / 2)
        forms = self.second(contours).relu()  # (B F, 2 C, X / 4, X / 4)
        forms = forms + self.third(forms).relu()
        features = looked_at = torch.cat([self.colours(pixels), forms], dim=1)
        if self.motion is not None:
            frames = contours.unflatten(0, shape).transpose(1, 2)  # (B, C / 2, F, X / 2, X / 2)
            still = torch.zeros_like(frames[:, :, :1])  # nothing moves before the second frame
            changes = torch.cat([still, still, frames[:, :, 1:] - frames[:, :, :-1]], dim=2)
            looked_at = self.motion(changes).relu().transpose(1, 2).flatten(0, 1)  # (B F, 2 C, X / 4, X / 4)
            features = torch.cat([features, looked_at], dim=1)
        weights = self.scores(_places(looked_at)).softmax(dim=1).transpose(1, 2)  # (B F, heads, places)
        means = torch.cat([weights @ _places(features), weights @ self.grid], dim=2)
        result: Tensor = self.project(means.flatten(1)).unflatten(0, shape)
        return result


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


def _colours(num_channels: int) -> nn.Sequential:
    """The colours of each place's own 4 x 4 pixels: (B, 3, X, X) to (B, C, X / 4, X / 4)."""
    C = num_channels
    return nn.Sequential(
        nn.Conv2d(3, C, 2, stride=2), nn.ReLU(), nn.Conv2d(C, C, 1), nn.ReLU(), nn.MaxPool2d(2)
    )


def _places(features: Tensor) -> Tensor:
    """(B, C, X, X) as (B, places, C), row after row."""
    return features.flatten(2).transpose(1, 2)


def scaled(pixels: Tensor) -> Tensor:
    """uint8 pixels as numbers from -1 to 1; the network sees them as zeros where it pads."""
    return pixels / 127.5 - 1


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
