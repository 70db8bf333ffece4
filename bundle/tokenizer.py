"""Text to token ids and back, with the `tokenizers` library's own file format.

Training, export and server use this one class, so that they cut a text in the same way. The training of a
tokenizer is in `training.data.tokenizer`.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import models

from seq2seq_serve.bundle.characters import UNSPACED
from seq2seq_serve.bundle.charsmap import HIDDEN, take_charsmap
from seq2seq_serve.bundle.normalization import Normalization, normalization_of

# A private-use character: it does not compose with its neighbours, so normalisation leaves them alone.
_MARK = "\ue000"
_SPACE = "\u2581"

_SHORT = 256  # characters, which take a tenth of a millisecond
# A text of more characters is cut before white space.
_LEAST_PIECE, _PIECE_PER_TOKEN = 4096, 64
_IS_UNSPACED = re.compile(f"[{UNSPACED}]")
_WHITE_SPACE = re.compile(r"(?<=\S)\s")  # the first of several
_WORD = "a"  # before a piece, so that its first word has the tokens of one inside a text
_MOST_KEPT = 2**20  # characters and tokens of spellings
_OPENING = "("  # before a word, so that it has the tokens of one without a space before it


class Tokenizer:
    """A `tokenizers.Tokenizer` that treats a special token in a user's text as plain text.

    The text of a target is that of its tokens' joined bytes. For byte-level pairs the library decodes the
    same text. With byte fallback the library would discard a whole run of bytes if one of them is not part of
    a character.

    Files of imported models may have pieces that no text is cut into (`bundle.charsmap.HIDDEN`), pieces that
    the model's vocabulary lacks, which are special tokens behind it, and SentencePiece's normalisation.

    Args:
        inner: The library's tokenizer; this object then owns it.

    Attributes:
        token_bytes: The UTF-8 bytes that each token id adds to a text; a special token adds none.
        special_tokens: The names of the special tokens by their ids.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        # The library does not store this in the file, so every load sets it.
        inner.encode_special_tokens = True
        self._inner = inner
        self._pieces: dict[int, str] = {}
        self._spellings: dict[str, list[tuple[int, ...]]] = {}  # the newest last
        self._num_kept, self._keeping = 0, threading.Lock()
        self._charsmap = take_charsmap(inner)
        added = inner.get_added_tokens_decoder()
        self.special_tokens = {
            token_id: token.content.removeprefix(HIDDEN) for token_id, token in added.items() if token.special
        }
        whole = sorted(
            (token.content for token in added.values() if not token.special), key=len, reverse=True
        )
        self._whole_tokens = re.compile(f"({'|'.join(map(re.escape, whole))})") if whole else None
        types, ids = _decoder_types(inner), range(self.vocab_size)
        # Tokens that are not bytes are decoded after another token, which keeps a space before them.
        self._other_id = next((i for i in ids if inner.decode([i]).isalnum()), ids[-1] if ids else 0)
        self.token_bytes = tuple(self._bytes_of(types, token_id) for token_id in ids)
        self._has_marks = bool(types & {"Metaspace", "Replace"})
        # A unigram model can find special tokens in a text; byte pairs never become one.
        is_unigram = isinstance(inner.model, models.Unigram) and inner.post_processor is None
        self._unk_id: int | None = inner.model.tokenize(HIDDEN)[-1].id if is_unigram else None
        spaced = next((i for i, data in enumerate(self.token_bytes) if data.startswith(b" ")), None)
        self._strips_space = spaced is not None and not inner.decode([spaced]).startswith(" ")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`; a ValueError names a file that is missing or not a tokenizer."""
        if not path.is_file():
            raise ValueError(f"{path}: no such tokenizer file")
        return cls.from_bytes(path.read_bytes(), str(path))

    @classmethod
    def from_bytes(cls, content: bytes, origin: str) -> Tokenizer:
        """Read the content of a `tokenizer.json`; a ValueError names the `origin` of wrong content."""
        try:
            return cls(tokenizers.Tokenizer.from_buffer(content))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{origin}: not a tokenizer file ({error})") from error

    def save(self, path: Path) -> None:
        """Write the library's JSON format, indented for people."""
        path.write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        if self._charsmap is None:
            return self._inner.to_str(pretty=True)
        described = json.loads(self._inner.to_str())
        described["normalizer"]["normalizers"].insert(0, self._charsmap.described)
        return json.dumps(described, ensure_ascii=False, indent=2)

    @property
    def normalization(self) -> Normalization:
        """The form by which texts are normalised; ValueError if it is not one of `bundle.normalization`."""
        return normalization_of(self._inner)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, with those of special tokens."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @property
    def max_text_id(self) -> int:
        """The highest id that a text can be cut into."""
        return max((i for i in range(self.vocab_size) if i not in self.special_tokens), default=-1)

    def token_id(self, token: str) -> int:
        """The id of `token`; ValueError if the vocabulary does not have it."""
        for name in (token, HIDDEN + token):
            token_id = self._inner.token_to_id(name)
            if token_id is not None:
                return token_id
        raise ValueError(f"the tokenizer has no token {token!r}")

    def normalize(self, text: str) -> str:
        """The normalised text, which is what `decode` returns for its tokens."""
        normalizer = self._inner.normalizer
        text = self._mapped(text)
        if normalizer is not None:
            text = str(normalizer.normalize_str(text))
        return text.replace(_SPACE, " ") if self._has_marks else text

    def _mapped(self, text: str) -> str:
        """The text after SentencePiece's normalisation, except of tokens that are matched whole."""
        if self._charsmap is None:
            return text
        if self._whole_tokens is None:
            return self._charsmap.normalize(text)
        parts = self._whole_tokens.split(text)
        parts[::2] = map(self._charsmap.normalize, parts[::2])
        return "".join(parts)

    def normalize_inside(self, text: str) -> str:
        """The text normalised as a part of a longer one: spaces at its ends stay."""
        return self.normalize(f"{_MARK}{text}{_MARK}").split(_MARK, 1)[1].rpartition(_MARK)[0]

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_source(self, text: str) -> list[int]:
        """The token ids of `text` as a source, with the special tokens of the file's post-processor."""
        return self.encode_sources([text])[0]

    def encode_truncated(
        self,
        text: str,
        max_length: int,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        before_piece: Callable[[], None] = lambda: None,
    ) -> tuple[list[int], int]:
        """`prefix`, the ids of `text`, and `suffix`: at most `max_length` tokens.

        Args:
            text: The text.
            max_length: The most tokens, special ones included.
            prefix: Special tokens.
            suffix: Special tokens.
            before_piece: Is called before each piece of a very long text; an error that it raises ends the
                work.

        Returns:
            The ids, and the number of tokens that were cut from the text's end.
        """
        # The library's own truncation is not used: it keeps the cut tokens, and blocks all other threads.
        token_ids: list[int] = []
        for piece in _pieces(text, max(_LEAST_PIECE, _PIECE_PER_TOKEN * max_length)):
            before_piece()
            if token_ids and piece[0].isspace():
                token_ids += self.encode(_WORD + piece)[len(self.encode(_WORD)) :]
            else:
                token_ids += self.encode(piece)
        num_over = max(len(prefix) + len(token_ids) + len(suffix) - max_length, 0)
        return [*prefix, *token_ids[: len(token_ids) - num_over], *suffix], num_over

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_source` of many texts at once."""
        return self._rows(texts, add_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once."""
        return self._rows(texts, add_special_tokens=False)

    def _rows(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        texts = list(map(self._mapped, texts))
        # Only in the batch call the library lets other threads run, which costs more than a short text.
        if len(texts) == 1 and len(texts[0]) <= _SHORT:
            rows = [self._inner.encode(texts[0], add_special_tokens=add_special_tokens).ids]
        else:
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            rows = [encoding.ids for encoding in encodings]
        if self._unk_id is None:
            return rows
        return [
            row if self.special_tokens.keys().isdisjoint(row) else self._known_ids(text, self._unk_id)
            for text, row in zip(texts, rows, strict=True)
        ]

    def _known_ids(self, text: str, unk_id: int) -> list[int]:
        """The ids of a text with unknown pieces, each looked up by its characters as Marian does."""

        def known_id(token: str, token_id: int) -> int:
            if token_id not in self.special_tokens:
                return token_id
            hidden_id = self._inner.token_to_id(HIDDEN + token)
            return unk_id if hidden_id is None or hidden_id in self.special_tokens else hidden_id

        # Only this call keeps the characters of unknown pieces.
        (encoding,) = self._inner.encode_batch([text])
        return [known_id(*pair) for pair in zip(encoding.tokens, encoding.ids, strict=True)]

    def spellings(self, texts: Sequence[str]) -> list[list[tuple[int, ...]]]:
        """The ways to write each of some texts inside a longer one: after a space, after a mark, or first.

        There are none for a text that is not what its tokens say. Those of the newest texts are kept, up to
        about 20 MB: requests bring the same terms again and again.
        """
        known = {text: ways for text in texts if (ways := self._spellings.get(text)) is not None}
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            found = dict(zip(new, self._new_spellings(new), strict=True))
            known |= found
            with self._keeping:
                for text, ways in found.items():
                    if text not in self._spellings:
                        self._spellings[text] = ways
                        self._num_kept += _size_of(text, ways)
                while self._num_kept > _MOST_KEPT:
                    oldest = next(iter(self._spellings))
                    self._num_kept -= _size_of(oldest, self._spellings.pop(oldest))
        return [known[text] for text in texts]

    def _new_spellings(self, texts: Sequence[str]) -> list[list[tuple[int, ...]]]:
        starts = [_WORD, f"{_WORD} ", _OPENING, ""]
        begun = self.encode_batch(starts)
        before = dict(zip(starts, [begun[0], begun[0], begun[2], []], strict=True))
        forms = starts[1:]
        rows = iter(self.encode_batch([start + text for text in texts for start in forms]))
        result: list[list[tuple[int, ...]]] = []
        for text in texts:
            wanted, ways = self.normalize_inside(text).strip(), dict[tuple[int, ...], None]()
            for start in forms:
                row, first = next(rows), before[start]
                ids = tuple(row[len(first) :])
                is_whole = row[: len(first)] == first and self.special_tokens.keys().isdisjoint(ids)
                if is_whole and wanted and self.decode(ids).strip() == wanted:
                    ways[ids] = None
            result.append(list(ways))
        return result

    def unknown_words(self, text: str) -> list[str]:
        """The words of a text that a vocabulary of words lacks, each once; none for one of pieces."""
        if not isinstance(self._inner.model, models.WordLevel):
            return []
        unk_id = self._inner.token_to_id(self._inner.model.unk_token)
        (encoding,) = self._inner.encode_batch([text], add_special_tokens=False)
        tokens = zip(encoding.offsets, encoding.ids, strict=True)
        return list(dict.fromkeys(text[start:end] for (start, end), token_id in tokens if token_id == unk_id))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`; special tokens add nothing to it."""
        stream = self.stream()
        return stream.push(token_ids) + stream.finish()

    def decode_batch(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of many sequences at once."""
        return [self.decode(token_ids) for token_ids in sequences]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token completes, and for a special token its name.

        A token that ends inside a character has an empty piece; the character belongs to the token that
        completes it.
        """
        stream = self.stream()
        return [self.special_tokens.get(token_id) or stream.push([token_id]) for token_id in token_ids]

    def source_pieces(self, token_ids: Sequence[int]) -> list[str]:
        """`pieces` of a source."""
        return self.pieces(token_ids)

    def piece(self, token_id: int) -> str:
        """The piece of a single token, from a cache after the first call."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self.pieces([token_id])[0]
        return self._pieces[token_id]

    def words(self, token_ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """The words of the text of `token_ids`, with the places of their tokens.

        White space separates words, and where one is in a script without spaces, so does the end of a token.
        Special tokens belong to no word. A token that ends inside a character belongs to the word of the
        token that completes the character.
        """
        words: list[tuple[str, list[int]]] = []
        stream, open_places, is_inside = self.stream(), list[int](), False
        places = [place for place, token_id in enumerate(token_ids) if token_id not in self.special_tokens]
        pieces = [stream.push([token_ids[place]]) for place in places]
        for place, piece in zip([*places, None], [*pieces, stream.finish()], strict=True):
            if place is not None:
                open_places.append(place)
            for i, text in enumerate(re.split(r"\s+", piece)):
                if not text:
                    continue
                if i or not is_inside or _is_between_words(words[-1][0][-1], text[0]):
                    words.append(("", []))
                words[-1] = (words[-1][0] + text, words[-1][1] + open_places)
                open_places = open_places[-1:]  # a token with several words belongs to each
            if piece.strip():
                open_places = []
            is_inside = not piece[-1:].isspace() if piece else is_inside
        return words

    def stream(self, *, strips_space: bool = False) -> TextStream:
        """Create a decoder for one growing sequence; `strips_space` drops a first space in any case."""
        return TextStream(self.token_bytes, strips_space=strips_space or self._strips_space)

    def _bytes_of(self, decoder_types: set[str], token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None or token_id in self.special_tokens:
            return b""
        token = token.removeprefix(HIDDEN)
        if decoder_types == {"Metaspace"}:
            return token.replace(_SPACE, " ").encode()
        if decoder_types == {"ByteLevel"}:
            has_byte = all(character in BYTE_OF_CHARACTER for character in token)
            return bytes(map(BYTE_OF_CHARACTER.__getitem__, token)) if has_byte else token.encode()
        if "ByteFallback" in decoder_types and re.fullmatch("<0x[0-9A-F]{2}>", token):
            return bytes.fromhex(token[3:5])
        text = self._inner.decode([self._other_id, token_id])
        return text[len(self._inner.decode([self._other_id])) :].encode()


def _is_between_words(one: str, other: str) -> bool:
    """Whether a word may end between two characters, because it is in a script without spaces."""
    if unicodedata.category(other)[0] not in "LN":  # such as a vowel of Thai, or a full stop
        return False
    if _IS_UNSPACED.match(one):
        return True
    return _IS_UNSPACED.match(other) is not None and unicodedata.category(one) not in ("Ps", "Pi")


def _size_of(text: str, ways: list[tuple[int, ...]]) -> int:
    """The size of spellings that are kept, in characters and tokens; that of the objects is about 64."""
    return 64 + len(text) + sum(map(len, ways))


def _pieces(text: str, length: int) -> Iterator[str]:
    """Yields a text in pieces of about this length, which begin with white space where there is some."""
    begin = 0
    while begin < len(text):
        end = begin + length
        if end < len(text):
            places = [found.start() for found in _WHITE_SPACE.finditer(text, begin + 1, end)]
            if places:
                end = places[-1]
            elif text[end].isspace():  # in the middle of much of it
                later = _WHITE_SPACE.search(text, end + 1)
                end = later.start() if later else len(text)
        yield text[begin:end]
        begin = end


def _decoder_types(inner: tokenizers.Tokenizer) -> set[str]:
    if inner.decoder is None:
        return set()
    decoder = json.loads(inner.decoder.__getstate__())
    return {part["type"] for part in decoder.get("decoders", [decoder])}


def _byte_of_character() -> dict[str, int]:
    """The characters that stand for bytes in GPT-2's byte-level pairs; printable bytes are their own."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class TextStream:
    """Decodes one growing sequence into pieces of whole characters.

    Owned by the caller that streams the sequence. Invariant: the joined pieces, with `finish()`, are
    `Tokenizer.decode` of all pushed ids, without its first space if `strips_space`.

    Args:
        token_bytes: The bytes of each token id; any other id has none.
        strips_space: Whether the space of a text's first token is dropped.
    """

    def __init__(self, token_bytes: Sequence[bytes], *, strips_space: bool) -> None:
        self.token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips_space = strips_space

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; empty while the last character is incomplete."""
        return self.push_bytes(self.bytes_of(token_ids))

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that `token_ids` add to a text."""
        known = len(self.token_bytes)
        return b"".join([self.token_bytes[token_id] for token_id in token_ids if token_id < known])

    def push_bytes(self, data: bytes) -> str:
        """The text that more bytes complete."""
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The end of the text: U+FFFD for bytes that never became a character, otherwise empty."""
        return self._decoder.decode(b"", final=True)
