"""The complete reliability benchmark in seconds: real server processes with a tiny model.

Bars that depend on the machine's speed are ignored here; all others must be met.
"""

import json
import os
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks.load.mix import VOCAB_SIZE
from benchmarks.peers.work import random_model
from reliability import __main__ as program
from reliability import balance
from reliability import place as reliability_place
from reliability.damage import linked_copy
from reliability.place import BASE, TINY, Place, at_least, at_most
from reliability.report import markdown
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.config import TransformerConfig

_SCALE = 0.005
_DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
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
    linked_copy(place.folder / TINY, place.folder / BASE)


def new_report() -> dict:
    return {"bars": []}


@pytest.mark.slow  # real servers under faults; fast tests of the server cover each fault
@pytest.mark.usefixtures("bundles")
@pytest.mark.parametrize("part", program.PARTS)
def test_every_part_meets_its_bars(place, part, monkeypatch):
    # Behind one proxy: the faults there take half a minute, and the program itself tries all proxies.
    proxies = {name: proxy for name, proxy in balance.PROXIES.items() if proxy.find()}
    monkeypatch.setattr(balance, "PROXIES", dict(list(proxies.items())[:1]))
    report = new_report()
    program.run(place, [part], report)
    if "skipped" in report[part]:
        pytest.skip(report[part]["skipped"])
    assert "problem" not in report[part], report[part]
    assert report["bars"]
    assert [bar for bar in report["bars"] if not bar["met"] and not bar["timed"]] == []
    json.dumps(report)


def test_a_part_that_cannot_run_is_recorded_and_the_others_go_on(place, monkeypatch):
    def broken(place):
        raise RuntimeError("no server")

    sound = [at_most("calls that failed", 0, 0)]
    monkeypatch.setattr(program, "PARTS", {"broken": broken, "sound": lambda place: ({}, sound)})
    report = new_report()
    program.run(place, ["broken", "sound"], report)
    assert report["broken"] == {"problem": "RuntimeError: no server"}
    met = {"broken": [False, True], "sound": [True, True]}  # the second bar: no log has a traceback
    assert [(bar["part"], bar["met"]) for bar in report["bars"]] == [
        (part, is_met) for part in met for is_met in met[part]
    ]


def test_tracebacks_in_the_log_of_a_parts_servers_are_counted(place, monkeypatch):
    @contextmanager
    def serving(bundle, flags, *, stderr):
        stderr.write(b"Traceback (most recent call last):\n")
        yield

    def part(place):
        for _ in range(2):
            with place.serving(place.folder):
                pass
        return {}, []

    monkeypatch.setattr(reliability_place, "serving", serving)
    monkeypatch.setattr(program, "PARTS", {"part": part})
    for _ in range(2):  # the log of one part does not count for the next one
        report = new_report()
        program.run(place, ["part"], report)
        [bar] = report["bars"]
        assert (bar["name"], bar["value"], bar["met"]) == ("tracebacks in the servers' log", 2, False)


def test_a_bar_that_is_no_number_is_not_met():
    assert not at_most("of nothing", float("nan"), 1)["met"]
    assert not at_least("of nothing", float("nan"), 1)["met"]
    assert at_most("just so", 1.0, 1.0)["met"]
    assert at_least("just so", 1.0, 1.0)["met"]


def test_the_documentation_has_the_table_of_the_run_that_it_links_first():
    text = _DOCS.read_text()
    name, *_ = re.findall(r"\(\.\./(benchmarks/results/\S+\.json)\)", text)
    assert markdown(json.loads((_DOCS.parents[1] / name).read_text())) in text
