from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from seq2seq_serve.training.config import BOS_ID, EOS_ID, PAD_ID
from seq2seq_serve.training.data.batches import (
    BatchShare,
    BatchStream,
    batches_in_order,
    make_batch,
    plan_pass,
)
from seq2seq_serve.training.data.encoded import EncodedPair
from seq2seq_serve.training.data.sources import Clips, Pictures
from seq2seq_serve.training.ranks import Ranks


@pytest.fixture
def pairs() -> list[EncodedPair]:
    random = Random(0)
    return [
        EncodedPair(
            [*random.choices(range(4, 50), k=random.randint(1, 20)), EOS_ID], [5] * random.randint(0, 25)
        )
        for _ in range(300)
    ]


def same(a: BatchShare, b: BatchShare) -> bool:
    return (a.num_labels, a.num_tokens) == (b.num_labels, b.num_tokens) and [
        piece.source[0].tolist() for piece in a.pieces
    ] == [piece.source[0].tolist() for piece in b.pieces]


def test_a_batch_is_padded_and_its_labels_are_the_target_one_ahead() -> None:
    batch = make_batch([EncodedPair([7, 8, EOS_ID], [9]), EncodedPair([7, EOS_ID], [10, 11])])
    assert batch.source[0].tolist() == [[7, 8, EOS_ID], [7, EOS_ID, PAD_ID]]
    assert batch.source[-1].tolist() == [[True, True, True], [True, True, False]]
    assert batch.target_ids.tolist() == [[BOS_ID, 9, PAD_ID], [BOS_ID, 10, 11]]
    assert batch.label_ids.tolist() == [9, EOS_ID, 10, 11, EOS_ID]
    assert batch.label_places.tolist() == [0, 1, 3, 4, 5]
    assert batch.num_labels == 5


def test_no_batch_is_over_the_budget_and_every_pair_comes_once(pairs: list[EncodedPair]) -> None:
    plan = plan_pass(pairs, batch_tokens=120, seed=0, epoch=0)
    assert Counter(index for rows in plan for index in rows) == Counter(range(len(pairs)))
    sizes = []
    for rows in plan:
        batch = make_batch([pairs[index] for index in rows])
        sizes.append(max(batch.source[0].numel(), batch.target_ids.numel()))
    assert max(sizes) <= 120
    # Only the last batch of the sorted corpus, and those where the next pair did not fit, are smaller.
    assert sum(sizes) / len(sizes) > 90


def test_pairs_of_a_batch_have_similar_lengths(pairs: list[EncodedPair]) -> None:
    for rows in plan_pass(pairs, batch_tokens=120, seed=0, epoch=0):
        lengths = [pairs[index].target_length for index in rows]
        assert max(lengths) - min(lengths) <= 3


class _Clips(Clips):
    def length(self, source: Sequence[int]) -> int:
        return len(source)


def test_captions_of_clips_are_not_sorted_by_length_but_those_of_pictures_are() -> None:
    random = Random(0)
    for kind, is_sorted in ((_Clips(32), False), (Pictures(16), True)):
        pairs = [EncodedPair([5] * random.randint(8, 12), [5] * random.randint(1, 10)) for _ in range(400)]
        for rows in plan_pass(pairs, batch_tokens=200, seed=0, epoch=0, kind=kind):
            targets = {pairs[row].target_length for row in rows}
            sources = {len(pairs[row].source_ids) for row in rows}
            assert len(targets if is_sorted else sources) <= 2
            assert len(sources if is_sorted else targets) > 2


def test_batches_of_mixed_lengths_keep_the_budget_and_have_every_pair_once(pairs: list[EncodedPair]) -> None:
    plan = plan_pass(pairs, 120, seed=0, epoch=0, mixes_lengths=True)
    assert sorted(row for rows in plan for row in rows) == list(range(len(pairs)))
    lengths = [[max(len(pairs[row].source_ids), pairs[row].target_length) for row in rows] for rows in plan]
    assert all(max(batch) * len(batch) <= 120 or len(batch) == 1 for batch in lengths)
    ordered = plan_pass(pairs, 120, seed=0, epoch=0)
    assert len(plan) > len(ordered)  # of padding


def test_the_order_depends_on_seed_and_epoch_only(pairs: list[EncodedPair]) -> None:
    def rows(pairs: list[EncodedPair], seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in plan_pass(pairs, 120, seed, epoch)]

    plan = rows(pairs, seed=1, epoch=2)
    assert plan == rows(pairs, seed=1, epoch=2)
    assert plan != rows(pairs, seed=1, epoch=3)
    assert plan != rows(pairs, seed=2, epoch=2)


def test_a_pair_over_the_budget_is_a_batch_of_its_own() -> None:
    pairs = [EncodedPair([5, EOS_ID], [5] * length) for length in (11, 3, 3, 20)]
    plan = plan_pass(pairs, 10, seed=0, epoch=0)
    assert sorted(sorted(rows.tolist()) for rows in plan) == [[0], [1, 2], [3]]


def test_a_stream_goes_on_where_another_stopped(pairs: list[EncodedPair]) -> None:
    def stream(**place: int) -> BatchStream:
        return BatchStream(lambda _: pairs, 120, seed=3, **place)

    whole, expected = stream(), list[BatchShare]()
    while whole.epoch < 2:
        expected.append(whole.next_batch())
    for stop in range(0, len(expected), 3):
        first = stream()
        for _ in range(stop):
            first.next_batch()
        second = stream(epoch=first.epoch, batch_index=first.batch_index)
        for batch in expected[stop : stop + 20]:
            assert same(second.next_batch(), batch)


def test_a_stream_sees_every_pair_of_a_pass_once_whatever_the_number_of_processes() -> None:
    pairs = [EncodedPair([number, EOS_ID], [5] * (number % 7)) for number in range(4, 504)]
    seen = []
    for size in (1, 3):
        streams = [BatchStream(lambda _: pairs, 60, seed=1, ranks=Ranks(rank, size)) for rank in range(size)]
        passes = Counter[int](), Counter[int](), Counter[int]()
        batches = []
        while streams[0].epoch < 2:
            shares = [stream.next_batch() for stream in streams]
            pieces = [piece for share in shares for piece in share.pieces]
            batches.append(sorted(row[0] for piece in pieces for row in piece.source[0].tolist()))
            passes[streams[0].epoch].update(batches[-1])
        seen.append(batches)
        assert passes[0] == passes[1] == Counter(range(4, 504))
    assert seen[0] == seen[1]


def test_evaluation_sees_every_pair_once(pairs: list[EncodedPair]) -> None:
    assert sum(len(batch.source[0]) for batch in batches_in_order(pairs, 120)) == len(pairs)


def test_shares_and_pieces_are_the_batch_whatever_their_number(pairs: list[EncodedPair]) -> None:
    whole = BatchStream(lambda _: pairs, 120, seed=3)
    streams = [
        BatchStream(lambda _: pairs, 120, seed=3, ranks=Ranks(rank, 3), piece_tokens=30) for rank in range(3)
    ]
    for _ in range(40):
        expected = whole.next_batch()
        (batch,) = expected.pieces
        assert expected.num_labels == batch.num_labels
        assert expected.num_tokens == batch.num_labels + int(batch.source[-1].sum())
        found = Counter[tuple[int, ...]]()
        num_labels = 0
        for share in (stream.next_batch() for stream in streams):
            assert (share.num_labels, share.num_tokens) == (expected.num_labels, expected.num_tokens)
            for piece in share.pieces:
                longer = max(piece.source[0].shape[1], piece.target_ids.shape[1])
                assert len(piece.source[0]) * longer <= 30 or len(piece.source[0]) == 1
                found.update(tuple(row[row != PAD_ID].tolist()) for row in piece.source[0])
                num_labels += piece.num_labels
        assert found == Counter(tuple(row[row != PAD_ID].tolist()) for row in batch.source[0])
        assert num_labels == expected.num_labels


def test_a_process_may_have_no_share() -> None:
    pairs = [EncodedPair([5, EOS_ID], [6])]
    stream = BatchStream(lambda _: pairs, 10, seed=0, ranks=Ranks(1, 2))
    share = stream.next_batch()
    assert (share.pieces, share.num_labels, share.num_tokens) == ([], 2, 4)
    assert stream.any_batch().label_ids.tolist() == [6, EOS_ID]
