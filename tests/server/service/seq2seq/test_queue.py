"""The queue through the services: shared by callers, and with limits that agree."""

from functools import partial

import grpc
import pytest

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.server.config import QueueLimits
from tests.server.service.harness import EchoRunner, access_file, serving
from tests.server.service.open_inference.test_service import infer_request
from tests.server.service.test_access import bearer, code_of

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT
DENIED, EXHAUSTED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def file(tmp_path):
    callers = ("crowd", "many", "predict"), ("small", "few", "predict"), ("ops", "key", "predict", "admin")
    return access_file(tmp_path, *callers)


def generate(served, token: str, text: str = "ab", **options):
    request = pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))
    return served.stub.Generate(request, metadata=bearer(token))


def score(served, token: str, priority: int):
    source, target = pb.Source(text="ab"), pb.Target(text="ab")
    request = pb.ScoreRequest(sources=[source], target=target, priority=priority)
    return served.stub.Score(request, metadata=bearer(token))


async def test_how_urgent_a_request_may_be_depends_on_the_role_of_its_caller(file):
    async with serving(access_file=file) as served:
        infer = GRPCInferenceServiceStub(served.channel).ModelInfer
        for token, priority, code in (
            ("few", 0, OK),
            ("few", 10, OK),
            ("few", -1, DENIED),
            ("few", 11, INVALID),
            ("few", -(2**31), INVALID),
            ("key", -10, OK),
            ("key", -11, INVALID),
        ):
            assert await code_of(generate(served, token, priority=priority)) is code
            assert await code_of(score(served, token, priority)) is code
            message = infer_request("ab", priority=priority)
            assert await code_of(infer(message, metadata=bearer(token))) is code
        names = {"few": "small", "key": "ops"}
        assert [request.caller for request in served.turns.requests] == [names["few"]] * 6 + [
            names["key"]
        ] * 3


async def test_without_tokens_callers_are_known_by_address_and_only_where_all_are_admins_may_be_urgent():
    for is_open, code in ((False, DENIED), (True, OK)):
        async with serving(is_repository_open=is_open) as served:
            assert await code_of(generate(served, "", priority=1)) is OK
            assert await code_of(generate(served, "", priority=-1)) is code
            assert {request.caller for request in served.turns.requests} == {"127.0.0.1"}


@pytest.mark.parametrize("num_instances", [1, 2])
@pytest.mark.parametrize(
    ("runner", "queue"),
    [
        ({}, {"max_waiting_requests": 2}),
        ({}, {"max_waiting_tokens": 20}),
        ({"num_slots": 2}, {}),
        ({"max_source_length": 8}, {}),
        ({"max_target_length": 8}, {}),
    ],
)
async def test_an_idle_server_never_says_that_a_request_should_come_again(num_instances, runner, queue):
    """Of two instances each had half of the queue, and Score did not ask what could ever fit in it."""
    async with serving(
        EchoRunner(**runner), queue=QueueLimits(**queue), num_instances=num_instances
    ) as served:
        infer = GRPCInferenceServiceStub(served.channel).ModelInfer
        codes = set()
        for text in ("a" * 3, "a" * 15, "a" * 30, "Go. " * 2, "Go. " * 20):
            target = pb.Target(text=text)
            scored = pb.ScoreRequest(sources=[pb.Source(text=text)], target=target)
            for call in (
                partial(generate, served, "", text),
                partial(generate, served, "", text, beam_size=3),
                partial(generate, served, "", text, num_hypotheses=3),
                partial(generate, served, "", text, long_source=pb.LONG_SOURCE_SPLIT, beam_size=2),
                partial(served.stub.Score, scored),
                partial(infer, infer_request(*[text] * 3)),
            ):
                codes.add(await code_of(call()))
        assert codes == {OK, INVALID}
