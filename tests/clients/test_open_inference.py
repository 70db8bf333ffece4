"""Clients of Triton and KServe, against a server with a small model of texts and a small Whisper."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from seq2seq_serve.client import Client
from tests.server.service.harness import on_a_thread, serving_bundles
from tests.server.service.test_openai import SOUND

FOLDER = Path(__file__).parent
TEXTS = ["오늘은 금요일 입니다", "ab"]
SOUND_OPTIONS = {"long_source": "sequential", "source_language": "ko"}


@pytest.fixture(scope="module")
def served(bundle_path, whisper_path):
    with on_a_thread(serving_bundles(bundle_path, whisper_path / "bundle")) as served:
        yield served


@pytest.fixture(scope="module")
def expected(served):
    """The targets of the texts, and of the sound, over `seq2seq.v1`."""
    with Client(served.address) as client:
        texts = [
            client.generate(text, model="random", options={"max_new_tokens": 8}).hypotheses[0].text
            for text in TEXTS
        ]
        sound = client.generate(SOUND, model="bundle", options=SOUND_OPTIONS).hypotheses[0].text
    return texts, [sound]


@pytest.fixture(scope="module")
def kserve():
    """A folder with KServe's client, and with what it needs in other versions than the other tests."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    with tempfile.TemporaryDirectory() as folder:
        planned = finished([*pip, "--dry-run", "--report", "-", "kserve"])
        if planned.returncode:
            pytest.skip(f"pip cannot install KServe's client: {planned.stderr[-500:]}")
        missing = [one["metadata"] for one in json.loads(planned.stdout)["install"]]
        versions = [f"{one['name']}=={one['version']}" for one in missing]
        installed = finished([*pip, "--no-deps", "--target", folder, *versions])
        assert installed.returncode == 0, installed.stderr
        yield folder


def finished(command, **variables):
    environment = os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def run(program, *arguments, **variables):
    done = finished([sys.executable, FOLDER / program, *map(str, arguments)], **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def texts_of(answer):
    """The targets, which are bytes in raw contents."""
    texts = answer.as_numpy("text_output").ravel().tolist()
    return [one.decode() if isinstance(one, bytes) else one for one in texts]


def text_input(*, binary_data):
    tensor = triton.InferInput("text_input", [2, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in TEXTS], object), binary_data=binary_data)
    return tensor


@pytest.mark.parametrize(
    ("binary_data", "algorithm"), [(False, None), (True, None), (False, "gzip"), (True, "deflate")]
)
def test_the_client_of_triton_over_http_sends_texts_and_sounds(served, expected, binary_data, algorithm):
    with triton.InferenceServerClient(f"127.0.0.1:{served.app.http.port}") as client:
        answer = client.infer(
            "random",
            [text_input(binary_data=binary_data)],
            outputs=[triton.InferRequestedOutput("text_output", binary_data=binary_data)],
            request_id="7",
            priority=1,
            timeout=60_000_000,
            headers={"x-request-id": "mine"},
            query_params={"source": "test"},
            parameters={"max_new_tokens": 8},
            model_version="1",
            request_compression_algorithm=algorithm,
            response_compression_algorithm=algorithm,
        )
        assert (answer.get_response()["id"], texts_of(answer)) == ("7", expected[0])
        sound = triton.InferInput("sound", [1], "BYTES")
        sound.set_data_from_numpy(np.array([SOUND], object))
        answer = client.infer(
            "bundle", [sound], parameters=SOUND_OPTIONS, request_compression_algorithm=algorithm
        )
        assert texts_of(answer) == expected[1]


def test_a_sequence_of_triton_is_refused_by_its_name(served):
    with (
        triton.InferenceServerClient(f"127.0.0.1:{served.app.http.port}") as client,
        pytest.raises(InferenceServerException, match="no parameter is named 'sequence_"),
    ):
        client.infer("random", [text_input(binary_data=True)], sequence_id=5, sequence_start=True)


def test_the_client_of_triton_over_grpc_sends_texts_and_sounds(served, expected, tmp_path):
    (tmp_path / "speech.wav").write_bytes(SOUND)
    answers = run("triton_calls.py", served.address, "random", "bundle", tmp_path / "speech.wav")
    assert answers == list(expected)


def test_the_clients_of_kserve_send_texts_in_each_of_their_forms(served, expected, kserve):
    url = f"http://127.0.0.1:{served.app.http.port}"
    seen = run("kserve_calls.py", url, served.address, "random", PYTHONPATH=kserve)
    assert (seen.pop("ready"), seen.pop("ready over gRPC")) == ([True, True], [True, True])
    assert seen == dict.fromkeys(["listed", "typed", "raw", "listed over gRPC", "raw over gRPC"], expected[0])
