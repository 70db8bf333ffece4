"""Draws attention weights as attention papers do (Bahdanau et al. 2015, figure 3): the source on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from seq2seq_serve.drawing.labels import half_widths, label, label_font

_CELL_INCHES, _SMALL_CELL_INCHES = 0.5, 0.25  # of one heatmap, and of several in a grid
_CELL_HALF_WIDTHS = 6  # Latin letters that fit over a cell; a Hangul syllable is as wide as two
_MARGIN_INCHES = 1.6  # for the tokens' texts
_MAX_INCHES = 60.0
_SCALE_INCHES = 0.7  # for the scale of weights beside the heatmaps: a bar with numbers
_BAR_INCHES, _LONGEST_BAR_INCHES = 0.12, 3.0
_PAD_INCHES = 0.1
_DPI = 150


def save_heatmap(
    weights: ArrayLike, rows: Sequence[str], columns: Sequence[str], path: Path, titles: Sequence[str] = ()
) -> None:
    """Writes a heatmap, or a grid of heatmaps, as an image; the file's ending names the format.

    Args:
        weights: `(T, S)`, or for a grid `(L, H, T, S)`, from 0, black, to 1, white.
        rows: The text of each position that attends.
        columns: The text of each position that is attended to.
        path: The file.
        titles: A title for each heatmap of a grid, row by row.

    Raises:
        OSError: The file cannot be written.
    """
    grid = np.asarray(weights)
    grid = grid[None, None] if grid.ndim == 2 else grid  # (L, H, T, S)
    down, across, num_rows, num_columns = grid.shape
    wanted = _CELL_INCHES if down * across == 1 else _SMALL_CELL_INCHES
    cell = min(wanted, _MAX_INCHES / max(down * num_rows, across * num_columns))
    size = (
        across * num_columns * cell + _MARGIN_INCHES + _SCALE_INCHES,
        down * num_rows * cell + _MARGIN_INCHES,
    )
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    font, known = label_font()
    font.set_size(min(11.0, cell * 25))
    row_labels, labels = ([label(token, known) for token in tokens] for tokens in (rows, columns))
    is_narrow = max(map(half_widths, labels)) <= _CELL_HALF_WIDTHS  # the font shrinks with the cell
    panels = figure.subplots(down, across, squeeze=False)
    for place, panel in enumerate(panels.flat):
        layer, head = divmod(place, across)
        image = panel.imshow(grid[layer, head], cmap="gray", vmin=0.0, vmax=1.0)
        panel.set_xticks(range(num_columns), labels if layer == 0 else [], rotation=0 if is_narrow else 90)
        panel.set_yticks(range(num_rows), row_labels if head == 0 else [])
        panel.xaxis.tick_top()
        panel.tick_params(length=0)
        if titles:
            panel.set_xlabel(titles[place], fontproperties=font)
        for text in (*panel.get_xticklabels(), *panel.get_yticklabels()):
            text.set_fontproperties(font)
            text.set_parse_math(False)  # a dollar sign in a text is a dollar sign
    length, bar = min(_LONGEST_BAR_INCHES, num_rows * cell), _BAR_INCHES
    scale = figure.colorbar(
        image,
        ax=panels,
        ticks=[0, 0.5, 1],
        fraction=bar / size[0],
        shrink=length / size[1],
        aspect=length / bar,
    )
    scale.set_label("share of attention", fontproperties=font)
    scale.ax.tick_params(length=0, labelsize=font.get_size())
    figure.savefig(path, dpi=_DPI, bbox_inches="tight", pad_inches=_PAD_INCHES)
