"""Coloured figures on a grey background: what the pictures and the clips have in common."""

import math
import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

COLOURS = {
    "red": (210, 40, 40),
    "yellow": (235, 210, 50),
    "blue": (40, 75, 215),
    "green": (30, 150, 50),
    "pink": (245, 150, 195),
    "purple": (125, 35, 155),
    "white": (248, 248, 248),
    "black": (18, 18, 18),
}
"""The usual colour of each name. `paint` varies it."""


def _round_outline(radii: Sequence[float], num_points: int) -> NDArray[np.float64]:
    angles = 2 * math.pi * np.arange(num_points) / num_points
    radius = np.resize(radii, num_points)
    return np.stack([radius * np.sin(angles), -radius * np.cos(angles)], axis=1)


_ARM = 0.36
OUTLINES = {
    "circle": _round_outline([1.0], 28),
    "square": np.array([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
    "triangle": np.array([(0.0, -1.0), (1.0, 0.9), (-1.0, 0.9)]),
    "cross": np.array(
        [
            *[(-_ARM, -1), (_ARM, -1), (_ARM, -_ARM), (1, -_ARM), (1, _ARM), (_ARM, _ARM)],
            *[(_ARM, 1), (-_ARM, 1), (-_ARM, _ARM), (-1, _ARM), (-1, -_ARM), (-_ARM, -_ARM)],
        ]
    ),
    "diamond": np.array([(0.0, -1.0), (0.7, 0.0), (0.0, 1.0), (-0.7, 0.0)]),
    "star": _round_outline([1.0, 0.42], 10),
}
"""The corners (x, y) of each shape around its centre, for radius 1, with y downwards."""

_FINE = 3  # figures are drawn this many times larger, so that their edges become smooth
_COLOUR_VARIATION = 12
_BACKGROUND = (95, 150)
_BACKGROUND_TINT = 10
_LIGHT = 10  # how much brighter or darker an edge of the picture is than its middle
_NOISE = 6


def draw_palette(colours: Sequence[str], rng: random.Random) -> list[int]:
    """Draws a background and a variant of each colour: R, G, B of the background, then of each colour."""
    grey = rng.randint(*_BACKGROUND)
    palette = [grey + rng.randint(-_BACKGROUND_TINT, _BACKGROUND_TINT) for _ in range(3)]
    for colour in colours:
        for value in COLOURS[colour]:
            palette.append(min(max(value + rng.randint(-_COLOUR_VARIATION, _COLOUR_VARIATION), 0), 255))
    return palette


def draw_light(size: int, rng: random.Random) -> NDArray[np.float32]:
    """Draws how much brighter each place of a picture is: [size, size, 1], falling along a random line."""
    ramp = np.linspace(-1, 1, size, dtype=np.float32)
    across, down = rng.uniform(-_LIGHT, _LIGHT) / 2, rng.uniform(-_LIGHT, _LIGHT) / 2
    return (across * ramp + down * ramp[:, None])[:, :, None]


def corners(
    shape: str, x_pixels: float, y_pixels: float, radius_pixels: float, angle_radians: float = 0.0
) -> NDArray[np.float64]:
    """Returns the corners (x, y) of a figure in pixels; a positive angle turns it clockwise."""
    outline = OUTLINES[shape] * radius_pixels
    if angle_radians:
        cosine, sine = math.cos(angle_radians), math.sin(angle_radians)
        outline = outline @ np.array([(cosine, sine), (-sine, cosine)])
    placed: NDArray[np.float64] = outline + np.array((x_pixels, y_pixels))
    return placed


def paint(
    frames: Sequence[Sequence[NDArray[np.float64]]],
    palette: Sequence[int],
    light: NDArray[np.float32],
    rng: random.Random,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Paints the figures of one or more frames, given by their corners, with noise.

    A figure has to be inside its frame, and keeps its place in the list of each frame.

    Returns:
        The frames, uint8 [T, size, size, 3], and the owners of their pixels, uint8 [T, size, size]: 0 is the
        background, 1 the first figure.
    """
    size = len(light)
    canvas = Image.new("P", (_FINE * size, _FINE * size * len(frames)))  # each frame below the one before
    canvas.putpalette(list(palette))
    pen = ImageDraw.Draw(canvas)
    for row, frame in enumerate(frames):
        for number, figure in enumerate(frame, 1):
            pen.polygon((_FINE * (figure + np.array((0, row * size)))).ravel().tolist(), fill=number)
    smooth = np.asarray(canvas.convert("RGB").reduce(_FINE)).reshape(-1, size, size, 3)
    noise = np.frombuffer(rng.randbytes(smooth.size), np.uint8) % (2 * _NOISE + 1)
    pictures = smooth + light + (noise.reshape(smooth.shape).astype(np.float32) - _NOISE)
    owners = np.asarray(canvas)[_FINE // 2 :: _FINE, _FINE // 2 :: _FINE].reshape(-1, size, size)
    return np.clip(pictures, 0, 255).astype(np.uint8), owners.copy()
