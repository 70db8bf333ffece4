"""Hangul morphology: particles by final consonant, numbers, and the endings of verbs and adjectives.

It knows Korean spelling, but no sentence, lexicon or corpus. A `Predicate` is a stem with its class.
Auxiliaries (negation, wish, ability, duty) turn one `Predicate` into another, which takes every tense and
style of a verb.
"""

from dataclasses import dataclass
from enum import Enum

_FIRST_SYLLABLE = ord("가")
_LAST_SYLLABLE = ord("힣")
_VOWELS = "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
_FINALS = " ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ"
# A stem's last vowel, and its contraction with the ending 아/어. After other vowels, 어 is a syllable of its
# own.
_CONTRACTIONS = dict(zip("ㅏㅓㅐㅔㅕㅗㅜㅣ", "ㅏㅓㅐㅔㅕㅘㅝㅕ", strict=True))
# A particle's form after a consonant, and its form after a vowel.
PARTICLES = {"은": "는", "이": "가", "을": "를", "과": "와", "으로": "로"}
_SUBJECTS = {"나": "내가", "저": "제가", "너": "네가"}


class Tense(Enum):
    """When a predicate holds."""

    PRESENT = "present"
    PAST = "past"
    FUTURE = "future"


class Style(Enum):
    """The ending's level: -다/-ㄴ다 of writing, or -습니다 of polite speech."""

    PLAIN = "plain"
    FORMAL = "formal"


def _decompose(syllable: str) -> tuple[int, str, str]:
    """Returns the index of the leading consonant, the vowel, and the final consonant (" " for none)."""
    if not _FIRST_SYLLABLE <= ord(syllable) <= _LAST_SYLLABLE:
        raise ValueError(f"{syllable!r} is not a Hangul syllable; spell the word in Hangul")
    lead_and_vowel, final = divmod(ord(syllable) - _FIRST_SYLLABLE, len(_FINALS))
    lead, vowel = divmod(lead_and_vowel, len(_VOWELS))
    return lead, _VOWELS[vowel], _FINALS[final]


def _compose(lead: int, vowel: str, final: str) -> str:
    index = (lead * len(_VOWELS) + _VOWELS.index(vowel)) * len(_FINALS) + _FINALS.index(final)
    return chr(_FIRST_SYLLABLE + index)


def _with_final(text: str, final: str) -> str:
    lead, vowel, _ = _decompose(text[-1])
    return text[:-1] + _compose(lead, vowel, final)


def final_consonant(text: str) -> str:
    """Returns the final consonant of `text`, or "" after a vowel; ValueError if it does not end in Hangul."""
    if not text:
        raise ValueError("an empty word has no final consonant; give a word that ends in Hangul")
    return _decompose(text[-1])[2].strip()


def with_particle(noun: str, particle: str) -> str:
    """Adds one of `PARTICLES`, named by its form after a consonant; 나, 저 and 너 change before 이."""
    if particle == "이" and noun in _SUBJECTS:
        return _SUBJECTS[noun]
    final = final_consonant(noun)
    is_vowel_like = not final or (particle == "으로" and final == "ㄹ")
    return noun + (PARTICLES[particle] if is_vowel_like else particle)


_NATIVE_ONES = ("", "한", "두", "세", "네", "다섯", "여섯", "일곱", "여덟", "아홉")
_NATIVE_TENS = ("", "열", "스물", "서른", "마흔", "쉰", "예순", "일흔", "여든", "아흔")
_SINO_DIGITS = ("", "일", "이", "삼", "사", "오", "육", "칠", "팔", "구")


def native_number(value: int) -> str:
    """Returns the native number of 1 to 99 in its form before a counter: 한, 두, 스무, 스물한."""
    if not 1 <= value <= 99:
        raise ValueError(f"native numbers run from 1 to 99, got {value}; use sino_number")
    if value == 20:
        return "스무"
    tens, ones = divmod(value, 10)
    return _NATIVE_TENS[tens] + _NATIVE_ONES[ones]


def sino_number(value: int) -> str:
    """Returns the Sino-Korean number of 1 to 99,999,999, with a space after 만: 만 오천."""
    if not 1 <= value <= 99_999_999:
        raise ValueError(f"Sino-Korean numbers are spelled from 1 to 99,999,999, got {value}")
    ten_thousands, rest = divmod(value, 10_000)
    parts = []
    if ten_thousands:
        parts.append(("" if ten_thousands == 1 else _sino_below_ten_thousand(ten_thousands)) + "만")
    if rest:
        parts.append(_sino_below_ten_thousand(rest))
    return " ".join(parts)


def _sino_below_ten_thousand(value: int) -> str:
    text = ""
    for unit, name in ((1000, "천"), (100, "백"), (10, "십"), (1, "")):
        digit, value = divmod(value, unit)
        if digit:
            text += name if digit == 1 and name else _SINO_DIGITS[digit] + name
    return text


def month_name(month: int) -> str:
    """Returns the month in Hangul; June and October lose a consonant: 유월, 시월."""
    return {6: "유", 10: "시"}.get(month, sino_number(month)) + "월"


@dataclass(frozen=True)
class Predicate:
    """A stem (the dictionary form without 다) and its class, on which its endings depend.

    `irregular` names a class whose stem changes before a vowel: "ㅂ" (춥다, 추워), "ㄷ" (듣다, 들어), "르"
    (부르다, 불러), or "" for all others. Regular changes (ㄹ drops, ㅡ drops, 하 becomes 해) need no class.
    """

    stem: str
    is_verb: bool = True
    irregular: str = ""

    def __post_init__(self) -> None:
        if self.irregular not in ("", "ㅂ", "ㄷ", "르"):
            raise ValueError(f"irregular class of {self.stem!r} must be ㅂ, ㄷ, 르 or empty")
        expected = self.stem[-1] if self.irregular == "르" else final_consonant(self.stem)
        if self.irregular and expected != self.irregular:
            raise ValueError(f"{self.stem!r} cannot be {self.irregular}-irregular: it does not end in it")

    @property
    def open_stem(self) -> str:
        """The stem before endings that begin with 으; it ends in a vowel or in ㄹ."""
        final = final_consonant(self.stem)
        if self.irregular == "ㅂ":
            return _with_final(self.stem, " ") + "우"
        if self.irregular == "ㄷ":
            return _with_final(self.stem, "ㄹ") + "으"
        return self.stem if final in ("", "ㄹ") else self.stem + "으"

    @property
    def infinitive(self) -> str:
        """The 아/어 form: 가, 먹어, 해, 추워, 들어, 불러, 써."""
        if self.stem.endswith("하"):
            return self.stem[:-1] + "해"
        if self.irregular == "르":
            before = _decompose(self.stem[-2])[1]
            return _with_final(self.stem[:-1], "ㄹ") + ("라" if before in "ㅏㅗ" else "러")
        if self.irregular == "ㅂ":
            return _with_final(self.stem, " ") + ("와" if self.stem.endswith("돕") else "워")
        stem = _with_final(self.stem, "ㄹ") if self.irregular == "ㄷ" else self.stem
        lead, vowel, final = _decompose(stem[-1])
        if final != " ":
            return stem + ("아" if vowel in "ㅏㅑㅗ" else "어")
        if vowel == "ㅡ":
            is_bright = len(stem) > 1 and stem[-2] != " " and _decompose(stem[-2])[1] in "ㅏㅗ"
            return stem[:-1] + _compose(lead, "ㅏ" if is_bright else "ㅓ", " ")
        if vowel in _CONTRACTIONS:
            return stem[:-1] + _compose(lead, _CONTRACTIONS[vowel], " ")
        return stem + "어"

    @property
    def future_modifier(self) -> str:
        """The -(으)ㄹ form: 갈, 먹을, 추울, 만들."""
        return _with_final(self.open_stem, "ㄹ")

    @property
    def noun_modifier(self) -> str:
        """The form before a noun in the present: 가는, 만드는, 큰, 추운, 긴, 재미있는."""
        if self.is_verb or self.stem.endswith(("있", "없")):
            return _without_rieul(self.stem) + "는"
        return _with_final(self.open_stem, "ㄴ")

    def negated(self) -> "Predicate":
        """Returns -지 않다."""
        return Predicate(f"{self.stem}지 않", self.is_verb)

    def wished(self, *, by_speaker: bool) -> "Predicate":
        """Returns -고 싶다 for the speaker's own wish, -고 싶어 하다 for another's."""
        return Predicate(f"{self.stem}고 싶", False) if by_speaker else Predicate(f"{self.stem}고 싶어 하")

    def ongoing(self) -> "Predicate":
        """Returns -고 있다."""
        return Predicate(f"{self.stem}고 있", False)

    def possible(self) -> "Predicate":
        """Returns -(으)ㄹ 수 있다."""
        return Predicate(f"{self.future_modifier} 수 있", False)

    def impossible(self) -> "Predicate":
        """Returns -(으)ㄹ 수 없다."""
        return Predicate(f"{self.future_modifier} 수 없", False)

    def required(self) -> "Predicate":
        """Returns -아야/어야 하다."""
        return Predicate(f"{self.infinitive}야 하")

    def intended(self) -> "Predicate":
        """Returns -(으)려고 하다."""
        return Predicate(f"{self.open_stem}려고 하")

    def cause(self) -> str:
        """Returns -아서/어서, "because"."""
        return f"{self.infinitive}서"

    def statement(self, tense: Tense, style: Style) -> str:
        """Returns the finite form that ends a statement."""
        if tense is Tense.FUTURE:
            return f"{self.future_modifier} 것{_copula_ending(tense=Tense.PRESENT, style=style)}"
        if tense is Tense.PAST:
            return _with_final(self.infinitive, "ㅆ") + ("습니다" if style is Style.FORMAL else "다")
        final = final_consonant(self.stem)
        if style is Style.FORMAL:
            return _with_final(self.stem, "ㅂ") + "니다" if final in ("", "ㄹ") else f"{self.stem}습니다"
        if not self.is_verb:
            return f"{self.stem}다"
        return _with_final(self.stem, "ㄴ") + "다" if final in ("", "ㄹ") else f"{self.stem}는다"

    def question(self, tense: Tense, style: Style) -> str:
        """Returns the finite form that ends a question, with its mark: -습니까? or -니?."""
        if style is Style.FORMAL:
            return self.statement(tense, style).removesuffix("다") + "까?"
        if tense is Tense.FUTURE:
            return f"{self.future_modifier} 거니?"
        if tense is Tense.PAST:
            return _with_final(self.infinitive, "ㅆ") + "니?"
        return _without_rieul(self.stem) + "니?"

    def suggestion(self, style: Style) -> str:
        """Returns -(으)ㅂ시다 or -자, "let us"."""
        return _with_final(self.open_stem, "ㅂ") + "시다" if style is Style.FORMAL else f"{self.stem}자"

    def command(self) -> str:
        """Returns -(으)십시오, "please"."""
        return _without_rieul(self.open_stem) + "십시오"


def _without_rieul(stem: str) -> str:
    return _with_final(stem, " ") if final_consonant(stem) == "ㄹ" else stem


def _copula_ending(*, tense: Tense, style: Style, after_vowel: bool = False) -> str:
    if tense is Tense.PRESENT:
        return "입니다" if style is Style.FORMAL else "이다"
    if tense is Tense.FUTURE:
        return "일 것" + _copula_ending(tense=Tense.PRESENT, style=style)
    return ("였" if after_vowel else "이었") + ("습니다" if style is Style.FORMAL else "다")


def copula(noun: str, tense: Tense, style: Style, *, is_spaced: bool = False, is_short: bool = False) -> str:
    """Joins a noun and 이다.

    `is_spaced` writes a space before the copula, as many people do (금요일 입니다), against the standard.
    `is_short` writes the plain present after a vowel without 이 (의사다), and has no effect elsewhere.
    """
    after_vowel = not final_consonant(noun)
    if is_spaced and tense is Tense.PRESENT:
        return f"{noun} {_copula_ending(tense=tense, style=style)}"
    if is_short and after_vowel and tense is Tense.PRESENT and style is Style.PLAIN:
        return f"{noun}다"
    return noun + _copula_ending(tense=tense, style=style, after_vowel=after_vowel)


def not_copula(noun: str, style: Style) -> str:
    """Returns 이/가 아니다: the topic is not `noun`."""
    return f"{with_particle(noun, '이')} " + Predicate("아니", False).statement(Tense.PRESENT, style)


@dataclass(frozen=True)
class Voice:
    """The choices of a Korean sentence that its translation does not show.

    Attributes:
        style: Plain or formal.
        is_humble: Says 저 for "I" instead of 나; only in the formal style.
        is_spaced: Writes a space before 이다.
        is_short: Writes 의사다 for 의사이다.
        is_directional: Goes 학교로 instead of 학교에.
        has_period: Ends a statement with a period.
    """

    style: Style
    is_humble: bool = False
    is_spaced: bool = False
    is_short: bool = False
    is_directional: bool = False
    has_period: bool = False

    def name(self, noun: str) -> str:
        """Returns the noun; "I" is 저 when humble, and 당신 is 너 in the plain style."""
        if noun == "나" and self.is_humble:
            return "저"
        return "너" if noun == "당신" and self.style is Style.PLAIN else noun

    def to(self, place: str) -> str:
        """Returns the place where somebody goes: 학교에 or 학교로."""
        return with_particle(place, "으로") if self.is_directional else f"{place}에"
