"""The kinds of sources that models read: texts, stories with a question, pictures, clips, features.

A corpus holds a text for every source. Its kind encodes that text as whole numbers, which a file can keep:
the token ids of a text or a story, or the name of a file of pixels. `inputs` turns these numbers into the
named arrays of one request, as the server gets them, and `collate` turns those of several rows into a batch.

Shapes: B batch rows, S positions of the memory, W words of a sentence, Q words of a question, F frames.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import LengthRule
from seq2seq_serve.bundle.names import Form
from seq2seq_serve.bundle.pictures import count_frames, read_clip, read_picture
from seq2seq_serve.bundle.sentences import MAX_WORDS, split_sentences
from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import PAD_ID

Array = npt.NDArray[Any]
Numbers = Sequence[int]  # an encoded source
Inputs = Mapping[str, Array]  # the named sources of one request, without a batch axis
Source = tuple[Tensor, ...]  # the sources of a batch; the last tensor is the mask (B, S)

STRIDE = 4
"""The pixels per side of a picture's place."""

_MAX_FRAMES = 4096


def pad_rows(rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, length of the longest row), with pad at the end of shorter rows."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    padded = np.full((len(rows), lengths.max()), PAD_ID, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.fromiter(chain.from_iterable(rows), np.int64)
    return torch.from_numpy(padded)


def pad_arrays(arrays: Sequence[Array]) -> Array:
    """(B, size of the largest array on each axis), with zeros after smaller ones."""
    sizes = np.array([array.shape for array in arrays]).max(axis=0)
    padded = np.zeros((len(arrays), *sizes), arrays[0].dtype)
    for row, array in zip(padded, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return padded


class SourceKind(ABC):
    """How a family of models reads its sources.

    Attributes:
        forms: The form of each source of a request, by its name.
        unit: The name of the units in which a source's length is counted.
        has_word_tokens: Whether tokens are lower-case words; otherwise a tokenizer learns pieces of words.
        max_characters: The most characters of a source of the corpus per position of memory; None for the
            names of files.
    """

    forms: ClassVar[Mapping[str, Form]]
    unit: ClassVar[str]
    has_word_tokens: ClassVar[bool] = False
    max_characters: ClassVar[int | None] = None

    @property
    @abstractmethod
    def memory(self) -> LengthRule:
        """The rule for the positions of memory that a request takes."""

    @property
    def is_text(self) -> bool:
        """Whether the corpus holds the sources themselves; otherwise it holds the names of their files."""
        return self.max_characters is not None

    def in_folder(self, folder: Path) -> SourceKind:  # noqa: ARG002
        """The kind whose relative names of files start from a folder; texts do not depend on one."""
        return self

    @abstractmethod
    def encode(self, sources: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
        """Encode sources of the corpus; raise ValueError for one that cannot be read."""

    def length(self, source: Numbers) -> int:
        """The positions of memory of an encoded source."""
        return self.memory_length(self.inputs(source))

    def drop_reason(self, source: Numbers) -> str | None:  # noqa: ARG002
        """Why the server would refuse an encoded source of any length; None keeps it."""
        return None

    @abstractmethod
    def inputs(self, source: Numbers) -> Inputs:
        """The named sources of a request with this encoded source."""

    def collate(self, sources: Sequence[Numbers]) -> Source:
        """A batch of encoded sources."""
        return self.tensors([self.inputs(source) for source in sources])

    def tensors(self, rows: Sequence[Inputs]) -> Source:
        """A batch of requests' sources, each padded to the largest of the batch, and the mask (B, S)."""
        columns = [torch.from_numpy(pad_arrays([row[name] for row in rows])) for name in self.forms]
        lengths = torch.tensor([self.memory_length(row) for row in rows])
        return (*columns, torch.arange(int(lengths.max())) < lengths[:, None])

    @abstractmethod
    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:
        """Random sources of a request, whose length along the padded axis is `length`."""

    def memory_length(self, row: Inputs) -> int:
        """The positions of memory of a request with these sources."""
        return self.memory.memory_length_of(row)


class Tokens(SourceKind):
    """A text as the token ids of its pieces, with eos: `source_ids` (S,)."""

    forms: ClassVar[Mapping[str, Form]] = {names.SOURCE_IDS: Form.TEXT}
    unit = "tokens"
    max_characters = 16  # of a token: longer texts without spaces would take long to cut

    @property
    def memory(self) -> LengthRule:
        return LengthRule(names.SOURCE_IDS)

    def encode(self, sources: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
        return tokenizer.encode_sources(sources)

    def length(self, source: Numbers) -> int:
        return len(source)

    def inputs(self, source: Numbers) -> Inputs:
        return {names.SOURCE_IDS: np.array(source, np.int64)}

    def collate(self, sources: Sequence[Numbers]) -> Source:
        source_ids = pad_rows(sources)
        lengths = torch.tensor([len(source) for source in sources])
        return source_ids, torch.arange(source_ids.shape[1]) < lengths[:, None]

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:
        return {names.SOURCE_IDS: rng.integers(0, vocab_size, length)}


class Stories(SourceKind):
    """Sentences and, after them, a question: `story` (S, W) and `question` (Q,), padded with 0.

    Encoded, pad stands after each sentence of the story.
    """

    forms: ClassVar[Mapping[str, Form]] = {names.STORY: Form.SENTENCES, names.QUESTION: Form.TEXT}
    unit = "sentences"
    has_word_tokens = True
    max_characters = 400  # of a sentence

    @property
    def memory(self) -> LengthRule:
        return LengthRule(names.STORY)

    def encode(self, sources: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
        encoded = []
        for source in sources:
            *story, question = split_sentences(source) or [""]
            *sentences, words = tokenizer.encode_batch([*story, question])
            encoded.append([*chain.from_iterable([*sentence, PAD_ID] for sentence in sentences), *words])
        return encoded

    def length(self, source: Numbers) -> int:
        return sum(number == PAD_ID for number in source)

    def drop_reason(self, source: Numbers) -> str | None:
        ends = [i for i, number in enumerate(source) if number == PAD_ID]
        *story, question = np.diff([-1, *ends, len(source)]) - 1  # their numbers of words
        if not story or not all((*story, question)):
            return "empty"
        return "too long" if max(*story, question) > MAX_WORDS else None

    def inputs(self, source: Numbers) -> Inputs:
        numbers = np.array(source, np.int64)
        *sentences, question = np.split(numbers, np.flatnonzero(numbers == PAD_ID) + 1)
        story = pad_arrays(sentences)[:, :-1] if sentences else np.zeros((0, 1), np.int64)
        return {names.STORY: story, names.QUESTION: question}

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:
        numbers_of_words = rng.integers(1, 8, length + 1)
        *story, question = (rng.integers(PAD_ID + 1, vocab_size, number) for number in numbers_of_words)
        return {names.STORY: pad_arrays(story), names.QUESTION: question}


@dataclass(frozen=True, kw_only=True)
class Files(SourceKind):
    """Files, whose names the corpus holds. Encoded, a source is its file's name in UTF-8.

    Attributes:
        folder: The folder from which relative names start.
    """

    folder: Path = Path()

    def in_folder(self, folder: Path) -> SourceKind:
        return replace(self, folder=folder)

    def encode(self, sources: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:  # noqa: ARG002
        for source in sources:
            if not (self.folder / source).is_file():
                raise ValueError(f"{self.folder / source}: no such file")
        return [list(source.encode()) for source in sources]

    def inputs(self, source: Numbers) -> Inputs:
        with self._named(source) as file:
            return self._read(file)

    @abstractmethod
    def _read(self, file: Path) -> Inputs: ...

    @contextmanager
    def _named(self, source: Numbers) -> Iterator[Path]:
        """The file of an encoded source; errors of reading it become ValueErrors that name it."""
        file = self.folder / bytes(source).decode()
        try:
            yield file
        except OSError as error:
            raise ValueError(f"{file}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


@dataclass(frozen=True)
class Pictures(Files):
    """Pictures of one size: `picture` (size, size, 3). STRIDE x STRIDE pixels are one position of memory."""

    size: int

    forms: ClassVar[Mapping[str, Form]] = {names.PICTURE: Form.PICTURE}
    unit = "places"

    @property
    def memory(self) -> LengthRule:
        return LengthRule(names.PICTURE, constant=self.num_places)

    @property
    def num_places(self) -> int:
        return (self.size // STRIDE) ** 2

    def length(self, source: Numbers) -> int:  # noqa: ARG002
        return self.num_places

    def _read(self, file: Path) -> Inputs:
        return {names.PICTURE: read_picture(file.read_bytes(), self.size)}

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:  # noqa: ARG002
        return {names.PICTURE: rng.integers(0, 256, (self.size, self.size, 3), np.uint8)}


@dataclass(frozen=True)
class Clips(Files):
    """Clips: `clip` (F, size, size, 3). Each frame is a position of the memory."""

    size: int

    forms: ClassVar[Mapping[str, Form]] = {names.CLIP: Form.CLIP}
    unit = "frames"

    @property
    def memory(self) -> LengthRule:
        return LengthRule(names.CLIP)

    def _read(self, file: Path) -> Inputs:
        return {names.CLIP: read_clip(file.read_bytes(), self.size, _MAX_FRAMES)}

    def length(self, source: Numbers) -> int:
        with self._named(source) as file:
            return count_frames(file.read_bytes())

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:  # noqa: ARG002
        return {names.CLIP: rng.integers(0, 256, (length, self.size, self.size, 3), np.uint8)}


@dataclass(frozen=True)
class Features(Files):
    """Annotations that another program computed: `features` (S, width), from files of NumPy (.npy)."""

    width: int

    forms: ClassVar[Mapping[str, Form]] = {names.FEATURES: Form.FEATURES}
    unit = "annotations"

    @property
    def memory(self) -> LengthRule:
        return LengthRule(names.FEATURES)

    def _read(self, file: Path) -> Inputs:
        return {names.FEATURES: np.array(self._open(file), np.float32)}

    def length(self, source: Numbers) -> int:
        with self._named(source) as file:
            return len(self._open(file))

    def _open(self, file: Path) -> Array:
        """The file's array, of which only what is used is read."""
        features: Array = np.lib.format.open_memmap(file, mode="r")
        if features.ndim != 2 or features.shape[1] != self.width or not len(features):
            shape = " x ".join(map(str, features.shape))
            raise ValueError(f"the array is {shape}, and must be annotations x {self.width}")
        return features

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:  # noqa: ARG002
        return {names.FEATURES: rng.standard_normal((length, self.width)).astype(np.float32)}


class Nothing(SourceKind):
    """No source: the model is a language model of the corpus' targets."""

    forms: ClassVar[Mapping[str, Form]] = {}
    unit = "positions"

    @property
    def memory(self) -> LengthRule:
        return LengthRule("", constant=1)

    def encode(self, sources: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:  # noqa: ARG002
        return [[] for _ in sources]

    def inputs(self, source: Numbers) -> Inputs:  # noqa: ARG002
        return {}

    def random(self, rng: np.random.Generator, length: int, vocab_size: int) -> Inputs:  # noqa: ARG002
        return {}


TOKENS, STORIES, NOTHING = Tokens(), Stories(), Nothing()
