"""Workers on a Ray cluster: one actor each, wherever the cluster has room for it.

Every node needs this package, and the bundle, the inputs and the output under the paths of the driver.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from seq2seq_serve.bulk.engine import Job, start_worker
from seq2seq_serve.bundle.errors import first_line
from seq2seq_serve.client.files.plan import JobError, Shard
from seq2seq_serve.client.files.worker import MAX_OPEN_SHARDS, Done, Worker, WorkerLost
from seq2seq_serve.server.config import ProviderPolicy


class _Actor:
    """A worker in a process of its own."""

    def __init__(self, job: Job) -> None:
        logging.getLogger("seq2seq_serve").setLevel(logging.WARNING)
        self._job = job
        self._worker: Worker | None = None

    async def start(self) -> None:
        self._worker = await start_worker(self._job)

    async def translate(self, shard: Shard) -> Done:
        assert self._worker is not None
        return await self._worker.translate(shard)


class _RemoteWorker:
    """The driver's side of an actor. It is lost if its process or its node ends."""

    num_unsaved_lines = 0  # not known here: whole shards are counted

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def translate(self, shard: Shard) -> Done:
        done: Done = await _answer_of(self._actor.translate.remote(shard))
        return done

    async def stop(self) -> None:
        ray.kill(self._actor)


def connect(
    address: str, job: Job, num_workers: int | None
) -> tuple[Callable[[], Awaitable[_RemoteWorker]], int]:
    """Connects to a cluster.

    Args:
        address: The cluster's address, or `auto`.
        job: The job of every worker. A worker has as many CPUs as `job.runner.num_threads`, by default one.
        num_workers: The number of workers; None for as many as fit on the nodes.

    Returns:
        A function that starts a worker, and the number of workers.

    Raises:
        JobError: There is no cluster at this address, or none of its nodes has what a worker needs.
    """
    try:
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True
        )
    except (ConnectionError, ValueError) as error:
        raise JobError(f"there is no Ray cluster at {address}: {error}") from error
    # Without a number an engine would take all CPUs of its node.
    num_threads = job.runner.num_threads or 1
    job = replace(job, runner=replace(job.runner, num_threads=num_threads))
    needed = {"CPU": num_threads} | ({"GPU": 1} if job.runner.provider is ProviderPolicy.REQUIRE else {})
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(name, 0) // number) for name, number in needed.items()) for node in nodes)
    if not room:
        raise JobError(f"no node of the cluster at {address} has {needed}: lower --threads")
    actor_class = ray.remote(num_cpus=num_threads, num_gpus=needed.get("GPU", 0))(_Actor)

    async def start() -> _RemoteWorker:
        actor = actor_class.options(max_concurrency=MAX_OPEN_SHARDS + 1).remote(job)
        try:
            await _answer_of(actor.start.remote())
        except BaseException:
            ray.kill(actor)
            raise
        return _RemoteWorker(actor)

    return start, num_workers or room


async def _answer_of(call: Awaitable[Any]) -> Any:
    """Returns the answer of an actor, or raises the error that it raised.

    Raises:
        WorkerLost: The actor's process or node has ended.
    """
    try:
        return await call
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:  # of the actor, its node, or their memory
        raise WorkerLost(first_line(error)) from error
