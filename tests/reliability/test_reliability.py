"""The complete reliability benchmark in seconds: real server processes with a tiny model.

Bars that depend on the machine's speed are ignored here; all others must be met.
"""

import json
import os
import shutil

import pytest
from rich.progress import Progress

from benchmarks.load.mix import VOCAB_SIZE
from benchmarks.peers.work import random_model
from reliability import __main__ as program
from reliability import balance
from reliability.place import BASE, TINY, Place
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.config import TransformerConfig

_SCALE = 0.005
_MODEL = TransformerConfig(
    vocab_size=VOCAB_SIZE,
    d_model=32,
    d_ff=32,
    num_heads=1,
    num_encoder_layers=1,
    num_decoder_layers=1,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    cores = sorted(os.sched_getaffinity(0))
    return Place(tmp_path_factory.mktemp("reliability"), _SCALE, cores, cores, Progress(disable=True))


@pytest.fixture(scope="module")
def bundles(place):
    export_bundle(random_model(_MODEL), place.folder / TINY, (Precision.INT8,))
    shutil.copytree(place.folder / TINY, place.folder / BASE)


@pytest.mark.usefixtures("bundles")
@pytest.mark.parametrize("part", program.PARTS)
def test_every_part_meets_its_bars(place, part, monkeypatch):
    # Behind one proxy: the faults there take half a minute, and the program itself tries all proxies.
    proxies = {name: proxy for name, proxy in balance.PROXIES.items() if proxy.find()}
    monkeypatch.setattr(balance, "PROXIES", dict(list(proxies.items())[:1]))
    report = {"bars": []}
    program.run(place, [part], report)
    if part == "clock" and "missing" in report[part]:
        pytest.skip("libfaketime is not installed")
    assert "problem" not in report[part], report[part]
    assert len(report["bars"]) > 1
    assert [bar for bar in report["bars"] if not bar["met"] and not bar["timed"]] == []
    json.dumps(report)


def test_a_part_that_cannot_run_is_recorded_and_the_others_go_on(place, monkeypatch):
    def broken(place):
        raise RuntimeError("no server")

    def sound(place):
        place.at_most("calls that failed", 0, 0)
        return {}

    monkeypatch.setattr(program, "PARTS", {"broken": broken, "sound": sound})
    report = {"bars": []}
    program.run(place, ["broken", "sound"], report)
    assert report["broken"] == {"problem": "RuntimeError: no server"}
    met = {"broken": [False, True], "sound": [True, True]}  # the second bar: no log has a traceback
    assert [(bar["part"], bar["met"]) for bar in report["bars"]] == [
        (part, is_met) for part in met for is_met in met[part]
    ]
