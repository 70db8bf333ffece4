"""The check of a GPU, as far as it goes without one."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from io import StringIO

import pytest
import torch
from packaging.requirements import Requirement
from rich.console import Console

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import design as gpu_design
from benchmarks.gpu_check import kernels as gpu_kernels
from benchmarks.gpu_check import parts as gpu_parts
from benchmarks.gpu_check import run as gpu_run
from benchmarks.gpu_check import speed as gpu_speed
from benchmarks.gpu_check.place import CPU_SCALE, CUDA_SCALE, Place, random_model
from seq2seq_serve.bundle.names import Precision

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


WITHOUT_PACKAGES = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing())
"""


@pytest.mark.slow  # the parts and the peers have tests of their own
@pytest.mark.filterwarnings("ignore")  # of the peers' own code
def test_every_part_but_cudas_own_runs_on_the_cpu(tmp_path, capsys):
    parts = {}
    for command in ("design", "speed"):
        out = tmp_path / "results" / f"{command}.json"
        assert gpu_check.main([command, "--device", "cpu", "--out", str(out)]) == 0
        printed = capsys.readouterr()
        report = json.loads(printed.out.splitlines()[-1])
        assert json.loads(out.read_text()) == report
        for name in report["parts"]:
            assert f"{name}: passed in " in printed.err
        parts[command] = report["parts"]
    design, speed = parts["design"], parts["speed"]
    assert list(design) == [
        *("graphs", "attention", "steps", "export fp32"),
        *("placement", "parity", "tokens"),
    ]
    assert list(speed) == ["export fp32", "speed", "memory"]
    found = speed["speed"]["found"]
    contenders = {row["contender"] for row in found["results"]}
    assert contenders >= {"ours fp32", "ours fp32 uncaptured"}
    assert contenders | found["missing"].keys() >= {"generate", "generate static", "ctranslate2"}
    assert speed["memory"]["found"]["requests"] == CPU_SCALE.num_requests


def run_without(absent: list[str], code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that does not find some packages."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES.format(absent=absent) + code],
        cwd=gpu_run._ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_everything_that_is_missing_is_reported_at_once_and_before_it_is_imported():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    absent = ["pydantic", "grpc_status", "sentencex", "rich"]
    code = "from benchmarks.gpu_check.__main__ import main; sys.exit(main(['design']))"
    done = run_without(absent, code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu_check: this machine lacks what the check needs:\n")
    for name in absent:
        assert f"the package {name} is not installed" in done.stderr
    assert "torch finds no CUDA device" in done.stderr
    problem = "does not have CUDAExecutionProvider: uninstall it, and install onnxruntime-gpu[cuda,cudnn]"
    assert problem in done.stderr
    assert "cannot be imported" not in done.stderr
    assert re.search("pip download .* pydantic==", done.stderr)


def test_a_package_that_is_installed_but_too_old_is_reported(monkeypatch):
    def fail(name: str) -> None:
        if name == "seq2seq_serve.server.__main__":
            raise RuntimeError("The grpc package installed is at version 1.60.0")

    monkeypatch.setattr("benchmarks.gpu_check.__main__.importlib.import_module", fail)
    assert gpu_check.missing("cpu").splitlines()[1:] == [
        "  seq2seq_serve.server.__main__ cannot be imported: RuntimeError: The grpc package installed is at "
        "version 1.60.0"
    ]


def test_the_wheels_to_carry_are_those_that_the_project_takes(capsys):
    assert gpu_check.main(["wheels"]) == 0
    printed = capsys.readouterr()
    wheels = list(map(Requirement, printed.out.split()))
    assert all(wheel.specifier for wheel in wheels)
    extras = tomllib.loads((gpu_check._ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    wanted = {item.name: item.specifier for item in map(Requirement, extras["server"] + extras["client"])}
    for wheel in wheels:
        [pin] = wheel.specifier
        assert wanted.get(wheel.name, wheel.specifier).contains(pin.version), wheel
    assert f"--dest wheels {' '.join(map(str, wheels))}" in printed.err


@pytest.mark.slow
def test_only_tests_of_a_gpu_are_collected_and_need_no_package_of_other_tests():
    files = gpu_run.gpu_test_files()
    assert files == ["tests/test_cuda.py", "tests/training/test_loop.py"]
    absent = ["hypothesis", "trustme", "tritonclient", "transformers", "ctranslate2", "yaml", "sentencex"]
    code = f"import pytest; sys.exit(pytest.main(['-q', '-m', 'gpu', '--collect-only', *{files!r}]))"
    done = run_without(absent, code, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout
    assert "test_served_greedy_is_the_oracle" in done.stdout
    assert "test_a_gpu_learns_what_a_cpu_learns" in done.stdout


def test_the_tests_part_keeps_the_names_of_the_tests_that_failed(monkeypatch):
    def command(deadline: float, *arguments: str, **environment: str) -> str:
        output = "..F\nFAILED tests/test_cuda.py::test_x - no kernel\n1 failed, 2 passed in 3.00s\n"
        raise subprocess.CalledProcessError(1, arguments, output)

    monkeypatch.setattr(gpu_run, "_command", command)
    result = gpu_run._run(lambda: gpu_run._tests(0.0), deadline=float("inf"))
    assert result["problem"] == "1 failed, 2 passed in 3.00s"
    assert result["found"]["failed"] == ["FAILED tests/test_cuda.py::test_x - no kernel"]


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(CPU_SCALE, tmp_path, random_model(CPU_SCALE.model))


def test_a_part_that_fails_is_recorded_at_once_and_the_others_go_on(place, monkeypatch, capsys):
    def fail(place: Place, precision: Precision) -> dict:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(gpu_parts, "export", fail)
    monkeypatch.setattr(gpu_design.convert, "convert", fail)
    out, written = place.folder / "report.json", []
    show = gpu_run._show

    def show_and_read(console: Console, name: str, part: dict) -> None:
        show(console, name, part)
        written.append(list(json.loads(out.read_text())["parts"]) if out.exists() else [])

    monkeypatch.setattr(gpu_run, "_show", show_and_read)
    report = gpu_run.measure("design", place.folder, "cpu", Console(file=StringIO()), out)
    parts = report["parts"]
    names = list(parts)
    assert written == [names[:i] for i in range(len(names))], "a part's result waits for later parts"
    assert json.loads(out.read_text()) == report
    assert parts["export fp32"]["problem"] == "RuntimeError: no kernel"
    assert "there is no bundle for the device, since every export failed" in parts["tokens"]["problem"]
    assert {name: part["status"] for name, part in parts.items()} == dict.fromkeys(parts, "failed") | {
        "placement": "passed"
    }
    assert report["bars"] == []


def test_a_part_that_finds_something_wrong_keeps_what_it_found():
    def part() -> dict:
        raise gpu_parts.PartFailed("too far apart", {"worst": 3.0})

    result = gpu_run._run(part, deadline=float("inf"))
    assert (result["status"], result["problem"], result["found"]) == (
        "failed",
        "too far apart",
        {"worst": 3.0},
    )
    assert gpu_run._run(part, deadline=0.0)["status"] == "no time was left"


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
    assert gpu_run._describe(bars[0]) == "met: ms of a captured step at 1 row is 0.40, at most 0.5"
    assert gpu_run._describe(bars[1]).startswith("NOT MET: ")
    assert gpu_run._describe(bars[2]).startswith("not measured: ")


def test_a_step_of_base_is_as_many_kernels_as_the_docs_say():
    assert gpu_speed.step_kernels(CUDA_SCALE.model.num_decoder_layers) == 81


def test_a_step_reads_the_weights_once_and_each_rows_live_positions():
    D, F, L, V = 512, 2048, 6, 32_000
    weights = L * (6 * D * D + 2 * D * F) + V * D
    one, two = (gpu_speed.step_bytes(CUDA_SCALE, 2, rows) for rows in (1, 2))
    assert two - one == 2 * (2 * L * D * (20 + 16))
    assert one == 2 * weights + (two - one)


def test_a_choice_that_fails_does_not_hide_the_others(place, monkeypatch):
    def timed(place: Place, verb: str, shapes: tuple, sdpa_kernels: str, **environment: str) -> list[dict]:
        if sdpa_kernels == "8" or environment.get("ORT_ENABLE_XQA") == "1":
            raise subprocess.CalledProcessError(-11, ["python"])
        times = {"first_ms": 2.0, "second_ms": 1.0, "ms": 0.5, "token_ids": [7]}
        return [times | {"token_ids": [7] * rows} for rows, _ in shapes]

    monkeypatch.setattr(gpu_design, "_timed", timed)
    with pytest.raises(gpu_parts.PartFailed, match=r"could not be timed: .*cudnn.*SIGSEGV") as failure:
        gpu_design.attention(place)
    assert failure.value.found["medians"] == {"flash first_ms": 2.0, "flash second_ms": 1.0}
    with pytest.raises(gpu_parts.PartFailed, match=r"could not be timed: .*xqa.*SIGSEGV") as failure:
        gpu_design.steps(place)
    assert failure.value.found["results"] == [
        {"rows": rows, "flash ms": 0.5, "equal_tokens": rows} for rows in CPU_SCALE.rows
    ]


def test_graphs_are_timed_at_every_shape_and_pick_the_same_tokens_each_time(bundle_path):
    graphs = bundle_path / "fp32"
    shapes = [(1, 3), (4, 7)]
    encoded = gpu_kernels.encode(graphs / "encode.onnx", "cpu", {}, shapes)
    assert [(time["rows"], time["source_length"]) for time in encoded] == shapes
    assert all(min(time["first_ms"], time["second_ms"]) > 0 for time in encoded)
    stepped = [gpu_kernels.step(graphs / "step.onnx", "cpu", {}, shapes) for _ in range(2)]
    assert [len(time["token_ids"]) for time in stepped[0]] == [1, 4]
    assert [time["token_ids"] for time in stepped[0]] == [time["token_ids"] for time in stepped[1]]
