"""Pictures as sources of published models: their kind, and samples for the proof of int8."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.errors import first_line
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.bundle.pictures import Pixels, Resampling, read_picture
from seq2seq_serve.training.data.media import Media
from seq2seq_serve.training.data.sources import Inputs
from seq2seq_serve.training.huggingface.checkpoint import CheckpointError
from seq2seq_serve.training.models.fronts import PatchMap

_LINES = (
    "INVOICE No. 2041",
    "the old stone bridge near the harbour",
    "12/03/1998",
    "She wrote the letter in a small room above the shop.",
)
_RESAMPLINGS: dict[int, Resampling] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_NEUTRAL = ((0.0,) * 3, (1.0,) * 3)
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Patches(Media):
    """Pictures of one size, cut into patches: `picture` (size, size, 3).

    Each patch is a position of memory, after those of `num_tokens` tokens.

    Attributes:
        mean: Subtracted from the pixels of red, green and blue, which are 0 to 255.
        deviation: Divides the result.
        resampling: How pictures are scaled to the size.
    """

    size: int
    patch_size: int
    num_tokens: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    resampling: Resampling

    forms: ClassVar[Mapping[str, Form]] = {names.PICTURE: Form.PICTURE}
    auto_class = "AutoModelForImageTextToText"

    @classmethod
    def of(cls, config: Mapping[str, Any], num_tokens: int, folder: Path) -> Patches:
        """The pictures of an encoder.

        Args:
            config: The encoder's part of `config.json`.
            num_tokens: The tokens before the patches.
            folder: The checkpoint, with the settings of its image processor.

        Raises:
            CheckpointError: A setting is not supported, or the image processor makes other numbers of a
                picture.
        """
        size, patch_size = _side(config, "image_size", 224), _side(config, "patch_size", 16)
        if size % patch_size:
            raise CheckpointError(f"image_size is {size}, and patches of {patch_size} do not divide it")
        if config.get("num_channels", 3) != 3:
            raise CheckpointError(f"num_channels is {config['num_channels']}, and 3 is supported")
        processor = _image_processor(folder)
        resampling = _RESAMPLINGS.get(processor.resample)
        if resampling is None:
            raise CheckpointError(
                f"{folder}: resample of the image processor is {processor.resample}; there are "
                + ", ".join(f"{number} ({name})" for number, name in _RESAMPLINGS.items())
            )
        normal = (processor.image_mean, processor.image_std) if processor.do_normalize else _NEUTRAL
        try:
            mean, deviation = (
                tuple(value / processor.rescale_factor for value in values) for values in normal
            )
        except (TypeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"{folder}: image_mean, image_std or rescale_factor of the image processor is not usable: "
                f"{error}"
            ) from error
        pictures = cls(size, patch_size, num_tokens, mean, deviation, resampling)
        if not pictures.equals(processor):
            raise CheckpointError(
                f"{folder}: {type(processor).__name__} computes other numbers than scaling a picture to "
                f"{size} × {size} pixels, subtracting a mean and dividing: other settings are not supported"
            )
        return pictures

    def equals(self, processor: Any) -> bool:
        """Whether an image processor of transformers makes the same numbers of a picture."""
        pixels = np.random.default_rng(0).integers(0, 256, (self.size // 2 + 3, self.size * 2, 3), np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "PNG")
        ours = self.normal(torch.tensor(read_picture(content.getvalue(), self.size, self.resampling)))
        try:
            theirs = processor(Image.fromarray(pixels), return_tensors="pt").pixel_values
        except Exception:  # settings that it cannot apply
            return False
        expected = ours.permute(2, 0, 1)[None]
        is_close = theirs.shape == expected.shape and torch.allclose(theirs, expected, atol=_TOLERANCE)
        return bool(is_close and expected.isfinite().all())

    @property
    def num_positions(self) -> int:
        return (self.size // self.patch_size) ** 2 + self.num_tokens

    @property
    def window(self) -> tuple[int, ...]:
        return self.patch_size, self.patch_size

    def normal(self, pixels: Tensor) -> Tensor:
        """Pixels (…, 3) as the encoder's first map reads them, in float32."""
        return (pixels - torch.tensor(self.mean)) / torch.tensor(self.deviation)

    def _read(self, file: Path) -> Inputs:
        return {names.PICTURE: read_picture(file.read_bytes(), self.size, self.resampling)}

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:  # noqa: ARG002
        return {names.PICTURE: rng.integers(0, 256, (self.size, self.size, 3), np.uint8)}

    def make_front(self, d_model: int) -> PatchMap:
        return PatchMap(self.size, self.patch_size, self.num_tokens, self.mean, self.deviation, d_model)

    def arguments(self, source: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": self.normal(source).permute(0, 3, 1, 2)}

    def make(self) -> list[Inputs]:
        """Lines of print and of script-like slant, dark on light, with noise and some blur."""
        chance = np.random.default_rng(0)
        return [{names.PICTURE: self._line(text, chance)} for text in _LINES]

    def _line(self, text: str, chance: np.random.Generator) -> Pixels:
        font = ImageFont.load_default(size=48)
        left, top, right, bottom = font.getbbox(text)
        margin = int(chance.integers(4, 24))
        paper, ink = int(chance.integers(190, 256)), int(chance.integers(0, 90))
        line = Image.new("L", (int(right - left) + 2 * margin, int(bottom - top) + 2 * margin), paper)
        ImageDraw.Draw(line).text((margin - left, margin - top), text, ink, font)
        slant = (1, chance.uniform(-0.3, 0.3), 0, 0, 1, 0)
        line = line.transform(line.size, Image.Transform.AFFINE, slant, fillcolor=paper)
        line = line.filter(ImageFilter.GaussianBlur(chance.uniform(0, 1.5)))
        scaled = line.convert("RGB").resize((self.size,) * 2, Image.Resampling[self.resampling.upper()])
        noise = chance.uniform(0, 12) * chance.standard_normal((self.size, self.size, 3))
        return np.clip(np.asarray(scaled) + noise, 0, 255).astype(np.uint8)


def _image_processor(folder: Path) -> Any:
    """That of a checkpoint, which scales with Pillow, as `bundle.pictures` does."""
    from transformers import AutoImageProcessor  # takes seconds

    try:
        return AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of many classes
        problem = "its image processor cannot be read"
        raise CheckpointError(f"{folder}: {problem}: {first_line(error)}") from error


def _side(config: Mapping[str, Any], name: str, default: int) -> int:
    """The pixels of a side; CheckpointError if the sides differ."""
    value = config.get(name, default)
    sides = value if isinstance(value, list) else [value]
    if not all(type(side) is int and side > 0 for side in sides) or len(set(sides)) != 1:
        raise CheckpointError(f"{name} of the encoder is {value}, and must be the side of a square")
    return int(sides[0])
