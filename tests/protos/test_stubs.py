"""The committed stubs are those that the .proto sources give."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "seq2seq_serve" / "protos").glob("*.proto")
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    flags = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *flags, *SOURCES], cwd=ROOT, check=True
    )
    return folder


def test_the_stubs_are_up_to_date(generated):
    made = {path.relative_to(generated): path.read_text() for path in generated.rglob("*_pb2*")}
    committed = {
        path.relative_to(ROOT): path.read_text()
        for path in (ROOT / "seq2seq_serve" / "protos").glob("*_pb2*.py*")
    }
    assert len(made) == 3 * len(SOURCES) > 0
    assert made.keys() == committed.keys()
    for path, text in made.items():
        assert text == committed[path], f"{path} is not what its source gives: run `make stubs`"


def test_the_contract_is_named_as_buf_would_name_it():
    done = subprocess.run(
        [Path(sys.executable).parent / "buf", "lint"], cwd=ROOT / "protos", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
