"""A library is used only if it was compiled from the sources beside it."""

import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime as ort
import pytest

from seq2seq_serve import kernels

FOLDER = Path(kernels.__file__).parent


@pytest.mark.skipif(kernels.library() is None, reason="there are no compiled operators")
def test_a_library_that_is_older_than_its_sources_is_not_used_and_named(tmp_path, monkeypatch):
    current = kernels.library()
    for path in (*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp"), current):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(kernels, "_FOLDER", tmp_path)
    assert kernels.library.__wrapped__() == tmp_path / current.name
    header = tmp_path / "products.h"
    header.write_text(header.read_text(encoding="utf-8") + "// changed\n", encoding="utf-8")
    assert kernels.library.__wrapped__() is None
    monkeypatch.setattr(kernels, "library", kernels.library.__wrapped__)
    assert "was not compiled from the sources beside it" in kernels.add(ort.SessionOptions())


@pytest.mark.skipif(kernels.library() is None, reason="there are no compiled operators")
@pytest.mark.parametrize("num_bytes", [100, 20_000, -1])
def test_a_part_of_a_library_is_not_loaded_and_named(num_bytes, tmp_path, monkeypatch):
    # In a process of its own, because loading it would end that by SIGBUS.
    current = kernels.library()
    for path in (*FOLDER.glob("*.h"), *FOLDER.glob("*.cpp")):
        shutil.copy(path, tmp_path)
    part = tmp_path / current.name
    part.write_bytes(current.read_bytes()[:num_bytes])
    program = (
        "import sys, pathlib, onnxruntime as ort; from seq2seq_serve import kernels; "
        "kernels._FOLDER = pathlib.Path(sys.argv[1]); print(kernels.add(ort.SessionOptions()))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    assert f"{part} is cut off: install this package again here" in shown.stdout
