"""Initial word vectors of embeddings: read from a file, matched with pieces, stored with the run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.checkpoint import load_tensors, save_tensors
from seq2seq_serve.training.config import UNK_ID
from seq2seq_serve.training.data.text_files import iterate_lines

_BROKEN_BYTES = "\ufffd"


def read_vectors(path: Path, words: Collection[str], width: int) -> dict[str, NDArray[np.float32]]:
    """Read the vectors of some words from a text file, gzip if its name ends in .gz.

    Each line is a word and its numbers, separated by spaces: the format of GloVe. In the format of word2vec,
    the first line has two numbers, of words and of numbers per word. If a word comes twice, its first line
    counts.

    Raises:
        ValueError: The vectors have another width, a line is broken, or the file is cut off; the message
            names the line.
        OSError: The file cannot be read.
    """
    found: dict[str, NDArray[np.float32]] = {}
    num_announced, num_words, number = None, 0, 0
    for number, line in enumerate(iterate_lines(path), start=1):
        fields = line.rstrip(" ").split(" ")
        if number == 1 and len(fields) == 2 and all(field.isdecimal() for field in fields):
            num_announced = int(fields[0])
            _check_width(path, number, int(fields[1]), width)
            continue
        if num_words == 0:
            _check_width(path, number, len(fields) - 1, width)
        num_words += 1
        word = " ".join(fields[:-width])  # a word may hold spaces
        if not word:
            raise ValueError(f"{path}, line {number}: expected a word and {width} numbers, got {line!r:.80}")
        if word in words and word not in found:
            found[word] = _numbers(path, number, fields[-width:])
    if num_announced is not None and num_words != num_announced:
        raise ValueError(
            f"{path}: {num_words} words, but its first line says {num_announced}: the file is truncated"
        )
    if not num_words:
        raise ValueError(f"{path}: {number} lines and no word in them")
    return found


@dataclass(frozen=True)
class PieceVectors:
    """The initial values of some rows of an embedding."""

    ids: Tensor  # (N,), the rows
    vectors: Tensor  # (N, D)

    @classmethod
    def of(cls, path: Path, tokenizer: Tokenizer, width: int) -> PieceVectors:
        """Read the vectors of the pieces of a vocabulary that are words in a file.

        A piece is looked up without the space before it, first as it is, then in lower case. Special tokens
        and pieces that end inside a character have no vector. One factor scales all vectors to the mean size
        of randomly initialised embeddings. Raises as `read_vectors` does, and ValueError if no piece is in
        the file.
        """
        texts = {id_: tokenizer.decode([id_]).removeprefix(" ") for id_ in range(tokenizer.vocab_size)}
        texts = {i: text for i, text in texts.items() if i > UNK_ID and text and _BROKEN_BYTES not in text}
        words = {word for text in texts.values() for word in (text, text.lower())}
        vectors = read_vectors(path, words, width)
        chosen = {
            id_: vectors[text if text in vectors else text.lower()]
            for id_, text in texts.items()
            if text in vectors or text.lower() in vectors
        }
        if not chosen:
            raise ValueError(f"{path}: none of its words is a piece of the vocabulary")
        matrix = torch.from_numpy(np.stack(list(chosen.values())))  # (N, D)
        size = matrix.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
        return cls(torch.tensor(list(chosen)), matrix * (width**-0.5 / size))

    def write_to(self, embedding: nn.Embedding) -> None:
        """Set the rows to the vectors."""
        with torch.no_grad():
            embedding.weight[self.ids] = self.vectors.to(embedding.weight.device)

    def hold(self, embedding: nn.Embedding) -> None:
        """Set the rows' gradients to 0, so that the next step does not change the rows."""
        if embedding.weight.grad is not None:
            embedding.weight.grad[self.ids] = 0.0

    def save(self, path: Path) -> None:
        """Write the vectors, so that a run does not need the file of word vectors any more."""
        save_tensors(path, dict(vars(self)))

    @classmethod
    def load(cls, path: Path) -> PieceVectors:
        """Read what `save` wrote; raise ValueError if the file is missing or damaged."""
        content = load_tensors(path, keys=["ids", "vectors"])
        return cls(content["ids"], content["vectors"])


def _check_width(path: Path, number: int, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"{path}, line {number}: vectors of {found} numbers, but d_model is {expected}")


def _numbers(path: Path, number: int, fields: list[str]) -> NDArray[np.float32]:
    try:
        with np.errstate(over="ignore"):  # to infinity, which is an error below
            vector = np.array(fields, dtype=np.float64).astype(np.float32)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not a word and {len(fields)} numbers ({error})") from error
    if not np.isfinite(vector).all():
        raise ValueError(f"{path}, line {number}: a number is infinite or undefined")
    return vector
