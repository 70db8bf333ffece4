"""ONNX Runtime, which no other module of the server imports: its providers, sessions and memory."""

from __future__ import annotations

import enum
import functools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime as ort

from bundle import names
from bundle.manifest import Bundle
from bundle.names import Precision
from server.libraries import load_cuda_libraries, provider_problem
from server.readers_writer import ReadersWriterLock
from server.records import Array
from server.weights import Weight, take_weights

_log = logging.getLogger(__name__)

CPU, CUDA = "cpu", "cuda"
_DEVICE_ID = 0  # which of several GPUs that is, CUDA_VISIBLE_DEVICES says
_FULL_NAMES = {CPU: "CPUExecutionProvider", CUDA: "CUDAExecutionProvider"}
# The fastest first. fp32 and int8 graphs would run on CUDA only in part: their attention has no kernel there,
# and would silently run on the CPU. fp16 has no fast kernels on the CPU, and bf16 none.
_PRECISIONS = {CPU: (Precision.INT8, Precision.FP32), CUDA: (Precision.FP16, Precision.BF16)}

# What the driver of an NVIDIA GPU makes; under Windows that of any GPU.
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))

# Every session has an arena of its own: it grows by what is asked for, not to the next power of two.
_CUDA_OPTIONS = names.CUDA_PROVIDER_OPTIONS | {"arena_extend_strategy": "kSameAsRequested"}

_EMPTY = Path("/dev/null")  # the file that a graph names for the weights that it is given from memory
_WEIGHTS_FOLDER_KEY = "session.model_external_initializers_file_folder_path"

# Captures are global to the process: while one thread captures a run, no other may allocate memory on the
# device, copy to it or wait for it, or both fail. Everything else may run side by side.
_capturing = ReadersWriterLock()

ort.set_default_logger_severity(3)  # errors: kernels warn of what our graphs do on purpose
for _name, _value in names.CUDA_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


class ProviderPolicy(enum.StrEnum):
    """What may run the graphs."""

    REQUIRE = "require"  # CUDA, or nothing
    PREFER = "prefer"  # CUDA where it works and the bundle has graphs for it, else the CPU, with a log line
    CPU = "cpu"


class Session(ort.InferenceSession):  # type: ignore[misc]  # ONNX Runtime does not ship types
    """A graph that ONNX Runtime runs.

    Attributes:
        weights: The values that it uses where they are, and which must live as long as it does.
    """

    weights: tuple[ort.OrtValue, ...] = ()


class OnnxDevice:
    """A device of one execution provider.

    Args:
        provider: Its short name.
        num_threads: Of the CPU, for one graph's run; once `share_threads` was called, graphs use its pool.

    Attributes:
        num_threads: As given.
        pool: So many threads, for work outside of graphs.
        is_host: Whether its memory is the process's own.
        can_capture: Whether a run can be captured once and replayed, which saves the launch of each kernel.
    """

    def __init__(self, provider: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="device")
        self.is_host = provider == CPU
        self.can_capture = provider == CUDA
        self._provider = provider
        # By address, element type and shape of what was copied; sessions keep the values.
        self._weights: WeakValueDictionary[tuple[Any, ...], ort.OrtValue] = WeakValueDictionary()

    def in_use(self) -> AbstractContextManager[None]:
        """Hold it during every use of the device but `session`, `value` and a capture; it is not nested."""
        return nullcontext() if self.is_host else _capturing.reading()

    def alone(self) -> AbstractContextManager[None]:
        """Hold it while a run is captured: no other thread uses the device then."""
        return nullcontext() if self.is_host else _capturing.writing()

    def session(
        self, name: str, graph: bytes, weights: memoryview | None = None, *, is_captured: bool = False
    ) -> Session:
        """Load a graph from memory; no file is read.

        Args:
            name: For messages.
            graph: An ONNX model.
            weights: The content of its file of weights. Sessions of the host use it where it is; on another
                device there is one copy of each weight, which all sessions of this object share.
            is_captured: Whether its runs are captured; only where the device can.

        Raises:
            ValueError: ONNX Runtime would run it elsewhere, or a weight lies outside of `weights`.
        """
        options = ort.SessionOptions()
        # ONNX Runtime refuses sessions with threads of their own once there is a shared pool.
        options.use_per_session_threads = not share_threads.cache_info().currsize
        if options.use_per_session_threads:
            options.intra_op_num_threads = self.num_threads
            options.inter_op_num_threads = 1
        # Patterns of memory are kept for every shape that ever came: tens of megabytes, and no faster.
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        # Threads that spin after a run would take the CPU from the event loop.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        values: tuple[ort.OrtValue, ...] = ()
        if weights is not None:
            graph, found = take_weights(graph, weights, _EMPTY.name)
            # ONNX Runtime wants the file to be there, and reads none of it: it is given every weight.
            options.add_session_config_entry(_WEIGHTS_FOLDER_KEY, str(_EMPTY.parent))
            with self.in_use():
                values = tuple(map(self._place, found))
            for weight, value in zip(found, values, strict=True):
                options.add_initializer(weight.name, value)
        full_name = _FULL_NAMES[self._provider]
        provider_options = (
            {} if self._provider == CPU else _CUDA_OPTIONS | {"enable_cuda_graph": str(int(is_captured))}
        )
        with self.in_use():
            session = Session(graph, options, providers=[(full_name, provider_options)])
        session.weights = values
        if session.get_providers()[0] != full_name:
            raise ValueError(f"{name} would run on {session.get_providers()[0]} instead of {full_name}")
        return session

    def weightless(self, name: str, *, is_captured: bool = False) -> Session:
        """Load a graph that `export.weightless` made."""
        graph = (files("server") / "weightless" / f"{name}.onnx").read_bytes()
        return self.session(name, graph, is_captured=is_captured)

    def replay(self, session: Session, binding: ort.IOBinding, graph_id: int) -> None:
        """Run a captured session; the first run with an id, on each thread, is what it captures.

        An id stands for one set of shapes and addresses: what is bound must never change with it.
        """
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        session.run_with_iobinding(binding, options)

    def value(self, array: Array) -> ort.OrtValue:
        with self.in_use():
            return ort.OrtValue.ortvalue_from_numpy(array, self._provider, _DEVICE_ID)

    def _place(self, weight: Weight) -> ort.OrtValue:
        """The weight where graphs read it."""
        if self.is_host:
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(weight.bits, weight.element_type)
        place = int(weight.bits.ctypes.data), weight.element_type, weight.bits.shape
        value = self._weights.get(place)
        if value is None:
            memory = ort.OrtValue.ortvalue_from_shape_and_type(
                weight.bits.shape, weight.element_type, self._provider, _DEVICE_ID
            )
            memory.update_inplace(weight.bits)
            # A session refuses an initializer that owns its memory. A view does not, and keeps it alive.
            value = self._weights[place] = ort.OrtValue.from_dlpack(memory)
        return value

    def bind_input(
        self, binding: ort.IOBinding, name: str, dtype: Any, shape: tuple[int, ...], pointer: int
    ) -> None:
        binding.bind_input(name, self._provider, _DEVICE_ID, dtype, shape, pointer)

    def bind_output(
        self, binding: ort.IOBinding, name: str, dtype: Any, shape: tuple[int, ...], pointer: int
    ) -> None:
        binding.bind_output(name, self._provider, _DEVICE_ID, dtype, shape, pointer)

    def bind_new_output(self, binding: ort.IOBinding, name: str) -> None:
        binding.bind_output(name, self._provider, _DEVICE_ID)


@functools.cache
def share_threads(num_threads: int) -> None:
    """Make the one pool of threads for the graphs of all sessions.

    A pool of each session's own has to be woken for each: on two cores a step of one beam took 3.2 ms instead
    of 2.0. It can be made only once in a process, and then every session must use it.
    """
    try:
        ort.set_global_thread_pool_sizes(num_threads, 1)
    except Exception as error:  # ONNX Runtime's errors have no class of their own in common
        _log.warning("graphs do not get %d threads of their own: %s", num_threads, error)


def choose(
    bundle: Bundle,
    policy: ProviderPolicy,
    precision: Precision | None,
    cuda_libraries: Path | None = None,
) -> tuple[str, Precision]:
    """The provider and precision to run a bundle with; the log says why CUDA is not taken where it may be.

    Args:
        bundle: A checked bundle.
        policy: What may run its graphs.
        precision: None takes the fastest one.
        cuda_libraries: Where CUDA's libraries are; None searches the packages of this Python.

    Raises:
        ValueError: The bundle has no such graphs, or what may run them does not; the message says why.
    """
    variants = bundle.manifest.variants
    if precision is not None and precision not in variants:
        raise ValueError(f"the bundle has no {precision} graphs; it has {', '.join(variants)}")
    asked = tuple(variants) if precision is None else (precision,)
    reason = ""
    if policy != ProviderPolicy.CPU:
        reason = _why_not_cuda(asked, cuda_libraries)
        if not reason:
            return CUDA, _fastest(CUDA, asked)
        if policy == ProviderPolicy.REQUIRE:
            raise ValueError(f"CUDA is required: {reason}")
    if not set(asked) & set(_PRECISIONS[CPU]):
        problem = f"{_listed(asked)} graphs do not run on the CPU, which takes {_listed(_PRECISIONS[CPU])}"
        raise ValueError(f"{problem}; and not on CUDA: {reason}" if reason else problem)
    if reason:
        # Nothing is wrong where there is no GPU, and nobody installed what is for one.
        is_for_gpu = _FULL_NAMES[CUDA] in ort.get_available_providers() or any(
            path.exists() for path in _GPU_FILES
        )
        level = logging.WARNING if is_for_gpu else logging.INFO
        _log.log(level, "the graphs run on the CPU, though CUDA is preferred: %s", reason)
    return CPU, _fastest(CPU, asked)


def usable_variants(bundle: Bundle) -> list[tuple[str, Precision]]:
    """Every provider and precision that can run a bundle here, the fastest first."""
    providers = [CPU] if _cuda_problem(None) else [CUDA, CPU]
    return [
        (provider, precision)
        for provider in providers
        for precision in _PRECISIONS[provider]
        if precision in bundle.manifest.variants
    ]


def _fastest(provider: str, asked: tuple[Precision, ...]) -> Precision:
    return next(precision for precision in _PRECISIONS[provider] if precision in asked)


def _why_not_cuda(asked: tuple[Precision, ...], libraries: Path | None) -> str:
    """Why CUDA cannot run graphs of any of these precisions; empty where it can."""
    problem = _cuda_problem(libraries)
    if not problem and not set(asked) & set(_PRECISIONS[CUDA]):
        return f"{_listed(asked)} graphs do not run there, it takes {_listed(_PRECISIONS[CUDA])}"
    return problem


def _cuda_problem(libraries: Path | None) -> str:
    """What is wrong with CUDA here: ONNX Runtime lacks it, or its device fails; empty where it works."""
    if _FULL_NAMES[CUDA] not in ort.get_available_providers():
        return f"this ONNX Runtime has no {_FULL_NAMES[CUDA]}; install onnxruntime-gpu instead"
    searched = ""
    if libraries is not None:
        searched = load_cuda_libraries(libraries)  # a folder that somebody named must be right
    try:
        searched = searched or load_cuda_libraries(None)
        device = OnnxDevice(CUDA, num_threads=1)
        device.value(np.zeros(1, np.float32))
        device.weightless("greedy")
    except Exception as error:  # ONNX Runtime's errors have no class of their own in common
        reason = provider_problem(Path(ort.__file__).parent / "capi") or one_line(error)
        return f"{_FULL_NAMES[CUDA]} does not work here: {reason} ({searched})"
    return ""


def one_line(error: Exception) -> str:
    """The text of an error of ONNX Runtime, which may have several lines."""
    return " ".join(str(error).split())


def _listed(precisions: tuple[Precision, ...]) -> str:
    return " and ".join(precisions)
