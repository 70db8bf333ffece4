"""Parts of libraries that any new version may change: an error names what of ours breaks then.

A package that is listed here has an upper bound in pyproject.toml, which goes up once these tests and those
of the named file pass with the new version.
"""

import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from grpc.aio._call import StreamStreamCall
from packaging.requirements import Requirement
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

ROOT = Path(__file__).parents[1]
USERS = {"uvicorn": "server", "torch": "training"}


@pytest.mark.parametrize("package", USERS)
def test_a_library_whose_private_parts_are_used_has_an_upper_bound(package):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (one for one in map(Requirement, extras[USERS[package]]) if one.name == package)
    assert {one.operator for one in wanted.specifier} & {"<", "=="}, wanted
    installed = version(package)
    assert wanted.specifier.contains(installed.partition("+")[0]), (
        f"{package} {installed} is not {wanted}: run `make install`, or raise the bound and run all tests"
    )


USED = {
    "conn": "the bounds of bodies and of their chunks",
    "cycle": "whether a connection may be closed, and the page's answer to a body that is refused",
    "client": "the connections of one client that are closed for those of others",
    "connections": "the most connections, and the shutdown",
    "tasks": "the shutdown, which waits for pages",
    "flow": "the moment in which a client may finish a body that is refused",
    "loop": "every limit of time",
    "timeout_keep_alive": "the time after which a silent connection is closed",
    "timeout_keep_alive_task": "the time after which a silent connection is closed",
    "timeout_keep_alive_handler": "the time after which a silent connection is closed",
    "transport": "every answer that is not a page's",
    "connection_made": "the most connections, and the closing of silent ones",
    "data_received": "the bounds of bodies, and the closing of silent connections",
    "send_400_response": "the form of the answer to what is not HTTP",
}


@pytest.mark.parametrize("name", USED)
async def test_uvicorns_protocol_has_what_the_http_port_builds_on(name):
    async def app(scope, receive, send):
        pass

    protocol = H11Protocol(Config(app), ServerState(), {})
    assert hasattr(protocol, name), f"uvicorn {version('uvicorn')}: server/http.py loses {USED[name]}"


OF_SOCKETS = {
    "client": "the connections of one client that are closed for those of others",
    "close_sent": "the bound of frames",
    "close_timeout": "the closing of sockets whose clients do not read",
    "conn": "the bound of frames",
    "frames": "the bound of frames",
    "connection_lost": "the end of sessions whose clients leave",
    "handle_close": "the end of sessions whose clients leave",
    "handle_connect": "the end of sessions whose clients leave",
    "handle_bytes": "the bound of frames, and messages as bytes",
    "handle_cont": "the bound of frames",
    "handle_parser_exception": "the bound of frames",
    "handle_text": "messages as bytes",
    "handshake_initiated": "the closing of connections whose request cannot be read",
    "keepalive_timeout": "the closing of sockets that are not alive",
    "pending_ping_payload": "pings to clients that are alive",
    "ping_sent_at": "the closing of sockets that are not alive",
    "read_paused": "the bound of messages that wait",
    "schedule_ping": "pings to clients that are alive",
    "transport": "every bound",
    "writable": "the bound of answers that a client does not take",
}


@pytest.mark.parametrize("name", OF_SOCKETS)
async def test_uvicorns_protocol_of_sockets_has_what_the_http_port_builds_on(name):
    async def app(scope, receive, send):
        pass

    config = Config(app)
    config.load()
    protocol = WebSocketsSansIOProtocol(config, ServerState(), {})
    assert hasattr(protocol, name), f"uvicorn {version('uvicorn')}: server/http.py loses {OF_SOCKETS[name]}"


def test_uvicorn_calls_what_the_http_port_overrides_and_reads_what_it_replaces():
    source = inspect.getsource(H11Protocol) + inspect.getsource(WebSocketsSansIOProtocol)
    for use, loss in (
        (r"if upgrade == b\"websocket\" and self\._should_upgrade_to_ws\(\)", "every page becomes a socket"),
        (r"self\.handle_websocket_upgrade\(", "sockets are closed after five seconds"),
        (r"self\.handle_cont\(event\)", "messages have frames without end"),
        (r"call_later\(self\.ping_timeout, self\.keepalive_timeout\)", "dead sockets stay open"),
        (r"self\.conn\.next_event\(\)", "bodies have no bound"),
        (r"self\.send_400_response\(", "wrong bytes get uvicorn's own answer"),
        (r"def _unset_keepalive[^#]+timeout_keep_alive_task = None", "silent connections stay open"),
    ):
        assert re.search(use, source), f"uvicorn {version('uvicorn')}: {loss}; see server/http.py"


def test_torch_tells_whether_the_cpu_has_matrix_units():
    found = torch.cpu._is_amx_tile_supported()
    assert isinstance(found, bool), "training/loop.py would round float32 to bfloat16 on CPUs with AMX"


def test_grpc_writes_a_message_as_a_live_stream_does():
    source = inspect.getsource(StreamStreamCall._write)
    assert "self._cython_call.send_serialized_message(" in source, "client/live.py cannot send any sound"
