"""The built-in corpora: one for each kind of sources that a model can read.

Those of texts and stories are data that programs of this project wrote (commit f1d8ffd has that of the
stories); those of pictures and clips come from generators.

`training/builtin/korean-english` has short sentences, in up to nine Korean spellings and styles each. The
held-out sentences test new combinations of known words: each has two words that no training sentence has
together.

`training/builtin/stories` has nine kinds of question, equally often: where a person or a thing is, who has a
thing, yes or no, how many things someone carries, before or after; the colour of an animal by analogy, what
it fears by its kind, and how rooms lie to each other. Exactly the people and things of a held-out story never
come together in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from PIL import Image

from seq2seq_serve.training import builtin
from seq2seq_serve.training.builtin import moving_shapes, shapes
from seq2seq_serve.training.builtin.splits import Split
from seq2seq_serve.training.data.sources import Clips, Nothing, Pictures, SourceKind, Stories, Tokens
from seq2seq_serve.training.data.text_files import SentencePair, iterate_tsv

TRANSLATION_LANGUAGES = {"source_language": "ko", "target_language": "en"}  # of the corpus of texts
_NUM_PICTURES: dict[Split, int] = {"train": 20_000, "dev": 500, "test": 1_000}
_NUM_CLIPS: dict[Split, int] = {"train": 10_000, "dev": 300, "test": 1_000}
_FRAME_MILLISECONDS = 100
_FAST = 1  # the level of PNG's compression

Parts = dict[Split, tuple[SentencePair, ...]]


def built_in_parts(kind: SourceKind, folder: Path) -> tuple[str, Parts]:
    """The built-in corpus of a kind, always the same, and its name; the folder gets its pictures or clips.

    Names of files start from the folder, so the corpus is the same in every folder.

    Raises:
        ValueError: There is no built-in corpus of the kind.
        OSError: The folder cannot be written.
    """
    match kind:
        case Tokens():
            return "built-in Korean-English", _read("korean-english")
        case Stories():
            return "built-in stories", _read("stories")
        case Pictures():
            return "built-in pictures", _parts(_NUM_PICTURES, lambda *part: _picture_pairs(folder, *part))
        case Nothing():
            return "captions of the built-in pictures", _parts(_NUM_PICTURES, _caption_pairs)
        case Clips():
            return "built-in clips", _parts(_NUM_CLIPS, lambda *part: _clip_pairs(folder, *part))
    raise ValueError("there is no built-in corpus for this model: give its files (--tsv)")


def write_picture(path: Path, scene: shapes.Scene) -> None:
    """Write a picture as PNG."""
    Image.fromarray(scene.picture).save(path, compress_level=_FAST)


def write_clip(path: Path, clip: moving_shapes.Clip) -> None:
    """Write a clip as an animated PNG, which plays in a browser."""
    first, *others = map(Image.fromarray, clip.frames)
    first.save(
        path, save_all=True, append_images=others, duration=_FRAME_MILLISECONDS, loop=0, compress_level=_FAST
    )


def _read(name: str) -> Parts:
    folder = Path(builtin.__path__[0]) / name
    return {split: tuple(iterate_tsv(folder / f"{split}.tsv.gz")) for split in get_args(Split)}


def _parts(sizes: dict[Split, int], pairs: Callable[[int, Split], Iterator[SentencePair]]) -> Parts:
    return {split: tuple(pairs(sizes[split], split)) for split in get_args(Split)}


def _caption_pairs(size: int, split: Split) -> Iterator[SentencePair]:
    chance = random.Random(f"captions {split}")
    for number, scene in enumerate(shapes.generate(size, split=split)):
        yield SentencePair(f"{split} {number}", shapes.caption(scene, chance))


def _picture_pairs(folder: Path, size: int, split: Split) -> Iterator[SentencePair]:
    chance = random.Random(f"captions {split}")
    (folder / split).mkdir(parents=True, exist_ok=True)
    for number, scene in enumerate(shapes.generate(size, split=split)):
        name = _name(split, number)
        write_picture(folder / name, scene)
        yield SentencePair(name, shapes.caption(scene, chance))


def _clip_pairs(folder: Path, size: int, split: Split) -> Iterator[SentencePair]:
    chance = random.Random(f"captions {split}")
    (folder / split).mkdir(parents=True, exist_ok=True)
    for number, clip in enumerate(moving_shapes.generate(size, split=split)):
        name = _name(split, number)
        write_clip(folder / name, clip)
        yield SentencePair(name, moving_shapes.caption(clip, chance))


def _name(split: Split, number: int) -> str:
    return f"{split}/{number:05d}.png"
