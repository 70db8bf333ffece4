"""`translate_many` of both clients against a server that echoes."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

from seq2seq_serve.client import (
    AsyncClient,
    Client,
    ClientError,
    GenerateOptions,
    Translated,
    TranslationMemory,
)
from seq2seq_serve.documents.segments import FormattedText
from seq2seq_serve.protos.seq2seq_v1_pb2 import Term
from seq2seq_serve.server.config import QueueLimits
from tests.server.service.harness import EchoRunner, serving_on_a_thread

TEXTS = [f"text {number}" for number in range(120)]


def each(kind: type[Client] | type[AsyncClient], address: str, texts, **arguments) -> Iterator[Translated]:
    """What the client's `translate_many` yields, whichever client it is."""
    if kind is Client:
        with Client(address) as client:
            yield from client.translate_many(texts, **arguments)
        return
    with asyncio.Runner() as runner:
        client = runner.run(_opened(address))
        results = client.translate_many(texts, **arguments)
        try:
            while True:
                yield runner.run(anext(results))
        except StopAsyncIteration:
            pass
        finally:
            runner.run(results.aclose())
            runner.run(client.close())


async def _opened(address: str) -> AsyncClient:
    return AsyncClient(address)


def test_a_text_that_no_server_takes_fails_by_itself_and_at_once(server):
    """It was sent three times, one call at a time, as after an error that may pass."""
    results = list(each(Client, server.address, ["x" * 5 * 2**20, "cd"]))
    assert [result.error is None for result in results] == [False, True]
    assert results[0].error.is_about_the_text
    assert "and the server accepts at most 4194304" in results[0].error.message


@pytest.fixture(params=[Client, AsyncClient])
def kind(request):
    return request.param


def test_texts_and_failures_come_in_order(kind, server):
    options = GenerateOptions(max_new_tokens=1)
    results = list(
        each(kind, server.address, ["ab", " ", "x" * 100, [7, 8, 2], "\udcff", "cd"], options=options)
    )
    assert [result.error.code if result.error else result.text for result in results] == [
        "a",
        "",
        "INVALID_ARGUMENT",
        server.model.target_tokenizer.decode([7]),
        "INVALID_ARGUMENT",
        "c",
    ]
    assert results[3].source == [7, 8, 2]
    assert list(each(kind, server.address, [])) == []


def test_token_ids_fail_by_themselves_where_an_option_needs_a_text(server):
    """The server named the option, as if each text would fail."""
    for options in (
        GenerateOptions(keep_placeholders=True),
        GenerateOptions(terms=[Term(source="cat", target="dog")]),
    ):
        results = list(each(Client, server.address, ["ab", [7, 8, 2], "cd"], options=options))
        assert [result.error is None for result in results] == [True, False, True]
        [violation] = results[1].error.field_violations
        assert violation.field.startswith("sources")


def test_a_server_that_restarts_loses_no_text(kind):
    with ExitStack() as stack:
        first = ExitStack()
        served = first.enter_context(serving_on_a_thread())
        port = served.app.endpoint.port

        class StartAgain(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "trying again" in record.getMessage():
                    stack.enter_context(serving_on_a_thread(port=port))

        logger = logging.getLogger("seq2seq_serve.client.many")
        logger.addHandler(handler := StartAgain())
        stack.callback(logger.removeHandler, handler)
        texts = []
        for result in each(kind, served.address, TEXTS, in_flight=16):
            texts.append(result.text)
            if len(texts) == 40:
                quiet = served.app.calls.wait_until_quiet()
                asyncio.run_coroutine_threadsafe(quiet, served.turns.loop).result(20)
                first.close()
        assert texts == TEXTS


def test_texts_share_calls_and_those_that_a_full_queue_refuses_are_sent_again(kind):
    with serving_on_a_thread(queue=QueueLimits(max_waiting_requests=8)) as served:
        results = list(each(kind, served.address, TEXTS))
        assert [result.text for result in results] == TEXTS
        count = partial(served.metric, "seq2seq_requests_total", method="GenerateBatch")
        assert count(code="OK") > 100
        assert count(code="RESOURCE_EXHAUSTED") > 0


def test_translate_many_fails_after_give_up_seconds_without_an_answer(kind):
    with pytest.raises(ClientError, match=r"gave up after 0\.3 seconds"):
        list(each(kind, "127.0.0.1:1", TEXTS, give_up_seconds=0.3))


def test_a_text_of_the_memory_is_answered_without_a_call(kind, server):
    memory = TranslationMemory([("text 3", "from the memory"), ("ab", "no"), ("bold", "no")])
    texts = ["text 2", " text  3\n", FormattedText("bold"), b"ab", *["text 3"] * 400, "text 4"]
    before = server.turns.num_submitted
    results = list(each(kind, server.address, texts, memory=memory))
    found = [(result.text if result.error is None else "error", result.from_memory) for result in results]
    assert found == [
        ("text 2", False),
        ("from the memory", True),
        ("bold", False),
        ("error", False),
        *[("from the memory", True)] * 400,
        ("text 4", False),
    ]
    assert results[1].source == " text  3\n"
    assert server.turns.num_submitted == before + 3
    [known] = each(kind, "127.0.0.1:1", ["text 3"], memory=memory)  # where there is no server
    assert known.text == "from the memory"


def test_leaving_the_loop_cancels_what_is_in_flight(kind):
    runner = EchoRunner()
    with serving_on_a_thread(runner) as served:
        results = each(kind, served.address, TEXTS)
        assert next(results).text == TEXTS[0]
        runner.gate.clear()
        results.close()  # the harness checks that every slot comes back


def test_answers_come_while_the_next_text_is_not_there_yet(server):
    more = threading.Event()

    def texts():
        yield "a"
        assert more.wait(20)
        yield "b"

    with Client(server.address) as client:
        results = client.translate_many(texts())
        assert next(results).text == "a"
        more.set()
        assert [result.text for result in results] == ["b"]


async def test_texts_may_come_asynchronously(server):
    answered = asyncio.Event()

    async def texts():
        yield "a"
        await answered.wait()
        yield "b"

    async with AsyncClient(server.address) as client:
        results = client.translate_many(texts())
        assert (await anext(results)).text == "a"
        answered.set()
        assert [result.text async for result in results] == ["b"]


@pytest.mark.parametrize("text", ["abc", b"abc"])
def test_a_single_text_is_not_taken_letter_by_letter(kind, server, text):
    with pytest.raises(TypeError, match=r"must be several, .*'abc'"):
        list(each(kind, server.address, text))


@pytest.mark.parametrize("item", [None, float("nan"), np.float64("nan"), 5])
def test_an_item_that_is_not_text_fails_alone_with_its_index(kind, server, item):
    """As a column of pandas has it. It ended all texts with a TypeError without a place."""
    results = list(each(kind, server.address, ["a", item, "c"]))
    assert [result.text for result in (results[0], results[2])] == ["a", "c"]
    error = results[1].error
    assert error.code == "INVALID_ARGUMENT"
    assert error.message.startswith("item 1: a source must be a text, a list of token ids, ")
    assert error.message.endswith(f", and this is {item!r}")


def test_an_error_of_the_texts_is_raised_after_the_results(kind, server):
    def texts():
        yield "a"
        raise OSError("torn")

    results = each(kind, server.address, texts())
    assert next(results).text == "a"
    with pytest.raises(OSError, match="torn"):
        next(results)


def test_a_client_that_is_closed_meanwhile_is_an_error(server):
    client = Client(server.address)
    results = client.translate_many(TEXTS)
    assert next(results).text == TEXTS[0]
    client.close()
    with pytest.raises(ValueError, match="closed"):
        list(results)
