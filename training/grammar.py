"""The built-in parallel corpus: a grammar that says the same thing in Korean and in English.

Written for this project, so its sentences carry nobody else's licence. A pattern is a Korean and an English
frame over the same slots. The Korean side also follows a `Voice` (ending, spacing), which English does not
show, so every Korean sentence has exactly one English sentence. The held-out splits ask for new
combinations of known words: see `build_corpus`.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from training import korean, lexicon
from training.korean import Predicate, Style, Tense, Voice
from training.lexicon import Action, Person, Thing, Time, Word


@dataclass(frozen=True)
class Pair:
    """A Korean sentence, its English sentence, the pattern that made both, and the words in its slots."""

    source: str
    target: str
    pattern: str
    fillers: tuple[str, ...]


@dataclass(frozen=True)
class BuiltinCorpus:
    """The three splits; `build_corpus` says what holds between them."""

    train: tuple[Pair, ...]
    dev: tuple[Pair, ...]
    test: tuple[Pair, ...]


@dataclass(frozen=True)
class _Clause:
    """What a sentence's predicate depends on besides its words."""

    voice: Voice
    tense: Tense
    is_negative: bool
    person: Person


class _KoreanWord:
    """A word in a Korean frame: the format specification is the particle or the ending it takes."""

    def __init__(self, word: Word, clause: _Clause) -> None:
        self._word = word
        self._clause = clause

    @property
    def counter(self) -> "_KoreanWord":
        """The counter of a thing: 권 for 책."""
        assert isinstance(self._word, Thing)
        return _KoreanWord(Word(self._word.counter, ""), self._clause)

    def __format__(self, ending: str) -> str:
        noun = self._clause.voice.name(self._word.korean)
        if ending in _PARTICLES:
            return _PARTICLES[ending](noun)
        if ending == "로":
            return self._clause.voice.to(noun)
        if ending == "이다":
            return self._copula(noun)
        assert isinstance(self._word, Action)
        return self._verb(self._word.predicate, ending)

    def _copula(self, noun: str) -> str:
        voice = self._clause.voice
        if self._clause.is_negative:
            return korean.not_copula(noun, voice.style)
        return korean.copula(
            noun, self._clause.tense, voice.style, is_spaced=voice.is_spaced, is_short=voice.is_short
        )

    def _verb(self, predicate: Predicate, ending: str) -> str:
        style, tense = self._clause.voice.style, self._clause.tense
        if ending == "자":
            return predicate.suggestion(style)
        if ending == "세요":
            return predicate.command() if style is Style.FORMAL else f"{predicate.infinitive} 줘"
        if ending in ("는", "서"):
            return predicate.noun_modifier if ending == "는" else predicate.cause()
        *auxiliary, mood = ending.rsplit(" ", 1)
        if auxiliary == ["싶"]:
            predicate = predicate.wished(by_speaker=self._clause.person.pronoun in ("I", "we"))
        elif auxiliary:
            predicate = _AUXILIARIES[auxiliary[0]](predicate)
        if self._clause.is_negative:
            predicate = predicate.negated()
        return predicate.question(tense, style) if mood == "까" else predicate.statement(tense, style)


_PARTICLES: dict[str, Callable[[str], str]] = {
    "": str,
    "은": korean.topic,
    "이": korean.subject,
    "을": korean.object_,
    "과": korean.companion,
    "으로": korean.direction,
}
_AUXILIARIES: dict[str, Callable[[Predicate], Predicate]] = {
    "고 있": Predicate.ongoing,
    "ㄹ 수 있": Predicate.possible,
    "ㄹ 수 없": Predicate.impossible,
    "야 하": Predicate.required,
    "려고 하": Predicate.intended,
}


class _EnglishVerb:
    """The predicate of an English frame: the format specification is a phrase with its bare verb."""

    def __init__(self, clause: _Clause, *, is_question: bool) -> None:
        self._clause = clause
        self._is_question = is_question

    def __format__(self, phrase: str) -> str:
        is_negative = self._clause.is_negative or phrase.startswith("not ")
        head, _, rest = phrase.removeprefix("not ").partition(" ")
        bare = f"{head} {rest}".strip()
        auxiliary = self._auxiliary(head)
        if head in ("can", "must") or (head == "be" and auxiliary != "will"):
            bare = rest
        if self._is_question:
            return f"{auxiliary} {self._clause.person} {bare}"
        if is_negative:
            return f"cannot {bare}" if auxiliary == "can" else f"{auxiliary} not {bare}"
        if auxiliary not in ("do", "does", "did"):
            return f"{auxiliary} {bare}"
        verb = {"do": head, "does": lexicon.third_person(head), "did": lexicon.past(head)}[auxiliary]
        return f"{verb} {rest}".strip()

    def _auxiliary(self, head: str) -> str:
        pronoun, tense = self._clause.person.pronoun, self._clause.tense
        if head in ("can", "must"):
            return head
        if tense is Tense.FUTURE:
            return "will"
        is_plural = pronoun in ("we", "you", "they")
        if head == "be":
            if tense is Tense.PAST:
                return "were" if is_plural else "was"
            return "are" if is_plural else "am" if pronoun == "I" else "is"
        return "did" if tense is Tense.PAST else "do" if is_plural or pronoun == "I" else "does"


_NOBODY = Person("", "", "", "it")
# The words that frames use without a slot, by the name that they have there.
_FIXED_WORDS: dict[str, Word] = {
    "가": Action("가", ""),
    "가지 않": Action("가지 않", ""),
    "오": Action("오", ""),
    "살": Action("살", ""),
    "주": Action("주", ""),
    "되": Action("되", ""),
    "돌": Action("돌", ""),
    "하": Action("하", ""),
    "좋아하": Action("좋아하", ""),
    "공부하": Action("공부하", ""),
    "걸리": Action("걸리", ""),
    "출발하": Action("출발하", ""),
    "있": Action("있", "", is_verb=False),
    "없": Action("없", "", is_verb=False),
    "사람": Word("사람", ""),
}


@dataclass(frozen=True)
class _Content:
    """One thing to say: its English sentence and the Korean sentences chosen for it."""

    pattern: str
    fillers: tuple[str, ...]
    sources: tuple[str, ...]
    target: str

    @property
    def filler_pairs(self) -> list[tuple[str, str]]:
        """Every two of the fillers, each pair in one fixed order."""
        return list(combinations(sorted(self.fillers), 2))


class _Pattern:
    """Two frames and the words of their slots.

    The slots `tense` and `negative` are no fillers: they hold tenses and booleans. Without the first, a
    filler that is a time settles the tense.
    """

    def __init__(self, name: str, source: str, target: str, /, **slots: Sequence[Any]) -> None:
        self.name = name
        self._source = source
        self._target = target
        self._slots = slots

    def size(self) -> int:
        """The number of ways to fill the slots."""
        return prod(len(words) for words in self._slots.values())

    def filling(self, number: int) -> dict[str, Any]:
        """The words of the slots, for a number below `size`."""
        chosen = {}
        for slot, words in self._slots.items():
            number, position = divmod(number, len(words))
            chosen[slot] = words[position]
        return chosen

    def number(self, *words: object) -> int:
        """The number whose filling has just these words, in the order of the slots."""
        number = 0
        for choices, word in reversed(list(zip(self._slots.values(), words, strict=True))):
            number = number * len(choices) + list(choices).index(word)
        return number

    def content(self, filling: dict[str, Any], voices: Sequence[Voice]) -> _Content | None:
        """Says it in the given voices; None if the words do not go together."""
        words = {slot: word for slot, word in filling.items() if isinstance(word, Word)}
        if not _go_together(list(words.values())):
            return None
        times = [word.tense for word in words.values() if isinstance(word, Time)]
        tense = filling.get("tense") or next(iter(times), Tense.PRESENT)
        person = words.get("person", _NOBODY)
        assert isinstance(person, Person)
        sources = []
        for voice in voices:
            clause = _Clause(voice, tense, filling.get("negative", False), person)
            spoken = {slot: _KoreanWord(word, clause) for slot, word in (_FIXED_WORDS | words).items()}
            text = self._source.format(**spoken)
            sources.append(text + ("." if voice.has_period and not text.endswith("?") else ""))
        job = words.get("job")
        values: dict[str, Any] = {
            "does": _EnglishVerb(clause, is_question=False),
            "asks": _EnglishVerb(clause, is_question=True),
            "jobs": job and (job.plural if person.pronoun in ("we", "they") else job.indefinite),
        }
        target = self._target.format(**values, **words)
        target = target[0].upper() + target[1:] + ("" if target.endswith("?") else ".")
        fillers = tuple(word.korean for word in words.values())
        return _Content(self.name, fillers, tuple(dict.fromkeys(sources)), target)


def _go_together(words: Sequence[Word]) -> bool:
    """Whether no word is said twice, no two pronouns meet, and the traits of all that have some agree."""
    pronouns = [word for word in words if word in lexicon.PRONOUNS]
    traits = [{*word.traits} for word in words if word.traits]
    is_repeated = len({word.korean for word in words}) < len(words)
    return not is_repeated and len(pronouns) < 2 and (not traits or bool(set.intersection(*traits)))


_PRESENT, _PAST, _FUTURE = Tense.PRESENT, Tense.PAST, Tense.FUTURE
_L = lexicon
_BOTH = (False, True)
_COUNTED = {"person": _L.PEOPLE, "count": _L.COUNTS, "thing": _L.SMALL_THINGS}
_TIMED = {"person": _L.PEOPLE, "time": _L.FUTURE_TIMES, "action": _L.ACTIVITIES}

# A pattern's name, its Korean, its English, and its words: a table reads best in short rows.
# fmt: off
_PATTERNS = (
    _Pattern("weekday", "{day:은} {name:이다}",
             "{day} {does:be {name}}", day=_L.DATED_DAYS, name=_L.WEEKDAYS),
    _Pattern("arrival", "{adverb} {moment:이다}",
             "it is {adverb} {moment}", adverb=_L.ARRIVALS, moment=_L.MOMENTS),
    _Pattern("date", "{day:은} {month} {number:이다}", "{day} {does:be {month} {number}}",
             day=_L.DATED_DAYS, month=_L.MONTHS, number=_L.MONTH_DAYS),
    _Pattern("birthday", "{owner}의 생일은 {month} {number:이다}",
             "{owner.possessive} birthday is {month} {number}",
             owner=_L.INDIVIDUALS, month=_L.MONTHS, number=_L.MONTH_DAYS),
    _Pattern("clock", "지금은 {half} {hour} {minute:이다}", "it is {hour}:{minute} {half} now",
             half=_L.HALVES, hour=_L.HOURS, minute=_L.MINUTES),
    _Pattern("hour", "지금은 {half} {hour:이다}",
             "it is {hour}:00 {half} now", half=_L.HALVES, hour=_L.HOURS),
    _Pattern("event", "{event:은} {hour} {minute}에 {action:다}",
             "the {event} {does:{action}} at {hour}:{minute}",
             event=_L.EVENTS, hour=_L.HOURS, minute=_L.MINUTES, action=_L.STARTING),
    _Pattern("routine", "{person:은} {hour}에 {action:다}", "{person} {does:{action}} at {hour}:00",
             person=_L.PEOPLE, hour=_L.HOURS, action=_L.ROUTINES, tense=(_PRESENT, _PAST)),
    _Pattern("rain", "{day} {city}에 {falling:이} {오:다}", "it {does:{falling}} in {city} {day}",
             day=(*_L.WEATHER_DAYS[:2], *_L.WEATHER_DAYS[3:]), city=_L.CITIES, falling=_L.FALLING),
    _Pattern("rain", "{day} {city}에 {falling:이} {오:다}", "it is {falling.progressive} in {city} {day}",
             day=_L.WEATHER_DAYS[2:3], city=_L.CITIES, falling=_L.FALLING),
    _Pattern("weather", "{day} {city:은} 날씨가 {quality:다}",
             "the weather in {city} {does:be {quality}} {day}",
             day=_L.WEATHER_DAYS, city=_L.CITIES, quality=_L.WEATHER),
    _Pattern("climate", "{city:은} {season}에 {quality:다}", "{city} is {quality} in {season}",
             city=_L.CITIES, season=_L.SEASONS, quality=_L.CLIMATES),
    _Pattern("going", "{person:은} {time} {place:로} {가:다}", "{person} {does:go to {place}} {time}",
             person=_L.PEOPLE, time=_L.TIMES, place=_L.PLACES),
    _Pattern("travel", "{person:은} {time} {place:로} {가:다}", "{person} {does:go to {place}} {time}",
             person=_L.PEOPLE, time=_L.TRAVEL_TIMES, place=_L.CITIES),
    _Pattern("transport", "{person:은} {vehicle:으로} {place}에 {가:다}",
             "{person} {does:go to {place}} by {vehicle}",
             person=_L.PEOPLE, vehicle=_L.CITY_VEHICLES, place=_L.PLACES, tense=tuple(Tense)),
    _Pattern("departure", "{vehicle:은} {hour}에 {city:으로} {출발하:다}",
             "the {vehicle} leaves for {city} at {hour}:00",
             vehicle=_L.FAR_VEHICLES, city=_L.KOREAN_CITIES, hour=_L.HOURS),
    _Pattern("journey", "{origin}에서 {city}까지 {vehicle:으로} {span} {걸리:다}",
             "it takes {span.hours} from {origin} to {city} by {vehicle}",
             origin=_L.KOREAN_CITIES, city=_L.KOREAN_CITIES, vehicle=_L.FAR_VEHICLES, span=_L.SPANS),
    _Pattern("living", "{person:은} {place}에 {살:다}", "{person} {does:live in {place}}",
             person=_L.PEOPLE, place=_L.CITIES + _L.COUNTRIES, tense=tuple(Tense), negative=_BOTH),
    _Pattern("nationality", "{person:은} {people} {사람:이다}", "{person} {does:be {people}}",
             person=_L.PEOPLE, people=_L.PEOPLES, negative=_BOTH),
    _Pattern("job", "{person:은} {job:이다}", "{person} {does:be {jobs}}",
             person=_L.INDIVIDUALS, job=_L.JOBS, negative=_BOTH),
    _Pattern("former_job", "{person:은} {job:이다}", "{person} {does:be {jobs}}",
             person=_L.INDIVIDUALS, job=_L.CAREERS, tense=(_PAST,)),
    _Pattern("becoming", "{person:은} {job:이} {되:다}", "{person} {does:become {jobs}}",
             person=_L.PEOPLE, job=_L.CAREERS, tense=(_PAST, _FUTURE)),
    _Pattern("ambition", "{person:은} {job:이} {되:싶 다}", "{person} {does:want to become {jobs}}",
             person=_L.PEOPLE, job=_L.CAREERS),
    _Pattern("couple", "{first:과} {second:은} {job:이다}", "{first} and {second} are {job.plural}",
             first=_L.NAMES, second=_L.NAMES, job=_L.JOBS),
    _Pattern("name", "{owner}의 이름은 {name:이다}", "{owner.possessive} name is {name}",
             owner=(_L.PRONOUNS[0], _L.PRONOUNS[2], *_L.BROTHERS), name=_L.MEN),
    _Pattern("name", "{owner}의 이름은 {name:이다}", "{owner.possessive} name is {name}",
             owner=(_L.PRONOUNS[0], _L.PRONOUNS[3], *_L.SISTERS), name=_L.WOMEN),
    _Pattern("liking", "{person:은} {thing:을} {action:다}", "{person} {does:{action} {thing}}",
             person=_L.PEOPLE, thing=_L.LIKED, action=_L.LIKING, negative=_BOTH),
    _Pattern("also_liking", "{person}도 {thing:을} {좋아하:다}", "{person} also {does:like {thing}}",
             person=_L.PEOPLE, thing=_L.LIKED),
    _Pattern("asking_liking", "{person:은} {thing:을} {좋아하:까}", "{asks:like {thing}}?",
             person=_L.ASKED, thing=_L.LIKED),
    _Pattern("eating", "{person:은} {time} {food:을} {action:다}", "{person} {does:{action} {food}} {time}",
             person=_L.PEOPLE, time=_L.TIMES, food=_L.FOODS, action=_L.EATING),
    _Pattern("drinking", "{person:은} {time} {drink:을} {action:다}",
             "{person} {does:{action} {drink}} {time}",
             person=_L.PEOPLE, time=_L.TIMES, drink=_L.DRINKS, action=_L.DRINKING),
    _Pattern("doing", "{person:은} {time} {action:다}", "{person} {does:{action}} {time}",
             person=_L.PEOPLE, time=_L.TIMES, action=_L.ACTIVITIES),
    _Pattern("not_doing", "{person:은} {time} {action:다}", "{person} {does:{action}} {time}",
             person=_L.PEOPLE, time=_L.PAST_TIMES + _L.FUTURE_TIMES, action=_L.ACTIVITIES, negative=(True,)),
    _Pattern("asking", "{person:은} {time} {action:까}", "{asks:{action}} {time}?",
             person=_L.ASKED, time=_L.TIMES, action=_L.ACTIVITIES),
    _Pattern("asking_who", "누가 {time} {action:까}", "who {does:{action}} {time}?",
             time=_L.TIMES, action=_L.ACTIVITIES),
    _Pattern("asking_where", "{person:은} 어디에서 {action:까}", "where {asks:{action}}?",
             person=_L.ASKED, action=_L.ACTIVITIES, tense=(_PAST, _FUTURE)),
    _Pattern("asking_when", "{person:은} 언제 {place:로} {가:까}", "when {asks:go to {place}}?",
             person=_L.ASKED, place=_L.PLACES, tense=(_PAST, _FUTURE)),
    _Pattern("happening", "{person:은} {scene}에서 {action:고 있 다}",
             "{person} {does:be {action.progressive}} {scene}",
             person=_L.PEOPLE, scene=_L.SCENES, action=_L.ACTIVITIES),
    _Pattern("together", "{person:은} {friend:과} 함께 {action:다}",
             "{person} {does:{action}} with {friend.object}",
             person=_L.PEOPLE, friend=_L.PEOPLE, action=_L.ACTIVITIES, tense=(_PAST, _FUTURE)),
    _Pattern("lasting", "{person:은} {span} 동안 {action:다}", "{person} {does:{action}} for {span.hours}",
             person=_L.PEOPLE, span=_L.SPANS, action=_L.LASTING, tense=(_PAST, _FUTURE)),
    _Pattern("studying", "{person:은} {span} 동안 {language:을} {공부하:다}",
             "{person} {does:study {language}} for {span} years",
             person=_L.PEOPLE, span=_L.YEARS, language=_L.LANGUAGES, tense=(_PAST,)),
    _Pattern("speaking", "{person:은} {language:을} {하:ㄹ 수 있 다}", "{person} {does:can speak {language}}",
             person=_L.PEOPLE, language=_L.LANGUAGES),
    _Pattern("wanting", "{person:은} {action:싶 다}", "{person} {does:want to {action}}",
             person=_L.PEOPLE, action=_L.ACTIVITIES, negative=_BOTH),
    _Pattern("ability", "{person:은} {action:ㄹ 수 있 다}", "{person} {does:can {action}}",
             person=_L.PEOPLE, action=_L.SKILLS),
    _Pattern("inability", "{person:은} {action:ㄹ 수 없 다}", "{person} {does:not can {action}}",
             person=_L.PEOPLE, action=_L.SKILLS),
    _Pattern("asking_ability", "{person:은} {action:ㄹ 수 있 까}", "{asks:can {action}}?",
             person=_L.ASKED, action=_L.SKILLS),
    _Pattern("duty", "{person:은} {time} {action:야 하 다}",
             "{person} {does:must {action}} {time}", **_TIMED, tense=(_PRESENT,)),
    _Pattern("plan", "{person:은} {time} {action:려고 하 다}", "{person} {does:plan to {action}} {time}",
             **_TIMED, tense=(_PRESENT,)),
    _Pattern("often", "{person:은} {frequency} {action:다}", "{person} {frequency} {does:{action}}",
             person=_L.PEOPLE, frequency=_L.FREQUENCIES, action=_L.ACTIVITIES),
    _Pattern("suggestion", "{time} {action:자}",
             "let's {action} {time}", time=_L.FUTURE_TIMES, action=_L.ACTIVITIES),
    _Pattern("request", "{time} {scene}에서 {action:세요}", "please {action} {scene} {time}",
             time=_L.FUTURE_TIMES, scene=_L.SCENES, action=_L.ACTIVITIES),
    _Pattern("hindrance", "{person:은} {reason:서} {place}에 {가지 않:다}",
             "{person} did not go to {place} because {person.pronoun} {does:{reason}}",
             person=_L.INDIVIDUALS, reason=_L.HINDRANCES, place=_L.PLACES, tense=(_PAST,)),
    _Pattern("bad_weather", "{reason:서} {person:은} {place}에 {가:다}",
             "{person} {does:go to {place}} because {reason}",
             reason=_L.BAD_WEATHER, person=_L.PEOPLE, place=_L.PLACES, tense=(_PAST,), negative=(True,)),
    _Pattern("existence", "{furniture} {position}에 {thing:이} {있:다}",
             "there is {thing.indefinite} {position} the {furniture}",
             furniture=_L.FURNITURE, position=_L.POSITIONS, thing=_L.SMALL_THINGS),
    _Pattern("absence", "{furniture} {position}에 {thing:이} {없:다}",
             "there is no {thing} {position} the {furniture}",
             furniture=_L.FURNITURE, position=_L.POSITIONS, thing=_L.SMALL_THINGS),
    _Pattern("counting", "{furniture} {position}에 {thing} {count} {thing.counter:이} {있:다}",
             "there are {count} {thing.plural} {position} the {furniture}",
             furniture=_L.FURNITURE, position=_L.POSITIONS, count=_L.COUNTS, thing=_L.SMALL_THINGS),
    _Pattern("having", "{person:은} {thing:이} {있:다}", "{person} {does:have {thing.indefinite}}",
             person=_L.PEOPLE, thing=_L.BELONGINGS),
    _Pattern("lacking", "{person:은} {thing:이} {없:다}", "{person} {does:not have {thing.indefinite}}",
             person=_L.PEOPLE, thing=_L.BELONGINGS),
    _Pattern("trading", "{person:은} {time} {thing:을} {action:다}",
             "{person} {does:{action} {thing.indefinite}} {time}",
             person=_L.PEOPLE, time=_L.PAST_TIMES, thing=_L.SMALL_THINGS, action=_L.TRADING),
    _Pattern("counted_trading", "{person:은} {thing} {count} {thing.counter:을} {action:다}",
             "{person} {does:{action} {count} {thing.plural}}", **_COUNTED, action=_L.TRADING, tense=(_PAST,)),
    _Pattern("giving", "{person:은} {receiver}에게 {thing:을} {주:다}",
             "{person} {does:give {thing.indefinite} to {receiver.object}}",
             person=_L.PEOPLE, receiver=_L.PEOPLE, thing=_L.SMALL_THINGS, tense=(_PAST, _FUTURE)),
    _Pattern("age", "{person:은} {age:이다}", "{person} {does:be {age} years old}",
             person=_L.PRONOUNS[:1] + _L.PRONOUNS[2:4] + _L.NAMES + _L.BROTHERS + _L.SISTERS, age=_L.AGES),
    _Pattern("price", "{which} {thing:은} {price:이다}", "{which} {thing} costs {price} won",
             which=_L.THESE, thing=_L.SMALL_THINGS, price=_L.PRICES),
    _Pattern("comparison", "{person:은} {other}보다 {quality:다}",
             "{person} {does:be {quality.comparative}} than {other.object}",
             person=_L.PEOPLE, other=_L.PEOPLE, quality=_L.CHARACTERS),
    _Pattern("thing_comparison", "{thing:은} {other}보다 더 {quality:다}",
             "the {thing} is {quality.comparative} than the {other}",
             thing=_L.THINGS, other=_L.THINGS, quality=_L.QUALITIES),
    _Pattern("description", "{which} {thing:은} {degree} {quality:다}",
             "{which} {thing} is {degree} {quality}",
             which=_L.THESE, thing=_L.THINGS, degree=_L.DEGREES, quality=_L.QUALITIES),
    _Pattern("not_description", "{which} {thing:은} {quality:다}", "{which} {thing} is not {quality}",
             which=_L.THESE, thing=_L.THINGS, quality=_L.QUALITIES, negative=(True,)),
    _Pattern("identity", "{which}것은 {quality:는} {thing:이다}", "{which} is {quality.indefinite} {thing}",
             which=_L.THESE, quality=_L.QUALITIES, thing=_L.THINGS),
    _Pattern("ownership", "{which}것은 {owner}의 {thing:이다}",
             "{which} {does:be {owner.possessive} {thing}}",
             which=_L.THESE, owner=_L.INDIVIDUALS, thing=_L.BELONGINGS, negative=_BOTH),
    _Pattern("feeling", "{person:은} {day} {feeling:다}", "{person} {does:{feeling}} {day}",
             person=_L.PEOPLE, day=_L.WEATHER_DAYS[1:3], feeling=_L.FEELINGS, negative=_BOTH),
    _Pattern("asking_feeling", "{person:은} {day} {feeling:까}", "{asks:{feeling}} {day}?",
             person=_L.ASKED, day=_L.WEATHER_DAYS[1:3], feeling=_L.FEELINGS),
    _Pattern("location", "{place:은} {landmark} {side}에 {있:다}", "{place} is {side} {landmark}",
             place=_L.LANDMARKS, landmark=_L.LANDMARKS, side=_L.SIDES),
    _Pattern("asking_location", "{place:은} 어디에 {있:까}", "where is {place}?", place=_L.LANDMARKS),
    _Pattern("turning", "{place}에서 {turn:으로} {돌:자}", "let's turn {turn} at {place}",
             place=_L.LANDMARKS, turn=_L.TURNS),
    _Pattern("knowing", "{person:은} {other:을} {action:다}", "{person} {does:{action} {other.object}}",
             person=_L.PEOPLE, other=_L.PEOPLE, action=_L.KNOWING, tense=(_PRESENT, _PAST)),
)
# fmt: on

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
# What the README and the tests translate: always in training, in every voice.
_ANCHORS = {
    "weekday": (_L.DATED_DAYS[2], _L.WEEKDAYS[4]),
    "arrival": (_L.ARRIVALS[0], _L.WEEKDAYS[4]),
    "job": (_L.PRONOUNS[0], _L.JOBS[0], False),
}
_PAIRS_PER_PATTERN = 560
_HELD_OUT_SHARE = 0.05
_MAX_CONTENTS_OF_A_HELD_OUT_PAIR = 8
_MIN_TRAIN_CONTENTS = 4


def _draw_contents(seed: int) -> list[_Content]:
    contents = []
    for position, pattern in enumerate(_PATTERNS):
        rng = random.Random(f"{seed} {position}")
        size = pattern.size()
        numbers = rng.sample(range(size), min(size, 5 * _PAIRS_PER_PATTERN))
        anchor = pattern.number(*_ANCHORS[pattern.name]) if pattern.name in _ANCHORS else None
        if anchor is not None:
            numbers = [anchor, *(number for number in numbers if number != anchor)]
        num_pairs = 0
        for number in numbers:
            num_voices = len(_VOICES) if number == anchor else 1 if size > _PAIRS_PER_PATTERN else 4
            content = pattern.content(pattern.filling(number), rng.sample(_VOICES, num_voices))
            if content is not None and num_pairs < _PAIRS_PER_PATTERN:
                contents.append(content)
                num_pairs += len(content.sources)
    return contents


def _choose_held_out(contents: Sequence[_Content], rng: random.Random) -> dict[tuple[str, str], str]:
    """Chooses the pairs of fillers that training never sees together, and the split that each goes to.

    Only rare pairs are taken, so that each costs training little, and none that leaves a filler too seldom
    in one of its patterns.
    """
    containing: dict[tuple[str, str], list[_Content]] = defaultdict(list)
    remaining: Counter[tuple[str, str]] = Counter()
    for content in contents:
        remaining.update((content.pattern, filler) for filler in content.fillers)
        for pair in content.filler_pairs:
            containing[pair].append(content)
    quota = {
        name: _HELD_OUT_SHARE * n for name, n in Counter(content.pattern for content in contents).items()
    }
    anchored = {pair for content in contents if len(content.sources) > 4 for pair in content.filler_pairs}
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

    A content, which is one English sentence with its Korean spellings, goes whole into one split. Dev and
    test hold the contents with a held-out pair of fillers: those two words stand together in no training
    sentence of any pattern, though each stands in others of the same pattern. Contents that share an
    English sentence share a split, so training has neither side of a held-out sentence.
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
