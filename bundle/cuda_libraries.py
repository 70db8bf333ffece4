"""Finds and loads the libraries of CUDA and cuDNN that ONNX Runtime needs, from pip packages or a folder."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path

# Each library after those that it needs.
_NAMES = ("cudart", "cublasLt", "cublas", "nvrtc", "curand", "cufft", "cudnn")
_PACKAGE = "nvidia"  # the namespace of pip's CUDA packages


@functools.cache
def load_cuda_libraries(folder: Path | None) -> str:
    """Load the libraries into this process, so that ONNX Runtime finds them by name in any folder.

    Args:
        folder: Searched with its subfolders; None searches the `nvidia` packages of this Python.

    Returns:
        A message: the searched folders, and the libraries that are missing or cannot be loaded.

    Raises:
        ValueError: There is no such folder.
    """
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the one that holds CUDA's libraries")
    folders = _package_folders() if folder is None else [folder]
    missing: list[str] = []
    broken: list[str] = []
    for name in _NAMES:
        paths = [path for one in folders for path in one.rglob(f"lib{name}.so.*")]
        errors = []
        for path in sorted(paths, key=_version_of, reverse=True):  # newest version first
            try:
                ctypes.CDLL(str(path))
                break
            except OSError as error:  # built for another processor, for example
                errors.append(f"{path} cannot be loaded: {error}")
        else:
            broken += errors
            missing += [] if errors else [f"lib{name}"]
    places = ", ".join(map(str, folders)) or f"the packages {_PACKAGE}-*, which are not installed"
    if not missing and not broken:
        return f"CUDA's libraries were found in {places}"
    problems = [f"not there: {', '.join(missing)}"] if missing else []
    return "; ".join([f"CUDA's libraries were searched for in {places}", *problems, *broken])


def provider_problem(folder: Path) -> str:
    """The system's message if it cannot load ONNX Runtime's CUDA provider from a folder; otherwise empty.

    The message usually names a missing library that the provider needs.
    """
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return str(error)
    return ""


def device_description(folder: Path, device_id: int) -> str:
    """The name of a device and its memory, such as "NVIDIA H100, 79 GiB".

    The folder is that of the CUDA provider, which this process has loaded; the device id is CUDA's. The
    result is empty if CUDA does not answer.
    """
    free, total, properties = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.create_string_buffer(1 << 14)
    try:
        runtime = ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
        failed = runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        failed = failed or runtime.cudaGetDeviceProperties(properties, device_id)  # they begin with the name
    except (AttributeError, OSError):
        return ""
    name = properties.value.decode(errors="replace")
    return "" if failed else f"{name}, {total.value / 2**30:.0f} GiB"


def _version_of(path: Path) -> list[int]:
    """The numbers after `.so.`."""
    return [int(part) for part in path.name.partition(".so.")[2].split(".") if part.isdecimal()]


def _package_folders() -> list[Path]:
    """The folders of pip's CUDA packages, even if ONNX Runtime is not installed beside them."""
    spec = importlib.util.find_spec(_PACKAGE)
    return [] if spec is None else list(map(Path, spec.submodule_search_locations or ()))
