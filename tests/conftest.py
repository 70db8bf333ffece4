"""Hooks and fixtures for all tests; `tests.models` makes the models and bundles."""

import asyncio
import functools
import inspect
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass  # the tests of a GPU do without it, and machines with one seldom have it
else:
    # No test is timed: machines are too uneven.
    settings.register_profile("quick", deadline=None, max_examples=25)
    settings.register_profile("thorough", deadline=None, max_examples=500)  # of `make test-all`
    settings.load_profile("quick")

# The longest file, so that it is not last, and two that make the bundles that many tests wait for.
_FIRST = ["export/huggingface/test_exporter.py", "export/test_main.py", "bundle/test_manifest.py"]

# The seconds after which a test has hung. Beside other busy processes, those outside of `_LONG_PLACES` took
# at most 8 seconds.
_QUICK_SECONDS, _LONG_SECONDS = 60, 600
_LONG_MARKS = "slow", "gpu", "docker", "cuda_stub"
# Their quick tests convert whole checkpoints, which took up to 42 seconds beside other busy processes.
_LONG_PLACES = "export", "server/test_generate.py"


# Measurements and files for deployments, which few changes touch: part of `make test-all`.
_LONG_LAYER = "benchmarks", "reliability"
_LONG_LAYER += "test_kubernetes.py", "test_monitoring.py", "test_proxies.py"


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands out tests to others need not wait for torch."""
    if not config.getoption("numprocesses", None) or "PYTEST_XDIST_WORKER" in os.environ:
        config.pluginmanager.import_plugin("tests.models")


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
