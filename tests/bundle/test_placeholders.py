import pytest

from seq2seq_serve.bundle.placeholders import (
    IN_PLACEHOLDERS,
    is_after_space_in_bracket,
    is_kept,
    placeholders,
    space_around,
    stays,
)


def found(text: str) -> list[str]:
    texts = [text[begin:end] for begin, end in placeholders(text)]
    assert all(any(part in each for part in IN_PLACEHOLDERS) for each in texts)
    return texts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "See https://a.com/b?c=1. Or (http://x.y/z), www.a.de!",
            "https://a.com/b?c=1 http://x.y/z www.a.de",
        ),
        ("Mail me.you+1@mail.co.uk, or a@b.", "me.you+1@mail.co.uk"),
        ('<b>Hi</b><br/> <a href="/">x</a>', '<b> </b> <br/> <a href="/"> </a>'.replace("<a ", "<a_")),
        ("{name} {{x}} ${y} {0:d} {} {a.b[0]}", "{name} {{x}} ${y} {0:d} {} {a.b[0]}"),
        ("%s, %1$s; %(n)d %.2f %5d %lu", "%s %1$s %(n)d %.2f %5d %lu"),
        ("%1 %L2 (%99) %n %@ %1$@, %%", "%1 %L2 %99 %n %@ %1$@ %%"),
        ("$t(a.b) %#@n@ %2$#@m@ %{x} %(n).2f", "$t(a.b) %#@n@ %2$#@m@ %{x} %(n).2f"),
        ("{n, number} {d, date, short}", "{n,_number} {d,_date,_short}"),
        ("100% of 5% discount, 20% naive, %100, {Anna, Bob}", ""),
        ("%d개의 파일, %s님, 파일 %1$s을, %@へ", "%d %s %1$s %@"),
        (
            "https://a.com/b을 見て（https://a.jp/x）、https://b.jp。次",
            "https://a.com/b https://a.jp/x https://b.jp",
        ),
        ("a@b.com으로 메일c@d.kr。 見てhttps://e.jp", "a@b.com c@d.kr https://e.jp"),
        ("100 % der {beiden Kinder} 5 < 6 > 4, 20%ige, 100%.", ""),
    ],
)
def test_addresses_tags_and_variables_are_placeholders(text, expected):
    assert found(text) == [each.replace("_", " ") for each in expected.split()]


@pytest.mark.parametrize(
    "part", ["www.", "http://a)", "<a", "a.@", "{", "{a, date", "$t(", "%#@a", "%(a", "%0", "a@b.", "${a"]
)
def test_the_time_is_linear_in_the_length_of_any_text(part):
    """Quadratic time would be minutes."""
    assert len(found(part * 200_000)) < 200_000


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("I <b>am</b> {a}", "{a} am <b>I</b>", True),
        ("I <b>am</b>", "I</b>.<b>.", False),
        ("I <b>am</b>", "I am <b></b>", False),
        ("<b>I</b> <i>am</i>", "<b>I <i>am</b></i>", False),
        ("<b><i>I</i></b>", "<i><b>I</b></i>", True),
        ("I <b></b>am<br>", "<br>am <b></b>", True),
        ("end</b> of <b>it", "it</b> of <b>", True),
        ("{a} {a}", "{a}", False),
        ("a", "{a}", False),
    ],
)
def test_tags_of_a_target_are_in_pairs_as_in_the_source(source, target, expected):
    assert is_kept(source, target) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{name}", (True, True)),
        ("나는 {name}은", (True, True)),
        ("({name})", (True, True)),
        ("v{version}, ", (None, True)),
        ("_{width}px", (None, False)),
        ("a.{name}", (False, True)),
        ("<b>학생", (True, False)),
        ("학생<b>이다", (False, False)),
        ("나는 <b>학생", (True, False)),
        ("나는 </b> 학생", (True, True)),
        ("학생</b>", (None, True)),
    ],
)
def test_a_placeholder_needs_breaks_unless_it_is_a_part_of_a_word(text, expected):
    [place] = placeholders(text)
    assert space_around(text, *place) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("( {a}", True), ("x [ {a}", True), ("({a}", False), ("a {a}", False), (" {a}", False)],
)
def test_a_space_in_a_bracket_before_a_placeholder_is_seen(text, expected):
    assert is_after_space_in_bracket(text, text.index("{")) is expected


@pytest.mark.parametrize(
    ("before", "placeholder", "after", "expected"),
    [
        ("", "{n}", "", True),
        ("(", "{n}", "}.", True),
        ("{", "{n}", "", True),
        ("{", "{n}", "}", False),
        ("%", "{n}", "", False),
        ("", "%1", "%", True),
        ("", "%1", "$", False),  # an s may follow
        ("", "https://a.com", ".", True),
        ("", "https://a.com", ".b", False),
        ("", "https://a.com", "-", False),
        ("", "https://a.com", "”", True),
        ("https://", "www.a.com", "", False),
        ("a", "no placeholder", "b", True),
    ],
)
def test_a_placeholder_stays_if_what_is_beside_it_makes_it_no_other(before, placeholder, after, expected):
    assert stays(before, placeholder, after) is expected
