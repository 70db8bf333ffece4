"""OpenAI's clients in two languages transcribe a live sound, with a small Whisper."""

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import pytest
import trustme
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from seq2seq_serve.server.config import OpenAINames
from tests.clients.npm import install
from tests.server.runner.test_voice_activity import needs_model, quiet, vowels
from tests.server.service.harness import access_file, on_a_thread, serving_bundles
from tests.server.service.seq2seq.test_windows import noise
from tests.server.service.test_realtime import COMPLETED, DELTA, pcm

PROGRAM = Path(__file__).with_name("realtime_calls.mjs")
PAGE = (Path(__file__).parents[2] / "docs" / "speech.md").read_text(encoding="utf-8")
SOUND = pcm(noise(0.9))  # 0.6 seconds at the rate of the API


@pytest.fixture(scope="module")
def port(whisper_path):
    server = serving_bundles(whisper_path / "bundle", openai_names=OpenAINames.ANY)
    with on_a_thread(server) as served:
        yield served.app.http.port


def check(events: list[dict]) -> list[str]:
    """The transcripts, each of which is its joined deltas; all events have the types of OpenAI's client."""
    joined: dict[str, str] = {}
    transcripts = []
    for event in events:
        TypeAdapter(RealtimeServerEvent).validate_python(event)
        if event["type"] == DELTA:
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
        if event["type"] == COMPLETED:
            assert event["transcript"] == joined.get(event["item_id"], "")
            transcripts.append(event["transcript"])
    return transcripts


async def talk(connection, session, sound, is_complete):
    """The events of a session that transcribes a sound."""
    await connection.session.update(session=session)
    for first in range(0, len(sound), 4800):
        audio = base64.b64encode(sound[first : first + 4800]).decode()
        await connection.input_audio_buffer.append(audio=audio)
    await connection.input_audio_buffer.commit()
    events = []
    async with asyncio.timeout(30):
        async for event in connection:
            events.append(event.model_dump(exclude_unset=True))
            assert event.type != "error", event
            if is_complete([one["type"] for one in events]):
                break
    return events


async def test_the_client_of_python_commits_turns(port):
    async with (
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any") as client,
        client.realtime.connect(extra_query={"intent": "transcription"}) as connection,
    ):
        transcription = {"model": "gpt-4o-transcribe", "language": "ko"}
        audio_input = {"transcription": transcription, "turn_detection": None}
        session = {"type": "transcription", "audio": {"input": audio_input}}
        events = await talk(connection, session, SOUND, lambda kinds: COMPLETED in kinds)
        [text] = check(events)
        assert text
        assert [event["type"] for event in events if event["type"] != DELTA] == [
            "session.created",
            "session.updated",
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
            COMPLETED,
        ]


@needs_model
async def test_the_client_of_python_sends_speech(port):
    def is_complete(kinds):
        return kinds.count("input_audio_buffer.speech_stopped") + 1 == kinds.count(COMPLETED)

    sound = pcm(np.repeat(np.concatenate([quiet(0.5), vowels(0), quiet(1)]), 2))[: 6 * 48_000]
    async with (
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any") as client,
        client.realtime.connect(model="whisper-1") as connection,
    ):
        detection = {"type": "server_vad", "threshold": 0.4, "silence_duration_ms": 300}
        audio_input = {"transcription": {"language": "ko"}, "turn_detection": detection}
        session = {"type": "transcription", "audio": {"input": audio_input}}
        events = await talk(connection, session, sound, is_complete)
        assert check(events)[-1] == ""
        await connection.send({"type": "response.create", "event_id": "mine"})
        error = (await connection.recv()).error
        assert (error.type, error.event_id, error.param) == ("invalid_request_error", "mine", "type")


async def test_the_client_of_python_reads_the_status_of_a_refusal(tmp_path, whisper_path):
    file = access_file(tmp_path, ("shop", "secret", "predict"))
    async with serving_bundles(whisper_path / "bundle", access_file=file) as served:
        url = f"http://127.0.0.1:{served.app.http.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong") as client:
            with pytest.raises(Exception, match="401"):
                await client.realtime.connect(model="whisper-1").enter()
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="secret") as client,
            client.realtime.connect(model="whisper-1") as connection,
        ):
            assert (await connection.recv()).type == "session.created"


@pytest.fixture(scope="module")
def node(port, tmp_path_factory):
    """Runs a call of the client for JavaScript, as npm installs it."""
    folder = tmp_path_factory.mktemp("npm")
    install(folder, PROGRAM, "openai@7", "ws@8")
    (folder / "speech.pcm").write_bytes(SOUND)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "certificate.pem")

    def call(name):
        command = ["node", PROGRAM.name, str(port), "certificate.pem", "key.pem", "speech.pcm", name]
        environment = os.environ | {"NODE_EXTRA_CA_CERTS": str(folder / "authority.pem")}
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=60, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    call.folder = folder
    return call


@pytest.mark.parametrize("name", ["ws", "websocket"])
def test_the_client_of_javascript_transcribes(node, name):
    events = node(name)
    assert [event["type"] for event in events][:2] == ["session.created", "session.updated"]
    [text] = check(events)
    assert text


def programs() -> list[str]:
    """The programs of the page, in Python and in JavaScript, for a small Whisper that hears Korean."""
    section = PAGE.split("### OpenAI's Realtime API\n", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"```(?:python|javascript)\n(.*?)```", section, flags=re.DOTALL)
    return [program.replace('"en"', '"ko"') for program in found]


def test_the_program_in_python_prints_what_is_said(port, tmp_path):
    program, _ = programs()
    (tmp_path / "talk.pcm").write_bytes(SOUND)
    command = [sys.executable, "-c", program.replace("9464", str(port))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_program_in_javascript_prints_what_is_said(port, node):
    _, program = programs()
    (node.folder / "talk.pcm").write_bytes(SOUND)
    (node.folder / "talk.mjs").write_text(program.replace("9464", str(port)))
    command = ["node", "talk.mjs"]
    done = subprocess.run(command, cwd=node.folder, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_the_client_of_javascript_reads_an_error(node):
    error = node("error")
    assert (error["type"], error["event_id"], error["param"]) == ("invalid_request_error", "mine", "type")
