"""What bounds a target whose request sets no limit, in every protocol."""

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError

from seq2seq_serve.bundle.manifest import LengthBound
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from tests.server.service.harness import EchoRunner, Served, serving

TEXT = "abcdefghi"  # 10 tokens with the end of sequence
BOUND = LengthBound(0.5, 1)


def bounded(**sizes: int) -> EchoRunner:
    return EchoRunner(length_bound=BOUND, **sizes)


def request(text: str = TEXT, **options) -> pb.GenerateRequest:
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))


def num_bounded(served: Served) -> float:
    return served.metric("seq2seq_bounded_targets_total", model_name="echo")


@pytest.mark.parametrize(
    ("options", "num_tokens", "is_counted"),
    [
        ({}, 6, True),
        ({"max_new_tokens": 8}, 8, False),
        ({"max_new_tokens": 3}, 3, False),
        ({"max_length_ratio": 0.25}, 3, False),
        ({"max_length_ratio": 0.25, "max_new_tokens": 8}, 3, False),
        ({"max_length_ratio": 0.25, "max_new_tokens": 2}, 2, False),
        ({"max_length_ratio": 0.0}, 9, False),
        ({"max_length_ratio": 0.0, "max_new_tokens": 7}, 7, False),
        ({"max_length_ratio": 1000.0}, 9, False),
        ({"min_new_tokens": 2}, 8, True),
        ({"num_hypotheses": 2}, 6, True),
        ({"temperature": 1.0, "seed": 1}, 6, True),
    ],
)
async def test_a_target_ends_at_the_bound_unless_its_request_says_otherwise(options, num_tokens, is_counted):
    async with serving(bounded()) as served:
        answer = await served.stub.Generate(request(**options))
        events = [event async for event in served.stub.GenerateStream(request(**options))]
        for best in (answer.hypotheses[0], events[-1].result.hypotheses[0]):
            is_whole = num_tokens == len(TEXT)
            assert best.text == TEXT[:num_tokens]
            assert best.finish_reason == (pb.FINISH_REASON_EOS if is_whole else pb.FINISH_REASON_LENGTH)
        await served.until_calls_are_over()
        assert (num_bounded(served) > 0) == is_counted


async def test_a_prefix_leaves_no_more_than_the_models_positions():
    async with serving(bounded(max_source_length=200)) as served:
        source = pb.Source(token_ids=pb.TokenIds(values=[50] * 190))
        prefix = pb.Target(token_ids=pb.TokenIds(values=[51] * 60))
        message = pb.GenerateRequest(sources=[source], options=pb.GenerateOptions(target_prefix=prefix))
        (best,) = (await served.stub.Generate(message)).hypotheses
        assert len(best.token_ids) == 64
        await served.until_calls_are_over()
        assert num_bounded(served) == 0  # the model's own limit


async def test_each_part_of_a_split_source_is_bounded_by_itself():
    async with serving(bounded()) as served:
        texts = ["A" * 39 + ".", "B" * 19 + "."]
        answer = await served.stub.Generate(
            request(" ".join([*texts, "C" * 20 + "."]), long_source=pb.LONG_SOURCE_SPLIT)
        )
        given = [sentence.hypotheses[0] for sentence in answer.sentences]
        assert [one.text for one in given] == ["A" * 21, "B" * 11, "C" * 12]
        assert answer.hypotheses[0].finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_ratio_bounds_targets_of_a_bundle_without_a_bound_too():
    async with serving() as served:
        whole = await served.stub.Generate(request())
        assert whole.hypotheses[0].text == TEXT
        cut = await served.stub.Generate(request(max_length_ratio=0.5))
        assert cut.hypotheses[0].text == TEXT[:5]


@pytest.mark.parametrize("ratio", [-0.5, 1001.0, float("nan"), float("inf")])
async def test_a_ratio_that_is_none_is_refused(ratio):
    async with serving() as served:
        with pytest.raises(AioRpcError) as caught:
            await served.stub.Generate(request(max_length_ratio=ratio))
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT
        message = f"max_length_ratio is {ratio:g}, and must be from 0 to 1000"
        assert caught.value.details() == message
