"""Calls a server with Triton's gRPC client: run with an address, two models' names and a sound.

A program of its own, because two stubs of the package `inference` cannot be loaded together. Prints a JSON
object with what it saw.
"""

import json
import sys
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton


def main(address, text_model, sound_model, path):
    client = triton.InferenceServerClient(address)
    texts = triton.InferInput("text_input", [2, 1], "BYTES")
    texts.set_data_from_numpy(np.array([["오늘은 금요일 입니다".encode()], [b"ab"]], object))
    sound = triton.InferInput("sound", [1], "BYTES")
    sound.set_data_from_numpy(np.array([Path(path).read_bytes()], object))
    answers = [
        client.infer(
            text_model,
            [texts],
            outputs=[triton.InferRequestedOutput("text_output")],
            request_id="7",
            priority=1,
            timeout=60_000_000,
            headers={"x-request-id": "mine"},
            parameters={"max_new_tokens": 8},
        ),
        client.infer(sound_model, [sound], parameters={"long_source": "sequential", "source_language": "ko"}),
    ]
    print(json.dumps([[one.decode() for one in each.as_numpy("text_output").ravel()] for each in answers]))


main(*sys.argv[1:])
