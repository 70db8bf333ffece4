"""The path of one request: the number of the server's functions that it calls, which may only decrease."""

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from tests.server.service.harness import EchoRunner, serving

_SERVER = Path(__file__).parent.parent / "server"
# Lower a bound with each change that shortens the path; a commit that raises one says why. The second number
# is that of a request whose options the server has read before.
_MAX_FUNCTIONS = {"GenerateStream": (86, 75), "Generate": (98, 87)}
# The harness has a runner of its own, whose calls count as those of `runner/runner.py`.
_RUNNER_VERBS = "encode", "step"
_REQUEST = pb.GenerateRequest(sources=[pb.Source(text="a long text, so that its end does not come soon")])


class Recorder:
    """The server's functions that one request calls, by file and qualified name.

    On the event loop it records those until the first piece is sent, or until the call is over; on the thread
    of a core, those of the first turn that decodes.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.is_on = False
        self._loop = threading.get_ident()
        self._num_turns = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        name, path = frame.f_code.co_qualname, Path(frame.f_code.co_filename)
        # A comprehension is a call in some versions of Python only.
        if not self.is_on or event != "call" or name.endswith(("comp>", "<genexpr>")):
            return
        if name == "Calls.close_call":
            self.is_on = False
        is_verb = path.name == "harness.py" and frame.f_code.co_name in _RUNNER_VERBS
        if not is_verb and not path.is_relative_to(_SERVER):
            return
        is_of_turn = threading.get_ident() != self._loop
        self._num_turns += is_of_turn and name == "Core.run_turn"
        if not is_of_turn or self._num_turns == 1:
            self.functions.add((path.name, frame.f_code.co_name) if is_verb else (str(path), name))


class PausedRunner(EchoRunner):
    """Holds a stream's second step until its first piece has come, so that its end does not overtake that."""

    def __init__(self) -> None:
        super().__init__()
        self.has_piece = threading.Event()

    def step(self, rows, num_steps=1):
        if rows[0].token_ids and rows[0].request.stream:
            self.has_piece.wait()
        return super().step(rows, num_steps)


async def call(method: str, recorder: Recorder, *, is_again: bool) -> None:
    """Calls a server with two cores; of a stream, the functions until its first piece are recorded.

    The server has had a call with the same options before if it comes again.
    """
    runner = PausedRunner()
    async with serving(runner, num_instances=2) as served:
        if is_again:
            runner.has_piece.set()
            await served.stub.Generate(_REQUEST)
            async for _ in served.stub.GenerateStream(_REQUEST):
                pass
            runner.has_piece.clear()
        recorder.is_on = True
        if method == "Generate":
            assert (await served.stub.Generate(_REQUEST)).hypotheses
        else:
            async for _ in served.stub.GenerateStream(_REQUEST):
                recorder.is_on = False
                runner.has_piece.set()


@pytest.mark.parametrize("is_again", [False, True])
@pytest.mark.parametrize("method", _MAX_FUNCTIONS)
def test_the_path_of_a_request_does_not_grow(method, is_again, monkeypatch):
    monkeypatch.setattr("seq2seq_serve.server.service.arrivals._PROMPT_SECONDS", 1000)  # no message is late
    monkeypatch.setattr("seq2seq_serve.server.engine.async_engine._WATCH_SECONDS", 1000)  # of no request
    recorder, before = Recorder(), sys.getprofile()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        asyncio.run(call(method, recorder, is_again=is_again))
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert 50 < len(recorder.functions) <= _MAX_FUNCTIONS[method][is_again], sorted(recorder.functions)
