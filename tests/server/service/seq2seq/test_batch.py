"""Many sources in one call: each is a request of its own."""

import asyncio

import pytest
from grpc.aio import AioRpcError

from seq2seq_serve.client import AsyncClient, ClientError, GenerateOptions
from seq2seq_serve.client.wire import MAX_BATCH
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.service.read.options import read_options
from seq2seq_serve.server.service.seq2seq import generation, service
from seq2seq_serve.server.system.trimming import resident_bytes
from tests.server.service.harness import EOS, EchoRunner, Served, serving


def requests_of(*texts: str) -> pb.GenerateBatchRequest:
    items = [pb.BatchItem(tag=text[:1], sources=[pb.Source(text=text)]) for text in texts]
    return pb.GenerateBatchRequest(items=items)


async def all_of(call) -> list[pb.GenerateBatchResponse]:
    return [each async for each in call]


def num_ended(served: Served, code: str) -> float:
    labels = {"model_name": "echo", "method": "GenerateBatch", "code": code}
    return served.metric("seq2seq_requests_total", **labels)


async def answers(client: AsyncClient, sources, **options) -> dict[int, str | ClientError]:
    found = {}
    async for index, translated in client.generate_batch(sources, **options):
        assert translated.source == sources[index]
        assert index not in found
        found[index] = translated.error or translated.text
    return found


async def test_every_source_gets_the_answer_that_it_gets_alone():
    texts = ["abc", "오늘은", "x" * 40] * 50
    async with serving() as served, AsyncClient(served.address) as client:
        assert await answers(client, texts) == dict(enumerate(texts))
        assert num_ended(served, "OK") == 150
        assert await answers(client, []) == {}


def test_options_are_read_once_for_all_items_and_bounded_before_they_are_copied():
    """A million suppressed ids and 512 items, a message of 1 MB, took 8 GB and two minutes."""
    read = []

    def read_and_note(*arguments, **settings):
        read.append(arguments)
        return read_options(*arguments, **settings)

    async def run():
        async with serving() as served, AsyncClient(served.address) as client:
            options = GenerateOptions(suppressed_token_ids=range(200))
            assert await answers(client, ["a", "b", "c"], options=options) == dict(enumerate("abc"))
            assert len(read) == 1
            too_many = requests_of(*["ab"] * 512)
            too_many.options.suppressed_token_ids.extend([7] * 1_000_000)
            before = resident_bytes()
            with pytest.raises(AioRpcError, match="the number of suppressed_token_ids is 1"):
                await all_of(served.stub.GenerateBatch(too_many))
            assert resident_bytes() - before < 64 * 2**20

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "read_options", read_and_note)
        asyncio.run(run())


async def test_an_answer_comes_when_it_is_complete_and_carries_its_tag():
    async with serving() as served:
        call = served.stub.GenerateBatch(requests_of("long" * 10, "ab", "c"))
        received = [answer async for answer in call]
        assert [(answer.index, answer.tag) for answer in received] == [(2, "c"), (1, "a"), (0, "l")]
        ids = {answer.response.request_id for answer in received}
        assert len(ids) == 3
        assert all(each.rpartition("-")[2] in "012" for each in ids)


async def test_answers_that_are_complete_together_are_joined_for_callers_who_ask_for_it():
    async with serving() as served:
        request = requests_of(*["abc"] * 200)
        assert not any(message.more for message in await all_of(served.stub.GenerateBatch(request)))
        request.joins_answers = True
        messages = await all_of(served.stub.GenerateBatch(request))
        assert len(messages) < 200
        found = [answer for message in messages for answer in (message, *message.more)]
        assert sorted(answer.index for answer in found) == list(range(200))
        assert {answer.response.hypotheses[0].text for answer in found} == {"abc"}


async def test_a_source_that_is_refused_does_not_end_the_others():
    async with serving() as served, AsyncClient(served.address) as client:
        found = await answers(client, ["abc", "x" * 100, " ", "d", None, "\udcff"])
        assert (found[0], found[3]) == ("abc", "d")
        assert (found[1].code, found[1].is_about_the_text) == ("INVALID_ARGUMENT", True)
        assert "100" in found[1].message or "101" in found[1].message
        assert found[2] == ""  # as of translate_many, and in the output of the command
        assert found[4].message.startswith("item 4: a source must be a text")
        assert found[5].message == "not valid UTF-8 at character 1"
        assert num_ended(served, "OK") == 2
        refused = served.metric(
            "seq2seq_requests_total", model_name="echo", method="GenerateBatch", code="INVALID_ARGUMENT"
        )
        assert refused == 2


async def test_wrong_options_and_unknown_models_end_the_call():
    async with serving() as served, AsyncClient(served.address) as client:
        with pytest.raises(ClientError, match=r"INVALID_ARGUMENT.*beam_size"):
            await answers(client, ["a", "b"] * 50, options=GenerateOptions(beam_size=99))
        assert num_ended(served, "INVALID_ARGUMENT") == 1
        assert num_ended(served, "CANCELLED") == 0
        with pytest.raises(ClientError, match="NOT_FOUND"):
            await answers(client, ["a"], model="other")


async def test_a_failed_step_fails_its_own_items_only():
    class FailingOnce(EchoRunner):
        """Its second step fails; the first one ends the target of the first item."""

        num_steps = 0

        def step(self, rows, num_steps=1):
            self.num_steps += 1
            if self.num_steps == 2:
                raise RuntimeError("broken")
            return super().step(rows)

    runner = FailingOnce(num_slots=1)
    async with serving(runner) as served, AsyncClient(served.address) as client:
        ids = [[EOS], [70, EOS], [71, EOS]]
        found = await answers(client, ids, request_id="mine")
        assert (found[0], found[2]) == ("", "d")
        assert (found[1].code, found[1].reason) == ("INTERNAL", "ENGINE_FAILED")
        assert found[1].request_id == "mine-1"


async def test_a_batch_waits_for_a_full_queue():
    """The queue takes one request; a batch of many ends anyway, without an error."""
    texts = [f"text {number}" for number in range(30)]
    limits = QueueLimits(max_waiting_requests=1)
    async with serving(queue=limits) as served, AsyncClient(served.address) as client:
        assert await answers(client, texts) == dict(enumerate(texts))


async def test_items_are_refused_while_the_queue_is_full_for_callers_who_ask_for_it():
    async with serving(queue=QueueLimits(max_waiting_requests=1)) as served:
        served.runner.gate.clear()
        request = requests_of(*["abc"] * 30)
        request.refuses_items = True
        messages = aiter(served.stub.GenerateBatch(request))
        first = await anext(messages)
        assert (first.error.code, first.error.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
        assert ClientError.from_batch(first.error).retry_after_seconds > 0
        served.runner.gate.set()
        found = [first, *[message async for message in messages]]
        assert len(found) == 30
        assert {answer.error.code for answer in found} == {"", "RESOURCE_EXHAUSTED"}
        assert not ClientError.from_batch(pb.BatchError(code="INTERNAL")).retry_after_seconds


async def test_a_caller_who_leaves_frees_every_slot():
    async with serving() as served:
        served.runner.gate.clear()
        call = served.stub.GenerateBatch(requests_of("ab", "cd", "ef"))
        reading = asyncio.ensure_future(call.read())
        await asyncio.to_thread(served.runner.stepping.wait, 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        served.runner.gate.set()
        async with asyncio.timeout(20):
            while served.app.calls.num_open:
                await asyncio.sleep(0)
        assert num_ended(served, "CANCELLED") == 3


async def test_few_items_are_open_at_once():
    async with serving() as served:
        served.runner.gate.clear()
        call = served.stub.GenerateBatch(requests_of(*["abc"] * 200))
        reading = asyncio.create_task(all_of(call))
        await served.turns.until(lambda: served.turns.num_submitted == service._LEAST_OPEN)
        for _ in range(3):  # the loop has gone on, and takes no more
            await served.stub.ListModels(pb.ListModelsRequest())
        assert served.turns.num_submitted == service._LEAST_OPEN
        served.runner.gate.set()
        assert len(await reading) == 200


async def test_a_batch_that_has_begun_is_finished_although_the_server_drains():
    """Items that had not reached the engine got UNAVAILABLE."""
    async with serving() as served:
        served.runner.gate.clear()
        reading = asyncio.create_task(all_of(served.stub.GenerateBatch(requests_of(*["abc"] * 200))))
        await served.turns.until(lambda: served.turns.num_submitted == service._LEAST_OPEN)
        draining = asyncio.create_task(served.app.drain())
        while not served.app.calls.is_draining:
            await asyncio.sleep(0)
        with pytest.raises(AioRpcError, match="shutting down"):
            await all_of(served.stub.GenerateBatch(requests_of()))
        served.runner.gate.set()
        found = await reading
        assert [one.response.hypotheses[0].text for one in found] == ["abc"] * 200
        await draining


async def test_as_many_texts_as_are_documented_fit_and_more_are_refused():
    """The message was about 8192 fields, also of 2,700 items with tags."""
    async with serving() as served, AsyncClient(served.address) as client:
        options = {"max_new_tokens": 1, "stop_sequences": ["x"] * 16}
        assert len(await answers(client, ["a"] * MAX_BATCH, options=options)) == MAX_BATCH
        with pytest.raises(ValueError, match="more than 2700 sources are too many for one call: send sev"):
            await answers(client, ["a"] * (MAX_BATCH + 1))
        many = requests_of(*["a"] * MAX_BATCH)
        many.options.max_new_tokens = 1
        assert len(await all_of(served.stub.GenerateBatch(many))) == MAX_BATCH
        many.items.add()
        with pytest.raises(AioRpcError, match=f"the message has more than {MAX_BATCH} items: send a smaller"):
            await all_of(served.stub.GenerateBatch(many))
