import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from grpc import aio

from seq2seq_serve.client import AsyncClient, ClientError
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateRequest, Source
from seq2seq_serve.server.app import App
from seq2seq_serve.server.models.folders import ModelFolders
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.system.trimming import Trimmer
from tests.models import adapter_folder, random_adapter
from tests.server.service.harness import (
    EchoRunner,
    Turns,
    fetch,
    loader_of,
    local_config,
    serving,
    serving_bundles,
)

REQUEST = GenerateRequest(sources=[Source(text="abc")])


async def test_drain_finishes_what_was_accepted_and_refuses_the_rest():
    async with serving() as served, AsyncClient(served.address) as client:
        served.runner.gate.clear()
        accepted = asyncio.ensure_future(client.generate("abc"))
        await asyncio.to_thread(served.runner.stepping.wait, 20)
        draining = asyncio.ensure_future(served.app.drain())
        while await client.health() == "SERVING":
            pass
        assert await served.http("/readyz") == (503, "draining\n")
        assert await served.http("/healthz") == (200, "ok\n")
        with pytest.raises(ClientError, match="UNAVAILABLE: model echo is shutting down"):
            await client.generate("abc")
        with pytest.raises(aio.AioRpcError, match="model echo is shutting down"):
            await served.stub.Generate(REQUEST)
        assert not draining.done()
        served.runner.gate.set()
        assert (await accepted).hypotheses[0].text == "abc"
        await draining


async def test_after_notice_is_given_newcomers_are_still_answered_for_a_while():
    async with serving() as served, AsyncClient(served.address) as client:
        draining = asyncio.ensure_future(served.app.drain(notice_seconds=3600.0))
        while await client.health() == "SERVING":
            pass
        assert await served.http("/readyz") == (503, "draining\n")
        assert (await served.stub.Generate(REQUEST)).hypotheses[0].text == "abc"
        assert not draining.done()
        draining.cancel()


async def test_calls_unfinished_when_the_drain_ends_get_unavailable(caplog):
    async with serving(drain_seconds=0.0) as served, AsyncClient(served.address) as client:
        served.runner.gate.clear()
        call = asyncio.ensure_future(client.generate("abc"))
        await asyncio.to_thread(served.runner.stepping.wait, 20)
        await served.app.drain()
        thread = served.model.engine.cores[0]._core._thread
        join = thread.join

        def let_the_step_end_and_join(timeout):
            served.runner.gate.set()
            join(timeout)

        thread.join = let_the_step_end_and_join  # by then the core has been told to stop
        await served.model.engine.stop()
        with pytest.raises(ClientError, match="UNAVAILABLE"):
            await call
    assert "1 calls were not finished within 0 seconds" in caplog.text


async def test_while_models_load_calls_are_refused_and_probes_answer():
    turns, runners = Turns(), {"echo": EchoRunner()}
    loading, go_on = asyncio.Event(), asyncio.Event()
    load = loader_of(runners, turns, 1)

    def slow_loader(*arguments):
        async def wait():
            loading.set()
            await go_on.wait()

        asyncio.run_coroutine_threadsafe(wait(), turns.loop).result(20)
        return load(*arguments)

    app = App([Path("echo")], local_config(), slow_loader)
    starting = asyncio.create_task(app.start())
    await loading.wait()
    async with AsyncClient(f"127.0.0.1:{app.endpoint.port}") as client:
        with pytest.raises(ClientError, match="UNAVAILABLE: no model is served: the server is loading"):
            await client.generate("abc")
        assert await client.health() == "NOT_SERVING"
        assert await asyncio.to_thread(fetch, app.http.port, "/readyz") == (503, "loading\n")
        assert await asyncio.to_thread(fetch, app.http.port, "/healthz") == (200, "ok\n")
        go_on.set()
        await starting
        assert await client.translate("abc") == "abc"
    await app.stop()


async def test_a_model_of_the_repository_that_cannot_be_served_leaves_the_others_alone(tmp_path, caplog):
    """One damaged copy, and no model was served after the next start."""
    for name in ("bad", "echo"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "manifest.json").touch()
    turns = Turns()
    load = loader_of({"echo": EchoRunner()}, turns, 1)

    def loader(path, *given):
        if path.parent.name == "bad":
            raise ValueError("it is damaged")
        return load(path, *given)

    app = App([], replace(local_config(), repository=tmp_path), loader)
    await app.start()
    assert [model.name for model in app.models] == ["echo"]
    await app.stop()
    (tmp_path / "echo" / "1" / "manifest.json").unlink()
    caplog.clear()
    for bundles, repository, message in (
        ([], tmp_path, f"no model of the repository {tmp_path} can be served"),
        ([tmp_path / "bad"], None, "it is damaged"),
    ):
        app = App(bundles, replace(local_config(), repository=repository), loader)
        with pytest.raises(ValueError, match=message):
            await app.start()
        await app.stop()
    assert caplog.text.count("model bad: not served: it is damaged") == 1


async def test_an_adapter_that_does_not_fit_ends_the_start_with_one_line(adapted_bundle, tmp_path):
    weights = random_adapter(adapted_bundle, 1)
    adapter = adapter_folder(tmp_path / "legal", "another model's", weights)
    server = serving_bundles(adapted_bundle.path, named_adapters=(("legal", adapter),))
    with pytest.raises(
        ValueError, match=r"^the adapter legal: .*legal does not fit the model b: it is for"
    ) as caught:
        await server.__aenter__()
    assert "\n" not in str(caught.value)


def test_two_names_that_are_equal_are_refused():
    named = (("a", Path("x")), ("a", Path("y")))
    with pytest.raises(ValueError, match="two bundles have the same name"):
        App([], local_config(named_bundles=named), loader=load_model)


async def test_memory_is_given_back_beside_the_event_loop(monkeypatch):
    """A large heap kept the loop from all calls while it was trimmed."""
    threads = []
    monkeypatch.setattr(Trimmer, "look", lambda self: True)
    monkeypatch.setattr(Trimmer, "trim", lambda self: threads.append(threading.get_ident()))
    async with serving() as served:
        stopping = asyncio.Event()
        running = asyncio.ensure_future(served.app.run_until(stopping))
        while not threads:
            await asyncio.sleep(0)
        stopping.set()
        await running
    assert threading.get_ident() not in threads


def test_garbage_that_became_old_is_collected_now_and_then(monkeypatch):
    class Cycle:
        def __init__(self):
            self.itself = self

    monkeypatch.setattr("seq2seq_serve.server.app._REFRESH_SECONDS", 0.001)
    monkeypatch.setattr("seq2seq_serve.server.system.trimming._COLLECT_SECONDS", 0.0)
    cycle = Cycle()
    gone = threading.Event()
    weakref.finalize(cycle, gone.set)
    del cycle

    async def run():
        async with serving() as served:
            stopping = asyncio.Event()
            running = asyncio.ensure_future(served.app.run_until(stopping))
            assert await asyncio.to_thread(gone.wait, 20)
            stopping.set()
            await running

    thresholds = gc.get_threshold()
    gc.set_threshold(10**9)  # by itself Python would collect nothing
    try:
        asyncio.run(run())
    finally:
        gc.set_threshold(*thresholds)


def test_settings_of_a_model_that_cannot_come_are_refused(tmp_path):
    config = local_config()
    with pytest.raises(ValueError, match="settings for a model 'demo', and only bundles of echo"):
        App([Path("echo")], replace(config, models={"demo": config}), None)
    ModelFolders([Path("echo")], tmp_path).check_names(["demo"])  # a repository's models may come later
