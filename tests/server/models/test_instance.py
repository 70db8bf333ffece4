"""Engines in processes of their own, behind a real server."""

import asyncio
import io
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from benchmarks.serving import RunningServer, serving
from seq2seq_serve.bundle.names import SOURCE_IDS
from seq2seq_serve.protos import open_inference_pb2, open_inference_pb2_grpc
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.config import QueueLimits, RunnerConfig, ServerConfig
from seq2seq_serve.server.deliveries import Deliveries, Mailbox
from seq2seq_serve.server.engine.records import (
    FinishReason,
    Load,
    Request,
    Result,
    Timings,
    Turn,
    Update,
)
from seq2seq_serve.server.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    Overloaded,
    ServerError,
    Unavailable,
)
from seq2seq_serve.server.metrics import Metrics
from seq2seq_serve.server.models.instance import EngineProcess, _GiveBack, _Instance, _Outbox, _Submit
from seq2seq_serve.server.models.loading import load_model
from tests.server.service.harness import Served, on_a_thread, serving_bundles

TEXTS = ["오늘은 금요일입니다", "나는 학생이다", "비가 온다", "드디어 금요일이다"]
RUNNER = RunnerConfig(provider="cpu", num_threads=2, num_instances=2, max_slots=8)
QUEUE = QueueLimits(max_waiting_requests=40)


def instances_of(served: Served) -> list[EngineProcess]:
    return list(served.model.engines)


@contextmanager
def stub_of(address: str) -> Iterator[Seq2SeqStub]:
    with grpc.insecure_channel(address, options=[("grpc.enable_retries", 0)]) as channel:
        yield Seq2SeqStub(channel)


def request_of(*texts: str, **options) -> pb.GenerateRequest:
    sources = [pb.Source(text=text) for text in texts]
    return pb.GenerateRequest(sources=sources, options=pb.GenerateOptions(**options))


@contextmanager
def held(instances: list[EngineProcess]) -> Iterator[None]:
    """While this is open, the processes do not run."""
    for instance in instances:
        os.kill(instance.process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        for instance in instances:
            os.kill(instance.process_id, signal.SIGCONT)


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
        assert not instance._open
        assert not instance._numbers
        assert not instance._cancelled
        assert instance.num_slots_wanted() == 0
        assert instance.silent_seconds() == 0.0


def test_one_instance_stays_in_the_server_and_several_have_a_process_each(servers):
    single, double = servers
    assert not isinstance(single.model.engines[0], EngineProcess)
    assert len({os.getpid(), *(instance.process_id for instance in instances_of(double))}) == 3
    assert (double.model.num_slots, double.model.max_request_slots) == (8, 4)
    for name in ("max_source_length", "max_target_length", "has_attention", "num_hops", "eos_ids"):
        assert getattr(double.model, name) == getattr(single.model, name)


OPTIONS = {
    "greedy": {},
    "details": {"log_probabilities": True, "num_alternatives": 3, "word_alignment": True, "attention": True},
    "beam": {"beam_size": 3, "num_hypotheses": 2, "attention": True},
    "sampling": {"temperature": 1.0, "top_k": 20, "seed": 7, "num_hypotheses": 2},
    "constraints": {"min_new_tokens": 4, "no_repeat_ngram_size": 2, "logit_bias": {7: 1.5}},
}


def plain(answer: pb.GenerateResponse | pb.ScoreResponse) -> str:
    """The answer without its id and times."""
    return re.sub(r"\s*(request_id|\w+_seconds): .*", "", str(answer))


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


def test_a_held_process_holds_nobody_up_and_every_slot_is_back_afterwards(double):
    """More than a socket holds is sent meanwhile, some calls are cancelled and others expire."""
    with stub_of(double.address) as stub:
        with held(instances_of(double)):
            cancelled = [stub.Generate.future(request_of(text)) for text in TEXTS * 150]
            until(lambda: num_waiting(double) == len(cancelled))
            assert all(instance._outbox._num_behind for instance in instances_of(double))
            num_before = len(cancelled)
            for seconds in (0.5, 2, 8, 32):  # a deadline that passes on the way to the engines proves nothing
                expiring = [stub.Generate.future(request_of(text), timeout=seconds) for text in TEXTS]
                for call in expiring:
                    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if num_waiting(double) == num_before + len(expiring):
                    break
                num_before = num_waiting(double)
            else:
                pytest.fail("calls that expire no longer wait for the process")
            assert double.model.silent_seconds() > 0
            for call in cancelled:
                call.cancel()
            with grpc.insecure_channel(double.address) as channel:
                live = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive
                assert live(open_inference_pb2.ServerLiveRequest()).live
        wait_until_idle(double)
        assert stub.Generate(request_of(TEXTS[0])).hypotheses
    assert double.metric("seq2seq_wasted_tokens_total", model_name="random", reason="deadline") == 0
    assert not double.model.deliveries.mailboxes


def test_what_a_process_refuses_has_the_status_delay_and_count_of_an_engine_that_refuses(double):
    before = double.model.deliveries.statistics.failed.count
    with stub_of(double.address) as stub:
        with held(instances_of(double)):
            calls = [stub.Generate.future(request_of(text)) for text in TEXTS * 50]
            until(lambda: num_waiting(double) == len(calls))
        codes = [call.code() for call in calls]
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        refused = next(call for call in calls if call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "grpc-retry-pushback-ms" in dict(refused.trailing_metadata())
    assert double.model.deliveries.statistics.failed.count > before


def test_a_killed_process_fails_its_requests_and_the_others_finish(bundle_path, caplog):
    with (
        on_a_thread(serving_bundles(bundle_path, runner=RUNNER)) as served,
        stub_of(served.address) as stub,
    ):
        victim, _ = instances_of(served)
        with held([victim]):
            calls = [stub.Generate.future(request_of(text)) for text in TEXTS * 5]
            until(lambda: sum(call.done() for call in calls) + victim.num_slots_wanted() == len(calls))
            num_lost = victim.num_slots_wanted()
            assert num_lost
            os.kill(victim.process_id, signal.SIGKILL)
        codes = [call.code() for call in calls]
        assert codes.count(grpc.StatusCode.INTERNAL) == num_lost
        assert codes.count(grpc.StatusCode.OK) == len(calls) - num_lost
        for text in TEXTS:
            assert stub.Generate(request_of(text)).hypotheses
        status, text = asyncio.run(served.http("/healthz"))
        assert (status, text.strip()) == (503, "random: an engine's thread or process has ended")
        beat = served.metric("seq2seq_engine_heartbeat_timestamp_seconds", model_name="random")
        assert beat == float("-inf")
        aborted = {"model_name": "random", "finished_reason": "abort"}
        assert served.metric("seq2seq_request_success_total", **aborted) == num_lost
        with pytest.raises(Unavailable, match="model random is shutting down"):
            victim.submit(make_request(0))
    assert f"was killed by SIGKILL, and its {num_lost} unfinished requests fail" in caplog.text


@pytest.mark.parametrize("cancels", [False, True])
def test_an_engine_with_free_slots_takes_over_what_waits_for_another(cancels, double):
    first, second = instances_of(double)

    async def results() -> list[Result]:
        requests = [make_request(number, max_new_tokens=40, caller=str(number % 3)) for number in range(40)]
        mailboxes = {request: Mailbox() for request in requests}
        double.model.deliveries.mailboxes |= mailboxes
        for request in requests:
            first.submit(request)
        if cancels:
            while not second._open:
                await asyncio.sleep(0.001)
            for request in requests:
                first.cancel(request)
        for request, box in mailboxes.items():
            await asyncio.wait_for(box.wait_for_result(), 20)
            del double.model.deliveries.mailboxes[request]
        return [box._result for box in mailboxes.values()]

    before = next(second._count)
    found = asyncio.run_coroutine_threadsafe(results(), double.turns.loop).result(30)
    num_taken = next(second._count) - before - 1
    assert 0 < num_taken < 37  # of 40; both have four slots
    if not cancels:
        assert len({result.best.token_ids for result in found}) == 1
        assert all(result.error is None for result in found)
    else:
        assert any(isinstance(result.error, Cancelled) for result in found)


class StubEngine:
    """Accepts everything, and gives everything back."""

    model_name, is_healthy, num_waiting = "stub", True, 3

    def submit(self, *requests: Request) -> None:
        self.requests = list(requests)

    def give_back(self, num_slots: int) -> list[Request]:
        return self.requests[:num_slots]

    def load(self) -> Load:
        return Load(self.num_waiting, 0, 0, 0)


class Reporting:
    """The engine's side of a process without an engine, and what it reports."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._connection, its_end = socket.socketpair()
        self._connection.settimeout(0.0)
        self.engine, self.instance = StubEngine(), _Instance(its_end)
        self.instance._engine = self.engine  # type: ignore[assignment]
        self.instance._handle(_Submit(tuple(range(len(requests))), tuple(requests)))

    def close(self) -> None:
        for each in (self._connection, self.instance._stream, self.instance._connection):
            each.close()

    def reported(self, *updates: Update) -> list[int]:
        """Take a turn; returns the numbers of turns in each report."""
        self.instance._deliver(Turn(updates))
        return [len(report.turns) for report in self.reports()]

    def reports(self) -> list[Any]:
        """Everything that was sent."""
        with suppress(BlockingIOError):
            stream = io.BytesIO(self._connection.recv(1 << 20))
            reports = []
            while stream.tell() < len(stream.getbuffer()):
                reports.append(pickle.load(stream))
            return reports
        return []


def ended(request: Request, error: ServerError | None = None) -> Update:
    timings = Timings(0.0, 0.0, 0.0, 0.0)
    return Update(request, {}, Result(FinishReason.EOS, (), 1, 3, timings, error=error))


def test_results_are_reported_together_when_their_call_ends():
    requests = [make_request(number) for number in range(3)]
    with closing(Reporting(requests)) as process:
        assert process.reported(ended(requests[1])) == []
        assert process.reported() == []
        assert process.reported(ended(requests[0]), ended(requests[2])) == [3]
        assert process.reported() == []
        assert not process.instance._calls


@pytest.mark.parametrize("reason", ["token", "result of a stream", "error", "free slots", "age"])
def test_a_turn_that_somebody_waits_for_is_reported_at_once(reason):
    is_stream = reason in ("token", "result of a stream")
    first, second = (make_request(number, stream=is_stream) for number in (1, 2))
    with closing(Reporting([first, second])) as process:
        assert process.reported() == []
        update = ended(first)
        if reason == "token":
            update = Update(first, {0: [5]}, None)
        elif reason == "error":
            update = ended(first, EngineFailed("broken"))
        elif reason == "free slots":
            process.engine.num_waiting = 0
        elif reason == "age":
            process.instance._held_since -= 1.0
        assert process.reported(update) == [2]


def test_what_was_not_reported_is_when_the_engine_may_have_no_further_turn():
    requests = [make_request(number) for number in range(3)]
    with closing(Reporting(requests)) as process:
        assert process.reported(ended(requests[2])) == []
        process.instance._handle(_GiveBack(2))
        given_back, report = process.reports()
    assert given_back.numbers == (0, 1)
    assert [number for _, news in report.turns for number, *_ in news] == [2]


def make_request(number: int, **changes) -> Request:
    request = Request(str(number), {SOURCE_IDS: np.array([5, 6, 2])}, 3, max_new_tokens=3, arrival=0.0)
    return replace(request, **changes)


def test_an_engine_refuses_for_the_reasons_that_it_has_in_the_same_process(double):
    """Without a handler, which would check some of it before."""

    async def errors_of(*calls: list[Request]) -> list[ServerError | None]:
        mailboxes = {request: Mailbox() for requests in calls for request in requests}
        double.model.deliveries.mailboxes |= mailboxes
        for requests in calls:
            instances_of(double)[0].submit(*requests)
        for request, box in mailboxes.items():
            await asyncio.wait_for(box.wait_for_result(), 20)
            del double.model.deliveries.mailboxes[request]
        return [mailboxes[requests[-1]]._result.error for requests in calls]

    def run(*calls: list[Request]) -> list[ServerError | None]:
        return asyncio.run_coroutine_threadsafe(errors_of(*calls), double.turns.loop).result(30)

    long = [[make_request(number, max_new_tokens=40) for number in range(40)] for _ in range(2)]
    late, accepted, full = run([make_request(0, deadline=1e-9)], *long)
    assert isinstance(late, DeadlineExceeded)
    assert accepted is None
    assert isinstance(full, Overloaded)
    assert full.retry_after_seconds > 0
    bug, fine = run([make_request(number) for number in range(41)], [make_request(0)])
    assert isinstance(bug, EngineFailed)
    assert fine is None


def test_the_weights_are_in_memory_once(double):
    mapped = {
        line.split()[4]
        for instance in instances_of(double)
        for line in Path(f"/proc/{instance.process_id}/maps").read_text().splitlines()
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


@pytest.fixture
def deliveries() -> Iterator[Deliveries]:
    loop = asyncio.new_event_loop()
    yield Deliveries("random", loop, Metrics())
    loop.close()


def test_a_bundle_that_cannot_be_used_is_the_same_clear_error(bundle_path, deliveries):
    before = children_of(os.getpid())
    runner = replace(RUNNER, max_slots=10**9, memory_budget_bytes=2**60)
    config = ServerConfig(runner=runner, memory_limit_bytes=2**60)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(bundle_path))}: Unable to allocate"):
        load_model(bundle_path, config, deliveries)
    assert children_of(os.getpid()) == before


def test_a_process_that_does_not_start_is_a_clear_error(bundle_path, deliveries, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(
        ValueError, match=r"random: the process of an instance exited with 1 while it started"
    ):
        load_model(bundle_path, ServerConfig(runner=RUNNER), deliveries)


def test_an_outbox_keeps_the_order_and_never_waits():
    ours, theirs = socket.socketpair()
    outbox = _Outbox(ours, "test")
    pieces = [bytes([i % 256]) * 10_000 for i in range(100)]  # more than the socket takes
    for piece in pieces:
        outbox.send(piece)
    with theirs, theirs.makefile("rb") as stream:
        assert stream.read(10_000 * 100) == b"".join(pieces)
        outbox.send(b"after")
        outbox.close()
        ours.close()
        assert stream.read() == b"after"
    outbox.send(b"nobody reads this")
