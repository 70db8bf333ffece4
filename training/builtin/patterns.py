"""The sentence patterns of the built-in corpus: a Korean and an English frame over the same slots.

The Korean side also depends on a `Voice` (ending, spacing), which English does not show, so every Korean
sentence has exactly one English sentence. How many are drawn, and their splits, are in `grammar`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from seq2seq_serve.training.builtin import english, korean
from seq2seq_serve.training.builtin import lexicon as words
from seq2seq_serve.training.builtin.korean import Predicate, Style, Tense, Voice
from seq2seq_serve.training.builtin.lexicon import Action, Person, Thing, Time, Word


@dataclass(frozen=True)
class _Clause:
    """The choices, besides its words, on which a sentence's predicate depends."""

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
        if ending in ("", *korean.PARTICLES):
            return korean.with_particle(noun, ending) if ending else noun
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
        verb = {"do": head, "does": english.third_person(head), "did": english.past(head)}[auxiliary]
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
# The words that frames use without a slot, by their name in the frame.
_FIXED_WORDS: dict[str, Word] = {
    **{stem: Action(stem, "") for stem in ("가", "가지 않", "오", "살", "주", "되", "돌", "하")},
    **{stem: Action(stem, "") for stem in ("좋아하", "공부하", "걸리", "출발하")},
    **{stem: Action(stem, "", is_verb=False) for stem in ("있", "없")},
    "사람": Word("사람", ""),
}


@dataclass(frozen=True)
class Content:
    """One meaning: its English sentence and the Korean sentences chosen for it."""

    pattern: str
    fillers: tuple[str, ...]
    sources: tuple[str, ...]
    target: str

    @property
    def filler_pairs(self) -> list[tuple[str, str]]:
        """All pairs of two fillers, each pair in one fixed order."""
        return list(combinations(sorted(self.fillers), 2))


class Pattern:
    """Two frames and the words of their slots.

    The slots `tense` and `negative` are not fillers: they hold tenses and booleans. Without the slot `tense`,
    a filler that is a time decides the tense.
    """

    def __init__(self, name: str, source: str, target: str, /, **slots: Sequence[Any]) -> None:
        self.name = name
        self._source = source
        self._target = target
        self._slots = slots

    def size(self) -> int:
        """The number of ways to fill the slots."""
        return prod(len(choices) for choices in self._slots.values())

    def filling(self, number: int) -> dict[str, Any]:
        """The words of the slots, for a number below `size`."""
        chosen = {}
        for slot, choices in self._slots.items():
            number, position = divmod(number, len(choices))
            chosen[slot] = choices[position]
        return chosen

    def content(self, filling: dict[str, Any], voices: Sequence[Voice]) -> Content | None:
        """Fills the frames in the given voices; returns None if the fillers do not go together."""
        fillers = {slot: word for slot, word in filling.items() if isinstance(word, Word)}
        if not _go_together(list(fillers.values())):
            return None
        times = [word.tense for word in fillers.values() if isinstance(word, Time)]
        tense = filling.get("tense") or next(iter(times), Tense.PRESENT)
        person = fillers.get("person", _NOBODY)
        assert isinstance(person, Person)
        sources = []
        for voice in voices:
            clause = _Clause(voice, tense, filling.get("negative", False), person)
            spoken = {slot: _KoreanWord(word, clause) for slot, word in (_FIXED_WORDS | fillers).items()}
            text = self._source.format(**spoken)
            sources.append(text + ("." if voice.has_period and not text.endswith("?") else ""))
        job = fillers.get("job")
        values: dict[str, Any] = {
            "does": _EnglishVerb(clause, is_question=False),
            "asks": _EnglishVerb(clause, is_question=True),
            "jobs": job and (job.plural if person.pronoun in ("we", "they") else job.indefinite),
        }
        target = self._target.format(**values, **fillers)
        target = target[0].upper() + target[1:] + ("" if target.endswith("?") else ".")
        korean_fillers = tuple(word.korean for word in fillers.values())
        return Content(self.name, korean_fillers, tuple(dict.fromkeys(sources)), target)


def _go_together(fillers: Sequence[Word]) -> bool:
    """Whether no word comes twice, no two are pronouns, and all words with traits share one."""
    pronouns = [word for word in fillers if word in words.PRONOUNS]
    traits = [{*word.traits} for word in fillers if word.traits]
    is_repeated = len({word.korean for word in fillers}) < len(fillers)
    return not is_repeated and len(pronouns) < 2 and (not traits or bool(set.intersection(*traits)))


_PRESENT, _PAST, _FUTURE = Tense.PRESENT, Tense.PAST, Tense.FUTURE
_BOTH = (False, True)
_OTHER_DAYS = words.PAST_TIMES[:2] + words.FUTURE_TIMES[:2]
_RECENT_DAYS = (words.TODAY, words.PAST_TIMES[0])
_COUNTED = {"person": words.PEOPLE, "count": words.COUNTS, "thing": words.SMALL_THINGS}
_TIMED = {"person": words.PEOPLE, "time": words.FUTURE_TIMES, "action": words.ACTIVITIES}

# A pattern's name, its Korean, its English, and its words: a table reads best in short rows.
# fmt: off
PATTERNS = (
    Pattern("weekday", "{day:은} {name:이다}", "{day} {does:be {name}}",
             day=words.DATED_DAYS, name=words.WEEKDAYS),
    Pattern("arrival", "{adverb} {moment:이다}", "it is {adverb} {moment}",
             adverb=words.ARRIVALS, moment=words.MOMENTS),
    Pattern("date", "{day:은} {month} {number:이다}", "{day} {does:be {month} {number}}",
             day=words.DATED_DAYS, month=words.MONTHS, number=words.MONTH_DAYS),
    Pattern("birthday", "{owner}의 생일은 {month} {number:이다}",
             "{owner.possessive} birthday is {month} {number}",
             owner=words.INDIVIDUALS, month=words.MONTHS, number=words.MONTH_DAYS),
    Pattern("clock", "지금은 {half} {hour} {minute:이다}", "it is {hour}:{minute} {half} now",
             half=words.HALVES, hour=words.HOURS, minute=words.MINUTES),
    Pattern("hour", "지금은 {half} {hour:이다}", "it is {hour}:00 {half} now",
             half=words.HALVES, hour=words.HOURS),
    Pattern("event", "{event:은} {hour} {minute}에 {action:다}",
             "the {event} {does:{action}} at {hour}:{minute}",
             event=words.EVENTS, hour=words.HOURS, minute=words.MINUTES, action=words.STARTING),
    Pattern("routine", "{person:은} {hour}에 {action:다}", "{person} {does:{action}} at {hour}:00",
             person=words.PEOPLE, hour=words.HOURS, action=words.ROUTINES, tense=(_PRESENT, _PAST)),
    Pattern("rain", "{day} {city}에 {falling:이} {오:다}", "it {does:{falling}} in {city} {day}",
             day=_OTHER_DAYS, city=words.CITIES, falling=words.FALLING),
    Pattern("rain", "{day} {city}에 {falling:이} {오:다}", "it is {falling.progressive} in {city} {day}",
             day=(words.TODAY,), city=words.CITIES, falling=words.FALLING),
    Pattern("weather", "{day} {city:은} 날씨가 {quality:다}",
             "the weather in {city} {does:be {quality}} {day}",
             day=(words.TODAY, *_OTHER_DAYS), city=words.CITIES, quality=words.WEATHER),
    Pattern("climate", "{city:은} {season}에 {quality:다}", "{city} is {quality} in {season}",
             city=words.CITIES, season=words.SEASONS, quality=words.CLIMATES),
    Pattern("going", "{person:은} {time} {place:로} {가:다}", "{person} {does:go to {place}} {time}",
             person=words.PEOPLE, time=words.TIMES, place=words.PLACES),
    Pattern("travel", "{person:은} {time} {place:로} {가:다}", "{person} {does:go to {place}} {time}",
             person=words.PEOPLE, time=words.TRAVEL_TIMES, place=words.CITIES),
    Pattern("transport", "{person:은} {vehicle:으로} {place}에 {가:다}",
             "{person} {does:go to {place}} by {vehicle}",
             person=words.PEOPLE, vehicle=words.CITY_VEHICLES, place=words.PLACES, tense=tuple(Tense)),
    Pattern("departure", "{vehicle:은} {hour}에 {city:으로} {출발하:다}",
             "the {vehicle} leaves for {city} at {hour}:00",
             vehicle=words.FAR_VEHICLES, city=words.KOREAN_CITIES, hour=words.HOURS),
    Pattern("journey", "{origin}에서 {city}까지 {vehicle:으로} {span} {걸리:다}",
             "it takes {span.hours} from {origin} to {city} by {vehicle}",
             origin=words.KOREAN_CITIES, city=words.KOREAN_CITIES, vehicle=words.FAR_VEHICLES,
             span=words.SPANS),
    Pattern("living", "{person:은} {place}에 {살:다}", "{person} {does:live in {place}}",
             person=words.PEOPLE, place=words.CITIES + words.COUNTRIES, tense=tuple(Tense), negative=_BOTH),
    Pattern("nationality", "{person:은} {people} {사람:이다}", "{person} {does:be {people}}",
             person=words.PEOPLE, people=words.PEOPLES, negative=_BOTH),
    Pattern("job", "{person:은} {job:이다}", "{person} {does:be {jobs}}",
             person=words.INDIVIDUALS, job=words.JOBS, negative=_BOTH),
    Pattern("former_job", "{person:은} {job:이다}", "{person} {does:be {jobs}}",
             person=words.INDIVIDUALS, job=words.CAREERS, tense=(_PAST,)),
    Pattern("becoming", "{person:은} {job:이} {되:다}", "{person} {does:become {jobs}}",
             person=words.PEOPLE, job=words.CAREERS, tense=(_PAST, _FUTURE)),
    Pattern("ambition", "{person:은} {job:이} {되:싶 다}", "{person} {does:want to become {jobs}}",
             person=words.PEOPLE, job=words.CAREERS),
    Pattern("couple", "{first:과} {second:은} {job:이다}", "{first} and {second} are {job.plural}",
             first=words.NAMES, second=words.NAMES, job=words.JOBS),
    Pattern("name", "{owner}의 이름은 {name:이다}", "{owner.possessive} name is {name}",
             owner=(words.PRONOUNS[0], words.PRONOUNS[2], *words.BROTHERS), name=words.MEN),
    Pattern("name", "{owner}의 이름은 {name:이다}", "{owner.possessive} name is {name}",
             owner=(words.PRONOUNS[0], words.PRONOUNS[3], *words.SISTERS), name=words.WOMEN),
    Pattern("liking", "{person:은} {thing:을} {action:다}", "{person} {does:{action} {thing}}",
             person=words.PEOPLE, thing=words.LIKED, action=words.LIKING, negative=_BOTH),
    Pattern("also_liking", "{person}도 {thing:을} {좋아하:다}", "{person} also {does:like {thing}}",
             person=words.PEOPLE, thing=words.LIKED),
    Pattern("asking_liking", "{person:은} {thing:을} {좋아하:까}", "{asks:like {thing}}?",
             person=words.ASKED, thing=words.LIKED),
    Pattern("eating", "{person:은} {time} {food:을} {action:다}", "{person} {does:{action} {food}} {time}",
             person=words.PEOPLE, time=words.TIMES, food=words.FOODS, action=words.EATING),
    Pattern("drinking", "{person:은} {time} {drink:을} {action:다}",
             "{person} {does:{action} {drink}} {time}",
             person=words.PEOPLE, time=words.TIMES, drink=words.DRINKS, action=words.DRINKING),
    Pattern("doing", "{person:은} {time} {action:다}", "{person} {does:{action}} {time}",
             person=words.PEOPLE, time=words.TIMES, action=words.ACTIVITIES),
    Pattern("not_doing", "{person:은} {time} {action:다}", "{person} {does:{action}} {time}",
             person=words.PEOPLE, time=words.PAST_TIMES + words.FUTURE_TIMES, action=words.ACTIVITIES,
             negative=(True,)),
    Pattern("asking", "{person:은} {time} {action:까}", "{asks:{action}} {time}?",
             person=words.ASKED, time=words.TIMES, action=words.ACTIVITIES),
    Pattern("asking_who", "누가 {time} {action:까}", "who {does:{action}} {time}?",
             time=words.TIMES, action=words.ACTIVITIES),
    Pattern("asking_where", "{person:은} 어디에서 {action:까}", "where {asks:{action}}?",
             person=words.ASKED, action=words.ACTIVITIES, tense=(_PAST, _FUTURE)),
    Pattern("asking_when", "{person:은} 언제 {place:로} {가:까}", "when {asks:go to {place}}?",
             person=words.ASKED, place=words.PLACES, tense=(_PAST, _FUTURE)),
    Pattern("happening", "{person:은} {scene}에서 {action:고 있 다}",
             "{person} {does:be {action.progressive}} {scene}",
             person=words.PEOPLE, scene=words.SCENES, action=words.ACTIVITIES),
    Pattern("together", "{person:은} {friend:과} 함께 {action:다}",
             "{person} {does:{action}} with {friend.object}",
             person=words.PEOPLE, friend=words.PEOPLE, action=words.ACTIVITIES, tense=(_PAST, _FUTURE)),
    Pattern("lasting", "{person:은} {span} 동안 {action:다}", "{person} {does:{action}} for {span.hours}",
             person=words.PEOPLE, span=words.SPANS, action=words.LASTING, tense=(_PAST, _FUTURE)),
    Pattern("studying", "{person:은} {span} 동안 {language:을} {공부하:다}",
             "{person} {does:study {language}} for {span} years",
             person=words.PEOPLE, span=words.YEARS, language=words.LANGUAGES, tense=(_PAST,)),
    Pattern("speaking", "{person:은} {language:을} {하:ㄹ 수 있 다}",
             "{person} {does:can speak {language}}", person=words.PEOPLE, language=words.LANGUAGES),
    Pattern("wanting", "{person:은} {action:싶 다}", "{person} {does:want to {action}}",
             person=words.PEOPLE, action=words.ACTIVITIES, negative=_BOTH),
    Pattern("ability", "{person:은} {action:ㄹ 수 있 다}", "{person} {does:can {action}}",
             person=words.PEOPLE, action=words.SKILLS),
    Pattern("inability", "{person:은} {action:ㄹ 수 없 다}", "{person} {does:not can {action}}",
             person=words.PEOPLE, action=words.SKILLS),
    Pattern("asking_ability", "{person:은} {action:ㄹ 수 있 까}", "{asks:can {action}}?",
             person=words.ASKED, action=words.SKILLS),
    Pattern("duty", "{person:은} {time} {action:야 하 다}", "{person} {does:must {action}} {time}",
             **_TIMED, tense=(_PRESENT,)),
    Pattern("plan", "{person:은} {time} {action:려고 하 다}", "{person} {does:plan to {action}} {time}",
             **_TIMED, tense=(_PRESENT,)),
    Pattern("often", "{person:은} {frequency} {action:다}", "{person} {frequency} {does:{action}}",
             person=words.PEOPLE, frequency=words.FREQUENCIES, action=words.ACTIVITIES),
    Pattern("suggestion", "{time} {action:자}", "let's {action} {time}",
             time=words.FUTURE_TIMES, action=words.ACTIVITIES),
    Pattern("request", "{time} {scene}에서 {action:세요}", "please {action} {scene} {time}",
             time=words.FUTURE_TIMES, scene=words.SCENES, action=words.ACTIVITIES),
    Pattern("hindrance", "{person:은} {reason:서} {place}에 {가지 않:다}",
             "{person} did not go to {place} because {person.pronoun} {does:{reason}}",
             person=words.INDIVIDUALS, reason=words.HINDRANCES, place=words.PLACES, tense=(_PAST,)),
    Pattern("bad_weather", "{reason:서} {person:은} {place}에 {가:다}",
             "{person} {does:go to {place}} because {reason}",
             reason=words.BAD_WEATHER, person=words.PEOPLE, place=words.PLACES, tense=(_PAST,),
             negative=(True,)),
    Pattern("existence", "{furniture} {position}에 {thing:이} {있:다}",
             "there is {thing.indefinite} {position} the {furniture}",
             furniture=words.FURNITURE, position=words.POSITIONS, thing=words.SMALL_THINGS),
    Pattern("absence", "{furniture} {position}에 {thing:이} {없:다}",
             "there is no {thing} {position} the {furniture}",
             furniture=words.FURNITURE, position=words.POSITIONS, thing=words.SMALL_THINGS),
    Pattern("counting", "{furniture} {position}에 {thing} {count} {thing.counter:이} {있:다}",
             "there are {count} {thing.plural} {position} the {furniture}",
             furniture=words.FURNITURE, position=words.POSITIONS, count=words.COUNTS,
             thing=words.SMALL_THINGS),
    Pattern("having", "{person:은} {thing:이} {있:다}", "{person} {does:have {thing.indefinite}}",
             person=words.PEOPLE, thing=words.BELONGINGS),
    Pattern("lacking", "{person:은} {thing:이} {없:다}", "{person} {does:not have {thing.indefinite}}",
             person=words.PEOPLE, thing=words.BELONGINGS),
    Pattern("trading", "{person:은} {time} {thing:을} {action:다}",
             "{person} {does:{action} {thing.indefinite}} {time}",
             person=words.PEOPLE, time=words.PAST_TIMES, thing=words.SMALL_THINGS, action=words.TRADING),
    Pattern("counted_trading", "{person:은} {thing} {count} {thing.counter:을} {action:다}",
             "{person} {does:{action} {count} {thing.plural}}",
             **_COUNTED, action=words.TRADING, tense=(_PAST,)),
    Pattern("giving", "{person:은} {receiver}에게 {thing:을} {주:다}",
             "{person} {does:give {thing.indefinite} to {receiver.object}}",
             person=words.PEOPLE, receiver=words.PEOPLE, thing=words.SMALL_THINGS, tense=(_PAST, _FUTURE)),
    Pattern("age", "{person:은} {age:이다}", "{person} {does:be {age} years old}",
             person=words.PRONOUNS[:1] + words.PRONOUNS[2:4] + words.NAMES + words.BROTHERS + words.SISTERS,
             age=words.AGES),
    Pattern("price", "{which} {thing:은} {price:이다}", "{which} {thing} costs {price} won",
             which=words.THESE, thing=words.SMALL_THINGS, price=words.PRICES),
    Pattern("comparison", "{person:은} {other}보다 {quality:다}",
             "{person} {does:be {quality.comparative}} than {other.object}",
             person=words.PEOPLE, other=words.PEOPLE, quality=words.CHARACTERS),
    Pattern("thing_comparison", "{thing:은} {other}보다 더 {quality:다}",
             "the {thing} is {quality.comparative} than the {other}",
             thing=words.THINGS, other=words.THINGS, quality=words.QUALITIES),
    Pattern("description", "{which} {thing:은} {degree} {quality:다}",
             "{which} {thing} is {degree} {quality}",
             which=words.THESE, thing=words.THINGS, degree=words.DEGREES, quality=words.QUALITIES),
    Pattern("not_description", "{which} {thing:은} {quality:다}", "{which} {thing} is not {quality}",
             which=words.THESE, thing=words.THINGS, quality=words.QUALITIES, negative=(True,)),
    Pattern("identity", "{which}것은 {quality:는} {thing:이다}", "{which} is {quality.indefinite} {thing}",
             which=words.THESE, quality=words.QUALITIES, thing=words.THINGS),
    Pattern("ownership", "{which}것은 {owner}의 {thing:이다}",
             "{which} {does:be {owner.possessive} {thing}}",
             which=words.THESE, owner=words.INDIVIDUALS, thing=words.BELONGINGS, negative=_BOTH),
    Pattern("feeling", "{person:은} {day} {feeling:다}", "{person} {does:{feeling}} {day}",
             person=words.PEOPLE, day=_RECENT_DAYS, feeling=words.FEELINGS, negative=_BOTH),
    Pattern("asking_feeling", "{person:은} {day} {feeling:까}", "{asks:{feeling}} {day}?",
             person=words.ASKED, day=_RECENT_DAYS, feeling=words.FEELINGS),
    Pattern("location", "{place:은} {landmark} {side}에 {있:다}", "{place} is {side} {landmark}",
             place=words.LANDMARKS, landmark=words.LANDMARKS, side=words.SIDES),
    Pattern("asking_location", "{place:은} 어디에 {있:까}", "where is {place}?", place=words.LANDMARKS),
    Pattern("turning", "{place}에서 {turn:으로} {돌:자}", "let's turn {turn} at {place}",
             place=words.LANDMARKS, turn=words.TURNS),
    Pattern("knowing", "{person:은} {other:을} {action:다}", "{person} {does:{action} {other.object}}",
             person=words.PEOPLE, other=words.PEOPLE, action=words.KNOWING, tense=(_PRESENT, _PAST)),
)
# fmt: on
