"""The wheel and the sdist in fresh environments: what people install, away from the clone."""

import json
import os
import shutil
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
_MAX_CLIENT_BYTES = 30 * 10**6
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
    assert "seq2seq_serve/py.typed" in names
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


def test_an_installation_imports_nothing_from_beside_its_folder(client):
    output = client.run("python", "-c", "import seq2seq_serve.pip", returns=1)
    assert "No module named 'seq2seq_serve.pip'" in output


def test_the_client_alone_is_small(client):
    listing = "from importlib.metadata import distributions; print(*(one.name for one in distributions()))"
    names = set(client.run("python", "-c", listing).split())
    assert names - {"pip", "setuptools"} == {"grpcio", "protobuf", "seq2seq-serve", "typing_extensions"}
    assert client.installed_bytes() <= _MAX_CLIENT_BYTES


def test_commands_of_other_roles_say_what_to_install(client):
    assert client.run("seq2seq", "--version") == f"seq2seq-serve {__version__}\n"
    for command, extras in (
        ("seq2seq-server", "server,cpu"),
        ("seq2seq-train", "training"),
        ("seq2seq-export", "export,cpu"),
    ):
        output = client.run(command, "a", "b", returns=1)
        assert output.count("\n") == 1, output
        assert f"pip install 'seq2seq-serve[{extras}]'" in output
    drawing = client.run("seq2seq", "translate", "a", "--attention", "a.png", returns=2)
    assert "pip install 'seq2seq-serve[drawing]'" in drawing


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


_NODE = """
const grpc = require("@grpc/grpc-js"), loader = require("@grpc/proto-loader");
const [address, root] = process.argv.slice(2);
const options = {includeDirs: [root], longs: Number, keepCase: true};
const load = (file) => grpc.loadPackageDefinition(loader.loadSync(`protos/${file}.proto`, options));
const ours = load("seq2seq_v1").seq2seq.v1, theirs = load("open_inference").inference;
const open = (Service) => new Service(address, grpc.credentials.createInsecure());
const client = open(ours.Seq2Seq), triton = open(theirs.GRPCInferenceService);
const whole = (call, request) => new Promise((resolve, reject) =>
  call.call(client, request, (error, answer) => error ? reject(error) : resolve(answer)));
const every = async (call) => { const all = []; for await (const each of call) all.push(each); return all; };
(async () => {
  const request = {sources: [{text: "a b c"}]};
  const text = (await whole(client.generate, request)).hypotheses[0].text;
  const pieces = (await every(client.generateStream(request))).filter((each) => each.piece);
  const batch = await every(client.generateBatch({items: [{tag: "x", ...request}, {tag: "y", ...request}]}));
  const infer = {model_name: "random", inputs: [{name: "text_input", datatype: "BYTES", shape: [1],
    contents: {bytes_contents: [Buffer.from("a b c")]}}]};
  const inferred = await new Promise((resolve, reject) =>
    triton.modelInfer(infer, (error, answer) => error ? reject(error) : resolve(answer)));
  const refused = await whole(client.generate, {sources: [{text: " "}]}).catch((error) => error);
  console.log(JSON.stringify({
    pieces: pieces.map((each) => each.piece.text).join("") === text,
    batch: batch.map((each) => [each.tag, each.response.hypotheses[0].text === text]).sort(),
    inferred: inferred.outputs[0].contents.bytes_contents[0].toString() === text,
    refused: refused.code === grpc.status.INVALID_ARGUMENT}));
})();
"""


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js and npm")
def test_node_calls_the_server_by_the_protos_alone(address, tmp_path):
    packages = ("@grpc/grpc-js", "@grpc/proto-loader")
    subprocess.run(
        ["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], cwd=tmp_path, check=True
    )
    (tmp_path / "call.js").write_text(_NODE)
    command = ["node", "call.js", address, ROOT]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert json.loads(done.stdout) == {
        "pieces": True,
        "batch": [["x", True], ["y", True]],
        "inferred": True,
        "refused": True,
    }
