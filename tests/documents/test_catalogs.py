"""Catalogues of strings: only strings change, and programs that know the kinds read them."""

import json
import sys
from io import BytesIO
from pathlib import Path

import pytest
import yaml
from translate.storage import properties

from seq2seq_serve.documents.kinds import FILES
from seq2seq_serve.documents.segments import WrongFile
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis
from tests.documents.answers import aligned, backwards, capitals, translated

JSON = r"""{
  "title": "Hello \"you\"",   "nested": {"list": ["one", 2, true, null, {"key": "two\nthree"}]},
  "empty": "", "none": {}, "also": [], "number": "12", "forms": "{count, plural, one {a file} other {files}}"
}
"""
YAML = """# a comment
en:  # of English
  plain: Hello, world # kept
  quoted: 'it''s'
  double: "a\\tb \\u00fc"
  list: [x, 'y z', {inner: v w}]
  literal: |
    first line: one

    second
  folded: >-
    two lines
    of one

    and another
  anchor: &name !!str base
  alias: *name
  long: goes on
    here
  not: yes
  number: 12
  word: 12 monkeys
  time: 2001-01-01
"""
PROPERTIES = r"""# a comment
! = another
title = Hello, \
    world
a.b:caf\u00e9
empty=
\ key\=x  two\nlines \\ end
"""
STRINGS = r"""/* "no" = "no"; */
"key" = "Say \"hello\"\n to %@";
bare = "caf\U00e9";
// "a" = "b";
"""


def same(text: str) -> GenerateResponse:
    return GenerateResponse(hypotheses=[Hypothesis(text=text)])


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", JSON), ("a.yaml", YAML), ("a.properties", PROPERTIES), ("a.strings", STRINGS)],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_catalogue_without_translations_is_as_it_was(name, content, encoding, newline):
    encoded = content.replace("\n", newline).encode(encoding)
    assert FILES[Path(name).suffix](encoded, Path(name)).content() == encoded


def test_json_keeps_all_but_its_strings():
    texts, written = translated("a.json", JSON, capitals)
    assert texts == ['Hello "you"', "one", "two", "three"]
    expected = JSON
    for text in (r"Hello \"you\"", '"one"', "two", "three"):
        expected = expected.replace(text, text.upper())
    assert written == expected.replace("TWO\\NTHREE", "TWO\\nTHREE")
    assert json.loads(written)["nested"]["list"][4] == {"key": "TWO\nTHREE"}
    assert json.loads(translated("a.json", JSON, same)[1]) == json.loads(JSON)


@pytest.mark.parametrize(
    "value",
    [
        *("{{count}}", "%s / %d", "${name}!", "<br/>", "https://a.b/c d@e.fr", "$t(a.b)", "%{n}"),
        *("%Y년 %m월 %d일 (%a)", "%Y年%m月%d日 %H時", "%A, %d de %B de %Y", "%B %d, %Y at %I:%M %p"),
        *("%Y-%m-%dT%H:%M:%SZ", "%H시간 %M분", "%d.%m.%Y um %H:%M Uhr", "%d %B %Y г."),
        *("%Y-%m-%d", "%b %-d", "/a/b.png", "en_US", "@home", ":year", "#fff", "com.example.Main", "a-b.c"),
        *(
            "2026-01-01T00:00:00Z",
            "2026-01-01T10:00:00.5+09:00",
            "P1DT2H",
            "{550e8400-e29b-41d4-a716-446655440000}",
        ),
        *(
            "ko-KR",
            "zh-Hant-TW",
            "es-419",
            "1.2.3-beta",
            "v2.0.0+b5",
            "12px",
            "1.5rem 2em",
            "300ms",
            "16GB",
            "0xFF",
        ),
        *("rgba(0, 0, 0, .5)", "calc(100% - 2px)", "aGVsbG8gd29ybGQ=", "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpX"),
        *(
            "d41d8cd98f00b204e9800998ecf8427e",
            "true",
            "False",
            r"C:\\a\\b",
            "{0,choice,0#no files|1#a file}",
            "{n, selectordinal, other {x}}",
        ),
    ],
)
def test_values_that_are_code_stay(value):
    content = f'["{value}", "a word"]'
    assert translated("a.json", content, capitals)[0] == ["a word"]


@pytest.mark.parametrize(
    "value",
    [
        *(
            "yyyy-MM-dd",
            "EEE, d. MMM yyyy 'at' h:mm a",
            "dddd, MMMM Do",
            "yyyyMMdd'T'HHmmssZ",
            "yyyy年M月d日EEEE",
            "yyyy 년 M월 d일 (EEE)",
            "EEEEที่ d MMMM y г.",
            "YYYY [week] w",
        ),
        *("text/html; charset=utf-8", "application/json, text/plain;q=0.9, */*", "*.png, *.{a,b}"),
        *("color: red; margin: 0", "margin: 0 auto", "border: 1px solid #ccc", "--a: b;"),
        *("p, .x { color: red }", "print and (min-width: 6em)", "#fff, #a0a0a0"),
        *("M0 0L10 10z", "m1-2 3.5.5C1e-3,4 5 6 7 8 Z"),
        *(
            "SELECT * FROM t WHERE a = 1",
            "SELECT id\nFROM t",
            "INSERT INTO t VALUES (1)",
            "UPDATE t SET a = 1",
        ),
        *("select * from t", "select a from b where c > 1", "DELETE FROM t WHERE a_b", "DROP TABLE t;"),
        "SELECT t.name total, count(*) FROM users u WHERE u.name = 'the best of all' ORDER BY name",
        "CREATE TABLE t (id integer primary key, name varchar(20) not null)",
        "ALTER TABLE t ADD COLUMN name varchar(20) not null",
        *("ALTER TABLE users ADD COLUMN age INTEGER", "ALTER TABLE users ADD age double precision"),
        *(
            "ALTER TABLE users ALTER COLUMN age TYPE bigint",
            "DROP TABLE users CASCADE",
            'DROP TABLE "a"."b" -- old',
            "DROP TABLE a, b",
        ),
        *("CREATE INDEX CONCURRENTLY idx ON t (a)", "CREATE TABLE IF NOT EXISTS users (id int)"),
        *("CREATE TABLE USERS (id int)", "CREATE VIEW best AS SELECT name FROM users"),
        *(
            "INSERT INTO users (name) VALUES ('a')",
            "INSERT INTO users SELECT name FROM t ON CONFLICT DO NOTHING",
        ),
        *(
            "UPDATE users SET name = 'the best', age = 1 WHERE id = 2 RETURNING id",
            "UPDATE users u SET age = 1",
        ),
        *("DELETE FROM users WHERE age > 3", "DELETE FROM users USING t WHERE t.id = users.id"),
        *("SELECT * FROM users WHERE name ILIKE 'a%'", "SELECT a FROM t ORDER BY a DESC NULLS LAST"),
        *("SELECT c.id FROM customers cust WHERE cust.id = 1", "SELECT id FROM t WHERE a = 1 FOR UPDATE"),
        "SELECT cust.id FROM customers cust LEFT JOIN orders made ON made.id = cust.id",
        *("SELECT a FROM t EXCEPT SELECT a FROM u", "SELECT a FROM t NATURAL JOIN u"),
        "select u.name as total from users u left join t on t.id = u.id where t.size > 5 order by total desc",
        *("0 9 * * MON-FRI", "0 0 12 ? JAN *", "^[a-z ]+$", "[A-Z]{2}-x"),
    ],
)
def test_values_that_are_code_with_spaces_stay(value):
    assert translated("a.json", json.dumps([value, "a word"]), capitals)[0] == ["a word"]


@pytest.mark.parametrize(
    "value",
    [
        *(
            "am / pm",
            "Hmm, ah",
            "Mmm...",
            "MM Kim",
            "AA dd, yes",
            "YYYY-MM-DD 형식으로 입력하세요",
            "MM/DD 형식",
            "HH:mm까지",
            "yyyy-MM-dd 形式で入力",
            "text / image",
            "Image/Photo, Text/Video",
            "image/s; or text",
            "*.txt files",
        ),
        *("Color: red; Margin: 0", "color: red", "left: 3", "size: big; name: small", "p {color} q", "# one"),
        *("(note: this)", "M1 A2", "M. 3 4", "Select from the list", "SELECT A PLAN FROM THE LIST"),
        *("SELECT a plan FROM our offers", "Select the rows from the list where size > 5"),
        *(
            "CREATE TABLE reservations in seconds",
            "UPDATE your app to SET a password",
            "DELETE FROM your cart",
        ),
        *(
            "Select a file from the list",
            "Update your profile",
            "Drop files here",
            "SELECT A plan FROM the LIST",
        ),
        *(
            "UPDATE NOW, and SET a password",
            "INSERT INTO the slot",
            "Drop table plans here",
            "DROP TABLE linen here",
        ),
        *("HH:mm에", "yyyy-MM-dd截止", "yyyy年MM月dd日まで"),
        *("Delete from here", "Select one from these where it fits", "Update and set", "a * b * c"),
        *("Mon 1 * 2", "^ up", "[a-b] c", "five $ or six $"),
    ],
)
def test_values_that_only_look_like_code_with_spaces_are_texts(value):
    assert translated("a.json", json.dumps([value]), capitals)[0] == [value]


def test_brackets_after_a_format_of_dates_take_time_that_grows_with_their_number():
    """The time limit of a test is the bar: a time in the square of the number is minutes here."""
    assert len(translated("a.json", json.dumps(["yy" + "[" * 2_000_000]), capitals)[0]) == 1


@pytest.mark.parametrize(
    ("value", "texts", "expected"),
    [
        ("so $x^2$ is", ["so $x^2$ is"], "IS $x^2$ SO"),
        ("<b>so \\(x\\)</b> is", ["so \\(x\\) is"], "IS <b>\\(x\\) SO</b>"),
        ("$$\\sum x$$", [], "$$\\sum x$$"),
        ("$5 or $6 a", ["$5 or $6 a"], "A $6 OR $5"),
        ("${a}=${b} is", ["${a}=${b} is"], "IS ${A}=${B}"),
        ("by %H:%M now", ["by %H:%M now"], "NOW %H:%M BY"),
        (
            "%d files on %Y-%m-%dT%H:%M:%SZ",
            ["%d files on %Y-%m-%dT%H:%M:%SZ"],
            "%Y-%m-%dT%H:%M:%SZ ON FILES %D",
        ),
        ("on %-d/%B at", ["on %-d/%B at"], "AT %-d/%B ON"),
        ("Enter dd/MM/yyyy here", ["Enter dd/MM/yyyy here"], "HERE dd/MM/yyyy ENTER"),
        *((f"on {one} at", [f"on {one} at"], f"AT {one} ON") for one in ("h:mm", "d MMM", "M/yy", "d/m/yy")),
        *((f"on {one} at", [f"on {one} at"], f"AT {one} ON") for one in ("%b %d", "%e-%b", "MM/d", "HH:m")),
        ("%d %s, 100%Move MM Mr", ["%d %s, 100%Move MM Mr"], "MR MM 100%MOVE %S, %D"),
    ],
)
def test_formulas_and_formats_of_dates_of_strings_stay(value, texts, expected):
    found, written = translated("a.json", json.dumps([value]), backwards)
    assert (found, json.loads(written)) == (texts, [expected])


@pytest.mark.parametrize(
    "value", ["mm, h", "hh d", "mm/s", "mm, mm", "mm, h, ddx", "mm, h EEEx", "%b", "%s %b", "%b %s"]
)
def test_units_and_directives_of_shells_are_not_formats_of_dates(value):
    expected = " ".join(reversed(f"use {value}".upper().split()))
    found, written = translated("a.json", json.dumps([f"use {value}"]), backwards)
    assert (found, json.loads(written)) == ([f"use {value}"], [expected])


def test_a_format_of_dates_is_a_part_of_the_translation_of_its_words():
    """A value with one was taken for a format as a whole, or the model wrote its letters."""
    for source, target in (("%H:%M까지", "until %H:%M"), ("HH:mm까지", "until HH:mm")):
        written = translated("a.json", json.dumps([source]), aligned(target, "0 0"))[1]
        assert json.loads(written) == [target]
    written = translated("a.json", json.dumps(["%H:%M 까지"]), aligned("until 10.5", "1 0"))[1]
    assert json.loads(written) == ["until %H:%M"]


@pytest.mark.parametrize(
    "value",
    [
        *(
            "Done.",
            "%Y년 %m월 오늘은",
            "%H:%M까지",
            "%H時%M分まで",
            "by %H:%M",
            "bis %H:%M Uhr",
            "%Y-%m-%d止",
            "Today %Y-%m-%d",
            "%s to %s",
            "%d of %d",
            "and / or",
            "100%ige",
            "登录/注册",
            "%d files",
            "Wait...",
            "{a} b",
            "5% of",
            "1st",
            "3D",
            "co-op",
        ),
        *(
            "Vorname=",
            "file(s)",
            "decade",
            "COVID-19",
            "MP3",
            "12px wide",
            "1.2.3 is out",
            "2026-01-01 Start",
        ),
        "Donaudampfschifffahrtsgesellschaft",
    ],
)
def test_values_that_only_look_like_code_are_texts(value):
    assert translated("a.json", json.dumps([value]), capitals)[0] == [value]


def test_flutters_descriptions_stay():
    content = '{"@@locale": "en", "a": "b", "@a": {"description": "c", "x": ["d"]}, "e": "f"}'
    texts, written = translated("a.arb", content, capitals)
    assert texts == ["b", "f"]
    assert json.loads(written) == json.loads(content) | {"a": "B", "e": "F"}


def test_keywords_of_json_ld_stay():
    content = '{"@context": {"a": "b"}, "@type": "Person", "@graph": [{"@value": "c"}], "name": "d"}'
    assert translated("a.json", content, capitals)[0] == ["c", "d"]


@pytest.mark.parametrize(
    ("content", "source", "written"),
    [
        ("# a\n---\nko: # b\n  ko: c\n", "ko", "# a\n---\npt-BR: # b\n  ko: c\n"),
        ("ko_KR:\n  a: c\n", "ko", "pt_BR:\n  a: c\n"),
        ('"ko":\n  a: c\n', "ko", '"pt-BR":\n  a: c\n'),
        ("ko:\n  a: c\nb: c\n", "ko", None),
        ("ko:\n  a: c\n", "", None),
        ("en:\n  a: c\n", "ko", None),
        ("a:\n  ko: c\n", "ko", None),
    ],
)
def test_the_only_root_of_yaml_becomes_the_language_of_the_translations(content, source, written):
    def document(target):
        read = FILES[".yml"](content.encode(), Path("a.yml"))
        read.source_language, read.target_language = source, target
        return read.content().decode()

    assert document("") == content
    assert document("pt-BR") == (written or content)
    assert yaml.safe_load(document("no")).keys() == ({"no"} if written else yaml.safe_load(content).keys())


def test_flutters_locale_becomes_that_of_the_translations():
    content = '{"@@locale": "en", "a": "b", "@a": {"@@locale": "en"}}'
    document = FILES[".arb"](content.encode(), Path("a.arb"))
    assert document.content().decode() == content
    document.target_language = "pt-BR"
    assert document.content().decode() == content.replace('"en", "a"', '"pt_BR", "a"')


def test_json_of_ascii_stays_ascii():
    assert translated("a.json", r'["\u00fcber", "x \ud83d\ude00"]', capitals) == (
        ["über", "x 😀"],
        r'["\u00dcBER", "X \ud83d\ude00"]',
    )


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_yaml_keeps_its_comments_styles_and_what_is_not_a_string(newline):
    texts, written = translated("a.yaml", YAML.replace("\n", newline), capitals)
    assert texts == [
        *("Hello, world", "it's", "a b ü", "x", "y z", "v w", "first line: one", "second"),
        *("two lines of one", "and another", "base", "goes on here", "12 monkeys"),
    ]
    before, after = yaml.safe_load(YAML)["en"], yaml.safe_load(written)["en"]
    assert after.pop("double") == "A B Ü"
    expected = {
        key: value.upper() if isinstance(value, str) else value
        for key, value in before.items()
        if key != "double"
    }
    assert after == expected | {"list": ["X", "Y Z", {"inner": "V W"}]}
    for line in ("# a comment", "en:  # of English", "  plain: HELLO, WORLD # kept", "  quoted: 'IT''S'"):
        assert line in written.splitlines()
    for line in (
        "    FIRST LINE: ONE",
        "    TWO LINES OF ONE",
        "  anchor: &name !!str BASE",
        "  alias: *name",
    ):
        assert line in written.splitlines()
    assert yaml.safe_load(translated("a.yaml", YAML, same)[1])["en"] | {"double": ""} == before | {
        "double": ""
    }


@pytest.mark.parametrize(
    "target",
    ["yes", "a: b", "x #y", "- z", "12", "it's", "[a]", "a, b", "", "  a ", "tab\tx", "@x", "a:", "null"],
)
@pytest.mark.parametrize(
    "content", ["k: word", "k: [word]", "k: {a: word}", "k: 'word'", "k: >\n  word\n", "word"]
)
def test_any_target_is_the_string_that_yaml_reads(target, content):
    written = translated("a.yml", content, lambda _: same(target))[1]
    value = yaml.safe_load(written)
    while not isinstance(value, str):
        [value] = value.values() if isinstance(value, dict) else value
    assert value.strip() == target.strip().replace("\t", " ")


def test_properties_keep_their_keys_and_comments():
    texts, written = translated("a.properties", PROPERTIES, capitals)
    assert texts == ["Hello, world", "café", "two", "lines \\ end"]
    expected = PROPERTIES.replace("Hello, \\\n    world", "HELLO, WORLD").replace(r"caf\u00e9", r"CAF\u00c9")
    assert written == expected.replace(r"two\nlines \\ end", r"TWO\nLINES \\ END")
    store = properties.javafile(BytesIO(written.encode()))
    assert [unit.source for unit in store.units if unit.name] == [
        "HELLO, WORLD",
        "CAFÉ",
        "",
        "TWO\nLINES \\ END",
    ]
    content = "a=für\n"
    assert translated("a.properties", content, capitals)[1] == "a=FÜR\n"
    assert translated("a.properties", content.encode("latin-1"), lambda _: same("안"))[1] == b"a=\\uc548\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_apples_strings_keep_their_keys_and_comments(encoding):
    texts, written = translated("a.strings", STRINGS.encode(encoding), capitals)
    assert texts == ['Say "hello"', "to %@", "café"]
    expected = STRINGS.replace(r"Say \"hello\"\n to %@", r"SAY \"HELLO\"\n TO %@").replace(
        r"caf\U00e9", "CAFÉ"
    )
    assert written.decode(encoding) == expected
    store = properties.stringsfile(BytesIO(written), encoding=encoding)
    assert [unit.source for unit in store.units if unit.name] == ['SAY "HELLO"\n TO %@', "CAFÉ"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"a": "b",}', "the file is not JSON: see line 1"),
        ("a.json", '["a"\n "b"]', "the file is not JSON: see line 2, column 2: '\"' is not expected there"),
        ("a.json", '["a"\n"b"]', "the file is not JSON: see line 2"),
        (
            "a.json",
            '{"a": "b"\r\n',
            "the file is not JSON: see line 2, column 1: something is missing at its end",
        ),
        ("a.json", '["a"', "the file is not JSON: see line 1"),
        ("a.json", r'["\x"]', "the file is not JSON: see line 1"),
        ("a.strings", "\n{}", "the file is not strings (.strings): see line 2"),
        ("a.yaml", "a: [b", "the file is not YAML: while parsing a flow sequence"),
        ("a.yaml", b"a: \xff", "the file is not UTF-8: byte 4 is wrong"),
    ],
)
def test_what_is_not_of_its_kind_is_refused_in_one_line(name, content, message):
    with pytest.raises(WrongFile) as caught:
        translated(name, content, capitals)
    assert caught.value.strerror.startswith(message)
    assert "\n" not in caught.value.strerror


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(WrongFile, match=r"the package yaml is missing.*\[documents\]"):
        translated("a.yaml", YAML, capitals)
