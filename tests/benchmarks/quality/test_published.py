"""The scorer compares stress marks of words."""

import pytest

from benchmarks.quality.published import stressed

pytestmark = pytest.mark.slow  # as all tests of benchmarks


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        ("Ко'шка спит на дива'не.", "Ко'шка спит н дива'не.", True),
        ("Завтра бу'дет дождь", "За'втра бу'дет дождь", False),
        ("за'мок", "замо'к", False),
        ("", "", True),
    ],
)
def test_the_same_vowels_are_marked_in_the_same_order(one, other, are_equal):
    assert (stressed(one) == stressed(other)) == are_equal
