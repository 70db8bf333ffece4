"""The queue by itself: who is next, who may wait, and for how long, by a clock that is a number."""

import contextlib
import random
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.engine.queue import FairQueue
from seq2seq_serve.server.engine.request import Beam, Request
from seq2seq_serve.server.errors import DeadlineExceeded, Overloaded
from tests.server.fakes import make_request

SOURCE = tuple(range(3, 13))  # of a request that is expected to take 11 steps


def requests_of(caller: str, count: int, **options) -> list[Request]:
    options = {"max_new_tokens": 64} | options
    return [make_request(SOURCE, caller=caller, **options) for _ in range(count)]


def make_queue(*requests: Request, num_slots: int = 1, feeds_prefix: bool = False, **limits) -> FairQueue:
    queue = FairQueue(num_slots, QueueLimits(**limits), feeds_prefix=feeds_prefix)
    for request in requests:
        queue.add([request], 0, request.arrival)
    return queue


def served(queue: FairQueue, count: int) -> list[str]:
    """The callers of the next requests, each of which takes a second and as many steps as expected."""
    callers = []
    for _ in range(count):
        request = queue.pop()
        queue.release(request, 1.0, request.cost(feeds_prefix=False).num_steps)
        callers.append(request.caller)
    return callers


def test_callers_share_slots_times_steps():
    wide = requests_of("wide", 50, beam=Beam(16))
    queue = make_queue(*wide, *requests_of("narrow", 300))
    callers = served(queue, 170)
    assert callers.count("wide") == pytest.approx(10, abs=1)
    assert callers.count("narrow") == pytest.approx(160, abs=1)


def test_a_caller_is_charged_actual_steps_not_estimated_ones():
    queue = make_queue(*requests_of("short", 300), *requests_of("endless", 300))
    callers = []
    for _ in range(220):
        request = queue.pop()
        callers.append(request.caller)
        times = 10 if request.caller == "endless" else 1
        queue.release(request, 1.0, times * request.cost(feeds_prefix=False).num_steps)
    assert callers.count("endless") == pytest.approx(20, abs=1)


@pytest.mark.parametrize(("feeds_prefix", "times"), [(False, 1), (True, 4)])
def test_a_prefix_costs_a_step_a_token_where_steps_read_it(feeds_prefix, times):
    """Callers with long prefixes got as many requests through as others, whose requests take fewer steps."""
    long = requests_of("long", 200, prefix_ids=(5,) * 33)
    queue = make_queue(*long, *requests_of("short", 200), feeds_prefix=feeds_prefix)
    callers = []
    for _ in range(100):
        request = queue.pop()
        callers.append(request.caller)
    assert callers.count("short") / callers.count("long") == pytest.approx(times, rel=0.2)


def test_a_large_request_of_the_past_changes_no_turn():
    """After one beam of 16 by anybody, a request behind another caller's bulk work was served 747th."""
    queue = make_queue(*requests_of("bulk", 100), *requests_of("wide", 1, beam=Beam(16), max_new_tokens=1000))
    assert "wide" in served(queue, 60)
    queue.add(requests_of("new", 1), 1, 0.0)
    assert "new" in served(queue, 2)


def test_a_large_debt_costs_the_others_nothing():
    """The next turn was found by a loop over the debt's units, which held the event loop."""
    queue = make_queue(*requests_of("endless", 2), *requests_of("short", 50))
    queue.release(queue.pop(), 1.0, 10**15)
    assert served(queue, 50) == ["short"] * 50
    assert served(queue, 1) == ["endless"]
    assert not queue.num_requests


def test_a_caller_gets_its_part_back_if_its_targets_are_shorter_than_expected():
    queue = make_queue(*requests_of("early", 300), *requests_of("whole", 300))
    callers = []
    for _ in range(220):
        request = queue.pop()
        callers.append(request.caller)
        times = 0.1 if request.caller == "early" else 1
        queue.release(request, 1.0, int(times * request.cost(feeds_prefix=False).num_steps))
    assert callers.count("whole") == pytest.approx(20, abs=3)


@pytest.mark.parametrize("num_slots", [1, 16])
def test_a_newcomer_is_next_where_targets_are_far_shorter_than_expected(num_slots):
    """Behind bulk work of sounds of 20 tokens each, the first sound of another caller was served 8th."""
    bulk, new = (
        [make_request((3,) * 1500, caller=caller, max_new_tokens=448) for _ in range(count)]
        for caller, count in (("bulk", 300), ("new", 1))
    )
    queue = make_queue(*bulk, num_slots=num_slots, max_waiting_tokens=10**6)
    running, callers = [queue.pop() for _ in range(num_slots)], []
    for turn in range(203):
        if turn == 200:
            queue.add(new, num_slots, 0.0)
        queue.release(running.pop(0), 1.0, 20)
        running.append(queue.pop())
        callers.append(running[-1].caller)
    assert "new" in callers[200:202]


def test_what_a_caller_took_while_it_was_alone_is_no_credit():
    """Corrections for requests that nobody competed with were given to the caller's next ones."""
    queue = make_queue(*requests_of("early", 8))
    taken = [queue.pop() for _ in range(8)]
    queue.add(requests_of("early", 20), 8, 0.0)
    queue.add(requests_of("other", 20), 8, 0.0)
    for request in taken:
        queue.release(request, 1.0, 1)
    assert served(queue, 10).count("other") >= 4


def test_an_idle_caller_does_not_save_up_a_share():
    queue = make_queue(*requests_of("busy", 200), *requests_of("idle", 1))
    served(queue, 100)
    for request in requests_of("idle", 50):
        queue.add([request], 1, 0.0)
    assert served(queue, 40).count("idle") == pytest.approx(20, abs=1)


def test_new_callers_do_not_starve_one_with_many_waiting_requests():
    queue = make_queue(*requests_of("crowd", 200))
    callers = []
    for number in range(100):
        queue.add(requests_of(f"new {number}", 1), 1, 0.0)
        callers += served(queue, 1)
    assert callers.count("crowd") > 8  # of the 100, a part as large as that of each who waits


def test_the_more_urgent_goes_first_however_long_the_others_have_waited():
    """A thousand requests of bulk work at priority 10 delayed those at 0 by a minute."""
    bulk = make_request((3,), priority=10, caller="bulk")
    first, second = make_request((4,), arrival=100.0), make_request((6,), arrival=101.0)
    urgent = make_request((5,), arrival=102.0, priority=-4, caller="other")
    queue = make_queue(bulk, first, second, urgent)
    assert [queue.pop() for _ in range(queue.num_requests)] == [urgent, first, second, bulk]


def accepted(queue: FairQueue, requests: list[Request], at_once: int = 1) -> int:
    """How many of a caller's requests may wait, sent so many at once."""
    num_before = queue.num_requests
    for first in range(0, len(requests), at_once):
        with contextlib.suppress(Overloaded):
            queue.add(requests[first : first + at_once], 1, 0.0)
    return queue.num_requests - num_before


def test_a_flood_leaves_room_in_the_queue_for_callers_that_have_little_in_it():
    """A caller with a thousand requests kept all others out of a full queue."""
    queue = make_queue(max_waiting_requests=90)
    assert accepted(queue, requests_of("flood", 200)) == 81
    with pytest.raises(Overloaded, match=r"full for this caller: 81 of its requests wait, .* for 9 more"):
        queue.add(requests_of("flood", 1), 1, 0.0)
    assert accepted(queue, requests_of("new", 5)) == 5
    assert served(queue, 2) == ["flood", "new"]
    assert accepted(queue, requests_of("flood", 1)) == 0  # it has more than its part
    assert accepted(queue, requests_of("newest", 6)) == 6
    with pytest.raises(Overloaded, match="the queue is full: with this call it would have 91 requests"):
        queue.add(requests_of("last", 1), 1, 0.0)
    assert queue.num_requests == 90


def test_calls_of_many_requests_leave_as_much_room():
    """Four calls of 256 requests filled the queue, because only those before were compared with the room."""
    queue = make_queue(max_waiting_requests=1024)
    assert accepted(queue, requests_of("flood", 4 * 256), at_once=256) == 3 * 256
    assert accepted(queue, requests_of("flood", 256)) == 911 - 3 * 256
    assert accepted(queue, requests_of("new", 100), at_once=100) == 100


def test_in_a_queue_that_stays_full_callers_come_to_equal_parts():
    queue = make_queue(max_waiting_requests=90)
    assert accepted(queue, requests_of("a", 90)) == 81
    for _ in range(400):
        served(queue, 1)
        for caller in "abc":
            accepted(queue, requests_of(caller, 1))
    waiting = Counter(queue.pop().caller for _ in range(queue.num_requests))
    assert len(waiting) == 3
    assert all(24 <= number <= 36 for number in waiting.values())


def test_bulk_work_leaves_room_for_the_urgent_requests_of_its_own_caller():
    queue = make_queue(max_waiting_requests=90)
    assert accepted(queue, requests_of("a", 200, priority=5)) == 81
    assert accepted(queue, requests_of("a", 5)) == 5
    assert accepted(queue, requests_of("a", 1, priority=5)) == 0
    assert accepted(queue, requests_of("a", 4, priority=-1)) == 4


def test_a_call_of_several_requests_is_taken_whole_or_not_at_all():
    queue = make_queue(max_waiting_requests=8)
    assert accepted(queue, requests_of("a", 9), at_once=3) == 6
    assert accepted(queue, requests_of("b", 6), at_once=2) == 2
    assert queue.num_requests == 8


def test_a_call_is_refused_where_its_last_request_would_come_too_late():
    queue = make_queue(*requests_of("a", 1))
    served(queue, 1)  # takes a second
    with pytest.raises(Overloaded, match=r"a slot is expected in 3\.0 seconds"):
        queue.add(requests_of("a", 3, deadline=2.9), 1, 0.0)
    assert queue.num_requests == 0
    queue.add(requests_of("a", 3, deadline=3.1), 1, 0.0)


def test_the_expected_wait_is_that_of_the_caller():
    learning = make_queue(*requests_of("crowd", 101))
    served(learning, 1)  # takes a second
    for caller, seconds in (("crowd", 101.0), ("new", 2.0)):  # the latter after one of the crowd
        (patient,) = requests_of(caller, 1, deadline=seconds + 0.1)
        learning.add([patient], 1, 0.0)
        learning.remove(patient)
        (hasty,) = requests_of(caller, 1, deadline=seconds - 0.1)
        with pytest.raises(Overloaded, match=f"a slot is expected in {seconds} seconds") as caught:
            learning.add([hasty], 1, 0.0)
        assert caught.value.retry_after_seconds == min(seconds, 30.0)


def test_the_expected_wait_ignores_less_urgent_requests():
    """The most urgent request was refused for its deadline by those that it would have gone before."""
    queue = make_queue(*requests_of("first", 1))
    served(queue, 1)  # takes a second
    for number in range(10):
        queue.add(requests_of(f"plain {number}", 1), 1, 0.0)
    with pytest.raises(Overloaded, match=r"a slot is expected in 11\.0 seconds"):
        queue.add(requests_of("hasty", 1, deadline=1.5), 1, 0.0)
    (urgent,) = requests_of("urgent", 1, deadline=1.5, priority=-1)
    queue.add([urgent], 1, 0.0)
    assert queue.pop() is urgent


def test_the_expected_wait_counts_the_slots_of_waiting_requests():
    queue = make_queue(*requests_of("a", 1))
    served(queue, 1)
    wide = requests_of("a", 1, beam=Beam(5))
    queue.add(wide, 1, 0.0)
    with pytest.raises(Overloaded, match=r"a slot is expected in 6\.0 seconds"):
        queue.add(requests_of("a", 1, deadline=5.9), 1, 0.0)


def test_a_deadline_that_has_passed_is_refused():
    with pytest.raises(DeadlineExceeded):
        make_queue(make_request(SOURCE, deadline=0.0))


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 4))
def test_at_random_the_next_is_an_oldest_of_the_most_urgent_level_and_nothing_is_left(
    seed, most, num_callers
):
    chance = random.Random(seed)
    queue = make_queue(num_slots=4, max_waiting_requests=most, max_waiting_tokens=30)
    now, waiting, running = 0.0, [], []
    for _ in range(200):
        now += 4 * chance.random()
        match chance.randrange(5):
            case 0 | 1:
                deadline = now + 9 * chance.random() if chance.random() < 0.3 else None
                options = {
                    "caller": f"caller {chance.randrange(num_callers)}",
                    "priority": chance.choice([0, 0, 0, -1, 3, -10]),
                    "arrival": now,
                    "deadline": deadline,
                    "beam": Beam(3) if chance.random() < 0.3 else None,
                }
                requests = [
                    make_request(tuple(chance.choices(range(3, 9), k=chance.randint(1, 10))), **options)
                    for _ in range(chance.randint(1, min(most, 3)))
                ]
                with contextlib.suppress(Overloaded):
                    queue.add(requests, 0, now)
                    waiting += requests
            case 2 if waiting:
                request = queue.pop()
                assert request in expected_heads(waiting)
                waiting.remove(request)
                running.append(request)
            case 3 if running:
                request = running.pop(chance.randrange(len(running)))
                queue.release(request, chance.random(), chance.randint(1, 20))
            case 4:
                if waiting and chance.random() < 0.5:
                    queue.remove(waiting.pop(chance.randrange(len(waiting))))
        assert queue.num_requests == len(waiting) <= most
        assert queue.num_slots_wanted == sum(request.num_slots for request in waiting)
    for request in waiting:
        queue.remove(request)
    assert queue.num_requests == queue.num_slots_wanted == 0
    queue.add([make_request((3,) * 30)], 0, now)  # all tokens that may wait


def expected_heads(waiting: list[Request]) -> list[Request]:
    """By definition: the oldest requests of each caller in the most urgent level."""
    level = min(request.priority for request in waiting)
    its = [request for request in waiting if request.priority == level]
    return [next(one for one in its if one.caller == caller) for caller in {each.caller for each in its}]


def test_only_callers_of_waiting_requests_are_remembered():
    queue = make_queue(*requests_of("stays", 3))
    for number in range(2000):
        (request,) = requests_of(f"caller {number}", 1, deadline=1e9, priority=number % 3)
        queue.add([request], 0, 0.0)
        queue.remove(request)
    [level] = queue._levels.values()
    assert list(level.lines) == ["stays"]
    assert len(level.places) < 100


def test_what_has_left_the_queue_takes_no_room_and_is_forgotten():
    queue = make_queue(*requests_of("stays", 1), max_waiting_tokens=60)
    for _ in range(60):
        (request,) = requests_of("stays", 1)
        queue.add([request], 0, 0.0)
        queue.remove(request)
    taken = weakref.ref(queue.pop())
    queue.release(taken(), 1.0, 1)
    del request
    assert taken() is None


def test_large_arrays_count_by_their_bytes():
    """A thousand clips of a few positions each could wait with gigabytes of pixels."""
    clips = [
        replace(request, sources={"clip": np.zeros((5, 32, 32, 3), np.uint8)})
        for request in requests_of("a", 3)
    ]
    assert {clip.queue_tokens for clip in clips} == {15}
    queue = make_queue(max_waiting_tokens=30)
    queue.add(clips[:2], 0, 0.0)
    with pytest.raises(Overloaded, match="45 source tokens, and at most 30 may wait"):
        queue.add(clips[2:], 0, 0.0)
    for clip in clips[:2]:
        queue.remove(clip)
    queue.add(clips[1:], 0, 0.0)
