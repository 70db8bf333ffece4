"""The style that the pages of the client and of training share."""

from __future__ import annotations

from pathlib import Path

STYLE = Path(__file__).parent / "page.css"
