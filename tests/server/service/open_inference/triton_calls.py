"""What a user of Triton does, with Triton's own client: run with a server's address and a model's name.

A program of its own, because two stubs of the package `inference` cannot be loaded together. Prints a JSON
object with what it saw.
"""

import json
import queue
import sys
from functools import partial

import numpy as np
import tritonclient.grpc as triton

TEXT = "오늘은 금요일 입니다"

UNSUPPORTED = (
    ("get_trace_settings",),
    ("update_trace_settings",),
    ("get_log_settings",),
    ("update_log_settings", {}),
    ("get_system_shared_memory_status",),
    ("register_system_shared_memory", "a", "/a", 64),
    ("unregister_system_shared_memory",),
    ("get_cuda_shared_memory_status",),
    ("register_cuda_shared_memory", "a", b"aGFuZGxl", 0, 64),
    ("unregister_cuda_shared_memory",),
)


def main(address: str, model: str) -> None:
    client = triton.InferenceServerClient(address)
    seen = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "unknown_ready": client.is_model_ready("nobody"),
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata(model, as_json=True),
        "config": client.get_model_config(model, as_json=True),
        "infer": infer(client, model, [TEXT, "ab"], max_new_tokens=40, min_new_tokens=1),
        "compressed": client.infer(model, [text_input([TEXT])], compression_algorithm="gzip")
        .as_numpy("text_output")[0, 0]
        .decode(),
        "urgent": error_of(lambda: client.infer(model, [text_input([TEXT])], priority=11)),
        "ids": infer_ids(client, model),
        "stream": stream(client, model),
        "timeout": error_of(lambda: infer(client, model, [TEXT] * 200, client_timeout=1e-3)),
        "bad": error_of(lambda: infer(client, model, [TEXT], beam_size=99)),
        "cancelled": cancel(client, model),
        "shared_output": error_of(
            lambda: client.infer(model, [text_input([TEXT])], outputs=[shared_output()])
        ),
        "shared_input": error_of(lambda: client.infer(model, [shared_input()])),
        "classes": error_of(
            lambda: client.infer(
                model,
                [text_input([TEXT])],
                outputs=[triton.InferRequestedOutput("text_output", class_count=3)],
            )
        ),
        "unsupported": [
            error_of(partial(getattr(client, name), *arguments)) for name, *arguments in UNSUPPORTED
        ],
        "methods": [name for name in dir(client) if not name.startswith("_")],
        "statistics": client.get_inference_statistics(model, as_json=True),
        "index": client.get_model_repository_index(as_json=True),
    }
    client.unload_model(model)
    seen["unloaded"] = [client.is_model_ready(model), error_of(lambda: infer(client, model, [TEXT]))]
    client.load_model(model)
    seen["loaded"] = [client.is_model_ready(model), infer(client, model, [TEXT])]
    print(json.dumps(seen))


def infer(client, model, texts, client_timeout=None, **parameters):
    result = client.infer(
        model, [text_input(texts)], request_id="7", parameters=parameters, client_timeout=client_timeout
    )
    assert result.get_response().id == "7"
    return [text.decode() for text in result.as_numpy("text_output")[:, 0]]


def infer_ids(client, model):
    ids = np.array([[50, 51, 2], [60, 2, 0]], np.int64)
    inputs = [
        triton.InferInput("input_ids", ids.shape, "INT64"),
        triton.InferInput("input_lengths", [2], "INT32"),
    ]
    inputs[0].set_data_from_numpy(ids)
    inputs[1].set_data_from_numpy(np.array([3, 2], np.int32))
    outputs = [triton.InferRequestedOutput("output_ids"), triton.InferRequestedOutput("output_lengths")]
    result = client.infer(model, inputs, outputs=outputs)
    assert result.as_numpy("text_output") is None
    lengths = result.as_numpy("output_lengths")[:, 0]
    rows = result.as_numpy("output_ids")[:, 0]
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]


def stream(client, model):
    """Two requests in one stream, one of them refused."""
    answers = queue.Queue()
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, [text_input([TEXT])], request_id="bad", parameters={"beam_size": 99})
    client.async_stream_infer(
        model, [text_input([TEXT])], request_id="good", enable_empty_final_response=True
    )
    pieces, errors, is_final = [], [], False
    while not (is_final and errors):
        result, error = answers.get(timeout=20)
        if error is not None:
            errors.append(error.message())
            continue
        response = result.get_response()
        assert response.id == "good"
        is_final = response.parameters["triton_final_response"].bool_param
        if response.outputs:
            pieces.append(result.as_numpy("text_output")[0, 0].decode())
    client.stop_stream()
    return {"text": "".join(pieces), "num_pieces": len(pieces), "errors": errors}


def cancel(client, model):
    answers = queue.Queue()
    call = client.async_infer(model, [text_input([TEXT])], callback=lambda result, error: answers.put(error))
    call.cancel()
    error = answers.get(timeout=20)
    return error is None or "Cancelled" in str(error) or "CANCELLED" in str(error)


def text_input(texts):
    tensor = triton.InferInput("text_input", [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in texts], object))
    return tensor


def shared_output():
    output = triton.InferRequestedOutput("text_output")
    output.set_shared_memory("region", 64)
    return output


def shared_input():
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_shared_memory("region", 64)
    return tensor


def error_of(call):
    try:
        call()
    except triton.InferenceServerException as error:
        return [str(error.status()), error.message()]
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
