"""The built-in clips: two or three figures, and captions that say which of them does what, in order.

    a red circle moves left
    a red circle goes left , then a blue square jumps
    first a red circle moves up and then the red circle grows and then a blue square spins

A caption is lower-case words with one space between them; the comma is a word of its own. All figures are
visible all the time, and each can do anything at any time. So a single frame shows no action, and the frames
without their order do not show which event came first.
"""

import math
import operator
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from seq2seq_serve.training.builtin.figures import COLOURS, corners, draw_light, draw_palette, paint
from seq2seq_serve.training.builtin.splits import Split, own_combinations, random_of

SIZE_PIXELS = 32
SHAPES = ("circle", "square", "triangle", "cross")
ACTIONS = {
    "left": ("moves left", "goes left"),
    "right": ("moves right", "goes right"),
    "up": ("moves up", "goes up"),
    "down": ("moves down", "goes down"),
    "jump": ("jumps", "hops"),
    "grow": ("grows",),
    "shrink": ("shrinks",),
    "turn": ("turns", "spins"),
}
"""The wordings of each action. A jump goes up and comes back, a turn is half a turn."""

HELD_OUT: dict[tuple[str, str], Split] = {
    ("red", "cross"): "test",
    ("green", "circle"): "test",
    ("blue", "triangle"): "test",
    ("jump", "grow"): "test",
    ("left", "turn"): "test",
    ("shrink", "up"): "test",
    ("yellow", "square"): "dev",
    ("grow", "down"): "dev",
}
"""The combinations that training never has, and the split that has at least one of its own in each clip.

A combination is a colour and a shape, or two actions of which the second directly comes after the first.
"""

_RADIUS_PIXELS = (4.0, 5.0)
_RADII_PIXELS = (2.3, 7.5)  # the smallest and the largest that an action may lead to
_GROWTH = 1.5
_TRAVEL_PIXELS = (8.0, 12.0)
_JUMP_PIXELS = (6.0, 8.0)
_DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "jump": (0, -1)}
_EVENT_FRAMES = (6, 8)
_PAUSE_FRAMES = (1, 2)
_GAP_PIXELS = 1
_PLACING_TRIES = 100
_TURNED_REACH = 1.35  # how far a corner of any shape is from the centre, for radius 1

_ACTION_OF_PHRASE = {phrase: name for name, phrases in ACTIONS.items() for phrase in phrases}
_JOINT = " , then | and then "
_EVENT = re.compile(rf"(a|the) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(_ACTION_OF_PHRASE)})")


@dataclass(frozen=True)
class Pose:
    """Where a figure is (its centre; x runs right, y down), how large, and how far it is turned clockwise."""

    x_pixels: float
    y_pixels: float
    radius_pixels: float
    angle_radians: float = 0.0

    @property
    def reach_pixels(self) -> float:
        """Half the side of a square around the figure."""
        is_upright = abs(math.sin(self.angle_radians)) < 1e-6
        return self.radius_pixels * (1 if is_upright else _TURNED_REACH)

    def is_apart(self, other: "Pose") -> bool:
        """Returns whether there is a gap between the two figures' squares."""
        distance = max(abs(self.x_pixels - other.x_pixels), abs(self.y_pixels - other.y_pixels))
        return distance >= self.reach_pixels + other.reach_pixels + _GAP_PIXELS

    def is_possible(self) -> bool:
        """Returns whether the figure is inside the frame and of a size that can be seen."""
        low, high = self.reach_pixels, SIZE_PIXELS - self.reach_pixels
        is_inside = low <= self.x_pixels <= high and low <= self.y_pixels <= high
        return is_inside and _RADII_PIXELS[0] <= self.radius_pixels <= _RADII_PIXELS[1]


@dataclass(frozen=True)
class Event:
    """An action of a figure, in the frames from `start` to `stop - 1`.

    Frame `start` is the first that differs from the pose before, `stop - 1` the first in the pose after.
    """

    figure: int
    action: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Clip:
    """A clip and the events in it.

    Figures do not touch, and no two have the same colour. Events do not overlap: in at least one frame before
    the first, between two, and after the last, nothing moves.

    Attributes:
        kinds: the colour and the shape of each of two or three figures.
        events: one to three, in order. A figure may act twice, but not twice the same in succession.
        frames: uint8 [T, 32, 32, 3], RGB, with T from 8 to 32.
    """

    kinds: tuple[tuple[str, str], ...]
    events: tuple[Event, ...]
    frames: NDArray[np.uint8]

    def places(self, number: int) -> NDArray[np.bool_]:
        """Returns which frames belong to event `number`: bool [T]."""
        frames, event = np.arange(len(self.frames)), self.events[number]
        return np.asarray((event.start <= frames) & (frames < event.stop))


def generate(num_clips: int, seed: int = 0, split: Split = "train") -> Iterator[Clip]:
    """Yields clips, the same for the same seed and split; a longer run begins with a shorter one.

    A clip of "dev" or "test" has at least one combination that `HELD_OUT` lists for this split and none of
    the other split; a clip of "train" has none at all. So no clip is in two splits, whatever the seeds. A
    colour and a shape that the split is about belong to a figure that acts.
    """
    rng = random_of(seed, split)
    return (_draw_clip(rng, split) for _ in range(num_clips))


def caption(clip: Clip, rng: random.Random) -> str:
    """Draws a right caption."""
    texts = []
    for number, event in enumerate(clip.events):
        colour, shape = clip.kinds[event.figure]
        texts.append(f"{_article(clip, number)} {colour} {shape} {rng.choice(ACTIONS[event.action])}")
    text = ("first " if len(texts) > 1 and rng.random() < 0.3 else "") + texts[0]
    for following in texts[1:]:
        text += rng.choice(_JOINT.split("|")) + following
    return text


def is_right(clip: Clip, text: str) -> bool:
    """Returns whether a caption is entirely right.

    A right caption has the grammar of the examples above and tells all events in their order. A figure is
    "a" the first time and "the" from then on, and only several events have a "first".
    """
    articles = [article for article, _, _ in _told(clip, text)]
    expected = [_article(clip, number) for number in range(len(clip.events))]
    return articles == expected and num_told(clip, text) == len(clip.events)


def num_told(clip: Clip, text: str) -> int:
    """Returns the number of events whose figure and action a caption tells at their place in the order."""
    events = [(clip.kinds[event.figure], event.action) for event in clip.events]
    told = [(kind, action) for _, kind, action in _told(clip, text)]
    return sum(map(operator.eq, events, told))


def _told(clip: Clip, text: str) -> list[tuple[str, tuple[str, ...], str]]:
    """Returns the article, the figure and the action of each event that a caption tells, or empty strings."""
    told = []
    for part in re.split(_JOINT, text.removeprefix("first ") if len(clip.events) > 1 else text):
        match = _EVENT.fullmatch(part)
        article, *kind, phrase = match.groups() if match else ("", "")
        told.append((article, tuple(kind), _ACTION_OF_PHRASE.get(phrase, "")))
    return told


def named(clip: Clip, text: str) -> list[int | None]:
    """Returns, for each word of a right caption, the number of the event whose figure or action it names.

    Raises:
        ValueError: the caption is not right.
    """
    if not is_right(clip, text):
        raise ValueError(f"the words of a right caption name events, but {text!r} is wrong for this clip")
    found: list[int | None] = []
    number = -1
    for word in text.split():
        number += word in ("a", "the")
        found.append(None if word in ("first", "a", "the", ",", "and", "then") else number)
    return found


def _article(clip: Clip, number: int) -> str:
    earlier = [event.figure for event in clip.events[:number]]
    return "the" if clip.events[number].figure in earlier else "a"


def _draw_clip(rng: random.Random, split: Split) -> Clip:
    own = own_combinations(HELD_OUT, split)
    wanted = rng.choice(own) if own else None
    num_events = rng.randint(1, 3)
    while True:
        # Only places are drawn anew, or actions that need little room would be more frequent.
        actions = _draw_actions(rng, num_events, wanted, split)
        for _ in range(_PLACING_TRIES):
            kinds = _draw_kinds(rng, wanted)
            poses = _draw_poses(rng, len(kinds))
            tracks = _act(kinds, actions, poses, rng)
            acting = {kinds[event.figure] for event, _ in tracks}
            if tracks and _is_allowed(kinds, split) and (wanted not in kinds or wanted in acting):
                frames = _paint_frames(kinds, poses, tracks, rng)
                return Clip(tuple(kinds), tuple(event for event, _ in tracks), frames)


def _is_allowed(combinations: Iterable[tuple[str, str]], split: Split) -> bool:
    return all(HELD_OUT.get(combination, split) == split for combination in combinations)


def _draw_kinds(rng: random.Random, wanted: tuple[str, str] | None) -> list[tuple[str, str]]:
    """Draws a colour and a shape for each figure; `wanted` is one of them, if it is a colour and a shape."""
    colours = rng.sample(tuple(COLOURS), rng.choice((2, 3)))
    kinds = [(colour, rng.choice(SHAPES)) for colour in colours]
    if wanted and wanted[0] in COLOURS:
        kinds = [wanted, *[kind for kind in kinds if kind[0] != wanted[0]]][: len(kinds)]
    return kinds


def _draw_actions(
    rng: random.Random, num_events: int, wanted: tuple[str, str] | None, split: Split
) -> list[str]:
    """Draws the actions; `wanted` is two of them in succession, if it is two actions."""
    while True:
        actions = rng.choices(tuple(ACTIONS), k=num_events)
        if wanted and wanted[0] in ACTIONS:
            place = rng.randint(0, max(num_events - 2, 0))
            actions[place : place + 2] = wanted
        if _is_allowed(pairwise(actions), split):
            return actions


def _draw_poses(rng: random.Random, num_figures: int) -> list[Pose]:
    poses: list[Pose] = []
    while len(poses) < num_figures:
        radius = rng.uniform(*_RADIUS_PIXELS)
        x, y = (rng.uniform(radius, SIZE_PIXELS - radius) for _ in range(2))
        pose = Pose(x, y, radius)
        if all(pose.is_apart(other) for other in poses):
            poses.append(pose)
    return poses


def _act(
    kinds: Sequence[tuple[str, str]], actions: Sequence[str], poses: Sequence[Pose], rng: random.Random
) -> list[tuple[Event, list[Pose]]]:
    """Draws who acts; returns the events with the actor's poses, or an empty list where there is no room."""
    now = list(poses)
    frame = rng.randint(*_PAUSE_FRAMES)
    tracks: list[tuple[Event, list[Pose]]] = []
    for action in actions:
        num_frames = rng.randint(*_EVENT_FRAMES)
        for figure in rng.sample(range(len(kinds)), len(kinds)):
            is_repeated = bool(tracks) and (tracks[-1][0].figure, tracks[-1][0].action) == (figure, action)
            is_invisible = (action, kinds[figure][1]) == ("turn", "circle")
            path = _path(now[figure], action, num_frames, rng)
            others = [pose for number, pose in enumerate(now) if number != figure]
            if (
                not (is_repeated or is_invisible)
                and all(pose.is_possible() for pose in path)
                and all(pose.is_apart(other) for pose in path for other in others)
            ):
                break
        else:
            return []
        tracks.append((Event(figure, action, frame, frame + num_frames), path))
        now[figure] = path[-1]
        frame += num_frames + rng.randint(*_PAUSE_FRAMES)
    return tracks


def _path(start: Pose, action: str, num_frames: int, rng: random.Random) -> list[Pose]:
    """Returns the poses of an action, one for each of its frames."""
    distance = rng.uniform(*(_JUMP_PIXELS if action == "jump" else _TRAVEL_PIXELS))
    right, down = _DIRECTIONS.get(action, (0, 0))
    growth = {"grow": _GROWTH, "shrink": 1 / _GROWTH}.get(action, 1.0)
    turn = rng.choice((-math.pi, math.pi)) if action == "turn" else 0.0
    path = []
    for step in range(1, num_frames + 1):
        part = step / num_frames
        way = distance * (math.sin(math.pi * part) if action == "jump" else part)
        path.append(
            Pose(
                start.x_pixels + right * way,
                start.y_pixels + down * way,
                start.radius_pixels * (1 + (growth - 1) * part),
                start.angle_radians + turn * part,
            )
        )
    return path


def _paint_frames(
    kinds: Sequence[tuple[str, str]],
    poses: Sequence[Pose],
    tracks: Sequence[tuple[Event, list[Pose]]],
    rng: random.Random,
) -> NDArray[np.uint8]:
    palette = draw_palette([colour for colour, _ in kinds], rng)
    light = draw_light(SIZE_PIXELS, rng)
    now = list(poses)
    changes = {
        event.start + step: (event.figure, pose) for event, path in tracks for step, pose in enumerate(path)
    }
    frames = []
    for frame in range(tracks[-1][0].stop + rng.randint(*_PAUSE_FRAMES)):
        if frame in changes:
            figure, pose = changes[frame]
            now[figure] = pose
        frames.append(
            [
                corners(shape, pose.x_pixels, pose.y_pixels, pose.radius_pixels, pose.angle_radians)
                for (_, shape), pose in zip(kinds, now, strict=True)
            ]
        )
    return paint(frames, palette, light, rng)[0]
