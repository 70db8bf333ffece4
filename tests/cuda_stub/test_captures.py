"""Captures that fail."""

import pytest

from tests.cuda_stub.programs.paths import PATHS

pytestmark = pytest.mark.cuda_stub

# CUDA's codes of a call that a capture does not permit, and of what follows in that capture
CAPTURE_ERRORS = {"900", "901"}


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_runner_whose_captures_fail_goes_on_without(num_failures, stub, cuda_bundle, tmp_path):
    """The first one is that of an encode call, the next one that of a step."""
    arguments = "-m", "tests.cuda_stub.programs.paths", str(cuda_bundle), "fp16"
    finished = stub.run(tmp_path / "log", *arguments, failing_captures=f"launch:{num_failures}")
    assert finished.stdout == ("captured\n" if num_failures == 1 else "not captured\n")
    for kind, is_uncaptured in (("encode calls", True), ("steps", num_failures == 2)):
        warning = f"{kind} are not captured as CUDA graphs, and are slower"
        assert finished.stderr.count(warning) == is_uncaptured
    events = finished.log.whole.events
    failed = [i for i, one in enumerate(events) if one.name == "end_capture" and "failed" in one.details]
    assert len(failed) == num_failures
    for place in failed:
        stream = events[place].fields["s"]
        # The session of that stream is in an unknown state: it is given up, and never runs again.
        later = {one.name for one in events[place + 1 :] if one.fields.get("s") == stream}
        assert later == {"stream_destroy"}
    assert {error.split()[0] for error in finished.log["warm_up"].errors} == CAPTURE_ERRORS
    for path in PATHS:
        section = finished.log[path.__name__]
        assert section.errors == []
        assert num_failures == 1 or section.graph_launches == []
    assert finished.log["encode"].launches.total() > 0
    assert (finished.log["steady_step"].launches.total() > 0) == (num_failures == 2)
