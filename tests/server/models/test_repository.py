"""Versions come and go while callers use them; nobody's call fails."""

import asyncio
import gc
import os
import threading
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

import pytest

from seq2seq_serve.bundle.manifest import bundle_version
from seq2seq_serve.server.engine.result import Load
from seq2seq_serve.server.errors import LoadFailed, Unavailable, UnknownModel
from seq2seq_serve.server.models.folders import ModelFolders
from seq2seq_serve.server.models.repository import Repository, VersionState
from seq2seq_serve.server.models.served import Models
from seq2seq_serve.server.telemetry.metrics import Metrics
from seq2seq_serve.server.telemetry.record import Caller, CallRecord


@dataclass(eq=False)
class FakeModel:
    """What a repository needs of a model."""

    name: str
    version: str
    stopped: list[str] = field(default_factory=list)
    precision: str = "int8"
    provider: str = "cpu"
    num_slots: int = 1
    slot_bytes: int = 1
    limited_bytes: int = 1
    max_target_length: int = 1
    base: None = None

    def silent_seconds(self) -> float:
        return 0.0

    def load(self) -> Load:
        return Load(0, 0, 0, 0)

    def num_slots_wanted(self) -> int:
        return 0

    @property
    def engine(self) -> "FakeModel":
        return self

    @property
    def sizing(self) -> "FakeModel":
        return self

    async def start(self) -> None:
        """It has nothing to start."""

    async def stop(self) -> None:
        self.stopped.append(self.version)


class Harness:
    """A folder of bundles, and a loader that fails where it is told to."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.stopped: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.used: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.metrics = Metrics()
        self.models = Models(self.metrics)
        self.repository = Repository(ModelFolders([], folder), self.models, self._load, lambda: None)

    def add(self, *parts: str) -> None:
        path = self.folder.joinpath(*parts)
        path.mkdir(parents=True)
        (path / "manifest.json").touch()

    def _load(self, name, version, path, num_used_bytes):
        self.used.append(num_used_bytes)
        assert self.gate.wait(20)
        if version in self.broken:
            raise self.broken[version]
        return FakeModel(name, version, self.stopped)

    def use(self, version: str = "") -> AbstractAsyncContextManager[FakeModel]:
        return self.models.use(CallRecord(request_id="", caller=Caller("")), "demo", version)

    def version(self) -> str:
        """The version that callers get."""
        return self.models.get("demo").version

    async def states(self) -> dict[str, VersionState]:
        return {version.version: state for version, state, _ in await self.repository.index()}

    async def until_loading(self, number: int) -> None:
        """Wait until the loader was called that number of times."""
        while len(self.used) < number:
            await asyncio.sleep(0.001)

    async def until_ended(self) -> None:
        while self.repository._ending:
            await asyncio.sleep(0.001)


@pytest.fixture
def folders(tmp_path):
    return Harness(tmp_path)


async def test_the_newest_version_is_served_and_numbers_count_as_numbers(folders):
    for version in ("9", "10", "2"):
        folders.add("demo", version)
    folders.add("plain")
    (folders.folder / "no-model").mkdir()
    assert ModelFolders([], folders.folder).names == ["demo", "plain"]
    assert (await folders.repository.load("demo")).version == "10"
    assert (await folders.repository.load("plain")).version == bundle_version(folders.folder / "plain")
    assert folders.version() == "10"
    assert (await folders.states())["10"] is VersionState.READY
    assert (await folders.states())["9"] is VersionState.UNAVAILABLE


@pytest.mark.parametrize(
    ("names", "served", "numbers"),
    [
        ((), "", ["1"]),  # the model's folder is the bundle
        (("a", "b", "c"), "c", ["3"]),  # the oldest is 1
        (("2", "7"), "7", []),  # they have numbers of their own
        (("a", "7"), "a", []),
    ],
)
async def test_a_version_may_be_named_by_its_number(folders, names, served, numbers):
    """Triton's callers know versions as numbers; "1" was not found though there was one version."""
    folders.add("demo")
    for name in names:
        (folders.folder / "demo" / "manifest.json").unlink(missing_ok=True)
        folders.add("demo", name)
    await folders.repository.load("demo", served)
    known = []
    for number in ("0", "1", "2", "3", "4"):
        with suppress(UnknownModel):
            async with folders.use(number) as model:
                assert model.version == folders.version()
                known.append(number)
    assert known == numbers
    if len(names) == 3:
        assert (await folders.repository.load("demo", "1")).version == "a"
        async with folders.use("1"):
            with pytest.raises(UnknownModel, match="not served in version '3'"):
                await folders.use("3").__aenter__()


async def test_a_version_that_was_never_loaded_has_that_reason(folders):
    """It was listed as unavailable without a reason, a damaged bundle like a sound one."""
    for version in "12":
        folders.add("demo", version)
    await folders.repository.load("demo")
    reasons = {version.version: reason for version, _, reason in await folders.repository.index()}
    assert reasons == {"1": "not loaded; whether its files are sound shows when it is", "2": ""}


async def test_an_old_version_ends_when_its_last_caller_has_left(folders):
    folders.add("demo", "1")
    await folders.repository.load("demo")
    async with folders.use() as first, folders.use():
        folders.add("demo", "2")
        await folders.repository.load("demo")
        async with folders.use() as second:
            assert (first.version, second.version) == ("1", "2")
        await asyncio.sleep(0.05)
        assert folders.stopped == []
        assert await folders.states() == {"1": VersionState.UNLOADING, "2": VersionState.READY}
    await folders.until_ended()
    assert folders.stopped == ["1"]
    assert await folders.states() == {"1": VersionState.UNAVAILABLE, "2": VersionState.READY}
    info = folders.metrics.registry.get_sample_value
    labels = {"model_name": "demo", "precision": "int8", "provider": "cpu"}
    assert info("seq2seq_model_info", labels | {"version": "1"}) is None
    assert info("seq2seq_model_info", labels | {"version": "2"}) == 1


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError])
async def test_a_broken_version_leaves_the_served_one_and_says_why(folders, kind):
    folders.add("demo", "1")
    await folders.repository.load("demo")
    folders.add("demo", "2")
    folders.broken["2"] = kind("it is broken")
    with pytest.raises(LoadFailed, match="it is broken"):
        await folders.repository.load("demo")
    assert folders.version() == "1"
    reasons = {version.version: reason for version, _, reason in await folders.repository.index()}
    assert reasons["2"].endswith("it is broken")
    assert await folders.states() == {"1": VersionState.READY, "2": VersionState.UNAVAILABLE}
    assert folders.stopped == []


@pytest.mark.parametrize("name", ["..", ".", "", "../outside", "a/b", "nobody", "x\0", "x" * 300])
async def test_nothing_outside_of_the_repository_is_a_model(folders, name):
    (folders.folder / "manifest.json").touch()
    with pytest.raises(UnknownModel, match="there is no bundle"):
        await folders.repository.load(name)
    assert await folders.repository.index() == []


def test_a_folder_whose_name_is_not_utf_8_is_skipped_with_one_line_of_the_log(folders, caplog):
    """The names of the models could not be sent: every listing and every load ended with INTERNAL."""
    folders.add("echo", "1")
    folders.add(os.fsdecode(b"caf\xe9"), "1")
    folders.add("echo", os.fsdecode(b"2\xff"))

    async def live() -> None:
        for _ in range(3):
            index = await folders.repository.index()
            assert [(one.model_name, one.version) for one, _, _ in index] == [("echo", "1")]
        assert (await folders.repository.load_one("echo")).version == "1"

    asyncio.run(live())
    assert caplog.text.count("its name is not UTF-8") == 2
    assert "caf\\udce9' is skipped" in caplog.text
    with pytest.raises(ValueError, match=r"the name of the bundle .* is not UTF-8: rename the folder"):
        ModelFolders([folders.folder / os.fsdecode(b"caf\xe9")], None)


async def test_while_the_server_drains_nothing_is_loaded_and_what_was_being_loaded_is_not_served(folders):
    folders.add("demo", "1")
    folders.add("demo", "2")
    await folders.repository.load("demo", "1")
    folders.gate.clear()
    loading = asyncio.create_task(folders.repository.load("demo"))
    while not folders.used[1:]:
        await asyncio.sleep(0)
    assert await folders.states() == {"1": VersionState.READY, "2": VersionState.LOADING}
    folders.repository.drain()
    folders.gate.set()
    for one in (loading, folders.repository.load("demo")):
        with pytest.raises(Unavailable, match="shutting down"):
            await one
    assert folders.version() == "1"
    assert folders.stopped == ["2"]


async def test_at_the_start_an_older_version_stands_in_for_a_broken_one(folders, caplog):
    for version in "123":
        folders.add("demo", version)
    folders.broken = {"3": ValueError("three is broken"), "2": ValueError("two is broken")}
    assert (await folders.repository.load_one("demo")).version == "1"
    reasons = [reason for _, _, reason in await folders.repository.index()]
    assert reasons == ["", "two is broken", "three is broken"]
    folders.broken["1"] = ValueError("one is broken")
    caplog.clear()
    with pytest.raises(LoadFailed, match="one is broken"):
        await folders.repository.load_one("demo")
    with pytest.raises(UnknownModel):
        await folders.repository.load_one("nobody")
    told = [record.message.partition(": ")[2] for record in caplog.records]  # each error was not told once
    assert told == [
        f"trying a version before {version}, which failed: {word} is broken"
        for version, word in ((3, "three"), (2, "two"))
    ]


async def test_a_load_goes_on_when_its_caller_leaves_and_is_counted(folders):
    folders.add("demo", "1")
    folders.add("other", "1")
    folders.gate.clear()
    caller = asyncio.create_task(folders.repository.load("demo"))
    await folders.until_loading(1)
    caller.cancel()
    waiting = asyncio.create_task(folders.repository.load("other"))
    with pytest.raises(asyncio.CancelledError):
        await caller
    folders.gate.set()
    await waiting
    assert {model.name for model in folders.models} == {"demo", "other"}
    assert folders.used == [0, 1]


async def test_loads_that_wait_for_another_end_when_their_callers_leave(folders):
    """After 60 abandoned ones the next load waited for all of them."""
    folders.add("demo", "1")
    folders.add("other", "1")
    folders.gate.clear()
    first = asyncio.create_task(folders.repository.load("demo"))
    await folders.until_loading(1)
    waiting = [asyncio.create_task(folders.repository.load("demo")) for _ in range(60)]
    await asyncio.sleep(0)
    for caller in (first, *waiting):
        caller.cancel()
    await asyncio.wait([first, *waiting])
    other = asyncio.create_task(folders.repository.load("other"))
    folders.gate.set()
    await other
    assert len(folders.used) == 2, "the one that ran, and the last one"
    assert {model.name for model in folders.models} == {"demo", "other"}
    assert not folders.repository.is_loading


def test_a_load_that_fails_after_its_caller_left_logs_no_traceback(folders, caplog):
    folders.add("demo", "1")
    folders.broken["1"] = ValueError("damaged")

    async def run():
        folders.gate.clear()
        caller = asyncio.create_task(folders.repository.load("demo"))
        await folders.until_loading(1)
        caller.cancel()
        folders.gate.set()
        await folders.repository.stop()
        assert caller.cancelled()
        assert await folders.states() == {"1": VersionState.UNAVAILABLE}

    asyncio.run(run())
    gc.collect()  # an exception that nobody asked for is logged when its task is freed
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_end_waits_for_loads_and_stops_what_is_ending(folders):
    folders.add("demo", "1")
    folders.add("other", "7")
    await folders.repository.load("demo")
    async with folders.use():
        await folders.repository.unload("demo")
        folders.gate.clear()
        loading = asyncio.create_task(folders.repository.load("other"))
        await folders.until_loading(2)
        stopping = asyncio.create_task(folders.repository.stop())
        await asyncio.sleep(0.05)
        folders.gate.set()
        await stopping
        with pytest.raises(Unavailable, match="shutting down"):
            await loading
        assert set(folders.stopped) == {"1", "7"}
