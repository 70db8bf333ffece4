"""A part of the reliability benchmark: versions are swapped under load, and broken ones are refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

from grpc import aio

from benchmarks.serving import RunningServer
from reliability.callers import under_load
from reliability.damage import damages, linked_copy
from reliability.place import TINY, Bar, Figures, Place, at_least, nothing_left, settled, state, unexpected
from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub

_IN_FLIGHT = 32
_LOAD_SECONDS = 120.0
_REFUSED = "FAILED_PRECONDITION"


def reload(place: Place) -> tuple[Figures, list[Bar]]:
    """Load two versions in turn, then broken ones, while callers read streams, which are never retried."""
    num_swaps, num_broken = place.count(50, 2), place.count(10, 2)
    model = place.folder / "swapped" / "echo"
    for version in ("1", "2"):
        linked_copy(place.bundle(TINY), model / version)
    flags = ["--open-repository", "--max-slots", "16"]
    with place.serving(model, flags) as server:
        before = state(server)
        codes, swaps, refusals, served = asyncio.run(_swap(server, model, num_swaps, num_broken))
        after = settled(server, before)
    figures = {
        "codes": codes,
        "swaps": swaps,
        "broken": refusals,
        "resident_bytes": [values["process_resident_memory_bytes"] for values in (before, after)],
    }
    return figures, [
        at_least("versions that were swapped", swaps["OK"], num_swaps),
        at_least("broken bundles that were refused", refusals[_REFUSED], num_broken),
        at_least("of them with the old version still served, and a reason reported", served, num_broken),
        at_least("calls meanwhile", codes.total(), _IN_FLIGHT),
        unexpected(codes, "OK"),
        *nothing_left(before, after),
    ]


async def _swap(
    server: RunningServer, model: Path, num_swaps: int, num_broken: int
) -> tuple[Counter[str], Counter[str], Counter[str], int]:
    """Load the versions under load.

    Returns:
        The statuses of callers, of swaps and of broken bundles, and the number of broken bundles after which
        the same version was served and the index had a reason.
    """
    swaps, refusals, num_as_before = Counter[str](), Counter[str](), 0
    async with (
        under_load(server.address, _IN_FLIGHT, seed=9) as codes,
        aio.insecure_channel(server.address) as channel,
    ):
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        for _, version in zip(range(num_swaps), cycle(("1", "2")), strict=False):
            swaps[await load(stub, model.name, version)] += 1
        was_served = await _served(stub)
        for number, damage in zip(range(num_broken), cycle(damages()), strict=False):
            version = f"broken-{number}"
            damage(linked_copy(model / "1", model / version))
            refusals[await load(stub, model.name, version)] += 1
            reason = (await _index(stub)).get(version, ("", ""))[1]
            num_as_before += bool(reason) and await _served(stub) == was_served
    return codes, swaps, refusals, num_as_before


async def load(stub: Any, name: str, version: str = "") -> str:
    """Load a version; returns the status of the call."""
    request = pb.RepositoryModelLoadRequest(model_name=name)
    if version:
        request.parameters["version"].string_param = version
    try:
        await stub.RepositoryModelLoad(request, timeout=_LOAD_SECONDS)
    except aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _index(stub: Any) -> dict[str, tuple[str, str]]:
    """Returns state and reason by version."""
    answer = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
    return {one.version: (one.state, one.reason) for one in answer.models}


async def _served(stub: Any) -> list[str]:
    return [version for version, (state, _) in (await _index(stub)).items() if state == "READY"]
