"""The built-in parallel corpus: a grammar that writes the same sentence in Korean and in English.

It was written for this project, so no other licence applies to its sentences. `patterns` holds the sentence
patterns, `lexicon` their words. The held-out splits test new combinations of known words: see `build_corpus`.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from seq2seq_serve.training.builtin import lexicon as words
from seq2seq_serve.training.builtin.korean import Style, Voice
from seq2seq_serve.training.builtin.lexicon import Word
from seq2seq_serve.training.builtin.patterns import PATTERNS, Content


@dataclass(frozen=True)
class Pair:
    """A Korean sentence, its English sentence, the pattern that made both, and the words in its slots."""

    source: str
    target: str
    pattern: str
    fillers: tuple[str, ...]


@dataclass(frozen=True)
class BuiltinCorpus:
    """The three splits; `build_corpus` describes how they differ."""

    train: tuple[Pair, ...]
    dev: tuple[Pair, ...]
    test: tuple[Pair, ...]


_VOICES = (
    Voice(Style.PLAIN),
    Voice(Style.PLAIN, is_short=True, is_directional=True),
    Voice(Style.PLAIN, is_spaced=True),
    Voice(Style.PLAIN, has_period=True),
    Voice(Style.FORMAL),
    Voice(Style.FORMAL, is_humble=True, is_directional=True),
    Voice(Style.FORMAL, is_spaced=True),
    Voice(Style.FORMAL, is_humble=True, is_spaced=True),
    Voice(Style.FORMAL, is_humble=True, has_period=True),
)
# The sentences that the README and the tests translate: always in training, in every voice.
_ANCHORS: dict[str, dict[str, Any]] = {
    "weekday": {"day": words.TODAY, "name": words.WEEKDAYS[4]},
    "arrival": {"adverb": words.ARRIVALS[0], "moment": words.WEEKDAYS[4]},
    "job": {"person": words.PRONOUNS[0], "job": words.JOBS[0], "negative": False},
}
_PAIRS_PER_PATTERN = 560
_HELD_OUT_SHARE = 0.05
_MAX_CONTENTS_OF_A_HELD_OUT_PAIR = 8
_MIN_TRAIN_CONTENTS = 4


def _draw_contents(seed: int) -> list[Content]:
    contents = []
    for position, pattern in enumerate(PATTERNS):
        rng = random.Random(f"{seed} {position}")
        anchor = _ANCHORS.get(pattern.name)
        drawn = rng.sample(range(pattern.size()), min(pattern.size(), 5 * _PAIRS_PER_PATTERN))
        fillings = [pattern.filling(number) for number in drawn]
        if anchor is not None:
            fillings = [anchor, *(filling for filling in fillings if filling != anchor)]
        num_voices = 1 if pattern.size() > _PAIRS_PER_PATTERN else 4
        num_pairs = 0
        for filling in fillings:
            if num_pairs >= _PAIRS_PER_PATTERN:
                break
            voices = _VOICES if filling is anchor else rng.sample(_VOICES, num_voices)
            content = pattern.content(filling, voices)
            if content is not None:
                contents.append(content)
                num_pairs += len(content.sources)
    return contents


def _choose_held_out(contents: Sequence[Content], rng: random.Random) -> dict[tuple[str, str], str]:
    """Chooses the pairs of fillers that training never sees together, and the split of each pair.

    Takes only rare pairs, which cost training little, and no pair that would leave a filler too rare in one
    of its patterns.
    """
    containing: dict[tuple[str, str], list[Content]] = defaultdict(list)
    remaining: Counter[tuple[str, str]] = Counter()
    for content in contents:
        remaining.update((content.pattern, filler) for filler in content.fillers)
        for pair in content.filler_pairs:
            containing[pair].append(content)
    quota = {
        name: _HELD_OUT_SHARE * n for name, n in Counter(content.pattern for content in contents).items()
    }
    anchored = {
        pair
        for filling in _ANCHORS.values()
        for pair in combinations(
            sorted(word.korean for word in filling.values() if isinstance(word, Word)), 2
        )
    }
    candidates = list(containing)
    rng.shuffle(candidates)
    held_out: dict[tuple[str, str], str] = {}
    for pair in candidates:
        members = containing[pair]
        costs = Counter((member.pattern, filler) for member in members for filler in member.fillers)
        if (
            len(members) <= _MAX_CONTENTS_OF_A_HELD_OUT_PAIR
            and pair not in anchored
            and all(quota[member.pattern] > 0 for member in members)
            and all(remaining[key] - cost >= _MIN_TRAIN_CONTENTS for key, cost in costs.items())
        ):
            remaining.subtract(costs)
            for member in members:
                quota[member.pattern] -= 1
            held_out[pair] = "dev" if len(held_out) % 3 == 0 else "test"
    return held_out


def build_corpus(seed: int = 0) -> BuiltinCorpus:
    """Draws the corpus; the same seed gives the same corpus on every machine.

    A content, which is one English sentence with its Korean spellings, belongs to a single split. Dev and
    test hold the contents with a held-out pair of fillers: no training sentence has both of these words,
    though each is in other sentences of the same pattern. Contents with the same English sentence are in the
    same split, so training has neither side of a held-out sentence.
    """
    contents = _draw_contents(seed)
    held_out = _choose_held_out(contents, random.Random(f"{seed} held out"))
    splits_of_contents = [
        [held_out[pair] for pair in content.filler_pairs if pair in held_out] for content in contents
    ]
    split_of_target: dict[str, str] = {}
    for content, splits_of_content in zip(contents, splits_of_contents, strict=True):
        for split in splits_of_content:
            if split_of_target.get(content.target) != "test":
                split_of_target[content.target] = split
    splits: dict[str, dict[str, Pair]] = {"train": {}, "dev": {}, "test": {}}
    for content, splits_of_content in zip(contents, splits_of_contents, strict=True):
        split = split_of_target.get(content.target, "train")
        if split != "train" and not splits_of_content:
            continue
        for source in content.sources if split == "train" else content.sources[:1]:
            splits[split][source] = Pair(source, content.target, content.pattern, content.fillers)
    return BuiltinCorpus(*(tuple(pairs.values()) for pairs in splits.values()))
