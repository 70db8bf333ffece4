import shutil
from pathlib import Path

import pytest

from tests.cuda_stub import build
from tests.cuda_stub.build import CannotBuildError


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("system", "runs under Linux on x86_64 only, and this is Linux on aarch64"),
        ("g++", r"there is no g\+\+: install it"),
        ("readelf", "there is no readelf: install it"),
    ],
)
def test_what_is_missing_is_named(missing, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "aarch64" if missing == "system" else "x86_64")
    monkeypatch.setattr("shutil.which", lambda name: None if name == missing else f"/usr/bin/{name}")
    with pytest.raises(CannotBuildError, match=message):
        build.build(tmp_path / "stub")
    assert build.main([str(tmp_path / "stub")]) == 1
    assert capsys.readouterr().err.startswith("the CUDA stub cannot be built: ")


def test_a_download_that_fails_is_reported_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_problem", lambda _: "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CannotBuildError, match="pip cannot download onnxruntime-gpu=="):
        build.build(tmp_path / "stub")
    assert [path.name for path in (tmp_path / "stub").iterdir()] == [".lock"]


def test_a_folder_with_spaces_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(CannotBuildError, match="no path with spaces or colons"):
        build.build(tmp_path / "a stub")


def test_only_what_is_stale_is_built_again(tmp_path, monkeypatch):
    here = tmp_path / "sources"
    shutil.copytree(build._HERE, here, ignore=shutil.ignore_patterns("__pycache__"))
    built: list[str] = []
    monkeypatch.setattr(build, "_HERE", here)
    monkeypatch.setattr(build, "_problem", lambda _: "")
    monkeypatch.setattr(build, "_onnxruntime_version", lambda: "1.0")
    monkeypatch.setattr(build, "_unpack_wheel", lambda made: built.append("wheel"))
    monkeypatch.setattr(build, "_compile", lambda provider, made: built.append("libraries"))

    def built_now() -> list[str]:
        built.clear()
        build.build(tmp_path / "stub")
        return built

    assert built_now() == ["wheel", "libraries"]
    assert built_now() == []
    for source in (here / "libraries" / "cudart.cpp", here / "stand_ins.py"):
        source.write_text(source.read_text() + "\n")
        assert built_now() == ["libraries"]
    monkeypatch.setattr(build, "_onnxruntime_version", lambda: "1.1")
    assert built_now() == ["wheel", "libraries"]
    assert sorted(path.name for path in Path(tmp_path / "stub").iterdir()) == [".lock", "lib", "site"]
