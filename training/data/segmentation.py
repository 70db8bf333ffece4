"""BPE dropout: each pass over the corpus cuts the training texts into other pieces.

Evaluation, bundles and the saved tokenizer do not use it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import tokenizers

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.training.config import EOS_ID
from seq2seq_serve.training.data.encoded import EncodedPair
from seq2seq_serve.training.data.text_files import SentencePair

_MAX_CUTS_PER_PASS = 8  # per word: more would take longer, and the next pass makes new ones


class BpeDropout:
    """Cuts a word as the tokenizer does, but leaves out each possible merge with a probability.

    Provilkov et al. 2020, algorithm 1, arXiv:1910.13267: the merges to leave out are drawn anew at each step
    of a word. The dropout of the `tokenizers` library is not used, because it cannot be seeded.
    """

    def __init__(self, tokenizer: Tokenizer, probability: float) -> None:
        self.probability = probability
        self._normalize = tokenizer.normalize
        self._inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        model = json.loads(tokenizer.to_json())["model"]
        self._ids: dict[str, int] = model["vocab"]
        self._ranks = {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}

    def words(self, text: str) -> list[str]:
        """The units of a text that no merge crosses, in the library's spelling of bytes."""
        return [word for word, _ in self._inner.pre_tokenizer.pre_tokenize_str(self._normalize(text))]

    def cut(self, word: str, chance: random.Random) -> list[int]:
        """The token ids of a word that `words` returned."""
        pieces = list(word)
        while len(pieces) > 1:
            candidates = [
                (self._ranks[pair], place)
                for place, pair in enumerate(pairwise(pieces))
                if pair in self._ranks and chance.random() >= self.probability
            ]
            if not candidates:
                break
            _, place = min(candidates)
            pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
        return [self._ids[piece] for piece in pieces]


class FreshlyCutPairs:
    """The pairs of each pass over the corpus, cut with `BpeDropout`: a function of the pass and the seed.

    A word is cut at most `_MAX_CUTS_PER_PASS` times in a pass, and each of its occurrences takes one of the
    cuts. A side that would exceed its limit (in tokens, the source with eos, the target with bos) is cut as
    the tokenizer cuts it, which must keep the limit.
    """

    def __init__(
        self,
        pairs: Sequence[SentencePair],
        tokenizer: Tokenizer,
        probability: float,
        seed: int,
        *,
        max_source_length: int,
        max_target_length: int,
    ) -> None:
        self._dropout = BpeDropout(tokenizer, probability)
        self._undropped = BpeDropout(tokenizer, 0.0)
        self._seed = seed
        self._max_lengths = max_source_length, max_target_length
        places: dict[str, int] = {}  # each distinct word's number, in the order of the corpus

        def numbers(text: str) -> list[int]:
            return [places.setdefault(word, len(places)) for word in self._dropout.words(text)]

        self._sides = tuple([numbers(pair[side]) for pair in pairs] for side in (0, 1))
        self._words = list(places)
        self._counts = Counter(chain.from_iterable(chain.from_iterable(self._sides)))

    def __call__(self, epoch: int) -> list[EncodedPair]:
        """Return the pairs of a pass, in the order of the corpus."""
        chance = random.Random(f"{self._seed} {epoch}")
        cuts = [
            [self._dropout.cut(word, chance) for _ in range(min(self._counts[place], _MAX_CUTS_PER_PASS))]
            for place, word in enumerate(self._words)
        ]
        choices = np.random.default_rng([self._seed, epoch]).integers(2**31, size=sum(self._counts.values()))
        numbers = iter(choices.tolist())

        def ids(words: list[int], max_length: int) -> list[int]:
            found = [id_ for word in words for id_ in cuts[word][next(numbers) % len(cuts[word])]]
            if len(found) < max_length:
                return found
            return [id_ for word in words for id_ in self._undropped.cut(self._words[word], chance)]

        max_source_length, max_target_length = self._max_lengths
        return [
            EncodedPair([*ids(source, max_source_length), EOS_ID], ids(target, max_target_length))
            for source, target in zip(*self._sides, strict=True)
        ]
