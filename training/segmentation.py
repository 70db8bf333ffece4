"""BPE dropout: the training texts cut into other pieces in each pass over the corpus.

Evaluation, bundles and the saved tokenizer know nothing of it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import tokenizers

from bundle.tokenizer import Tokenizer
from training.config import EOS_ID
from training.encoded import EncodedPair
from training.text_files import SentencePair

_MAX_CUTS_PER_PASS = 8  # of one word: more take longer, and the next pass has others anyway


class BpeDropout:
    """Cuts a word as the tokenizer does, but leaves out each possible merge with some probability.

    Provilkov et al. 2020, algorithm 1, arXiv:1910.13267. Not the `tokenizers` library's own dropout, because
    that cannot be seeded.

    Args:
        tokenizer: One of `training.tokenizer`.
        probability: Of leaving out a merge, drawn anew at each step of a word; 0 cuts as the tokenizer does.
    """

    def __init__(self, tokenizer: Tokenizer, probability: float) -> None:
        self.probability = probability
        self._normalize = tokenizer.normalize
        self._inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        model = json.loads(tokenizer.to_json())["model"]
        self._ids: dict[str, int] = model["vocab"]
        self._ranks = {(left, right): rank for rank, (left, right) in enumerate(model["merges"])}

    def words(self, text: str) -> list[str]:
        """What no merge reaches beyond, as the library writes bytes."""
        return [word for word, _ in self._inner.pre_tokenizer.pre_tokenize_str(self._normalize(text))]

    def cut(self, word: str, chance: random.Random) -> list[int]:
        """Token ids of a word of `words`."""
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

    A word is cut at most `_MAX_CUTS_PER_PASS` times in a pass, and each of its places takes one of the cuts.
    A side that would be over its limit is cut as the tokenizer does.

    Args:
        pairs: Within the limits when cut as the tokenizer does.
        tokenizer: Of source and target.
        probability: See `BpeDropout`.
        seed: Of the run.
        max_source_length: In tokens, with eos.
        max_target_length: In tokens, with bos.
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
        places: dict[str, int] = {}  # of each distinct word, in the order of the corpus
        self._sides = tuple(
            [
                [places.setdefault(word, len(places)) for word in self._dropout.words(pair[side])]
                for pair in pairs
            ]
            for side in (0, 1)
        )
        self._words = list(places)
        self._counts = Counter(chain.from_iterable(chain.from_iterable(self._sides)))

    def __call__(self, epoch: int) -> list[EncodedPair]:
        """The pairs of a pass, in the order of the corpus."""
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
