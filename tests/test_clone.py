"""In a clone, a module is the same with and without the package's name before it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import MAY_IMPORT

ROOT = Path(__file__).parent.parent
# Of parts, of packages in them, and of packages in these.
MODULES = [
    *MAY_IMPORT,
    "bundle.names",
    "client.web",
    "export.graphs",
    "kernels.sources",
    "server.engine.request",
    "server.service.seq2seq",
    "training.config",
]


def run(code: str, folder: Path = ROOT) -> str:
    """The output of a fresh interpreter that finds the folder before the clone, which it does not install."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("prefixes", [("", "seq2seq_serve."), ("seq2seq_serve.", "")], ids=["short", "full"])
def test_a_module_has_one_object_whichever_name_is_imported_first(prefixes):
    run(f"""
import importlib, sys
for name in {MODULES}:
    one, other = [importlib.import_module(prefix + name) for prefix in {prefixes}]
    full = f"seq2seq_serve.{{name}}"
    assert one is other is sys.modules[full], name
    assert one.__name__ == one.__spec__.name == full, name
    package, _, last = full.rpartition(".")
    assert getattr(sys.modules[package], last) is one, name
""")


def test_a_command_does_not_load_a_part_twice():
    run("""
import runpy, sys
runpy.run_module("client", run_name="not main", alter_sys=True)
short = {name for name in sys.modules if name.partition(".")[0] == "client"}
assert short == {"client"}, short
assert sys.modules["client"] is sys.modules["seq2seq_serve.client"]
""")


def test_a_missing_module_is_an_error_by_both_names():
    for name in ("bundle.nothing", "seq2seq_serve.bundle.nothing"):
        assert run(f"""
import bundle
try:
    import {name}
except ModuleNotFoundError as error:
    print(error)
""").startswith(f"No module named '{name}'")


def test_type_checkers_and_editors_find_every_part():
    # They do not run `seq2seq_serve/__init__.py`, and an installed package would hide what a clone lacks.
    imports = [f"import seq2seq_serve.{name}" for name in (*MODULES, "nothing")]
    command = [sys.executable, "-m", "mypy", "--config-file", os.devnull, "--no-incremental"]
    alone = ["--follow-imports", "skip", "--no-site-packages", "-c", "\n".join(imports)]
    done = subprocess.run([*command, *alone], cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert '"seq2seq_serve.nothing"' in errors[0]


def test_a_folder_of_the_user_is_not_taken_for_a_part(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "__init__.py").touch()
    (tmp_path / "server" / "app.py").write_text("is_the_users = True")
    run(
        """
import bundle.names, seq2seq_serve.server.errors
import server.app
assert server.app.is_the_users and not hasattr(server, "errors")
""",
        tmp_path,
    )
