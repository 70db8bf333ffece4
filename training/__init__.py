"""Training with torch: corpora, models, the training loop, checkpoints, scoring. ONNX is unknown here."""

from typing import TYPE_CHECKING, Any

from seq2seq_serve.clone import share_module

if TYPE_CHECKING:
    from seq2seq_serve.training.library import Run as Run
    from seq2seq_serve.training.library import train as train

share_module(__name__)


def __getattr__(name: str) -> Any:
    """Imports the library when it is used, because other modules do without torch."""
    if name not in ("Run", "train"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from seq2seq_serve.training import library

    return getattr(library, name)
