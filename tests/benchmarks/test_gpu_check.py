"""The check of a GPU, as far as it goes without one."""

import dataclasses
import json

import pytest
import torch

from benchmarks import gpu_check, gpu_parts, gpu_speed
from benchmarks.gpu_place import CPU_SCALE, CUDA_SCALE, Place, random_model
from bundle.names import Precision

FOUND = {
    "results": [
        {"contender": "ours fp16", "rows": 1, "step_ms": 0.4, "floor_ms": 0.03, "tokens_per_second": 2e3},
        {
            "contender": "ours fp16",
            "rows": 64,
            "step_ms": 0.6,
            "floor_ms": 0.1,
            "tokens_per_second": 50_000.0,
        },
        {"contender": "generate", "rows": 64, "floor_ms": 0.1, "tokens_per_second": 4e3},
        {"contender": "generate static", "rows": 64, "floor_ms": 0.1, "tokens_per_second": 2e4},
    ]
}


@pytest.mark.slow  # the parts and the peers have tests of their own
@pytest.mark.filterwarnings("ignore")  # of the peers' own code
def test_every_part_but_cudas_own_runs_on_the_cpu(tmp_path, capsys):
    out = tmp_path / "results" / "report.json"
    assert gpu_check.main(["--device", "cpu", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert json.loads(out.read_text()) == report
    assert list(report["parts"]) == ["export fp32", "placement", "parity", "tokens", "speed", "memory"]
    assert "tokens: passed in " in printed.err
    speed = report["parts"]["speed"]["found"]
    contenders = {row["contender"] for row in speed["results"]}
    assert contenders >= {"ours fp32", "ours fp32 uncaptured"}
    assert contenders | speed["missing"].keys() >= {"generate", "generate static", "ctranslate2"}
    assert report["parts"]["memory"]["found"]["requests"] == CPU_SCALE.num_requests


def test_without_a_device_the_check_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert gpu_check.main([]) == 1
    assert "gpu_check: torch finds no CUDA device" in capsys.readouterr().err


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(CPU_SCALE, tmp_path, random_model(CPU_SCALE.model))


def test_a_part_that_fails_is_recorded_and_the_others_go_on(place, monkeypatch, capsys):
    def fail(place: Place, precision: Precision) -> dict:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(gpu_parts, "export", fail)
    monkeypatch.setattr(gpu_speed, "read_bandwidth", lambda device: 1e9)
    report = gpu_check.measure(place.folder, "cpu", gpu_check.Console(stderr=True))
    parts = report["parts"]
    assert parts["export fp32"]["problem"] == "RuntimeError: no kernel"
    assert "there is no bundle for the device, since every export failed" in parts["tokens"]["problem"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "failed") | {
        "placement": "passed"
    }
    assert report["bars"] == []


def test_a_part_that_finds_something_wrong_keeps_what_it_found():
    def part() -> dict:
        raise gpu_parts.PartFailed("too far apart", {"worst": 3.0})

    result = gpu_check._run(part, deadline=float("inf"))
    assert (result["status"], result["problem"], result["found"]) == (
        "failed",
        "too far apart",
        {"worst": 3.0},
    )
    assert gpu_check._run(part, deadline=0.0)["status"] == "no time was left"


def test_tokens_may_part_where_the_oracle_is_in_doubt_and_nowhere_else(place):
    model = place.model()
    source = place.sources(1)[0]
    with torch.inference_mode():
        ids = torch.tensor([source])
        logits = model(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([[1]]))[0, -1]
    first, second = logits.topk(2).indices.tolist()
    gap = gpu_parts._gap(model, source, [second, 9], [first, 7])
    assert gap == pytest.approx(float(logits[first] - logits[second]))
    assert gpu_parts._gap(model, source, [first], [first, 7]) == pytest.approx(
        gpu_parts._gap(model, source, [first, 2], [first, 7])
    )


def test_every_bar_says_whether_it_was_met(place):
    cuda = dataclasses.replace(place, scale=CUDA_SCALE)
    bars = gpu_speed.bars(cuda, FOUND)
    assert [bar["is_met"] for bar in bars] == [True, False, None]
    assert bars[1]["measured"] == 2.5, "the faster of the two counts"
    assert gpu_check._describe(bars[0]) == "met: ms of a captured step at 1 row is 0.40, at most 0.5"
    assert gpu_check._describe(bars[1]).startswith("NOT MET: ")
    assert gpu_check._describe(bars[2]).startswith("not measured: ")


def test_a_step_reads_the_weights_once_and_each_rows_live_positions():
    D, F, L, V = 512, 2048, 6, 32_000
    weights = L * (6 * D * D + 2 * D * F) + V * D
    one, two = (gpu_speed.step_bytes(CUDA_SCALE, 2, rows) for rows in (1, 2))
    assert two - one == 2 * (2 * L * D * (20 + 16))
    assert one == 2 * weights + (two - one)
