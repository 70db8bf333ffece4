"""From a bundle's folder to a model that can be served."""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import BundleError, load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.server.check import check
from seq2seq_serve.server.config import QueueLimits, RunnerConfig, ServerConfig
from seq2seq_serve.server.deliveries import Deliveries
from seq2seq_serve.server.engine.engine import Engine
from seq2seq_serve.server.engine.records import FinishReason, Request, Result
from seq2seq_serve.server.metrics import Metrics
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import size_up
from tests.server.service.harness import EchoRunner
from tests.server.test_deliveries import model_of

CONFIG = ServerConfig(
    queue=QueueLimits(max_waiting_requests=2), runner=RunnerConfig(provider="cpu", num_threads=2, max_slots=3)
)


def make_request(number: int) -> Request:
    return Request(str(number), {SOURCE_IDS: np.array([5, 6, 2])}, 3, max_new_tokens=3, arrival=0.0)


@pytest.fixture
def deliveries():
    loop = asyncio.new_event_loop()
    yield Deliveries("random", loop, Metrics())
    loop.close()


def test_a_model_knows_what_its_bundle_says(bundle_path, deliveries):
    model, bundle = load_model(bundle_path, CONFIG, deliveries), load_bundle(bundle_path)
    assert (model.name, model.version, model.kind) == ("random", bundle.version, "transformer")
    assert (model.precision, model.provider) == ("int8", "cpu")
    assert (model.vocab_size, model.eos_id) == (300, 2)
    assert model.num_slots == 3
    assert (model.max_source_length, model.max_target_length) == (48, 48)
    assert model.cache_bytes == 3 * 4 * 2 * 2 * 32 * (48 + 48)
    assert model.provenance == bundle.manifest.provenance
    text = "오늘은 금요일입니다"
    assert model.source_tokenizer.encode_source(text) == bundle.source_tokenizer.encode_source(text)


def test_its_engine_is_started_warm_and_has_the_limits_of_the_configuration(bundle_path, deliveries):
    (engine,) = load_model(bundle_path, CONFIG, deliveries).engines
    assert engine._thread.is_alive()
    assert [*dict.fromkeys(num_rows for num_rows, *_ in engine._runner._bindings)] == [3, 2, 1]
    assert engine._scheduler._queue._limits == CONFIG.queue
    engine.stop()
    assert not engine._thread.is_alive()


def test_instances_share_slots_and_threads(bundle_path):
    runner = RunnerConfig(provider="cpu", num_threads=3, max_slots=7, num_instances=2)
    sizing = size_up(load_bundle(bundle_path), runner)
    assert sizing.num_threads == 1
    assert sizing.total_bytes - sizing.weight_bytes > 2 * 50 * 2**20, "each has a process"
    config = ServerConfig(queue=QueueLimits(max_waiting_requests=5), runner=runner)

    async def answers() -> list[Result]:
        deliveries = Deliveries("random", asyncio.get_running_loop(), Metrics())
        deliveries._metrics.show_model(
            model := await asyncio.to_thread(load_model, bundle_path, config, deliveries)
        )
        assert [engine.num_slots for engine in model.engines] == [3, 3]
        assert (model.num_slots, model.max_request_slots) == (6, 3)
        with ExitStack() as stack:
            requests = [make_request(i) for i in range(5)]
            mailboxes = stack.enter_context(model.submitted(requests, lambda: False))
            results = [await asyncio.wait_for(box.wait_for_result(), 20) for box in mailboxes]
        await asyncio.to_thread(model.stop)
        assert [engine._process.poll() for engine in model.engines] == [0, 0]
        return results

    results = asyncio.run(answers())
    assert len({result.best.token_ids for result in results}) == 1


def test_requests_go_to_the_sound_engine_with_the_least_to_do(deliveries):
    """An engine whose steps fail seemed to have the least to do, and took them all."""
    engines = tuple(Engine(EchoRunner(), model_name="echo", deliver=deliveries.deliver) for _ in range(3))
    model = model_of(engines, deliveries)
    taken: list[int] = []
    for place, engine in enumerate(model.engines):
        engine._scheduler._queue.num_slots_wanted = (2, 1, 3)[place]
        engine.submit = lambda *requests, place=place: taken.extend(place for _ in requests)
        engine.cancel = lambda request, is_expired: None
    with model.submitted([make_request(i) for i in range(5)], lambda: False):
        assert sorted(taken) == [0, 0, 1, 1, 1]
    model.engines[1].is_healthy = False
    model.engines[1]._last_turn_at = model.engines[1]._clock()
    for expected in (0, 1):  # the latter where all fail
        taken.clear()
        with model.submitted([make_request(0)], lambda: False):
            assert taken == [expected]
        for engine in model.engines:
            engine.is_healthy = False
    for engine in model.engines:
        engine.is_healthy = engine is not model.engines[1]
    model.engines[1]._last_turn_at -= 11
    with model.submitted([make_request(0)], lambda: False):
        assert taken == [1, 1], "only a step that succeeds shows that it is healthy again"


def test_each_instance_needs_a_thread(bundle_path, deliveries):
    runner = RunnerConfig(provider="cpu", num_threads=2, num_instances=3)
    with pytest.raises(ValueError, match="num_instances is 3, and there are 2 threads"):
        load_model(bundle_path, ServerConfig(runner=runner), deliveries)


def test_instances_complain_once(bundle_path, deliveries, caplog):
    runner = RunnerConfig(num_threads=2, num_instances=2)
    with caplog.at_level(logging.INFO, "seq2seq_serve.server.runner.device"):
        load_model(bundle_path, ServerConfig(runner=runner), deliveries).stop()
    if "onnxruntime has no" not in caplog.text and not caplog.messages:
        pytest.skip("CUDA works here")
    assert sum("though CUDA is preferred" in message for message in caplog.messages) == 1


def test_what_has_no_room_beside_the_others_is_refused_with_both_numbers(bundle_path, deliveries):
    bundle = load_bundle(bundle_path)
    num_bytes = size_up(bundle, CONFIG.runner).total_bytes
    assert num_bytes > bundle.manifest.variants["int8"].weights.size_bytes
    config = replace(CONFIG, memory_limit_bytes=num_bytes + 1000)
    load_model(bundle_path, config, deliveries, 1000).stop()
    with pytest.raises(ValueError, match=f"takes {num_bytes} bytes beside the 1001 of loaded models"):
        load_model(bundle_path, config, deliveries, 1001)


def test_graphs_that_do_not_run_are_one_clear_error(bundle_path, deliveries, monkeypatch):
    def fail(runner):
        raise RuntimeError("no kernel for this node")

    monkeypatch.setattr(OnnxRunner, "warm_up", fail)
    with pytest.raises(ValueError, match="the graphs do not run here: no kernel for this node"):
        load_model(bundle_path, CONFIG, deliveries)


def test_buffers_that_do_not_fit_are_one_clear_error(bundle_path, deliveries):
    runner = RunnerConfig(max_slots=10**9, memory_budget_bytes=2**60)
    config = ServerConfig(runner=runner, memory_limit_bytes=2**60)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(bundle_path))}: Unable to allocate"):
        load_model(bundle_path, config, deliveries)


def test_a_started_engine_delivers_to_who_submitted(bundle_path):
    async def answer() -> Result:
        metrics = Metrics()
        deliveries = Deliveries("random", asyncio.get_running_loop(), metrics)
        model = await asyncio.to_thread(load_model, bundle_path, CONFIG, deliveries)
        metrics.show_model(model)
        try:
            with model.submitted([make_request(0)], lambda: False) as (mailbox,):
                return await asyncio.wait_for(mailbox.wait_for_result(), 20)
        finally:
            await asyncio.to_thread(model.stop)

    result = asyncio.run(answer())
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.best.token_ids) == 3


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

    async def answers() -> tuple[Result, Result]:
        metrics = Metrics()
        deliveries = Deliveries("random", asyncio.get_running_loop(), metrics)
        model = await asyncio.to_thread(load_model, path, CONFIG, deliveries)
        metrics.show_model(model)
        # before any file is touched: a mapping of one that shrinks would end this process
        assert str(path) not in Path("/proc/self/maps").read_text()

        async def answer() -> Result:
            with model.submitted([make_request(0)], lambda: False) as (mailbox,):
                return await asyncio.wait_for(mailbox.wait_for_result(), 20)

        try:
            before = await answer()
            for file in [file for file in path.rglob("*") if file.is_file()]:
                change(file)
            return before, await answer()
        finally:
            await asyncio.to_thread(model.stop)

    before, after = asyncio.run(answers())
    assert after.best == before.best


@CHANGES
@pytest.mark.parametrize("file", ["weights.bin", "encode.onnx", "step.onnx", "decode.onnx"])
def test_a_file_that_changes_between_check_and_load_is_refused(bundle_path, tmp_path, file, change):
    bundle = load_bundle(Path(shutil.copytree(bundle_path, tmp_path / "changing")))
    change(bundle.path / "int8" / file)
    with pytest.raises(BundleError, match=rf"int8/{file} (was changed|has 0 bytes|is missing)"):
        OnnxRunner(bundle, CONFIG.runner)


@CHANGES
def test_what_was_read_is_what_runs(bundle_path, tmp_path, change):
    bundle = load_bundle(Path(shutil.copytree(bundle_path, tmp_path / "changing")))
    files = bundle.read_variant(Precision.INT8)
    for file in [file for file in bundle.path.rglob("*") if file.is_file()]:
        change(file)
    OnnxRunner(bundle, CONFIG.runner, None, files).warm_up()


def test_an_engine_uses_the_weights_where_they_were_read(bundle_path, deliveries):
    model = load_model(bundle_path, CONFIG, deliveries)
    runner = model.engines[0]._runner
    values = [value for session in runner._sessions.values() for value in session.weights]
    content = np.frombuffer(runner._files.weights, np.uint8)
    start = content.ctypes.data
    assert values
    assert all(start <= value.data_ptr() < start + len(content) for value in values)
    del values
    model.stop()


def test_a_damaged_bundle_is_named(bundle_path, tmp_path, deliveries):
    path = shutil.copytree(bundle_path, tmp_path / "damaged")
    (path / "int8" / "step.onnx").unlink()
    (path / "fp32" / "weights.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a usable bundle:")) as caught:
        load_model(path, CONFIG, deliveries)
    assert "int8/step.onnx is missing" in str(caught.value)
    assert "fp32/weights.bin has 0 bytes" in str(caught.value)


def test_a_bundle_that_does_not_fit_this_server_is_named(bundle_path, deliveries):
    config = ServerConfig(runner=RunnerConfig(provider="cpu", memory_budget_bytes=10))
    with pytest.raises(ValueError, match=re.escape(f"{bundle_path}: a slot takes ")):
        load_model(bundle_path, config, deliveries)


def test_a_column_that_the_server_does_not_fill_is_named(bundle_path, tmp_path, deliveries):
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
        load_model(path, CONFIG, deliveries)
    with pytest.raises(ValueError, match=re.escape(message)):
        list(check([path], CONFIG))


@pytest.mark.parametrize(
    ("has_operators", "remark"), [(True, "avx512vnni"), (False, "without the compiled operators")]
)
def test_one_line_of_the_log_says_what_was_loaded(
    has_operators, remark, bundle_path, deliveries, caplog, monkeypatch
):
    monkeypatch.setattr(kernels, "register", lambda _, **__: has_operators)
    monkeypatch.setattr(kernels, "instructions", lambda: "avx512vnni")
    with caplog.at_level(logging.INFO, "seq2seq_serve.server.models.loading"):
        load_model(bundle_path, CONFIG, deliveries)
    assert caplog.messages == [f"model random: int8 on cpu ({remark}), 3 slots, 2 threads"]
    [line] = check([bundle_path], CONFIG)
    assert f"int8 on cpu ({remark}), 3 slots" in line


def test_cuda_that_is_required_and_not_there_is_one_clear_error(bundle_path, deliveries):
    config = ServerConfig(runner=RunnerConfig(provider="require"))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(bundle_path))}: CUDA is required: "):
        load_model(bundle_path, config, deliveries)
