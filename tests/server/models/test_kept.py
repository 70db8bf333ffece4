"""Values that were read from messages are kept for equal messages, up to a bound."""

from seq2seq_serve.server.models.kept import Kept


def test_the_least_recently_used_values_are_forgotten_and_too_large_ones_are_not_kept():
    """The oldest ones were forgotten, also one that every message used."""
    kept = Kept[str, str](24_000)
    for name in "abc":
        kept.keep("m", name, name.upper(), 3200)
    assert [kept.get("m", name) for name in "abc"] == ["A", "B", "C"]
    assert kept.get("other", "a") is None
    kept.keep("m", "c", "another", 1)
    kept.keep("m", "too large", "D", 24_000)
    assert (kept.get("m", "c"), kept.get("m", "too large")) == ("C", None)
    assert kept.get("m", "a") == "A"
    kept.keep("m", "e", "E", 6000)
    assert [kept.get("m", name) for name in "abce"] == ["A", None, None, "E"]
    for number in range(10_000):  # small ones have a size, too
        kept.keep("m", number, "x", 0)
    assert sum(kept.get("m", number) is not None for number in range(10_000)) < 10


def test_the_values_of_an_owner_are_forgotten_and_leave_room():
    kept = Kept[str, int](20_000)
    for owner in "ab":
        for number in range(2):
            kept.keep(owner, number, number, 0)
    kept.forget("a")
    assert [kept.get("a", number) for number in range(2)] == [None, None]
    for number in range(2, 4):
        kept.keep("b", number, number, 0)
    assert [kept.get("b", number) for number in range(4)] == [0, 1, 2, 3]
