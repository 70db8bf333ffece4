"""The check of a GPU, as far as it goes without one."""

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import more, prepare
from benchmarks.gpu_check.place import CPU_SCALE, Place

ROOT = Path(prepare.__file__).parents[2]
WITHOUT_PACKAGES = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Refusing())
"""


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


def test_every_part_runs_on_the_cpu_from_a_folder_that_travelled(tmp_path):
    """In an interpreter without packages that only an export needs."""
    out = tmp_path / "results" / "gpu.json"
    prepare.prepare(tmp_path, CPU_SCALE)
    arguments = ["--device", "cpu", "--folder", str(tmp_path), "--seconds", "1200", "--out", str(out)]
    code = f"from benchmarks.gpu_check.__main__ import main; sys.exit(main({arguments!r}))"
    done = run_without(["trustme", "tritonclient", "ctranslate2", "koreanize_matplotlib"], code)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads(out.read_text()) == report
    assert report["weights_are_those_of_the_export"]
    assert {name: record["status"] for name, record in report["parts"].items()} == dict.fromkeys(
        gpu_check.PARTS, "passed"
    )


def test_the_packed_packages_are_those_that_the_project_takes(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(prepare.subprocess, "run", lambda command, **_: commands.append(command))
    prepare.pack_packages(tmp_path)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, extras["optional-dependencies"]["server"] + extras["dependencies"])
    specifiers = {item.name: item.specifier for item in wanted}
    pins = [Requirement(word) for word in commands[0] if "==" in word]
    assert {"pydantic", "grpcio", "sentencex", "starlette"} <= {pin.name for pin in pins}
    for requirement in pins:
        [pin] = requirement.specifier
        assert specifiers.get(requirement.name, requirement.specifier).contains(pin.version), requirement


def test_only_tests_of_a_gpu_are_collected_and_need_no_package_of_other_tests():
    files = more.gpu_test_files()
    assert files == ["tests/test_cuda.py", "tests/training/test_loop.py"]
    absent = ["hypothesis", "trustme", "tritonclient", "transformers", "ctranslate2", "yaml", "sentencex"]
    code = f"import pytest; sys.exit(pytest.main(['-q', '-m', 'gpu', '--collect-only', *{files!r}]))"
    done = run_without(absent, code, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout
    assert "test_served_greedy_is_the_oracle" in done.stdout
    assert "test_a_gpu_learns_what_a_cpu_learns" in done.stdout


def hang(place, found):
    found["before"] = 1
    yield "too far apart"
    time.sleep(60)


def crash(place, found):
    found["before"] = 1
    yield "too far apart"
    os.abort()


def fail(place, found):
    found["before"] = 1
    yield "too far apart"
    raise RuntimeError("no kernel")


@pytest.mark.parametrize(
    ("part", "problems"),
    [
        (hang, ["stopped after its 6 s", "too far apart"]),
        (crash, ["the process ended with -6", "too far apart"]),
        (fail, ["too far apart", "RuntimeError: no kernel"]),
    ],
)
def test_a_part_that_hangs_or_fails_keeps_what_it_found(part, problems, tmp_path, monkeypatch):
    limit = 2 if part is hang else 60
    monkeypatch.setitem(gpu_check.PARTS, "device", (part, limit))
    record = gpu_check.run_part("device", Place(CPU_SCALE, tmp_path), time.monotonic() + 120)
    assert (record["status"], record["problems"], record["found"]) == ("failed", problems, {"before": 1})
