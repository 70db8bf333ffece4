"""Pictures as sources of imported models: their kind, and those by which int8 is calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import LengthRule
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.bundle.pictures import Resampling, read_picture
from seq2seq_serve.export.huggingface.checkpoint import CheckpointError
from seq2seq_serve.export.huggingface.media import Media
from seq2seq_serve.training.data.sources import Inputs, Numbers

_LINES = (
    "INVOICE No. 2041",
    "Please return the signed form by Friday.",
    "Total: 1,284.50 EUR",
    "the old stone bridge near the harbour",
    "Mr. J. Kowalski, 17 Mill Lane",
    "12/03/1998",
    "She wrote the letter in a small room above the shop.",
    "TEL 0049 30 5550 184",
)
_RESAMPLINGS: tuple[Resampling, ...] = ("nearest", "lanczos", "bilinear", "bicubic")  # by Pillow's numbers


@dataclass(frozen=True)
class Patches(Media):
    """Pictures of one size, cut into squares: `picture` (size, size, 3).

    Encoded, a picture is its pixels. Each square is a position of memory, after those of `num_tokens` tokens.

    Attributes:
        mean: Subtracted from the pixels of red, green and blue, which are 0 to 255.
        deviation: By which they are then divided.
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
    def of(cls, config: Mapping[str, Any], settings: Mapping[str, Any], num_tokens: int) -> Patches:
        """The pictures of an encoder.

        Args:
            config: The encoder's part of `config.json`.
            settings: Those of the image processor; a setting that is missing has the default of ViT.
            num_tokens: The tokens before the squares.

        Raises:
            CheckpointError: A setting is not supported.
        """
        size, patch_size = (
            _side(config.get(name, default), f"the encoder's {name}")
            for name, default in (("image_size", 224), ("patch_size", 16))
        )
        if not patch_size or size % patch_size:
            raise CheckpointError(
                f"image_size is {size}, and squares of patch_size {patch_size} do not divide it"
            )
        crop = settings.get("crop_size", size) if settings.get("do_center_crop") else size
        expected = {
            "the encoder's num_channels": (config.get("num_channels", 3), 3),
            "the image processor's size": (
                _side(settings.get("size", size), "the image processor's size"),
                size,
            ),
            "the image processor's crop_size": (_side(crop, "the image processor's crop_size"), size),
            "the image processor's do_resize": (settings.get("do_resize", True), True),
            "the image processor's do_rescale": (settings.get("do_rescale", True), True),
        }
        for what, (given, supported) in expected.items():
            if given != supported:
                raise CheckpointError(f"{what} is {given}, and {supported} is supported")
        resampling = settings.get("resample", _RESAMPLINGS.index("bilinear"))
        if resampling not in range(len(_RESAMPLINGS)):
            raise CheckpointError(
                f"the image processor's resample is {resampling}; there are "
                + ", ".join(f"{number} ({name})" for number, name in enumerate(_RESAMPLINGS))
            )
        is_normal, factor = settings.get("do_normalize", True), settings.get("rescale_factor", 1 / 255)
        mean = tuple(settings.get("image_mean", (0.5,) * 3)) if is_normal else (0.0,) * 3
        deviation = tuple(settings.get("image_std", (0.5,) * 3)) if is_normal else (1.0,) * 3
        if len(mean) != 3 or len(deviation) != 3:
            raise CheckpointError(f"image_mean is {mean} and image_std {deviation}, and each needs 3 numbers")
        return cls(
            size,
            patch_size,
            num_tokens,
            tuple(value / factor for value in mean),
            tuple(value / factor for value in deviation),
            _RESAMPLINGS[resampling],
        )

    @property
    def num_positions(self) -> int:
        return (self.size // self.patch_size) ** 2 + self.num_tokens

    @property
    def memory(self) -> LengthRule:
        return LengthRule(names.PICTURE, constant=self.num_positions)

    def normal(self, pixels: Tensor) -> Tensor:
        """Pixels (…, 3) as the encoder's first map reads them, in float32."""
        return (pixels - torch.tensor(self.mean)) / torch.tensor(self.deviation)

    def inputs(self, source: Numbers) -> Inputs:
        return {names.PICTURE: np.frombuffer(bytes(source), np.uint8).reshape(self.size, self.size, 3)}

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:  # noqa: ARG002
        return {names.PICTURE: rng.integers(0, 256, (self.size, self.size, 3), np.uint8)}

    def arguments(self, source: Tensor) -> dict[str, Tensor]:
        return {"pixel_values": self.normal(source).permute(0, 3, 1, 2)}

    def read(self, content: bytes) -> Numbers:
        return read_picture(content, self.size, self.resampling).tobytes()

    def make(self) -> list[Numbers]:
        """Lines of print and of script-like slant, dark on light, with noise and some blur."""
        chance = np.random.default_rng(0)
        return [self._line(text, chance) for text in _LINES]

    def _line(self, text: str, chance: np.random.Generator) -> Numbers:
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
        return np.clip(np.asarray(scaled) + noise, 0, 255).astype(np.uint8).tobytes()


def _side(value: Any, what: str) -> int:
    """The pixels of a side; CheckpointError if the sides differ."""
    sides = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    if len(set(sides)) != 1:
        raise CheckpointError(f"{what} is {value}, and only squares are supported")
    return int(next(iter(sides)))
