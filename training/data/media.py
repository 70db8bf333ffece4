"""The common base of sounds and pictures as sources of published models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.data.sources import Numbers, SourceKind
from seq2seq_serve.training.models.fronts import PatchMap, SoundMaps


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
    def make_front(self, d_model: int) -> SoundMaps | PatchMap:
        """The module that turns a batch of sources into embeddings (B, S, D)."""

    @abstractmethod
    def arguments(self, source: Tensor) -> dict[str, Tensor]:
        """A batch of sources as a model of `transformers` takes it."""

    @abstractmethod
    def make(self) -> list[Numbers]:
        """Encoded sources that resemble those of the family's models, for the proof of int8."""

    def encode(self, sources: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
        raise NotImplementedError("models of sounds and pictures are not trained on a corpus")
