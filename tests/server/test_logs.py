import fcntl
import json
import logging
import os

import pytest

from seq2seq_serve.server import logs
from seq2seq_serve.server.logs import LogWriter, configure_logging, num_dropped_lines
from seq2seq_serve.server.metrics import Metrics


@pytest.fixture(autouse=True)
def _restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_is_a_line_with_time_level_and_message(capsys):
    configure_logging("info", "text")
    logging.getLogger("server.x").info("r1 Generate OK")
    logging.getLogger("server.x").debug("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("Z INFO    r1 Generate OK\n")
    assert err.count("\n") == 1


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


def test_a_log_that_nobody_reads_drops_lines_counts_them_and_stops_nobody(monkeypatch):
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
