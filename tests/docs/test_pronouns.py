import pytest

from docs import pronouns


@pytest.fixture(scope="module")
def pairs():
    return pronouns.make_pairs(pronouns.NUM_PAIRS)


def test_the_german_pronoun_has_the_gender_of_the_noun_that_the_adjective_fits(pairs):
    of_animals = {english for english, _ in pronouns._OF_ANIMALS}
    genders = {english: gender for english, _, gender in pronouns._ANIMALS + pronouns._PLACES}
    for english, german in pairs:
        words = english.rstrip(".").split()
        because = words.index("because")
        animal, place = words[words.index("didn't") - 1], words[because - 1]
        meant = animal if words[-1] in of_animals else place
        assert german.split(" weil ")[1].split()[0] == pronouns._PRONOUNS[genders[meant]], english


def test_the_pair_of_nouns_that_the_page_asks_about_is_in_no_sentence(pairs):
    for noun in pronouns.HELD_OUT:
        assert any(f" {noun} " in english for english, _ in pairs)
    assert not any(all(f" {noun} " in english for noun in pronouns.HELD_OUT) for english, _ in pairs)


def test_the_command_writes_the_same_pairs_each_time_and_no_source_twice(pairs, tmp_path):
    assert pronouns.main([str(tmp_path / "new" / "pronouns.tsv")]) == 0
    lines = (tmp_path / "new" / "pronouns.tsv").read_text(encoding="utf-8").splitlines()
    assert [tuple(line.split("\t")) for line in lines] == pairs
    assert len({english for english, _ in pairs}) == pronouns.NUM_PAIRS
