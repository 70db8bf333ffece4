import argparse

import pytest

from benchmarks.flags import positive


def test_a_number_of_turns_is_at_least_1(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=positive)
    assert parser.parse_args(["--rounds", "1"]).rounds == 1
    for wrong, message in {
        "0": "--rounds: 0 is less than 1",
        "x": "--rounds: invalid positive value",
    }.items():
        with pytest.raises(SystemExit):
            parser.parse_args(["--rounds", wrong])
        assert message in capsys.readouterr().err
