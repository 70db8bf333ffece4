"""The processes that train one model together, as `torchrun` starts them, and how they agree."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")

# Longer than the first process may encode a corpus while the others wait. A death is noticed at once.
_PATIENCE = timedelta(hours=4)


class OtherProcessFailed(ValueError):
    """Another process ended, and has said why itself."""


@dataclass(frozen=True)
class Ranks:
    """How many processes there are, and which one this is. Without torchrun there is one.

    Attributes:
        rank: From 0. The first one writes all files and messages.
        size: How many.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process' items: every so manieth, so that sorted ones are shared evenly."""
        return list(items[self.rank :: self.size])

    def gather(self, share: list[T]) -> list[T]:
        """The items of all shares, in the order that they had before."""
        if self.size == 1:
            return share
        shares: list[list[T]] = [[]] * self.size
        distributed.all_gather_object(shares, share)
        items: list[Any] = [None] * sum(map(len, shares))
        for rank, items_of_rank in enumerate(shares):
            items[rank :: self.size] = items_of_rank
        return items

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def largest(self, value: int) -> int:
        """The largest that a process has."""
        return int(self._reduced([value], distributed.ReduceOp.MAX)[0])

    def first(self, function: Callable[[], T]) -> T:
        """What the function gives in the first process, to all of them; the others wait for it.

        Raises:
            OtherProcessFailed: In the others, where it raised in the first.
        """
        if self.size == 1:
            return function()
        answer: list[Any] = [None]
        if not self.is_first:
            distributed.broadcast_object_list(answer, src=0)
            if answer[0] is None:
                raise OtherProcessFailed("the first process failed, and has said why")
            return answer[0][0]  # type: ignore[no-any-return]
        try:
            answer = [(function(),)]
        finally:
            distributed.broadcast_object_list(answer, src=0)
        return answer[0][0]  # type: ignore[no-any-return]

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(reduced, operation)  # on the CPU, so that no queue of a GPU is waited for
        return reduced.tolist()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Meet the other processes that `torchrun` started.

    Raises:
        OtherProcessFailed: One of them ended while this one waited for it.
    """
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend, timeout=_PATIENCE)
    ranks = Ranks(distributed.get_rank(), distributed.get_world_size())
    try:
        yield ranks
    except BaseException as error:
        # As soon as the group is left, the others fail, and torchrun sends SIGTERM to all that are not the
        # first to exit. This process is ending anyway, and must still report why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _is_lost_peer(error):
            raise
        raise OtherProcessFailed(
            "another process of this training failed, and has said why; --resume goes on afterwards"
        ) from error
    finally:
        # What still holds the group, a model that was shared, must go first: where its threads outlive this,
        # the interpreter's end now and then aborts the process.
        gc.collect()
        distributed.destroy_process_group()


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed since another process ended."""
    # NCCL's errors have a class of their own, and gloo's a text: the connection was closed by the peer.
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "peer" in str(error).lower()
    )


def current_rank() -> int:
    """Which process this is, also before it met the others."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which process of this machine this is: the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_ranks() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_local_ranks() -> int:
    """How many processes share this machine's CPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
