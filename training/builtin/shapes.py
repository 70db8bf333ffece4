"""The built-in pictures: one to three figures, and captions that name each figure and how they stand.

    a red circle
    there is a small red circle to the left of a blue square
    a red circle is above a blue square and left of a white star
    a red circle over a blue square that is right of a big white star

A caption is lower-case words with one space between them, without punctuation. `caption` draws one of the
right ones, `is_right` decides about any.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.training.builtin.figures import COLOURS, OUTLINES, corners, draw_light, draw_palette, paint
from seq2seq_serve.training.builtin.splits import Split, own_combinations, random_of

SIZE_PIXELS = 56
SHAPES = tuple(OUTLINES)
SIZES = {"small": ("small", "little"), "large": ("large", "big")}
RELATIONS = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
"""The wordings of each relation."""

HELD_OUT: dict[tuple[str, ...], Split] = {
    ("red", "cross"): "test",
    ("green", "circle"): "test",
    ("blue", "triangle"): "test",
    ("yellow", "star"): "test",
    ("circle", "left", "cross"): "test",
    ("triangle", "above", "star"): "test",
    ("cross", "above", "square"): "test",
    ("diamond", "left", "triangle"): "test",
    ("purple", "square"): "dev",
    ("white", "diamond"): "dev",
    ("square", "left", "circle"): "dev",
    ("circle", "above", "diamond"): "dev",
}
"""The combinations that training never has, and the split that has at least one of its own in each scene.

A combination is a colour and a shape, or two shapes and how the first clearly stands to the second.
"""

_RADIUS_PIXELS = {"small": (5.0, 6.0), "large": (8.5, 10.0)}
_GAP_PIXELS = 3
_CLEAR_PIXELS = 8
_PLACING_TRIES = 20
# People name what strikes them first. Without a habit, nothing in a picture would decide which figure the
# first word is about, and attention would have to look at all of them at once.
_HABIT = 0.8

_SIZE_OF_WORD = {word: size for size, words in SIZES.items() for word in words}
_RELATION_OF_PHRASE = {phrase: name for name, phrases in RELATIONS.items() for phrase in phrases}
_MENTION = rf"a (?:(?:{'|'.join(_SIZE_OF_WORD)}) )?(?:{'|'.join(COLOURS)}) (?:{'|'.join(SHAPES)})"
_RELATED = rf"({'|'.join(_RELATION_OF_PHRASE)}) ({_MENTION})"
_CAPTION = re.compile(rf"(there is )?({_MENTION})(?: (is )?{_RELATED}(?: (and|that is) {_RELATED})?)?")


@dataclass(frozen=True)
class Figure:
    """A figure of a scene, with its centre and its radius in pixels; x runs right, y down."""

    shape: str
    colour: str
    size: str
    x_pixels: float
    y_pixels: float
    radius_pixels: float


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture and the figures in it.

    Figures do not touch, and no two have the same colour. Of any two, one stands clearly left of, right of,
    above or below the other.

    Attributes:
        figures: one to three.
        picture: uint8 [56, 56, 3], RGB.
        owners: uint8 [56, 56], for each pixel the number of its figure plus 1, or 0 for the background.
    """

    figures: tuple[Figure, ...]
    picture: NDArray[np.uint8]
    owners: NDArray[np.uint8]

    def pixels(self, number: int) -> NDArray[np.bool_]:
        """Returns which pixels figure `number` has: bool [56, 56]."""
        return np.asarray(self.owners == number + 1)

    def places(self, number: int, grid: int = 14) -> NDArray[np.bool_]:
        """Returns which places of a feature map lie on figure `number`: bool [grid, grid].

        A place lies on a figure if the figure has at least one of its pixels. `grid` divides 56.
        """
        side = SIZE_PIXELS // grid
        rows, columns = np.nonzero(self.pixels(number))
        places = np.zeros((grid, grid), np.bool_)
        places[rows // side, columns // side] = True
        return places


def generate(num_scenes: int, seed: int = 0, split: Split = "train") -> Iterator[Scene]:
    """Yields scenes, the same for the same seed and split; a longer run begins with a shorter one.

    A scene of "dev" or "test" has at least one combination that `HELD_OUT` lists for this split and none of
    the other split; a scene of "train" has none at all. So no scene is in two splits, whatever the seeds.
    """
    rng = random_of(seed, split)
    return (_draw_scene(rng, split) for _ in range(num_scenes))


def relations(first: Figure, second: Figure) -> list[str]:
    """Returns the relations in which `first` clearly stands to `second`, the clearest first.

    A relation is clear if the centres are at least 8 pixels apart in its direction.
    """
    right, down = second.x_pixels - first.x_pixels, second.y_pixels - first.y_pixels
    found = [(abs(right), "left" if right > 0 else "right"), (abs(down), "above" if down > 0 else "below")]
    return [name for distance, name in sorted(found, reverse=True) if distance >= _CLEAR_PIXELS]


def combinations(figures: Sequence[Figure]) -> set[tuple[str, ...]]:
    """Returns the combinations of a scene, in the form of the keys of `HELD_OUT`."""
    found: set[tuple[str, ...]] = {(figure.colour, figure.shape) for figure in figures}
    for first in figures:
        for second in figures:
            found.update((first.shape, name, second.shape) for name in relations(first, second))
    return found


def caption(scene: Scene, rng: random.Random) -> str:
    """Draws a right caption.

    Four of five captions mention the figures in the order of `COLOURS`, the others in any order. A relation
    is the clearest one of its two figures; `is_right` accepts the other clear one, too.
    """
    order = sorted(scene.figures, key=lambda figure: tuple(COLOURS).index(figure.colour))
    if rng.random() >= _HABIT:
        rng.shuffle(order)
    text = rng.choice(("", "", "there is ")) + _mention(order[0], rng)
    if len(order) > 1:
        if not text.startswith("there") and rng.random() < 0.5:
            text += " is"
        text += f" {_relate(order[0], order[1], rng)}"
    if len(order) > 2:
        link, subject = rng.choice((("and", order[0]), ("that is", order[1])))
        text += f" {link} {_relate(subject, order[2], rng)}"
    return text


def is_right(scene: Scene, text: str) -> bool:
    """Returns whether a caption is entirely right.

    A right caption has the grammar of the examples above, mentions each figure once with its shape and its
    colour, and states only sizes and relations that clearly hold.
    """
    return _mentioned(scene, text) is not None


def named(scene: Scene, text: str) -> list[int | None]:
    """Returns, for each word of a right caption, the number of the figure whose colour or shape it names.

    Raises:
        ValueError: the caption is not right.
    """
    order = _mentioned(scene, text)
    if order is None:
        raise ValueError(f"the words of a right caption name figures, but {text!r} is wrong for this scene")
    found: list[int | None] = []
    mentions = iter(order)
    for word in text.split():
        if word in COLOURS:
            figure = next(mentions)
        found.append(figure if word in COLOURS or word in SHAPES else None)
    return found


def _mention(figure: Figure, rng: random.Random) -> str:
    size = rng.choice(SIZES[figure.size]) + " " if rng.random() < 0.4 else ""
    return f"a {size}{figure.colour} {figure.shape}"


def _relate(first: Figure, second: Figure, rng: random.Random) -> str:
    return f"{rng.choice(RELATIONS[relations(first, second)[0]])} {_mention(second, rng)}"


def _mentioned(scene: Scene, text: str) -> list[int] | None:
    """Returns the numbers of the figures in the order of a right caption, or None for a wrong caption."""
    match = _CAPTION.fullmatch(text)
    if match is None:
        return None
    there_is, first, verb, relation, second, link, next_relation, third = match.groups()
    if there_is and verb:
        return None
    mentions = [mention for mention in (first, second, third) if mention]
    order = []
    for mention in mentions:
        *size, colour, shape = mention.split()[1:]
        for number, figure in enumerate(scene.figures):
            sizes = [_SIZE_OF_WORD[word] for word in size] or [figure.size]
            if (sizes, colour, shape) == ([figure.size], figure.colour, figure.shape):
                order.append(number)
    if len(mentions) != len(scene.figures) or sorted(order) != list(range(len(scene.figures))):
        return None
    figures = [scene.figures[number] for number in order]
    if second and _RELATION_OF_PHRASE[relation] not in relations(figures[0], figures[1]):
        return None
    subject = 0 if link == "and" else 1
    if third and _RELATION_OF_PHRASE[next_relation] not in relations(figures[subject], figures[2]):
        return None
    return order


def _draw_scene(rng: random.Random, split: Split) -> Scene:
    num_figures = rng.choice((1, 2, 2, 3, 3))
    own = own_combinations(HELD_OUT, split)
    wanted = rng.choice(own) if own else ()
    while True:
        figures = _place(*_draw_kinds(rng, num_figures, wanted), rng)
        found = {HELD_OUT[key] for key in combinations(figures) if key in HELD_OUT}
        if figures and found == (set() if split == "train" else {split}):
            break
    palette = draw_palette([figure.colour for figure in figures], rng)
    outlines = [corners(f.shape, f.x_pixels, f.y_pixels, f.radius_pixels) for f in figures]
    pictures, owners = paint([outlines], palette, draw_light(SIZE_PIXELS, rng), rng)
    return Scene(tuple(figures), pictures[0], owners[0])


def _draw_kinds(rng: random.Random, num_figures: int, wanted: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Draws colours and shapes, with those of the combination `wanted`, if it is not empty."""
    if len(wanted) == 3:
        num_figures = max(num_figures, 2)
    colours = rng.sample(tuple(COLOURS), num_figures)
    shapes = rng.choices(SHAPES, k=num_figures)
    if len(wanted) == 3:
        shapes[:2] = wanted[0], wanted[2]
    elif wanted:
        colours = [wanted[0], *[colour for colour in colours if colour != wanted[0]]][:num_figures]
        shapes[0] = wanted[1]
    return colours, shapes


def _place(colours: list[str], shapes: list[str], rng: random.Random) -> list[Figure]:
    """Draws places and sizes; returns an empty list where the figures found no room."""
    figures: list[Figure] = []
    for colour, shape in zip(colours, shapes, strict=True):
        size = rng.choice(tuple(SIZES))
        for _ in range(_PLACING_TRIES):
            radius = rng.uniform(*_RADIUS_PIXELS[size])
            x, y = (rng.uniform(radius + 1, SIZE_PIXELS - radius - 1) for _ in range(2))
            if all(
                max(abs(x - other.x_pixels), abs(y - other.y_pixels))
                >= radius + other.radius_pixels + _GAP_PIXELS
                for other in figures
            ):
                figures.append(Figure(shape, colour, size, x, y, radius))
                break
        else:
            return []
    return figures
