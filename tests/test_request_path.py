"""One request passes the functions that CONTRIBUTING.md lists, in that order."""

import asyncio
import re
import sys
import threading
from pathlib import Path
from types import FrameType

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from tests.server.service.harness import serving

ROOT = Path(__file__).parent.parent
_ROW = re.compile(r"\| `(\w+)` \| `([\w/]+\.py)` \|")
# The harness has a runner of its own.
_RUNNER = {("encode", "runner/runner.py"), ("step", "runner/runner.py")}


def documented() -> list[tuple[str, str]]:
    _, _, section = (ROOT / "CONTRIBUTING.md").read_text().partition("## The way of one request")
    rows = _ROW.findall(section.partition("\n## ")[0])
    return [(name, file) for name, file in rows]


def test_a_request_passes_at_most_20_functions_one_after_the_other():
    steps = documented()
    assert 15 <= len(steps) <= 20
    by_code = {(name, f"server/{file}"): place for place, (name, file) in enumerate(steps)}
    by_code |= {(name, "service/harness.py"): steps.index((name, file)) for name, file in _RUNNER}
    order: list[int] = []
    is_on = False

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and is_on:
            path = Path(frame.f_code.co_filename)
            for length in (2, 3, 4):
                place = by_code.get((frame.f_code.co_name, "/".join(path.parts[-length:])))
                if place is not None and place not in order:
                    order.append(place)

    async def run() -> None:
        nonlocal is_on
        async with serving() as served:
            is_on = True
            request = pb.GenerateRequest(sources=[pb.Source(text="abc")])
            assert [event async for event in served.stub.GenerateStream(request)]
            is_on = False

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        asyncio.run(run())
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    # A handler starts to wait before the engine's first turn, and reads its first piece after it.
    waiting = {("take", "deliveries.py"), ("_pieces", "service/seq2seq/generation.py")}
    both = [order, list(range(len(steps)))]
    for each in both:
        for step in waiting:
            each.remove(steps.index(step))
    assert both[0] == both[1], [steps[place] for place in both[0]]


def test_the_way_names_functions_that_exist():
    for name, file in documented():
        assert re.search(rf"def {name}\(", (ROOT / "server" / file).read_text()), (name, file)
