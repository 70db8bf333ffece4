"""From a bundle's folder to a model that can be served."""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import BundleError, load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.server.check import check
from seq2seq_serve.server.config import ProviderPolicy, QueueLimits, RunnerConfig, ServerConfig
from seq2seq_serve.server.engine.async_engine import CoreHandle
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.engine.result import Result
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.models.process import ProcessCore
from seq2seq_serve.server.models.served import ServedModel
from seq2seq_serve.server.runner import sizing as sizing_module
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up

CONFIG = ServerConfig(
    queue=QueueLimits(max_waiting_requests=2), runner=RunnerConfig(provider="cpu", num_threads=2, max_slots=3)
)


def make_request(number: int) -> Request:
    return Request(str(number), {SOURCE_IDS: np.array([5, 6, 2])}, 3, max_new_tokens=3, arrival=0.0)


def load(path: Path, config: ServerConfig, num_used_bytes: int = 0) -> ServedModel:
    return load_model(path, config, "random", lambda _: None, num_used_bytes)


@asynccontextmanager
async def started(path: Path, config: ServerConfig = CONFIG) -> AsyncIterator[ServedModel]:
    model = load(path, config)
    await model.engine.start()
    try:
        yield model
    finally:
        await model.engine.stop()


def start(path: Path, config: ServerConfig = CONFIG) -> None:
    async def run() -> None:
        async with started(path, config):
            pass

    asyncio.run(run())


async def answers(model: ServedModel, count: int = 1) -> list[Result]:
    with model.engine.submitted([make_request(i) for i in range(count)]) as streams:
        return [await asyncio.wait_for(stream.wait(), 20) for stream in streams]


def test_instances_share_slots_and_threads(bundle_path):
    runner = RunnerConfig(provider="cpu", num_threads=3, max_slots=7, num_instances=2)
    sizing = size_up(load_bundle(bundle_path), runner)
    assert sizing.num_threads == 1
    assert sizing.total_bytes - sizing.weight_bytes > 2 * 50 * 2**20, "each has a process"
    config = ServerConfig(queue=QueueLimits(max_waiting_requests=5), runner=runner)

    async def run() -> list[Result]:
        async with started(bundle_path, config) as model:
            assert [core.num_slots for core in model.engine.cores] == [3, 3]
            assert (model.engine.num_slots, model.sizing.num_slots) == (6, 3)
            found = await answers(model, 5)
        assert [core.process.poll() for core in model.engine.cores] == [0, 0]
        return found

    assert len({result.best.token_ids for result in asyncio.run(run())}) == 1


@pytest.mark.parametrize(
    ("changes", "num_cpus", "num_threads", "has_processes"),
    [
        ({}, 4, 3, True),
        ({"num_threads": 4}, 4, 4, True),
        ({"num_instances": 2}, 4, 2, True),
        ({}, 1, 1, False),
        ({"has_callers": False}, 4, 4, False),
    ],
)
def test_a_small_model_leaves_a_cpu_to_the_callers_of_its_server(
    changes, num_cpus, num_threads, has_processes, bundle_path, monkeypatch
):
    monkeypatch.setattr(sizing_module, "usable_cpus", lambda: num_cpus)
    runner = RunnerConfig(**{"provider": "cpu", "has_callers": True, "max_slots": 8} | changes)
    sizing = size_up(load_bundle(bundle_path), runner)
    assert (sizing.num_threads, sizing.has_processes) == (num_threads, has_processes)
    monkeypatch.setattr(sizing_module, "_SMALL_BYTES", sizing.weight_bytes - 1)
    large = size_up(load_bundle(bundle_path), runner)
    assert large.num_instances * large.num_threads == num_cpus
    assert large.has_processes == (large.num_instances > 1)


def test_a_small_model_stays_in_its_server_where_processes_cannot_share_memory(bundle_path, monkeypatch):
    """Without `memfd_create`, as on macOS, a server with its defaults did not start."""
    monkeypatch.setattr(sizing_module, "usable_cpus", lambda: 4)
    monkeypatch.delattr(os, "memfd_create")
    runner = replace(ServerConfig().runner, provider=ProviderPolicy.CPU)
    sizing = size_up(load_bundle(bundle_path), runner)
    assert (sizing.num_threads, sizing.has_processes) == (4, False)


def test_the_engine_of_a_small_model_has_a_process_of_its_own_in_a_server(bundle_path, monkeypatch):
    monkeypatch.setattr(sizing_module, "usable_cpus", lambda: 2)
    config = replace(CONFIG, runner=replace(ServerConfig().runner, provider=ProviderPolicy.CPU, max_slots=3))

    async def answer(config: ServerConfig) -> tuple[Result, CoreHandle]:
        async with started(bundle_path, config) as model:
            (result,) = await answers(model)
            (core,) = model.engine.cores
        return result, core

    result, core = asyncio.run(answer(config))
    assert isinstance(core, ProcessCore)
    assert core.process.poll() == 0, "it has ended with the engine"
    assert result.best == asyncio.run(answer(CONFIG))[0].best


@pytest.mark.skipif(not kernels.instructions(), reason="without operators, fp32 is always packed twice")
def test_what_is_packed_twice_in_fp32_counts_against_the_largest_size_of_all_models(
    bundle_path, tmp_path, monkeypatch
):
    """The decoder's weights by ONNX Runtime, in a bundle whose maps are not the project's operators."""

    def packed_bytes(path: Path, precision: Precision = Precision.FP32) -> int:
        runner = RunnerConfig(provider="cpu", num_threads=2, precision=precision)
        bundle = load_bundle(path, checks_content=False)
        monkeypatch.setattr(sizing_module, "_MOST_PACKED_BYTES", 1000)
        return size_up(bundle, runner).packed_bytes

    twice = 2 * load_bundle(bundle_path).manifest.variants[Precision.FP32].weights.size_bytes
    assert packed_bytes(bundle_path) == 1000
    assert packed_bytes(bundle_path, Precision.INT8) == 0
    older = tmp_path / "older"
    shutil.copytree(bundle_path, older)
    step = older / "fp32" / "step.onnx"
    step.write_bytes(step.read_bytes().replace(b"Linear", b"linear"))
    assert packed_bytes(older) == twice
    monkeypatch.setattr(sizing_module, "has_operators", lambda: False)
    assert packed_bytes(bundle_path) == twice


def test_each_instance_needs_a_thread(bundle_path):
    runner = RunnerConfig(provider="cpu", num_threads=2, num_instances=3)
    problem = "num_instances is 3, and there are 2 threads: each instance needs its own"
    with pytest.raises(ValueError, match=f"{problem}$"):
        load(bundle_path, ServerConfig(runner=runner))


@pytest.fixture
def without_cuda(bundle_path, monkeypatch):
    """CUDA is preferred, and does not work."""
    chosen = sizing_module.choose(load_bundle(bundle_path), ProviderPolicy.CPU, Precision.INT8)
    remark = logging.WARNING, "no CUDA here"
    monkeypatch.setattr(sizing_module, "choose", lambda *_: (*chosen[:2], (remark,)))


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize(
    "wrong",
    [
        {"num_threads": 2, "num_instances": 3},
        {"max_slots_size_bytes": 1},
        {"max_source_length": 10**6},
        {"draft": Path("no-bundle")},
    ],
    ids=lambda wrong: next(reversed(wrong)),
)
def test_a_model_that_does_not_fit_is_refused_with_the_reason_why_cuda_is_not_used(bundle_path, wrong):
    """Only the error about instances had it."""
    with pytest.raises(ValueError, match=r" \(no CUDA here\)$"):
        size_up(load_bundle(bundle_path), RunnerConfig(**wrong))


@pytest.mark.usefixtures("without_cuda")
def test_why_cuda_is_not_used_is_logged_before_the_largest_size_of_all_models_refuses(bundle_path, caplog):
    config = replace(CONFIG, max_models_size_bytes=1)
    with pytest.raises(ValueError, match="MiB: raise --max-models-size"):
        load(bundle_path, config)
    with pytest.raises(ValueError, match="MiB: raise --max-models-size"):
        list(check([bundle_path], config))
    assert caplog.messages == ["no CUDA here"] * 2


def test_a_model_without_room_beside_the_others_is_refused_with_both_numbers(bundle_path):
    bundle = load_bundle(bundle_path)
    num_bytes = size_up(bundle, CONFIG.runner).total_bytes
    assert num_bytes > bundle.manifest.variants["int8"].weights.size_bytes
    config = replace(CONFIG, max_models_size_bytes=num_bytes + 1000)
    load(bundle_path, config, 1000)
    size = f"{num_bytes / 2**20:.1f} MiB"
    message = f"takes {size} beside the 0.0 MiB of loaded models, and together they may take {size}: raise"
    with pytest.raises(ValueError, match=message):
        load(bundle_path, config, 1001)


def test_graphs_that_do_not_run_are_one_clear_error(bundle_path, monkeypatch):
    def fail(runner):
        raise RuntimeError("no kernel for this node")

    monkeypatch.setattr(OnnxRunner, "warm_up", fail)
    with pytest.raises(ValueError, match="the graphs do not run here: no kernel for this node"):
        start(bundle_path)


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


CHANGES = pytest.mark.parametrize("change", [overwrite, truncate, rename, Path.unlink])


@CHANGES
def test_no_change_of_its_files_reaches_a_served_bundle(bundle_path, tmp_path, change):
    """Weights were mapped: a truncated file killed the server, an overwritten one changed its answers."""
    path = Path(shutil.copytree(bundle_path, tmp_path / "served"))

    async def run() -> list[Result]:
        async with started(path) as model:
            # before any file is touched: a mapping of one that shrinks would end this process
            assert str(path) not in Path("/proc/self/maps").read_text()
            before = await answers(model)
            for file in [file for file in path.rglob("*") if file.is_file()]:
                change(file)
            return before + await answers(model)

    before, after = asyncio.run(run())
    assert after.best == before.best


@CHANGES
@pytest.mark.parametrize("file", ["weights.bin", "encode.onnx", "step.onnx", "decode.onnx"])
def test_a_file_that_changes_between_check_and_load_is_refused(bundle_path, tmp_path, file, change):
    bundle = load_bundle(Path(shutil.copytree(bundle_path, tmp_path / "changing")))
    change(bundle.path / "int8" / file)
    with pytest.raises(BundleError, match=rf"int8/{file} (was changed|has 0 bytes|is missing)"):
        OnnxRunner(bundle, CONFIG.runner)


async def test_a_core_uses_the_weights_where_they_were_read(bundle_path):
    async with started(bundle_path) as model:
        runner = model.engine.cores[0]._core._runner
        values = [value for session in runner._sessions.values() for value in session.weights]
        content = np.frombuffer(runner._files.weights, np.uint8)
        begin = content.ctypes.data
        assert values
        assert all(begin <= value.data_ptr() < begin + len(content) for value in values)
        if kernels.instructions():  # each int8 map lies there as it is multiplied
            maps = [value for value in values if value.element_type() == TensorProto.UINT8]
            assert {len(value.shape()) for value in maps} == {5}


def test_only_the_files_of_the_precision_that_runs_are_read(bundle_path, tmp_path):
    """All were hashed, and those that run twice."""
    path = Path(shutil.copytree(bundle_path, tmp_path / "damaged"))

    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    damage(path / "fp32" / "weights.bin")
    assert load(path, CONFIG).sizing.precision == "int8"
    with pytest.raises(ValueError, match=r"fp32/weights\.bin was changed"):
        list(check([path], CONFIG))
    damage(path / "int8" / "weights.bin")
    with pytest.raises(BundleError, match=rf"^{re.escape(str(path))} is not a .*int8/weights\.bin was"):
        load(path, CONFIG)


def test_a_column_that_the_server_does_not_fill_is_named(bundle_path, tmp_path):
    """It was a KeyError while buffers were allocated, and `--check` did not find it."""
    path = Path(shutil.copytree(bundle_path, tmp_path / "newer"))
    manifest = json.loads((path / "manifest.json").read_text())
    for variant in manifest["variants"].values():
        column = {"name": "temperatures", "dtype": "float32", "axes": ["batch"], "role": "token"}
        variant["graphs"]["step"]["inputs"].append(column)
    raw = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(raw)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(raw).hexdigest()}  manifest.json\n")
    message = (
        f"{path}: the step of int8 reads the column 'temperatures', and this server fills only token_ids, "
        "cache_lengths"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path, CONFIG)
    with pytest.raises(ValueError, match=re.escape(message)):
        list(check([path], CONFIG))
