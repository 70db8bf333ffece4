"""When rows are drafted, and how many tokens: by what was right before, and by what positions cost."""

import dataclasses
import random

import numpy as np
import pytest

from seq2seq_serve.server.engine.drafts import MAX_DRAFTED, Drafter, StepTimes
from seq2seq_serve.server.engine.ngrams import Lookup
from seq2seq_serve.server.engine.request import Beam, Request
from seq2seq_serve.server.engine.state import Search, Sequence
from tests.server.fakes import EOS_ID, SOURCE, START_ID

SOURCE_IDS = [*range(10, 80), EOS_ID]


def sequence_of(target: list[int], **options) -> Sequence:
    request = Request("r", {SOURCE: np.array(SOURCE_IDS)}, len(SOURCE_IDS), 200, 0.0, **options)
    return Sequence(Search(request, (START_ID,)), START_ID, row=0, token_ids=target)


def drafter_of(*, seconds_of_position: float, fixed_seconds: float = 1.0) -> Drafter:
    """A drafter that has seen steps of these times."""
    drafter, chance = Drafter((EOS_ID,), SOURCE), random.Random(0)
    for _ in range(300):
        num_positions = chance.randint(1, 40)
        drafter.times.add(num_positions, fixed_seconds + seconds_of_position * num_positions)
    return drafter


def drafted_ids(drafter: Drafter, row: Sequence) -> list[int]:
    """The tokens that are drafted for a row after each token of its target, at the end of which it is."""
    target, drafts = row.token_ids, ()
    for length in range(len(target) + 1):
        row.token_ids = target[:length]
        drafts = drafter.draft((row,))
    assert [draft.token_ids for draft in drafts] == [
        [*target, *(each.next_token_id for each in drafts[: i + 1])] for i in range(len(drafts))
    ]
    assert all(draft.row == row.row and draft.search is row.search for draft in drafts)
    return [draft.next_token_id for draft in drafts]


@pytest.mark.parametrize(
    ("target", "following"),
    [
        ([], [10, 11, 12]),
        ([10, 11], [12, 13, 14]),
        ([10, 11, 99], [12, 13, 14]),  # a token more than the source
        ([10, 11, 99, 12], [13, 14, 15]),
        ([10, 11, 13], [14, 15, 16]),  # one less
        ([10, 99, 12], [13, 14, 15]),  # another one
        ([10, 99, 98, 97, 40, 41], [42, 43, 44]),  # a part is left out
        ([10, 11, 12, 7, 8, 9, 6, 7, 8], [9, 6, 7]),  # a repetition
    ],
)
def test_drafts_are_looked_up_in_the_source_or_in_the_target(target, following):
    rates = (0.5, 0.9) if target[-1:] == [8] else (0.5, 0.1)
    lookup = Lookup(SOURCE_IDS, rates)
    lookup.read(target)
    follower = lookup.best()
    assert follower.ids[follower.place : follower.place + 3] == following


def test_a_target_that_copies_is_drafted_far_and_any_other_one_is_not():
    drafter = drafter_of(seconds_of_position=0.05)
    assert len(drafted_ids(drafter, sequence_of(SOURCE_IDS[:40]))) > 8
    chance = random.Random(1)
    for _ in range(20):
        other = [chance.randrange(100, 10_000) for _ in range(40)]
        poor = drafted_ids(drafter, sequence_of(other))
    assert poor == []
    # A later one that copies is noticed by its own predictions.
    assert len(drafted_ids(drafter, sequence_of(SOURCE_IDS[:40]))) > 4


def test_rows_of_a_step_of_microseconds_are_followed_in_few_turns_while_nothing_is_predicted():
    drafter = drafter_of(seconds_of_position=1e-6, fixed_seconds=6e-5)
    chance = random.Random(1)
    row, num_followed = sequence_of([]), 0
    for _ in range(1280):
        row.token_ids = [*row.token_ids, chance.randrange(100, 10_000)]
        row.lookup = None
        drafter.draft((row,))
        num_followed += row.lookup is not None
    assert 100 < num_followed < 300
    # One that copies is noticed within those turns.
    assert len(drafted_ids(drafter, sequence_of(SOURCE_IDS[:66]))) > 2


def test_positions_that_cost_as_much_as_rows_are_not_drafted():
    drafter = drafter_of(seconds_of_position=1.0, fixed_seconds=0.01)
    assert drafted_ids(drafter, sequence_of(SOURCE_IDS[:40])) == []


def test_fewer_tokens_of_a_row_are_drafted_in_larger_batches():
    drafter = drafter_of(seconds_of_position=0.05)
    numbers = []
    for num_rows in (1, 4, 8, 64):
        rows = tuple(sequence_of(SOURCE_IDS[:60]) for _ in range(num_rows))
        for row, sequence in enumerate(rows):
            sequence.row = row
        drafts = drafter.draft(rows)
        assert len(drafts) <= MAX_DRAFTED
        numbers.append(len(drafts) / num_rows)
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > 4 * numbers[2]
    assert numbers[3] < 0.1


def test_no_draft_reaches_the_limit_or_the_end_of_a_target():
    drafter = drafter_of(seconds_of_position=0.001)
    row = sequence_of(SOURCE_IDS[:40])
    row.request = dataclasses.replace(row.request, max_new_tokens=43)
    assert drafted_ids(drafter, row) == SOURCE_IDS[40:42]  # the step's own token is the third
    assert drafted_ids(drafter, sequence_of(SOURCE_IDS[:65])) == SOURCE_IDS[65:-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_branches": 0},
        {"num_branches": 3},
        {"num_forced": 2},
        {"detects": True},
        {"is_score": True},
        {"beam": Beam(1)},
    ],
)
def test_only_rows_that_select_one_token_are_drafted(changes):
    drafter = drafter_of(seconds_of_position=0.001)
    options = {name: value for name, value in changes.items() if name in ("is_score", "beam")}
    row = sequence_of(SOURCE_IDS[:40], **options)
    for name in changes.keys() - options.keys():
        setattr(row, name, changes[name])
    assert drafted_ids(drafter, row) == []


def test_the_cost_of_a_position_is_found_among_slow_steps_and_found_again_when_it_changes():
    times, chance = StepTimes(), random.Random(2)

    def measure(fixed: float, each: float) -> None:
        for _ in range(600):
            num_positions = chance.choice([1, 1, 1, 5, 9])
            delay = 50.0 if chance.random() < 0.02 else 1.0
            times.add(num_positions, delay * (fixed + each * num_positions))

    measure(1.0, 0.1)
    assert times.seconds_of_position == pytest.approx(0.1, rel=0.5)
    assert times.expected(1) == pytest.approx(1.1, rel=0.3)
    measure(0.5, 0.4)
    assert times.seconds_of_position == pytest.approx(0.4, rel=0.5)


def test_equal_steps_leave_the_cost_of_a_position_at_a_guess():
    times = StepTimes()
    for _ in range(100):
        times.add(1, 3.0)
    assert 0 < times.seconds_of_position < times.expected(1) == pytest.approx(3.0)


def test_a_request_brings_its_own_draft_after_its_prefix():
    drafter = drafter_of(seconds_of_position=0.01)
    prefix = [*range(100, 160)]  # without which every one of its tokens would be predicted wrongly
    given = {"prefix_ids": tuple(prefix), "draft_ids": (5, 6, 7, 8, 9)}
    assert drafted_ids(drafter, sequence_of(prefix, **given))[:4] == [5, 6, 7, 8]
    assert drafted_ids(drafter, sequence_of([*prefix, 5, 90, 7], **given))[:2] == [8, 9]


def test_rows_that_bring_drafts_are_followed_while_nothing_else_is():
    drafter = drafter_of(seconds_of_position=1e-8, fixed_seconds=1e-6)
    plain, brings = sequence_of([90]), sequence_of([], draft_ids=(5, 6, 7))
    while drafter.draft((plain,)) or plain.lookup is None or len(plain.token_ids) < 80:
        plain.token_ids = [*plain.token_ids, 200 + len(plain.token_ids)]
    assert drafter.draft((brings,)) == (), "none is expected"
    drafter.num_given = 1
    assert [draft.next_token_id for draft in drafter.draft((plain, brings))] == [5, 6, 7]
