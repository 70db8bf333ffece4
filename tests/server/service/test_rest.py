"""The Open Inference Protocol over HTTP: what curl, tritonclient and browsers send."""

import asyncio
import gzip
import http.client
import json
import logging
import random
import socket
import threading
import time
import tracemalloc
import zlib
from contextlib import ExitStack

import pytest
from starlette.responses import Response

from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.service import rest
from seq2seq_serve.server.service.compression import Decompressor
from seq2seq_serve.server.service.open_inference import service
from seq2seq_serve.server.service.open_inference.json import read_json
from seq2seq_serve.server.service.open_inference.requests import read_inference
from tests.server.service.harness import EchoRunner, access_file, serving, serving_on_a_thread


def ask(port: int, method: str, path: str, content=None, **headers: str) -> tuple[int, dict, object]:
    """Status, headers and JSON of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = content if isinstance(content, bytes | None) else json.dumps(content)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, dict(answer.headers), json.loads(text) if is_json else text


def request_of(path: str, body: bytes, num_bytes: int = 0, more: str = "") -> bytes:
    """A request whose body has `num_bytes` by its header, as many as are given by default."""
    size = f"Content-Length: {num_bytes or len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{size}{more}\r\n".encode() + body


def chunked_request_of(path: str, *chunks: bytes) -> bytes:
    """Returns the head and the first chunks of a request without a Content-Length."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


def serve_and(ask_it, **changes):
    """Runs a function of the HTTP port on a thread, beside a server."""

    async def run():
        async with serving(**changes) as served:
            return await asyncio.to_thread(ask_it, served.app.http.port), served

    return asyncio.run(run())[0]


@pytest.fixture(scope="module")
def port():
    """The HTTP port of a server as it is by default."""
    with serving_on_a_thread() as served:
        yield served.app.http.port


def infer_body(*texts: str, **parameters) -> dict:
    return {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)}],
        "parameters": parameters,
    }


def typed_body(**parameters) -> dict:
    """A request of one text, whose input has parameters."""
    body = infer_body("a")
    body["inputs"][0]["parameters"] = parameters
    return body


INFER, GENERATE, STREAM = (f"/v2/models/echo/{name}" for name in ("infer", "generate", "generate_stream"))
UNFINISHED = request_of(INFER, b"{", num_bytes=9)


@pytest.mark.parametrize(
    "body",
    [
        typed_body(content_type="str"),
        infer_body("a", content_type="str"),
        infer_body("a") | {"id": None, "parameters": None, "outputs": None, "model_name": None},
        typed_body(content_type=None) | {"parameters": {"seed": None}},
        {
            "parameters": {"content_type": "np"},
            "inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [[70, 2]]}],
        },
    ],
)
def test_what_clients_of_mlserver_and_kserve_say_of_inputs_is_accepted(port, body):
    """A type of the content was refused, and null in place of a missing value."""
    status, _, answer = ask(port, "POST", INFER, body)
    assert status == 200, answer
    assert answer["outputs"][0]["name"] == "text_output"


def test_infer_answers_with_the_targets_of_all_rows(port):
    body = infer_body("오늘은", "ab") | {"id": "7"}
    status, headers, content = ask(port, "POST", INFER, body, x_request_id="mine")
    outputs = {one.pop("name"): one for one in content.pop("outputs")}
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert content == {"model_name": "echo", "model_version": "0123456789ab", "id": "7"}
    assert outputs["text_output"] == {"datatype": "BYTES", "shape": [2, 1], "data": ["오늘은", "ab"]}
    assert outputs["output_lengths"]["data"] == [9, 2]
    assert outputs["output_ids"]["shape"] == [2, 1, 9]
    assert outputs["finish_reason"]["data"] == ["eos", "eos"]


def test_generate_takes_names_and_options_side_by_side(port):
    plain = ask(port, "POST", GENERATE, {"text_input": "abc", "max_new_tokens": 2, "id": "x"})
    nested = ask(port, "POST", GENERATE, {"input_ids": [70, 71, 2], "parameters": {"num_hypotheses": 2}})
    version = ask(port, "POST", "/v2/models/echo/versions/0123456789ab/generate", {"text_input": "a"})
    assert plain[2] == {
        "model_name": "echo",
        "model_version": "0123456789ab",
        "id": "x",
        "text_output": "ab",
        "output_ids": plain[2]["output_ids"],
        "output_lengths": 2,
        "finish_reason": "length",
    }
    assert len(plain[2]["output_ids"]) == 2
    assert len(nested[2]["text_output"]) == 2
    assert version[2]["text_output"] == "a"


def events_of(text: bytes) -> list[dict]:
    assert text.endswith(b"\n\n")
    lines = text[:-2].split(b"\n\n")
    assert all(line.startswith(b"data: ") for line in lines)
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def test_a_stream_is_the_answer_in_pieces(port):
    status, headers, text = ask(port, "POST", STREAM, {"text_input": "오늘은 ab"})
    events = events_of(text)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert "".join(event["text_output"] for event in events) == "오늘은 ab"
    assert len(events) > 1
    assert events[-1]["finish_reason"] == "eos"


class SteppedRunner(EchoRunner):
    """Makes one step for each permit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.permits = threading.Semaphore(0)

    def step(self, rows, num_steps=1):
        assert self.permits.acquire(timeout=20)
        return super().step(rows)


async def streaming(served, text: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.app.http.port)
    writer.write(request_of(STREAM, json.dumps({"text_input": text}).encode()))
    return reader, writer


async def next_event(reader: asyncio.StreamReader) -> dict:
    async with asyncio.timeout(20):
        while not (line := await reader.readline()).startswith(b"data: "):
            assert line
    return json.loads(line.removeprefix(b"data: "))


async def test_pieces_come_while_the_rest_is_decoded():
    """The engine makes no second step before the first piece has come."""
    runner = SteppedRunner()
    async with serving(runner) as served:
        reader, writer = await streaming(served, "ab")
        for text in ("a", "b"):
            runner.permits.release()
            assert (await next_event(reader))["text_output"] == text
        runner.permits.release()
        assert (await next_event(reader))["finish_reason"] == "eos"
        writer.close()


async def test_an_error_after_the_first_piece_is_an_event():
    runner = SteppedRunner()
    async with serving(runner) as served:
        reader, writer = await streaming(served, "ab")
        runner.permits.release()
        assert (await next_event(reader))["text_output"] == "a"
        runner.error = RuntimeError("broken")
        runner.permits.release()
        event = await next_event(reader)
        assert (event["code"], event["reason"]) == ("INTERNAL", "ENGINE_FAILED")
        writer.close()


async def test_a_reader_who_leaves_in_the_middle_frees_the_slot():
    runner = SteppedRunner()
    async with serving(runner) as served:
        reader, writer = await streaming(served, "a" * 60)
        runner.permits.release()
        await next_event(reader)
        writer.close()
        labels = {"model_name": "echo", "method": "ModelStreamInfer", "code": "CANCELLED"}
        async with asyncio.timeout(20):
            while not served.metric("seq2seq_requests_total", **labels):
                await asyncio.sleep(0)
        runner.permits.release()  # for the step that was under way
        await served.until_calls_are_over()
        assert not served.app.rest.open.held


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        (infer_body(*["a"] * 77, "", *["a"] * 178), "row 77 of text_input: the text is empty", "text_input"),
        (infer_body("a", "x" * 70), "row 1 of text_input: the source has 71 tokens", "text_input"),
        (infer_body("x" * 70), "the source has 71 tokens", "text_input"),
        (
            {"inputs": [{"name": "input_ids", "datatype": "INT64", "shape": [2, 1], "data": [5, 9999]}]},
            "row 1 of input_ids: token id 9999 is outside",
            "input_ids",
        ),
        (infer_body("a", beam_size=99), "beam_size is 99", "beam_size"),
    ],
)
def test_an_error_names_the_row_and_the_protocols_own_field(port, body, message, field):
    """A wrong text among 256 was "sources[0].text"."""
    kind = "parameters" if field == "beam_size" else "inputs"
    status, _, answer = ask(port, "POST", INFER, body)
    assert (status, answer["field"]) == (400, f"{kind}[{field}]")
    assert answer["error"].startswith(message)


@pytest.mark.parametrize(
    ("path", "content", "status", "code", "text"),
    [
        ("/v2/models/none/infer", infer_body("a"), 404, "NOT_FOUND", "no model is named 'none'"),
        (INFER, b"{", 400, "INVALID_ARGUMENT", "the body is not JSON"),
        (GENERATE, {"text_input": ["a", "b"]}, 400, "INVALID_ARGUMENT", "one text or the token ids of one"),
        (INFER, b"[" * 8_000, 400, "INVALID_ARGUMENT", "nested 8000 deep"),
        (
            GENERATE,
            b'{"text_input": "\\\\\\"", "x":' + b"[" * 100,
            400,
            "INVALID_ARGUMENT",
            "nested 101 deep",
        ),
        (INFER, b"[]", 400, "INVALID_ARGUMENT", "must be a JSON object"),
        (INFER, {"input": []}, 400, "INVALID_ARGUMENT", "no field 'input' here"),
        (INFER, infer_body("a") | {"model_name": "other"}, 400, "INVALID_ARGUMENT", "the path has 'echo'"),
        (INFER, {"inputs": [5]}, 400, "INVALID_ARGUMENT", "inputs must be a list of objects"),
        (INFER, {"inputs": []}, 400, "INVALID_ARGUMENT", "the inputs are missing"),
        (INFER, infer_body("a", seed=[1]), 400, "INVALID_ARGUMENT", "parameter seed must be"),
        (
            INFER,
            infer_body("a") | {"outputs": [{"name": "x", "parameters": 5}]},
            400,
            "INVALID_ARGUMENT",
            "object",
        ),
        (INFER, infer_body("a", colour=1), 400, "INVALID_ARGUMENT", "no parameter is named 'colour'"),
        (INFER, infer_body("a", content_type="pd"), 400, "INVALID_ARGUMENT", "text_input is 'pd': send str"),
        (INFER, infer_body("a", content_type=1), 400, "INVALID_ARGUMENT", "text_input is '1': send str"),
        (INFER, typed_body(content_type="np"), 400, "INVALID_ARGUMENT", "text_input is 'np': send str"),
        (INFER, typed_body(charset="utf-8"), 400, "INVALID_ARGUMENT", "parameter 'charset' is not supported"),
        (INFER, b" " * (4 * 2**20 + 1), 413, "INVALID_ARGUMENT", "more than 4194304 bytes"),
        (INFER, b"[" + b"{}," * 9000 + b"{}]", 400, "INVALID_ARGUMENT", "9002 brackets"),
        (INFER, b"[" + b"1," * (2**20 + 1) + b"1]", 400, "INVALID_ARGUMENT", "1048577 commas"),
        (INFER, infer_body("a") | {"id": "\ud800"}, 400, "INVALID_ARGUMENT", "not JSON in UTF-8"),
        (GENERATE, {"input_ids": [True]}, 400, "INVALID_ARGUMENT", "does not have the type"),
        (STREAM, {"text_input": "a", "num_hypotheses": 2}, 400, "INVALID_ARGUMENT", "one hypothesis"),
    ],
)
def test_a_wrong_request_gets_its_status_and_the_reason(port, path, content, status, code, text):
    found, headers, answer = ask(port, "POST", path, content)
    assert (found, answer["code"]) == (status, code)
    assert text in answer["error"]
    assert headers["x-request-id"]


@pytest.mark.parametrize("text", ["[" * 9_001, '\\"{' * 9_001, "\\" * 9 + '"' + "," * 2**20])
def test_brackets_and_commas_in_a_text_are_not_elements(text):
    """A text with 9,001 brackets was refused as nested JSON."""
    assert read_json(json.dumps({"text_input": text}).encode()) == {"text_input": text}


async def test_a_million_numbers_are_read_on_a_thread(monkeypatch):
    """They took 1.4 seconds, some of them on the event loop."""
    threads = set()

    def read(*given):
        threads.add(threading.current_thread())
        return read_inference(*given)

    monkeypatch.setattr(service, "read_inference", read)
    body = infer_body("a")
    body["inputs"][0] |= {"name": "input_ids", "datatype": "INT64", "shape": [1, 10**6], "data": [70] * 10**6}
    async with serving() as served:
        raw = json.dumps(body, separators=(",", ":")).encode()
        status, _, answer = await asyncio.to_thread(ask, served.app.http.port, "POST", INFER, raw)
        assert (status, answer["field"]) == (400, "inputs[input_ids]")
        assert "1000000 tokens" in answer["error"]
        (thread,) = threads
        assert thread is not threading.current_thread()  # which is that of the event loop


def test_nested_lists_are_row_major(port):
    body = {
        "inputs": [
            {"name": "input_ids", "datatype": "INT64", "shape": [2, 2], "data": [[70, 2], [71, 2]]},
            {"name": "input_lengths", "datatype": "INT64", "shape": [2], "data": [2, 2]},
        ],
        "outputs": [{"name": "output_ids"}],
    }
    _, _, answer = ask(port, "POST", INFER, body)
    assert answer["outputs"] == [
        {"name": "output_ids", "datatype": "INT64", "shape": [2, 1, 1], "data": [70, 71]}
    ]


def test_rights_are_those_of_grpc(tmp_path):
    file = access_file(tmp_path, ("shop", "secret", "predict"))

    def asking(port):
        body = {"text_input": "abc"}
        return (
            ask(port, "POST", GENERATE, body),
            ask(port, "POST", GENERATE, body, authorization="Bearer secret"),
            ask(port, "GET", "/v2"),
            *(ask(port, "GET", path) for path in ("/readyz", "/v2/health/live", "/v2/health/ready")),
        )

    refused, answered, listed, *probed = serve_and(asking, access_file=file)
    assert (refused[0], refused[1]["www-authenticate"]) == (401, "Bearer")
    assert (answered[0], listed[0]) == (200, 401)
    assert [status for status, *_ in probed] == [200] * 3


def test_rights_come_before_the_body(tmp_path):
    file = access_file(tmp_path, ("shop", "secret", "predict"))

    def asking(port):
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.sendall(request_of(INFER, b"", 4_000_000))
            return client.recv(4096)

    assert serve_and(asking, access_file=file).startswith(b"HTTP/1.1 401")


async def test_large_requests_are_held_as_those_of_grpc(monkeypatch):
    monkeypatch.setattr("seq2seq_serve.server.service.calls._MAX_HELD_BYTES", 10**6)
    async with serving() as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.app.http.port)
        writer.write(request_of(INFER, b"{", 2_000_000))  # the rest of its body does not come
        async with asyncio.timeout(20):
            while not served.app.calls.held.held:
                await asyncio.sleep(0)
        body = b" " * 2_000_000
        status, _, answer = await asyncio.to_thread(ask, served.app.http.port, "POST", INFER, body)
        assert (status, answer["code"]) == (429, "RESOURCE_EXHAUSTED")
        assert "large requests and answers of 2000000 bytes" in answer["error"]
        writer.close()


async def test_a_caller_of_the_first_protocol_of_kserve_learns_of_the_second():
    async with serving() as served:
        path, body = "/v1/models/echo:predict", {"instances": []}
        status, _, answer = await asyncio.to_thread(ask, served.app.http.port, "POST", path, body)
        assert (status, answer["code"]) == (404, "NOT_FOUND")
        assert answer["error"].endswith("send version 2 to /v2/models/echo/infer")
        await served.until_calls_are_over()
        assert served.metric("seq2seq_requests_total", method="ModelInfer", code="NOT_FOUND") == 1


async def test_answers_that_callers_do_not_take_are_held_as_those_of_grpc(monkeypatch):
    def long_response(answer, binary, accepted):
        return Response(bytes(16 * 2**20))

    monkeypatch.setattr("seq2seq_serve.server.service.calls._MAX_HELD_BYTES", 20 * 2**20)
    monkeypatch.setattr(rest, "_infer_response", long_response)
    async with serving() as served:
        port, held = served.app.http.port, served.app.calls.held
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reader._transport.pause_reading()
        writer.write(request_of(INFER, json.dumps(infer_body("a")).encode()))
        async with asyncio.timeout(20):
            while not held.held:
                await asyncio.sleep(0.01)
        status, _, answer = await asyncio.to_thread(ask, port, "POST", INFER, infer_body("a"))
        assert (status, answer["code"]) == (429, "RESOURCE_EXHAUSTED")
        assert "large requests and answers of 16777216 bytes" in answer["error"]
        assert (await asyncio.to_thread(ask, port, "POST", GENERATE, {"text_input": "a"}))[0] == 200
        reader._transport.resume_reading()
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 16777216" in head
        assert len(await reader.readexactly(16 * 2**20)) == 16 * 2**20
        async with asyncio.timeout(20):
            while held.held:
                await asyncio.sleep(0.01)
        writer.write(request_of(INFER, json.dumps(infer_body("a")).encode()))  # the connection is kept
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


def test_a_wrong_id_is_refused_and_a_given_one_keeps_the_other_headers(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {"text_input": "abc"}

    def asking(port):
        traced = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x_request_id": "mine"}
        return ask(port, "POST", GENERATE, body, x_request_id="x" * 200), ask(
            port, "POST", GENERATE, body, **traced
        )

    refused, answered = serve_and(asking)
    assert (refused[0], refused[2]["field"]) == (400, "x-request-id")
    assert answered[1]["x-request-id"] == "mine"
    lines = [record.fields for record in caplog.records if record.name.endswith("access_log")]
    assert [line["code"] for line in lines] == ["INVALID_ARGUMENT", "OK"]
    assert (lines[1]["request_id"], lines[1]["trace_id"], lines[1]["caller"]) == ("mine", trace, "127.0.0.1")


def test_a_header_does_not_choose_the_name_of_the_caller(caplog):
    caplog.set_level(logging.INFO)
    serve_and(lambda port: ask(port, "POST", GENERATE, {"text_input": "a"}, x_forwarded_for="evil"))
    (line,) = (record.fields for record in caplog.records if record.name.endswith("access_log"))
    assert line["caller"] == "127.0.0.1"


async def test_a_stream_is_finished_when_the_server_stops():
    """Events that were on their way were cut off."""
    async with serving() as served:
        reader, writer = await streaming(served, "ab" * 20)
        await served.turns.until(lambda: served.turns.num_ended == 1)
    text = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert b'"finish_reason": "eos"' in text


def test_unfinished_requests_leave_room_for_probes(monkeypatch):
    monkeypatch.setattr("seq2seq_serve.server.service.rest._MAX_OPEN", 3)
    monkeypatch.setattr("seq2seq_serve.server.http._MAX_CONNECTIONS", 6)

    def asking(port):
        with ExitStack() as stack:

            def begin(count):
                for _ in range(count):
                    client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                    client.sendall(UNFINISHED)

            begin(3)
            # The server may not have read all three yet. No connection is closed: there is room for 6.
            while (refused := ask(port, "POST", GENERATE, {"text_input": "a"}))[0] == 200:
                pass
            begin(9)
            probed = ask(port, "GET", "/readyz")[0]
        return probed, refused

    probed, (status, headers, _) = serve_and(asking)
    assert (probed, status, headers["retry-after"]) == (200, 429, "1")


def test_pages_describe_the_server_and_its_models(port):
    paths = ("", "/health/live", "/health/ready", "/models/echo", "/models/echo/ready", "/models/echo/config")
    *answers, none, unready = (
        ask(port, "GET", f"/v2{path}") for path in (*paths, "/models/none", "/models/none/ready")
    )
    assert [status for status, *_ in answers] == [200] * len(paths)
    server, live, ready, model, model_ready, config = (content for *_, content in answers)
    assert server["name"]
    assert live == {"live": True}
    assert ready == model_ready == {"ready": True}
    assert model["inputs"][0]["shape"] == [-1]
    assert config["config"]["name"] == "echo"
    assert (none[0], unready[0], unready[2]["reason"]) == (404, 404, "UNKNOWN_MODEL")


@pytest.mark.parametrize(
    ("host", "is_insecure", "expected"),
    [("127.0.0.1", False, True), ("0.0.0.0", False, False), ("0.0.0.0", True, True)],
)
def test_texts_that_tls_encrypts_are_not_sent_in_the_clear_elsewhere(tmp_path, host, is_insecure, expected):
    tls = {"tls_certificate": tmp_path / "certificate.pem", "tls_key": tmp_path / "key.pem"}
    assert ServerConfig(host=host, is_insecure=is_insecure, **tls).has_rest is expected


def test_a_body_that_does_not_come_is_refused(monkeypatch):
    monkeypatch.setattr("seq2seq_serve.server.service.rest._BODY_SECONDS", 0.05)

    def asking(port):
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.sendall(UNFINISHED)
            received = b""
            while b"seconds" not in received and (more := client.recv(4096)):
                received += more
            return received

    assert b"did not arrive within" in serve_and(asking)


def test_a_long_body_has_longer_to_come(monkeypatch):
    """25 MiB had 30 seconds, as the shortest body has."""
    monkeypatch.setattr("seq2seq_serve.server.service.rest._BODY_SECONDS", 0.0)
    monkeypatch.setattr("seq2seq_serve.server.service.rest._LEAST_BYTES_PER_SECOND", 1)
    body = json.dumps({"text_input": "abcd"}).encode()

    def asking(port):
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.sendall(request_of(GENERATE, b"", len(body), "Expect: 100-continue\r\n"))
            assert b" 100 " in client.recv(4096)
            for octet in body:
                client.sendall(bytes([octet]))
            received = b""
            while b"}" not in received and (more := client.recv(4096)):
                received += more
            return received

    assert b'"text_output": "abcd"' in serve_and(asking)


def test_a_caller_who_has_not_sent_any_of_a_body_holds_nothing(monkeypatch):
    """256 heads took all places of their caller, and 64 with long bodies the room for its large requests."""
    monkeypatch.setattr("seq2seq_serve.server.service.rest._MAX_OPEN", 4)
    monkeypatch.setattr("seq2seq_serve.server.service.calls._MAX_HELD_BYTES", 100_000)

    def asking(port):
        with ExitStack() as stack:
            for _ in range(8):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                client.sendall(request_of(INFER, b"", num_bytes=90_000))
            time.sleep(0.2)  # the server reads them meanwhile, or the test shows nothing
            with socket.create_connection(("127.0.0.1", port), 20) as client:
                client.sendall(request_of(GENERATE, json.dumps({"text_input": "a"}).encode() + b" " * 50_000))
                return client.recv(4096)

    assert serve_and(asking).startswith(b"HTTP/1.1 200")


def test_a_body_in_chunks_is_read_as_one_with_a_length(port):
    """It got 411: curl, Node's streams and some proxies send no length."""
    body = json.dumps({"text_input": "오늘은"}, ensure_ascii=False).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for size in (1, 7, 1000):
        parts = (body[place : place + size] for place in range(0, len(body), size))
        connection.request(
            "POST", GENERATE, parts, encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
        )
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["text_output"]) == (200, "오늘은")
    connection.close()


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "Deflate"])
def test_a_compressed_body_is_read_however_it_is_cut(port, encoding):
    compress = zlib.compress if encoding == "Deflate" else gzip.compress
    body = compress(json.dumps({"text_input": "오늘은"}).encode() + b" " * 200_000)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for size in (1, 7, len(body)):
        parts = (body[place : place + size] for place in range(0, len(body), size))
        headers = {"Content-Encoding": encoding, "Transfer-Encoding": "chunked"}
        connection.request("POST", GENERATE, parts, encode_chunked=True, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, json.load(answer)["text_output"]) == (200, "오늘은")
    connection.close()


@pytest.mark.parametrize("size", [2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16])
def test_no_byte_of_a_compressed_body_is_lost_between_two_steps(size):
    content = random.Random(size).randbytes(size // 2) + b" " * (size - size // 2)
    decompressor, found = Decompressor("gzip"), b""
    packed = gzip.compress(content)
    for part in (packed[:100], packed[100:]):
        decompressor.add(part)
        while not decompressor.is_waiting:
            found += (step := decompressor.next_bytes())
            assert len(step) <= 2**16
    decompressor.end()
    assert found == content


GZIPPED = gzip.compress(b"{}")


@pytest.mark.parametrize(
    ("encoding", "body", "text"),
    [
        ("gzip", b"{}", "the compressed body is damaged"),
        ("deflate", GZIPPED, "the compressed body is damaged"),
        ("gzip", GZIPPED[:-1], "ends too early"),
        ("gzip", b"", "ends too early"),
        ("gzip", GZIPPED + b"{", "goes on after its end"),
        ("br", b"{}", "compressed by br: send it in gzip or deflate"),
    ],
)
def test_a_compressed_body_that_is_wrong_is_refused(port, encoding, body, text):
    status, _, answer = ask(port, "POST", GENERATE, body, content_encoding=encoding)
    assert status == 400
    assert text in answer["error"]


@pytest.mark.parametrize("path", [GENERATE, "/translate", "/v1/audio/transcriptions"])
def test_a_bomb_counts_as_it_is_decompressed(path):
    bomb = gzip.compress(bytes(2**28))

    def asking(port):
        tracemalloc.start()
        try:
            return ask(port, "POST", path, bomb, content_encoding="gzip"), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    (status, *_), num_bytes = serve_and(asking)
    assert status == 413
    assert num_bytes < 2**27


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("br;q=1.0, Deflate;q=0.5, gzip", "deflate"),
        ("gzip;q=0, *", None),
        ("br", None),
        ("", None),
    ],
)
def test_a_large_answer_is_compressed_as_its_caller_accepts(port, accepted, encoding):
    texts = ["오늘은"] * 30
    content = {"inputs": [{"name": "text_input", "shape": [30], "datatype": "BYTES", "data": texts}]}
    expected = ask(port, "POST", INFER, content)[2]
    unpack = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: lambda body: body}[encoding]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", INFER, json.dumps(content), {"Accept-Encoding": accepted})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.headers["Content-Encoding"] == encoding
    assert json.loads(unpack(body)) == expected
    assert encoding is None or len(body) < 1024


def test_the_repository_over_http_needs_the_rights_that_it_needs_over_grpc(tmp_path):
    pages = ("index", "models/echo/unload", "models/echo/load")

    def asking(port, **headers):
        return [ask(port, "POST", f"/v2/repository/{page}", b"", **headers) for page in pages]

    assert [status for status, *_ in serve_and(asking)] == [403] * 3
    file = access_file(tmp_path, ("a", "secret", "predict"), ("b", "chief", "admin"))

    def with_tokens(port):
        for token, expected in (("secret", 403), ("chief", 200), ("other", 401)):
            answers = asking(port, authorization=f"Bearer {token}")
            assert [status for status, *_ in answers] == [expected] * 3
        return ask(
            port, "POST", "/v2/repository/index", {"ready": True, "x": 1}, authorization="Bearer chief"
        )

    status, _, answer = serve_and(with_tokens, access_file=file)
    assert (status, answer["field"]) == (400, "x")


def test_a_long_body_in_chunks_has_as_long_to_come_as_one_with_a_length(monkeypatch):
    monkeypatch.setattr("seq2seq_serve.server.service.rest._BODY_SECONDS", 0.3)
    monkeypatch.setattr("seq2seq_serve.server.service.rest._LEAST_BYTES_PER_SECOND", 1)

    def asking(port):
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.sendall(chunked_request_of(GENERATE, b'{"text_input": "a"'))  # which is worth 18 seconds
            time.sleep(0.5)  # more than a body without a byte has
            client.sendall(b"1\r\n}\r\n0\r\n\r\n")
            answered = client.recv(4096)
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.sendall(chunked_request_of(GENERATE))
            return answered, client.recv(4096)

    answered, refused = serve_and(asking)
    assert answered.startswith(b"HTTP/1.1 200")
    assert refused.startswith(b"HTTP/1.1 400")


def test_a_body_in_chunks_is_refused_as_soon_as_it_is_too_large(port):
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        client.sendall(chunked_request_of(INFER, *[b" " * 2**20] * 4, b" "))
        assert client.recv(4096).startswith(b"HTTP/1.1 413")
        client.sendall(b"0\r\n\r\n" + request_of(GENERATE, b'{"text_input": "a"}'))
        received = b""
        while b"text_output" not in received:
            received += client.recv(4096)


async def test_a_body_in_chunks_holds_what_has_come_of_it(monkeypatch):
    monkeypatch.setattr("seq2seq_serve.server.service.calls._MAX_HELD_BYTES", 10**6)
    async with serving() as served:
        held = served.app.calls.held.held
        reader, writer = await asyncio.open_connection("127.0.0.1", served.app.http.port)

        async def until(condition):
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0)

        writer.write(chunked_request_of(INFER, b" " * 1000))
        await until(lambda: served.app.rest.open.held)
        assert not held  # as a short body with a length
        writer.write(b"7a120\r\n" + b" " * 500_000 + b"\r\n")
        await until(lambda: held["127.0.0.1"] == 501_000)
        writer.write(b"7a120\r\n" + b" " * 500_000 + b"\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 429")
        writer.close()
        await until(lambda: not held)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/chat/completions", "/v1/audio/transcriptions"),
        ("/suggest", "suggestions are not kept"),
        ("/translate/x", "/translate_file"),
        ("/v2/logging", "traces and log settings are not supported"),
    ],
)
def test_an_unknown_page_of_a_protocol_is_an_error_in_its_form(port, path, hint):
    status, _, answer = ask(port, "POST", path, {})
    error = answer["error"]
    if path.startswith("/v1"):
        assert {**error, "message": ""} == {
            "message": "",
            "type": "invalid_request_error",
            "param": None,
            "code": "UNKNOWN_PAGE",
        }
        error = error["message"]
    else:
        assert (answer["code"], answer["reason"]) == ("NOT_FOUND", "UNKNOWN_PAGE")
    assert status == 404
    assert f"there is no page {path}: " in error
    assert hint in error


def test_refusals_before_a_page_have_its_form(port):
    def first_line_and_content(raw):
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            client.sendall(raw)
            received = b""
            while more := client.recv(4096):
                received += more
        head, _, content = received.partition(b"\r\n\r\n")
        return head.split(b"\r\n")[0], json.loads(content)

    wrong = chunked_request_of("/v1/audio/transcriptions") + b"zz\r\n"
    line, answer = first_line_and_content(wrong)
    assert line == b"HTTP/1.1 400 "
    assert answer["error"]["type"] == "invalid_request_error"
    _, answer = first_line_and_content(wrong.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n"))
    assert answer["error"]["message"].startswith("the body has both Content-Length and Transfer-Encoding")
    _, answer = first_line_and_content(wrong.replace(b"/v1/audio/transcriptions", b"/translate"))
    assert answer["code"] == "INVALID_ARGUMENT"
    status, _, answer = ask(port, "GET", "/v1/models", origin="https://evil.example")
    assert (status, answer["error"]["code"]) == (403, "FORBIDDEN")
    status, headers, answer = ask(port, "GET", "/v1/audio/transcriptions")
    assert (status, headers["allow"], answer["error"]["code"]) == (405, "POST", "METHOD_NOT_ALLOWED")
    assert ask(port, "GET", "/unknown")[2].startswith(b"try /")


def test_slow_bodies_of_one_caller_leave_room_for_others(monkeypatch):
    """They took all places, and every other caller got 429."""
    monkeypatch.setattr("seq2seq_serve.server.service.rest._MAX_OPEN", 4)

    def asking(port):
        with ExitStack() as stack:
            for _ in range(4):
                client = socket.create_connection(("127.0.0.1", port), 20, source_address=("127.0.0.2", 0))
                stack.enter_context(client).sendall(UNFINISHED)
            with socket.create_connection(("127.0.0.1", port), 20, source_address=("127.0.0.2", 0)) as client:
                client.sendall(UNFINISHED)
                refused = client.recv(4096)
            return refused, ask(port, "POST", GENERATE, {"text_input": "a"})[0]

    refused, status = serve_and(asking)
    assert refused.startswith(b"HTTP/1.1 429")
    assert status == 200


def test_a_server_that_drains_answers_what_it_has_accepted(caplog):
    """Calls that were open ended without a status, with a traceback each."""
    caplog.set_level(logging.WARNING)
    body = json.dumps({"text_input": "abc"}).encode()

    async def connect(served, raw):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.app.http.port)
        writer.write(raw)
        return reader, writer

    async def answer_of(reader, writer):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
        return int(head.split()[1])

    async def run():
        async with serving() as served:
            served.runner.gate.clear()
            accepted = [await connect(served, request_of(GENERATE, body)) for _ in range(20)]
            waiting = [await connect(served, request_of(GENERATE, body)[:-1]) for _ in range(20)]
            await served.turns.until(lambda: served.turns.num_submitted == 20)
            async with asyncio.timeout(20):
                while served.app.calls.num_open < 40:
                    await asyncio.sleep(0)
            draining = asyncio.create_task(served.app.drain())
            refused = [await answer_of(*each) for each in waiting]
            late = await answer_of(*await connect(served, request_of(GENERATE, body)))
            served.runner.gate.set()
            answered = [await answer_of(*each) for each in accepted]
            await draining
        return answered, refused, late

    assert asyncio.run(run()) == ([200] * 20, [503] * 20, 503)
    assert caplog.records == []


def test_a_wrong_method_is_an_error_in_json(port):
    status, headers, answer = ask(port, "GET", INFER)
    assert (status, answer["code"], answer["reason"]) == (405, "UNIMPLEMENTED", "METHOD_NOT_ALLOWED")
    assert headers["allow"] == "POST"
    assert "send POST" in answer["error"]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"stop_sequences": ["c", "오"]}, "ab"),
        ({"suppressed_token_ids": [5, 17]}, "abc"),
        ({"logit_bias": {"5": -1.5}}, "abc"),
    ],
)
def test_lists_and_maps_of_json_are_options(port, parameters, text):
    status, _, answer = ask(port, "POST", GENERATE, {"text_input": "abc"} | parameters)
    assert (status, answer["text_output"]) == (200, text)


def test_a_body_may_repeat_the_name_of_the_model(port):
    """The requests of KServe's client were refused."""
    body = infer_body("ab") | {"id": "1", "model_name": "echo"}
    status, _, answer = ask(port, "POST", INFER, body)
    assert (status, answer["outputs"][0]["data"]) == (200, ["ab"])
