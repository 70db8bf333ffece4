"""The wheel and the sdist in fresh environments: what people install, away from the clone."""

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from seq2seq_serve import __version__
from tests.test_imports import MAY_IMPORT

ROOT = Path(__file__).parent.parent
_MAX_CLIENT_BYTES = 33 * 10**6  # of which the package, with all its roles, has 9
_TRITON = "tritonclient[grpc]"
_BOTH = """
import seq2seq_serve.client
import sys, tritonclient.grpc
with seq2seq_serve.client.Client(sys.argv[1]) as client:
    ours = client.translate("a b c")
theirs = tritonclient.grpc.InferenceServerClient(sys.argv[1])
texts = tritonclient.grpc.InferInput("text_input", [1], "BYTES")
import numpy
texts.set_data_from_numpy(numpy.array([b"a b c"], dtype=object))
assert theirs.infer("random", [texts]).as_numpy("text_output").ravel()[0].decode() == ours, ours
print("equal")
"""
_TYPED = """
from seq2seq_serve.client import Client

def ask(client: Client) -> int:
    return client.generate("a").usage.target_tokens + client.translate("a")
"""

pytestmark = pytest.mark.slow


class Environment:
    """A virtual environment of its own, used from a folder with names that could be mistaken for ours."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        self.bin = folder / "venv" / "bin"
        self.folder = folder / "work"
        (self.folder / "server").mkdir(parents=True)
        (self.folder / "client.py").write_text("raise RuntimeError('a file of the user')")
        (self.folder / "server" / "__init__.py").write_text("raise RuntimeError('a file of the user')")

    def run(self, *command: object, returns: int = 0) -> str:
        """The output of a command of the environment, errors included."""
        done = subprocess.run(
            [self.bin / str(command[0]), *map(str, command[1:])],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == returns, done.stdout
        return done.stdout

    def install(self, *wanted: object) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)

    def installed_bytes(self) -> int:
        """Everything but pip and setuptools, which Python brings."""
        (site,) = self.bin.parent.glob("lib/python*/site-packages")
        brought = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
        tops = (top for top in site.iterdir() if not top.name.startswith(brought))
        files = (path for top in tops for path in (top.rglob("*") if top.is_dir() else [top]))
        return sum(path.stat().st_size for path in files if path.is_file())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The folder with an sdist and the wheel that was built from it."""
    environment = Environment(tmp_path_factory.mktemp("build"))
    environment.install("build")
    folder = tmp_path_factory.mktemp("sdist")
    environment.run("python", "-m", "build", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def client(wheel, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("client"))
    environment.install(wheel)
    return environment


@pytest.fixture(scope="module")
def address(wheel, bundle_path, tmp_path_factory) -> Iterator[str]:
    """The address of a server from the wheel, which has an environment of its own."""
    environment = Environment(tmp_path_factory.mktemp("server"))
    environment.install(f"{wheel}[server,cpu]")
    command = [environment.bin / "seq2seq-server", bundle_path, "--port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, cwd=environment.folder, stderr=subprocess.PIPE, text=True) as process:
        lines = iter(process.stderr.readline, "")
        before = []
        ready = next(line for line in lines if "ready: gRPC on" in line or before.append(line))
        assert "without the" not in "".join(before), "the compiled operators are used"
        yield ready.partition("gRPC on ")[2].partition(",")[0]
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait() == 0


def test_the_wheel_holds_no_tests_and_knows_its_types(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    sources = (path for part in MAY_IMPORT for path in (ROOT / part).rglob("*.py"))
    assert {f"seq2seq_serve/{path.relative_to(ROOT)}" for path in sources} <= set(names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"seq2seq_serve"}
    assert {"seq2seq_serve/py.typed", "seq2seq_serve/client/web/page/style.css"} <= set(names)
    assert "-cp311-abi3-" in wheel.name
    assert not [name for name in names if "tests/" in name or "test_" in name or "conftest" in name]
    assert [name for name in names if name.startswith("seq2seq_serve/kernels/_operators")]


def test_the_sdist_gives_the_same_wheel_as_the_clone(wheel, sdist):
    """It has the C++ sources, too: the compiled operators are files of the wheel."""
    (built,) = sdist.glob("*.whl")
    assert built.name == wheel.name
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_an_unpacked_sdist_is_imported_as_a_clone_is(sdist, tmp_path):
    (archive,) = sdist.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", tmp_path], check=True)
    (folder,) = tmp_path.iterdir()
    code = "import bundle.names as a, seq2seq_serve.bundle.names as b; print(a is b, a.__file__)"
    for command, expected in (
        (["-c", code], f"True {folder / 'bundle' / 'names.py'}"),
        (["-m", "server", "--version"], f"seq2seq-serve {__version__}"),
    ):
        output = subprocess.check_output([sys.executable, *command], cwd=folder, text=True)
        assert output == f"{expected}\n"


def test_the_client_alone_is_small(client):
    listing = "from importlib.metadata import distributions; print(*(one.name for one in distributions()))"
    names = set(client.run("python", "-c", listing).split())
    assert names - {"pip", "setuptools"} == {"grpcio", "protobuf", "seq2seq-serve", "typing_extensions"}
    assert client.installed_bytes() <= _MAX_CLIENT_BYTES


def test_a_type_checker_reads_our_types(client):
    file = client.folder / "typed.py"
    file.write_text(_TYPED)
    command = [sys.executable, "-m", "mypy", "--python-executable", client.bin / "python", file]
    done = subprocess.run(command, cwd=client.folder, capture_output=True, text=True, check=False)
    assert 'Unsupported operand types for + ("int" and "str")' in done.stdout, done.stdout


def test_client_and_server_from_the_wheel_understand_each_other(client, address):
    assert client.run("seq2seq", "health", "--address", address) == "SERVING\n"
    assert "random: " in client.run("seq2seq", "models", "--address", address)
    client.run("seq2seq", "translate", "a b c", "--address", address)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_client_lives_beside_the_newest_client_of_triton(wheel, address, tmp_path, is_first):
    environment = Environment(tmp_path)
    for wanted in (wheel, _TRITON) if is_first else (_TRITON, wheel):
        environment.install(wanted)
    environment.run("python", "-m", "pip", "check")
    (environment.folder / "both.py").write_text(_BOTH)
    assert environment.run("python", "both.py", address) == "equal\n"
