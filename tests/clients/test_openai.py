"""OpenAI's clients in two languages, and the forms that programs send, with a small Whisper."""

import asyncio
import json
import subprocess
from pathlib import Path
from urllib.parse import parse_qsl

import openai
import pytest

from seq2seq_serve.server.config import OpenAINames
from tests.clients.npm import install
from tests.server.runner.test_voice_activity import needs_model
from tests.server.service.harness import on_a_thread, serving_bundles
from tests.server.service.test_openai import SOUND, post

PROGRAM = Path(__file__).with_name("openai_calls.mjs")
PROMPT = "The following conversation is a smart home user talking to Home Assistant."

# The fields that programs send beside the file, by their sources, and what they read of the answer: a name of
# JSON, or a text of other forms.
FORMS = {
    "curl": ("model=whisper-1", "text"),
    "curl without a model": ("", "text"),
    "Open WebUI": ("model=whisper-large-v3", "text"),
    "Home Assistant": (
        f"model=gpt-4o-mini-transcribe&response_format=json&language=ko&prompt={PROMPT}",
        "text",
    ),
    "a component for Home Assistant": ("model=whisper-1&language=ko&temperature=0&prompt=", "text"),
    "n8n": ("model=whisper-1&language=ko&temperature=0.2", "text"),
    "LangChain": ("model=whisper-1", "text"),
    "LibreChat": ("model=whisper-1&language=ko", "text"),
    "a bridge for Bazarr": ("model=whisper-1&response_format=verbose_json&language=ko", "segments"),
    "curl of PHP": (
        "model=whisper-1&response_format=verbose_json"
        "&timestamp_granularities[0]=segment&timestamp_granularities[1]=word",
        "words",
    ),
    "a client of WhisperX": (
        "model=small&response_format=verbose_json&timestamp_granularities=word",
        "words",
    ),
    "httpx": (
        "model=whisper-1&language=ko&response_format=verbose_json"
        "&timestamp_granularities[]=word&temperature=0.2",
        "words",
    ),
    "a client of speaches": (
        "model=Systran/faster-whisper-small&language=ko&response_format=verbose_json&stream=false"
        "&timestamp_granularities[]=word&hotwords=a b&vad_filter=false&temperature=0.0",
        "words",
    ),
    "a client of whisper.cpp": ("language=auto&temperature=0.0&response_format=json", "text"),
    "FormData of a browser": ("model=whisper-1&language=undefined&prompt=null&temperature=0", "text"),
    "a subtitle program": ("model=whisper-1&response_format=srt&language=ko", " --> "),
    "requests": (
        "model=gpt-4o-transcribe&language=ko&stream=True&response_format=json",
        "transcript.text.done",
    ),
}


@pytest.fixture(scope="module")
def served(whisper_path):
    server = serving_bundles(whisper_path / "bundle", openai_names=OpenAINames.ANY)
    with on_a_thread(server) as served:
        yield served


@pytest.fixture(scope="module")
def url(served):
    return f"http://127.0.0.1:{served.app.http.port}/v1"


@pytest.mark.parametrize("program", FORMS)
def test_a_form_of_a_program_is_answered(served, program):
    fields, read = FORMS[program]
    status, headers, answer = post(served, *parse_qsl(fields, keep_blank_values=True))
    assert status == 200, answer
    if headers["content-type"] == "application/json":
        assert json.loads(answer)[read]
    else:
        assert read in answer


def test_a_bridge_for_bazarr_translates(served):
    fields = [("model", "whisper-1"), ("response_format", "verbose_json")]
    status, _, answer = post(served, *fields, page="translations")
    assert status == 200, answer
    assert json.loads(answer)["task"] == "translate"


async def test_the_asynchronous_client_of_python_transcribes_and_streams(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        given = {"model": "gpt-4o-transcribe", "language": "ko"}
        answers = await asyncio.gather(
            *(client.audio.transcriptions.create(file=("speech.wav", SOUND), **given) for _ in range(4))
        )
        [text] = {answer.text for answer in answers}
        events = [
            event
            async for event in await client.audio.transcriptions.create(
                file=("speech.wav", SOUND), stream=True, include=["logprobs"], **given
            )
        ]
        assert events[-1].text == text
        assert events[-1].logprobs
        async with client.audio.transcriptions.with_streaming_response.create(
            file=("speech.wav", SOUND), response_format="text", **given
        ) as response:
            assert (await response.text()).strip() == text


@pytest.fixture(scope="module")
def node(url, tmp_path_factory):
    """Runs a call of the client for JavaScript, as npm installs it."""
    folder = tmp_path_factory.mktemp("npm")
    install(folder, PROGRAM, "openai@7")
    (folder / "speech.wav").write_bytes(SOUND)

    def call(name):
        command = ["node", PROGRAM.name, url, "speech.wav", name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


def test_the_client_of_javascript_transcribes(node, served):
    text = node("text")["text"]
    _, _, answer = post(served, ("language", "ko"))
    assert text == json.loads(answer)["text"] != ""
    words = node("words")
    assert (words["text"], words["language"]) == (text, "korean")
    assert words["words"][0]["start"] == words["segments"][0]["start"]
    assert len(node("logprobs")["logprobs"]) > 1
    assert " --> " in node("subtitles")
    *deltas, done = node("stream")
    assert "".join(event["delta"] for event in deltas).strip() == done["text"] == text
    assert [model["id"] for model in node("models")] == ["bundle"]


@needs_model
def test_the_client_of_javascript_sends_a_strategy_of_chunks(node):
    assert node("vad")["usage"]["type"] == "duration"


def test_the_client_of_javascript_reads_an_error(node):
    error = node("error")
    assert (error["status"], error["param"]) == (400, "language")
    assert error["error"]["type"] == "invalid_request_error"


def test_the_client_of_javascript_sends_a_stream_of_a_file(node):
    """Its length is not known, so the body comes in chunks."""
    assert node("read_stream")["text"] == node("text")["text"]
