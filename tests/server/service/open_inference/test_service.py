"""The Open Inference Protocol, spoken with stubs of our own; `test_tritonclient` speaks it with Triton's."""

import asyncio
import json
import struct
import time

import grpc
import pytest
from grpc import aio

from seq2seq_serve.bundle.tokenizer import Tokenizer
from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos import seq2seq_v1_pb2 as seq2seq
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.server.config import QueueLimits
from seq2seq_serve.server.service import calls
from tests.server.service.harness import EchoRunner, serving

KOREAN = "오늘은 금요일 입니다"


def parameter(value) -> pb.InferParameter:
    kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
    return pb.InferParameter(**{kind: value})


def infer_request(*texts: str, outputs=(), is_raw=False, **parameters) -> pb.ModelInferRequest:
    """With typed contents, or raw ones."""
    elements = [text.encode() for text in texts]
    message = pb.ModelInferRequest(
        model_name="echo",
        id="mine",
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs],
        parameters={name: parameter(value) for name, value in parameters.items()},
    )
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    if is_raw:
        raw = b"".join(struct.pack("<I", len(element)) + element for element in elements)
        message.raw_input_contents.append(raw)
    else:
        tensor.contents.bytes_contents.extend(elements)
    return message


def typed(response: pb.ModelInferResponse) -> dict[str, tuple[list[int], list]]:
    """Shape and elements of every output with typed contents."""
    tensors = {}
    for output in response.outputs:
        ((_, elements),) = output.contents.ListFields() or [(None, [])]
        tensors[output.name] = (list(output.shape), list(elements))
    return tensors


def stub_of(served) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(served.channel)


async def test_several_rows_of_text_are_answered_in_order():
    async with serving() as served:
        response = await stub_of(served).ModelInfer(infer_request("ab", KOREAN, "c"))
        assert (response.model_name, response.model_version) == ("echo", served.model.version)
        assert response.id == "mine"
        tensors = typed(response)
        assert tensors["text_output"] == ([3, 1], [b"ab", KOREAN.encode(), b"c"])
        assert tensors["finish_reason"] == ([3, 1], [b"eos"] * 3)
        length = len(KOREAN.encode())
        assert tensors["output_lengths"] == ([3, 1], [2, length, 1])
        shape, ids = tensors["output_ids"]
        assert shape == [3, 1, length]
        assert ids[2:length] == [0] * (length - 2)
        assert tensors.keys() == {"text_output", "output_ids", "output_lengths", "finish_reason"}


async def test_all_rows_share_the_constraints_of_their_parameters():
    """A thousand suppressed ids for each of 256 rows took memory and time as often."""
    async with serving() as served:
        await stub_of(served).ModelInfer(infer_request("ab", "c", "d", suppressed_token_ids="[200, 201]"))
        first, *others = [request.constraints for request in served.turns.requests]
        assert first.suppressed_token_ids == {200, 201}
        assert len(others) == 2
        assert all(one is first for one in others)


async def test_parameters_are_the_options_of_generation():
    async with serving() as served:
        stub = stub_of(served)
        short = await stub.ModelInfer(infer_request("abcd", max_new_tokens=2))
        assert typed(short)["text_output"][1] == [b"ab"]
        assert typed(short)["finish_reason"][1] == [b"length"]
        stopped = await stub.ModelInfer(infer_request("abcd", stop_sequences=json.dumps(["c", "d"])))
        assert typed(stopped)["text_output"][1] == [b"ab"]
        assert typed(stopped)["finish_reason"][1] == [b"stop"]
        assert typed(await stub.ModelInfer(infer_request("abcd", stop_sequences="cd")))["text_output"][1] == [
            b"ab"
        ]
        scored = typed(await stub.ModelInfer(infer_request("ab", log_probabilities=True)))
        assert scored["log_probabilities"] == ([1, 1, 3], [-0.5] * 3)
        assert scored["score"] == ([1, 1], [-1.5])
        asked = typed(await stub.ModelInfer(infer_request("ab", outputs=["score"])))
        assert asked == {"score": ([1, 1], [-1.5])}
        for terms in ("c d=Katze", '{"c d": "Katze"}'):
            required = typed(await stub.ModelInfer(infer_request("ab c d", terms=terms)))
            assert b"Katze" in required["text_output"][1][0]
        prefixed = typed(await stub.ModelInfer(infer_request("abc", target_prefix="a")))
        assert prefixed["text_output"][1] == [b"abc"]


BAD = [
    (lambda m: m.inputs.add().CopyFrom(m.inputs[0]), "two inputs are named"),
    (lambda m: setattr(m.inputs[0], "datatype", "FP8"), "must be one of INT64"),
    (lambda m: m.ClearField("inputs"), "the inputs are missing"),
    (lambda m: m.inputs[0].shape.__setitem__(0, 7), "has 7 elements, and 2"),
    (lambda m: m.inputs[0].shape.extend([2**62, 2**62]), "at most 256 elements of BYTES"),
    (lambda m: setattr(m, "id", "x" * 129), "the id has 129 characters"),
    (
        lambda m: m.parameters["logit_bias"].CopyFrom(parameter('{"5": ' + "9" * 400 + "}")),
        "logit_bias is the string .*, and must be a string of biases by token id",
    ),
    (lambda m: m.parameters["target_prefix"].CopyFrom(parameter("x" * 70_000)), "has 70000 characters"),
    (
        lambda m: m.parameters["triton_enable_empty_final_response"].CopyFrom(parameter("false")),
        "must be true or false",
    ),
    (lambda m: m.inputs[0].shape.extend([1, 1]), r"must have \[rows\] or \[rows, 1\]"),
    (lambda m: m.inputs[0].contents.int64_contents.append(1), "belong in bytes_contents, and int64_contents"),
    (lambda m: m.inputs[0].shape.extend([1] * 40), "at most 8 axes"),
    (lambda m: m.raw_input_contents.append(b""), "are both set"),
    (lambda m: m.inputs[0].contents.bytes_contents.__setitem__(1, b"\xff"), "row 1 .* is not UTF-8"),
    (lambda m: m.outputs.add(name="logits"), "no output is named 'logits'"),
    (lambda m: m.parameters["seed"].SetInParent(), "has no value"),
    (
        lambda m: m.parameters["beam_size"].CopyFrom(parameter("four")),
        'beam_size is the string "four", and must be a 64-bit integer',
    ),
    (lambda m: m.parameters["timeout"].CopyFrom(parameter(-1)), "must be a number of microseconds"),
    (lambda m: m.parameters["beam_size"].CopyFrom(parameter(99)), "beam_size is 99, and must be from 1 to 4"),
]


async def test_a_wrong_tensor_parameter_or_output_is_refused_with_the_reason():
    async with serving() as served:
        for change, expected in BAD:
            message = infer_request("ab", "c")
            change(message)
            with pytest.raises(grpc.aio.AioRpcError, match=expected) as caught:
                await stub_of(served).ModelInfer(message)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("options", "num_cut", "expected"),
    [
        ({}, 3, "the call has 3 requests, and at most 2 may wait"),
        ({"num_hypotheses": 4}, 1, "the answer would"),
    ],
)
async def test_no_more_texts_are_cut_of_a_call_that_is_refused(monkeypatch, options, num_cut, expected):
    """All rows were cut into tokens before anything was added up."""
    texts = []

    def counted(self, text, *given, inner=Tokenizer.encode_truncated):
        texts.append(text)
        return inner(self, text, *given)

    monkeypatch.setattr(Tokenizer, "encode_truncated", counted)
    monkeypatch.setattr("seq2seq_serve.server.service.calls.MAX_ANSWER_BYTES", 4000)
    async with serving(queue=QueueLimits(max_waiting_requests=2)) as served:
        with pytest.raises(grpc.aio.AioRpcError, match=expected):
            await stub_of(served).ModelInfer(infer_request(*"abcdefgh", **options))
        assert len(texts) == num_cut


async def test_a_raw_input_may_have_its_size_as_a_parameter():
    """The requests of KServe's client, which sends it by default, were refused."""
    async with serving() as served:
        message = infer_request("ab", is_raw=True)
        size = len(message.raw_input_contents[0])
        message.inputs[0].parameters["binary_data_size"].CopyFrom(parameter(size))
        response = await stub_of(served).ModelInfer(message)
        assert response.raw_output_contents[0] == message.raw_input_contents[0]
        message.inputs[0].parameters["binary_data_size"].CopyFrom(parameter(size - 1))
        with pytest.raises(grpc.aio.AioRpcError, match="'binary_data_size' is not supported"):
            await stub_of(served).ModelInfer(message)


async def test_an_input_may_have_its_type_and_an_output_its_form_as_a_parameter():
    async with serving() as served:
        message = infer_request("ab", outputs=["text_output"])
        message.inputs[0].parameters["content_type"].CopyFrom(parameter("str"))
        message.outputs[0].parameters["binary_data"].CopyFrom(parameter(False))
        response = await stub_of(served).ModelInfer(message)
        assert typed(response)["text_output"] == ([1, 1], [b"ab"])
        message.inputs[0].parameters["content_type"].CopyFrom(parameter("base64"))
        with pytest.raises(grpc.aio.AioRpcError, match="text_input is 'base64': send str, or leave it out"):
            await stub_of(served).ModelInfer(message)


async def test_raw_bytes_that_end_too_early_are_refused():
    async with serving() as served:
        for raw in (b"\x01", b"\x05\x00\x00\x00ab", b"\xff\xff\xff\xff"):
            message = infer_request("ab", is_raw=True)
            message.raw_input_contents[0] = raw
            with pytest.raises(grpc.aio.AioRpcError, match="end inside an element"):
                await stub_of(served).ModelInfer(message)


async def test_an_unknown_model_or_version_is_not_found_and_not_ready():
    async with serving() as served:
        stub = stub_of(served)
        for name, version in (("nobody", ""), ("echo", "7")):
            message = infer_request("ab")
            message.model_name, message.model_version = name, version
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(message)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            ready = await stub.ModelReady(pb.ModelReadyRequest(name=name, version=version))
            assert not ready.ready
        known = pb.ModelReadyRequest(name="echo", version=served.model.version)
        assert (await stub.ModelReady(known)).ready


async def streamed(stub, *messages, metadata=None):
    stream = stub.ModelStreamInfer(iter(messages), metadata=metadata)
    return [response async for response in stream]


def text_of(responses) -> str:
    return b"".join(typed(one.infer_response)["text_output"][1][0] for one in responses).decode()


async def test_a_stream_answers_with_a_response_a_piece_and_says_which_is_the_last():
    async with serving() as served:
        responses = await streamed(stub_of(served), infer_request(KOREAN))
        assert len(responses) >= 2
        assert text_of(responses) == KOREAN
        finals = [one.infer_response.parameters["triton_final_response"].bool_param for one in responses]
        assert finals == [False] * (len(responses) - 1) + [True]
        assert typed(responses[-1].infer_response)["finish_reason"] == ([1, 1], [b"eos"])
        assert all(one.infer_response.id == "mine" for one in responses)


async def test_a_refused_request_ends_the_stream_where_the_caller_wants_that():
    async with serving() as served:
        with pytest.raises(grpc.aio.AioRpcError, match="beam_size is 99") as caught:
            await streamed(
                stub_of(served),
                infer_request("ab", beam_size=99),
                metadata=[("triton_grpc_error", "true")],
            )
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_stream_gives_its_slots_back():
    runner = EchoRunner()
    async with serving(runner) as served:
        runner.gate.clear()
        stream = stub_of(served).ModelStreamInfer(iter([infer_request("ab"), infer_request("cd")]))
        reading = asyncio.ensure_future(stream.read())
        await served.turns.until(lambda: served.turns.num_submitted == 2)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        runner.gate.set()
        await served.check_that_everything_is_back()


async def test_a_timeout_of_the_request_ends_it():
    runner = EchoRunner()
    async with serving(runner) as served:
        runner.gate.clear()
        await served.channel.channel_ready()
        asking = stub_of(served).ModelInfer(infer_request("ab", timeout=500_000))
        while not (served.turns.requests or asking.done()):  # done, if it took that long to arrive
            await asyncio.sleep(0.01)
        for seen in served.turns.requests:
            assert seen.deadline - time.monotonic() <= 0.5
            await asyncio.sleep(max(0.0, seen.deadline - time.monotonic()))
        runner.gate.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_an_idle_stream_does_not_hold_up_the_end_of_the_server():
    async with serving(drain_seconds=20.0) as served:
        stream = stub_of(served).ModelStreamInfer()
        await stream.write(infer_request("ab"))
        while not (await stream.read()).infer_response.parameters["triton_final_response"].bool_param:
            pass
        await asyncio.wait_for(served.app.drain(), 15)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_has_all_its_answers_ends_well_while_the_server_drains():
    runner = EchoRunner()
    async with serving(runner, drain_seconds=20.0) as served:
        runner.gate.clear()
        stream = stub_of(served).ModelStreamInfer(iter([infer_request("ab")]))
        await served.turns.until(lambda: served.turns.num_submitted == 1)
        await asyncio.sleep(0.5)  # for the caller's half of the stream to be closed, which nothing reports
        draining = asyncio.create_task(served.app.drain())
        runner.gate.set()
        assert text_of([response async for response in stream]) == "ab"
        await draining


async def test_metadata_and_configuration_name_the_tensors_that_requests_have():
    async with serving() as served:
        stub = stub_of(served)
        server = await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert server.name == "seq2seq-serve"
        assert "model_repository" in server.extensions
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="echo"))
        assert list(metadata.versions) == [served.model.version]
        request = infer_request("ab", outputs=[output.name for output in metadata.outputs])
        response = await stub.ModelInfer(request)
        for told, output in zip(metadata.outputs, response.outputs, strict=True):
            assert (told.name, told.datatype) == (output.name, output.datatype)
            assert len(told.shape) == len(output.shape)
        assert [one.name for one in metadata.inputs] == ["text_input", "input_ids", "input_lengths"]
        config = (await stub.ModelConfig(pb.ModelConfigRequest(name="echo"))).config
        assert [one.name for one in config.output] == [one.name for one in metadata.outputs]
        assert config.model_transaction_policy.decoupled
        assert config.parameters["max_source_length"].string_value == "64"


async def test_statistics_add_up():
    async with serving() as served:
        stub = stub_of(served)
        await stub.ModelInfer(infer_request("ab"))
        await stub.ModelInfer(infer_request("cd"))
        served.runner.error = RuntimeError("broken")
        with pytest.raises(grpc.aio.AioRpcError, match="the engine failed"):
            await stub.ModelInfer(infer_request("a"))
        served.runner.error = None
        await served.until_calls_are_over()
        for name in ("", "echo"):
            answer = await stub.ModelStatistics(pb.ModelStatisticsRequest(name=name))
            (its,) = answer.model_stats
            assert (its.name, its.inference_count) == ("echo", 2)
            stats = its.inference_stats
            assert stats.success.count == 2
            assert stats.fail.count >= 1
            assert stats.success.ns > stats.compute_infer.ns > 0
            assert its.execution_count == sum(one.compute_infer.count for one in its.batch_stats) >= 6
            assert its.last_inference > 1.7e12


class _SlowRunner(EchoRunner):
    """Takes so long that some request is always running."""

    def step(self, rows, num_steps=1):
        time.sleep(0.005)
        return super().step(rows)


async def test_loading_anew_under_load_fails_no_call_and_stops_the_old_engine():
    async with serving(_SlowRunner(), is_repository_open=True) as served:
        stub = stub_of(served)
        stopping = asyncio.Event()
        num_calls = 0

        async def ask_again_and_again() -> None:
            nonlocal num_calls
            while not stopping.is_set():
                answer = await stub.ModelInfer(infer_request("abc", "d"))
                assert typed(answer)["text_output"][1] == [b"abc", b"d"]
                assert "".join([piece async for piece in pieces()]) == "abc"
                num_calls += 2

        async def pieces():
            async for one in served.stub.GenerateStream(
                seq2seq.GenerateRequest(sources=[seq2seq.Source(text="abc")])
            ):
                yield one.piece.text

        callers = [asyncio.create_task(ask_again_and_again()) for _ in range(8)]
        engines = []
        for _ in range(5):
            engines.append(served.model.engine)
            await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="echo"))
            assert served.model.engine is not engines[-1]
            enough = num_calls + 50  # each caller asks the new engine, too
            while num_calls < enough and not any(caller.done() for caller in callers):
                await asyncio.sleep(0.01)
        stopping.set()
        await asyncio.gather(*callers)
        while served.app.repository._ending:
            await asyncio.sleep(0.01)
        assert not any(engine.cores[0]._core._thread.is_alive() for engine in engines)


@pytest.mark.parametrize(("first", "second"), [("", "echo"), ("echo", "")])
async def test_both_numberings_of_the_repository_calls_are_understood(first, second):
    """Triton has the model's name in field 2, KServe in field 1, and answers with it."""
    async with serving(is_repository_open=True) as served:
        stub = stub_of(served)
        load = pb.RepositoryModelLoadRequest(repository_name=first, model_name=second)
        loaded = await stub.RepositoryModelLoad(load)
        assert (loaded.model_name, loaded.is_loaded) == ("echo", True)
        unload = pb.RepositoryModelUnloadRequest(repository_name=first, model_name=second)
        assert (await stub.RepositoryModelUnload(unload)).is_unloaded
        await stub.RepositoryModelLoad(load)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_name": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ({}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"repository_name": "other", "model_name": "echo"}, grpc.StatusCode.INVALID_ARGUMENT),
        (
            {"model_name": "echo", "parameters": {"file:1/x": pb.ModelRepositoryParameter(bytes_param=b"")}},
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            {"model_name": "echo", "parameters": {"version": pb.ModelRepositoryParameter(int64_param=3)}},
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
async def test_loading_a_model_or_files_that_are_not_there_is_refused(change, code):
    async with serving(is_repository_open=True) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(served).RepositoryModelLoad(pb.RepositoryModelLoadRequest(**change))
        assert caught.value.code() is code


async def test_requests_that_wait_in_streams_are_bounded(monkeypatch):
    """480 streams of 4 MiB took 1.4 GB: only those of unary calls counted."""
    message = infer_request("abc")
    monkeypatch.setattr(calls, "_MAX_HELD_BYTES", message.ByteSize() * 3 // 2)
    async with serving() as served:
        served.runner.gate.clear()
        stub = GRPCInferenceServiceStub(served.channel)
        waiting, refused = stub.ModelStreamInfer(), stub.ModelStreamInfer()
        await waiting.write(message)
        await served.turns.until(lambda: served.turns.num_submitted == 1)
        await refused.write(message)
        assert (
            f"large requests and answers of {message.ByteSize()} bytes are open"
            in (await refused.read()).error_message
        )
        served.runner.gate.set()
        for stream in (waiting, refused):
            await stream.done_writing()
            while await stream.read() is not aio.EOF:
                pass
        await served.until_calls_are_over()
        assert not served.app.calls.held.held
