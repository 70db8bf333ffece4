import asyncio

import grpc
import pytest
from grpc import aio

from seq2seq_serve.client import AsyncClient, ClientError
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.service.read.options import read_options
from seq2seq_serve.server.service.seq2seq import generation
from tests.server.service.harness import EOS, EchoRunner, access_file, serving

KOREAN = "오늘은 금요일 입니다"


def request(text: str = KOREAN, **options) -> pb.GenerateRequest:
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=pb.GenerateOptions(**options))


async def test_generate_answers_with_everything_the_contract_has():
    async with serving() as served:
        answer = await served.stub.Generate(request())
        [hypothesis] = answer.hypotheses
        assert hypothesis.text == KOREAN
        assert hypothesis.finish_reason == pb.FINISH_REASON_EOS
        assert len(hypothesis.token_ids) == len(KOREAN.encode())
        assert EOS not in hypothesis.token_ids
        assert not hypothesis.HasField("attention")
        assert answer.model == "echo"
        assert answer.usage.source_tokens == answer.usage.target_tokens == len(KOREAN.encode()) + 1
        timings = answer.timings
        assert 0 <= timings.queue_seconds <= timings.first_token_seconds <= timings.total_seconds
        assert answer.request_id


async def test_log_probabilities_and_alternatives_have_one_for_every_target_token():
    async with serving() as served:
        answer = await served.stub.Generate(request("ab", log_probabilities=True, num_alternatives=2))
        [hypothesis] = answer.hypotheses
        assert list(hypothesis.log_probabilities) == [-0.5] * 3
        assert hypothesis.score == -1.5
        texts = [[token.text for token in position.tokens] for position in hypothesis.alternatives]
        assert texts == [["a", "</s>"], ["b", "</s>"], ["</s>", "</s>"]]
        assert [token.log_probability for token in hypothesis.alternatives[0].tokens] == [-0.5, -1.5]
        assert hypothesis.alternatives[1].tokens[1].token_id == EOS
        [plain] = (await served.stub.Generate(request("ab"))).hypotheses
        assert not plain.HasField("score")
        assert not plain.log_probabilities
        assert not plain.alternatives


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("ab", {"beam_size": 3}),
        ("오", {"beam_size": 2, "length_penalty": 1.0, "early_stopping": False}),
    ],
)
async def test_a_beam_answers_with_its_best_and_streams_what_is_never_taken_back(text, options):
    async with serving() as served:
        options["num_hypotheses"] = 2
        answer = await served.stub.Generate(request(text, **options))
        first, second = answer.hypotheses
        assert first.text == text
        assert first.score > second.score
        num_tokens, alpha = len(text.encode()) + 1, options.get("length_penalty", 0.6)
        assert first.score == pytest.approx(-0.5 * num_tokens / ((5 + num_tokens) / 6) ** alpha)
        assert not first.log_probabilities
        assert answer.usage.target_tokens == sum(len(one.token_ids) + 1 for one in answer.hypotheses)
        events = [event async for event in served.stub.GenerateStream(request(text, **options))]
        assert "".join(event.piece.text for event in events[:-1]) == text
        assert {event.piece.hypothesis for event in events[:-1]} == {0}
        ids = [token_id for event in events[:-1] for token_id in event.piece.token_ids]
        assert ids == list(first.token_ids)
        assert events[-1].result.hypotheses == answer.hypotheses
        await served.check_that_everything_is_back()


async def test_several_drawn_targets_are_streamed_side_by_side():
    async with serving() as served:
        message = request("오늘은", num_hypotheses=3, temperature=1.0, seed=4)
        events = [event async for event in served.stub.GenerateStream(message)]
        *pieces, last = events
        assert len(last.result.hypotheses) == 3
        for place, hypothesis in enumerate(last.result.hypotheses):
            mine = [event.piece for event in pieces if event.piece.hypothesis == place]
            assert "".join(piece.text for piece in mine) == hypothesis.text
            assert [i for piece in mine for i in piece.token_ids] == list(hypothesis.token_ids)
            assert not hypothesis.HasField("score")
        assert max(len(one.token_ids) for one in last.result.hypotheses) > 1
        await served.check_that_everything_is_back()


@pytest.mark.parametrize("prefix", ["a", "오늘"])
async def test_a_target_begins_with_its_prefix_streamed_or_not(prefix):
    async with serving() as served:
        text = f"{prefix}bc"
        options = {"target_prefix": pb.Target(text=prefix)}
        answer = await served.stub.Generate(request(text, **options))
        assert answer.hypotheses[0].text == text
        assert answer.usage.target_tokens == 3  # b, c and the end
        events = [event async for event in served.stub.GenerateStream(request(text, **options))]
        assert "".join(event.piece.text for event in events[:-1]) == text
        ids = [token_id for event in events[:-1] for token_id in event.piece.token_ids]
        assert ids == list(answer.hypotheses[0].token_ids)


async def test_a_target_is_scored_token_by_token():
    async with serving() as served:
        message = pb.ScoreRequest(sources=[pb.Source(text="ab")], target=pb.Target(text="오x"))
        answer = await served.stub.Score(message)
        ids = served.model.target_tokenizer.encode("오x")
        assert list(answer.log_probabilities) == [-float(token) for token in (*ids, EOS)]
        assert answer.score == -sum((*ids, EOS))
        assert list(answer.target_tokens) == ["", "", "오", "x", "</s>"]
        assert answer.model == "echo"
        assert served.metric("seq2seq_requests_total", model_name="echo", method="Score", code="OK") == 1
        assert served.metric("seq2seq_generation_tokens_total", model_name="echo") == 0
        for target, message in (
            (None, "the target is missing"),
            (pb.Target(text="x" * 64), "the given target has 64 tokens, and echo takes at most 63"),
        ):
            request = pb.ScoreRequest(sources=[pb.Source(text="ab")], target=target)
            with pytest.raises(aio.AioRpcError, match=message) as caught:
                await served.stub.Score(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("stop", ["cd", "라"])
async def test_a_target_ends_before_its_stop_sequence_streamed_or_not(stop):
    async with serving() as served:
        text, options = f"ab{stop}ef", {"stop_sequences": [stop, "never"]}
        answer = await served.stub.Generate(request(text, **options))
        [hypothesis] = answer.hypotheses
        assert hypothesis.text == "ab"
        assert hypothesis.finish_reason == pb.FINISH_REASON_STOP
        assert list(hypothesis.token_ids) == served.model.target_tokenizer.encode(f"ab{stop}")
        events = [event async for event in served.stub.GenerateStream(request(text, **options))]
        assert "".join(event.piece.text for event in events[:-1]) == "ab"
        assert events[-1].result.hypotheses[0].text == "ab"
        labels = {"model_name": "echo", "finished_reason": "stop"}
        assert served.metric("seq2seq_request_success_total", **labels) == 2
        await served.check_that_everything_is_back()


@pytest.mark.parametrize(("max_new_tokens", "target_tokens"), [(3, ["a", "b", "c"]), (9, [*"abcd", "</s>"])])
async def test_attention_has_a_row_for_every_target_token(max_new_tokens, target_tokens):
    async with serving() as served:
        answer = await served.stub.Generate(request("abcd", attention=True, max_new_tokens=max_new_tokens))
        attention = answer.hypotheses[0].attention
        assert attention.source_tokens == [*"abcd", "</s>"]
        assert attention.target_tokens == target_tokens
        assert len(attention.weights) == 5 * len(target_tokens)
        assert attention.weights[:7] == [1, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("text", [KOREAN, "a", "👩‍👩‍👧 и 日本\n\n끝 "])
async def test_pieces_are_whole_characters_and_join_to_the_result(text):
    async with serving() as served:
        events = [event async for event in served.stub.GenerateStream(request(text))]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["piece"] * (len(events) - 1) + ["result"]
        pieces = [event.piece for event in events[:-1]]
        [hypothesis] = events[-1].result.hypotheses
        assert "".join(piece.text for piece in pieces) == hypothesis.text == text
        assert [i for piece in pieces for i in piece.token_ids] == hypothesis.token_ids
        assert not any("\ufffd" in piece.text for piece in pieces)
        unary = await served.stub.Generate(request(text))
        assert unary.hypotheses[0] == hypothesis


async def test_a_target_cut_inside_a_character_streams_the_same_text_as_it_returns():
    async with serving() as served:
        for max_new_tokens in (1, 2, 4, 5):
            call = served.stub.GenerateStream(request("금요일", max_new_tokens=max_new_tokens))
            events = [event async for event in call]
            joined = "".join(event.piece.text for event in events)
            assert joined == events[-1].result.hypotheses[0].text
            assert joined.endswith("\ufffd")


async def test_metadata_comes_with_the_first_token_and_not_before():
    async with serving() as served:
        served.runner.gate.clear()
        call = served.stub.GenerateStream(request())
        metadata = asyncio.create_task(call.initial_metadata())
        await asyncio.to_thread(served.runner.stepping.wait, 20)
        await served.stub.ListModels(pb.ListModelsRequest())
        assert not metadata.done()
        served.runner.gate.set()
        await metadata
        async for _ in call:
            pass


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_slot_is_returned_when_the_client_cancels(method):
    async with serving() as served:
        served.runner.gate.clear()
        call = getattr(served.stub, method)(request())
        waiting = asyncio.create_task(anext(aiter(call)) if method == "GenerateStream" else _result(call))
        await asyncio.to_thread(served.runner.stepping.wait, 20)
        waiting.cancel()
        call.cancel()
        await asyncio.wait_for(served.app.calls.wait_until_idle(), 20)
        served.runner.gate.set()
        await served.check_that_everything_is_back()
        assert (
            served.metric("seq2seq_requests_total", model_name="echo", method=method, code="CANCELLED") == 1
        )
        assert served.metric("seq2seq_request_success_total", model_name="echo", finished_reason="abort") == 1
        assert served.metric("seq2seq_wasted_tokens_total", model_name="echo", reason="cancelled") == 1


async def _result(call):
    return await call


async def test_slot_is_returned_when_the_deadline_passes():
    async with serving() as served:
        served.runner.gate.clear()
        await served.channel.channel_ready()  # within its deadline the call has only to reach the engine
        with pytest.raises(aio.AioRpcError) as caught:
            await served.stub.Generate(request(), timeout=1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(served.app.calls.wait_until_idle(), 20)
        served.runner.gate.set()
        await served.check_that_everything_is_back()
        labels = {"model_name": "echo", "method": "Generate", "code": "DEADLINE_EXCEEDED"}
        assert served.metric("seq2seq_requests_total", **labels) == 1
        assert served.metric("seq2seq_request_success_total", model_name="echo", finished_reason="abort") == 1
        assert served.metric("seq2seq_wasted_tokens_total", model_name="echo", reason="deadline") == 1
        assert served.metric("seq2seq_wasted_tokens_total", model_name="echo", reason="cancelled") == 0


async def test_a_failed_step_fails_its_requests_and_no_others():
    async with serving() as served, AsyncClient(served.address) as client:
        served.runner.error = RuntimeError("the device caught fire")
        with pytest.raises(ClientError, match=r"^INTERNAL: the engine failed on the step"):
            await client.generate("abc")
        with pytest.raises(ClientError, match=r"^INTERNAL: the engine failed on the step"):
            async for _ in client.stream("abc"):
                pass
        served.runner.error = None
        assert await client.translate("abc") == "abc"


async def test_a_full_queue_refuses_and_says_when_to_come_again():
    runner = EchoRunner(num_slots=1)
    async with serving(runner, queue=QueueLimits(max_waiting_requests=1)) as served:
        runner.gate.clear()
        first = asyncio.ensure_future(_result(served.stub.Generate(request())))
        await asyncio.to_thread(runner.stepping.wait, 20)
        second = asyncio.ensure_future(_result(served.stub.Generate(request())))
        await served.turns.until(lambda: served.turns.num_submitted == 2)
        with pytest.raises(aio.AioRpcError) as caught:
            await served.stub.Generate(request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0
        async with AsyncClient(served.address) as client:
            with pytest.raises(
                ClientError,
                match="RESOURCE_EXHAUSTED: the queue is full: with this call it would have 2",
            ) as overloaded:
                await client.generate("abc")
            assert overloaded.value.retry_after_seconds > 0
        runner.gate.set()
        await asyncio.gather(first, second)


async def test_many_requests_at_once_each_get_their_own_answer():
    async with serving(EchoRunner(num_slots=3)) as served, AsyncClient(served.address) as client:
        texts = [f"문장 {number}" * (number % 3 + 1) for number in range(40)]
        assert await asyncio.gather(*map(client.translate, texts)) == texts
        ended = served.metric("seq2seq_request_success_total", model_name="echo", finished_reason="stop")
        labels = {"model_name": "echo", "method": "Generate", "code": "OK"}
        assert ended == served.metric("seq2seq_requests_total", **labels) == 40
        tokens = sum(len(text.encode()) + 1 for text in texts)
        assert served.metric("seq2seq_generation_tokens_total", model_name="echo") == tokens
        assert served.metric("seq2seq_prompt_tokens_total", model_name="echo") == tokens
        assert served.metric("seq2seq_step_batch_size_sum", model_name="echo") == tokens
        assert served.metric("seq2seq_time_to_first_token_seconds_count", model_name="echo") == 40
        assert served.metric("seq2seq_inter_token_latency_seconds_count", model_name="echo") == tokens - 40


async def test_models_are_listed_first_one_first_and_found_by_name():
    async with serving(names=("first", "second")) as served:
        listed = await served.stub.ListModels(pb.ListModelsRequest())
        assert [model.name for model in listed.models] == ["first", "second"]
        default = await served.stub.GetModel(pb.GetModelRequest())
        assert default.model == listed.models[0]
        second = (await served.stub.GetModel(pb.GetModelRequest(model="second"))).model
        assert second == listed.models[1]
        assert (second.kind, second.precision, second.version) == ("echo", "fp32", "0123456789ab")
        assert (second.num_slots, second.max_source_length, second.max_target_length) == (4, 64, 64)
        assert dict(second.provenance) == {"preset": "echo"}
        answer = await served.stub.Generate(
            pb.GenerateRequest(model="second", sources=[pb.Source(text="abc")])
        )
        assert answer.model == "second"


async def test_equal_options_of_a_model_are_read_once_until_it_leaves(monkeypatch):
    read = []

    def read_and_count(options, *others, **settings):
        read.append(options.beam_size)
        return read_options(options, *others, **settings)

    monkeypatch.setattr(generation, "read_options", read_and_count)
    async with serving() as served:
        first = [await served.stub.Generate(request("ab", beam_size=size)) for size in (2, 3)]
        again = [await served.stub.Generate(request("ab", beam_size=size)) for size in (2, 3)]
        assert [each.hypotheses for each in again] == [each.hypotheses for each in first]
        assert read == [2, 3]
        events = [event async for event in served.stub.GenerateStream(request("ab", beam_size=2))]
        assert events[-1].result.hypotheses == first[0].hypotheses
        assert read == [2, 3, 2]
        # What is kept refers to the model, which only a collection would free after its end.
        kept = served.model.decodings
        model = served.app.models.remove("echo")
        assert model.decodings is None
        served.app.models.put(model)
        await served.stub.Generate(request("ab", beam_size=2))
        assert model.decodings is kept
        assert read == [2, 3, 2, 2]


async def test_a_model_that_leaves_while_options_are_read_does_not_stay_with_them(monkeypatch):
    async with serving(names=("echo", "other")) as served:
        model = served.model
        kept = model.decodings

        def read_late(*arguments, **settings):
            served.app.models.remove("echo")
            return read_options(*arguments, **settings)

        monkeypatch.setattr(generation, "read_options", read_late)
        assert (await served.stub.Generate(request("ab"))).hypotheses
        served.app.models.put(model)
        assert not any(owner is model for owner, _ in kept._values)


async def test_callers_share_what_was_read_of_their_options_and_not_their_rights(monkeypatch, tmp_path):
    """Each of them had its own, with its own glossary."""
    read = []

    def read_and_count(options, *others, **settings):
        read.append(options.priority)
        return read_options(options, *others, **settings)

    monkeypatch.setattr(generation, "read_options", read_and_count)
    roles = {"one": ["predict"], "two": ["predict"], "root": ["predict", "admin"]}
    file = access_file(tmp_path, *((name, name * 8, *its) for name, its in roles.items()))
    async with serving(access_file=file) as served:
        for priority in (0, -1):
            for name in ("root", "one", "two"):
                bearer = ("authorization", f"Bearer {name * 8}")
                generating = served.stub.Generate(request("ab", priority=priority), metadata=(bearer,))
                if priority < 0 and name != "root":
                    with pytest.raises(aio.AioRpcError, match="below 0 it needs the role admin"):
                        await generating
                else:
                    await generating
        assert read == [0, 0, -1, -1, -1]
        assert [each.caller for each in served.turns.requests] == ["root", "one", "two", "root"]
