"""The check of a GPU, as far as it goes without one."""

import json
import os
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import more, prepare, run, steps
from benchmarks.gpu_check.place import CPU_SCALE, Findings, Place

ROOT = Path(run.__file__).parents[2]
WITHOUT_PACKAGES = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing())
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """The bundles of the check on a CPU, as they travel."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare.prepare(folder, CPU_SCALE)
    return folder


@pytest.fixture
def place(prepared, tmp_path) -> Place:
    place = Place(CPU_SCALE, tmp_path / "place")
    place.folder.mkdir()
    assert prepare.restore(prepared, place), "the weights are not those of the export"
    return place


def run_without(absent: list[str], code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter that does not find some packages."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_PACKAGES.format(absent=absent) + code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_every_part_runs_on_the_cpu_from_a_folder_that_travelled(prepared, tmp_path):
    """In an interpreter without packages that only an export needs."""
    out = tmp_path / "results" / "gpu.json"
    names = [name for name in run.PARTS if name != "training"]  # which has a test of its own
    arguments = ["--device", "cpu", "--folder", str(prepared), "--seconds", "1200"]
    arguments += ["--parts", ",".join(names), "--out", str(out)]
    code = f"from benchmarks.gpu_check.__main__ import main; sys.exit(main({arguments!r}))"
    done = run_without(["trustme", "tritonclient", "ctranslate2", "koreanize_matplotlib"], code)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads(out.read_text()) == report
    assert list(report["parts"]) == names
    assert report["weights_are_those_of_the_export"]
    for name in names:
        assert f"{name}: passed in " in done.stderr
    found = report["parts"]["tokens"]["found"]
    assert found["captured"]["equal_to_torch_float32"] == found["captured"]["tokens"]
    assert found["captured"]["different_tokens"] > 5
    contenders = {row["contender"] for row in report["parts"]["speed"]["found"]["results"]}
    assert contenders == {
        "ours fp32",
        "ours fp32 uncaptured",
        "ours fp32 without own operators",
        "generate",
    }
    assert report["parts"]["memory"]["found"]["requests"] == CPU_SCALE.num_requests
    assert report["bars"][3]["value"] > 0  # through gRPC


def test_an_onnxruntime_without_cuda_is_reported_before_anything_runs(prepared, capsys):
    assert gpu_check.main(["--folder", str(prepared)]) == 2
    assert "does not have CUDAExecutionProvider" in capsys.readouterr().err


def test_a_missing_package_and_missing_bundles_are_one_line(tmp_path, capsys):
    done = run_without(["pydantic"], "from benchmarks.gpu_check.__main__ import main; sys.exit(main([]))")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: No module named 'pydantic'")
    assert gpu_check.main(["--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("run `prepare` first\n")
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--parts", "device,speeed"])
    assert "unknown parts ['speeed']; there are device, tokens" in capsys.readouterr().err


def test_the_packed_packages_are_those_that_the_project_takes(monkeypatch, tmp_path):
    commands = []

    def install(command: list[str], **options) -> None:
        commands.append(command)
        (Path(command[command.index("--target") + 1]) / "package.py").write_text("")

    monkeypatch.setattr(prepare.subprocess, "run", install)
    prepare.pack_packages(tmp_path, "3.12")
    with tarfile.open(tmp_path / prepare.PACKAGES) as archive:
        assert "./package.py" in archive.getnames()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, extras["optional-dependencies"]["server"] + extras["dependencies"])
    specifiers = {item.name: item.specifier for item in wanted}
    pins = [Requirement(word) for word in commands[0] if "==" in word]
    assert {"pydantic", "grpcio", "sentencex", "starlette"} <= {pin.name for pin in pins}
    for requirement in pins:
        [pin] = requirement.specifier
        assert specifiers.get(requirement.name, requirement.specifier).contains(pin.version), requirement


@pytest.mark.slow
def test_only_tests_of_a_gpu_are_collected_and_need_no_package_of_other_tests():
    files = more.gpu_test_files()
    assert files == ["tests/test_cuda.py", "tests/training/test_loop.py"]
    absent = ["hypothesis", "trustme", "tritonclient", "transformers", "ctranslate2", "yaml", "sentencex"]
    code = f"import pytest; sys.exit(pytest.main(['-q', '-m', 'gpu', '--collect-only', *{files!r}]))"
    done = run_without(absent, code, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout
    assert "test_served_greedy_is_the_oracle" in done.stdout
    assert "test_a_gpu_learns_what_a_cpu_learns" in done.stdout


def hang(place: Place, found: Findings) -> str:
    found["before"] = 1
    time.sleep(60)
    return ""


def crash(place: Place, found: Findings) -> str:
    found["before"] = 1
    os.abort()


def fail(place: Place, found: Findings) -> str:
    raise RuntimeError("no kernel")


def find_something_wrong(place: Place, found: Findings) -> str:
    found["worst"] = 3.0
    return "too far apart"


@pytest.mark.parametrize(
    ("part", "problem", "found"),
    [
        (hang, "stopped after its 6 s", {"before": 1}),
        (crash, "the process ended with -6", {"before": 1}),
        (fail, "RuntimeError: no kernel", {}),
        (find_something_wrong, "too far apart", {"worst": 3.0}),
    ],
)
def test_a_part_that_hangs_or_fails_keeps_what_it_found(part, problem, found, tmp_path, monkeypatch):
    limit = 2 if part is hang else 60
    monkeypatch.setitem(run.PARTS, "device", (part, limit))
    record = run.run_part("device", Place(CPU_SCALE, tmp_path), time.monotonic() + 120)
    assert (record["status"], record["problem"], record["found"]) == ("failed", problem, found)


def test_every_bar_says_whether_it_was_met():
    rows = [
        {"contender": "ours fp16", "rows": 1, "step_ms": 0.3, "floor_ms": 0.03, "tokens_per_second": 2e3},
        {"contender": "ours fp16", "rows": 64, "step_ms": 0.6, "floor_ms": 0.1, "tokens_per_second": 5e4},
        {"contender": "generate", "rows": 64, "tokens_per_second": 4e3},
    ]
    static = [{"contender": "generate static", "rows": 64, "tokens_per_second": 2e4}]
    load = {"closed loops": {"greedy": {"unary": {"to_engine": 0.9}}}}
    bars = steps.bars({"speed": {"results": rows}, "static": {"results": static}, "load": load})
    assert [bar["met"] for bar in bars] == [True, None, False, True, None]
    assert bars[2]["value"] == 2.5, "the faster of the two counts"
