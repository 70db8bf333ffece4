"""Draws an alignment as attention papers do (Bahdanau et al. 2015, figure 3): source on top, target down.

Hangul needs a font that matplotlib does not bring: Nanum Gothic, from the files of koreanize-matplotlib. That
package is never imported, because importing it changes matplotlib's settings.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from pathlib import Path

from matplotlib import font_manager, get_data_path
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font

from protos.seq2seq_v1_pb2 import Attention

_FONT_PACKAGE, _FONT_FILE = "koreanize_matplotlib", "fonts/NanumGothic.ttf"
_CELL_INCHES = 0.5
_CELL_HALF_WIDTHS = 6  # Latin letters that fit over a cell; a Hangul syllable is as wide as two
_MARGIN_INCHES = 1.6  # for the tokens' texts
_MAX_INCHES = 60.0
_DPI = 150
_EMPTY = "·"  # a token that ends inside a character has no text of its own
_UNKNOWN = "□"  # a character that no font here has


def save_heatmap(attention: Attention, path: Path) -> None:
    """Write the alignment as an image; the file's ending names its format.

    Raises:
        OSError: The file cannot be written.
    """
    num_rows, num_columns = len(attention.target_tokens), len(attention.source_tokens)
    weights = [
        attention.weights[row * num_columns : (row + 1) * num_columns] for row in range(num_rows)
    ]  # (T, S)
    cell = min(_CELL_INCHES, _MAX_INCHES / max(num_rows, num_columns))
    font, known = _font()
    figure = Figure(
        figsize=(num_columns * cell + _MARGIN_INCHES, num_rows * cell + _MARGIN_INCHES), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(weights, cmap="gray", vmin=0.0, vmax=1.0)
    font.set_size(min(11.0, cell * 25))
    source_labels = [_label(token, known) for token in attention.source_tokens]
    is_narrow = cell == _CELL_INCHES and max(map(_half_widths, source_labels)) <= _CELL_HALF_WIDTHS
    axes.set_xticks(range(num_columns), source_labels, rotation=0 if is_narrow else 90)
    axes.set_yticks(range(num_rows), [_label(token, known) for token in attention.target_tokens])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontproperties(font)
        label.set_parse_math(False)  # a dollar sign in a text is a dollar sign
    figure.savefig(path, dpi=_DPI)


def _font() -> tuple[FontProperties, frozenset[int]]:
    """Nanum Gothic with matplotlib's own font for what it lacks, and the characters that either has."""
    spec = importlib.util.find_spec(_FONT_PACKAGE)
    assert spec is not None, f"{_FONT_PACKAGE} is a dependency of client"
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
