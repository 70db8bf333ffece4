"""The built-in stories: short sentences, a question about them, and its answer in one word.

    Sam walks into the kitchen. Sam picks up an apple. Sam walks into the bedroom. Sam drops the apple.
    Where is the apple? bedroom

Five kinds of question ask about people who walk, carry and hand over things: "person" and "thing" (where),
"holder" (who), "yes or no", "count" and "before or after". Three have their own stories: "colour" (by analogy
with another animal of that kind), "fear" (by kind) and "direction" (how rooms lie to each other).
"""

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from seq2seq_serve.training.builtin.splits import Split, random_of

PEOPLE = (
    "Bernhard", "Brian", "Emma", "Felix", "Hugo", "Ida", "Julius", "Lena",
    "Max", "Mina", "Nora", "Omar", "Rosa", "Sam", "Tom", "Yuna",
)  # fmt: skip
THINGS = ("apple", "ball", "book", "cup", "egg", "hat", "key", "lamp", "pen", "umbrella")
ROOMS = (
    "attic", "bathroom", "bedroom", "cellar", "garage",
    "garden", "hallway", "kitchen", "library", "office",
)  # fmt: skip
ANIMALS = (
    "bear", "cat", "dog", "fox", "frog", "hen", "lion",
    "mouse", "rabbit", "sheep", "snake", "swan", "wolf",
)  # fmt: skip
COLOURS = ("black", "brown", "gray", "green", "white", "yellow")
DIRECTIONS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
WORDINGS = {
    "go": (
        "{0} walks into the {1}.",
        "{0} goes to the {1}.",
        "{0} runs to the {1}.",
        "{0} moves to the {1}.",
    ),
    "take": ("{0} picks up {1}.", "{0} takes {1}.", "{0} grabs {1}."),
    "drop": ("{0} drops the {1}.", "{0} puts down the {1}.", "{0} leaves the {1}."),
    "give": ("{0} hands the {1} to {2}.", "{0} gives the {1} to {2}."),
}
"""The sentences of each event: who does it, with which room or thing, and to whom."""
KINDS = ("person", "thing", "holder", "yes or no", "count", "before or after", "colour", "fear", "direction")
NUMBERS = ("none", "one", "two", "three")

_MAX_EVENTS = 14
_OPPOSITES = {"north": "south", "south": "north", "east": "west", "west": "east"}


@dataclass(frozen=True)
class Story:
    """Sentences, a question with an answer of one lower-case word, and its kind (one of `KINDS`).

    People's names are answers in lower case, too.
    """

    kind: str
    sentences: tuple[str, ...]
    question: str
    answer: str


def generate(num_stories: int, seed: int = 0, split: Split = "train") -> Iterator[Story]:
    """Yields stories, the same for the same seed and split; a longer run begins with a shorter one.

    All kinds are equally frequent. A story belongs to a split by its cast: the people and things in it, or
    its rooms where there are neither. So no story is in two splits, whatever the seeds: exactly the cast of a
    story in "dev" or "test" never comes together in "train". Within a split a story may occur twice.
    """
    rng = random_of(seed, split)
    return (_draw_story(rng, split) for _ in range(num_stories))


def split_of(cast: Sequence[str]) -> Split:
    """Returns the split of the stories with these people and things, or these rooms."""
    share = zlib.crc32(" ".join(sorted(cast)).encode()) % 6
    return "dev" if share == 0 else "test" if share == 1 else "train"


class Event(NamedTuple):
    """An action of a person: "go" to a room, "take" or "drop" a thing, or "give" it to `receiver`."""

    person: str
    action: str
    target: str
    receiver: str = ""


class Question(NamedTuple):
    """A question and its answer."""

    text: str
    answer: str


@dataclass
class World:
    """The people and things of a story, and what its sentences have told so far.

    One story is told with it, and then it is dropped.

    Attributes:
        places: The rooms in which each person and thing was, in order.
        holders: Who has each thing, or "nobody".
        traders: The people who have taken, dropped, given or got a thing, in the order of their first time.
    """

    people: Sequence[str]
    things: Sequence[str]
    rooms: Sequence[str]
    sentences: list[str] = field(default_factory=list)
    places: dict[str, list[str]] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    traders: list[str] = field(default_factory=list)

    def room(self, name: str) -> str:
        """Returns the room of a person or a thing, or "" if no sentence has told it."""
        return self.places[name][-1] if name in self.places else ""

    def carried(self, person: str) -> list[str]:
        """Returns the things that a person has."""
        return [thing for thing in self.things if self.holders.get(thing) == person]

    def options(self, person: str) -> dict[str, list[Event]]:
        """Returns what a person can do next, by action. Everyone begins by going somewhere."""
        here = self.room(person)
        options = {"go": [Event(person, "go", room) for room in self.rooms if room != here]}
        if not here:
            return options
        carried = self.carried(person)
        free = [
            thing
            for thing in self.things
            if thing not in self.holders or (self.holders[thing], self.room(thing)) == ("nobody", here)
        ]
        near = [other for other in self.people if other != person and self.room(other) == here]
        options["take"] = [Event(person, "take", thing) for thing in free]
        options["drop"] = [Event(person, "drop", thing) for thing in carried]
        options["give"] = [Event(person, "give", thing, other) for thing in carried for other in near]
        return {action: events for action, events in options.items() if events}

    def wordings(self, event: Event) -> list[str]:
        """Returns the sentences for an event. A thing may be "a" thing where it is new."""
        names = [event.target]
        if event.action == "take" and event.target not in self.holders:
            names = [f"the {event.target}", f"{'an' if event.target[0] in 'aeiou' else 'a'} {event.target}"]
        elif event.action == "take":
            names = [f"the {event.target}"]
        texts = WORDINGS[event.action]
        return [text.format(event.person, name, event.receiver) for text in texts for name in names]

    def tell(self, event: Event, sentence: str) -> None:
        """Adds an event, which is one of `options`, in one of its `wordings`."""
        self.sentences.append(sentence)
        if event.action == "go":
            for name in (event.person, *self.carried(event.person)):
                self.places.setdefault(name, []).append(event.target)
            return
        self.traders += [name for name in (event.person, event.receiver) if name and name not in self.traders]
        holders = {"take": event.person, "drop": "nobody", "give": event.receiver}
        self.holders[event.target] = holders[event.action]
        here, visits = self.room(event.person), self.places.setdefault(event.target, [])
        if visits[-1:] != [here]:
            visits.append(here)

    def questions(self, kind: str) -> Iterator[Question]:
        """Yields the questions of a kind that the story answers."""
        subjects = {name: name if name in self.people else f"the {name}" for name in self.places}
        if kind in ("person", "thing"):
            for name in self.places:
                if (kind == "person") == (name in self.people):
                    yield Question(f"Where is {subjects[name]}?", self.room(name))
        if kind == "holder":
            for thing, holder in self.holders.items():
                yield Question(f"Who has the {thing}?", holder.lower())
        if kind == "yes or no":
            rooms = {room: None for visits in self.places.values() for room in visits}
            for name in self.places:
                for room in rooms:
                    answer = "yes" if room == self.room(name) else "no"
                    yield Question(f"Is {subjects[name]} in the {room}?", answer)
        if kind == "count":
            for person in self.traders:
                answer = NUMBERS[len(self.carried(person))]
                yield Question(f"How many things does {person} carry?", answer)
        if kind == "before or after":
            for name, visits in self.places.items():
                for earlier, later in pairwise(visits):
                    if visits.count(later) == 1:
                        yield Question(f"Where was {subjects[name]} before the {later}?", earlier)
                    if visits.count(earlier) == 1:
                        yield Question(f"Where was {subjects[name]} after the {earlier}?", later)


def _draw_story(rng: random.Random, split: Split) -> Story:
    kind = rng.choice(KINDS)
    while True:
        people: list[str] = []
        others: list[str] = []
        if kind == "direction":
            others = rng.sample(ROOMS, rng.randint(3, 5))
        elif kind in ("colour", "fear"):
            people = rng.sample(PEOPLE, rng.randint(3, 5))
        else:
            people = rng.sample(PEOPLE, rng.randint(1, 3))
            others = rng.sample(THINGS, rng.randint(kind in ("thing", "holder", "count"), 3))
        if split_of([*people, *others]) != split:
            continue
        if kind == "direction":
            sentences, questions = _tell_directions(others, rng)
        elif kind == "colour":
            sentences, questions = _tell_colours(people, rng)
        elif kind == "fear":
            sentences, questions = _tell_fears(people, rng)
        else:
            sentences, questions = _tell_events(kind, people, others, rng)
        if questions:
            # The answer first, so that answers of few questions are not rare.
            answer = rng.choice(list({question.answer: None for question in questions}))
            question = rng.choice([question for question in questions if question.answer == answer])
            return Story(kind, tuple(sentences), question.text, question.answer)


def _tell_events(
    kind: str, people: Sequence[str], things: Sequence[str], rng: random.Random
) -> tuple[list[str], list[Question]]:
    """Tells what people do until all people and things have occurred; no questions if that takes too long."""
    world = World(people, things, rng.sample(ROOMS, rng.randint(2, 5)))
    missing = {*people, *things}
    num_events = rng.randint(2, 10)
    while len(world.sentences) < num_events or missing:
        if len(world.sentences) == _MAX_EVENTS:
            return [], []
        options = world.options(rng.choice(people))
        event = rng.choice(options[rng.choice(list(options))])
        world.tell(event, rng.choice(world.wordings(event)))
        missing.difference_update(event)
    return world.sentences, list(world.questions(kind))


def _tell_colours(people: Sequence[str], rng: random.Random) -> tuple[list[str], list[Question]]:
    """Tells kinds and colours of animals. The first two have one kind, and only the second has a colour."""
    kinds = rng.sample(ANIMALS, 2)
    colours = rng.sample(COLOURS, 2)
    asked, witness, *others = people
    sentences = [f"{asked} is a {kinds[0]}.", f"{witness} is a {kinds[0]}.", f"{witness} is {colours[0]}."]
    for name in others:
        place = rng.randrange(2)
        kind, colour = f"{name} is a {kinds[place]}.", f"{name} is {colours[place]}."
        sentences += rng.choice(([kind, colour], [kind], [f"{name} is {rng.choice(COLOURS)}."]))
    rng.shuffle(sentences)
    return sentences, [Question(f"What color is {asked}?", colours[0])]


def _tell_fears(people: Sequence[str], rng: random.Random) -> tuple[list[str], list[Question]]:
    """Tells what each kind of animal fears, and of which kind each animal is."""
    kinds = rng.sample(ANIMALS, rng.randint(2, 4))
    feared = {kind: rng.choice([other for other in ANIMALS if other != kind]) for kind in kinds}
    wording = rng.choice(("Every {} fears the {}.", "Every {} is afraid of the {}."))
    sentences = [wording.format(kind, animal) for kind, animal in feared.items()]
    members = {name: rng.choice(kinds) for name in people}
    sentences += [f"{name} is a {kind}." for name, kind in members.items()]
    rng.shuffle(sentences)
    return sentences, [Question(f"What does {name} fear?", feared[kind]) for name, kind in members.items()]


def _tell_directions(rooms: Sequence[str], rng: random.Random) -> tuple[list[str], list[Question]]:
    """Tells for each room but the first how it lies to one of those before it."""
    cells = {rooms[0]: (0, 0)}
    links = []
    for room in rooms[1:]:
        while room not in cells:
            neighbour, direction = rng.choice(list(cells)), rng.choice(list(DIRECTIONS))
            (x, y), (right, up) = cells[neighbour], DIRECTIONS[direction]
            if (x + right, y + up) not in cells.values():
                cells[room] = (x + right, y + up)
                links.append((room, direction, neighbour))
    rng.shuffle(links)
    sentences, questions = [], []
    for room, direction, neighbour in links:
        facts = [(room, direction, neighbour), (neighbour, _OPPOSITES[direction], room)]
        sentences.append("The {} is {} of the {}.".format(*rng.choice(facts)))
        for first, way, second in facts:
            if len(_rooms_towards(cells, way, second)) == 1:
                questions.append(Question(f"Which room is {way} of the {second}?", first))
    return sentences, questions


def _rooms_towards(cells: dict[str, tuple[int, int]], direction: str, start: str) -> list[str]:
    """Returns the rooms that lie exactly in a direction, at any distance."""
    right, up = DIRECTIONS[direction]
    x, y = cells[start]
    return [
        room
        for room, cell in cells.items()
        if any(cell == (x + right * steps, y + up * steps) for steps in range(1, len(cells)))
    ]
