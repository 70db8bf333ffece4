"""Triton's own clients, unmodified, against this server; the one for gRPC in a process of its own."""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tritonclient import http as triton

from tests.server.service.harness import serving, serving_on_a_thread

TEXT = "오늘은 금요일 입니다"
KINDS = ("traces", "traces", "the log", "the log")
PROGRAM = Path(__file__).with_name("triton_calls.py")


@pytest.fixture(scope="module")
def seen():
    async def run():
        async with serving(is_repository_open=True) as served:
            process = await asyncio.create_subprocess_exec(
                sys.executable, PROGRAM, served.address, "echo", stdout=asyncio.subprocess.PIPE
            )
            output, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
            return json.loads(output)

    return asyncio.run(run())


def test_it_sees_server_and_model(seen):
    assert (seen["live"], seen["ready"], seen["model_ready"], seen["unknown_ready"]) == (True,) * 3 + (False,)
    assert seen["server"]["name"] == "seq2seq-serve"
    assert seen["metadata"]["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": ["-1"]}
    assert seen["config"]["config"]["model_transaction_policy"] == {"decoupled": True}


def test_it_infers_texts_and_token_ids(seen):
    assert seen["infer"] == [TEXT, "ab"]
    assert seen["compressed"] == TEXT
    assert seen["ids"] == [[50, 51], [60]]


def test_it_streams_pieces_past_a_refused_request(seen):
    assert seen["stream"]["text"] == TEXT
    assert seen["stream"]["num_pieces"] >= 2
    assert len(seen["stream"]["errors"]) == 1
    assert "beam_size is 99" in seen["stream"]["errors"][0]


def test_it_gets_statuses_for_what_goes_wrong(seen):
    assert seen["timeout"][0] == "StatusCode.DEADLINE_EXCEEDED"
    assert seen["bad"][0] == "StatusCode.INVALID_ARGUMENT"
    assert "priority is 11, and must be from -10 to 10" in seen["urgent"][1]
    assert seen["cancelled"]


def test_it_unloads_and_loads_models(seen):
    (model,) = seen["index"]["models"]
    assert (model["name"], model["state"]) == ("echo", "READY")
    assert seen["unloaded"] == [False, ["StatusCode.UNAVAILABLE", seen["unloaded"][1][1]]]
    assert seen["loaded"] == [True, [TEXT]]


def test_shared_memory_and_classes_are_refused(seen):
    """An output in shared memory was silently ignored."""
    assert seen["shared_output"] == ["StatusCode.INVALID_ARGUMENT", "shared memory is not supported"]
    assert seen["shared_input"] == ["StatusCode.INVALID_ARGUMENT", "shared memory is not supported"]
    code, text = seen["classes"]
    assert (code, text) == ("StatusCode.INVALID_ARGUMENT", "the parameter 'classification' is not supported")


def test_every_method_over_grpc_is_answered_or_refused_in_clear_words(seen):
    """Registrations ended with "Method not found!"."""
    settings = [["StatusCode.UNIMPLEMENTED", f"settings of {what} are not supported"] for what in KINDS]
    memory = ["StatusCode.UNIMPLEMENTED", "shared memory is not supported"]
    assert seen["unsupported"] == settings + [memory] * 6
    streams = {"async_stream_infer", "start_stream", "stop_stream"}
    over_http = {name for name in dir(triton.InferenceServerClient) if not name.startswith("_")}
    assert set(seen["methods"]) == streams | over_http - {"generate_request_body", "parse_response_body"}


@pytest.fixture
def client():
    with serving_on_a_thread(is_repository_open=True) as served:
        client = triton.InferenceServerClient(f"127.0.0.1:{served.app.http.port}")
        yield client
        client.close()


def text_input() -> triton.InferInput:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([TEXT.encode()], object))
    return tensor


def shared_output() -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput("text_output")
    output.set_shared_memory("region", 64)
    return output


def shared_input() -> triton.InferInput:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_shared_memory("region", 64)
    return tensor


def text_of(result: triton.InferResult) -> str:
    return result.as_numpy("text_output")[0, 0].decode()


def is_unloaded_and_loaded(client) -> bool:
    client.unload_model("echo", unload_dependents=True)
    is_gone = not client.is_model_ready("echo")
    client.load_model("echo")
    return is_gone and client.is_model_ready("echo")


SUPPORTED = {
    "is_server_live": lambda client: client.is_server_live(),
    "is_server_ready": lambda client: client.is_server_ready(),
    "is_model_ready": lambda client: (
        client.is_model_ready("echo", "1")
        and not client.is_model_ready("echo", "2")
        and not client.is_model_ready("nobody")
    ),
    "get_server_metadata": lambda client: client.get_server_metadata()["name"] == "seq2seq-serve",
    "get_model_metadata": lambda client: client.get_model_metadata("echo")["name"] == "echo",
    "get_model_config": lambda client: client.get_model_config("echo")["config"]["name"] == "echo",
    "get_inference_statistics": lambda client: (
        [one["name"] for one in client.get_inference_statistics()["model_stats"]] == ["echo"]
        and client.get_inference_statistics("echo") == client.get_inference_statistics()
    ),
    "infer": lambda client: text_of(client.infer("echo", [text_input()])) == TEXT,
    "async_infer": lambda client: (
        text_of(client.async_infer("echo", [text_input()]).get_result(timeout=20)) == TEXT
    ),
    "get_model_repository_index": lambda client: (
        [(one["name"], one["state"]) for one in client.get_model_repository_index()] == [("echo", "READY")]
    ),
    "load_model": is_unloaded_and_loaded,
    "unload_model": is_unloaded_and_loaded,
}
REFUSED = {
    "get_trace_settings": lambda client: client.get_trace_settings(),
    "update_trace_settings": lambda client: client.update_trace_settings(),
    "get_log_settings": lambda client: client.get_log_settings(),
    "update_log_settings": lambda client: client.update_log_settings({}),
    "get_system_shared_memory_status": lambda client: client.get_system_shared_memory_status(),
    "register_system_shared_memory": lambda client: client.register_system_shared_memory("a", "/a", 64),
    "unregister_system_shared_memory": lambda client: client.unregister_system_shared_memory(),
    "get_cuda_shared_memory_status": lambda client: client.get_cuda_shared_memory_status(),
    "register_cuda_shared_memory": lambda client: client.register_cuda_shared_memory("a", b"handle", 0, 64),
    "unregister_cuda_shared_memory": lambda client: client.unregister_cuda_shared_memory(),
}
# Methods that send nothing.
LOCAL = {
    "close",
    "generate_request_body",
    "parse_response_body",
    "plugin",
    "register_plugin",
    "unregister_plugin",
}


def test_every_method_over_http_is_answered_or_refused_in_clear_words(client):
    known = {name for name in dir(triton.InferenceServerClient) if not name.startswith("_")}
    assert known == SUPPORTED.keys() | REFUSED.keys() | LOCAL
    assert {name for name, call in SUPPORTED.items() if not call(client)} == set()
    for call in REFUSED.values():
        with pytest.raises(
            triton.InferenceServerException, match="shared memory, traces and log settings are not supported"
        ):
            call(client)


@pytest.mark.parametrize(
    ("inputs", "arguments", "text"),
    [
        (text_input, {"outputs": [shared_output()]}, "shared memory is not supported"),
        (shared_input, {}, "shared memory is not supported"),
        (
            text_input,
            {"outputs": [triton.InferRequestedOutput("text_output", class_count=3)]},
            "'classification' is not supported",
        ),
        (text_input, {"sequence_id": 7, "sequence_start": True}, "no parameter is named 'sequence_"),
    ],
)
def test_arguments_over_http_are_not_ignored(client, inputs, arguments, text):
    with pytest.raises(triton.InferenceServerException, match=text):
        client.infer("echo", [inputs()], **arguments)


def test_models_over_http_are_loaded_by_their_versions_only(client):
    client.load_model("echo")
    for parameters in ({"config": "{}"}, {"files": {"file:1/model.onnx": b"octets"}}):
        with pytest.raises(triton.InferenceServerException, match="' is unknown or has no value"):
            client.load_model("echo", **parameters)
    with pytest.raises(triton.InferenceServerException, match="no bundle of a model named 'nobody'"):
        client.load_model("nobody")


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_requests_and_answers_over_http_may_be_compressed(client, algorithm):
    tensor = triton.InferInput("text_input", [8], "BYTES")
    tensor.set_data_from_numpy(np.array([TEXT.encode()] * 8, object))
    plain = client.infer("echo", [tensor])
    answer = client.infer(
        "echo",
        [tensor],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
        model_version="1",
    )
    assert answer.get_response() == plain.get_response()
    for name in ("text_output", "output_ids"):
        np.testing.assert_array_equal(answer.as_numpy(name), plain.as_numpy(name))
