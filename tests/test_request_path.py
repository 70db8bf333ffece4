"""The way of one request: what it calls, counted, and shown in CONTRIBUTING.md.

`python -m tests.test_request_path` writes the page anew.
"""

import asyncio
import gc
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.state import Sequence
from tests.server.service.harness import EchoRunner, serving

ROOT = Path(__file__).parent.parent
_SERVER = ROOT / "server"
_PAGE = ROOT / "CONTRIBUTING.md"
_BEGIN, _END = "<!-- the way -->\n", "<!-- the end of the way -->\n"
# Whoever raises one says in the commit why.
_MOST_FUNCTIONS = {"GenerateStream": 80, "Generate": 93}
_MOST_CLASSES = {"GenerateStream": 20, "Generate": 23}
_MOST_FILES = {"GenerateStream": 23, "Generate": 25}
_MOST_CONTAINERS = 9
# The harness has a runner of its own.
_RUNNER = {name: ("runner/runner.py", f"OnnxRunner.{name}") for name in ("encode", "step")}
_REQUEST = pb.GenerateRequest(sources=[pb.Source(text="a long text, so that its end does not come soon")])

Function = tuple[str, str]  # its file in `server/`, and its qualified name


class Recorder:
    """The functions of the server that one request calls, in the order of their first calls.

    On the event loop those until the first piece is sent, or until the call is over; on the thread of a core
    those of the first turn that decodes.
    """

    def __init__(self) -> None:
        self.on_the_loop: dict[Function, None] = {}
        self.in_a_turn: dict[Function, None] = {}
        self.is_on = False
        self._loop = threading.get_ident()
        self._num_turns = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = sys.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(None)

    def functions(self) -> list[Function]:
        """Those until the request is at the core, those of its turn, and the rest."""
        loop = list(self.on_the_loop)
        handed_over = loop.index(("engine/core.py", "Core.send")) + 1
        return list(dict.fromkeys([*loop[:handed_over], *self.in_a_turn, *loop[handed_over:]]))

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        name, path = frame.f_code.co_qualname, Path(frame.f_code.co_filename)
        # A comprehension is a call in some versions of Python only.
        if not self.is_on or event != "call" or name.endswith(("comp>", "<genexpr>")):
            return
        if name == "Calls.close_call":
            self.is_on = False
        if path.is_relative_to(_SERVER):
            function = path.relative_to(_SERVER).as_posix(), name
        elif path.name == "harness.py" and frame.f_code.co_name in _RUNNER:
            function = _RUNNER[frame.f_code.co_name]
        else:
            return
        if threading.get_ident() == self._loop:
            self.on_the_loop.setdefault(function)
            return
        self._num_turns += name == "Core.run_turn"
        if self._num_turns == 1:
            self.in_a_turn.setdefault(function)


class PausedRunner(EchoRunner):
    """Holds a stream's second step until its first piece has come, so that its end does not overtake that."""

    def __init__(self) -> None:
        super().__init__()
        self.has_piece = threading.Event()

    def step(self, rows, num_steps=1):
        if rows[0].token_ids and rows[0].request.stream:
            assert self.has_piece.wait(20)
        return super().step(rows, num_steps)


def way_of(method: str) -> list[Function]:
    """The functions that a request calls in a server with two cores, of a stream until its first piece."""
    recorder, runner = Recorder(), PausedRunner()

    async def run() -> None:
        async with serving(runner, num_instances=2) as served:
            recorder.is_on = True
            if method == "Generate":
                assert (await served.stub.Generate(_REQUEST)).hypotheses
            else:
                async for _ in served.stub.GenerateStream(_REQUEST):
                    recorder.is_on = False
                    runner.has_piece.set()

    with pytest.MonkeyPatch.context() as patch, recorder.installed():
        patch.setattr("seq2seq_serve.server.service.arrivals._PROMPT_SECONDS", 1000)  # no message is late
        asyncio.run(run())
    return recorder.functions()


def classes(functions: list[Function]) -> set[str]:
    return {name.partition(".")[0] for _, name in functions if "." in name and "<locals>" not in name}


def picture() -> str:
    """The way of a stream to its first piece, a line a file, and what it and a unary call come to."""
    ways = {method: way_of(method) for method in _MOST_FUNCTIONS}
    names: dict[str, list[str]] = {}
    for file, name in ways["GenerateStream"]:
        names.setdefault(file, []).append(f"`{name.replace('.<locals>.', ' > ')}`")
    lines = ["| in `server/` | in the order of their first calls |", "|---|---|"]
    lines += [f"| `{file}` | {' '.join(its)} |" for file, its in names.items()]
    counts = [
        f"`{method}`: {len(way)} functions in {len({file for file, _ in way})} files, "
        f"{len(classes(way))} classes with methods."
        for method, way in ways.items()
    ]
    return "\n".join([*lines, "", *counts, ""])


@pytest.mark.parametrize("method", _MOST_FUNCTIONS)
def test_the_way_of_a_request_does_not_grow(method):
    way = way_of(method)
    listing = "\n".join(f"{file}: {name}" for file, name in way)
    assert len(way) <= _MOST_FUNCTIONS[method], listing
    assert len(classes(way)) <= _MOST_CLASSES[method], sorted(classes(way))
    assert len({file for file, _ in way}) <= _MOST_FILES[method], listing


def containers_of(request: Request, others: list[Request]) -> list[object]:
    """The lists, dicts, deques and sets that hold a request, a record of it, or its tokens, but for `others`.

    Records are objects of the server that refer to the request, or to such an object.
    """
    records, containers = [request], []
    for record in records:
        for referrer in gc.get_referrers(record):
            if referrer is records or any(referrer is known for known in (others, *records, *containers)):
                continue
            if type(referrer).__module__.startswith("seq2seq_serve.server"):
                records.append(referrer)
            elif type(referrer) in (list, dict, OrderedDict, deque, set):
                containers.append(referrer)
    attributes = [vars(record) for record in records if hasattr(record, "__dict__")]
    containers = [one for one in containers if not any(one is each for each in attributes)]
    tokens = [record.token_ids for record in records if isinstance(record, Sequence)]
    return [*containers, *(one for one in tokens if type(one) is list)]


def test_few_containers_hold_a_request_that_is_decoded():
    runner = PausedRunner()

    async def run() -> list[object]:
        async with serving(runner, num_instances=2) as served:
            answering = aiter(served.stub.GenerateStream(_REQUEST))
            await anext(answering)
            [request] = served.turns.requests
            seen = []  # more than once: a call that has just ended may still hold some
            for _ in range(3):
                seen.append(containers_of(request, served.turns.requests))
                await asyncio.sleep(0.01)
            runner.has_piece.set()
            async for _ in answering:
                pass
            return min(seen, key=len)

    containers = asyncio.run(run())
    assert 4 < len(containers) <= _MOST_CONTAINERS, containers


def test_the_page_shows_the_way():
    _, _, rest = _PAGE.read_text().partition(_BEGIN)
    shown, end, _ = rest.partition(_END)
    assert end
    assert shown == picture(), "run `python -m tests.test_request_path`"


if __name__ == "__main__":
    before, begin, rest = _PAGE.read_text().partition(_BEGIN)
    _PAGE.write_text(before + begin + picture() + _END + rest.partition(_END)[2])
