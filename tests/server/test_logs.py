import json
import logging

import pytest

from seq2seq_serve.server.logs import configure_logging


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
