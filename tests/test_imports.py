"""Every module imports only what CONTRIBUTING.md allows: read from sources, and tried in interpreters."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {
    "bulk",
    "protos",
    "bundle",
    "documents",
    "drawing",
    "training",
    "export",
    "server",
    "client",
    "benchmarks",
    "reliability",
    "tests",
}
MAY_IMPORT = {
    "bulk": {"bundle", "client", "documents", "protos", "server"},
    "protos": set(),
    "bundle": set(),
    "documents": {"bundle", "protos"},
    "drawing": {"bundle"},
    "kernels": set(),
    "training": {"bundle", "drawing"},
    "export": {"training", "bundle", "kernels"},
    "server": {"bundle", "documents", "kernels", "protos"},
    "client": {"bundle", "documents", "protos", "drawing"},
}
NAMESPACED = set(MAY_IMPORT)
# Of what is not ours: what belongs to some folders only.
AT_HOME = {
    "torch": {"training", "export"},
    "onnx": {"export"},
    "onnx_ir": {"export"},
    "onnxscript": {"export"},
    "onnxruntime": {"export", "server"},
    "grpc": {"protos", "server", "client"},
    "sacrebleu": {"training", "export"},
    "matplotlib": {"drawing", "training"},
    "prometheus_client": {"server", "client"},
}
# Of bundle, what the client and its documents may import: client and server meet in protos.
FOR_CLIENTS = {
    "client": {"characters", "files", "pictures", "placeholders", "words"},
    "documents": {"characters", "placeholders", "terms", "words"},
}
# Inside the server, from the top: each may import what stands below it. What is not listed is used by all.
SERVER_LAYERS = [
    ["__main__", "check"],
    ["app", "library"],
    ["service"],
    ["service.write"],
    ["service.read"],
    ["service.fair_thread", "service.access"],
    ["service.shares", "service.watched"],
    ["models"],
    ["engine.async_engine"],
    ["engine.core"],
    ["engine.scheduler"],
    ["engine.slots", "engine.search", "engine.queue", "runner.runner"],
    ["runner"],
    ["engine.constraints"],
    ["engine.plan"],
    ["engine.state"],
    ["engine.result"],
    ["engine.request"],
    ["config"],
]
NAMESPACE = "seq2seq_serve"


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in path.parts]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join((NAMESPACE, *parts) if parts[0] in NAMESPACED else parts)


def imports(path: Path) -> Iterator[str]:
    """The full names of all that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            assert name.partition(".")[0] not in NAMESPACED, f"{path} imports {name} without its namespace"
            yield name.removeprefix(f"{NAMESPACE}.")


def test_every_folder_with_code_has_a_rule():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders - {"benchmarks", NAMESPACE} == MAY_IMPORT.keys()


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder):
    files = sources(folder)
    assert files
    for path in files:
        roots = {name.partition(".")[0] for name in imports(path)}
        assert roots & OURS <= MAY_IMPORT[folder] | {folder}, path
        assert {root for root in roots & AT_HOME.keys() if folder not in AT_HOME[root]} == set(), path


def test_what_all_parts_share_imports_none_of_them():
    """Except `doctor`, which looks into every installed part, and `load`, the library's name for users."""
    for path in (ROOT / NAMESPACE).glob("*.py"):
        if path.name not in ("doctor.py", "__init__.py"):
            roots = {name.partition(".")[0] for name in imports(path)}
            assert not roots & (OURS | AT_HOME.keys()), path


@pytest.mark.parametrize("folder", FOR_CLIENTS)
def test_the_client_does_not_know_what_a_bundle_is(folder):
    for path in sources(folder):
        parts = {name.split(".")[1] for name in imports(path) if name.startswith("bundle.")}
        assert parts <= FOR_CLIENTS[folder], path


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "server":
        return None
    names = {".".join(parts[1:3]), *parts[1:2]}
    exact = [i for i, layer in enumerate(SERVER_LAYERS) if ".".join(parts[1:3]) in layer]
    return next(iter(exact + [i for i, layer in enumerate(SERVER_LAYERS) if names & set(layer)]), None)


def test_inside_the_server_imports_point_down():
    num_checked = 0
    for path in sources("server"):
        here = layer_of(module_of(path).removeprefix(f"{NAMESPACE}."))
        for name in imports(path):
            there = layer_of(name)
            if here is not None and there is not None:
                assert here <= there, f"{path} imports {name}"
                num_checked += 1
    assert num_checked > 10


def test_one_module_of_the_server_imports_onnxruntime_and_one_package_grpc():
    for path in sources("server"):
        roots = {name.partition(".")[0] for name in imports(path)}
        if path.name != "device.py":
            assert "onnxruntime" not in roots, path
        if "service" not in path.parts:
            assert not roots & {"grpc", "grpc_status", "grpc_health", "grpc_reflection"}, path


def modules(*folders: str) -> list[str]:
    return [module_of(path) for folder in folders for path in sources(folder)]


def ours(*folders: str) -> list[str]:
    return [f"{NAMESPACE}.{folder}" for folder in folders]


def import_without(blocked: list[str], names: list[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a fresh interpreter in which others cannot be imported."""
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert not (name.endswith('.__main__') and 'matplotlib' in sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("blocked", "folders"),
    [
        (
            ["torch", "onnx", "onnx_ir", "onnxscript", *ours("training", "export", "client")],
            ["bundle", "server"],
        ),
        (
            ["torch", "onnx", "onnxruntime", "tokenizers", "pydantic", *ours("training", "export", "server")],
            ["protos", "documents", "drawing", "client"],
        ),
        (["onnx", "onnxruntime", "onnx_ir", "grpc", *ours("export", "server", "client")], ["training"]),
    ],
    ids=["bundle and server", "protos, documents, drawing and client", "training"],
)
def test_every_module_is_imported_without_what_is_not_its_own(blocked, folders):
    """The commands come first: they draw nothing, and do not wait for matplotlib."""
    names = sorted(modules(*folders), key=lambda name: not name.endswith(".__main__"))
    assert len(names) > 5
    done = import_without(blocked, names)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_blocked_import_is_an_error():
    done = import_without(["torch"], ["seq2seq_serve.training.models.transformer"])
    assert done.returncode == 1
    assert "import of torch halted" in done.stderr
