"""Where CUDA's libraries are looked for."""

import _ctypes
import shutil
import sys
from pathlib import Path

import pytest

from seq2seq_serve.bundle import cuda_libraries
from seq2seq_serve.bundle.cuda_libraries import load_cuda_libraries, provider_problem


@pytest.fixture(autouse=True)
def unloaded():
    load_cuda_libraries.cache_clear()


def add_library(folder, name):
    """A file that can be loaded; what it contains does not matter."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(_ctypes.__file__, folder / f"lib{name}.so.13")
    return folder / f"lib{name}.so.13"


def test_libraries_are_found_in_any_folder_below_the_given_one(tmp_path):
    loaded = [add_library(tmp_path / "cu13" / "lib", "cudart"), add_library(tmp_path / "cudnn", "cudnn")]
    message = (
        f"CUDA's libraries were searched for in {tmp_path}; not there: libcublasLt, libcublas, libnvrtc, "
    )
    assert load_cuda_libraries(tmp_path) == message + "libcurand, libcufft"
    mapped = Path("/proc/self/maps").read_text()
    assert all(str(path) in mapped for path in loaded)


def test_packages_of_this_python_are_searched_wherever_they_are(tmp_path, monkeypatch):
    """They were found only where ONNX Runtime itself is installed beside them."""
    for name in cuda_libraries._NAMES:
        add_library(tmp_path / "nvidia" / "cu13" / "lib", name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert load_cuda_libraries(None).startswith(f"CUDA's libraries were found in {tmp_path / 'nvidia'}")


def test_without_packages_and_folder_the_message_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(cuda_libraries, "_PACKAGE", "no_such_package")
    message = load_cuda_libraries(None)
    assert "no_such_package-*" in message
    assert "libcudart, " in message


def test_a_folder_that_is_not_there_is_refused_and_a_broken_library_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path / "none")):
        load_cuda_libraries(tmp_path / "none")
    (tmp_path / "libcudart.so.13").write_text("broken")
    assert f"{tmp_path}/libcudart.so.13 " in load_cuda_libraries(tmp_path)


def test_the_library_that_the_system_cannot_load_is_named(tmp_path):
    """In a container without the driver, the message said only that CUDA is not available."""
    assert "libonnxruntime_providers_shared.so: cannot open" in provider_problem(tmp_path)
    shutil.copy(_ctypes.__file__, tmp_path / "libonnxruntime_providers_shared.so")
    (tmp_path / "libonnxruntime_providers_cuda.so").write_text("broken")
    assert "libonnxruntime_providers_cuda.so: " in provider_problem(tmp_path)
    shutil.copy(_ctypes.__file__, tmp_path / "libonnxruntime_providers_cuda.so")
    assert provider_problem(tmp_path) == ""
