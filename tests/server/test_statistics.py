import pytest

from seq2seq_serve.server.statistics import RecentLoad, correction_at_end


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def load_after(seconds, num_slots, busy, every, *, is_answered=True):
    """The load after calls of `busy` seconds, one in each `every` seconds."""
    clock = Clock()
    load = RecentLoad(clock)
    while clock.now < seconds:
        load.begin(num_slots)
        clock.now += busy
        load.end(num_slots, is_answered=is_answered)
        clock.now += every - busy
    return load.averages()


def test_the_averages_come_to_the_rate_of_calls_and_their_slots():
    calls_per_second, slots = load_after(60, num_slots=4, busy=0.05, every=0.1)
    assert calls_per_second == pytest.approx(10, rel=0.05)
    assert slots == pytest.approx(2, rel=0.05)


def test_the_slot_seconds_of_a_call_are_right_from_the_first_seconds_on():
    for seconds in (0.5, 2, 20):
        calls_per_second, slots = load_after(seconds, num_slots=3, busy=0.02, every=0.1)
        assert slots / calls_per_second == pytest.approx(3 * 0.02, rel=0.05)


def test_an_old_load_is_forgotten():
    clock = Clock()
    load = RecentLoad(clock)
    load.begin(8)
    clock.now = 5.0
    assert load.averages()[1] > 7
    load.end(8, is_answered=True)
    clock.now = 25.0
    assert max(load.averages()) < 0.001


def test_calls_without_an_answer_use_slots_and_do_not_count():
    assert load_after(60, num_slots=4, busy=0.05, every=0.1, is_answered=False) == (
        0,
        pytest.approx(2, rel=0.05),
    )


@pytest.mark.parametrize("seconds", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("pause", [0.0, 0.1, 30.0])
def test_slots_per_call_are_right_at_the_end_of_rare_and_long_calls(seconds, pause):
    clock = Clock()
    load = RecentLoad(clock)
    for _ in range(20):
        load.begin(3)
        clock.now += seconds
        load.end(3, is_answered=True)
        calls_per_second, slots = load.averages()
        corrected = calls_per_second + correction_at_end(seconds)
        assert slots / corrected == pytest.approx(3 * seconds, rel=0.35)
        clock.now += pause
