"""Draws attention weights as attention papers do (Bahdanau et al. 2015, figure 3): what is asked on top.

An alignment looks as `client.heatmap` draws it for a served model, and a test compares the two: neither may
import the other. Hangul needs a font that matplotlib does not bring: Nanum Gothic, from the files of
koreanize-matplotlib. That package is never imported, because importing it changes matplotlib's settings.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from matplotlib import font_manager, get_data_path
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from torch import Tensor

_FONT_PACKAGE, _FONT_FILE = "koreanize_matplotlib", "fonts/NanumGothic.ttf"
_CELL_INCHES, _SMALL_CELL_INCHES = 0.5, 0.25  # of one heatmap, and where there are several
_CELL_HALF_WIDTHS = 6  # Latin letters that fit over a cell; a Hangul syllable is as wide as two
_MARGIN_INCHES = 1.6  # for the tokens' texts
_MAX_INCHES = 60.0
_DPI = 150
_EMPTY = "·"  # a token that ends inside a character has no text of its own
_UNKNOWN = "□"  # a character that no font here has


def save_heatmap(weights: Tensor, rows: Sequence[str], columns: Sequence[str], path: Path) -> None:
    """Write weights (T, S) as an image; the file's ending names its format.

    Args:
        weights: Between 0, black, and 1, white.
        rows: The text of each position that attends.
        columns: The text of each position that is attended to.
        path: The file.

    Raises:
        OSError: The file cannot be written.
    """
    _save(weights[None, None], rows, columns, [], path)


def save_head_heatmaps(
    weights: Tensor, tokens: Sequence[str], layers: Sequence[int], heads: Sequence[int], path: Path
) -> None:
    """Write self-attention (L, H, S, S) as a grid of heatmaps, a row a layer and a column a head.

    Args:
        weights: Between 0, black, and 1, white.
        tokens: The text of each position.
        layers: The number of each layer, for its titles.
        heads: The number of each head.
        path: The file; its ending names the format.

    Raises:
        OSError: The file cannot be written.
    """
    titles = [f"layer {layer}, head {head}" for layer in layers for head in heads]
    _save(weights, tokens, tokens, titles, path)


def _save(
    weights: Tensor, rows: Sequence[str], columns: Sequence[str], titles: Sequence[str], path: Path
) -> None:
    down, across, num_rows, num_columns = weights.shape
    wanted = _CELL_INCHES if down * across == 1 else _SMALL_CELL_INCHES
    cell = min(wanted, _MAX_INCHES / max(down * num_rows, across * num_columns))
    size = (across * num_columns * cell + _MARGIN_INCHES, down * num_rows * cell + _MARGIN_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    font, known = _font()
    font.set_size(min(11.0, cell * 25))
    labels = [_label(token, known) for token in columns]
    is_narrow = max(map(_half_widths, labels)) <= _CELL_HALF_WIDTHS  # the font shrinks with the cell
    panels = figure.subplots(down, across, squeeze=False)
    for place, panel in enumerate(panels.flat):
        layer, head = divmod(place, across)
        panel.imshow(weights[layer, head].numpy(), cmap="gray", vmin=0.0, vmax=1.0)
        panel.set_xticks(range(num_columns), labels if layer == 0 else [], rotation=0 if is_narrow else 90)
        panel.set_yticks(range(num_rows), [_label(token, known) for token in rows] if head == 0 else [])
        panel.xaxis.tick_top()
        panel.tick_params(length=0)
        if titles:
            panel.set_xlabel(titles[place], fontproperties=font)
        _set_font(panel, font)
    figure.savefig(path, dpi=_DPI)


def _set_font(panel: Axes, font: FontProperties) -> None:
    for label in (*panel.get_xticklabels(), *panel.get_yticklabels()):
        label.set_fontproperties(font)
        label.set_parse_math(False)  # a dollar sign in a text is a dollar sign


def _font() -> tuple[FontProperties, frozenset[int]]:
    """Nanum Gothic with matplotlib's own font for what it lacks, and the characters that either has."""
    spec = importlib.util.find_spec(_FONT_PACKAGE)
    assert spec is not None, f"{_FONT_PACKAGE} is a dependency of training"
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
