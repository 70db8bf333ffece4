"""The processes that train one model together, started by `torchrun`, and how they exchange values."""

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
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")

# The end of a process is noticed at once, that of a whole machine only by waiting. While the first process
# encodes a corpus, the others wait longer.
_TIMEOUT = timedelta(minutes=30)
_PREPARATION_TIMEOUT = timedelta(days=2)


class OtherProcessFailed(ValueError):
    """Another process failed, and has reported its own error if it could."""


@dataclass(frozen=True)
class Ranks:
    """The number of processes, and this one's rank from 0. Rank 0 writes all files and messages.

    Attributes:
        slow_group: The group of all processes that waits as long as a preparation may take; None for one
            process.
    """

    rank: int = 0
    size: int = 1
    slow_group: distributed.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This process' items: every `size`-th one, so that a sorted list is shared evenly."""
        return list(items[self.rank :: self.size])

    def gather(self, share: list[T]) -> list[T]:
        """The items of all shares in their order before `share`."""
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
        """The largest value that any process has."""
        return int(self._reduced([value], distributed.ReduceOp.MAX)[0])

    def first(self, function: Callable[[], T], *, is_preparation: bool = False) -> T:
        """Call the function in the first process only, and return its result in every process.

        The others wait for half an hour, and for two days if the function prepares a run.

        Raises:
            OtherProcessFailed: In the other processes, if the function raised in the first.
        """
        if self.size == 1:
            return function()
        group = self.slow_group if is_preparation else None
        answer: list[Any] = [None]
        if not self.is_first:
            distributed.broadcast_object_list(answer, src=0, group=group)
            if answer[0] is None:
                raise OtherProcessFailed("the first process failed, and has reported why")
            return answer[0][0]  # type: ignore[no-any-return]
        try:
            answer = [(function(),)]
        finally:
            distributed.broadcast_object_list(answer, src=0, group=group)
        return answer[0][0]  # type: ignore[no-any-return]

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(reduced, operation)  # on the CPU, so that it does not wait for a GPU's queue
        return reduced.tolist()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the process group of `torchrun`; without it, there is one process.

    Raises:
        OtherProcessFailed: Another process ended, or did not answer in time, while this one waited for it.
        ValueError: A restart on several machines could not work.
    """
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(
        backend, timeout=_TIMEOUT, store=_fresh_store(), rank=current_rank(), world_size=num_ranks()
    )
    slow_group = distributed.new_group(backend="gloo", timeout=_PREPARATION_TIMEOUT)
    ranks = Ranks(distributed.get_rank(), distributed.get_world_size(), slow_group)
    try:
        yield ranks
    except BaseException as error:
        # When this process leaves the group, the others fail, and after the first exit torchrun sends SIGTERM
        # to the rest. This process is ending anyway, and must still report why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not _is_lost_peer(error):
            raise
        raise OtherProcessFailed(
            "another process of this training failed, and has reported why if it could: "
            f"continue with --resume (this process saw: {str(error).partition(chr(10))[0]})"
        ) from error
    finally:
        # A shared model still holds the group and must be freed first: if its threads outlive the group, the
        # interpreter sometimes aborts at exit.
        gc.collect()
        distributed.destroy_process_group()


def _fresh_store() -> PrefixStore | None:
    """A store without the addresses of processes that ended before a restart; None for the default.

    `torchrun` of PyTorch 2.13 keeps one store through all restarts. A process may find the address of one
    there that has ended, and wait for it in vain (github.com/pytorch/pytorch/issues/135712). On one machine,
    the number of restarts tells them apart; each of several machines counts its own.
    """
    variables = os.environ
    is_kept = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_kept or variables["TORCHELASTIC_MAX_RESTARTS"] == "0":
        return None
    if variables["GROUP_WORLD_SIZE"] != "1":
        raise ValueError(
            "torchrun restarts processes on several machines only with --rdzv-backend c10d and the variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: set it where torchrun starts, or leave out --max-restarts"
        )
    address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=_TIMEOUT)
    return PrefixStore(variables["TORCHELASTIC_RESTART_COUNT"], store)


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process ended or did not answer."""
    # NCCL's errors have their own class; gloo's are known by their text: the connection was closed by the
    # peer, or the collective timed out.
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in text and ("peer" in text or "timed out" in text)
    )


def current_rank() -> int:
    """The rank of this process, also before it has joined the others."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process on its machine, which is the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def num_ranks() -> int:
    """The number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def num_local_ranks() -> int:
    """The number of processes that share this machine's CPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
