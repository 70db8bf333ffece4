import re
from collections import Counter

import pytest

from seq2seq_serve.training.builtin import stories
from seq2seq_serve.training.builtin.stories import KINDS, PEOPLE, ROOMS, THINGS, Story
from tests.training.builtin import examples

NUMBERS = ["none", "one", "two", "three"]
STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


@pytest.fixture(scope="module")
def by_split() -> dict[str, list[Story]]:
    return examples.by_split(stories, train=2000, dev=500, test=500)


@pytest.fixture(scope="module")
def all_stories(by_split) -> list[Story]:
    return [story for each in by_split.values() for story in each]


class Simulation:
    """Reads sentences by the plainest rules, and keeps all places, holders and ways that they tell."""

    def __init__(self, sentences):
        self.place, self.holder, self.path = {}, {}, {}
        self.kind, self.colour, self.fears, self.cell = {}, {}, {}, {}
        links = []
        for sentence in sentences:
            words = [
                word for word in sentence.rstrip(".").split() if word not in ("the", "a", "an", "up", "down")
            ]
            match words:
                case [person, "walks" | "goes" | "runs" | "moves", "into" | "to", room]:
                    self._put(person, room)
                    for thing in [thing for thing, holder in self.holder.items() if holder == person]:
                        self._put(thing, room)
                case [person, "picks" | "takes" | "grabs", thing]:
                    assert self.holder.get(thing, "nobody") == "nobody"
                    assert self.place.get(thing, self.place[person]) == self.place[person]
                    self._hold(thing, person, self.place[person])
                case [person, "drops" | "puts" | "leaves", thing]:
                    assert self.holder[thing] == person
                    self._hold(thing, "nobody", self.place[person])
                case [person, "hands" | "gives", thing, "to", receiver]:
                    assert self.holder[thing] == person
                    assert self.place[person] == self.place[receiver]
                    self._hold(thing, receiver, self.place[person])
                case ["Every", kind, "fears", feared] | ["Every", kind, "is", "afraid", "of", feared]:
                    self.fears[kind] = feared
                case ["The", first, "is", direction, "of", second]:
                    links.append((first, direction, second))
                case [name, "is", value]:
                    (self.colour if value in stories.COLOURS else self.kind)[name] = value
                case _:
                    raise AssertionError(sentence)
        if links:
            self.cell[links[0][0]] = (0, 0)
        while {room for first, _, second in links for room in (first, second)} - self.cell.keys():
            for first, direction, second in links:
                (right, up) = STEPS[direction]
                if second in self.cell and first not in self.cell:
                    self.cell[first] = (self.cell[second][0] + right, self.cell[second][1] + up)
                elif first in self.cell and second not in self.cell:
                    self.cell[second] = (self.cell[first][0] - right, self.cell[first][1] - up)

    def _put(self, name, room):
        self.place[name] = room
        path = self.path.setdefault(name, [])
        if path[-1:] != [room]:
            path.append(room)

    def _hold(self, thing, holder, room):
        self.holder[thing] = holder
        self._put(thing, room)

    def answers(self, question) -> set[str]:
        """Returns every answer that is right: one, in a good question."""
        words = [word for word in question.rstrip("?").split() if word != "the"]
        match words:
            case ["Where", "is", name]:
                return {self.place[name]}
            case ["Who", "has", thing]:
                return {self.holder[thing].lower()}
            case ["Is", name, "in", room]:
                return {"yes" if self.place[name] == room else "no"}
            case ["How", "many", "things", "does", person, "carry"]:
                return {NUMBERS[list(self.holder.values()).count(person)]}
            case ["Where", "was", name, "before" | "after" as when, room]:
                path = self.path[name] if when == "after" else self.path[name][::-1]
                assert path.count(room) == 1
                return {path[path.index(room) + 1]}
            case ["What", "color", "is", name]:
                assert name not in self.colour
                same = [other for other, kind in self.kind.items() if kind == self.kind[name]]
                return {self.colour[other] for other in same if other in self.colour}
            case ["What", "does", name, "fear"]:
                return {self.fears[self.kind[name]]}
            case ["Which", "room", "is", direction, "of", start]:
                right, up = STEPS[direction]
                x, y = self.cell[start]
                ahead = {(x + right * steps, y + up * steps) for steps in range(1, 9)}
                return {room for room, cell in self.cell.items() if cell in ahead}
        raise AssertionError(question)


def test_a_simulation_gives_the_same_answers(all_stories):
    for story in all_stories:
        assert Simulation(story.sentences).answers(story.question) == {story.answer}, story


def _cast(story) -> frozenset[str]:
    words = set(" ".join(story.sentences).replace(".", "").split())
    return frozenset(words & {*PEOPLE, *THINGS} or words & set(ROOMS))


def test_no_cast_and_no_story_is_in_two_splits(by_split):
    casts = {split: {_cast(story) for story in each} for split, each in by_split.items()}
    assert casts["train"].isdisjoint(casts["dev"] | casts["test"])
    assert casts["dev"].isdisjoint(casts["test"])
    for split, found in casts.items():
        assert {stories.split_of(list(cast)) for cast in found} == {split}


def test_training_has_every_word(by_split, all_stories):
    def words(each):
        texts = (text for s in each for text in (*s.sentences, s.question, s.answer))
        return {word for text in texts for word in re.findall(r"\w+", text.lower())}

    assert words(by_split["train"]) == words(all_stories)
    assert {word.lower() for word in (*PEOPLE, *THINGS, *ROOMS)} <= words(all_stories)


def test_kinds_and_answers_are_balanced(by_split):
    for each in by_split.values():
        kinds = Counter(story.kind for story in each)
        assert set(kinds) == set(KINDS)
        assert min(kinds.values()) > 0.6 * len(each) / len(KINDS)
    answers = {kind: Counter(s.answer for s in by_split["train"] if s.kind == kind) for kind in KINDS}
    assert set(answers["yes or no"]) == {"yes", "no"}
    assert set(answers["count"]) == set(NUMBERS)
    for kind, counts in answers.items():
        assert max(counts.values()) < 0.65 * sum(counts.values()), kind
    given = [s for s in by_split["train"] if any(re.search("hands|gives", text) for text in s.sentences)]
    assert len(given) > 60
