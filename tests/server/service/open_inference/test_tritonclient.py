"""Triton's own client, unmodified and in a process of its own, against this server."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.server.service.harness import serving

TEXT = "오늘은 금요일 입니다"
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


def test_it_reads_statistics(seen):
    (stats,) = seen["statistics"]["model_stats"]
    assert int(stats["inference_count"]) >= 5
    assert int(stats["inference_stats"]["success"]["ns"]) > 0


def test_it_unloads_and_loads_models(seen):
    (model,) = seen["index"]["models"]
    assert (model["name"], model["state"]) == ("echo", "READY")
    assert seen["unloaded"] == [False, ["StatusCode.UNAVAILABLE", seen["unloaded"][1][1]]]
    assert seen["loaded"] == [True, [TEXT]]
