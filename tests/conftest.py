"""Hooks and fixtures for all tests; `tests.models` makes the models and bundles."""

import asyncio
import functools
import inspect
import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from seq2seq_serve import kernels

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    pass  # the tests of a GPU do without it, and machines with one seldom have it
else:
    # No test is timed: machines are too uneven. Quick runs try the same examples each time.
    untimed = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("quick", max_examples=25, derandomize=True, **untimed)
    settings.register_profile("thorough", max_examples=200, **untimed)  # of `make test-all`
    settings.load_profile("quick")

# The variables that tests and their processes keep: where things are, and what was chosen for these tests.
# All others differ from machine to machine: language, width of the terminal, proxies, warnings, numbers
# of threads, the flags of a make that runs the tests, settings of the server.
_KEPT_VARIABLES = re.compile(
    r"(HOME|PATH|PIP_\w+|LD_LIBRARY_PATH|USER|LOGNAME|TMPDIR|XDG_\w+|VIRTUAL_ENV|SYSTEMROOT|PYTHONPATH|PYTHONHASHSEED"
    r"|PYTHONPYCACHEPREFIX|PYTEST_\w+|COV\w+|CUDA_\w+|NVIDIA_\w+|DOCKER_\w+|PLAYWRIGHT_\w+|NODE_EXTRA_CA_CERTS"
    r"|KUBERNETES_CRDS|PUBLISHED_MODELS|SEQ2SEQ_ISA)"
)
_JOB_CONTROL = signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU
_IGNORED_BY_PYTHON = signal.SIGPIPE, signal.SIGXFSZ

# The longest file, so that it is not last, and two that make the bundles that many tests wait for.
_FIRST = ["export/huggingface/test_exporter.py", "export/test_main.py", "bundle/test_manifest.py"]

# The seconds after which a test has hung. Beside other busy processes, those outside of `_LONG_PLACES` took
# at most 8 seconds.
_QUICK_SECONDS, _LONG_SECONDS = 60, 600
_LONG_MARKS = "slow", "gpu", "docker", "cuda_stub"
# Their quick tests convert whole checkpoints, which took up to 42 seconds beside other busy processes.
_LONG_PLACES = "export", "server/test_generate.py"


# Measurements, clients of others and files for deployments: few changes touch them. Part of `make test-all`.
_LONG_LAYER = "benchmarks", "clients", "reliability"
_LONG_LAYER += "test_kubernetes.py", "test_monitoring.py", "test_proxies.py"


@pytest.hookimpl(trylast=True)  # after pytest has read how its own output looks
def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands out tests to others need not wait for torch."""
    _clear_environment()
    if not config.getoption("numprocesses", None) or "PYTEST_XDIST_WORKER" in os.environ:
        _reset_signals()
        logging.getLogger("asyncio").addFilter(_is_ours)
        config.pluginmanager.import_plugin("tests.models")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Returns the name of a parameter that is not text: its argument's.

    Packed content has the time in it, and processes compare the names of their tests.
    """
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


def pytest_report_header() -> str:
    """Returns the line that names the instructions whose tests this machine cannot run."""
    available = kernels.available_instructions()
    missing = ", ".join(name for name in kernels.INSTRUCTIONS if name not in available)
    return f"kernels: tested with {', '.join(available) or 'none'}; no tests of {missing}, which are not here"


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a line of asyncio is not about gRPC, whose loops in one process disturb each other at times.

    A loop that is woken for another one's event finds nothing to read, and logs a BlockingIOError.
    """
    return "PollerCompletionQueue._handle_events" not in record.getMessage()


def _clear_environment() -> None:
    """Gives this process, and those that it starts, the same variables and file modes everywhere."""
    for name in os.environ.keys() - set(filter(_KEPT_VARIABLES.fullmatch, os.environ)):
        del os.environ[name]
    os.environ["TZ"] = "UTC"
    time.tzset()
    os.umask(0o022)


def _reset_signals() -> None:
    """Makes signals arrive that the parent blocked or ignored, as nohup and background jobs of shells do."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        with suppress(PermissionError):  # it leads its processes already
            os.setsid()  # so that a closed terminal still does not end the tests
    for number in signal.valid_signals() - {*_JOB_CONTROL, *_IGNORED_BY_PYTHON}:
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A quick run does not import what only long tests import."""
    expression = config.getoption("markexpr")
    if "not slow" in expression and _is_in(collection_path, _LONG_LAYER):
        return True
    if "not cuda_stub" in expression and _is_in(collection_path, ("cuda_stub",)):
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out those that are slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _is_in(item.path, _LONG_LAYER):
            item.add_marker(pytest.mark.slow)
    first = {Path(__file__).parent / name: place for place, name in enumerate(_FIRST)}
    # Two processes that each take the next file then end at about the same time.
    long = {item.path for item in items if _is_long(item)}
    items.sort(key=lambda item: (first.get(item.path, len(first)), item.path not in long))
    # `--timeout` stands for all tests, and machines with a GPU seldom have the plugin.
    if config.pluginmanager.hasplugin("timeout") and config.getoption("timeout") is None:
        for item in items:
            item.add_marker(_time_limit(item))


@pytest.hookimpl(tryfirst=True)  # before pytest refuses it
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function, in an event loop of its own."""
    # Pytest-asyncio takes as long, and its options in pyproject.toml are errors where it is missing, as in
    # the check of a GPU (`benchmarks.gpu_check.more`), which runs without plugins.
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def _is_long(item: pytest.Item) -> bool:
    return any(map(item.get_closest_marker, _LONG_MARKS))


def _time_limit(item: pytest.Item) -> pytest.MarkDecorator:
    """The limit of a test; a quick one's leaves out its fixtures, which may make what all tests read."""
    if _is_long(item) or _is_in(item.path, _LONG_PLACES):
        return pytest.mark.timeout(_LONG_SECONDS)
    return pytest.mark.timeout(_QUICK_SECONDS, func_only=True)


@functools.cache
def _is_in(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(Path(__file__).parent / place) for place in places)


@pytest.fixture(scope="session", autouse=True)
def _quiet_soon() -> Iterator[None]:
    # Each of the many servers that start and stop in this process would wait for calls on their way to it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seq2seq_serve.server.service.calls._QUIET_SECONDS", 0.01)
        yield


@pytest.fixture(autouse=True)
def _no_log_left() -> Iterator[None]:
    """A command that runs in this process configures logging, to streams that end with its test."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    for handler in root.handlers[:]:
        if handler not in before and not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
    root.setLevel(level)
