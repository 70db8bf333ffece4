"""Writes a corpus to train on: English sentences whose `it` needs its noun, and their German translations.

In "The dog didn't cross the river because it was too tired" `it` is the dog, and with "too wide" the river.
German says *er*, *sie* or *es* by the gender of that noun, so a model that translates such sentences has to
find it. docs/attention-transformer.md shows the self-attention of a model that learnt it. From the root:

python -m docs.pronouns runs/pronouns.tsv
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

NUM_PAIRS = 8000

# Never together in the corpus: the page asks about this pair of nouns.
HELD_OUT = ("animal", "street")

# English, German, gender: those that can be tired, and those that can be wide.
_ANIMALS = [
    ("animal", "Tier", "n"),
    ("dog", "Hund", "m"),
    ("cat", "Katze", "f"),
    ("horse", "Pferd", "n"),
    ("bird", "Vogel", "m"),
    ("cow", "Kuh", "f"),
    ("sheep", "Schaf", "n"),
    ("fox", "Fuchs", "m"),
    ("goat", "Ziege", "f"),
    ("pig", "Schwein", "n"),
]
_PLACES = [
    ("street", "Straße", "f"),
    ("river", "Fluss", "m"),
    ("field", "Feld", "n"),
    ("bridge", "Brücke", "f"),
    ("path", "Weg", "m"),
    ("valley", "Tal", "n"),
    ("meadow", "Wiese", "f"),
    ("forest", "Wald", "m"),
    ("ice", "Eis", "n"),
    ("garden", "Garten", "m"),
]
_OF_ANIMALS = [
    ("tired", "müde"),
    ("hungry", "hungrig"),
    ("thirsty", "durstig"),
    ("lazy", "faul"),
    ("weak", "schwach"),
    ("ill", "krank"),
]
_OF_PLACES = [
    ("wide", "breit"),
    ("long", "lang"),
    ("dark", "dunkel"),
    ("wet", "nass"),
    ("steep", "steil"),
    ("noisy", "laut"),
]
_VERBS = [("cross", "überquerte"), ("leave", "verließ"), ("enter", "betrat"), ("like", "mochte")]
_ATTRIBUTES = [("", ""), ("small ", "kleine "), ("brown ", "braune ")]
_OPENINGS = [("", ""), ("Yesterday ", "Gestern "), ("In the morning ", "Am Morgen ")]

_NOMINATIVE = {"m": "der", "f": "die", "n": "das"}
_ACCUSATIVE = {"m": "den", "f": "die", "n": "das"}
_PRONOUNS = {"m": "er", "f": "sie", "n": "es"}


def make_pairs(num_pairs: int, seed: int = 0) -> list[tuple[str, str]]:
    """Returns different random pairs of an English and a German sentence."""
    rng = random.Random(seed)
    pairs = dict[str, str]()
    while len(pairs) < num_pairs:
        animal, place = rng.choice(_ANIMALS), rng.choice(_PLACES)
        if (animal[0], place[0]) == HELD_OUT:
            continue
        meant, adjectives = rng.choice([(animal, _OF_ANIMALS), (place, _OF_PLACES)])
        adjective, attribute = rng.choice(adjectives), rng.choice(_ATTRIBUTES)
        verb, opening = rng.choice(_VERBS), rng.choice(_OPENINGS)
        english = (
            f"{opening[0]}the {attribute[0]}{animal[0]} didn't {verb[0]} the {place[0]}"
            f" because it was too {adjective[0]}."
        )
        subject = f"{_NOMINATIVE[animal[2]]} {attribute[1]}{animal[1]}"
        # German has its verb in the second place, before the subject where something else opens the sentence.
        start = f"{opening[1]}{verb[1]} {subject}" if opening[1] else f"{subject} {verb[1]}"
        german = (
            f"{start} {_ACCUSATIVE[place[2]]} {place[1]} nicht,"
            f" weil {_PRONOUNS[meant[2]]} zu {adjective[1]} war."
        )
        pairs[english[0].upper() + english[1:]] = german[0].upper() + german[1:]
    return list(pairs.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the corpus."""
    parser = argparse.ArgumentParser(prog="python -m docs.pronouns", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the file: English, a tab and German on each line")
    options = parser.parse_args(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{english}\t{german}\n" for english, german in make_pairs(NUM_PAIRS)]
    options.out.write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
