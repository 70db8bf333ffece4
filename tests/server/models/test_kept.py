"""What was made from equal bytes is made once, up to a bound."""

import pytest

from seq2seq_serve.server.models.kept import Kept


def test_values_are_made_once_and_the_oldest_are_forgotten():
    made, kept = list[bytes](), Kept[list[bytes]](10)

    def value_of(key: bytes) -> list[bytes]:
        def make() -> list[bytes]:
            made.append(key)
            return [key]

        return kept.value_of(key, make)

    first = value_of(b"aaaa")
    assert value_of(b"aaaa") is first
    value_of(b"bbbb")
    assert value_of(b"aaaa") is first
    value_of(b"cccc")  # there is no room for all three
    value_of(b"bbbb")
    value_of(b"aaaa")
    assert made == [b"aaaa", b"bbbb", b"cccc", b"aaaa"]
    value_of(b"too long for it")
    value_of(b"too long for it")
    assert made[4:] == [b"too long for it"] * 2


def test_an_error_is_not_kept():
    kept = Kept[int](10)

    def fail() -> int:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        kept.value_of(b"a", fail)
    assert kept.value_of(b"a", lambda: 1) == 1
