"""Attention models from a corpus to a gRPC service.

In an installation its parts lie in this folder. In a clone they lie beside it, where `python -m server` finds
them.
"""

from pathlib import Path

__version__ = "0.1.0"

_FOLDER = Path(__file__).parent
if not (_FOLDER / "bundle").is_dir():
    __path__.append(str(_FOLDER.parent))
