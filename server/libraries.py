"""Finds the libraries of CUDA and cuDNN that ONNX Runtime links to, wherever pip or a person has put them."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

_NAMES = ("cudart", "cublasLt", "cublas", "nvrtc", "curand", "cufft", "cudnn")  # each after those it needs
_PACKAGE = "nvidia"  # what pip's packages of CUDA are parts of


@functools.cache
def load_cuda_libraries(folder: Path | None) -> str:
    """Load the libraries into this process: ONNX Runtime then finds them by name, wherever they lie.

    Args:
        folder: Searched with all folders in it; None searches the `nvidia` packages of this Python.

    Returns:
        Which folders were searched and which libraries are not in them, for messages.

    Raises:
        ValueError: There is no such folder, or a library in it cannot be loaded.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the one that holds CUDA's libraries")
    folders = _package_folders() if folder is None else [folder]
    missing = []
    for name in _NAMES:
        paths = sorted(path for one in folders for path in one.rglob(f"lib{name}.so.*"))
        for path in paths:
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                raise ValueError(f"{path} cannot be loaded: {error}") from error
        if not paths:
            missing.append(f"lib{name}")
    places = ", ".join(map(str, folders)) or f"the packages {_PACKAGE}-*, which are not installed"
    if not missing:
        return f"CUDA's libraries were found in {places}"
    return f"CUDA's libraries were searched for in {places}; not there: {', '.join(missing)}"


def provider_problem(folder: Path) -> str:
    """The reason why the system cannot load ONNX Runtime's CUDA provider, such as a library that it needs.

    Args:
        folder: Has the provider's own libraries.

    Returns:
        The system's message; empty where it can.
    """
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return ""


def _package_folders() -> list[Path]:
    """Folders of the packages, also where ONNX Runtime itself is not installed beside them."""
    spec = importlib.util.find_spec(_PACKAGE)
    return [] if spec is None else list(map(Path, spec.submodule_search_locations or ()))
