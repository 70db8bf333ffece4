"""Running sequences sit in rows 0..n-1, and rows' contents follow them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seq2seq_serve.server.engine.plan import Move
from seq2seq_serve.server.engine.slots import Slots
from seq2seq_serve.server.engine.state import Search, Sequence
from tests.server.fakes import START_ID, make_request


def make_sequence(number: int) -> Sequence:
    sequence = Sequence(Search(make_request((number,) * (number % 7 + 1)), (START_ID,)), START_ID)
    sequence.token_ids += [5] * (number % 5)
    return sequence


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 12), st.sets(st.integers(0, 11))), max_size=30))
def test_after_any_history_rows_have_no_hole_and_contents_follow(num_slots, history):
    slots = Slots(num_slots)
    contents: list[Sequence | None] = [None] * num_slots
    number = 0
    for num_new, leaving in history:
        newcomers = [make_sequence(number + i) for i in range(min(num_new, slots.num_free))]
        number += len(newcomers)
        slots.reserve(len(newcomers))
        slots.add(newcomers)
        for sequence in newcomers:
            contents[sequence.row] = sequence
        leavers = [sequence for sequence in slots.rows if sequence.row in leaving]
        left_rows = {sequence.row for sequence in leavers}
        stayers = [sequence for sequence in slots.rows if sequence.row not in leaving]
        num_before = len(slots.rows)
        moves = slots.remove(leavers)
        slots.reserve(-len(leavers))

        for move in moves:
            mover = contents[move.from_row]
            assert (move.cache_length, move.memory_length) == (mover.cache_length, mover.memory_length)
            contents[move.to_row] = mover
        assert list(slots.rows) == contents[: len(slots.rows)]
        assert [sequence.row for sequence in slots.rows] == list(range(len(stayers)))
        assert set(slots.rows) == set(stayers)
        assert all(sequence.row is None for sequence in leavers)
        assert slots.num_free == num_slots - len(stayers)

        sources, targets = {move.from_row for move in moves}, {move.to_row for move in moves}
        assert len(sources) == len(targets) == len(moves)
        assert not sources & targets, "no row is both read and written"
        # The fewest: one for each hole that is not at the end.
        assert targets == {row for row in left_rows if row < len(stayers)}
        assert sources <= set(range(len(stayers), num_before)) - left_rows


def test_removing_no_sequence_keeps_the_rows():
    slots = Slots(2)
    slots.reserve(1)
    slots.add([make_sequence(1)])
    rows = slots.rows
    assert slots.remove([]) == ()
    assert slots.rows is rows, "the runner takes the same tuple for the same rows"


def test_there_is_at_least_one_slot():
    with pytest.raises(ValueError, match="num_slots is 0, and must be at least 1"):
        Slots(0)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_the_memory_of_a_retired_keeper_is_copied_before_rows_move(shares_memory):
    slots = Slots(5, shares_memory=shares_memory)
    slots.reserve(5)
    beam, other = Search(make_request((7, 8, 9)), (START_ID,)), Search(make_request((7,)), (START_ID,))
    beam.rows = [Sequence(beam, START_ID) for _ in range(4)]
    last = Sequence(other, START_ID)
    slots.add([*beam.rows, last])
    owner, _, third, _ = beam.rows
    assert beam.memory_owner is owner
    beam.rows = [third, beam.rows[3]]  # the first two hypotheses have ended
    moves = slots.remove(slots.rows[:2])
    assert beam.memory_owner is third
    handed = [Move(0, 2, cache_length=0, memory_length=3)] if shares_memory else []
    # The last two rows fill the first two. Where memory is shared, the beam's fourth row has none to move.
    assert list(moves) == [*handed, Move(3, 0, 0, 0 if shares_memory else 3), Move(4, 1, 0, 1)]
