from collections.abc import Sequence

from benchmarks.load.mix import WITHOUT_SAMPLING, Mode, draw_jobs
from benchmarks.load.peer import PeerQueue


class FakeTranslator:
    """Notes beam size and size of each batch."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []

    def translate_to_lengths(
        self, sources: Sequence[Sequence[int]], lengths: Sequence[int], beam_size: int
    ) -> list[list[int]]:
        self.batches.append((beam_size, len(sources)))
        return [[7] * length for length in lengths]


def test_every_request_is_answered_in_batches_of_its_own_kind():
    jobs = draw_jobs(400, WITHOUT_SAMPLING, seed=0)
    peer = FakeTranslator()
    outcomes = PeerQueue(peer, num_workers=2, max_batch_size=8).open_loop(jobs, rate=20_000.0)
    assert [outcome.job for outcome in outcomes] == jobs
    assert all(outcome.num_tokens == outcome.job.num_tokens for outcome in outcomes)
    assert all(outcome.arrival <= outcome.end for outcome in outcomes)
    assert max(size for _, size in peer.batches) <= 8
    for beam_size, mode in ((1, Mode.GREEDY), (4, Mode.BEAM)):
        num_jobs = sum(job.mode is mode for job in jobs)
        assert sum(size for width, size in peer.batches if width == beam_size) == num_jobs
