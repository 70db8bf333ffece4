"""Hangul morphology against forms that any Korean grammar or dictionary lists."""

import pytest

from seq2seq_serve.training.builtin import korean
from seq2seq_serve.training.builtin.korean import (
    Predicate,
    Style,
    Tense,
    Voice,
    copula,
    native_number,
    not_copula,
    sino_number,
)

_PARTICLES = [
    # noun ending in a vowel, in ㄹ, and in another consonant
    ("민수", "민수는", "민수가", "민수를", "민수와", "민수로"),
    ("서울", "서울은", "서울이", "서울을", "서울과", "서울로"),
    ("부산", "부산은", "부산이", "부산을", "부산과", "부산으로"),
]


@pytest.mark.parametrize(("noun", "topic", "subject", "object_", "companion", "direction"), _PARTICLES)
def test_particles_follow_the_final_consonant(noun, topic, subject, object_, companion, direction):
    expected = {"은": topic, "이": subject, "을": object_, "과": companion, "으로": direction}
    assert {particle: korean.with_particle(noun, particle) for particle in korean.PARTICLES} == expected


def test_every_syllable_has_the_final_consonant_of_its_unicode_name_order():
    finals = [korean.final_consonant(chr(code)) for code in range(ord("각") - 1, ord("각") + 27)]
    assert finals == ["", *"ㄱㄲㄳㄴㄵㄶㄷㄹㄺㄻㄼㄽㄾㄿㅀㅁㅂㅄㅅㅆㅇㅈㅊㅋㅌㅍㅎ"]


def test_three_pronouns_have_their_own_subject_forms():
    assert [korean.with_particle(pronoun, "이") for pronoun in ("나", "저", "너")] == ["내가", "제가", "네가"]


@pytest.mark.parametrize("noun", ["Minsu", "3", "민수!", ""])
def test_a_particle_needs_hangul(noun):
    with pytest.raises(ValueError, match="Hangul"):
        korean.with_particle(noun, "은")


def test_native_numbers_take_their_form_before_a_counter():
    spelled = {1: "한", 2: "두", 3: "세", 4: "네", 5: "다섯", 10: "열", 11: "열한", 20: "스무", 21: "스물한"}
    spelled |= {34: "서른네", 40: "마흔", 59: "쉰아홉", 60: "예순", 70: "일흔", 80: "여든", 99: "아흔아홉"}
    assert {value: native_number(value) for value in spelled} == spelled


def test_sino_korean_numbers_leave_out_one_before_a_unit():
    spelled = {1: "일", 10: "십", 11: "십일", 16: "십육", 20: "이십", 105: "백오", 1000: "천", 1500: "천오백"}
    spelled |= {10_000: "만", 15_000: "만 오천", 20_000: "이만", 99_999: "구만 구천구백구십구"}
    spelled |= {100_000: "십만", 12_345_678: "천이백삼십사만 오천육백칠십팔"}
    assert {value: sino_number(value) for value in spelled} == spelled


def test_numbers_are_spelled_differently_from_each_other():
    assert len({native_number(value) for value in range(1, 100)}) == 99
    assert len({sino_number(value) for value in range(1, 30_000)}) == 29_999


@pytest.mark.parametrize(("spell", "value"), [(native_number, 0), (native_number, 100), (sino_number, 0)])
def test_a_number_out_of_range_is_refused(spell, value):
    with pytest.raises(ValueError, match=f"got {value}"):
        spell(value)


def test_june_and_october_lose_a_consonant():
    assert [korean.month_name(month) for month in (1, 6, 10, 11, 12)] == [
        "일월",
        "유월",
        "시월",
        "십일월",
        "십이월",
    ]


_VERBS = [
    # stem, irregular, plain and formal present, plain past, formal future
    ("가", "", "간다", "갑니다", "갔다", "갈 것입니다"),
    ("먹", "", "먹는다", "먹습니다", "먹었다", "먹을 것입니다"),
    ("만들", "", "만든다", "만듭니다", "만들었다", "만들 것입니다"),
    ("오", "", "온다", "옵니다", "왔다", "올 것입니다"),
    ("쓰", "", "쓴다", "씁니다", "썼다", "쓸 것입니다"),
    ("공부하", "", "공부한다", "공부합니다", "공부했다", "공부할 것입니다"),
    ("듣", "ㄷ", "듣는다", "듣습니다", "들었다", "들을 것입니다"),
    ("돕", "ㅂ", "돕는다", "돕습니다", "도왔다", "도울 것입니다"),
    ("부르", "르", "부른다", "부릅니다", "불렀다", "부를 것입니다"),
]
_ADJECTIVES = [
    # stem, irregular, plain and formal present, plain past, form before a noun
    ("크", "", "크다", "큽니다", "컸다", "큰"),
    ("예쁘", "", "예쁘다", "예쁩니다", "예뻤다", "예쁜"),
    ("춥", "ㅂ", "춥다", "춥습니다", "추웠다", "추운"),
    ("좁", "", "좁다", "좁습니다", "좁았다", "좁은"),
    ("빠르", "르", "빠르다", "빠릅니다", "빨랐다", "빠른"),
    ("따뜻하", "", "따뜻하다", "따뜻합니다", "따뜻했다", "따뜻한"),
]


@pytest.mark.parametrize(("stem", "irregular", "plain", "formal", "past", "future"), _VERBS)
def test_verbs_are_conjugated(stem, irregular, plain, formal, past, future):
    verb = Predicate(stem, is_verb=True, irregular=irregular)
    assert verb.statement(Tense.PRESENT, Style.PLAIN) == plain
    assert verb.statement(Tense.PRESENT, Style.FORMAL) == formal
    assert verb.statement(Tense.PAST, Style.PLAIN) == past
    assert verb.statement(Tense.PAST, Style.FORMAL) == past.removesuffix("다") + "습니다"
    assert verb.statement(Tense.FUTURE, Style.FORMAL) == future
    assert verb.statement(Tense.FUTURE, Style.PLAIN) == future.removesuffix("입니다") + "이다"


@pytest.mark.parametrize(("stem", "irregular", "plain", "formal", "past", "before_noun"), _ADJECTIVES)
def test_adjectives_are_conjugated(stem, irregular, plain, formal, past, before_noun):
    adjective = Predicate(stem, is_verb=False, irregular=irregular)
    assert adjective.statement(Tense.PRESENT, Style.PLAIN) == plain
    assert adjective.statement(Tense.PRESENT, Style.FORMAL) == formal
    assert adjective.statement(Tense.PAST, Style.PLAIN) == past
    assert adjective.noun_modifier == before_noun


def test_negation_keeps_the_class_of_the_word():
    assert Predicate("가").negated().statement(Tense.PRESENT, Style.PLAIN) == "가지 않는다"
    assert Predicate("춥", False, "ㅂ").negated().statement(Tense.PRESENT, Style.PLAIN) == "춥지 않다"
    assert Predicate("먹").negated().statement(Tense.PAST, Style.FORMAL) == "먹지 않았습니다"


def test_auxiliaries_take_the_stem_form_that_they_ask_for():
    listen = Predicate("듣", irregular="ㄷ")
    present = (Tense.PRESENT, Style.PLAIN)
    assert listen.wished(by_speaker=True).statement(*present) == "듣고 싶다"
    assert listen.wished(by_speaker=False).statement(*present) == "듣고 싶어 한다"
    assert listen.ongoing().statement(*present) == "듣고 있다"
    assert listen.possible().statement(*present) == "들을 수 있다"
    assert listen.impossible().statement(*present) == "들을 수 없다"
    assert listen.required().statement(*present) == "들어야 한다"
    assert listen.intended().statement(*present) == "들으려고 한다"
    assert Predicate("만들").intended().statement(*present) == "만들려고 한다"
    assert Predicate("춥", False, "ㅂ").cause() == "추워서"


def test_questions_suggestions_and_commands():
    make, eat = Predicate("만들"), Predicate("먹")
    assert [make.question(tense, Style.PLAIN) for tense in Tense] == ["만드니?", "만들었니?", "만들 거니?"]
    assert [eat.question(tense, Style.FORMAL) for tense in Tense] == [
        "먹습니까?",
        "먹었습니까?",
        "먹을 것입니까?",
    ]
    assert [make.suggestion(style) for style in Style] == ["만들자", "만듭시다"]
    assert [eat.command(), make.command()] == ["먹으십시오", "만드십시오"]


def test_copula_after_vowel_and_consonant():
    assert [copula("학생", tense, Style.FORMAL) for tense in (Tense.PRESENT, Tense.PAST)] == [
        "학생입니다",
        "학생이었습니다",
    ]
    assert copula("의사", Tense.PAST, Style.PLAIN) == "의사였다"
    assert copula("금요일", Tense.PRESENT, Style.FORMAL, is_spaced=True) == "금요일 입니다"
    assert copula("의사", Tense.PRESENT, Style.PLAIN, is_short=True) == "의사다"
    assert copula("학생", Tense.PRESENT, Style.PLAIN, is_short=True) == "학생이다"
    assert [not_copula(noun, Style.PLAIN) for noun in ("학생", "의사")] == ["학생이 아니다", "의사가 아니다"]


def test_an_irregular_class_must_fit_the_stem():
    with pytest.raises(ValueError, match="ㅂ-irregular"):
        Predicate("가", irregular="ㅂ")
    with pytest.raises(ValueError, match="must be"):
        Predicate("가", irregular="ㅋ")


def test_only_the_humble_voice_humbles_the_speaker():
    assert Voice(Style.FORMAL, is_humble=True).name("나") == "저"
    assert Voice(Style.FORMAL).name("나") == "나"
    assert Voice(Style.PLAIN).name("당신") == "너"
    assert Voice(Style.FORMAL).name("당신") == "당신"
