"""Draws attention weights as attention papers do (Bahdanau et al. 2015, figure 3): the source on top.

Hangul needs a font that matplotlib does not have: Nanum Gothic, from the files of koreanize-matplotlib. That
package is never imported, because importing it changes matplotlib's settings.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import font_manager, get_data_path
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from numpy.typing import ArrayLike

_FONT_PACKAGE, _FONT_FILE = "koreanize_matplotlib", "fonts/NanumGothic.ttf"
_CELL_INCHES, _SMALL_CELL_INCHES = 0.5, 0.25  # of one heatmap, and of several in a grid
_CELL_HALF_WIDTHS = 6  # Latin letters that fit over a cell; a Hangul syllable is as wide as two
_MARGIN_INCHES = 1.6  # for the tokens' texts
_MAX_INCHES = 60.0
_DPI = 150
_EMPTY = "·"  # a token that ends inside a character has no text of its own
_UNKNOWN = "□"  # a character that neither font has


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
    size = (across * num_columns * cell + _MARGIN_INCHES, down * num_rows * cell + _MARGIN_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    font, known = _font()
    font.set_size(min(11.0, cell * 25))
    row_labels, labels = ([_label(token, known) for token in tokens] for tokens in (rows, columns))
    is_narrow = max(map(_half_widths, labels)) <= _CELL_HALF_WIDTHS  # the font shrinks with the cell
    for place, panel in enumerate(figure.subplots(down, across, squeeze=False).flat):
        layer, head = divmod(place, across)
        panel.imshow(grid[layer, head], cmap="gray", vmin=0.0, vmax=1.0)
        panel.set_xticks(range(num_columns), labels if layer == 0 else [], rotation=0 if is_narrow else 90)
        panel.set_yticks(range(num_rows), row_labels if head == 0 else [])
        panel.xaxis.tick_top()
        panel.tick_params(length=0)
        if titles:
            panel.set_xlabel(titles[place], fontproperties=font)
        for label in (*panel.get_xticklabels(), *panel.get_yticklabels()):
            label.set_fontproperties(font)
            label.set_parse_math(False)  # a dollar sign in a text is a dollar sign
    figure.savefig(path, dpi=_DPI)


def _font() -> tuple[FontProperties, frozenset[int]]:
    """Returns Nanum Gothic, with matplotlib's own font as a fallback, and the characters that either has."""
    spec = importlib.util.find_spec(_FONT_PACKAGE)
    assert spec is not None, f"{_FONT_PACKAGE} is a dependency of client and training"
    assert spec.origin is not None
    files = [Path(spec.origin).parent / _FONT_FILE, Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"]
    fonts = [FT2Font(str(file)) for file in files]
    font_manager.fontManager.addfont(files[0])
    known = frozenset[int]().union(*(font.get_charmap() for font in fonts))
    return FontProperties(family=[font.family_name for font in fonts]), known


def _label(token: str, known: frozenset[int]) -> str:
    text = "".join(
        character if ord(character) in known and character.isprintable() else _UNKNOWN
        for character in token.strip()
    )
    return text or _EMPTY


def _half_widths(label: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in label)
