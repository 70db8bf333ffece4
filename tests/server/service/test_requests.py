import asyncio

import pytest
from grpc.aio import AioRpcError

from client import AsyncClient, ClientError, FieldViolation
from protos import seq2seq_v1_pb2 as pb
from tests.server.service.harness import serving

TEXT = "sources[0].text"
IDS = "sources[0].token_ids"


def from_text(text, **options):
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))


def from_ids(*ids):
    return pb.GenerateRequest(sources=[pb.Source(token_ids=pb.TokenIds(values=ids))])


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (from_text(""), TEXT, "the text is empty"),
        (from_text(" \n\t\u3000"), TEXT, "the text has only white space"),
        (from_text("x" * 64), TEXT, "the source has 65 tokens, and echo takes at most 64"),
        (
            from_text("가" * 400_000),
            TEXT,
            "the text has 1200000 bytes, and echo takes at most 64 tokens, never more than",
        ),
        (
            from_text("a", max_new_tokens=0),
            "options.max_new_tokens",
            "max_new_tokens is 0, and echo takes 1 to 64",
        ),
        (from_text("a", max_new_tokens=-3), "options.max_new_tokens", "max_new_tokens is -3"),
        (from_text("a", max_new_tokens=65), "options.max_new_tokens", "max_new_tokens is 65"),
        (
            from_text("a", max_new_tokens=2**62),
            "options.max_new_tokens",
            "max_new_tokens is 4611686018427387904",
        ),
        (from_ids(), IDS, "there are no token ids"),
        (
            from_ids(5, 260),
            f"{IDS}.values[1]",
            "token id 260 is outside the vocabulary of echo: ids go from 0 to 259",
        ),
        (from_ids(-1), f"{IDS}.values[0]", "token id -1 is outside"),
        (from_ids(*[5] * 65), IDS, "the source has 65 tokens"),
        (pb.GenerateRequest(), "sources", "the request has 0 sources, and echo takes exactly 1"),
        (
            pb.GenerateRequest(sources=[pb.Source(text="a"), pb.Source(text="b")]),
            "sources",
            "the request has 2 sources, and echo takes exactly 1",
        ),
        (pb.GenerateRequest(sources=[pb.Source()]), "sources[0]", "the source is empty"),
        (
            pb.GenerateRequest(sources=[pb.Source(name="image", text="a")]),
            "sources[0].name",
            "echo has no source named 'image': its only one is 'source_ids'",
        ),
    ],
)
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_bad_request_is_refused_with_its_field_and_reaches_no_engine(
    request_, field, message, method, caplog
):
    async def run():
        async with serving() as served:
            call = getattr(served.stub, method)(request_)
            with pytest.raises(AioRpcError) as caught:
                await (call if method == "Generate" else anext(aiter(call)))
            error = ClientError.from_rpc(caught.value, served.address)
            assert error.code == "INVALID_ARGUMENT"
            assert error.message.startswith(message)
            assert error.field_violations == (FieldViolation(field, error.message),)
            assert error.request_id
            assert served.turns.num_submitted == 0
            labels = {"model_name": "echo", "method": method, "code": "INVALID_ARGUMENT"}
            assert served.metric("seq2seq_requests_total", **labels) == 1

    asyncio.run(run())
    assert caplog.text == ""


def test_the_longest_source_and_target_that_fit_are_served():
    async def run():
        async with serving() as served, AsyncClient(served.address) as client:
            options = pb.GenerateOptions(max_new_tokens=64)
            assert await client.translate("x" * 63, options=options) == "x" * 63

    asyncio.run(run())


def test_a_special_token_that_a_user_typed_is_text():
    async def run():
        async with serving() as served, AsyncClient(served.address) as client:
            assert await client.translate("a</s>b") == "a</s>b"

    asyncio.run(run())
