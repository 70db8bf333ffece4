"""Reads a SentencePiece model (`.spm`, `.model`) and makes a tokenizer of the `tokenizers` library from it.

The file is a protobuf; the fields that decide about ids are read here, so that neither sentencepiece nor its
generated module is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from seq2seq_serve.bundle.charsmap import GUARD, HIDDEN, spm_normalizer

SPACE = "\u2581"


class PieceType(IntEnum):
    """The types of a piece in `sentencepiece_model.proto`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One piece of a vocabulary; its place in the model is its id there."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceModel:
    """What a model's file says about cutting texts.

    Attributes:
        is_bpe: Whether the pieces are merged as byte pairs are; otherwise they are those of a unigram model.
        has_byte_fallback: Whether characters without a piece become their bytes.
        charsmap: The normalisation; empty for none.
    """

    pieces: tuple[Piece, ...]
    is_bpe: bool
    has_byte_fallback: bool
    charsmap: bytes
    adds_dummy_prefix: bool
    removes_extra_spaces: bool

    @classmethod
    def read(cls, path: Path) -> SentencePieceModel:
        """Read a file; ValueError names a file that is not a model, or one of an unsupported kind."""
        try:
            fields = list(_fields(path.read_bytes()))
            pieces = tuple(_piece(dict(_fields(content))) for number, content in fields if number == 1)
            trainer, normalizer = (
                dict(_fields(next((content for number, content in fields if number == wanted), b"")))
                for wanted in (2, 3)
            )
        except (IndexError, ValueError, struct.error, TypeError) as error:
            raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
        if not pieces:
            raise ValueError(f"{path}: not a SentencePiece model (it has no pieces)")
        model_type = trainer.get(3, 1)
        if model_type not in (1, 2) or trainer.get(24, 0):
            raise ValueError(
                f"{path}: model_type is {model_type} and treat_whitespace_as_suffix is {trainer.get(24, 0)}; "
                "supported are the types 1 (unigram) and 2 (BPE) with white space before words"
            )
        return cls(
            pieces=pieces,
            is_bpe=model_type == 2,
            has_byte_fallback=bool(trainer.get(35, 0)),
            charsmap=normalizer.get(2, b""),
            adds_dummy_prefix=bool(normalizer.get(3, 1)),
            removes_extra_spaces=bool(normalizer.get(4, 1)),
        )

    def tokenizer(
        self,
        vocab: Mapping[str, int],
        unk: str,
        special_tokens: Mapping[str, int],
        added: Sequence[tokenizers.AddedToken] = (),
    ) -> tokenizers.Tokenizer:
        """Create the tokenizer that cuts texts as this model does and gives the pieces other ids.

        Args:
            vocab: The id of each piece, without a gap from 0. Pieces that this model lacks stay reachable as
                names only.
            unk: The piece for all others.
            special_tokens: The ids of the tokens that no text is cut into; all are in `vocab`.
            added: Other tokens of `vocab` that a text is searched for before it is cut.
        """
        user_defined = [
            tokenizers.AddedToken(piece.text, normalized=False)
            for piece in self._of_type(PieceType.USER_DEFINED)
            if piece.text in vocab and piece.text not in special_tokens
        ]
        if self.is_bpe:
            inner = tokenizers.Tokenizer(self._bpe(vocab, unk))
            special = sorted(special_tokens)
        else:
            model, extra = self._unigram(vocab, unk, special_tokens, {token.content for token in added})
            inner = tokenizers.Tokenizer(model)
            special = [*(HIDDEN + name for name in sorted(special_tokens)), *extra]
        steps: list[Any] = []
        if self.removes_extra_spaces:
            # A run of spaces is tried once, and not from each of its places, so that the time stays linear.
            patterns = [(rf"(?<![ {SPACE}])[ {SPACE}]++\z", ""), (r"\A +", ""), (" {2,}", " ")]
            steps += [normalizers.Replace(Regex(pattern), content) for pattern, content in patterns]
        if self.adds_dummy_prefix:
            # Metaspace adds no mark before one that the text begins with, and SentencePiece does.
            steps += [normalizers.Replace(Regex(rf"\A{space}"), SPACE + space) for space in (SPACE, " ")]
        inner.normalizer = (
            spm_normalizer(self.charsmap, steps) if self.charsmap else normalizers.Sequence([GUARD, *steps])
        )
        scheme = "always" if self.adds_dummy_prefix else "never"
        is_split = not any(SPACE in piece.text[1:] for piece in self._of_type(PieceType.NORMAL))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=is_split)
        if self.has_byte_fallback:
            strip = [decoders.Strip(" ", 1, 0)] if self.adds_dummy_prefix else []
            inner.decoder = decoders.Sequence(
                [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
            )
        else:
            inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
        inner.add_tokens([*user_defined, *added])
        inner.add_special_tokens(special)
        return inner

    def _of_type(self, *types: PieceType) -> Iterator[Piece]:
        return (piece for piece in self.pieces if piece.type in types)

    def _unigram(
        self, vocab: Mapping[str, int], unk: str, special_tokens: Mapping[str, int], added: Set[str]
    ) -> tuple[models.Unigram, tuple[str, ...]]:
        matched = (PieceType.NORMAL, PieceType.USER_DEFINED, PieceType.BYTE)
        scores = {piece.text: piece.score for piece in self._of_type(*matched)}
        for name in special_tokens:
            scores.pop(name, None)
        scores = dict.fromkeys(added, 0.0) | scores
        entries = [
            (text, scores[text]) if text in scores else (HIDDEN + text, 0.0)
            for text in sorted(vocab, key=vocab.__getitem__)
        ]
        # The model cuts texts into these, too, and then unk takes their place (`bundle.tokenizer`).
        extra = tuple(text for text in scores if text not in vocab)
        entries += [(text, scores[text]) for text in extra]
        model = models.Unigram(entries, unk_id=vocab[unk], byte_fallback=self.has_byte_fallback)
        return model, extra

    def _bpe(self, vocab: Mapping[str, int], unk: str) -> models.BPE:
        scores = {piece.text: piece.score for piece in self._of_type(PieceType.NORMAL) if piece.text in vocab}
        merges = [
            (-score, len(text[:i]), text[:i], text[i:])
            for text, score in scores.items()
            for i in range(1, len(text))
            if text[:i] in scores and text[i:] in scores
        ]
        return models.BPE(
            dict(vocab),
            [(left, right) for *_, left, right in sorted(merges)],
            unk_token=unk,
            fuse_unk=True,
            byte_fallback=self.has_byte_fallback,
        )


def _piece(fields: Mapping[int, Any]) -> Piece:
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields.get(1, b"").decode(), score, PieceType(fields.get(3, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a message's fields: ints, or bytes of strings, messages and fixed widths."""
    place = 0

    def varint() -> int:
        nonlocal place
        value, shift = 0, 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"field {number} has the wire type {wire}")
        length = varint() if wire == 2 else 8 if wire == 1 else 4
        if place + length > len(data):
            raise ValueError(f"field {number} ends after the file")
        yield number, data[place : place + length]
        place += length
