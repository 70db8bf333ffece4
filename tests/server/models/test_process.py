"""Cores in processes of their own, behind a real server."""

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from benchmarks.serving import RunningServer, serving
from seq2seq_serve.protos import open_inference_pb2, open_inference_pb2_grpc
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.config import QueueLimits, RunnerConfig, ServerConfig
from seq2seq_serve.server.models.loading import load_model
from seq2seq_serve.server.models.process import ProcessCore, _Cancel
from tests.models import adapter_folder, random_adapter
from tests.server.service.harness import Served, on_a_thread, serving_bundles

TEXTS = ["오늘은 금요일입니다", "나는 학생이다", "비가 온다", "드디어 금요일이다"]
RUNNER = RunnerConfig(provider="cpu", num_threads=2, num_instances=2, max_slots=8)
QUEUE = QueueLimits(max_waiting_requests=40)


def instances_of(served: Served) -> list[ProcessCore]:
    return list(served.model.engine.cores)


@contextmanager
def stub_of(address: str) -> Iterator[Seq2SeqStub]:
    with grpc.insecure_channel(address, options=[("grpc.enable_retries", 0)]) as channel:
        yield Seq2SeqStub(channel)


def request_of(*texts: str, **options) -> pb.GenerateRequest:
    sources = [pb.Source(text=text) for text in texts]
    return pb.GenerateRequest(sources=sources, options=pb.GenerateOptions(**options))


@contextmanager
def held(instances: list[ProcessCore]) -> Iterator[None]:
    """While this is open, the processes do not run."""
    for instance in instances:
        os.kill(instance.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for instance in instances:
            os.kill(instance.process.pid, signal.SIGCONT)


def wait_until_gone(process_id: int) -> None:
    """Wait for a process that is not a child of this one; returns at once if it has ended."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 20)[0], f"process {process_id} lives on"
    finally:
        os.close(descriptor)


def children_of(process_id: int) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(process_id)], capture_output=True, text=True, check=False)
    return [int(line) for line in listed.stdout.split()]


def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that another process changes, for at most 20 seconds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end


def wait_until_idle(served: Served) -> None:
    until(lambda: not any(served.metric(f"seq2seq_{name}", model_name="random") for name in GAUGES))


def num_waiting(served: Served) -> float:
    return served.metric("seq2seq_num_requests_waiting", model_name="random")


GAUGES = ("num_requests_running", "num_requests_waiting", "slots_in_use", "kv_cache_usage_ratio")


@pytest.fixture(scope="module")
def servers(bundle_path) -> Iterator[tuple[Served, Served]]:
    """A server with one engine, in its own process, and a server with two instances."""
    one = RunnerConfig(provider="cpu", num_threads=1)
    with (
        on_a_thread(serving_bundles(bundle_path, runner=one)) as single,
        on_a_thread(serving_bundles(bundle_path, runner=RUNNER, queue=QUEUE)) as double,
    ):
        yield single, double


@pytest.fixture
def double(servers) -> Iterator[Served]:
    yield servers[1]
    wait_until_idle(servers[1])
    for instance in instances_of(servers[1]):
        assert not instance.requests
        assert not instance._by_number
        assert instance.num_slots_wanted == 0
        assert instance.silent_seconds() == 0.0


def test_one_instance_without_callers_stays_in_its_process_and_several_have_a_process_each(servers):
    single, double = servers
    assert not isinstance(single.model.engine.cores[0], ProcessCore)
    assert len({os.getpid(), *(instance.process.pid for instance in instances_of(double))}) == 3
    assert (double.model.engine.num_slots, double.model.sizing.num_slots) == (8, 4)
    assert double.model.sizing.sizes == single.model.sizing.sizes


OPTIONS = {
    "greedy": {},
    "details": {"log_probabilities": True, "num_alternatives": 3, "word_alignment": True, "attention": True},
    "beam": {"beam_size": 3, "num_hypotheses": 2, "attention": True},
    "sampling": {"temperature": 1.0, "top_k": 20, "seed": 7, "num_hypotheses": 2},
    "terms": {"terms": [{"source": text[:2], "target": "aw e"} for text in TEXTS], "beam_size": 3},
    "constraints": {"min_new_tokens": 4, "no_repeat_ngram_size": 2, "logit_bias": {7: 1.5}},
}


def plain(answer: pb.GenerateResponse | pb.ScoreResponse) -> str:
    """The answer without its id, its times, and the drafts, which depend on times."""
    return re.sub(r"\s*(request_id|\w+_seconds|draft_tokens|accepted_tokens): .*", "", str(answer))


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_those_of_one_engine(servers, double, name):
    requests = [request_of(text, **OPTIONS[name]) for text in TEXTS]
    answers = []
    for served in servers:
        with stub_of(served.address) as stub:
            whole = [stub.Generate.future(request) for request in requests]
            streams = [stub.GenerateStream(request) for request in requests]
            pieces = [[plain(piece) for piece in stream] for stream in streams]
            answers.append(([plain(call.result()) for call in whole], [lines[-1] for lines in pieces]))
            assert any(len(lines) > 2 for lines in pieces)
    assert answers[0] == answers[1]


def test_stop_sequences_and_scores_are_those_of_one_engine(servers, double):
    with stub_of(double.address) as stub:
        text = stub.Generate(request_of(TEXTS[0])).hypotheses[0].text
    stop = text[len(text) // 2 :][:3]
    score = pb.ScoreRequest(sources=[pb.Source(text=TEXTS[0])], target=pb.Target(text=TEXTS[1]))
    answers = []
    for served in servers:
        with stub_of(served.address) as stub:
            stopped = stub.Generate(request_of(TEXTS[0], stop_sequences=[stop]))
            assert stop not in stopped.hypotheses[0].text
            assert len(stopped.hypotheses[0].text) < len(text)
            answers.append((plain(stopped), plain(stub.Score(score))))
    assert answers[0] == answers[1]


def test_stopped_processes_block_no_caller_respect_the_queues_bound_and_lose_no_request(double, monkeypatch):
    """A stopped instance accepted 20,000 requests at a limit of 1,024."""
    for instance in instances_of(double):
        monkeypatch.setattr(instance, "is_hung", lambda: False)
    with stub_of(double.address) as stub:
        with held(instances_of(double)):
            calls = [stub.Generate.future(request_of(text)) for text in TEXTS * 50]
            until(lambda: sum(call.done() for call in calls) + num_waiting(double) == len(calls))
            refused = [call for call in calls if call.done()]
            num_accepted_ahead = len(calls) - len(refused) - double.model.engine.num_slots
            assert 0.8 * QUEUE.max_waiting_requests < num_accepted_ahead <= QUEUE.max_waiting_requests
            assert {call.code() for call in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert "grpc-retry-pushback-ms" in dict(refused[0].trailing_metadata())
            accepted = [call for call in calls if not call.done()]
            for call in accepted[-10:]:
                call.cancel()
            until(lambda: num_waiting(double) < len(accepted))
            expiring = stub.Generate.future(request_of(TEXTS[0]), timeout=0.2)
            late = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED  # by the estimate
            assert expiring.code() in late
            with grpc.insecure_channel(double.address) as channel:
                live = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive
                assert live(open_inference_pb2.ServerLiveRequest()).live
        assert all(call.code() is grpc.StatusCode.OK for call in accepted[:-10])
        wait_until_idle(double)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_core_that_is_killed_or_stopped_loses_its_own_requests_and_is_restarted(
    number, bundle_path, caplog
):
    with (
        on_a_thread(serving_bundles(bundle_path, runner=RUNNER)) as served,
        stub_of(served.address) as stub,
    ):
        victim, other = instances_of(served)
        process_id = victim.process.pid
        with held([victim]):
            with held([other]):
                calls = [stub.Generate.future(request_of(text)) for text in TEXTS * 50]
                until(lambda: len(victim.requests) == 5)  # four slots, and one ahead
            if number is signal.SIGKILL:
                os.kill(process_id, number)
            codes = [call.code() for call in calls]
            until(lambda: victim.is_ready and victim.process.pid != process_id)
        assert codes.count(grpc.StatusCode.UNAVAILABLE) == 5
        assert codes.count(grpc.StatusCode.OK) == len(calls) - 5
        assert asyncio.run(served.http("/readyz")) == (200, "ok\n")
        before = victim.last_turn_at
        calls = [stub.Generate.future(request_of(text)) for text in TEXTS * 5]
        assert all(call.result().hypotheses for call in calls)
        assert victim.last_turn_at > before, "the new one decodes"
        aborted = {"model_name": "random", "finished_reason": "abort"}
        assert served.metric("seq2seq_request_success_total", **aborted) == 5
    cause = "the process of an instance was killed by SIGKILL"
    if number is signal.SIGSTOP:  # by the server itself
        cause = "the server ended an instance that did not show life for 6 seconds"
    assert f"model random: {cause}; its 5 requests end, and it is restarted" in caplog.text


@pytest.mark.parametrize("refuses_items", [False, True])
def test_a_core_that_is_killed_ends_its_own_items_of_a_batch_only(refuses_items, double):
    """Without `refuses_items`, the whole call ended, with the items that waited."""
    victim, other = instances_of(double)
    process_id = victim.process.pid
    items = [pb.BatchItem(sources=[pb.Source(text=text)]) for text in TEXTS * 5]
    with stub_of(double.address) as stub:
        with held([victim]):
            with held([other]):
                call = stub.GenerateBatch(pb.GenerateBatchRequest(items=items, refuses_items=refuses_items))
                until(lambda: len(victim.requests) == 5)
            os.kill(process_id, signal.SIGKILL)
            until(lambda: victim.is_ready and victim.process.pid != process_id)
        found = list(call)
    assert sorted(answer.index for answer in found) == list(range(len(items)))
    failed = [answer.error for answer in found if answer.HasField("error")]
    assert [error.code for error in failed] == ["UNAVAILABLE"] * 5
    assert all("the engine of model random ended" in error.message for error in failed)


def test_nothing_is_written_to_a_process_that_has_ended(double, caplog):
    """Each request after the first that found the socket closed was a warning of asyncio in the log."""
    victim, _ = instances_of(double)

    def end_and_send() -> None:
        victim.process.kill()
        victim.process.wait()
        for _ in range(20):
            victim._send(_Cancel(0, False))

    with stub_of(double.address) as stub:
        before = victim.process.pid
        victim._listening.get_loop().call_soon_threadsafe(end_and_send)
        until(lambda: victim.is_ready and victim.process.pid != before)
        assert stub.Generate(request_of(TEXTS[0])).hypotheses
    assert "socket.send() raised exception" not in caplog.text


def test_a_process_whose_turns_cannot_be_read_is_replaced(double, monkeypatch, caplog):
    """Nobody listened any more: its requests had no answer, and it was not started again."""
    with stub_of(double.address) as stub:
        processes = [each.process.pid for each in instances_of(double)]
        monkeypatch.setattr(ProcessCore, "_with_request", lambda *_: 1 / 0)
        assert stub.Generate.future(request_of(TEXTS[0])).code() is grpc.StatusCode.UNAVAILABLE
        monkeypatch.undo()
        until(lambda: all(each.is_ready for each in instances_of(double)))
        assert [each.process.pid for each in instances_of(double)] != processes
        assert stub.Generate(request_of(TEXTS[0])).hypotheses
    assert "the turns of an instance cannot be read" in caplog.text
    assert "the server ended an instance whose turns could not be read; its 1 requests end" in caplog.text


def test_the_weights_are_in_memory_once(double):
    mapped = {
        line.split()[4]
        for instance in instances_of(double)
        for line in Path(f"/proc/{instance.process.pid}/maps").read_text().splitlines()
        if "memfd:weights" in line
    }
    assert len(mapped) == 1, "one inode"


@contextmanager
def running_server(bundle_path: Path, log: Path) -> Iterator[RunningServer]:
    flags = ["--provider", "cpu", "--threads", "2", "--instances", "2", "--notice-seconds", "0"]
    flags += ["--log-level", "info"]
    with log.open("w") as stderr, serving(bundle_path, flags, stderr=stderr) as server:
        yield server


def test_requests_that_were_accepted_finish_when_all_processes_get_the_signal(bundle_path, tmp_path):
    """Ctrl-C goes to all processes of a terminal, and systemd sends SIGTERM to all of a service."""
    with running_server(bundle_path, tmp_path / "log") as server, stub_of(server.address) as stub:
        instances = children_of(server.process.pid)
        assert len(instances) == 2
        for instance in instances:
            os.kill(instance, signal.SIGSTOP)
        calls = [stub.Generate.future(request_of(text)) for text in TEXTS]
        until(lambda: waiting(server) == len(TEXTS))
        for number in (signal.SIGTERM, signal.SIGINT):
            for instance in instances:
                os.kill(instance, number)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in (tmp_path / "log").read_text())
        for instance in instances:
            os.kill(instance, signal.SIGCONT)
        assert all(call.result().hypotheses for call in calls)
        assert server.wait() == 0
        for instance in instances:
            wait_until_gone(instance)


def waiting(server: RunningServer) -> float:
    name = "seq2seq_num_requests_waiting"
    return sum(sample.value for sample in server.samples() if sample.name == name)


def test_no_process_outlives_a_server_that_is_killed(bundle_path, tmp_path):
    with running_server(bundle_path, tmp_path / "log") as server:
        instances = children_of(server.process.pid)
        assert len(instances) == 2
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        for instance in instances:
            wait_until_gone(instance)


def start(config: ServerConfig, bundle_path: Path) -> None:
    async def run() -> None:
        await load_model(bundle_path, config, "random", lambda _: None).engine.start()

    asyncio.run(run())


def test_a_bundle_that_cannot_be_used_is_the_same_clear_error(bundle_path):
    before = children_of(os.getpid())
    runner = replace(RUNNER, max_slots=10**9, max_slots_size_bytes=2**60)
    config = ServerConfig(runner=runner, max_models_size_bytes=2**60)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(bundle_path))}: Unable to allocate"):
        start(config, bundle_path)
    assert children_of(os.getpid()) == before


def test_a_process_that_does_not_start_is_a_clear_error(bundle_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        ValueError, match=r"random: the process of an instance exited with 1 while it started"
    ):
        start(ServerConfig(runner=RUNNER), bundle_path)


@pytest.mark.parametrize(("module", "name"), [(os, "memfd_create"), (subprocess, "Popen")])
def test_what_the_system_refuses_to_a_process_is_a_clear_error(bundle_path, monkeypatch, module, name):
    def refuse(*_args, **_kwargs):
        raise PermissionError("not here")

    monkeypatch.setattr(module, name, refuse)
    with pytest.raises(ValueError, match=r"random: .*its engine's process .*: not here"):
        start(ServerConfig(runner=RUNNER), bundle_path)


def test_instances_have_the_same_adapters_and_one_that_is_killed_gets_them_again(adapted_bundle, tmp_path):
    folders = []
    for seed, name in enumerate(("legal", "late")):
        weights = random_adapter(adapted_bundle, seed, 4, scale=1.0)
        folders.append(adapter_folder(tmp_path / name, adapted_bundle.manifest.adapted_checksum, weights))
    settings = {"runner": RUNNER, "named_adapters": (("legal", folders[0]),), "adapters": tmp_path}
    with (
        on_a_thread(serving_bundles(adapted_bundle.path, **settings)) as served,
        stub_of(served.address) as stub,
    ):
        first, second = instances_of(served)

        def targets() -> list[str]:
            """Those of both instances, which must be equal."""
            found = []
            for name in ("b", "b/legal", "b/late"):
                request = request_of(TEXTS[0], max_new_tokens=12)
                request.model = name
                with held([first, second]):
                    calls = [stub.Generate.future(request) for _ in range(4)]
                    until(lambda: bool(first.requests and second.requests))
                [text] = {call.result().hypotheses[0].text for call in calls}
                found.append(text)
            return found

        before = targets()
        assert len(set(before)) == 3
        process_id = first.process.pid
        os.kill(process_id, signal.SIGKILL)
        until(lambda: first.is_ready and first.process.pid != process_id)
        assert targets() == before
