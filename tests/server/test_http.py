import asyncio
import http.client
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, suppress

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from seq2seq_serve.server import http as server_http
from seq2seq_serve.server.http import HttpServer
from tests.server.service.harness import fetch, on_a_thread


@pytest.fixture
def problems():
    return {"unhealthy": None, "unready": None}


@asynccontextmanager
async def listening(problems, host="127.0.0.1", origins=(), routes=()):
    registry = CollectorRegistry()
    Counter("apples", "Apples.", registry=registry).inc(3)
    server = HttpServer(
        host,
        0,
        registry=registry,
        unhealthy=lambda: problems["unhealthy"],
        unready=lambda: problems["unready"],
        origins=origins,
        routes=routes,
    )
    server.loop, server.registry_of_test = asyncio.get_running_loop(), registry
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def server(problems):
    with on_a_thread(listening(problems)) as server:
        yield server


def test_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match=r"^cannot listen on port 0 of 192.0.2.1"):
        HttpServer(
            "192.0.2.1",
            0,
            registry=CollectorRegistry(),
            unhealthy=lambda: None,
            unready=lambda: None,
        )


def test_a_full_server_closes_its_oldest_connection_for_a_new_one(server, monkeypatch, capfd):
    for begun in (b"", b"GET /heal"):
        server._config.timeout_keep_alive = 0.01
        with socket.create_connection(("127.0.0.1", server.port), 20) as silent:
            silent.sendall(begun)
            assert silent.recv(1) == b""
    server._config.timeout_keep_alive = 20
    monkeypatch.setattr(server_http, "_MAX_CONNECTIONS", 3)
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(3)
        ]
        assert fetch(server.port, "/healthz") == (200, "ok\n")
        assert idle[0].recv(1) == b""
    assert capfd.readouterr().err == ""  # no traceback of a client that says nothing


def test_one_client_cannot_take_the_connections_of_others(server, monkeypatch):
    monkeypatch.setattr(server_http, "_MAX_CONNECTIONS", 4)
    with ExitStack() as stack:

        def probe(client):
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            received = b""
            while not received.endswith(b"ok\n"):
                more = client.recv(4096)
                assert more
                received += more

        def connect(host):
            client = socket.create_connection(("127.0.0.1", server.port), 20, source_address=(host, 0))
            probe(stack.enter_context(client))
            return client

        other = connect("127.0.0.2")
        for _ in range(12):
            connect("127.0.0.3")
        probe(other)


def test_a_blocked_event_loop_fails_the_liveness_probe(server):
    """The probe was answered by another loop: the process was never restarted."""
    standing, going_on = threading.Event(), threading.Event()

    def stand_still():
        standing.set()
        assert going_on.wait(20)

    server.loop.call_soon_threadsafe(stand_still)
    assert standing.wait(20)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=0.2)
    connection.request("GET", "/healthz")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    going_on.set()
    assert fetch(server.port, "/healthz") == (200, "ok\n")


def test_an_answer_on_a_kept_connection_does_not_wait_for_acknowledgements(server):
    """Head and body are two small writes: the body waited 40 ms for a client that delays acknowledgements."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.connect()
    kept = connection.sock
    for path in ("/healthz", "/metrics"):
        connection.request("GET", path)
        assert connection.getresponse().read()
    assert connection.sock is kept
    (accepted,) = server._state.connections
    its_socket = accepted.transport.get_extra_info("socket")
    assert its_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()


class Watched(Collector):
    """Counts the scrapes that are written, and the most that are written at once."""

    def __init__(self) -> None:
        self.num_collected = self.num_at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def collect(self) -> Iterator[CounterMetricFamily]:
        with self._lock:
            self.num_collected += 1
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        yield CounterMetricFamily("pears", "Pears.", value=self.num_collected)
        with self._lock:
            self.num_at_once -= 1


def test_many_scrapes_are_written_once(server, monkeypatch):
    """Each was written on a thread of its own: a call of 12 ms took 643 beside 40 clients."""
    server.registry_of_test.register(watched := Watched())
    monkeypatch.setattr(server_http, "_KEPT_SECONDS", 0.0)
    assert "pears_total 1.0" in fetch(server.port, "/metrics")[1]
    monkeypatch.setattr(server_http, "_KEPT_SECONDS", 3600.0)
    with ThreadPoolExecutor(20) as pool:
        answers = set(pool.map(lambda _: fetch(server.port, "/metrics"), range(60)))
    assert (len(answers), watched.num_collected) == (1, 2)


def test_scrapes_in_many_forms_are_written_one_after_the_other(server, monkeypatch):
    monkeypatch.setattr(server_http, "_REST", 0)
    server.registry_of_test.register(watched := Watched())
    forms = [f"application/openmetrics-text; version=1.0.{number}" for number in range(20)]
    forms += ["text/plain; version=x"]  # is an error in prometheus-client
    with ThreadPoolExecutor(len(forms)) as pool:
        assert set(pool.map(lambda form: status_of(server.port, "/metrics", accept=form), forms)) == {200}
    assert watched.most_at_once == 1


def send(port: int, raw: bytes) -> bytes:
    """Returns the bytes that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        client.sendall(raw)
        received = b""
        while more := client.recv(4096):
            received += more
        return received


def test_a_body_with_a_length_and_chunks_is_refused(server):
    """A second request that hides in the body of the first one is not answered."""
    head = b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    received = send(server.port, head + b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400")
    assert received.count(b"HTTP/1.1 ") == 1
    answer = json.loads(received.partition(b"\r\n\r\n")[2])
    assert (answer["code"], answer["reason"]) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
    assert "both Content-Length and Transfer-Encoding" in answer["error"]


CHUNKED = b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_in_chunks_that_no_page_reads_is_thrown_away(server):
    get = b"GET /healthz HTTP/1.1\r\n" + CHUNKED + b"3\r\nabc\r\n" * 300 + b"0\r\n\r\n"
    received = send(server.port, 2 * get + b"GET /healthz HTTP/1.1\r\nConnection: close\r\nHost: a\r\n\r\n")
    assert received.count(b"HTTP/1.1 200") == 3


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        (b"1\r\na\r\n" * 40, "22 chunks in 22 bytes"),
        (b"a\r\n0123456789\r\n" * 20, ""),  # as long as they are read, long chunks go on
        (b"400\r\n" + b"a" * 1024 + b"\r\n", "more than 1000 bytes"),
        (b"zz\r\n", "Invalid HTTP request received."),
    ],
)
def test_short_chunks_and_endless_bodies_end_the_connection(server, monkeypatch, chunks, problem):
    """They took the event loop as long as their client wanted, after the answer, too."""
    monkeypatch.setattr(server_http, "_FREE_CHUNKS", 19)
    monkeypatch.setattr(server_http, "_LEAST_CHUNK_BYTES", 10)
    monkeypatch.setattr(server_http, "_MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(server_http, "_LINGER_SECONDS", 0.05)
    received = send(server.port, b"GET /healthz HTTP/1.1\r\nConnection: close\r\n" + CHUNKED + chunks)
    if problem:
        assert received.startswith(b"HTTP/1.1 400")
        assert problem in json.loads(received.partition(b"\r\n\r\n")[2])["error"]
    else:
        assert received.startswith(b"HTTP/1.1 200")


def test_bytes_that_are_not_http_are_refused_as_other_errors(server):
    received = send(server.port, b"\x16\x03\x01\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["code"] == "INVALID_ARGUMENT"


def headers_of(port: int, method: str, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.headers


def status_of(port: int, path: str, **headers: str) -> int:
    return headers_of(port, "GET", path, **headers)[0]


@pytest.mark.parametrize(
    ("headers", "local", "remote"),
    [
        ({}, 200, 200),
        ({"host": "localhost:9464"}, 200, 200),
        ({"host": "[::1]:9464"}, 200, 200),
        ({"host": "10.0.0.7"}, 200, 200),
        ({"host": "serving.example.org"}, 403, 200),  # of a proxy or a Service, or of a page
        ({"host": "["}, 403, 403),
        ({"host": "localhost:9464", "origin": "http://localhost:9464"}, 200, 200),
        ({"host": "localhost:9464", "origin": "http://localhost:80"}, 403, 403),
        ({"host": "localhost:9464", "origin": "https://localhost:9464"}, 403, 403),
        ({"host": "localhost:9464", "origin": "null"}, 403, 403),
        ({"host": "localhost:9464", "origin": "http://["}, 403, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403, 403),  # its name leads here
        ({"sec_fetch_site": "cross-site"}, 403, 403),
        ({"sec_fetch_site": "none"}, 200, 200),
    ],
)
def test_pages_of_other_sites_are_refused(problems, headers, local, remote):
    """Names as Host are for proxies and containers, which do not reach a server that listens locally."""
    for host, expected in (("127.0.0.1", local), ("0.0.0.0", remote)):
        with on_a_thread(listening(problems, host)) as server:
            assert status_of(server.port, "/metrics", **headers) == expected
            assert status_of(server.port, "/healthz", **headers) == 200


def test_pages_of_allowed_origins_are_answered(problems):
    """LibreTranslate's extensions and pages ask from a site of their own."""
    page = {"host": "translate.example", "origin": "https://notes.example", "sec_fetch_site": "cross-site"}
    ask = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    with on_a_thread(listening(problems, origins=["https://notes.example"])) as server:
        for method, headers in (("GET", page), ("OPTIONS", page | ask)):
            status, answered = headers_of(server.port, method, "/metrics/", **headers)
            assert (status, answered["access-control-allow-origin"]) == (200, "https://notes.example")
        assert answered["access-control-allow-headers"] == "authorization"
        for method in ("GET", "OPTIONS"):
            other = page | ask | {"origin": "https://evil.example"}
            status, answered = headers_of(server.port, method, "/metrics", **other)
            assert (status, answered["access-control-allow-origin"]) == (403, None)


def test_a_caller_that_never_reads_does_not_delay_the_shutdown(problems, monkeypatch, caplog):
    monkeypatch.setattr(server_http, "_CLOSE_SECONDS", 0.05)
    caplog.set_level(logging.WARNING)
    problems["unhealthy"] = "x" * 10**7
    with socket.socket() as client, on_a_thread(listening(problems)) as server:
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        assert client.recv(1)
    assert caplog.records == []


async def echo(socket):
    """Answers each message with itself, and with as many bytes as it says."""
    await socket.accept()
    async for message in socket.iter_bytes():
        await socket.send_bytes(message)
        if message.isdigit():
            await socket.send_bytes(bytes(int(message)))


async def read_nothing(socket):
    await socket.accept()
    assert not await socket.scope["state"]["left"]


@pytest.fixture
def sockets(problems):
    routes = [WebSocketRoute("/echo", echo), WebSocketRoute("/read_nothing", read_nothing)]
    with on_a_thread(listening(problems, routes=routes)) as server:
        yield server


def opened(server, **options):
    return connect(f"ws://127.0.0.1:{server.port}/echo", compression=None, **options)


OPENING = (
    b"GET /echo HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def until_closed(client) -> bytes:
    """All that a server sends before it closes a connection."""
    received = b""
    with suppress(ConnectionResetError):
        while part := client.recv(2**16):
            received += part
    return received


def frame(content: bytes, opcode: int = 2) -> bytes:
    """A short frame of a client, with a mask of zeros."""
    return bytes([0x80 | opcode, 0x80 | len(content), 0, 0, 0, 0]) + content


def test_a_socket_outlives_the_limit_of_silent_connections(sockets):
    sockets._config.timeout_keep_alive = 0.01
    sockets._config.ws_ping_interval = 0.02
    with opened(sockets) as socket:
        with socket_of_a_silent_client(sockets) as silent:
            assert until_closed(silent) == b""
        socket.send(b"a")  # it has answered pings in the meantime
        assert socket.recv() == b"a"


def socket_of_a_silent_client(server):
    """A connection on which the request for a socket never ends."""
    client = socket.create_connection(("127.0.0.1", server.port), 20)
    client.sendall(OPENING)
    return client


def test_a_client_that_answers_no_ping_is_closed(sockets):
    sockets._config.ws_ping_interval = sockets._config.ws_ping_timeout = 0.02
    with socket_of_a_silent_client(sockets) as client:
        client.sendall(b"\r\n")
        received = until_closed(client)
    assert received.startswith(b"HTTP/1.1 101 ")
    assert b"keepalive ping timeout" in received


def send_pings(client):
    while True:
        client.sendall(frame(b"a" * 100, opcode=9) * 100)


def test_a_client_that_takes_no_answers_is_read_no_further_and_closed(sockets, monkeypatch):
    sockets._config.ws_ping_interval = sockets._config.ws_ping_timeout = 0.05
    monkeypatch.setattr(server_http, "_PING_SECONDS", 0.05)
    monkeypatch.setattr(server_http, "_LINGER_SECONDS", 0.05)
    with socket_of_a_silent_client(sockets) as client:
        client.sendall(b"\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 101")
        client.sendall(frame(b"100000000"))
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            send_pings(client)


def test_little_is_received_ahead_of_a_page_that_does_not_read(sockets):
    """What follows is a client's own pings."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        client.connect(("127.0.0.1", sockets.port))
        client.sendall(OPENING.replace(b"/echo", b"/read_nothing") + b"\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 101")
        client.settimeout(0.3)
        num_bytes = 0
        with suppress(TimeoutError):
            while num_bytes < 2**22:
                num_bytes += client.send(frame(b"a" * 100) * 10)
    assert num_bytes < 2**18


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_who_is_not_read_is_seen_to_leave(sockets, is_reset):
    with socket.create_connection(("127.0.0.1", sockets.port), 20) as client:
        client.sendall(OPENING.replace(b"/echo", b"/read_nothing") + b"\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 101")
        client.sendall(frame(b"a" * 100) * 100)
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            client.sendall(frame(b"\x03\xe8", opcode=8))
    deadline = time.monotonic() + 20
    while sockets._state.tasks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nothing_is_written_to_a_client_that_has_left(problems, caplog):
    """Each further message of the same turn of the event loop was a warning of asyncio in the log."""
    done = threading.Event()

    async def send_many(socket):
        await socket.accept()
        while True:  # until the client has left
            try:
                for _ in range(64):
                    await socket.send_bytes(b"text")
            except WebSocketDisconnect:
                done.set()
                return
            await asyncio.sleep(0)

    with on_a_thread(listening(problems, routes=[WebSocketRoute("/echo", send_many)])) as server:
        with socket.create_connection(("127.0.0.1", server.port), 20) as client:
            client.sendall(OPENING + b"\r\n")
            assert client.recv(2**16).startswith(b"HTTP/1.1 101")
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert done.wait(20)
    assert "socket.send() raised exception" not in caplog.text


def test_a_message_may_have_frames_but_not_without_end(sockets):
    with opened(sockets, max_size=None) as socket:
        socket.send([b"ab"] * 900)
        assert socket.recv() == b"ab" * 900
        socket.send([b"a" * 256] * 5000)
        assert len(socket.recv()) == 256 * 5000
    with socket_of_a_silent_client(sockets) as client:
        client.sendall(b"\r\n")
        assert client.recv(2**16).startswith(b"HTTP/1.1 101")
        client.sendall(b"\x02\x80\0\0\0\0" + b"\0\x80\0\0\0\0" * 1100)
        received = until_closed(client)
    assert b"\x03\xf1the message has too many frames" in received  # 1009


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (OPENING + b"".join(b"a%d: b\r\n" % number for number in range(200)), b"400"),
        (OPENING.replace(b"Version: 13", b"Version: 7"), b"400"),
        (OPENING.replace(b"Sec-WebSocket-Key", b"Key"), b"400"),
        (OPENING.replace(b"Host: localhost", b"Host: localhost\r\nOrigin: http://other.example"), b"403"),
        (OPENING.replace(b"Host: localhost", b"Host: other.example"), b"403"),
        (OPENING.replace(b"/echo", b"/healthz"), b"200"),
        (OPENING.replace(b"/echo", b"/other"), b"404"),
    ],
)
def test_a_request_that_cannot_open_a_socket_is_answered_and_closed(sockets, request_bytes, status, capfd):
    sockets._config.timeout_keep_alive = 0.05
    with socket.create_connection(("127.0.0.1", sockets.port), 20) as client:
        client.sendall(request_bytes + b"\r\n")
        assert until_closed(client).split(b" ")[1] == status
    assert capfd.readouterr().err == ""


def test_sockets_count_among_the_connections_of_a_client(sockets, monkeypatch):
    monkeypatch.setattr(server_http, "_MAX_CONNECTIONS", 2)
    with ExitStack() as stack:
        clients = []
        for _ in range(3):
            clients.append(stack.enter_context(socket_of_a_silent_client(sockets)))
            clients[-1].sendall(b"\r\n")
            assert clients[-1].recv(2**16).startswith(b"HTTP/1.1 101")
        assert until_closed(clients[0]) == b""


def test_a_page_of_another_site_cannot_open_a_socket(sockets):
    with pytest.raises(InvalidStatus, match="403"):
        opened(sockets, origin="https://other.example")
    with opened(sockets, origin=f"http://127.0.0.1:{sockets.port}") as own:
        own.send(b"a")
        assert own.recv() == b"a"
