"""What turns a sound or a picture into the embeddings of a Transformer's encoder.

Convolutions are linear maps of `neighbours` or `patches`, so that a graph quantises them like all others.

Shapes: B batch rows, T frames, S positions, C channels, D d_model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def neighbours(x: Tensor, stride: int) -> Tensor:
    """Every frame of (B, T, C), or every second one, between its neighbours: (B, T / stride, 3 C).

    Zeros stand for the neighbours of the first and the last frame.
    """
    T = x.shape[1]
    padded = nn.functional.pad(x, (0, 0, 1, 1))
    return torch.cat([padded[:, i : i + T : stride] for i in range(3)], dim=2)


def patches(pictures: Tensor, patch_size: int) -> Tensor:
    """The patches of pictures (B, size, size, 3), row by row: (B, places, 3 * patch_size ** 2)."""
    B, num = pictures.shape[0], pictures.shape[1] // patch_size
    squares = pictures.view(B, num, patch_size, num, patch_size, 3).transpose(2, 3)
    return squares.reshape(B, num * num, -1)


class SoundMaps(nn.Module):
    """Whisper's two convolutions over a spectrogram, each over three neighbouring frames, each with a GELU.

    The second one has a stride of 2 (Radford et al. 2022, arXiv:2212.04356, section 2.2).

    Attributes:
        num_bands: The bands of the spectrogram.
        num_frames: Its frames, twice as many as there are positions of memory.
    """

    def __init__(self, num_bands: int, num_frames: int, d_model: int) -> None:
        super().__init__()
        self.num_bands, self.num_frames = num_bands, num_frames
        self.first = nn.Linear(3 * num_bands, d_model)
        self.last = nn.Linear(3 * d_model, d_model)

    def forward(self, sound: Tensor) -> Tensor:
        """(B, bands, frames) to (B, frames / 2, D)."""
        x = nn.functional.gelu(self.first(neighbours(sound.transpose(1, 2), stride=1)))
        result: Tensor = nn.functional.gelu(self.last(neighbours(x, stride=2)))
        return result


class PatchMap(nn.Module):
    """The map of a picture's patches, after the embeddings of tokens without a place.

    Dosovitskiy et al. 2021, arXiv:2010.11929, equation 1.

    Attributes:
        size: The pixels of a side of the picture.
        mean: Subtracted from the pixels of red, green and blue.
        deviation: Divides the result.
        class_token: (1, 1, D), of all encoders of pictures.
        distillation_token: (1, 1, D), of DeiT (Touvron et al. 2021, arXiv:2012.12877); None for ViT.
    """

    def __init__(
        self,
        size: int,
        patch_size: int,
        num_tokens: int,
        mean: tuple[float, ...],
        deviation: tuple[float, ...],
        d_model: int,
    ) -> None:
        super().__init__()
        self.size, self.patch_size = size, patch_size
        self.mean, self.deviation = mean, deviation
        self.class_token = nn.Parameter(torch.zeros(1, 1, d_model))
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, d_model)) if num_tokens > 1 else None
        self.last = nn.Linear(3 * patch_size**2, d_model)

    @property
    def tokens(self) -> Tensor:
        """(tokens, D)."""
        both = [self.class_token, self.distillation_token]
        return torch.cat([token[0] for token in both if token is not None])

    def forward(self, pictures: Tensor) -> Tensor:
        """(B, size, size, 3) to (B, S, D)."""
        mean, deviation = (torch.tensor(one, device=pictures.device) for one in (self.mean, self.deviation))
        x = self.last(patches((pictures - mean) / deviation, self.patch_size))
        return torch.cat([self.tokens.expand(len(x), -1, -1), x], dim=1)
