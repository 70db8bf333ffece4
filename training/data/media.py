"""The common base of sounds and pictures as sources of published models: files, as those of captioners."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import ConfigDict
from torch import Tensor

from seq2seq_serve.bundle.manifest import LengthRule
from seq2seq_serve.training.data.sources import Files, Inputs, Numbers
from seq2seq_serve.training.models.fronts import PatchMap, SoundMaps


class Media(Files):
    """Files that all have the same number of positions of memory.

    Attributes:
        auto_class: The class of `transformers` that loads models of such sources.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")  # the name of the class in JSON

    unit = "positions"
    auto_class: ClassVar[str]

    @property
    @abstractmethod
    def num_positions(self) -> int:
        """The positions of memory of every source."""

    @property
    @abstractmethod
    def window(self) -> tuple[int, ...]:
        """The sizes of what a convolution of the front reads at once."""

    @property
    def memory(self) -> LengthRule:
        (name,) = self.forms
        return LengthRule(name, constant=self.num_positions)

    def length(self, source: Numbers) -> int:  # noqa: ARG002
        return self.num_positions

    @abstractmethod
    def make_front(self, d_model: int) -> SoundMaps | PatchMap:
        """The module that turns a batch of sources into embeddings (B, S, D)."""

    @abstractmethod
    def arguments(self, source: Tensor) -> dict[str, Tensor]:
        """A batch of sources as a model of `transformers` takes it."""

    @abstractmethod
    def make(self) -> list[Inputs]:
        """Sources that resemble those of the family's models, for the proof of int8."""
