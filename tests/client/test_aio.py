import asyncio
import inspect
from itertools import repeat

import pytest

from seq2seq_serve.client import AsyncClient, Client, ClientError, GenerateOptions, rpcs
from tests.server.service.harness import EchoRunner, serving


async def test_the_async_client_does_what_the_sync_one_does():
    async with serving() as served, AsyncClient(served.address) as client:
        assert await client.translate("금요일") == "금요일"
        answer = await client.generate("abc", options=GenerateOptions(max_new_tokens=1), request_id="r1")
        assert (answer.request_id, answer.hypotheses[0].text) == ("r1", "a")
        events = [event async for event in client.stream("금요일")]
        assert "".join(event.piece.text for event in events) == "금요일"
        assert [await client.model()] == await client.models()
        assert await client.health() == "SERVING"
        with pytest.raises(ClientError, match="NOT_FOUND"):
            await client.generate("abc", model="nobody")


PREPARED = [
    name
    for name, function in inspect.getmembers(rpcs, inspect.isfunction)
    if function.__module__ == rpcs.__name__ and "client" in inspect.signature(function).parameters
]


@pytest.mark.parametrize("method", [*PREPARED, "translate_many", "__init__"])
def test_both_clients_take_the_same_arguments(method):
    names = [list(inspect.signature(getattr(kind, method)).parameters) for kind in (Client, AsyncClient)]
    assert names[0] == names[1]


async def test_an_item_of_a_batch_that_cannot_be_sent_fails_alone():
    """All failed with a text over 4 MiB, and the sources could not be a generator."""
    async with serving() as served, AsyncClient(served.address) as client:
        sources = ["ab", "x" * 5_000_000, None, "cd"]
        results = {place: result async for place, result in client.generate_batch(each for each in sources)}
        failed = {place: result.error for place, result in results.items() if result.error is not None}
        assert {place: result.text for place, result in results.items() if place not in failed} == {
            0: "ab",
            3: "cd",
        }
        assert failed[1].message.endswith("bytes, and the server accepts at most 4194304: make it smaller")
        assert failed[2].message.startswith("item 2: a source must be")
        with pytest.raises(ValueError, match="send several, or use translate_many"):
            await anext(client.generate_batch(["x" * 3_000_000] * 2))
        with pytest.raises(ValueError, match="more than 2700 sources are too many for one call"):
            await anext(client.generate_batch(repeat("x")))


async def test_deadline_and_cancelled_task_free_the_slot():
    runner = EchoRunner()
    async with serving(runner) as served, AsyncClient(served.address, timeout_seconds=0.3) as client:
        runner.gate.clear()
        with pytest.raises(ClientError, match="DEADLINE_EXCEEDED"):
            await client.generate("abc")
        num_before = served.turns.num_submitted  # 0 where the deadline passed while the client connected
        task = asyncio.create_task(client.generate("abc", timeout_seconds=50))
        await served.turns.until(lambda: served.turns.num_submitted > num_before)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        runner.gate.set()
        stream = client.stream("abc", timeout_seconds=50)
        await anext(stream)
        await stream.aclose()


async def test_a_refused_call_is_not_retried_and_a_restarting_server_is():
    async with serving() as served, AsyncClient(served.address) as client:
        with pytest.raises(ClientError, match="INVALID_ARGUMENT"):
            await client.generate("")
        labels = {"model_name": "echo", "method": "Generate"}
        assert served.metric("seq2seq_requests_total", **labels, code="INVALID_ARGUMENT") == 1
        model = served.app.models.remove("echo")

        def come_back(_):
            served.app.models.put(model)

        served.app.calls._sinks += (come_back,)
        assert await client.translate("abc") == "abc"
        refused = {"model_name": "", "method": "Generate", "code": "UNAVAILABLE"}
        assert served.metric("seq2seq_requests_total", **refused) == 1


def test_a_client_without_an_event_loop_is_refused_at_once():
    """Its first call failed, with the words of asyncio about futures and tasks."""
    with pytest.raises(RuntimeError, match="event loop"):
        AsyncClient("localhost:50051")


async def test_a_server_that_is_about_to_end_is_called_where_there_is_no_other():
    """Its health check reports NOT_SERVING, and it still accepts calls: both clients gave up."""
    async with serving() as served, AsyncClient(served.address) as client:
        await client.translate("abc")
        draining = asyncio.ensure_future(served.app.drain(notice_seconds=3600.0))
        async with asyncio.timeout(20):
            while await client.health() == "SERVING":
                await asyncio.sleep(0)
            assert await client.translate("abc") == "abc"
            *_, last = [event async for event in client.stream("abc")]
            assert last.result.hypotheses[0].text == "abc"
            assert await asyncio.to_thread(blocking_answers, served.address) == ["abc", "abc", "abc"]
        draining.cancel()


def blocking_answers(address):
    with Client(address) as client:
        *_, last = client.stream("abc")
        [(_, result)] = client.generate_batch(["abc"])
        return [client.translate("abc"), last.result.hypotheses[0].text, result.text]


async def test_a_server_that_is_about_to_end_gets_no_new_calls_where_there_is_another():
    async with serving() as one, serving() as other:
        addresses = ",".join(served.address for served in (one, other))
        async with AsyncClient(f"ipv4:{addresses}") as client:
            while not all(served.turns.num_submitted for served in (one, other)):
                await client.translate("abc")
            draining = asyncio.ensure_future(one.app.drain(notice_seconds=3600.0))
            async with asyncio.timeout(20):
                before = -1
                while before != one.turns.num_submitted:  # until it has heard
                    before = one.turns.num_submitted
                    await asyncio.gather(*(client.translate("abc") for _ in range(20)))
            streams = [[message async for message in client.stream("abc")] for _ in range(20)]
            assert all(stream[-1].result.hypotheses[0].text == "abc" for stream in streams)
            assert one.turns.num_submitted == before
            draining.cancel()
