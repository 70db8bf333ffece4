import pytest

from seq2seq_serve.server.config import ServerConfig


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": -1}, "port is -1, and must be a whole number from 0 to 65535"),
        ({"metrics_port": 70000}, "metrics_port is 70000"),
        ({"port": 5, "metrics_port": 5}, "port and metrics_port are both 5, and must differ"),
        ({"notice_seconds": -1.0}, "notice_seconds is -1.0"),
        ({"drain_seconds": -1.0}, "drain_seconds is -1.0"),
        ({"drain_seconds": float("inf")}, "drain_seconds is inf"),
        ({"log_level": "loud"}, "log_level is 'loud', and must be one of debug, info"),
        ({"log_format": "xml"}, "log_format is 'xml', and must be one of text, json"),
    ],
)
def test_a_setting_out_of_range_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**changes)


def test_both_ports_may_be_left_to_the_system():
    assert ServerConfig(port=0, metrics_port=0).port == 0
