from itertools import permutations, product

import numpy as np
import pytest

from seq2seq_serve.training.builtin import shapes
from seq2seq_serve.training.builtin.figures import COLOURS
from seq2seq_serve.training.builtin.shapes import HELD_OUT, Scene
from tests.training.builtin.examples import by_split, with_captions

OPPOSITES = {
    "left": "right",
    "right": "left",
    "above": "below",
    "below": "above",
    "over": "under",
    "under": "over",
}
OPPOSITES |= {"small": "large", "large": "small", "little": "big", "big": "little"}
PHRASES = {
    "left of": (1, 0), "to the left of": (1, 0), "right of": (-1, 0), "to the right of": (-1, 0),
    "above": (0, 1), "over": (0, 1), "below": (0, -1), "under": (0, -1),
}  # fmt: skip


@pytest.fixture(scope="module")
def scenes() -> dict[str, list[Scene]]:
    return by_split(shapes, train=250, dev=60, test=100)


@pytest.fixture(scope="module")
def captioned(scenes) -> list[tuple[Scene, str]]:
    return with_captions(shapes, scenes, each=3)


def _holds(first, phrase, second) -> bool:
    right, down = PHRASES[phrase]
    distance = right * (second.x_pixels - first.x_pixels) + down * (second.y_pixels - first.y_pixels)
    return distance >= 8


def _combinations(scene) -> set[tuple[str, ...]]:
    found = {(figure.colour, figure.shape) for figure in scene.figures}
    for first, second in permutations(scene.figures, 2):
        for name, phrase in (("left", "left of"), ("above", "above")):
            if _holds(first, phrase, second):
                found.add((first.shape, name, second.shape))
    return found


def test_training_never_has_a_held_out_combination_and_the_others_always_have_one(scenes):
    for split, examples in scenes.items():
        for scene in examples:
            splits = {HELD_OUT[key] for key in _combinations(scene) & HELD_OUT.keys()}
            assert splits == ({split} if split != "train" else set())


def test_every_held_out_combination_is_tested(scenes):
    for split in ("dev", "test"):
        found = set.union(*map(_combinations, scenes[split]))
        assert {key for key, its in HELD_OUT.items() if its == split} <= found


def test_training_has_every_word(captioned, scenes):
    words = {word for _, text in captioned for word in text.split()}
    num_captions = 3 * len(scenes["train"])
    assert {word for _, text in captioned[:num_captions] for word in text.split()} == words
    assert 30 <= len(words) <= 40


def test_every_drawn_caption_is_right(captioned):
    assert [text for scene, text in captioned if not shapes.is_right(scene, text)] == []


def test_a_caption_with_another_colour_shape_size_or_relation_is_wrong(captioned):
    num_changes = 0
    for scene, text in captioned[::3]:
        words = text.split()
        for place, word in enumerate(words):
            changes = [OPPOSITES[word]] if word in OPPOSITES else []
            for group in (COLOURS, shapes.SHAPES):
                changes += [other for other in group if word in group and other != word]
            for change in changes:
                changed = " ".join([*words[:place], change, *words[place + 1 :]])
                assert not shapes.is_right(scene, changed), (text, changed)
                num_changes += 1
    assert num_changes > 5000


def test_a_third_figure_is_related_to_the_first_after_and_and_to_the_second_after_that_is(scenes):
    three = [scene for scene in scenes["train"] if len(scene.figures) == 3][:10]
    num_right = 0
    for scene in three:
        figures = scene.figures
        for order, one, two, link in product(
            permutations(range(3)), PHRASES, PHRASES, ("and", "that is", "but")
        ):
            first, second, third = (f"a {figures[i].colour} {figures[i].shape}" for i in order)
            subject = order[0] if link == "and" else order[1]
            expected = (
                link != "but"
                and _holds(figures[order[0]], one, figures[order[1]])
                and _holds(figures[subject], two, figures[order[2]])
            )
            text = f"there is {first} {one} {second} {link} {two} {third}"
            assert shapes.is_right(scene, text) == expected
            num_right += expected
    assert num_right > 100


def test_every_figure_is_mentioned_once_and_nothing_else(scenes):
    single = next(scene for scene in scenes["train"] if len(scene.figures) == 1)
    mention = f"a {single.figures[0].colour} {single.figures[0].shape}"
    assert shapes.is_right(single, mention)
    assert shapes.is_right(single, f"there is {mention}")
    for wrong in ("", "a", mention[2:], f"{mention} .", f" {mention}", mention.upper(), f"{mention} is"):
        assert not shapes.is_right(single, wrong)
    assert not shapes.is_right(single, f"{mention} above {mention}")
    other = "a white star" if "white" not in mention else "a black star"
    assert not shapes.is_right(single, f"{mention} above {other}")  # which is not there
    double = next(scene for scene in scenes["train"] if len(scene.figures) == 2)
    first, second = (f"a {figure.colour} {figure.shape}" for figure in double.figures)
    assert not shapes.is_right(double, first)
    assert not shapes.is_right(double, f"{first} above {first}")
    phrase = next(phrase for phrase in PHRASES if _holds(double.figures[0], phrase, double.figures[1]))
    other = next(f"a {colour} star" for colour in COLOURS if f" {colour} " not in f"{first} {second}")
    for link in ("and", "that is"):  # a third figure that is not there
        assert not shapes.is_right(double, f"{first} is {phrase} {second} {link} below {other}")
        assert not shapes.is_right(double, f"{first} is {phrase} {other} {link} below {second}")
    assert shapes.is_right(double, f"{first} is {phrase} {second}")
    assert not shapes.is_right(double, f"there is {first} is {phrase} {second}")


def test_words_point_at_pixels_of_their_colour_and_figures_of_their_shape(captioned):
    names, values = list(COLOURS), np.array(list(COLOURS.values()))
    for scene, text in captioned[::3]:
        named = shapes.named(scene, text)
        words = text.split()
        assert len(named) == len(words)
        assert sorted(number for number in named if number is not None) == sorted(
            2 * list(range(len(scene.figures)))
        )
        for word, number in zip(words, named, strict=True):
            if number is None:
                assert word not in names
                assert word not in shapes.SHAPES
                continue
            assert word in (scene.figures[number].colour, scene.figures[number].shape)
            if word in names:
                usual = np.median(scene.picture[scene.pixels(number)], axis=0)
                assert names[np.abs(values - usual).sum(axis=1).argmin()] == word


def test_figures_are_where_their_scene_has_them_and_places_are_those_of_their_pixels(scenes):
    for scene in scenes["test"]:
        for number, figure in enumerate(scene.figures):
            pixels = {(int(x), int(y)) for y, x in np.argwhere(scene.owners == number + 1)}
            (left, right), (top, bottom) = (
                (min(places), max(places) + 1) for places in zip(*pixels, strict=True)
            )
            assert abs(bottom - top - 2 * figure.radius_pixels) <= 0.25 * 2 * figure.radius_pixels
            assert left < figure.x_pixels < right
            assert top < figure.y_pixels < bottom
            places = {(int(x), int(y)) for y, x in np.argwhere(scene.places(number))}
            assert places == {(x // 4, y // 4) for x, y in pixels}


def test_figures_do_not_touch_and_stand_clearly_to_each_other(scenes):
    for scene in scenes["train"]:
        assert scene.picture.shape == (56, 56, 3)
        assert scene.picture.dtype == np.uint8
        assert set(np.unique(scene.owners)) == set(range(len(scene.figures) + 1))
        assert len({figure.colour for figure in scene.figures}) == len(scene.figures)
        for one, two in permutations(range(len(scene.figures)), 2):
            assert any(_holds(scene.figures[one], phrase, scene.figures[two]) for phrase in PHRASES)
            rows, columns = np.nonzero(scene.pixels(one))
            around = scene.owners[
                max(rows.min() - 1, 0) : rows.max() + 2, max(columns.min() - 1, 0) : columns.max() + 2
            ]
            assert two + 1 not in around
