"""One request passes the functions that CONTRIBUTING.md lists, in that order; it calls as many as it says."""

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
_NUMBER = re.compile(r"calls (\d+) functions of `server/`")
# The harness has a runner of its own.
_RUNNER = {("encode", "runner/runner.py"), ("step", "runner/runner.py")}


def section() -> str:
    _, _, rest = (ROOT / "CONTRIBUTING.md").read_text().partition("## The way of one request")
    return rest.partition("\n## ")[0]


def documented() -> list[tuple[str, str]]:
    return [(name, file) for name, file in _ROW.findall(section())]


def calls_of_a_request() -> list[tuple[str, str]]:
    """The qualified name and the file of everything that a greedy `GenerateStream` calls, in that order."""
    called: dict[tuple[str, str], None] = {}
    is_on = False

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and is_on:
            called.setdefault((frame.f_code.co_qualname, frame.f_code.co_filename))

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
    return list(called)


def test_a_request_passes_at_most_20_functions_one_after_the_other():
    steps = documented()
    assert 15 <= len(steps) <= 20
    by_code = {(name, f"server/{file}"): place for place, (name, file) in enumerate(steps)}
    by_code |= {(name, "service/harness.py"): steps.index((name, file)) for name, file in _RUNNER}
    order: list[int] = []
    for name, file in calls_of_a_request():
        for length in (2, 3, 4):
            place = by_code.get((name.rpartition(".")[2], "/".join(Path(file).parts[-length:])))
            if place is not None and place not in order:
                order.append(place)
    # A handler starts to wait before the engine's first turn, and reads its first piece after it.
    waiting = {("updates", "engine/async_engine.py"), ("pieces", "service/seq2seq/answers.py")}
    both = [order, list(range(len(steps)))]
    for each in both:
        for step in waiting:
            each.remove(steps.index(step))
    assert both[0] == both[1], [steps[place] for place in both[0]]


def test_a_request_calls_as_many_functions_as_the_page_says():
    """The table has the stations of the way only: helpers between them came unseen."""
    server = ROOT / "server"
    functions = {
        (path.relative_to(server).as_posix(), name)
        for name, file in calls_of_a_request()
        # A comprehension is a call in some versions of Python only.
        if not name.endswith(">") and (path := Path(file)).is_relative_to(server)
    }
    [number] = _NUMBER.findall(section())
    listing = "\n".join(f"{file}: {name}" for file, name in sorted(functions))
    assert len(functions) <= int(number), (
        f"a request calls {len(functions)} functions, and CONTRIBUTING.md says {number}: do without the new "
        f"ones, or raise the number, and say in the commit why\n{listing}"
    )
    assert len(functions) == int(number), (
        f"a request calls {len(functions)} functions only: lower the {number} in CONTRIBUTING.md"
    )


def test_the_way_names_functions_that_exist():
    for name, file in documented():
        assert re.search(rf"def {name}\(", (ROOT / "server" / file).read_text()), (name, file)
