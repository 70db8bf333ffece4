import pytest
from prometheus_client import CollectorRegistry, Counter

from server.http import HttpServer
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
    assert text == "try /metrics, /healthz or /readyz\n"


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
        HttpServer("192.0.2.1", 0, registry=CollectorRegistry(), unhealthy=lambda: None, unready=lambda: None)
