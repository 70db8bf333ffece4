"""The common base of sounds and pictures as sources of imported models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from seq2seq_serve.bundle.audio import SoundError
from seq2seq_serve.bundle.pictures import PictureError
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.export.huggingface.checkpoint import CheckpointError
from seq2seq_serve.training.data.sources import Numbers, SourceKind

MAX_FILES = 50


class Media(SourceKind):
    """Sources that are not texts, each with the same number of positions of memory.

    Attributes:
        auto_class: The class of `transformers` that loads models of such sources.
    """

    unit = "positions"
    auto_class: ClassVar[str]

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """The positions of memory of every source."""

    @abstractmethod
    def arguments(self, source: Tensor) -> dict[str, Tensor]:
        """A batch of sources as a model of `transformers` takes it."""

    @abstractmethod
    def read(self, content: bytes) -> Numbers:
        """The encoded source of a file."""

    @abstractmethod
    def make(self) -> list[Numbers]:
        """Encoded sources that resemble those of the family's models, for the calibration."""

    def read_files(self, paths: Iterable[Path]) -> list[Numbers]:
        """The encoded sources of some files, at most `MAX_FILES` of them."""
        sources = []
        for path in islice(paths, MAX_FILES):
            try:
                sources.append(self.read(path.read_bytes()))
            except (OSError, SoundError, PictureError) as error:
                raise CheckpointError(f"the calibration names {path}: {error}") from error
        return sources

    def encode(self, sources: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
        raise NotImplementedError("imported models are not trained on a corpus")
