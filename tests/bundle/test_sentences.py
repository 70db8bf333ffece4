import pytest

from seq2seq_serve.bundle.sentences import split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Sam is here. Where is Sam?", ["Sam is here.", "Where is Sam?"]),
        ("Run! Now?! Yes...  no", ["Run!", "Now?!", "Yes...", "no"]),
        ("one\ntwo\r\nthree\u2028four", ["one", "two", "three", "four"]),
        ("He is 3.5 feet tall, e.g.x. So.", ["He is 3.5 feet tall, e.g.x.", "So."]),
        ('He said "go." She went.', ['He said "go."', "She went."]),
        ("샘은 부엌에 있다. 샘은 어디에 있나?", ["샘은 부엌에 있다.", "샘은 어디에 있나?"]),
        ("我在这里。你呢？", ["我在这里。", "你呢？"]),
        ("「はい。」と言った。次だ。", ["「はい。」と言った。", "次だ。"]),
        ("“你好。”“再见。” 我", ["“你好。”", "“再见。”", "我"]),
        ("  no mark  ", ["no mark"]),
        ("... ! \n ? .", []),
        ("", []),
        (" \n\t\u3000", []),
    ],
)
def test_a_story_is_cut_at_marks_and_line_breaks(text, sentences):
    assert split_sentences(text) == sentences


def test_no_word_is_lost_and_a_long_text_takes_a_moment():
    words = [f"word{number}" for number in range(200_000)]
    text = "".join(word + (". ", "! ", "\n", " ")[place % 4] for place, word in enumerate(words))
    assert [word.rstrip(".!") for piece in split_sentences(text) for word in piece.split()] == words
    assert split_sentences("." * 1_000_000) == []
    assert len(split_sentences("a" + "." * 1_000_000 + "b")) == 1
    assert len(split_sentences("a." + ")" * 1_000_000 + "b")) == 1
