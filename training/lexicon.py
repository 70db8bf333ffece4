"""The words of the built-in corpus, Korean beside English, and how English words change form.

A word's Korean form is its identity: the same form in two slots is the same filler. Within the sentences
that the grammar makes, one Korean word has one English word. Knows nothing of patterns and splits.
"""

from dataclasses import dataclass

from training.korean import Predicate, Tense, month_name, native_number, sino_number


@dataclass(frozen=True)
class Word:
    """A slot filler: its Korean form, and its English form where there is only one."""

    korean: str
    english: str


@dataclass(frozen=True)
class Person(Word):
    """Somebody; `pronoun` is what English puts for them and what their verb agrees with."""

    pronoun: str

    @property
    def possessive(self) -> str:
        """My, our, Minsu's, the children's."""
        pronouns = {"I": "my", "we": "our", "he": "his", "she": "her", "they": "their"}
        return pronouns.get(self.english) or self.english + ("'" if self.english.endswith("s") else "'s")

    @property
    def object(self) -> str:
        """Me, us, him; a name stays as it is."""
        pronouns = {"I": "me", "we": "us", "he": "him", "she": "her", "they": "them"}
        return pronouns.get(self.english, self.english)


@dataclass(frozen=True)
class Thing(Word):
    """A countable noun in the singular, and its Korean counter; `traits` says which adjectives suit it."""

    counter: str
    traits: str = ""


@dataclass(frozen=True)
class Time(Word):
    """An adverb of time, which settles the tense."""

    tense: Tense


@dataclass(frozen=True)
class Action(Word):
    """What somebody does or is: `korean` is the whole phrase's stem and `english` begins with its verb.

    `traits` says where it happens (q quiet rooms, o outdoors, h at home), or what an adjective suits.
    """

    irregular: str = ""
    traits: str = ""
    is_verb: bool = True

    @property
    def predicate(self) -> Predicate:
        """The phrase with its endings to come."""
        return Predicate(self.korean, self.is_verb, self.irregular)


@dataclass(frozen=True)
class Place(Word):
    """A place with its article; `traits` says which actions fit it, as in `Action`."""

    traits: str = ""


@dataclass(frozen=True)
class Number(Word):
    """A number with its unit, such as 세 시 or 스무 살."""

    value: int


@dataclass(frozen=True)
class Country(Word):
    """A country and the adjective for its people."""

    people: str


def _words(table: str) -> tuple[Word, ...]:
    """Reads `korean=english` entries separated by commas."""
    return tuple(Word(*entry.strip().split("=")) for entry in table.split(","))


def _people(table: str, pronoun: str) -> tuple[Person, ...]:
    return tuple(Person(word.korean, word.english, pronoun) for word in _words(table))


PRONOUNS = (
    Person("나", "I", "I"),
    Person("우리", "we", "we"),
    Person("그", "he", "he"),
    Person("그녀", "she", "she"),
    Person("그들", "they", "they"),
)
NAMES = _people(
    "민수=Minsu,지훈=Jihun,준호=Junho,현우=Hyunwoo,민준=Minjun,동현=Donghyun,철수=Chulsoo", "he"
) + _people("유나=Yuna,수진=Sujin,지영=Jiyoung,서연=Seoyeon,미나=Mina,은지=Eunji,한별=Hanbyeol", "she")
FAMILY = _people(
    "아버지=my father,형=my older brother,남동생=my younger brother,삼촌=my uncle", "he"
) + _people("어머니=my mother,누나=my older sister,여동생=my younger sister,이모=my aunt", "she")
GROUPS = _people("아이들=the children,친구들=my friends,학생들=the students", "they")
SPEAKERS = PRONOUNS[:2]
KNOWN_PEOPLE = PRONOUNS + NAMES + FAMILY
PEOPLE = KNOWN_PEOPLE + GROUPS
SINGLE_PEOPLE = tuple(person for person in PEOPLE if person.pronoun not in ("we", "they"))
OTHERS = NAMES + FAMILY + GROUPS

WEEKDAYS = _words(
    "월요일=Monday,화요일=Tuesday,수요일=Wednesday,목요일=Thursday,금요일=Friday,토요일=Saturday,일요일=Sunday"
)
SEASONS = _words("봄=spring,여름=summer,가을=fall,겨울=winter")
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
MONTHS = tuple(Number(month_name(n), name, n) for n, name in enumerate(_MONTHS, start=1))
DAYS = (
    Time("오늘", "today", Tense.PRESENT),
    Time("어제", "yesterday", Tense.PAST),
    Time("내일", "tomorrow", Tense.FUTURE),
)
PAST_TIMES = (
    DAYS[1],
    Time("그저께", "the day before yesterday", Tense.PAST),
    Time("지난주에", "last week", Tense.PAST),
    Time("지난달에", "last month", Tense.PAST),
    Time("작년에", "last year", Tense.PAST),
    Time("오늘 아침에", "this morning", Tense.PAST),
    Time("어젯밤에", "last night", Tense.PAST),
)
FUTURE_TIMES = (
    DAYS[2],
    Time("모레", "the day after tomorrow", Tense.FUTURE),
    Time("다음 주에", "next week", Tense.FUTURE),
    Time("다음 달에", "next month", Tense.FUTURE),
    Time("내년에", "next year", Tense.FUTURE),
    Time("이번 주말에", "this weekend", Tense.FUTURE),
    Time("오늘 밤에", "tonight", Tense.FUTURE),
)
HABITUAL_TIMES = (
    Time("매일", "every day", Tense.PRESENT),
    Time("매주", "every week", Tense.PRESENT),
    Time("주말마다", "every weekend", Tense.PRESENT),
    Time("아침마다", "every morning", Tense.PRESENT),
    Time("저녁마다", "every evening", Tense.PRESENT),
)
TIMES = PAST_TIMES + FUTURE_TIMES + HABITUAL_TIMES
FREQUENCIES = _words("항상=always,자주=often,가끔=sometimes,보통=usually")

PLACES = tuple(
    Place(*entry.strip().split("="))
    for entry in [
        "학교=school=q",
        "도서관=the library=q",
        "카페=the cafe=q",
        "사무실=the office=q",
        "교실=the classroom=q",
        "\n    공원=the park=o",
        "해변=the beach=o",
        "호수=the lake=o",
        "운동장=the playground=o",
        "정원=the garden=o",
        "병원=the hospital=",
        "\n    은행=the bank=",
        "시장=the market=",
        "식당=the restaurant=",
        "극장=the theater=",
        "박물관=the museum=",
        "\n    우체국=the post office=",
        "공항=the airport=",
        "호텔=the hotel=q",
        "약국=the pharmacy=",
        "서점=the bookstore=",
        "\n    백화점=the department store=",
        "교회=the church=",
        "경찰서=the police station=",
        "지하철역=the subway station=",
        "\n    동물원=the zoo=o",
        "체육관=the gym=",
        "빵집=the bakery=",
    ]
)
SCENES = (Place("집", "home", "h"), *(place for place in PLACES if place.traits))
CITIES = _words(
    "서울=Seoul,부산=Busan,대구=Daegu,인천=Incheon,대전=Daejeon,경주=Gyeongju,런던=London,파리=Paris,뉴욕=New York,"
    "도쿄=Tokyo,베를린=Berlin,로마=Rome"
)
KOREAN_CITIES = CITIES[:6]
COUNTRIES = tuple(
    Country(*entry.split("="))
    for entry in [
        "한국=Korea=Korean",
        "미국=America=American",
        "일본=Japan=Japanese",
        "중국=China=Chinese",
        "독일=Germany=German",
        "프랑스=France=French",
        "영국=England=English",
        "캐나다=Canada=Canadian",
        "베트남=Vietnam=Vietnamese",
        "인도=India=Indian",
        "브라질=Brazil=Brazilian",
        "이탈리아=Italy=Italian",
    ]
)
LANGUAGES = tuple(
    Word(f"{country}어", english)
    for country, english in (
        ("한국", "Korean"),
        ("영", "English"),
        ("일본", "Japanese"),
        ("중국", "Chinese"),
        ("독일", "German"),
        ("프랑스", "French"),
        ("스페인", "Spanish"),
        ("러시아", "Russian"),
    )
)
VEHICLES = _words("지하철=subway,버스=bus,기차=train,비행기=plane,자전거=bicycle,택시=taxi,배=ship")

JOBS = _words(
    "학생=student,의사=doctor,간호사=nurse,선생님=teacher,가수=singer,배우=actor,요리사=cook,화가=painter,작가=writer,"
    "군인=soldier,경찰관=police officer,소방관=firefighter,변호사=lawyer,기자=reporter,엔지니어=engineer,농부=farmer,"
    "과학자=scientist,미용사=hairdresser"
)
ADULT_JOBS = JOBS[1:]

# Traits: p portable, f food, r something to read, m a machine or an instrument, a an animal, c a creation
THINGS = tuple(
    Thing(*entry.strip().split("="))
    for entry in [
        "책=book=권=pr",
        "공책=notebook=권=p",
        "잡지=magazine=권=pr",
        "사과=apple=개=f",
        "오렌지=orange=개=f",
        "\n    바나나=banana=개=f",
        "달걀=egg=개=f",
        "연필=pencil=자루=p",
        "칼=knife=자루=p",
        "가방=bag=개=p",
        "우산=umbrella=개=p",
        "\n    시계=watch=개=p",
        "모자=hat=개=p",
        "컵=cup=개=p",
        "접시=plate=개=p",
        "의자=chair=개=p",
        "열쇠=key=개=p",
        "지갑=wallet=개=p",
        "\n    인형=doll=개=p",
        "상자=box=개=p",
        "선물=present=개=p",
        "지도=map=장=p",
        "사진=photo=장=p",
        "엽서=postcard=장=p",
        "\n    자전거=bicycle=대=m",
        "자동차=car=대=m",
        "컴퓨터=computer=대=m",
        "카메라=camera=대=m",
        "전화기=phone=대=m",
        "\n    피아노=piano=대=m",
        "기타=guitar=대=m",
        "고양이=cat=마리=a",
        "강아지=puppy=마리=a",
        "토끼=rabbit=마리=a",
        "말=horse=마리=a",
        "\n    코끼리=elephant=마리=a",
        "양=sheep=마리=a",
    ]
)
GOODS = tuple(thing for thing in THINGS if "a" not in thing.traits)
SMALL_GOODS = tuple(thing for thing in THINGS if {*"pf"} & {*thing.traits} and thing.korean != "의자")
ANIMALS = tuple(thing for thing in THINGS if "a" in thing.traits)
FURNITURE = _words("책상=desk,탁자=table,침대=bed,소파=sofa,의자=chair,상자=box,피아노=piano")
POSITIONS = _words("위=on,아래=under,옆=next to,뒤=behind,앞=in front of")
SIDES = POSITIONS[2:]
FOODS = _words(
    "빵=bread,밥=rice,김치=kimchi,불고기=bulgogi,비빔밥=bibimbap,라면=ramen,국수=noodles,피자=pizza,치킨=fried chicken,"
    "생선=fish,샐러드=salad,초콜릿=chocolate,아이스크림=ice cream,치즈=cheese,딸기=strawberries,포도=grapes,수박=watermelon"
)
DRINKS = _words("물=water,커피=coffee,차=tea,우유=milk,주스=juice,콜라=cola,맥주=beer,와인=wine")
PASTIMES = _words(
    "음악=music,영화=movies,축구=soccer,야구=baseball,농구=basketball,테니스=tennis,여행=traveling,요리=cooking,"
    "춤=dancing,꽃=flowers,등산=hiking,낚시=fishing,수학=math,과학=science,역사=history,미술=art"
)
LIKED = FOODS + DRINKS + PASTIMES + SEASONS
EVENTS = _words("회의=meeting,수업=class,영화=movie,경기=game,시험=exam,연극=play,콘서트=concert,파티=party")


def _actions(table: str, *, is_verb: bool = True) -> tuple[Action, ...]:
    """Reads `stem=english=irregular=traits` entries separated by commas; the last two may be left out."""
    fields = (entry.strip().split("=") for entry in table.split(","))
    return tuple(Action(*(field + ["", ""])[:4], is_verb=is_verb) for field in fields)


ACTIVITIES = _actions(
    """책을 읽=read a book==qoh,신문을 읽=read the newspaper==qoh,음악을 듣=listen to music=ㄷ=qoh,
    편지를 쓰=write a letter==qh,사진을 찍=take pictures==o,그림을 그리=draw a picture==qoh,노래를 부르=sing a song=르=oh,
    영화를 보=watch a movie==h,텔레비전을 보=watch television==h,케이크를 만들=make a cake==h,저녁을 요리하=cook dinner==h,
    숙제를 하=do homework==qh,일하=work==qoh,쉬=rest==qoh,춤추=dance==oh,수영하=swim==,운동하=exercise==oh,달리=run==o,
    걷=walk=ㄷ=o,축구를 하=play soccer==o,야구를 하=play baseball==o,피아노를 치=play the piano==h,기타를 치=play the guitar==oh,
    방을 청소하=clean the room==h,설거지를 하=wash the dishes==h,꽃을 심=plant flowers==o,친구를 만나=meet a friend==qo,
    친구를 기다리=wait for a friend==qo,한국어를 공부하=study Korean==qh,영어를 가르치=teach English==q,
    커피를 마시=drink coffee==qoh,점심을 먹=eat lunch==qoh,산책하=take a walk==o,옷을 사=buy clothes=="""
)
SKILLS = _actions(
    """수영하=swim,춤추=dance,피아노를 치=play the piano,기타를 치=play the guitar,케이크를 만들=make a cake,
    축구를 하=play soccer,야구를 하=play baseball,영어를 가르치=teach English,노래를 부르=sing a song=르,운전하=drive,
    자전거를 타=ride a bicycle,말을 타=ride a horse,컴퓨터를 고치=fix a computer,빨리 달리=run fast,스키를 타=ski"""
)
LASTING = _actions(
    "자=sleep,걷=walk=ㄷ,일하=work,쉬=rest,운동하=exercise,수영하=swim,음악을 듣=listen to music=ㄷ,텔레비전을 보=watch television,"
    "한국어를 공부하=study Korean,피아노를 치=play the piano,축구를 하=play soccer,친구를 기다리=wait for a friend"
)
ROUTINES = _actions(
    "일어나=get up,자=go to bed,출근하=go to work,퇴근하=leave work,점심을 먹=eat lunch,운동하=exercise"
)
EATING = _actions("먹=eat,만들=make,주문하=order,팔=sell")
TRADING = _actions("사=buy,팔=sell,잃어버리=lose,찾=find,빌리=borrow,가져오=bring")
KNOWING = _actions(
    "알=know,모르=not know=르,사랑하=love,믿=trust,기억하=remember,기다리=wait for,돕=help=ㅂ,만나=meet"
)
LIKING = _actions("좋아하=like,싫어하=hate")
FALLING = _words("비=rain,눈=snow")

FEELINGS = _actions(
    "행복하=be happy,슬프=be sad,피곤하=be tired,바쁘=be busy,아프=be sick,배고프=be hungry,외롭=be lonely=ㅂ,심심하=be bored,"
    "건강하=be healthy",
    is_verb=False,
)
CHARACTERS = _actions(
    "크=tall,친절하=kind,똑똑하=smart,부지런하=diligent,게으르=lazy=르,용감하=brave,젊=young,강하=strong,빠르=fast=르,바쁘=busy",
    is_verb=False,
)
WEATHER = _actions(
    "춥=cold=ㅂ,덥=hot=ㅂ,맑=clear,흐리=cloudy,따뜻하=warm,시원하=cool,좋=good,나쁘=bad", is_verb=False
)
QUALITIES = _actions(
    """크=big==pfma,작=small==pfma,비싸=expensive==pfm,싸=cheap==pfm,무겁=heavy=ㅂ=pm,가볍=light=ㅂ=pm,
    예쁘=pretty==pa,깨끗하=clean==pm,더럽=dirty=ㅂ=pm,재미있=interesting==r,어렵=difficult=ㅂ=r,쉽=easy==r,
    유명하=famous==r,맛있=delicious==f,귀엽=cute=ㅂ=a,빠르=fast=르=a,느리=slow==a,좋=good==pm,아름답=beautiful=ㅂ=a""",
    is_verb=False,
)

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def english_number(value: int) -> str:
    """Spells 0 to 999,999: twenty-five, fifteen thousand, three thousand five hundred.

    Raises:
        ValueError: `value` is out of that range.
    """
    if not 0 <= value < 1_000_000:
        raise ValueError(f"English numbers are spelled from 0 to 999,999, got {value}")
    for size, name in ((1000, "thousand"), (100, "hundred")):
        count, rest = divmod(value, size)
        if count:
            return f"{english_number(count)} {name}" + (f" {english_number(rest)}" if rest else "")
    if value < 20:
        return _ONES[value]
    tens, ones = divmod(value, 10)
    return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")


def ordinal(value: int) -> str:
    """Returns 1st, 2nd, 3rd, 4th, 11th, 21st."""
    is_teen = value % 100 in (11, 12, 13)
    return f"{value}" + ("th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th"))


HOURS = tuple(Number(f"{native_number(n)} 시", str(n), n) for n in range(1, 13))
MINUTES = tuple(Number(f"{sino_number(n)} 분", f"{n:02d}", n) for n in range(5, 60, 5))
MONTH_DAYS = tuple(Number(f"{sino_number(n)}일", ordinal(n), n) for n in range(1, 32))
AGES = tuple(Number(f"{native_number(n)} 살", english_number(n), n) for n in (*range(5, 31), 40, 50))
COUNTS = tuple(Number(native_number(n), english_number(n), n) for n in range(2, 11))
SPANS = tuple(Number(f"{native_number(n)} 시간", english_number(n), n) for n in range(1, 10))
PRICES = tuple(
    Number(f"{sino_number(n)} 원", english_number(n), n)
    for n in (*range(1000, 10_000, 1000), *range(10_000, 60_000, 5000), 500, 1500, 2500, 3500)
)

_PAST_FORMS = {
    "be": "was", "bring": "brought", "buy": "bought", "do": "did", "draw": "drew", "drink": "drank", "eat": "ate",
    "find": "found", "get": "got", "give": "gave", "go": "went", "have": "had", "know": "knew", "leave": "left",
    "lose": "lost", "make": "made", "meet": "met", "read": "read", "ride": "rode", "run": "ran", "sell": "sold",
    "sing": "sang", "sleep": "slept", "speak": "spoke", "swim": "swam", "take": "took", "teach": "taught",
    "write": "wrote", "become": "became",
}  # fmt: skip
_DOUBLING = ("get", "plan", "run", "swim")


def third_person(verb: str) -> str:
    """Returns the form after he or she: reads, watches, studies, has."""
    if verb == "have":
        return "has"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "o")) else "s")


def past(verb: str) -> str:
    """Returns the past form: read, watched, studied, planned."""
    if verb in _PAST_FORMS:
        return _PAST_FORMS[verb]
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + (verb[-1] if verb in _DOUBLING else "") + ("d" if verb.endswith("e") else "ed")


def progressive(verb: str) -> str:
    """Returns the -ing form: reading, making, running."""
    if verb.endswith("e") and not verb.endswith("ee") and verb != "be":
        return verb[:-1] + "ing"
    return verb + (verb[-1] if verb in _DOUBLING else "") + "ing"


def plural(noun: str) -> str:
    """Returns the plural: books, boxes, puppies, knives, sheep."""
    irregular = {"knife": "knives", "sheep": "sheep"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "sh", "ch", "x")) else "s")


def indefinite(noun: str) -> str:
    """Puts a or an before a word of the lexicon; all its silent and consonantal beginnings are regular."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def comparative(adjective: str) -> str:
    """Returns bigger, heavier, more expensive, better."""
    if adjective in ("good", "bad"):
        return {"good": "better", "bad": "worse"}[adjective]
    if adjective.endswith("y"):
        return adjective[:-1] + "ier"
    if len(adjective) > 6 or adjective in ("famous",):
        return f"more {adjective}"
    if adjective.endswith("e"):
        return adjective + "r"
    doubled = adjective[-1] in "bdgt" and adjective[-2] in "aeiou" and adjective[-3] not in "aeiou"
    return adjective + (adjective[-1] if doubled else "") + "er"
