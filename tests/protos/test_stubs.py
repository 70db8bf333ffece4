"""The committed stubs are those that the .proto sources give."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# The stubs name the folder as the package has it.
PACKAGE = "seq2seq_serve/protos"
SOURCES = sorted((ROOT / "protos").glob("*.proto"))
SERVICES = [path for path in SOURCES if "\nservice " in path.read_text()]


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    types = Path(sys.executable).parent / "protoc-gen-mypy_grpc"
    messages = [f"--python_out={folder}", f"--pyi_out={folder}"]
    calls = [f"--grpc_python_out={folder}", f"--plugin={types}", f"--mypy_grpc_out=quiet:{folder}"]
    for flags, sources in ((messages, SOURCES), (calls, SERVICES)):
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", f"{PACKAGE}=protos", *flags]
        subprocess.run([*command, *(f"protos/{path.name}" for path in sources)], cwd=ROOT, check=True)
    return folder / PACKAGE


def test_the_stubs_are_up_to_date(generated):
    made = {path.name: path.read_text() for path in generated.iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").glob("*_pb2*.py*")}
    assert len(made) == 2 * len(SOURCES) + 2 * len(SERVICES) > 0
    assert made.keys() == committed.keys()
    for name, text in made.items():
        assert text == committed[name], f"{name} is not what its source gives: run `make stubs`"


def test_the_contract_is_named_as_buf_would_name_it():
    done = subprocess.run(
        [Path(sys.executable).parent / "buf", "lint"], cwd=ROOT / "protos", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
