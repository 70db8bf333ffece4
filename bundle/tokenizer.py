"""Text to token ids and back, over the `tokenizers` library's own file format.

One class serves training, export and server, so that a text is cut the same way everywhere. How a
tokenizer is trained stands in `training.tokenizer`; this module only uses one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers.decoders import DecodeStream

from bundle.normalization import Normalization, normalization_of

# Of private use: nothing composes with it, so nothing beside it is changed by it.
_MARK = "\ue000"


class Tokenizer:
    """A `tokenizers.Tokenizer` in which a special token that a user typed is plain text.

    Args:
        inner: The library's tokenizer. Owned by this object from here on.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # Not stored in the file by the library, so it is set at every load.
        inner.encode_special_tokens = True
        self._inner = inner
        self._pieces: dict[int, str] = {}
        self._special_tokens = {
            token_id: token.content
            for token_id, token in inner.get_added_tokens_decoder().items()
            if token.special
        }

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises:
            ValueError: The file is missing or is not a tokenizer; the message names it.
        """
        if not path.is_file():
            raise ValueError(f"{path}: no such tokenizer file")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer file ({error})") from error

    def save(self, path: Path) -> None:
        """Write the library's JSON format, readable in an editor."""
        path.write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The text of a `tokenizer.json`."""
        return self._inner.to_str(pretty=True)

    @property
    def normalization(self) -> Normalization:
        """How texts are normalised before they are cut.

        Raises:
            ValueError: Otherwise than `bundle.normalization` does.
        """
        return normalization_of(self._inner)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int:
        """The id of `token`.

        Raises:
            ValueError: The vocabulary has no such token.
        """
        token_id = self._inner.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {token!r}")
        return token_id

    def normalize(self, text: str) -> str:
        """`text` as it is cut into tokens: what `decode` makes of its tokens."""
        normalizer = self._inner.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def normalize_inside(self, text: str) -> str:
        """`text` as it is normalised in the middle of another one: a space at either end stays."""
        return self.normalize(f"{_MARK}{text}{_MARK}")[1:-1]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` alone, with no special token added."""
        return self.encode_batch([text])[0]

    def encode_source(self, text: str) -> list[int]:
        """Token ids of `text` framed as an encoder expects it, by the file's own post-processor."""
        return self.encode_sources([text])[0]

    def encode_truncated(self, text: str, max_length: int) -> tuple[list[int], int]:
        """`encode_source` within `max_length` tokens, and how many were left out at the end of the text."""
        (encoding,) = self._encodings([text], add_special_tokens=False)
        num_given, room = len(encoding), max_length - self._inner.num_special_tokens_to_add(is_pair=False)
        encoding.truncate(room)
        return self._inner.post_process(encoding).ids, max(num_given - room, 0)

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_source` of many texts at once."""
        return [encoding.ids for encoding in self._encodings(texts, add_special_tokens=True)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once."""
        return [encoding.ids for encoding in self._encodings(texts, add_special_tokens=False)]

    def _encodings(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        # Also for a single text: only during this call does the library let other threads run.
        return self._inner.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; special tokens have none."""
        return self._inner.decode(list(token_ids), skip_special_tokens=True)

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of many sequences at once."""
        return self._inner.decode_batch([list(ids) for ids in sequences], skip_special_tokens=True)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token completes; a special token shows its name.

        A token that ends inside a character has the empty piece, and the character belongs to the token
        that completes it.
        """
        stream, places, pieces = self.stream(), list[int](), list[str]()
        for place, token_id in enumerate(token_ids):
            if token_id in self._special_tokens:
                pieces.append(self._special_tokens[token_id])
            else:
                pieces.append(stream.push([token_id]))
                places.append(place)
        # A stream holds an end of U+FFFD back, which half a character looks like; a text may really have it.
        if places and not pieces[places[-1]]:
            rest = stream.finish()
            rest_ids = self.encode(rest)
            if [token_ids[place] for place in places[-len(rest_ids) :]] == rest_ids:
                pieces[places[-1]] = rest
        return pieces

    def piece(self, token_id: int) -> str:
        """The same of one token alone, kept for the next time."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self.pieces([token_id])[0]
        return self._pieces[token_id]

    def words(self, token_ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """What white space separates in the text of `token_ids`, each with the places of its tokens.

        Special tokens belong to no word. A token that ends inside a character belongs to the word of the one
        that completes it.
        """
        words: list[tuple[str, list[int]]] = []
        stream, open_places, is_inside = self.stream(), list[int](), False
        places = [place for place, token_id in enumerate(token_ids) if token_id not in self._special_tokens]
        pieces = [stream.push([token_ids[place]]) for place in places]
        for place, piece in zip([*places, None], [*pieces, stream.finish()], strict=True):
            if place is not None:
                open_places.append(place)
            for i, text in enumerate(re.split(r"\s+", piece)):
                if not text:
                    continue
                if i or not is_inside:
                    words.append(("", []))
                words[-1] = (words[-1][0] + text, words[-1][1] + open_places)
                open_places = open_places[-1:]  # of several words in one token, each has it
            if piece.strip():
                open_places = []
            is_inside = not piece[-1:].isspace() if piece else is_inside
        return words

    def stream(self) -> TextStream:
        """A fresh decoder of one growing sequence."""
        return TextStream(self, self._inner)


class TextStream:
    """Decodes one growing sequence into pieces of whole characters.

    Owned by whoever streams one sequence. Invariant: the pieces joined, `finish()` included, are
    `Tokenizer.decode` of all ids pushed.
    """

    def __init__(self, tokenizer: Tokenizer, inner: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._num_sent = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; empty while the last character is incomplete."""
        piece = ""
        for token_id in token_ids:
            self._token_ids.append(token_id)
            piece += self._decoder.step(self._inner, token_id) or ""
        self._num_sent += len(piece)
        return piece

    def finish(self) -> str:
        """What is left: bytes that never became a character, as U+FFFD."""
        rest = self._tokenizer.decode(self._token_ids)[self._num_sent :]
        self._num_sent += len(rest)
        return rest
