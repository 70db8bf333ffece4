"""The words of the built-in corpus, Korean beside English.

A word's Korean form is its identity: the same form in two slots is the same filler. In the sentences of the
grammar, one Korean word has one English word. Patterns and splits are not known here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from seq2seq_serve.training.builtin import english
from seq2seq_serve.training.builtin.korean import Predicate, Tense, month_name, native_number, sino_number


@dataclass(frozen=True)
class Word:
    """A slot filler, whose `str` is its English form.

    Attributes:
        korean: The form before particles and endings; for actions and qualities, the stem.
        english: For an action, a phrase that begins with the bare verb.
        traits: Letters; words with traits go together only if they share one.
    """

    korean: str
    english: str
    traits: str = ""

    def __str__(self) -> str:
        return self.english

    @property
    def indefinite(self) -> str:
        """The word with its article: a book, an apple. No word here has a silent h or a "yoo" vowel."""
        return f"an {self.english}" if self.english[0] in "aeiou" else f"a {self.english}"

    @property
    def plural(self) -> str:
        """Books, boxes, puppies, knives, sheep."""
        return english.plural(self.english)


@dataclass(frozen=True)
class Person(Word):
    """A person or a group; `pronoun` is the English pronoun for them, with which their verb agrees."""

    pronoun: str = "he"

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
    """A countable noun in the singular, and its Korean counter."""

    counter: str = ""


@dataclass(frozen=True)
class Time(Word):
    """An adverb of time, which decides the tense."""

    tense: Tense = Tense.PRESENT


@dataclass(frozen=True)
class Action(Word):
    """A verb phrase, or an adjective if `is_verb` is false."""

    irregular: str = ""
    is_verb: bool = True

    @property
    def predicate(self) -> Predicate:
        """The Korean phrase, still without ending."""
        return Predicate(self.korean, self.is_verb, self.irregular)

    @property
    def progressive(self) -> str:
        """Reading a book."""
        verb, _, rest = self.english.partition(" ")
        return f"{english.progressive(verb)} {rest}".strip()

    @property
    def comparative(self) -> str:
        """Bigger, heavier, more expensive, better."""
        return english.comparative(self.english)


@dataclass(frozen=True)
class Number(Word):
    """A number, with its unit if Korean writes one: 세 시, 스무 살."""

    @property
    def hours(self) -> str:
        """One hour, two hours."""
        return f"{self.english} hour" + ("" if self.english == "one" else "s")


def _rows(table: str) -> list[list[str]]:
    """Reads entries separated by commas, their fields by equals signs."""
    return [entry.strip().split("=") for entry in table.split(",")]


def _words(table: str) -> tuple[Word, ...]:
    return tuple(Word(*row) for row in _rows(table))


def _times(tense: Tense, table: str, traits: str = "") -> tuple[Time, ...]:
    return tuple(Time(word.korean, word.english, traits, tense) for word in _words(table))


def _people(table: str, pronoun: str) -> tuple[Person, ...]:
    return tuple(Person(word.korean, word.english, "", pronoun) for word in _words(table))


def _actions(table: str, *, is_verb: bool = True) -> tuple[Action, ...]:
    """Reads rows of stem, English, traits and irregular class, where the last two may be left out."""
    rows = ((*row, "", "")[:4] for row in _rows(table))
    return tuple(Action(row[0], row[1], row[2], row[3], is_verb) for row in rows)


PRONOUNS = _people("나=I", "I") + _people("우리=we", "we") + _people("그=he", "he")
PRONOUNS += _people("그녀=she", "she") + _people("그들=they", "they")
YOU = Person("당신", "you", "", "you")
MEN = _people("민수=Minsu,지훈=Jihun,준호=Junho,현우=Hyunwoo,민준=Minjun,동현=Donghyun,철수=Chulsoo", "he")
WOMEN = _people("유나=Yuna,수진=Sujin,지영=Jiyoung,서연=Seoyeon,미나=Mina,은지=Eunji,한별=Hanbyeol", "she")
BROTHERS = _people("형=my older brother,남동생=my younger brother", "he")
SISTERS = _people("누나=my older sister,여동생=my younger sister", "she")
NAMES = MEN + WOMEN
FAMILY = BROTHERS + SISTERS + _people("아버지=my father,삼촌=my uncle", "he")
FAMILY += _people("어머니=my mother,이모=my aunt", "she")
GROUPS = _people("아이들=the children,친구들=my friends,학생들=the students", "they")
INDIVIDUALS = PRONOUNS + NAMES + FAMILY
PEOPLE = INDIVIDUALS + GROUPS
OTHERS = NAMES + FAMILY + GROUPS
ASKED = (YOU, *PRONOUNS[2:], *OTHERS)

WEEKDAYS = _words(
    """
    월요일=Monday,화요일=Tuesday,수요일=Wednesday,목요일=Thursday,금요일=Friday,토요일=Saturday,
    일요일=Sunday
    """
)
# Traits of seasons and of their qualities: w winter, s summer, p spring, f fall.
SEASONS = _words("봄=spring=p,여름=summer=s,가을=fall=f,겨울=winter=w")
_MONTHS = "January,February,March,April,May,June,July,August,September,October,November,December"
# Traits of months and of their days: l for 29 and 30, x for 31; February has neither.
MONTHS = tuple(
    Number(month_name(n), name, "f" if n == 2 else "l" if n in (4, 6, 9, 11) else "lx")
    for n, name in enumerate(_MONTHS.split(","), start=1)
)
PAST_TIMES = _times(
    Tense.PAST,
    """
    어제=yesterday,그저께=the day before yesterday,지난주에=last week,오늘 아침에=this morning,
    어젯밤에=last night
    """,
)
FUTURE_TIMES = _times(
    Tense.FUTURE,
    """
    내일=tomorrow,모레=the day after tomorrow,다음 주에=next week,이번 주말에=this weekend,오늘 밤에=tonight
    """,
)
# Trait r, also of actions: people do them regularly.
REGULAR_TIMES = _times(
    Tense.PRESENT,
    "매일=every day,매주=every week,주말마다=every weekend,아침마다=every morning,저녁마다=every evening",
    "r",
)
FREQUENCIES = _words("항상=always=r,자주=often=r,가끔=sometimes=r,보통=usually=r")
TIMES = PAST_TIMES + FUTURE_TIMES + REGULAR_TIMES
TRAVEL_TIMES = PAST_TIMES[:3] + _times(Tense.PAST, "지난달에=last month,작년에=last year") + FUTURE_TIMES[:4]
TRAVEL_TIMES += _times(Tense.FUTURE, "다음 달에=next month,내년에=next year")
TODAY = Time("오늘", "today")
DATED_DAYS = (*PAST_TIMES[:2], *_times(Tense.PRESENT, "오늘=today,내일=tomorrow,모레=the day after tomorrow"))

PLACES = _words(
    """
    학교=school,도서관=the library,카페=the cafe,사무실=the office,교실=the classroom,공원=the park,
    해변=the beach,호수=the lake,운동장=the playground,정원=the garden,병원=the hospital,은행=the bank,
    시장=the market,식당=the restaurant,극장=the theater,박물관=the museum,우체국=the post office,
    공항=the airport,호텔=the hotel,약국=the pharmacy,서점=the bookstore,백화점=the department store,
    교회=the church,경찰서=the police station,지하철역=the subway station,동물원=the zoo,체육관=the gym,
    빵집=the bakery
    """
)
LANDMARKS = tuple(place for place in PLACES if place.korean not in ("학교", "교실", "사무실", "정원"))
# Traits of scenes and of actions: q quiet rooms, o outdoors, s where sports are played, g garden, h home.
SCENES = _words(
    """
    집=at home=h,학교=at school=q,도서관=in the library=q,카페=at the cafe=q,사무실=in the office=q,
    교실=in the classroom=q,공원=in the park=os,해변=at the beach=os,호수=at the lake=o,
    운동장=on the playground=os,정원=in the garden=og
    """
)
CITIES = _words(
    """
    서울=Seoul,부산=Busan,대구=Daegu,인천=Incheon,대전=Daejeon,경주=Gyeongju,런던=London,파리=Paris,
    뉴욕=New York,도쿄=Tokyo,베를린=Berlin,로마=Rome
    """
)
KOREAN_CITIES, FOREIGN_CITIES = CITIES[:6], CITIES[6:]
COUNTRIES = _words(
    """
    한국=Korea,미국=America,일본=Japan,중국=China,독일=Germany,프랑스=France,영국=England,캐나다=Canada,
    베트남=Vietnam,인도=India,브라질=Brazil,이탈리아=Italy
    """
)
PEOPLES = _words(
    """
    한국=Korean,미국=American,일본=Japanese,중국=Chinese,독일=German,프랑스=French,영국=English,캐나다=Canadian,
    베트남=Vietnamese,인도=Indian,브라질=Brazilian,이탈리아=Italian
    """
)
LANGUAGES = _words(
    "한국어=Korean,영어=English,일본어=Japanese,중국어=Chinese,독일어=German,프랑스어=French,러시아어=Russian"
)
CITY_VEHICLES = _words("지하철=subway,버스=bus,택시=taxi,자전거=bicycle")
FAR_VEHICLES = _words("버스=bus,기차=train")

JOBS = _words(
    """
    학생=student,의사=doctor,간호사=nurse,선생님=teacher,가수=singer,배우=actor,요리사=cook,화가=painter,
    작가=writer,군인=soldier,경찰관=police officer,소방관=firefighter,변호사=lawyer,기자=reporter,
    엔지니어=engineer,농부=farmer,과학자=scientist,미용사=hairdresser
    """
)
CAREERS = JOBS[1:]

# Traits of things and of qualities: p portable, f food, m machines, r works of words and sounds, a animals.
THINGS = tuple(
    Thing(*row)
    for row in _rows("""
    책=book=pr=권,공책=notebook=p=권,잡지=magazine=pr=권,소설=novel=r=권,노래=song=r=곡,영화=movie=r=편,
    질문=question=r=개,시험=exam=r=개,사과=apple=f=개,오렌지=orange=f=개,바나나=banana=f=개,달걀=egg=f=개,
    연필=pencil=p=자루,칼=knife=p=자루,가방=bag=p=개,우산=umbrella=p=개,시계=watch=p=개,모자=hat=p=개,
    컵=cup=p=개,접시=plate=p=개,의자=chair=m=개,열쇠=key=p=개,지갑=wallet=p=개,인형=doll=p=개,상자=box=p=개,
    선물=present=p=개,지도=map=p=장,사진=photo=p=장,엽서=postcard=p=장,자전거=bicycle=m=대,자동차=car=m=대,
    컴퓨터=computer=m=대,카메라=camera=m=대,전화기=phone=m=대,피아노=piano=m=대,기타=guitar=m=대,
    고양이=cat=a=마리,강아지=puppy=a=마리,토끼=rabbit=a=마리,말=horse=a=마리,코끼리=elephant=a=마리,
    양=sheep=a=마리
    """)
)
SMALL_THINGS = tuple(thing for thing in THINGS if thing.traits in ("p", "pr", "f"))
GOODS = SMALL_THINGS + tuple(thing for thing in THINGS if thing.traits == "m")
BELONGINGS = GOODS + tuple(thing for thing in THINGS if thing.traits == "a" and thing.korean != "코끼리")
FURNITURE = _words("책상=desk,탁자=table,침대=bed,소파=sofa,의자=chair,상자=box,피아노=piano")
POSITIONS = _words("위=on,아래=under,옆=next to,뒤=behind,앞=in front of")
SIDES = POSITIONS[2:]
FOODS = _words(
    """
    빵=bread,밥=rice,김치=kimchi,불고기=bulgogi,비빔밥=bibimbap,라면=ramen,국수=noodles,피자=pizza,
    치킨=fried chicken,생선=fish,샐러드=salad,초콜릿=chocolate,아이스크림=ice cream,치즈=cheese,
    딸기=strawberries,포도=grapes,수박=watermelon
    """
)
DRINKS = _words("물=water,커피=coffee,차=tea,우유=milk,주스=juice,콜라=cola,맥주=beer,와인=wine")
PASTIMES = _words(
    """
    음악=music,영화=movies,축구=soccer,야구=baseball,농구=basketball,테니스=tennis,여행=traveling,
    요리=cooking,춤=dancing,꽃=flowers,등산=hiking,낚시=fishing,수학=math,과학=science,역사=history,미술=art
    """
)
LIKED = FOODS + DRINKS + PASTIMES + SEASONS
EVENTS = _words("회의=meeting,수업=class,영화=movie,경기=game,시험=exam,연극=play,콘서트=concert,파티=party")

ACTIVITIES = _actions(
    """
    책을 읽=read a book=qoh,신문을 읽=read the newspaper=qohr,음악을 듣=listen to music=qohr=ㄷ,
    편지를 쓰=write a letter=qh,사진을 찍=take pictures=or,그림을 그리=draw a picture=qoh,
    노래를 부르=sing a song=oh=르,영화를 보=watch a movie=h,텔레비전을 보=watch television=hr,
    케이크를 만들=make a cake=h,저녁을 요리하=cook dinner=hr,숙제를 하=do homework=qhr,일하=work=qor,
    쉬=rest=qohr,춤추=dance=ohr,수영하=swim=r,운동하=exercise=ohr,달리=run=or,걷=walk=or=ㄷ,
    축구를 하=play soccer=sr,야구를 하=play baseball=sr,피아노를 치=play the piano=hr,
    기타를 치=play the guitar=ohr,방을 청소하=clean the room=hr,설거지를 하=wash the dishes=hr,
    꽃을 심=plant flowers=g,친구를 만나=meet a friend=qo,친구를 기다리=wait for a friend=qo,
    한국어를 공부하=study Korean=qhr,영어를 가르치=teach English=qr,커피를 마시=drink coffee=qohr,
    점심을 먹=eat lunch=qohr,산책하=take a walk=or,옷을 사=buy clothes=z
    """
)
SKILLS = _actions(
    """
    수영하=swim,춤추=dance,피아노를 치=play the piano,기타를 치=play the guitar,케이크를 만들=make a cake,
    축구를 하=play soccer,야구를 하=play baseball,영어를 가르치=teach English,노래를 부르=sing a song==르,
    운전하=drive,자전거를 타=ride a bicycle,말을 타=ride a horse,컴퓨터를 고치=fix a computer,
    빨리 달리=run fast,스키를 타=ski
    """
)
LASTING = _actions(
    """
    자=sleep,걷=walk==ㄷ,일하=work,쉬=rest,운동하=exercise,수영하=swim,음악을 듣=listen to music==ㄷ,
    텔레비전을 보=watch television,한국어를 공부하=study Korean,피아노를 치=play the piano,
    축구를 하=play soccer,친구를 기다리=wait for a friend
    """
)
ROUTINES = _actions(
    "일어나=get up,자=go to bed,출근하=go to work,퇴근하=leave work,점심을 먹=eat lunch,운동하=exercise"
)
EATING = _actions("먹=eat,만들=make,주문하=order")
DRINKING = _actions("마시=drink,주문하=order")
TRADING = _actions("사=buy,팔=sell,잃어버리=lose,찾=find,가져오=bring")
KNOWING = _actions(
    "알=know,모르=not know==르,사랑하=love,믿=trust,기억하=remember,기다리=wait for,돕=help==ㅂ,만나=meet"
)
LIKING = _actions("좋아하=like,싫어하=hate")
STARTING = _actions("시작하=start,끝나=end")
FALLING = (Action("비", "rain"), Action("눈", "snow"))

HINDRANCES = _actions("피곤하=be tired,바쁘=be busy,아프=be sick,졸리=be sleepy,슬프=be sad", is_verb=False)
FEELINGS = HINDRANCES + _actions(
    "행복하=be happy,배고프=be hungry,외롭=be lonely==ㅂ,심심하=be bored,건강하=be healthy", is_verb=False
)
BAD_WEATHER = _actions(
    """
    날씨가 춥=the weather was cold==ㅂ,날씨가 덥=the weather was hot==ㅂ,날씨가 나쁘=the weather was bad,
    날씨가 흐리=the weather was cloudy,비가 오=it rained,눈이 오=it snowed,바람이 불=it was windy
    """
)
CHARACTERS = _actions(
    """
    키가 크=tall,친절하=kind,똑똑하=smart,부지런하=diligent,게으르=lazy==르,용감하=brave,젊=young,강하=strong,
    빠르=fast==르,바쁘=busy
    """,
    is_verb=False,
)
WEATHER = _actions(
    "춥=cold==ㅂ,덥=hot==ㅂ,맑=clear,흐리=cloudy,따뜻하=warm,시원하=cool,좋=good,나쁘=bad", is_verb=False
)
CLIMATES = _actions(
    "춥=cold=w=ㅂ,덥=hot=s=ㅂ,따뜻하=warm=p,시원하=cool=f,아름답=beautiful=pswf=ㅂ,조용하=quiet=pswf",
    is_verb=False,
)
QUALITIES = _actions(
    """
    크=big=pfma,작=small=pfma,비싸=expensive=pfm,싸=cheap=pfm,무겁=heavy=pm=ㅂ,가볍=light=pm=ㅂ,예쁘=pretty=pa,
    깨끗하=clean=pm,더럽=dirty=pm=ㅂ,재미있=interesting=r,어렵=difficult=r=ㅂ,쉽=easy=r,길=long=r,짧=short=r,
    맛있=delicious=f,귀엽=cute=a=ㅂ,빠르=fast=a=르,느리=slow=a,좋=good=pmr,아름답=beautiful=a=ㅂ
    """,
    is_verb=False,
)
THESE = _words("이=this,저=that")
DEGREES = _words("아주=very,정말=really,너무=too")
ARRIVALS = _words("드디어=finally,벌써=already,아직=still,이제=now")
MOMENTS = (*WEEKDAYS, *SEASONS, *MONTHS, Word("주말", "the weekend"))
TURNS = _words("오른쪽=right,왼쪽=left")


def _numbers(values: Iterable[int], spell: Callable[[int], str], unit: str) -> tuple[Number, ...]:
    return tuple(Number(spell(value) + unit, english.cardinal(value)) for value in values)


_LATE_DAYS = {29: "l", 30: "l", 31: "x"}
HALVES = _words("오전=a.m.,오후=p.m.")
HOURS = tuple(Number(f"{native_number(n)} 시", str(n)) for n in range(1, 13))
MINUTES = (*(Number(f"{sino_number(n)} 분", f"{n:02d}") for n in range(5, 60, 5)), Number("반", "30"))
MONTH_DAYS = tuple(
    Number(f"{sino_number(n)}일", english.ordinal(n), _LATE_DAYS.get(n, "")) for n in range(1, 32)
)
AGES = _numbers((*range(5, 31), 40, 50), native_number, " 살")
COUNTS = _numbers(range(2, 11), native_number, "")
SPANS = _numbers(range(1, 10), native_number, " 시간")
YEARS = _numbers(range(2, 11), sino_number, " 년")
PRICES = _numbers((*range(1000, 10_000, 1000), *range(10_000, 60_000, 5000)), sino_number, " 원")
PRICES += _numbers((500, 1500, 2500, 3500), sino_number, " 원")
