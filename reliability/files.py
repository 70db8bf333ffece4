"""A part of the reliability benchmark: a bundle's files change while it is served, and during its load."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

from grpc import aio

from benchmarks.load.mix import ONLY_GREEDY, Job, draw_jobs
from benchmarks.serving import RunningServer
from reliability.callers import under_load
from reliability.place import (
    TINY,
    Bar,
    Figures,
    Place,
    at_least,
    at_most,
    nothing_left,
    settled,
    state,
    unexpected,
)
from reliability.reload import load
from seq2seq_serve.client import AsyncClient
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub

_IN_FLIGHT = 8
_NUM_ANSWERS = 4  # number of answers to compare after each change
_SERVED = "1"


def _overwrite(path: Path) -> None:
    """Overwrite a file in place, like `cp`."""
    content = path.read_bytes()
    with path.open("r+b") as stream:
        stream.write(content[::-1])


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _rename(path: Path) -> None:
    path.rename(path.with_suffix(".away"))


_CHANGES: tuple[Callable[[Path], None], ...] = (_overwrite, _truncate, _rename, Path.unlink)


def files(place: Place) -> tuple[Figures, list[Bar]]:
    """Overwrite, truncate, rename and remove each file of the served version, and some files during loads."""
    num_loads = place.count(40, len(_CHANGES))
    model = place.folder / "changing" / "echo"
    shutil.copytree(place.bundle(TINY), model / _SERVED)
    flags = ["--open-repository", "--max-slots", "16"]
    with place.serving(model, flags) as server:
        before = state(server)
        codes, num_changes, wrong, loads = asyncio.run(_change(server, place.bundle(TINY), model, num_loads))
        after = settled(server, before)
    figures = {"codes": codes, "changes": num_changes, "wrong answers": wrong, "loads": loads}
    return figures, [
        at_least("changes of a served file", num_changes["served"], len(_CHANGES)),
        at_least("changes of a file of a version that was being loaded", num_changes["loading"], num_loads),
        at_most("answers that differ from those before, bit for bit", wrong, 0),
        unexpected(codes, "OK"),
        unexpected(loads, "OK", "FAILED_PRECONDITION", whose="loads"),
        *nothing_left(before, after),
    ]


async def _change(
    server: RunningServer, sound: Path, model: Path, num_loads: int
) -> tuple[Counter[str], Counter[str], int, Counter[str]]:
    """Change files under load.

    Returns:
        The statuses of calls, the numbers of changes and of wrong answers, and the statuses of loads.
    """
    num_changes, loads, wrong = Counter[str](), Counter[str](), 0
    names = [path.relative_to(sound) for path in sorted(sound.rglob("*")) if path.is_file()]
    jobs, chance = draw_jobs(_NUM_ANSWERS, ONLY_GREEDY, seed=13), random.Random(13)
    async with (
        under_load(server.address, _IN_FLIGHT, seed=14) as codes,
        AsyncClient(server.address) as client,
        aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        expected = await _answers(client, jobs)
        for change, name in product(_CHANGES, names):
            change(model / _SERVED / name)
            num_changes["served"] += 1
            wrong += sum(a != b for a, b in zip(await _answers(client, jobs), expected, strict=True))
            shutil.copy(sound / name, model / _SERVED / name)
        start = time.monotonic()
        loads[await load(stub, model.name, _SERVED)] += 1
        load_seconds = time.monotonic() - start
        for number, change in zip(range(num_loads), cycle(_CHANGES), strict=False):
            version = f"changing-{number}"
            shutil.copytree(sound, model / version)
            loading = asyncio.create_task(load(stub, model.name, version))
            await asyncio.sleep(chance.uniform(0, load_seconds))
            change(model / version / chance.choice(names))
            num_changes["loading"] += 1
            loads[await loading] += 1
            wrong += sum(a != b for a, b in zip(await _answers(client, jobs), expected, strict=True))
            shutil.rmtree(model / version)
    return codes, num_changes, wrong, loads


async def _answers(client: AsyncClient, jobs: list[Job]) -> list[bytes]:
    """Returns the best hypothesis of each job as serialized bytes, with its log-probabilities."""
    answers = []
    for job in jobs:
        options = job.options()
        options.log_probabilities = True
        answers.append(await client.generate(job.source_ids, options=options))
    return [answer.hypotheses[0].SerializeToString(deterministic=True) for answer in answers]
