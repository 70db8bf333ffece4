import pytest

from seq2seq_serve.training.builtin import english


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th")],
)
def test_ordinals(value, text):
    assert english.ordinal(value) == text
    assert english.ordinal(value + 100) == ("10" if value < 10 else "1") + text


def test_cardinals():
    spelled = {0: "zero", 13: "thirteen", 20: "twenty", 25: "twenty-five", 100: "one hundred"}
    spelled |= {3500: "three thousand five hundred", 15_000: "fifteen thousand"}
    assert {value: english.cardinal(value) for value in spelled} == spelled
    with pytest.raises(ValueError, match="got -1"):
        english.cardinal(-1)


def test_english_verb_forms():
    verbs = ("read", "watch", "study", "play", "go", "have", "wash", "plan", "swim", "take")
    assert [english.third_person(verb) for verb in verbs] == [
        "reads", "watches", "studies", "plays", "goes", "has", "washes", "plans", "swims", "takes",
    ]  # fmt: skip
    assert [english.past(verb) for verb in verbs] == [
        "read", "watched", "studied", "played", "went", "had", "washed", "planned", "swam", "took",
    ]  # fmt: skip
    assert [english.progressive(verb) for verb in ("make", "run", "play", "swim", "meet", "study")] == [
        "making", "running", "playing", "swimming", "meeting", "studying",
    ]  # fmt: skip


def test_english_nouns_and_adjectives():
    assert [english.plural(noun) for noun in ("book", "box", "puppy", "knife", "sheep", "actress")] == [
        "books", "boxes", "puppies", "knives", "sheep", "actresses",
    ]  # fmt: skip
    forms = {"big": "bigger", "heavy": "heavier", "cheap": "cheaper", "nice": "nicer", "good": "better"}
    forms |= {
        "hot": "hotter",
        "expensive": "more expensive",
        "beautiful": "more beautiful",
        "clean": "cleaner",
    }
    forms |= {"diligent": "more diligent", "tall": "taller", "fast": "faster", "strong": "stronger"}
    assert {adjective: english.comparative(adjective) for adjective in forms} == forms
