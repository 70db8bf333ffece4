"""ONNX Runtime's providers, sessions and memory; no other module of the server imports ONNX Runtime."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import onnxruntime as ort

from seq2seq_serve import kernels
from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.cuda_libraries import device_description, load_cuda_libraries, provider_problem
from seq2seq_serve.bundle.manifest import Bundle, VariantFiles
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.config import ProviderPolicy
from seq2seq_serve.server.engine.request import Array
from seq2seq_serve.server.runner.weights import PackedMaps, Weight, take_weights

_log = logging.getLogger(__name__)

Remark = tuple[int, str]
"""A line for the log, after its level."""

CPU, CUDA = "cpu", "cuda"
_DEVICE_ID = 0  # CUDA_VISIBLE_DEVICES chooses which of several GPUs this is
_FULL_NAMES = {CPU: "CPUExecutionProvider", CUDA: "CUDAExecutionProvider"}
# The preferred first; int4, the farthest from the trained model, is for those who ask for it. On CUDA the
# attention of the CPU's graphs does not have a kernel, and would silently run on the CPU. On the CPU fp16
# does not have fast kernels, and bf16 does not have any.
_PRECISIONS = {
    CPU: (Precision.INT8, Precision.FP32, Precision.INT4),
    CUDA: (Precision.FP16, Precision.BF16),
}

# The driver of an NVIDIA GPU creates the first file; under Windows the driver of any GPU creates the second.
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))

# Every session has its own arena, which grows by the requested size and not to the next power of two.
_CUDA_OPTIONS = names.CUDA_PROVIDER_OPTIONS | {"arena_extend_strategy": "kSameAsRequested"}

_PROVIDERS = Path(ort.__file__).parent / "capi"  # the folder of ONNX Runtime's own libraries
_DRIVER = "libcuda.so"
_CUDA_FAILURE = re.compile(r"CU\w+ failure \d+: [^;]*\b")

_TRY_SECONDS = 120.0  # the first use of a GPU after the machine's start may take many seconds
_TRY = f"import json, sys; from {__name__} import try_cuda; print(json.dumps(try_cuda(*sys.argv[1:])))"
_MOST_SHOWN = 500  # characters of a process's errors

_EMPTY = Path("/dev/null")  # the file that a graph names for weights that are given from memory
_WEIGHTS_FOLDER_KEY = "session.model_external_initializers_file_folder_path"

ort.set_default_logger_severity(4)  # its errors are also raised, and its lines do not have our log's format
for _name, _value in names.CUDA_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


class Session(ort.InferenceSession):  # type: ignore[misc]  # ONNX Runtime does not ship types
    """A graph that ONNX Runtime runs.

    Attributes:
        weights: The values that it uses in place; they must live as long as the session.
    """

    weights: tuple[ort.OrtValue, ...] = ()


class _Tried(NamedTuple):
    """Why CUDA does not work, or an empty text and the device's name."""

    problem: str
    description: str


class OnnxDevice:
    """The device of one execution provider: buffers lie on it, and graphs run on it.

    Args:
        provider: Its short name.
        num_threads: CPU threads of one graph's run; after `share_threads`, graphs use its pool instead.

    Attributes:
        pool: `num_threads` threads for work outside of graphs.
        is_host: Whether its memory is the process's own, so that numpy may read and write it.
        can_capture: Whether a run can be captured once and replayed, which saves the launch of each kernel.
        has_operators: Whether graphs run with the project's own operators, instead of their definitions.
    """

    def __init__(self, provider: str, num_threads: int) -> None:
        self.num_threads = num_threads
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="device")
        self.is_host = provider == CPU
        self.can_capture = provider == CUDA
        self._registers = kernels.register(ort.SessionOptions(), is_cuda=not self.is_host)
        self.has_operators = self.is_host and self._registers
        self._provider = provider
        # By address, element type and shape of the host's copy; sessions keep the values alive.
        self._weights: WeakValueDictionary[tuple[Any, ...], ort.OrtValue] = WeakValueDictionary()

    @property
    def moves_positions(self) -> bool:
        """Whether a kernel of the project's own copies live positions of rows on the device."""
        return not self.is_host and self._registers

    def session(
        self, name: str, graph: bytes, weights: memoryview | None = None, *, is_captured: bool = False
    ) -> Session:
        """Load a graph from memory; no file is read.

        Args:
            name: For messages.
            graph: An ONNX model.
            weights: The content of its file of weights. Sessions of the host use it in place; another device
                has one copy of each weight, which all sessions of this object share.
            is_captured: Whether its runs are captured; requires `can_capture`.

        Raises:
            ValueError: ONNX Runtime would run it on another provider, or a weight lies outside of `weights`.
        """
        found: list[Weight] = []
        if weights is not None:
            graph, found = take_weights(graph, weights, _EMPTY.name)
        values = tuple(map(self._place_weight, found))
        full_name = _FULL_NAMES[self._provider]
        provider_options = (
            {} if self._provider == CPU else _CUDA_OPTIONS | {"enable_cuda_graph": str(int(is_captured))}
        )

        def create() -> Session:
            options = self._options()
            for weight, value in zip(found, values, strict=True):
                options.add_initializer(weight.name, value)
            return Session(graph, options, providers=[(full_name, provider_options)])

        try:
            session = create()
        except Exception as error:  # ONNX Runtime's errors do not have a common class
            if self.is_host or not self._registers:
                raise
            # The driver may refuse a kernel of the project's own.
            self._registers = False
            try:
                session = create()
            except Exception:
                self._registers = True
                raise error from None
            _log.warning("%s runs without the operators for CUDA, and is slower: %s", name, one_line(error))
        session.weights = values
        if session.get_providers()[0] != full_name:
            raise ValueError(f"{name} would run on {session.get_providers()[0]} instead of {full_name}")
        return session

    def _options(self) -> ort.SessionOptions:
        options = ort.SessionOptions()
        # ONNX Runtime refuses sessions with their own threads once there is a shared pool.
        options.use_per_session_threads = not share_threads.cache_info().currsize
        if options.use_per_session_threads:
            options.intra_op_num_threads = self.num_threads
            options.inter_op_num_threads = 1
        # Memory patterns would be kept for every shape ever used: tens of megabytes without a gain in speed.
        options.enable_mem_pattern = False
        options.log_severity_level = 4
        # Threads that spin after a run would compete with the event loop for the CPU.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # ONNX Runtime requires that the file of the weights exists; it does not read it, because it gets
        # every weight.
        options.add_session_config_entry(_WEIGHTS_FOLDER_KEY, str(_EMPTY.parent))
        if self._registers:
            kernels.register(options, is_cuda=not self.is_host)
        return options

    def weightless(self, name: str, *, is_captured: bool = False) -> Session:
        """Load a graph of the server's own, which selects tokens or moves rows."""
        return self.session(name, weightless(name), is_captured=is_captured)

    def replay(self, session: Session, binding: ort.IOBinding, graph_id: int) -> None:
        """Run a captured session; each thread's first run with a `graph_id` is captured.

        A graph id stands for one set of shapes and addresses, so its binding must never change. While a
        thread captures a run, no other thread of the process may allocate memory on the device, copy to it or
        wait for it; otherwise both fail.
        """
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph_id))
        session.run_with_iobinding(binding, options)

    def value(self, array: Array) -> ort.OrtValue:
        """Returns a copy of `array` on the device."""
        return ort.OrtValue.ortvalue_from_numpy(array, self._provider, _DEVICE_ID)

    def place(self, array: Array) -> tuple[Any, int]:
        """Returns `array` itself on the host, otherwise a copy on the device; and its address."""
        if self.is_host:
            return array, int(array.ctypes.data)
        value = self.value(array)
        return value, int(value.data_ptr())

    def _place_weight(self, weight: Weight) -> ort.OrtValue:
        """Returns the weight on the device."""
        if self.is_host:
            return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(weight.bits, weight.element_type)
        place = int(weight.bits.ctypes.data), weight.element_type, weight.bits.shape
        value = self._weights.get(place)
        if value is None:
            memory = ort.OrtValue.ortvalue_from_shape_and_type(
                weight.bits.shape, weight.element_type, self._provider, _DEVICE_ID
            )
            memory.update_inplace(weight.bits)
            # A session refuses an initializer that owns its memory, so it gets a view, which keeps it alive.
            value = self._weights[place] = ort.OrtValue.from_dlpack(memory)
        return value

    def bind_feed(self, binding: ort.IOBinding, name: str, feed: Array | ort.OrtValue) -> None:
        """Bind an array of the host, which a run copies to the device, or a value of `value`."""
        if isinstance(feed, ort.OrtValue):
            binding.bind_ortvalue_input(name, feed)
        else:
            binding.bind_cpu_input(name, feed)

    def bind_input(
        self, binding: ort.IOBinding, name: str, dtype: Any, shape: tuple[int, ...], pointer: int
    ) -> None:
        """Bind memory of the device as a graph's input."""
        binding.bind_input(name, self._provider, _DEVICE_ID, dtype, shape, pointer)

    def bind_output(
        self, binding: ort.IOBinding, name: str, dtype: Any, shape: tuple[int, ...], pointer: int
    ) -> None:
        """Bind memory of the device as a graph's output."""
        binding.bind_output(name, self._provider, _DEVICE_ID, dtype, shape, pointer)

    def bind_new_output(self, binding: ort.IOBinding, name: str) -> None:
        """Let the run allocate an output on the device."""
        binding.bind_output(name, self._provider, _DEVICE_ID)


def read_files(
    bundle: Bundle, precision: Precision, provider: str, memory: int | None = None
) -> VariantFiles:
    """Read graphs and weights to run here; the project's operators get the weights of maps packed.

    Args:
        bundle: A checked bundle.
        precision: One of the manifest's.
        provider: Runs the graphs.
        memory: As for `Bundle.read_variant`.

    Raises:
        BundleError: A file is not that of the manifest.
    """
    if provider == CPU and has_operators():
        return bundle.read_variant(precision, PackedMaps, memory)
    return bundle.read_variant(precision, memory=memory)


def has_operators() -> bool:
    """Returns whether sessions of the CPU run the project's own operators."""
    return kernels.register(ort.SessionOptions())


def operators_remarks(path: Path, provider: str) -> tuple[Remark, ...]:
    """Returns a warning if the bundle of a path runs without the project's own operators."""
    problem = kernels.add(ort.SessionOptions(), is_cuda=provider != CPU)
    text = f"{path} runs on {provider} without the compiled operators, and can be several times slower"
    return ((logging.WARNING, f"{text}: {problem}"),) if problem else ()


def weightless(name: str) -> bytes:
    """Returns a graph of the server's own, which `export.graphs.weightless` created."""
    return (files("seq2seq_serve.server.runner") / "weightless" / f"{name}.onnx").read_bytes()


def small_session(graph: bytes) -> Session:
    """Load a graph that is too small for several threads, with its weights, on the CPU."""
    options = ort.SessionOptions()
    options.use_per_session_threads = not share_threads.cache_info().currsize
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return Session(graph, options, providers=[_FULL_NAMES[CPU]])


@functools.cache
def share_threads(num_threads: int) -> None:
    """Create the pool of threads that the graphs of all sessions share.

    Separate pools have to be woken for every session: on two cores a step of one beam took 3.2 ms instead of
    2.0. The pool can be created only once in a process, and then every session must use it.
    """
    try:
        ort.set_global_thread_pool_sizes(num_threads, 1)
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        _log.warning("graphs do not get a pool of %d threads: %s", num_threads, error)


def describe_device(provider: str, precision: Precision, cuda_libraries: Path | None) -> str:
    """Returns a provider with a remark: the GPU's name and memory, if they can be read.

    For a CPU the remark names the instructions of quantised products, or says that the operators are missing.
    """
    if provider != CPU:
        remark = _try_cuda(cuda_libraries).description
    elif not has_operators():
        remark = "without the compiled operators"
    else:
        remark = "" if precision is Precision.FP32 else kernels.instructions()
    return f"{provider} ({remark})" if remark else provider


def choose(
    bundle: Bundle,
    policy: ProviderPolicy,
    precision: Precision | None,
    cuda_libraries: Path | None = None,
) -> tuple[str, Precision, tuple[Remark, ...]]:
    """Returns the provider and precision to run a bundle with, and why a preferred CUDA is not used.

    Args:
        bundle: A checked bundle.
        policy: The allowed providers.
        precision: None takes the preferred one.
        cuda_libraries: Folder with CUDA's libraries; None searches the packages of this Python.

    Raises:
        ValueError: The bundle does not have such graphs, or no allowed provider can run them.
    """
    variants = bundle.manifest.variants
    if precision is not None and precision not in variants:
        raise ValueError(f"the bundle has no {precision} graphs; it has {', '.join(variants)}")
    asked = tuple(variants) if precision is None else (precision,)
    reason = ""
    if policy != ProviderPolicy.CPU:
        reason = _why_not_cuda(asked, cuda_libraries)
        if not reason:
            return CUDA, _preferred(CUDA, asked), ()
        if policy == ProviderPolicy.REQUIRE:
            raise ValueError(f"CUDA is required: {reason}")
    if not set(asked) & set(_PRECISIONS[CPU]):
        problem = f"{_listed(asked)} graphs do not run on the CPU, which takes {_listed(_PRECISIONS[CPU])}"
        raise ValueError(f"{problem}; and not on CUDA: {reason}" if reason else problem)
    cpu = CPU, _preferred(CPU, asked)
    if not reason:
        return *cpu, ()
    text = f"{bundle.path} runs on the CPU"
    if _FULL_NAMES[CUDA] in ort.get_available_providers() or any(path.exists() for path in _GPU_FILES):
        return *cpu, ((logging.WARNING, f"{text}, though CUDA is preferred: {reason}"),)
    # A machine without a GPU and without packages for one is as intended: no warning.
    return *cpu, ((logging.INFO, f"{text}: neither a GPU nor onnxruntime-gpu was found"),)


def usable_variants(bundle: Bundle) -> list[tuple[str, Precision]]:
    """Returns every provider and precision that can run a bundle here, the preferred first."""
    providers = [CPU] if cuda_problem(None) else [CUDA, CPU]
    return [
        (provider, precision)
        for provider in providers
        for precision in _PRECISIONS[provider]
        if precision in bundle.manifest.variants
    ]


def _preferred(provider: str, asked: tuple[Precision, ...]) -> Precision:
    return next(precision for precision in _PRECISIONS[provider] if precision in asked)


def _why_not_cuda(asked: tuple[Precision, ...], libraries: Path | None) -> str:
    """Returns why CUDA cannot run graphs of any of these precisions; empty if it can."""
    problem = cuda_problem(libraries)
    if not problem and not set(asked) & set(_PRECISIONS[CUDA]):
        return (
            f"it runs {_listed(_PRECISIONS[CUDA])} graphs, and not {_listed(asked)}: export the model with "
            "--precision fp16, too, and let the server choose"
        )
    return problem


def cuda_problem(libraries: Path | None) -> str:
    """Returns why CUDA does not work here: ONNX Runtime lacks it, or its device fails; empty if it works."""
    has_cuda = _FULL_NAMES[CUDA] in ort.get_available_providers()
    # A folder that the user named must exist, even if nothing uses it.
    searched = load_cuda_libraries(libraries) if has_cuda or libraries is not None else ""
    if not has_cuda:
        return (
            f"this ONNX Runtime has no {_FULL_NAMES[CUDA]} (for a GPU, install "
            "onnxruntime-gpu[cuda,cudnn] in place of onnxruntime)"
        )
    reason = _try_cuda(libraries).problem
    if _DRIVER in reason:
        searched = "it is part of NVIDIA's driver; start a container with --gpus all to get it"
    return f"{_FULL_NAMES[CUDA]} does not work here: {reason} ({searched})" if reason else ""


def _try_cuda(libraries: Path | None) -> _Tried:
    """Run `try_cuda` in a process of its own: CUDA takes hundreds of MiB in each process that uses it.

    A success is kept for this process. After a failure, CUDA is tried again, because it may be of the moment.
    """
    tried = _try_once(libraries)
    if tried.problem:
        _try_once.cache_clear()
    return tried


@functools.cache
def _try_once(libraries: Path | None) -> _Tried:
    command = [sys.executable, "-P", "-c", _TRY, *([] if libraries is None else [str(libraries.absolute())])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TRY_SECONDS)
    except subprocess.TimeoutExpired:
        return _Tried(f"it did not answer for {_TRY_SECONDS:.0f} seconds", "")
    try:
        return _Tried(*json.loads(done.stdout))
    except ValueError:
        errors = " ".join(done.stderr[-_MOST_SHOWN:].split())
        return _Tried(f"a process that tried it ended with {done.returncode}: {errors}", "")


def try_cuda(libraries: str | None = None) -> _Tried:
    """Use CUDA in this process, with the libraries of a folder or those that are found."""
    load_cuda_libraries(None if libraries is None else Path(libraries))
    try:
        device = OnnxDevice(CUDA, num_threads=1)
        device.value(np.zeros(1, np.float32))
        device.weightless("greedy")
    except Exception as error:  # ONNX Runtime's errors do not have a common class
        return _Tried(provider_problem(_PROVIDERS) or one_line(error), "")
    return _Tried("", device_description(_PROVIDERS, _DEVICE_ID))


def one_line(error: Exception) -> str:
    """Returns the text of an error of ONNX Runtime in one line; of a CUDA error only CUDA's own message."""
    text = " ".join(str(error).split())
    failure = _CUDA_FAILURE.search(text)
    return failure[0] if failure else text


def _listed(precisions: tuple[Precision, ...]) -> str:
    *others, last = precisions
    return f"{', '.join(others)} and {last}" if others else last
