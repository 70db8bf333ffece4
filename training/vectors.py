"""Word vectors that embeddings start as: read from a file, matched with pieces, kept with the run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bundle.tokenizer import Tokenizer
from training.checkpoint import load_tensors, save_tensors
from training.config import UNK_ID
from training.text_files import iterate_lines

_BROKEN_BYTES = "\ufffd"


def read_vectors(path: Path, words: Collection[str], width: int) -> dict[str, NDArray[np.float32]]:
    """The vectors of some words in a text file of them, gzip if its name ends in .gz.

    Each line is a word and its numbers, separated by spaces. That is GloVe's form; word2vec's has a first
    line of two numbers, how many words there are and how wide they are. Of a word that comes twice the first
    counts.

    Raises:
        ValueError: The vectors have another width, a line is broken, or the file is not whole; the message
            says where.
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
        word = " ".join(fields[:-width])  # which may hold spaces
        if not word:
            raise ValueError(
                f"{path}, line {number}: expected a word and {width} numbers, found {line!r:.80}"
            )
        if word in words and word not in found:
            found[word] = _numbers(path, number, fields[-width:])
    if num_announced is not None and num_words != num_announced:
        raise ValueError(f"{path}: {num_words} words, and its first line says {num_announced}: not whole")
    if not num_words:
        raise ValueError(f"{path}: {number} lines and no word in them")
    return found


@dataclass(frozen=True)
class PieceVectors:
    """What some rows of an embedding start as.

    Attributes:
        ids: The rows, (N,).
        vectors: What they start as, (N, D).
    """

    ids: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, path: Path, tokenizer: Tokenizer, width: int) -> PieceVectors:
        """The vectors of a file for the pieces of a vocabulary that are words in it.

        A piece is looked up without the space before it, as it is and then in lower case. Special tokens and
        pieces that end inside a character get none. All vectors are scaled alike, to the size that embeddings
        are otherwise initialised with.

        Raises:
            ValueError: See `read_vectors`; or no piece is in the file.
            OSError: The file cannot be read.
        """
        texts = {id_: tokenizer.decode([id_]).removeprefix(" ") for id_ in range(tokenizer.vocab_size)}
        texts = {
            id_: text for id_, text in texts.items() if id_ > UNK_ID and text and _BROKEN_BYTES not in text
        }
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
        """Let the rows start as the vectors."""
        with torch.no_grad():
            embedding.weight[self.ids] = self.vectors.to(embedding.weight.device)

    def hold(self, embedding: nn.Embedding) -> None:
        """Take the rows' gradients away, so that the next step leaves them as they are."""
        if embedding.weight.grad is not None:
            embedding.weight.grad[self.ids] = 0.0

    def save(self, path: Path) -> None:
        """Keep them with a run, which then does not need the file they came from."""
        save_tensors(path, dict(vars(self)))

    @classmethod
    def load(cls, path: Path) -> PieceVectors:
        """Read what `save` wrote.

        Raises:
            ValueError: The file is missing or damaged.
        """
        content = load_tensors(path, keys=["ids", "vectors"])
        return cls(content["ids"], content["vectors"])


def _check_width(path: Path, number: int, found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(
            f"{path}, line {number}: vectors of {found} numbers, and the model's d_model is {expected}"
        )


def _numbers(path: Path, number: int, fields: list[str]) -> NDArray[np.float32]:
    try:
        with np.errstate(over="ignore"):  # to infinity, which is refused below
            vector = np.array(fields, dtype=np.float64).astype(np.float32)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not a word and {len(fields)} numbers ({error})") from error
    if not np.isfinite(vector).all():
        raise ValueError(f"{path}, line {number}: a number is infinite or undefined")
    return vector
