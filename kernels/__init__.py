"""The project's own operators for ONNX Runtime, and copies of rows: two optional libraries in C++.

`_operators` has the operators for a CPU, `_cuda_operators` those for CUDA. An installation compiles both if
there is a C++ compiler; CUDA's own compiler is not needed, because its kernels are committed as PTX. Every
graph also contains definitions of these operators in ONNX Runtime's own ones (`export.graphs.functions`),
which run where a library is missing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from seq2seq_serve.clone import share_module
from seq2seq_serve.kernels.sources import digest_of_sources

share_module(__name__)

_FOLDER = Path(__file__).parent
PTX = _FOLDER / "cuda_kernels.ptx"
INSTRUCTIONS = ("avx512vnni", "avxvnni", "avx2", "dotprod", "scalar")
_ISA = "SEQ2SEQ_ISA"
# nvcc's flags: for GPUs from Turing on, the oldest ones of CUDA 13.
PTX_FLAGS = ("-ptx", "-arch=compute_75", "-O3", "-std=c++17")


_ELF_HEADER_BYTES, _HALF_BYTES = 64, 2
_AGAIN = "install this package again here; `pip install -v` shows the errors of the compiler"


@functools.cache
def library(name: str = "_operators") -> Path | None:
    """Returns the library of a name that was compiled last from the sources; None if there is none."""
    path = _compiled(name)
    return path if path is not None and _is_current(path) else None


def _compiled(name: str) -> Path | None:
    paths = (_FOLDER / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return max(filter(Path.is_file, paths), key=lambda path: path.stat().st_mtime, default=None)


def _is_whole(path: Path) -> bool:
    """Whether a file of ELF has all of its bytes. A process that loads a part of one ends by SIGBUS."""
    with path.open("rb") as file:
        header = file.read(_ELF_HEADER_BYTES)
    if not header.startswith(b"\x7fELF") or len(header) < _ELF_HEADER_BYTES:
        return True  # of another kind, or it is refused as what it is
    start, size, number = struct.unpack_from("<Q10x2H", header, 40)  # the table of sections, which is last
    return bool(path.stat().st_size >= start + size * number)


def _is_current(path: Path) -> bool:
    """Whether a library was compiled from the sources in its folder, if there are any and it can be read."""
    if not _is_whole(path):
        return False
    try:
        function = ctypes.CDLL(str(path)).sources_digest
    except OSError:
        return True  # `add` returns why
    except AttributeError:
        return False
    function.restype = ctypes.c_char_p
    expected = digest_of_sources(path.parent)
    return not expected or str(function().decode()) == expected


def register(options: Any, *, is_cuda: bool = False) -> bool:
    """Add the operators to the `SessionOptions` of ONNX Runtime; returns whether that succeeded."""
    return not add(options, is_cuda=is_cuda)


def add(options: Any, *, is_cuda: bool = False) -> str:
    """Add the operators to the `SessionOptions` of ONNX Runtime.

    Returns:
        Why graphs run without them, and what to do about it; empty if they were added.

    Raises:
        ValueError: As `instructions`.
    """
    name = "_cuda_operators" if is_cuda else "_operators"
    path = library(name)
    if path is None:
        if (compiled := _compiled(name)) is not None:
            fault = "was not compiled from the sources beside it" if _is_whole(compiled) else "is cut off"
            return f"{compiled} {fault}: {_AGAIN}"
        if others := [other.name for other in _FOLDER.glob(f"{name}.*") if other.suffix in (".so", ".pyd")]:
            return f"{', '.join(others)} is for another Python or system: {_AGAIN}"
        return f"{_FOLDER} lacks them, as after an installation without a C++ compiler (g++): {_AGAIN}"
    if not is_cuda:
        instructions()  # a wrong name is an error, and not a reason to do without the library
    try:
        if is_cuda:
            _set_ptx(path)
        options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        problem = " ".join(str(error).split())
        return f"{path}: {problem}" + f": {_AGAIN}" * (not _can_be_loaded(path))
    is_complete = _function("is_complete", name)
    if is_complete is None or not is_complete():
        return f"this ONNX Runtime does not have the interface that {path} needs: install a newer one"
    return ""


def _can_be_loaded(path: Path) -> bool:
    """Whether this system can load a library, which may then refuse the processor."""
    try:
        ctypes.CDLL(str(path))
    except OSError:
        return False
    return True


@functools.cache
def _set_ptx(path: Path) -> None:
    """Give the library the kernels, which it hands to the driver when it creates the first operator."""
    ctypes.CDLL(str(path)).set_ptx(PTX.read_bytes())


def instructions() -> str:
    """Returns the name of the instructions that multiply quantised weights here.

    It is empty without the library, and on a processor that cannot run any of its operators. The environment
    variable SEQ2SEQ_ISA may name other ones. The outputs are the same, bit for bit. Floats are multiplied in
    vectors of sixteen on every processor with AVX-512, unless the variable names other instructions than
    avx512vnni.

    Raises:
        ValueError: It names some that the library or this processor does not have.
    """
    function = _function("instructions")
    if function is None:
        return ""
    name = function()
    if name is None and (wanted := os.environ.get(_ISA)):
        others = available_instructions()
        raise ValueError(
            f"{_ISA} is {wanted!r}, which this processor or the library does not have: leave it out"
            + f", or give one of {', '.join(others)}" * bool(others)
        )
    return "" if name is None else str(name.decode())


def available_instructions() -> list[str]:
    """Returns those of `INSTRUCTIONS` that both the library and this processor have."""
    has_instructions = _function("has_instructions")
    if has_instructions is None:
        return []
    return [name for name in INSTRUCTIONS if has_instructions(name.encode())]


Weights = npt.NDArray[np.uint8] | npt.NDArray[np.float32]


def packed_shape(shape: tuple[int, ...], *, is_int8: bool) -> tuple[int, ...] | None:
    """Returns the shape in which `pack` writes weights; None where nothing reads them so.

    Args:
        shape: `(I, O)` of int8 weights, for QuantizedLinear; `(O, I)` of float32 weights, for Linear.
        is_int8: Whether they are int8.
    """
    function = _function("packed_shape" if is_int8 else "packed_float_shape")
    if function is None or not instructions():
        return None
    packed = np.empty(5 if is_int8 else 3, np.int64)
    function(*shape, packed.ctypes.data)
    return tuple(packed.tolist())


def pack(weights: Weights, packed: Weights) -> bool:
    """Write weights as this processor multiplies them, for sessions that will use them in place.

    Args:
        weights: `(I, O)` uint8, 128 above their levels, or `(O, I)` float32, without gaps.
        packed: Zeros of the shape `packed_shape`, without gaps, or memory that begins where the weights do.

    Returns:
        Whether they were float32 and half precision has the same numbers. They are packed so, which changes
        no product, and take the first half of the memory: the last axis of their shape is half as long.

    Raises:
        MemoryError: There is no memory for a copy of some of them.
    """
    function = _function("pack_int8" if weights.dtype == np.uint8 else "pack_floats")
    element_bytes = function(weights.ctypes.data, *weights.shape, packed.ctypes.data)
    if not element_bytes:
        raise MemoryError("no memory to pack weights")
    return bool(element_bytes == _HALF_BYTES)


class _Tensors(ctypes.Structure):
    """The first argument of `copy_positions` in kernels/moves.cpp, and of `move_on_cuda`."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tensors", "num_outer")),
        *((f"{axis}_stride", ctypes.c_int64) for axis in ("tensor", "row", "outer")),
        ("position_bytes", ctypes.c_int64),
    )


def copy_positions(tensors: npt.NDArray[Any], moves: npt.NDArray[np.int64]) -> None:
    """Copy positions of rows into other rows, in order; other threads of Python run meanwhile.

    Args:
        tensors: `(G, N, outer, positions, inner)`; the last two axes have no gaps.
        moves: `(M, 4)`: for each move the row to read, the row to write, the first position, and how many.
    """
    function = _function("copy_positions")
    if function is None:
        for from_row, to_row, start, count in moves.tolist():
            live = slice(start, start + count)
            tensors[:, to_row, :, live] = tensors[:, from_row, :, live]
        return
    first = tensors.ctypes.data
    position_bytes = tensors.shape[4] * tensors.itemsize
    described = _Tensors(first, tensors.shape[0], tensors.shape[2], *tensors.strides[:3], position_bytes)
    function(ctypes.byref(described), moves.ctypes.data, len(moves))


def move_on_cuda(
    first: int, shape: tuple[int, ...], strides: tuple[int, ...], moves: npt.NDArray[np.int64]
) -> bool:
    """Copy positions of rows on the device into other rows, all at once; returns whether that succeeded.

    Args:
        first: The address of the tensors `(G, N, outer, positions, inner)`.
        shape: The sizes of the axes; the last two have no gaps.
        strides: Bytes of a step along each axis.
        moves: `(M, 4)`, as for `copy_positions`; no move reads or writes a row that another one writes.
    """
    function = _function("move_on_cuda", "_cuda_operators")
    if function is None:
        return False
    described = _Tensors(first, shape[0], shape[2], *strides[:3], strides[3])
    return bool(function(ctypes.byref(described), moves.ctypes.data, len(moves)))


def write_to_cuda(address: int, array: npt.NDArray[Any]) -> bool:
    """Copy an array without gaps to an address of the device; returns whether that succeeded."""
    function = _function("write_to_cuda", "_cuda_operators")
    return function is not None and bool(function(address, array.ctypes.data, array.nbytes))


_TYPES = {
    "move_on_cuda": ((ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), ctypes.c_bool),
    "write_to_cuda": ((ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_bool),
    "copy_positions": ((ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None),
    "instructions": ((), ctypes.c_char_p),
    "has_instructions": ((ctypes.c_char_p,), ctypes.c_bool),
    "is_complete": ((), ctypes.c_bool),
    "packed_shape": ((ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p), None),
    "pack_int8": ((ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p), ctypes.c_bool),
    "packed_float_shape": ((ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p), None),
    "pack_floats": ((ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p), ctypes.c_int),
}


def _function(name: str, library_name: str = "_operators") -> Any:
    """Returns a function of a library; None without it."""
    path = library(library_name)
    return None if path is None else _loaded(path, name)


@functools.cache
def _loaded(path: Path, name: str) -> Any:
    try:
        function = getattr(ctypes.CDLL(str(path)), name)
    except (OSError, AttributeError):  # `add` returns why it cannot be loaded; or it is an older one
        return None
    function.argtypes, function.restype = _TYPES[name]
    return function
