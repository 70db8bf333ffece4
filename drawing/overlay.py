"""Draws attention over pictures, clips and stories: what the model looks at is bright, everything else dark.

A picture is drawn once for each word (Xu et al. 2015), a clip as a film strip under each word (Yao et al.
2015), and a story as its sentences beside the hops of a memory network (Sukhbaatar et al. 2015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from seq2seq_serve.bundle.pictures import read_clip, read_shown
from seq2seq_serve.drawing.labels import half_widths, label, label_font

Pixels = NDArray[np.uint8]

_SHOWN_PIXELS, _FRAME_PIXELS = 448, 96  # the longest side of a file's picture, and the side of a frame
_MAX_FRAMES = 10_000
_MAX_PLACELESS = 2  # positions before the places of a picture, of tokens of the encoder
_DARKEST = 0.25  # the brightness of a place without any weight
_PICTURE_PIXELS = 224  # smaller pictures are enlarged, so that a map of attention is smooth over them
_PANEL_INCHES, _FRAME_INCHES, _CELL_INCHES = 1.8, 0.6, 0.35
_ACROSS = 6  # panels beside each other
_WORD_INCHES, _MARGIN_INCHES = 0.3, 0.1
_LETTER_INCHES = 0.09  # of the largest font
_FONT_POINTS = 11.0
_LONGEST_LABEL = 100
_MAX_INCHES = 60.0
_DPI = 150


def save_picture(content: bytes, weights: ArrayLike, words: Sequence[str], path: Path) -> None:
    """Writes the picture of a file as `save_overlays` does, with the same side up as the server reads it.

    Raises:
        ValueError: The file cannot be read, or the places are not a square grid.
        OSError: The drawing cannot be written.
    """
    save_overlays(read_shown(content, _SHOWN_PIXELS), weights, words, path)


def save_clip(content: bytes, weights: ArrayLike, words: Sequence[str], path: Path) -> None:
    """Writes the clip of a file as `save_film_strips` does, with the frames that the server reads.

    Raises:
        ValueError: The file cannot be read.
        OSError: The drawing cannot be written.
    """
    save_film_strips(read_clip(content, _FRAME_PIXELS, _MAX_FRAMES), weights, words, path)


def save_overlays(picture: Pixels, weights: ArrayLike, words: Sequence[str], path: Path) -> None:
    """Writes a picture, and for each word once more with its attention laid over it.

    Args:
        picture: uint8 `(height, width, 3)`.
        weights: `(words, positions)`; the last ones are a square grid over the picture, row by row, and those
            before them have no place in it.
        words: The text of each target token.
        path: The file; its ending names the format.

    Raises:
        ValueError: The places are not a square grid.
        OSError: The file cannot be written.
    """
    maps = np.asarray(weights, np.float32)
    side = math.isqrt(maps.shape[1])
    if maps.shape[1] - side * side > _MAX_PLACELESS:
        raise ValueError(f"the attention has {maps.shape[1]} places, which are not a square grid")
    maps = maps[:, -side * side :]
    factor = max(1, _PICTURE_PIXELS // max(picture.shape[:2]))
    large = picture.repeat(factor, axis=0).repeat(factor, axis=1)
    size = large.shape[1::-1]
    panels = [large]
    for places in maps.reshape(-1, side, side):
        smooth = Image.fromarray(places).resize(size, Image.Resampling.BICUBIC)
        panels.append(_shaded(large, np.asarray(smooth)[:, :, None]))
    _save_panels(panels, ["", *words], _PANEL_INCHES, path)


def save_film_strips(frames: Pixels, weights: ArrayLike, words: Sequence[str], path: Path) -> None:
    """Writes a film strip, and under each word the strip once more, its frames shaded by their weights.

    Args:
        frames: uint8 `(frames, height, width, 3)`.
        weights: `(words, positions)`; if there are fewer positions than frames, each stands for several.
        words: The text of each target token.
        path: The file; its ending names the format.

    Raises:
        OSError: The file cannot be written.
    """
    rows = np.asarray(weights, np.float32)
    positions = np.arange(len(frames)) * rows.shape[1] // len(frames)
    strips = [frames, *(_shaded(frames, row[positions, None, None, None]) for row in rows)]
    panels = [_strip(strip) for strip in strips]
    _save_panels(panels, ["", *words], _FRAME_INCHES * len(frames), path, across=1)


def save_story(weights: ArrayLike, sentences: Sequence[str], title: str, path: Path) -> None:
    """Writes the sentences of a story, and beside them a column for each hop: its weights, black to white.

    Args:
        weights: `(hops, sentences)`.
        sentences: The text of each.
        title: The text above, such as the question and its answer.
        path: The file; its ending names the format.

    Raises:
        OSError: The file cannot be written.
    """
    hops = np.asarray(weights)
    cell = min(_CELL_INCHES, _MAX_INCHES / len(sentences))
    font, known = label_font()
    font.set_size(_FONT_POINTS * cell / _CELL_INCHES)
    labels = [label(text[:_LONGEST_LABEL], known) for text in sentences]
    left = max(map(half_widths, labels)) * _LETTER_INCHES * cell / _CELL_INCHES + 2 * _MARGIN_INCHES
    right = max(len(hops) * cell, half_widths(title[:_LONGEST_LABEL]) * _LETTER_INCHES - left)
    width, height = left + right + _MARGIN_INCHES, (len(labels) + 2) * cell + 2 * _MARGIN_INCHES
    figure = _figure(width, height)
    panel = figure.add_axes(
        (left / width, _MARGIN_INCHES / height, len(hops) * cell / width, len(labels) * cell / height)
    )
    panel.imshow(hops.T, cmap="gray", vmin=0.0, vmax=1.0, aspect="auto")
    panel.set_yticks(range(len(labels)), labels, fontproperties=font, parse_math=False)
    hop_labels = ["hop 1", *map(str, range(2, len(hops) + 1))] if len(hops) > 1 else [""]
    panel.set_xticks(range(len(hops)), hop_labels, fontproperties=font)
    panel.xaxis.tick_top()
    panel.tick_params(length=0)
    place = _MARGIN_INCHES / width, 1 - _MARGIN_INCHES / height
    shown = label(title[:_LONGEST_LABEL], known)
    figure.text(*place, shown, fontproperties=font, parse_math=False, verticalalignment="top")
    figure.savefig(path, dpi=_DPI)


def _shaded(pixels: Pixels, weights: NDArray[np.float32]) -> Pixels:
    """Returns pixels as bright as their weights; the largest weight keeps its pixels as they are."""
    share = np.clip(weights, 0.0, None) / max(float(weights.max()), 1e-9)
    return (pixels * (_DARKEST + (1 - _DARKEST) * share)).astype(np.uint8)


def _strip(frames: Pixels) -> Pixels:
    """Returns frames beside each other, with a white line between them: `(height, all widths, 3)`."""
    line = max(1, frames.shape[2] // 24)
    padded = np.pad(frames, ((0, 0), (0, 0), (0, line), (0, 0)), constant_values=255)
    return padded.swapaxes(0, 1).reshape(frames.shape[1], -1, 3)[:, :-line]


def _save_panels(
    panels: Sequence[Pixels], words: Sequence[str], panel_inches: float, path: Path, *, across: int = _ACROSS
) -> None:
    """Writes panels of equal size in rows, each under its word."""
    across = min(across, len(panels))
    down = math.ceil(len(panels) / across)
    tall = panels[0].shape[0] / panels[0].shape[1]
    panel_width = min(panel_inches, _MAX_INCHES / across, (_MAX_INCHES / down - _WORD_INCHES) / tall)
    cell_width, cell_height = panel_width + _MARGIN_INCHES, panel_width * tall + _WORD_INCHES
    width, height = across * cell_width + _MARGIN_INCHES, down * cell_height + _MARGIN_INCHES
    figure = _figure(width, height)
    font, known = label_font()
    font.set_size(_FONT_POINTS)
    for place, (pixels, word) in enumerate(zip(panels, words, strict=True)):
        row, column = divmod(place, across)
        left = column * cell_width + _MARGIN_INCHES
        bottom = (down - row - 1) * cell_height + _MARGIN_INCHES
        panel = figure.add_axes(
            (left / width, bottom / height, panel_width / width, panel_width * tall / height)
        )
        panel.imshow(pixels)
        panel.set_axis_off()
        if word:
            panel.set_title(label(word, known), fontproperties=font, parse_math=False, pad=3)
    figure.savefig(path, dpi=_DPI)


def _figure(width_inches: float, height_inches: float) -> Figure:
    figure = Figure(figsize=(width_inches, height_inches))
    FigureCanvasAgg(figure)
    return figure
