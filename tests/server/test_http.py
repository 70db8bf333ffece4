import socket
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Counter

from seq2seq_serve.server import http
from seq2seq_serve.server.http import HttpServer
from tests.server.service.harness import fetch


@pytest.fixture
def problems():
    return {"unhealthy": None, "unready": None}


@pytest.fixture
def server(problems):
    registry = CollectorRegistry()
    Counter("apples", "Apples.", registry=registry).inc(3)
    server = HttpServer(
        "127.0.0.1",
        0,
        registry=registry,
        unhealthy=lambda: problems["unhealthy"],
        unready=lambda: problems["unready"],
    )
    yield server
    server.stop()


def test_metrics_page_shows_the_registry(server):
    status, text = fetch(server.port, "/metrics")
    assert status == 200
    assert "apples_total 3.0" in text


@pytest.mark.parametrize(("path", "name"), [("/healthz", "unhealthy"), ("/readyz", "unready")])
def test_probe_says_what_is_wrong_and_recovers(server, problems, path, name):
    assert fetch(server.port, path) == (200, "ok\n")
    problems[name] = "the engine hangs"
    assert fetch(server.port, path) == (503, "the engine hangs\n")
    problems[name] = None
    assert fetch(server.port, path) == (200, "ok\n")


def test_unknown_page_names_the_known_ones(server):
    status, text = fetch(server.port, "/")
    assert status == 404
    assert text == "try /metrics, /healthz, /readyz or /v2\n"


def test_port_in_use_is_said_in_one_line(server):
    with pytest.raises(
        OSError, match=rf"^port {server.port} on 127.0.0.1 is in use: choose another --metrics"
    ):
        HttpServer(
            "127.0.0.1",
            server.port,
            registry=CollectorRegistry(),
            unhealthy=lambda: None,
            unready=lambda: None,
        )


def test_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match=r"^cannot listen on port 0 of 192.0.2.1"):
        HttpServer(
            "192.0.2.1",
            0,
            registry=CollectorRegistry(),
            unhealthy=lambda: None,
            unready=lambda: None,
        )


def test_a_newcomer_takes_the_place_of_the_connection_that_is_open_longest(server, monkeypatch, capfd):
    for begun in (b"", b"GET /heal"):
        server._config.timeout_keep_alive = 0.01
        with socket.create_connection(("127.0.0.1", server.port), 20) as silent:
            silent.sendall(begun)
            assert silent.recv(1) == b""
    server._config.timeout_keep_alive = 20
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 3)
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20)) for _ in range(3)
        ]
        assert fetch(server.port, "/healthz") == (200, "ok\n")
        assert idle[0].recv(1) == b""
    server.stop()
    assert capfd.readouterr().err == ""  # no traceback of a client that says nothing
