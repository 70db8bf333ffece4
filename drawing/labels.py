"""Texts in drawings: a font for Hangul, and labels of tokens.

Hangul needs a font that matplotlib does not have: Nanum Gothic, from the files of koreanize-matplotlib. That
package is never imported, because importing it changes matplotlib's settings.
"""

from __future__ import annotations

import importlib.util
import unicodedata
from pathlib import Path

from matplotlib import font_manager, get_data_path
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font

_FONT_PACKAGE, _FONT_FILE = "koreanize_matplotlib", "fonts/NanumGothic.ttf"
_EMPTY = "·"  # a token that ends inside a character has no text of its own
_UNKNOWN = "□"  # a character that neither font has


def label_font() -> tuple[FontProperties, frozenset[int]]:
    """Returns Nanum Gothic, with matplotlib's own font as a fallback, and the characters that either has."""
    spec = importlib.util.find_spec(_FONT_PACKAGE)
    assert spec is not None, f"{_FONT_PACKAGE} is a dependency of client and training"
    assert spec.origin is not None
    files = [Path(spec.origin).parent / _FONT_FILE, Path(get_data_path()) / "fonts/ttf/DejaVuSans.ttf"]
    fonts = [FT2Font(str(file)) for file in files]
    font_manager.fontManager.addfont(files[0])
    known = frozenset[int]().union(*(font.get_charmap() for font in fonts))
    return FontProperties(family=[font.family_name for font in fonts]), known


def label(token: str, known: frozenset[int]) -> str:
    """Returns the text that stands for a token; `known` are the characters of the font."""
    text = "".join(
        character if ord(character) in known and character.isprintable() else _UNKNOWN
        for character in token.strip()
    )
    return text or _EMPTY


def half_widths(label: str) -> int:
    """Returns the width of a label in Latin letters; a Hangul syllable is as wide as two."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in label)
