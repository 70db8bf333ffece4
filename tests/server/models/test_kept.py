"""Values that were read from messages are kept for equal messages, up to a bound."""

from seq2seq_serve.server.models.kept import Kept


def test_the_oldest_values_are_forgotten_and_too_large_ones_are_not_kept():
    kept = Kept[str](3000)
    for name in "abc":
        kept.keep(name, name.upper(), 400)
    assert [kept.get(name) for name in "abc"] == ["A", "B", "C"]
    kept.keep("c", "another", 1)
    kept.keep("too large", "D", 3000)
    assert (kept.get("c"), kept.get("too large")) == ("C", None)
    kept.keep("e", "E", 1400)
    assert [kept.get(name) for name in "abce"] == [None, None, "C", "E"]
    for number in range(10_000):  # small ones have a size, too
        kept.keep(number, "x", 0)
    assert sum(kept.get(number) is not None for number in range(10_000)) < 10
