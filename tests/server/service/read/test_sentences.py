"""Lines and sentences of a text, cut in windows of bounded size."""

import pytest
import sentencex
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.server.service.read import sentences as module
from seq2seq_serve.server.service.read.sentences import known_language, lines, sentences, space_after

SENTENCES = [
    "첫 문장입니다.",
    "Mr. Smith came here yesterday, and he was late.",
    '"Go!" he said.',
    "네。",
    "no end",
]


def cut(line: str, language: str = "en") -> list[str]:
    return [sentence for sentence, _ in sentences(line, language)]


def test_a_long_line_is_cut_as_the_library_cuts_it_whole():
    line = " ".join(SENTENCES * 100)
    assert len(line) > 3 * module._WINDOW
    assert cut(line) == [piece.strip() for piece in sentencex.segment("en", line)]


@pytest.mark.parametrize("unit", ["« ", "“ a. ", "가。", "a", "( ", "가나 ", "!", "e.g. "])
def test_the_library_sees_little_at_once_of_any_text(unit, monkeypatch):
    """Its time grows with the square of the text, during which no other thread runs: 8.2 s for 262 KB."""
    seen, inner = [], sentencex.segment
    monkeypatch.setattr(sentencex, "segment", lambda *given: seen.append(len(given[1])) or inner(*given))
    line = (unit * 20_000)[:20_000].strip()
    found = list(sentences(line, "en"))
    assert max(seen) <= 2048
    assert sum(seen) <= 3 * len(line)
    assert "".join(sentence + (space or "") for sentence, space in found) == line


def test_a_sentence_that_goes_on_for_long_ends_where_it_ends():
    line = "word " * 1000 + "e.g. this end. Next one."
    assert cut(line) == [line.removesuffix(" Next one."), "Next one."]


def test_the_cutting_ends_where_it_is_ended():
    lengths = []

    def before_window(length):
        lengths.append(length)
        if length > 3000:
            raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        list(sentences("x" * 100_000, "en", before_window))
    assert lengths[0] == 0
    assert len(lengths) == 4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Node.Js is fast.", ["Node.Js is fast."]),
        ("See README.Md now. Next one.", ["See README.Md now.", "Next one."]),
        ("Wait...What? Yes.", ["Wait...What?", "Yes."]),
        ("M. Dupont est parti. Il pleut.", ["M. Dupont est parti.", "Il pleut."]),
        ("Von J. S. Bach. Und Öhm.", ["Von J. S. Bach.", "Und Öhm."]),
        ("「はい。」と言った。次だ。", ["「はい。」と言った。", "次だ。"]),
        ("「はい。」「いいえ！」", ["「はい。」", "「いいえ！」"]),
        ("“你好。”他说。再见！真的？ 是", ["“你好。”他说。", "再见！", "真的？", "是"]),
        ("값은 3.5. 끝.", ["값은 3.5.", "끝."]),
        ("1. 나는 학생이다. 2. 끝.", ["1. 나는 학생이다.", "2. 끝."]),
        ("2023. 1. 5. 오늘은 금요일이다.", ["2023. 1. 5. 오늘은 금요일이다."]),
    ],
)
@pytest.mark.parametrize("language", ["en", "fr", "ja", "zh"])
def test_a_sentence_ends_before_white_space_or_after_a_mark_of_chinese(line, expected, language):
    assert cut(line, language) == expected


@pytest.mark.parametrize(
    ("language", "line", "num_sentences"),
    [
        ("fr", "Je vois M. Dupont. Il part.", 2),
        ("es", "La casa de D. Juan es grande. Sí.", 2),
        ("pl", "Tak powiedział J. Kowalski. Tak.", 2),
        ("de", "Und Ä. Öhm.", 1),
        ("en", "Und Ä. Öhm.", 2),
        ("en", "Who am I. You know.", 2),
    ],
)
def test_an_initial_after_a_word_in_lower_case_ends_a_sentence_in_english_only(language, line, num_sentences):
    assert len(cut(line, language)) == num_sentences


def test_nothing_stands_between_chinese_sentences():
    assert list(sentences("好。是！ 真\u3000的", "zh")) == [("好。", None), ("是！", " "), ("真\u3000的", "")]


@pytest.mark.parametrize(
    ("target", "space"),
    [
        ("Good.", " "),
        ("好。", ""),
        ("「はい。」", ""),
        ("他说：“好。”", ""),
        ("네", " "),
        ("好", ""),
        ("", " "),
    ],
)
def test_a_space_follows_a_target_that_is_not_chinese(target, space):
    assert space_after(target) == space


@pytest.mark.parametrize("space", ["\u00a0", "\u3000", "\t", " "])
def test_white_space_of_any_kind_may_follow_a_quotation(space):
    """The library broke off with a panic, which is no Exception, where it had more than one byte."""
    line = f"가“나!”{space}다. Yes."
    assert "".join("".join(cut(line)).split()) == "".join(line.split())
    line = f"😀“é。—(가[”-{space}」@-{space}]#\u2028가?가]{{-:{space}?「\u3000」}}Mr.।a)*aMr.{space}"
    assert cut(line)


def test_where_the_library_breaks_off_nothing_is_cut(monkeypatch):
    class PanicException(BaseException):
        pass

    def panic(*_):
        raise PanicException

    monkeypatch.setattr(sentencex, "segment", panic)
    assert cut("One. Two.") == ["One. Two."]


def test_lines_keep_what_is_between_them():
    text = "\n One.\r\n\n\t Two.\u2028Three \u200b\n\ufeff\nFour.\n\n"
    assert list(lines(text)) == [
        ("One.", "\r\n\n\t "),
        ("Two.", "\u2028"),
        ("Three", " \u200b\n\ufeff\n"),
        ("Four.", ""),
    ]
    assert list(lines(" \n\u200b")) == []


@given(st.text(alphabet="ab. \n\r\u2028\u200b\ufeff", max_size=60))
def test_lines_and_what_is_between_them_are_the_text(text):
    found = list(lines(text))
    joined = "".join(line + between for line, between in found)
    assert joined in text
    hidden = " \n\r\u2028\u200b\ufeff"
    assert text.strip(hidden) == joined
    assert all(line == line.strip(hidden) != "" for line, _ in found)


def test_languages_are_known_by_their_tags():
    assert [known_language(tag) for tag in ("ko", "pt-BR", "ZH-hant", "yue")] == ["ko", "pt", "zh", "yue"]
    assert [known_language(tag) for tag in ("kor_Hang", "zho_Hant", "npi")] == ["ko", "zh", "ne"]
    assert [known_language(tag) for tag in ("", "korean", "xx", "-", "k")] == [None] * 5


def test_the_language_decides():
    text = "Das ist z.B. gut. Heute am 3. Oktober."
    assert len(cut(text, "de")) == 2
    assert len(cut(text, "am")) > 2


@pytest.mark.parametrize(
    "text", ["Who am I. You know.", "Take vitamin C. It helps.", "This is plan A. We go."]
)
def test_an_english_sentence_may_end_with_a_capital_letter(text):
    first, _, rest = text.partition(". ")
    assert [sentence for sentence, _ in sentences(text, "en")] == [f"{first}.", rest]


@given(st.from_regex(r"\w[\w ]{0,60}.?", fullmatch=True), st.sampled_from(sorted(module._LANGUAGES)))
def test_a_text_without_a_mark_before_its_last_character_is_one_sentence_for_the_library_too(text, language):
    line = text.rstrip()
    assert module._ONE_SENTENCE.fullmatch(line)
    assert list(module._beginnings(line, language)) == [0]
    assert list(sentences(line, language)) == [(line, "")]
