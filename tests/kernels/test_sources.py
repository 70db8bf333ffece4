"""A library is used only if it was compiled from the sources beside it."""

import shutil
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
