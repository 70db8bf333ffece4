import asyncio
import fcntl
import json
import logging
import os
import re
import subprocess
import sys

import grpc
import pytest

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.system import logs
from seq2seq_serve.server.system.logs import LogWriter, configure_logging, num_dropped_lines
from seq2seq_serve.server.telemetry.metrics import Metrics
from tests.server.service.harness import serving


@pytest.fixture(autouse=True)
def _restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_of_callers_cannot_forge_a_log_record_or_field(capsys):
    """`x-request-id: a caller=root` put a field of its own into the line of a call."""
    configure_logging("info", "text")
    fields = {"code": "OK", "model": 'a caller=root "b"', "caller": "c=d", "mode": "greedy", "slow": True}
    logging.getLogger("server.x").info("r1 Generate OK", extra={"fields": fields})
    try:
        raise RuntimeError("a\n2026-01-01T00:00:00Z INFO    forged\r\x1b[2J\u2028안녕")
    except RuntimeError as error:
        logging.getLogger("server.x").exception("r1: %s", error)
    first, second, *others = capsys.readouterr().err.removesuffix("\n").split("\n")
    assert first.endswith(r' r1 Generate OK model="a caller=root \"b\"" caller="c=d" mode=greedy slow=True')
    assert second.endswith("Z ERROR   r1: a")
    assert others[0] == r"  2026-01-01T00:00:00Z INFO    forged\r\x1b[2J\u2028안녕"
    assert others[1].startswith("  Traceback")
    assert all(line.startswith("  ") and line.isprintable() for line in others)


def test_a_line_of_a_call_has_the_servers_fields_whatever_callers_send(capsys):
    forged = "x\n2026-01-01T00:00:00Z INFO    x Generate OK caller=root"

    async def run():
        async with serving() as served:
            for name in ("", forged):
                for metadata in (
                    [],
                    [("x-request-id", "x caller=root")],
                    [("x-request-id", "caller=root")],
                    [("traceparent", "00 caller=root"), ("user-agent", "x caller=root")],
                ):
                    options = pb.GenerateOptions(source_language=forged, stop_sequences=[forged])
                    sources = [pb.Source(text=forged, name=forged)]
                    request = pb.GenerateRequest(model=name, sources=sources, options=options)
                    with pytest.raises(grpc.aio.AioRpcError):
                        await served.stub.Generate(request, metadata=metadata)
            for path in ("/v2/models/x%0Acaller=root", "/v2/models/echo/versions/x%20caller=root"):
                await served.http(path)

    configure_logging("info", "text")
    asyncio.run(run())
    value = r'("([^"\\]|\\.)*"|[^\s"=]+)'
    line_of_call = re.compile(rf"\S+Z INFO    [0-9a-f]{{32}} \w+ [A-Z_]+( [a-z_]+={value})*")
    lines = [line for line in capsys.readouterr().err.splitlines() if "service=" in line]
    assert len(lines) == 10
    for line in lines:
        assert line_of_call.fullmatch(line), line
        assert [line.count(f" {name}=") for name in ("service", "caller")] == [1, 1], line
        assert "root" not in line


def test_json_is_an_object_a_line_with_the_traceback_inside(capsys):
    configure_logging("debug", "json")
    try:
        raise RuntimeError("안녕")
    except RuntimeError:
        logging.getLogger("server.x").exception("r1: a bug")
    [line] = capsys.readouterr().err.splitlines()
    content = json.loads(line)
    assert (content["level"], content["logger"], content["message"]) == ("error", "server.x", "r1: a bug")
    assert "RuntimeError: 안녕" in content["traceback"]
    assert "안녕" in line


def test_an_unread_log_drops_and_counts_lines_and_blocks_no_caller(monkeypatch):
    monkeypatch.setattr(logs, "_MAX_LINES", 5)
    monkeypatch.setattr(logs, "_FLUSH_SECONDS", 0.05)
    reader, writer = os.pipe()
    capacity = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    handler, logger = LogWriter(writer), logging.getLogger("server.x")
    logging.getLogger().handlers[:] = [handler]
    line = "x" * (capacity - 1)
    logger.warning(line)  # fills the pipe
    handler.flush()
    for number in range(20):
        logger.warning("line %d", number)
    handler.flush()  # ends, though nobody reads
    # One line is being written, five wait.
    assert num_dropped_lines() in (14, 15)
    assert Metrics().registry.get_sample_value("seq2seq_log_lines_dropped_total") == num_dropped_lines()
    monkeypatch.setattr(logs, "_FLUSH_SECONDS", 20)
    assert os.read(reader, capacity) == f"{line}\n".encode()
    handler.flush()
    written = os.read(reader, capacity).decode().splitlines()
    assert written == [f"line {number}" for number in range(20 - num_dropped_lines())]
    os.close(reader)
    dropped = num_dropped_lines()
    logger.warning("nobody can read it")
    handler.flush()
    assert num_dropped_lines() == dropped + 1


@pytest.mark.parametrize("place", ["full disk", "pipe without a reader"])
def test_a_log_that_cannot_be_written_ends_no_program(place):
    program = (
        "import logging; from seq2seq_serve.server.system.logs import configure_logging as configure\n"
        "configure('info', 'text')\n"
        "for _ in range(300): logging.getLogger('server.x').warning('a line')\n"
        "print('done')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    stderr = full if place == "full disk" else writer
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr, text=True)
    os.close(writer)
    os.close(full)
    assert (ended.stdout, ended.returncode) == ("done\n", 0)
