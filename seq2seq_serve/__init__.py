"""Attention models from a corpus to a gRPC service.

In an installation its parts lie in this folder. In a clone they lie beside it, where `python -m server` finds
them; the links here are for editors and type checkers, which do not run this file.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seq2seq_serve.server.library import Model as Model
    from seq2seq_serve.server.library import load as load

__version__ = "0.1.0"

_FOLDER = Path(__file__).parent
if (_FOLDER / "bundle").is_symlink() or not (_FOLDER / "bundle").is_dir():
    __path__.insert(0, str(_FOLDER.parent))


def __getattr__(name: str) -> Any:
    """Imports the library when it is used: it needs the extra `server`, which a client does without."""
    if name not in ("Model", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from seq2seq_serve.server import library
    except ModuleNotFoundError as error:
        text = f"{error.name} is missing: pip install 'seq2seq-serve[server,cpu]' (or gpu in place of cpu)"
        raise ModuleNotFoundError(text, name=error.name) from error
    return getattr(library, name)
