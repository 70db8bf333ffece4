from itertools import pairwise

import numpy as np
import pytest

from seq2seq_serve.training.builtin import moving_shapes
from seq2seq_serve.training.builtin.figures import COLOURS
from seq2seq_serve.training.builtin.moving_shapes import ACTIONS, HELD_OUT, SHAPES, Clip, Event
from tests.training.builtin.examples import by_split, with_captions

# Two frames in which nothing moves differ only by noise of up to 6 each, and by rounding.
NOISE = 13


@pytest.fixture(scope="module")
def clips() -> dict[str, list[Clip]]:
    return by_split(moving_shapes, train=120, dev=20, test=50)


@pytest.fixture(scope="module")
def captioned(clips) -> list[tuple[Clip, str]]:
    return with_captions(moving_shapes, clips, each=4)


def _actions(clip: Clip) -> list[tuple[str, str]]:
    return list(pairwise(event.action for event in clip.events))


def _acting(clip: Clip) -> list[tuple[str, str]]:
    return [clip.kinds[event.figure] for event in clip.events]


def _mask(clip: Clip, frame: int, figure: int) -> np.ndarray:
    """Returns which pixels have the colour of a figure rather than another colour of the clip."""
    picture = clip.frames[frame].astype(int)
    usual = [np.median(picture, axis=(0, 1)), *(COLOURS[colour] for colour, _ in clip.kinds)]
    distances = np.stack([np.abs(picture - colour).sum(axis=2) for colour in usual])
    # Where figures end, colours are mixed with the background.
    return (distances.argmin(axis=0) == figure + 1) & (distances.min(axis=0) < 100)


def _measure(clip: Clip, frame: int, figure: int) -> tuple[float, float, int]:
    """Returns the centre (x, y) of a figure's pixels, and their number."""
    rows, columns = np.nonzero(_mask(clip, frame, figure))
    assert len(rows) >= 6, (clip.kinds, frame)
    return float(np.median(columns)), float(np.median(rows)), len(rows)


def test_training_never_has_a_held_out_combination_and_the_others_always_have_one(clips):
    for split, examples in clips.items():
        for clip in examples:
            seen = {HELD_OUT.get(key) for key in [*clip.kinds, *_actions(clip)]} - {None}
            told = {HELD_OUT.get(key) for key in [*_acting(clip), *_actions(clip)]} - {None}
            assert seen == told == ({split} if split != "train" else set())


def test_every_held_out_combination_is_tested(clips):
    for split in ("dev", "test"):
        found = {key for clip in clips[split] for key in [*_acting(clip), *_actions(clip)]}
        assert {key for key, its in HELD_OUT.items() if its == split} <= found


def test_training_has_every_word(captioned, clips):
    words = {word for _, text in captioned for word in text.split()}
    num_captions = 4 * len(clips["train"])
    assert {word for _, text in captioned[:num_captions] for word in text.split()} == words
    assert len(words) == len(COLOURS) + len(SHAPES) + 12 + len(["a", "the", "first", "and", "then", ","])


def test_the_order_cannot_be_guessed(clips):
    events = [[(clip.kinds[e.figure][1], e.action) for e in clip.events] for clip in clips["train"]]
    for index in (0, 1):  # shapes, then actions
        orders = {(a[index], b[index]) for clip in events for a, b in pairwise(clip) if a[index] != b[index]}
        assert sum((b, a) in orders for a, b in orders) > 0.6 * len(orders)
    assert {len(clip) for clip in events} == {1, 2, 3}
    idle = [clip for clip in clips["train"] if len(set(_acting(clip))) < len(clip.kinds)]
    assert len(idle) > len(events) / 4  # what is visible is not always what acts


def test_a_clip_has_8_to_32_frames_and_moves_only_during_its_events(clips):
    for clip in (clip for each in clips.values() for clip in each):
        assert clip.frames.shape[1:] == (32, 32, 3)
        assert clip.frames.dtype == np.uint8
        assert 8 <= len(clip.frames) <= 32
        changes = np.abs(np.diff(clip.frames.astype(int), axis=0)).max(axis=(1, 2, 3)) > NOISE
        is_moving = np.zeros(len(clip.frames), bool)
        for event in clip.events:
            assert not is_moving[event.start - 1 : event.stop].any()
            is_moving[event.start : event.stop] = True
            # Two frames may be the same at the highest point of a jump, or where a small figure shrinks.
            assert (~changes[event.start - 1 : event.stop - 1]).sum() <= 1
        assert not is_moving[0]
        assert not is_moving[-1]
        assert not changes[~is_moving[1:]].any()


def test_a_figure_does_what_its_event_tells_and_the_others_rest(clips):
    seen = set()
    for clip in (clip for each in clips.values() for clip in each):
        for event in clip.events:
            seen.add(event.action)
            before, after = event.start - 1, event.stop - 1
            x, y, area = _measure(clip, before, event.figure)
            new_x, new_y, new_area = _measure(clip, after, event.figure)
            middle = (before + event.stop) // 2
            right, up, growth = new_x - x, y - new_y, new_area / area
            expected = {
                "left": right < -6, "right": right > 6, "up": up > 6, "down": up < -6,
                "jump": y - _measure(clip, middle, event.figure)[1] > 4,
                "grow": growth > 1.6, "shrink": growth < 0.65,
                "turn": clip.kinds[event.figure][1] != "circle",
            }  # fmt: skip
            assert expected[event.action], (clip.kinds, event)
            assert abs(right) < 1.5 or event.action in ("left", "right")
            # Half a turn or growth moves most of a triangle up or down.
            assert abs(up) < 2.5 or event.action in ("up", "down", "turn")
            assert 0.7 < growth < 1.4 or event.action in ("grow", "shrink")
            for other in set(range(len(clip.kinds))) - {event.figure}:
                old, new = _measure(clip, before, other), _measure(clip, after, other)
                assert max(abs(old[0] - new[0]), abs(old[1] - new[1])) <= 1
    assert seen == set(ACTIONS)


def test_every_drawn_caption_is_right(captioned):
    assert [text for clip, text in captioned if not moving_shapes.is_right(clip, text)] == []


def test_a_caption_with_another_colour_shape_or_action_is_wrong(captioned):
    verbs = sorted({phrase for phrases in ACTIONS.values() for phrase in phrases})
    action_of = {phrase: name for name, phrases in ACTIONS.items() for phrase in phrases}
    num_changes = 0
    for clip, text in captioned[::4]:
        for group in (list(COLOURS), SHAPES, verbs):
            for old in group:
                if f" {old}" not in text:
                    continue
                for new in group:
                    if action_of.get(old, old) != action_of.get(new, new):
                        changed = text.replace(f" {old}", f" {new}", 1)
                        assert not moving_shapes.is_right(clip, changed), (text, changed)
                        num_changes += 1
    assert num_changes > 2000


def test_articles_and_first_and_joints():
    clip = Clip(
        kinds=(("red", "cross"), ("blue", "square")),
        events=(Event(0, "left", 1, 7), Event(0, "jump", 8, 14)),
        frames=np.zeros((16, 32, 32, 3), np.uint8),
    )
    right = "first a red cross goes left , then the red cross hops"
    assert moving_shapes.is_right(clip, right)
    for old, new in (
        ("the red", "a red"),
        ("first a", "first the"),
        (" , then", " then"),
        ("hops", "hops ."),
    ):
        assert not moving_shapes.is_right(clip, right.replace(old, new))
    assert moving_shapes.named(clip, right) == [None, None, *[0] * 4, None, None, None, *[1] * 3]
    with pytest.raises(ValueError, match="'a red cross hops' is wrong"):
        moving_shapes.named(clip, "a red cross hops")
    single = Clip(clip.kinds, clip.events[:1], clip.frames)
    assert moving_shapes.is_right(single, "a red cross moves left")
    assert not moving_shapes.is_right(single, "first a red cross moves left")


def test_each_event_named_at_its_place_counts():
    clip = Clip(
        kinds=(("red", "cross"), ("blue", "square")),
        events=(Event(0, "left", 1, 7), Event(1, "jump", 8, 14)),
        frames=np.zeros((16, 32, 32, 3), np.uint8),
    )
    for text, num_told in (
        ("first a red cross goes left , then a blue square hops", 2),
        ("a red cross moves left and then the blue square jumps", 2),  # the articles do not count here
        ("a red cross goes left , then a blue square spins", 1),
        ("a blue square hops , then a red cross goes left", 0),
        ("a red cross goes left", 1),
        ("a red cross left , then a blue square hops , then a red cross goes left", 1),
        ("", 0),
    ):
        assert moving_shapes.num_told(clip, text) == num_told, text
