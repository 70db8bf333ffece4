"""Adapters come and go beside the model that they change; nobody's call fails."""

import asyncio
import logging
import shutil
import threading
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve.bundle.adapters import Weights
from seq2seq_serve.bundle.manifest import AdaptedMap, AdaptedPart
from seq2seq_serve.server.engine.result import Load
from seq2seq_serve.server.errors import (
    Forbidden,
    LoadFailed,
    Overloaded,
    Unavailable,
    UnknownModel,
)
from seq2seq_serve.server.models import repository as repository_module
from seq2seq_serve.server.models.adapters import AdapterFolders
from seq2seq_serve.server.models.folders import ModelFolders
from seq2seq_serve.server.models.repository import Repository, VersionState
from seq2seq_serve.server.models.served import Models, ServedModel
from seq2seq_serve.server.telemetry.metrics import Metrics
from seq2seq_serve.server.telemetry.record import Caller, CallRecord
from tests.models import adapter_folder
from tests.server.fakes import sample_value
from tests.server.service.harness import EchoRunner, echo_bundle, echo_sizing

MAPS = (AdaptedMap(2, (AdaptedPart("a", 3),)),)
CHECKSUM = "1234567890abcdef"


def weights_of(number: float, rank: int = 1) -> Weights:
    return {"a": (np.full((rank, 2), number, np.float16), np.ones((rank, 3), np.float16))}


@dataclass(eq=False)
class FakeEngine:
    """Keeps the first number of the adapter in each place.

    Attributes:
        places: These numbers.
        num_written: How often an adapter was written.
        is_stopped: Whether `stop` was called.
    """

    model_name: str
    num_slots: int = 1
    places: dict[int, float] = field(default_factory=dict)
    num_written: int = 0
    is_stopped: bool = False

    def write_adapter(self, place: int, weights: Weights) -> None:
        assert not self.is_stopped
        self.num_written += 1
        self.places[place] = float(weights["a"][0][0, 0])

    def load(self) -> Load:
        return Load(0, 0, 0, 0)

    def num_slots_wanted(self) -> int:
        return 0

    def silent_seconds(self) -> float:
        return 0.0

    async def start(self) -> None:
        """It has nothing to start."""

    async def stop(self) -> None:
        self.is_stopped = True


class Harness:
    """Models `demo` and `other` in versions, of which other's base is another one, and folders of adapters.

    Attributes:
        checksums: By model, of the maps that adapters change, in versions that are loaded later.
        gate: Clear it to hold the readers of adapters.
        reading: Set when one begins.
    """

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.checksums = path, {"demo": CHECKSUM, "other": "another"}
        self.gate, self.reading = threading.Event(), threading.Event()
        self.gate.set()
        for name in self.checksums:
            (path / "models" / name / "1").mkdir(parents=True)
            (path / "models" / name / "1" / "manifest.json").touch()
        (path / "adapters").mkdir()
        self.num_changes = 0
        read = repository_module.read_adapter

        def read_slowly(*given):
            self.reading.set()
            assert self.gate.wait(20)
            return read(*given)

        monkeypatch.setattr(repository_module, "read_adapter", read_slowly)

    def serve(self, *named: tuple[str, Path], num_places: int = 2, has_folder: bool = True) -> None:
        self.num_places = num_places
        self.metrics = Metrics()
        self.models = Models(self.metrics)
        self.repository = Repository(
            ModelFolders([], self.path / "models"),
            self.models,
            self._load,
            self._changed,
            AdapterFolders(named, self.path / "adapters" if has_folder else None),
        )

    def add(self, name: str, number: float, *, folder: str = "adapters", rank: int = 1, base: str = "demo"):
        """Writes an adapter over another one, as an operator should: the folder is moved into place."""
        made = adapter_folder(self.path / "new", self.checksums[base], weights_of(number, rank))
        place = self.path / folder / name
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        return made.rename(place)

    def use(self, name: str, caller: Caller = Caller("")) -> AbstractAsyncContextManager[ServedModel]:  # noqa: B008
        return self.models.use(CallRecord(request_id="", caller=caller), name)

    async def number(self, name: str) -> float:
        """The number of the weights that a caller of an adapter gets."""
        async with self.use(name) as model:
            return number_of(model)

    async def states(self) -> dict[str, tuple[VersionState, str]]:
        index = await self.repository.index()
        return {one.model_name: (state, reason) for one, state, reason in index if "/" in one.model_name}

    @property
    def served(self) -> list[str]:
        return [model.name for model in self.models]

    def _changed(self) -> None:
        self.num_changes += 1

    def _load(self, name: str, version: str, path: Path, num_used_bytes: int) -> ServedModel:
        bundle = echo_bundle(path, EchoRunner())
        manifest = replace(bundle.manifest, adapted_maps=MAPS, adapted_checksum=self.checksums[name])
        sizing = replace(echo_sizing(EchoRunner()), num_adapters=self.num_places, max_rank=2)
        engine = FakeEngine(name)
        return ServedModel(engine, replace(bundle, manifest=manifest), sizing, version)  # type: ignore[arg-type]


def number_of(model: ServedModel) -> float:
    return model.engine.places[model.adapter]  # type: ignore[attr-defined]


@pytest.fixture
def harness(tmp_path, monkeypatch):
    return Harness(tmp_path, monkeypatch)


async def test_named_adapters_are_loaded_with_every_model_that_they_fit(harness, caplog):
    caplog.set_level(logging.INFO)
    legal, medical = (harness.add(name, number, folder="x") for name, number in (("l", 3), ("m", 4)))
    harness.serve(("legal", legal), ("demo/medical", medical), has_folder=False)
    await harness.repository.load("demo")
    await harness.repository.load("other")
    harness.repository.check_adapters()
    assert harness.served == ["demo", "demo/legal", "demo/medical", "other"]
    assert [await harness.number(name) for name in ("demo/legal", "demo/medical")] == [3, 4]
    async with harness.use("demo/legal") as model, harness.use("demo") as base:
        assert model.base is base
        assert (model.engine, model.manifest) == (base.engine, base.manifest)
        assert (model.name, base.name, base.adapter) == ("demo/legal", "demo", -1)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    for name in ("other/legal", "other/medical", "demo/none", "demo/legal/x", "none/legal", "demo/"):
        with pytest.raises((UnknownModel, LoadFailed)):
            await harness.number(name)
    assert harness.served == ["demo", "demo/legal", "demo/medical", "other"]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("legal", "", "the adapter legal: .*x/l does not fit the model other: it is for 'random'"),
        ("demo/legal", "", "the adapter demo/legal: its model is not served, or has"),
        (
            "other/legal",
            "",
            "the adapter other/legal: .*it is for 'random' .checksum 1234567890ab., and the model",
        ),
        ("legal", "rank", "the adapter legal: .*its rank is 3: serve with --max-rank 3"),
        ("legal", "adapter.bin", "the adapter legal: .*adapter.bin was changed: its sha256"),
        ("legal", "adapter.json", "the adapter legal: .*is not an adapter, it has no adapter.json"),
    ],
)
async def test_a_named_adapter_that_cannot_be_used_ends_the_start(harness, name, damage, message):
    path = harness.add("l", 3, folder="x", rank=3 if damage == "rank" else 1)
    base = "demo" if damage else "other"
    if damage == "adapter.bin":
        (path / damage).write_bytes(bytes((path / damage).stat().st_size))
    elif damage == "adapter.json":
        (path / damage).unlink()
    harness.serve(("good", harness.add("good", 3, base=base)), (name, path))
    await harness.repository.load(base)
    assert f"{base}/good" in harness.served
    with pytest.raises(ValueError, match=message) as caught:
        harness.repository.check_adapters()
    assert "\n" not in str(caught.value)


def test_names_and_folders_that_are_wrong_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two adapters have the same name"):
        AdapterFolders([("a", tmp_path), ("a", tmp_path)], None)
    with pytest.raises(ValueError, match=r"the folder of adapters .*none is not a folder"):
        AdapterFolders([], tmp_path / "none")
    with pytest.raises(ValueError, match="not UTF-8"):
        AdapterFolders([("\udc80", tmp_path)], None)


async def test_one_of_the_folder_is_loaded_when_it_is_asked_for_once_for_all_callers(harness):
    harness.add("legal", 3)
    harness.serve()
    await harness.repository.load("demo")
    harness.repository.check_adapters()
    assert harness.served == ["demo"]
    harness.gate.clear()
    calls = [asyncio.create_task(harness.number("demo/legal")) for _ in range(5)]
    await asyncio.to_thread(harness.reading.wait, 20)
    calls[0].cancel()  # the next one loads it
    await asyncio.sleep(0)
    harness.gate.set()
    assert await asyncio.gather(*calls[1:]) == [3] * 4
    engine = harness.models.get("demo").engine
    assert engine.num_written == 1
    harness.add("late", 4)
    assert await harness.number("demo/late") == 4


async def test_the_least_recently_used_adapter_without_callers_leaves(harness):
    for number, name in enumerate("abc"):
        harness.add(name, number)
    harness.serve()
    await harness.repository.load("demo")
    for name in "aba":
        await harness.number(f"demo/{name}")
    await harness.number("demo/c")
    assert harness.served == ["demo", "demo/a", "demo/c"]
    async with harness.use("demo/a") as model:
        assert await harness.number("demo/b") == 1, "in the place of c, though a was used before it"
        assert number_of(model) == 0
        assert harness.served == ["demo", "demo/a", "demo/b"]
        async with harness.use("demo/b"):
            with pytest.raises(Overloaded, match=r"all places for adapters of demo .* are in use") as caught:
                await harness.number("demo/c")
            assert caught.value.retry_after_seconds > 0
            assert await harness.number("demo/a") == 0
    assert await harness.number("demo/c") == 2
    assert harness.served == ["demo", "demo/a", "demo/c"], "the call of a ended last"
    counted = [
        sample_value(harness.metrics, f"seq2seq_adapter_{what}_total", {"model_name": "demo"})
        for what in ("loads", "evictions")
    ]
    assert counted == [5, 3]


async def test_a_reload_replaces_an_adapter_and_its_callers_keep_the_old_weights(harness):
    harness.add("legal", 3)
    harness.serve()
    await harness.repository.load("demo")
    first = await harness.repository.load("demo/legal")
    harness.add("legal", 5)
    assert await harness.number("demo/legal") == 3, "a folder that changes is not loaded by itself"
    async with harness.use("demo/legal") as old:
        second = await harness.repository.load("demo/legal")
        assert first.version != second.version
        assert (number_of(old), await harness.number("demo/legal")) == (3, 5)
        harness.add("legal", 6)
        assert (await harness.repository.load("demo/legal")) is harness.models.get("demo/legal")
        assert (number_of(old), await harness.number("demo/legal")) == (3, 6)
        with pytest.raises(UnknownModel, match=f"demo/legal has no version '{first.version}' on disk"):
            await harness.repository.load("demo/legal", first.version)
    assert harness.served == ["demo", "demo/legal"]
    assert (await harness.repository.load("demo/legal", "1")).base is harness.models.get("demo")


async def test_a_reload_takes_no_place_of_another_adapter(harness):
    harness.serve()
    await harness.repository.load("demo")
    for number, name in enumerate(("a", "b")):
        harness.add(name, number)
        await harness.number(f"demo/{name}")
    harness.add("b", 7)
    await harness.repository.load("demo/b")
    assert harness.served == ["demo", "demo/a", "demo/b"]
    assert [await harness.number(f"demo/{name}") for name in "ab"] == [0, 7]


async def test_an_adapter_that_cannot_be_read_leaves_the_served_one(harness):
    harness.add("legal", 3)
    harness.serve()
    await harness.repository.load("demo")
    await harness.number("demo/legal")
    (harness.add("legal", 4) / "adapter.bin").write_bytes(b"")
    with pytest.raises(LoadFailed, match=r"adapter\.bin was changed"):
        await harness.repository.load("demo/legal")
    assert await harness.number("demo/legal") == 3
    index = [
        (state, reason) for one, state, reason in await harness.repository.index() if "/" in one.model_name
    ]
    assert [state for state, _ in index] == [VersionState.UNAVAILABLE, VersionState.READY]
    assert "adapter.bin was changed" in index[0][1]


async def test_callers_do_not_see_paths_and_the_log_says_once_why_an_adapter_fails(harness, caplog):
    harness.add("legal", 3, base="other")
    harness.serve()
    await harness.repository.load("demo")
    harness.repository.check_adapters()
    for _ in range(3):
        with pytest.raises(
            LoadFailed, match="adapter demo/legal cannot be loaded: the server's log"
        ) as caught:
            await harness.number("demo/legal")
        assert str(harness.path) not in str(caught.value)
    assert caplog.text.count("model demo/legal: not served") == 1
    assert "does not fit the model demo" in caplog.text
    harness.add("legal", 4)
    assert await harness.number("demo/legal") == 4


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_an_unloaded_adapter_is_loaded_only_by_an_admin(harness, is_loaded, caplog):
    harness.serve(("legal", harness.add("legal", 3, folder="x")))
    await harness.repository.load("demo")
    harness.repository.check_adapters()
    if not is_loaded:
        harness.models.remove("demo/legal")
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(harness.use("demo/legal")) if is_loaded else None
        await harness.repository.unload("demo/legal")
        assert old is None or number_of(old) == 3
    with pytest.raises(UnknownModel, match=r"no model is named 'demo/legal': this server has demo, and"):
        await harness.number("demo/legal")
    with pytest.raises(UnknownModel, match="there is nothing to unload"):
        await harness.repository.unload("demo/legal")
    assert await harness.states() == {"demo/legal": (VersionState.UNAVAILABLE, "unloaded")}
    await harness.repository.load("demo")
    assert harness.served == ["demo"], "nor with its base"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    await harness.repository.load("demo/legal")
    assert await harness.number("demo/legal") == 3
    assert await harness.states() == {"demo/legal": (VersionState.READY, "")}


async def test_an_adapter_that_is_unloaded_while_it_is_loaded_is_not_served(harness):
    harness.add("legal", 3)
    harness.serve()
    await harness.repository.load("demo")
    harness.gate.clear()
    calls = [asyncio.create_task(harness.number("demo/legal"))]
    await asyncio.to_thread(harness.reading.wait, 20)
    unloading = asyncio.create_task(harness.repository.unload("demo/legal"))
    harness.gate.set()
    await unloading
    await asyncio.gather(*calls)
    assert harness.served == ["demo"]


async def test_a_reload_of_the_base_takes_its_adapters_over(harness, caplog):
    legal = harness.add("legal", 3, folder="x")
    for name, number in (("a", 4), ("gone", 5)):
        harness.add(name, number)
    harness.serve(("legal", legal), num_places=3)
    await harness.repository.load("demo")
    for name in ("a", "gone"):
        await harness.number(f"demo/{name}")
    shutil.rmtree(harness.path / "adapters" / "gone")
    async with harness.use("demo/a") as old:
        engine = old.engine
        harness.gate.clear()
        harness.reading.clear()
        loading = asyncio.create_task(harness.repository.load("demo"))
        await asyncio.to_thread(harness.reading.wait, 20)
        async with harness.use("demo/legal") as between, harness.use("demo") as new:
            assert between.engine is engine, "the old one still serves it"
            assert new.engine is not engine
            harness.gate.set()
            await loading
            assert number_of(between) == 3
        assert not engine.is_stopped
        assert harness.served == ["demo", "demo/legal", "demo/a"]
        assert [await harness.number(f"demo/{name}") for name in ("legal", "a")] == [3, 4]
        assert harness.models.get("demo/a").base is harness.models.get("demo")
        assert harness.models.get("demo").engine.num_written == 2
        assert number_of(old) == 4
    await harness.repository.stop()
    assert engine.is_stopped
    assert (
        "model demo/gone: not served any more with version 1 of demo: there is no adapter named"
        in caplog.text
    )


async def test_an_adapter_that_fits_the_new_version_no_more_is_dropped_with_a_line(harness, caplog):
    harness.add("a", 4)
    harness.serve()
    await harness.repository.load("demo")
    await harness.number("demo/a")
    harness.checksums["demo"] = "new"
    await harness.repository.load("demo")
    assert harness.served == ["demo"]
    assert "model demo/a: not served any more with version 1 of demo" in caplog.text
    assert "does not fit the model demo" in caplog.text


async def test_a_call_whose_base_is_replaced_while_its_adapter_is_read_gets_the_new_one(harness):
    harness.add("a", 4)
    harness.serve()
    await harness.repository.load("demo")
    harness.gate.clear()
    call = asyncio.create_task(harness.number("demo/a"))
    await asyncio.to_thread(harness.reading.wait, 20)
    await harness.repository.load("demo")
    harness.gate.set()
    assert await call == 4
    assert harness.models.get("demo/a").base is harness.models.get("demo")


async def test_without_its_base_an_adapter_is_gone(harness):
    harness.add("a", 4)
    harness.serve()
    await harness.repository.load("other")
    await harness.repository.load("demo")
    async with harness.use("demo/a") as old:
        await harness.repository.unload("demo")
        assert harness.served == ["other"]
        with pytest.raises(UnknownModel):
            await harness.number("demo/a")
        engine = old.engine
        for _ in range(10):  # tasks that would stop it
            await asyncio.sleep(0)
        assert not engine.is_stopped
    async with asyncio.timeout(20):
        while not engine.is_stopped:
            await asyncio.sleep(0)
    with pytest.raises(UnknownModel, match="there is no bundle of a model named 'demo/b'"):
        await harness.repository.load("demo/b")
    assert "demo/a" not in await harness.states()
    await harness.repository.load("demo")
    assert await harness.number("demo/a") == 4


async def test_while_the_server_drains_no_adapter_is_loaded(harness):
    harness.add("a", 4)
    harness.add("b", 4)
    harness.serve()
    await harness.repository.load("demo")
    assert await harness.number("demo/a") == 4
    harness.gate.clear()
    call = asyncio.create_task(harness.number("demo/b"))
    await asyncio.to_thread(harness.reading.wait, 20)
    harness.repository.drain()
    await harness.repository.stop()
    harness.gate.set()
    with pytest.raises(Unavailable, match="shutting down"):
        await call
    assert harness.served == ["demo", "demo/a"]


async def test_an_adapter_never_takes_the_name_of_a_model(harness):
    legal = harness.add("legal", 3)
    harness.serve(("demo/legal", legal))
    own = ServedModel(FakeEngine("demo/legal"), echo_bundle(legal, EchoRunner()), echo_sizing(EchoRunner()))
    harness.models.put(own)
    await harness.repository.load("demo")
    with pytest.raises(ValueError, match="a model has the name of the adapter demo/legal: give one of them"):
        harness.repository.check_adapters()
    with pytest.raises(UnknownModel):
        await harness.repository.load("demo/legal")
    async with harness.use("demo/legal") as model:
        assert model is own


@pytest.mark.parametrize("name", ["a" * 5000, "..", ".", "", "\0", "../adapters/legal", "legal/"])
async def test_no_name_leads_out_of_the_folder_or_fails_in_another_way(harness, name):
    harness.add("legal", 3)
    harness.serve()
    await harness.repository.load("demo")
    with pytest.raises(UnknownModel):
        await harness.number(f"demo/{name}")


async def test_the_index_skips_what_is_no_adapter_and_outlives_the_folder(harness):
    harness.add("legal", 3)
    (harness.path / "adapters" / "empty").mkdir()
    (harness.path / "adapters" / "file").touch()
    bad = harness.path / "adapters" / "bad\udc80"
    harness.add("late", 4).rename(bad)
    harness.serve()
    await harness.repository.load("demo")
    states = await harness.states()
    assert list(states) == ["demo/legal"]
    assert states["demo/legal"][1].startswith("not loaded")
    await harness.number("demo/legal")
    shutil.rmtree(harness.path / "adapters")
    assert await harness.states() == {"demo/legal": (VersionState.READY, "")}


async def test_the_series_of_an_adapter_leave_with_it(harness):
    for number, name in enumerate("abc"):
        harness.add(name, number)
    harness.serve(num_places=1)
    await harness.repository.load("demo")
    metrics = harness.metrics
    for name in "abc":
        record = CallRecord(request_id="", caller=Caller(""), method="Generate", code="OK")
        async with harness.models.use(record, f"demo/{name}"):
            pass
        metrics.record_call(record)
        labels = {"model_name": f"demo/{name}"}
        assert sample_value(metrics, "seq2seq_requests_total", labels) == 1
        assert sample_value(metrics, "seq2seq_model_info", labels) == 1
        assert sample_value(metrics, "seq2seq_slots", labels) is None
    names = {
        sample.labels["model_name"]
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if "model_name" in sample.labels
    }
    assert names == {"demo", "demo/c"}
    assert sample_value(metrics, "seq2seq_requests_total", {"model_name": "demo"}) == 2, "no call is lost"
    await harness.repository.unload("demo/c")
    metrics.record_call(record)  # it ends after that
    assert sample_value(metrics, "seq2seq_requests_total", {"model_name": "demo/c"}) is None
    assert sample_value(metrics, "seq2seq_requests_total", {"model_name": "demo"}) == 4


async def test_rights_are_those_of_names_and_load_what_they_name(harness):
    for number, name in enumerate("ab"):
        harness.add(name, number)
    harness.serve()
    await harness.repository.load("demo")
    await harness.repository.load("other")
    one, every, base, none = (
        Caller("token", models=names)
        for names in (("demo/z", "demo/b", "demo/a"), ("demo/*",), ("demo",), ("elsewhere", "elsewhere/x"))
    )
    async with harness.use("", one) as model:  # it was not loaded before; the first of its names is gone
        assert model.name == "demo/b"
    await harness.number("demo/a")
    for caller, allowed in ((one, {"demo/a", "demo/b"}), (every, {"demo/a", "demo/b"}), (base, {"demo"})):
        assert {model.name for model in harness.models.seen_by(caller)} == allowed
        if caller is not every:
            async with harness.use("", caller) as model:
                assert model.name == ("demo/b" if caller is one else "demo")
        for name in ("demo", "demo/a", "demo/b", "other", "other/a", "demo/a/b"):
            if name not in allowed:
                with pytest.raises(Forbidden) as caught:
                    await harness.use(name, caller).__aenter__()
                assert str(caught.value) == f"token token may not use the model '{name}'"
    for caller in (none, every):  # all adapters of a model, in any order, are not a default
        with pytest.raises(Forbidden, match="token token has no default among the served models: name one"):
            await harness.use("", caller).__aenter__()
    with pytest.raises(
        UnknownModel, match=r"no model is named 'demo/x': this server has demo/b, demo/a, and"
    ):
        await harness.use("demo/x", every).__aenter__()
    assert [model.name for model in harness.models.open_to(Caller("", models=("demo/z", "demo/b")))] == [
        "demo/z",
        "demo/b",
    ]
