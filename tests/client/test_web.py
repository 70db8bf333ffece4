"""The web server of the page, without a browser."""

import asyncio
import base64
import http.client
import io
import json
import re
import socket
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from seq2seq_serve.client import AsyncClient, GenerateOptions, TurnDetection
from seq2seq_serve.client.__main__ import main
from seq2seq_serve.client.output import attention_dict
from seq2seq_serve.client.web import app
from seq2seq_serve.client.web.app import PAGE, Asked, make_app
from seq2seq_serve.protos.seq2seq_v1_pb2 import Target
from tests.server.service.harness import on_a_thread, serving_bundles


@pytest.fixture
def page(server):
    metrics_url = f"http://127.0.0.1:{server.app.http.port}"
    its_app = make_app(lambda: AsyncClient(server.address), metrics_url, "testserver")
    with TestClient(its_app) as client:
        yield client


def events_of(page, **request) -> list[dict]:
    content = {"model": "echo", "sources": {"source_ids": {"text": "오늘은 ab"}}} | request
    answer = page.post("/api/generate", json=content)
    assert answer.status_code == 200
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.strip().split("\n\n")]


def test_the_models_are_listed_with_the_command_that_asks_them(page, server):
    content = page.get("/api/models").json()
    assert content["address"] == server.address
    (model,) = content["models"]
    assert (model["name"], model["command"], model["sources"]) == (
        "echo",
        "translate",
        {"source_ids": "text"},
    )


def test_pieces_come_first_and_the_whole_answer_last(page):
    *pieces, last = events_of(page, options={"attention": True, "num_alternatives": 2})
    assert "".join(event["piece"]["text"] for event in pieces) == "오늘은 ab"
    (best,) = last["result"]["hypotheses"]
    assert best["text"] == "오늘은 ab"
    assert len(best["attention"]["weights"]) == len(best["token_ids"]) + 1 == len(best["alternatives"])
    assert len(best["attention"]["weights"][0]) == last["result"]["usage"]["source_tokens"]
    assert last["result"]["timings"]["total_seconds"] > 0


async def test_the_alignment_grows_with_the_target(server):
    """The alignment of the first tokens is the beginning of the whole one."""
    prefix = Target(text="ab")  # which comes with the first piece
    asked = Asked("echo", {"source_ids": "abcdef"}, GenerateOptions(target_prefix=prefix), grows=True)
    events = asyncio.Queue()
    async with AsyncClient(server.address) as client:
        options = GenerateOptions(attention=True, target_prefix=prefix)
        answer = await client.generate("abcdef", options=options)
        whole = attention_dict(answer.hypotheses[0].attention)
        growth = app._Growth(client, asked, events)
        growing = asyncio.create_task(growth.run())
        for num_tokens in (2, 5):
            growth.add(answer.hypotheses[0].token_ids[growth.num_tokens : num_tokens], 0)
            grown = (await asyncio.wait_for(events.get(), 20))["alignment"]
            assert grown["target_tokens"] == whole["target_tokens"][:num_tokens]
            assert grown["weights"] == whole["weights"][:num_tokens]
        growing.cancel()


def test_a_forced_prefix_is_a_list_of_ids(page):
    *_, last = events_of(page, options={"target_prefix": [70, 71]})
    assert last["result"]["hypotheses"][0]["token_ids"][:2] == [70, 71]


def test_an_error_of_the_server_is_an_event(page):
    (event,) = events_of(page, sources={"source_ids": {"text": "x" * 100}})
    assert event["error"]["code"] == "INVALID_ARGUMENT"
    (event,) = events_of(page, model="none")
    assert event["error"]["code"] == "NOT_FOUND"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "a request has"),
        ({"sources": {"x": 5}}, "a request has"),
        ({"sources": {"x": {"text": 5}}}, "a request has"),
        ({"sources": {"x": {"file": "%"}}}, "must be in base64"),
        ({"sources": {}, "options": {"colour": 1}}, "there is no option 'colour'"),
        ({"sources": {}, "options": {"beam_size": "x"}}, "beam_size must be a 64-bit integer"),
        ({"sources": {"x": {"file": "", "form": "features"}}}, "not a NumPy array"),
    ],
)
def test_a_malformed_request_is_refused_with_the_reason(page, content, message):
    answer = page.post("/api/generate", json=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_server_that_is_gone_is_an_error_of_one_line(server):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    its_app = make_app(lambda: AsyncClient(f"127.0.0.1:{port}"), f"http://127.0.0.1:{port}", "testserver")
    with TestClient(its_app) as page:
        assert "no server answers" in page.get("/api/models").json()["error"]["message"]
        assert "name them with --metrics-url" in page.get("/api/metrics").json()["error"]["message"]


def test_the_metrics_are_those_that_the_page_shows(page):
    events_of(page)
    samples = page.get("/api/metrics").json()["samples"]
    names = {sample["name"] for sample in samples}
    assert {"seq2seq_slots", "seq2seq_time_to_first_token_seconds_bucket"} <= names
    assert "process_open_fds" not in names
    script = (PAGE / "latency.js").read_text()
    for name in set(re.findall(r'"(seq2seq_\w+)"', script)):
        assert name in names or f"{name}_bucket" in names, name


def test_frames_of_a_clip_are_pictures(page, tmp_path):
    frames = [Image.new("RGB", (400, 200), colour) for colour in ("red", "blue", "green")]
    frames[0].save(tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=100)
    shown = page.post("/api/frames", content=(tmp_path / "clip.gif").read_bytes()).json()["frames"]
    assert len(shown) == 3
    assert all(
        base64.b64decode(one.removeprefix("data:image/png;base64,")).startswith(b"\x89PNG") for one in shown
    )
    assert all(
        Image.open(io.BytesIO(base64.b64decode(one.partition(",")[2]))).size == (160, 80) for one in shown
    )


def test_a_hostile_file_is_refused_before_it_is_decoded(page, monkeypatch):
    """An EPS ran Ghostscript; `tests/bundle/test_pictures.py` has every kind of such files."""

    def load(_image):
        raise AssertionError("decoded")

    written = io.BytesIO()
    frames = [Image.new("1", (3, 3), number % 2) for number in range(257)]
    frames[0].save(written, "GIF", save_all=True, append_images=frames[1:])
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    for content, message in (
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n", "is not PNG, JPEG, WebP or GIF"),
        (written.getvalue(), "has 257 frames, and at most 256 are read"),
    ):
        answer = page.post("/api/frames", content=content)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_the_page_fetches_nothing_from_elsewhere(page):
    answer = page.get("/")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for file in PAGE.iterdir():
        assert page.get(f"/page/{file.name}").headers["content-security-policy"]
        text = file.read_text()
        links = re.findall(r"""(?:src|href|from|import|url)\s*[=(]?\s*["']([^"']+)["']""", text)
        assert all(link.startswith(("/", "./", "data:", "http://www.w3.org/")) for link in links), links
        assert "innerHTML" not in text


def test_other_pages_and_other_names_are_refused(page):
    """A page elsewhere could ask by the browser of somebody who has this page open."""
    for wrong in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "elsewhere.example"},
        {"Origin": "http://elsewhere.example"},
        {"Origin": "https://testserver"},
        {"Host": ""},
        {"Host": "["},
        {"Host": "[::1"},
        {"Origin": "http://["},
    ):
        assert page.get("/api/models", headers=wrong).status_code == 403, wrong
        assert page.get("/", headers=wrong).status_code == 403, wrong
    for right in ({"Host": "127.0.0.1:8080"}, {"Host": "[::1]:8080"}, {"Origin": "http://testserver"}):
        assert page.get("/api/models", headers=right).status_code == 200, right


def test_the_command_prints_the_address_and_ends_by_a_signal(server):
    flags = ["--address", server.address, "--port", "0"]
    command = [sys.executable, "-m", "client", "web", *flags]
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) as process:
        line = re.fullmatch(r"open http://127.0.0.1:(\d+)/ \(Ctrl-C ends it\)\n", process.stderr.readline())
        connection = http.client.HTTPConnection("127.0.0.1", int(line[1]), timeout=20)
        connection.connect()
        kept = connection.sock
        for path in ("/api/models", "/api/metrics"):
            connection.request("GET", path)
            assert json.load(connection.getresponse())
        assert connection.sock is kept
        connection.close()
        process.terminate()
        assert process.stderr.read() == ""


def test_an_answer_of_the_page_does_not_wait_for_acknowledgements():
    """Head and body are two small writes: the body waited 40 ms on a kept connection."""
    with app.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_json_that_is_nested_too_deeply_is_refused(page):
    answer = page.post("/api/generate", content="[" * 100_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "INVALID_ARGUMENT")


def test_a_port_in_use_is_a_one_line_error(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["web", "--port", str(taken.getsockname()[1])]) == 1
    assert re.fullmatch(r"error: port \d+ of 127.0.0.1: Address already in use\n", capsys.readouterr().err)


def test_a_bug_is_an_event_and_a_line_of_the_log(page, monkeypatch, caplog):
    """The stream was empty, and the page waited for ever."""

    def broken(_answer):
        raise RuntimeError("broken")

    monkeypatch.setattr(app, "_result", broken)
    assert "broken" in events_of(page)[-1]["error"]["message"]
    assert "RuntimeError: broken" in caplog.text


def file_of(model: dict) -> bytes:
    """A file that a model of pictures, clips or features takes."""
    written = io.BytesIO()
    (form,) = model["sources"].values()
    if form == "features":
        (shape,) = model["source_shapes"].values()
        np.save(written, np.zeros((2, shape["sizes"][1]), np.float32))
    else:
        Image.new("RGB", (12, 12), "red").save(written, "PNG")
    return written.getvalue()


def test_every_family_can_be_asked(toy_paths):
    with on_a_thread(serving_bundles(*toy_paths.values())) as served:
        its_app = make_app(lambda: AsyncClient(served.address), "http://127.0.0.1:1", "testserver")
        with TestClient(its_app) as page:
            models = page.get("/api/models").json()["models"]
            assert {model["command"] for model in models} == {"translate", "caption", "answer"}
            for model in models:
                sources = {
                    name: {"text": "w1 w2."}
                    if form in ("text", "sentences")
                    else {"file": base64.b64encode(file_of(model)).decode(), "form": form}
                    for name, form in model["sources"].items()
                }
                options = {"attention": model["has_attention"], "num_alternatives": 2, "max_new_tokens": 3}
                *_, last = events_of(page, model=model["name"], sources=sources, options=options)
                (best,) = last["result"]["hypotheses"]
                assert len(best["alternatives"]) > 0, model["name"]
                assert ("attention" in best) == model["has_attention"]


@pytest.fixture(scope="module")
def speech(whisper_path):
    """A page whose model reads sounds; its server need not know voice activity."""
    with on_a_thread(serving_bundles(whisper_path / "bundle")) as served:
        its_app = make_app(lambda: AsyncClient(served.address), "http://127.0.0.1:1", "testserver")
        with TestClient(its_app) as page:
            yield page


@pytest.fixture
def without_turns(monkeypatch):
    """The model of voice activity is an extra of the server."""
    transcribe_live = AsyncClient.transcribe_live
    monkeypatch.setattr(
        AsyncClient, "transcribe_live", partialmethod(transcribe_live, turn_detection=TurnDetection(off=True))
    )


def test_a_microphone_is_transcribed(speech, without_turns):
    noise = np.random.default_rng(0).standard_normal(24_000) * 3_000
    with speech.websocket_connect("/api/live") as socket:
        socket.send_json({"model": "", "options": {"source_language": "de"}, "sample_rate": 16_000.0})
        for part in np.split(noise.astype("<i2"), 10):
            socket.send_bytes(part.tobytes())
        socket.send_text("end")
        events = []
        while "result" not in (event := socket.receive_json()):
            events.append(event)
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
    assert closed.value.code == 1000
    said = [event["segment"]["text"].strip() for event in events if "segment" in event]
    assert len(said) >= 2
    assert event["result"]["hypotheses"][0]["text"] == " ".join(filter(None, said))
    assert event["received_seconds"] == 1.5


@pytest.mark.parametrize(
    ("first", "code", "message"),
    [
        ('{"model": "none", "sample_rate": 16000}', "NOT_FOUND", "no model is named"),
        ('{"sample_rate": 1}', "INVALID_ARGUMENT", "samples a second"),
        ("{}", "INVALID_ARGUMENT", "a microphone has"),
        ("[]", "INVALID_ARGUMENT", "a microphone has"),
        ("x", "INVALID_ARGUMENT", "Expecting value"),
        ("[" * 100_000, "INVALID_ARGUMENT", "nested too deeply"),
        ('{"sample_rate": 16000, "options": {"num_hypotheses": 2}}', "INVALID_ARGUMENT", "does not apply"),
        ('{"sample_rate": 16000, "options": {"colour": 2}}', "INVALID_ARGUMENT", "there is no option"),
    ],
)
def test_a_microphone_that_is_refused_gets_the_reason(speech, without_turns, first, code, message):
    with speech.websocket_connect("/api/live") as socket:
        socket.send_text(first)
        error = socket.receive_json()["error"]
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
    assert error["code"] == code
    assert message in error["message"]


def test_a_browser_that_leaves_ends_its_call(speech, without_turns):
    for messages in ([], ['{"sample_rate": 16000}'], ['{"sample_rate": 16000}', bytes(3200)]):
        with speech.websocket_connect("/api/live") as socket:
            for message in messages:
                socket.send_bytes(message) if isinstance(message, bytes) else socket.send_text(message)


def test_other_pages_do_not_get_a_microphone(speech):
    """A browser opens a WebSocket of a page of another site, and only adds where that is from."""
    for wrong in ({"Origin": "http://elsewhere.example"}, {"Host": "elsewhere.example"}):
        with pytest.raises(WebSocketDisconnect), speech.websocket_connect("/api/live", headers=wrong):
            pass
