"""Calls a server with KServe's clients: run with the addresses of a server, and a model's name.

A program of its own, because two stubs of the package `inference` cannot be loaded together. Prints a JSON
object with what it saw.
"""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput

TEXTS = ["오늘은 금요일 입니다", "ab"]


def requests(model):
    """Requests of the same texts, in each form that the client has."""
    listed = InferInput("text_input", [2], "BYTES", TEXTS)
    typed = InferInput("text_input", [2, 1], "BYTES", [[text] for text in TEXTS], {"content_type": "str"})
    raw = InferInput("text_input", [2], "BYTES")
    raw.set_data_from_numpy(np.array([text.encode() for text in TEXTS], object), binary_data=True)
    output = RequestedOutput("text_output", {"binary_data": True})
    options = {"max_new_tokens": 8}
    yield "listed", InferRequest(model, [listed], parameters=options)
    yield "typed", InferRequest(model, [typed], request_id="7", parameters=options | {"content_type": "str"})
    yield "raw", InferRequest(model, [raw], parameters=options, request_outputs=[output])


def seen(answer):
    [text] = [output for output in answer.outputs if output.name == "text_output"]
    return [one.decode() if isinstance(one, bytes) else one for one in text.as_numpy().ravel().tolist()]


async def main(url, address, model):
    rest, grpc = InferenceRESTClient(RESTConfig(protocol="v2")), InferenceGRPCClient(address)
    found = {
        "ready": [await rest.is_server_ready(url), await rest.is_model_ready(url, model)],
        "ready over gRPC": [await grpc.is_server_ready(), await grpc.is_model_ready(model)],
    }
    for name, request in requests(model):
        found[name] = seen(await rest.infer(url, request, model_name=model))
    for name, request in requests(model):
        if name != "typed":  # over gRPC its lists must be flat
            found[f"{name} over gRPC"] = seen(await grpc.infer(request))
    print(json.dumps(found))


asyncio.run(main(*sys.argv[1:]))
