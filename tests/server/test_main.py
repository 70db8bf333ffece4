import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import grpc
import pytest

from seq2seq_serve.client import Client, ClientError
from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateRequest, Source
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.__main__ import main, parse_command
from seq2seq_serve.server.config import ServerConfig
from tests.server.service.harness import fetch

# A whole server process whose models echo, and whose first step waits for a line on standard input.
ECHO_SERVER = textwrap.dedent("""
    import asyncio, resource, sys, threading
    from pathlib import Path
    from seq2seq_serve.server.app import serve
    from seq2seq_serve.server.system.logs import configure_logging
    from tests.server.service.harness import EchoRunner, Turns, loader_of, local_config

    runner = EchoRunner()

    def never_load(*_):
        print("loading", file=sys.stderr, flush=True)
        threading.Event().wait()

    def open_gate():
        runner.stepping.wait()
        print("stepping", file=sys.stderr, flush=True)
        sys.stdin.readline()
        runner.gate.set()

    async def run():
        config = local_config(notice_seconds=1.0 if "--notice" in sys.argv else 0.0)
        loader = never_load if "--never-loads" in sys.argv else loader_of({"echo": runner}, Turns(), 1)
        await serve([Path("echo")], config, loader)

    configure_logging("info", "text")
    if "--few-files" in sys.argv:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    if "--gate" in sys.argv:
        runner.gate.clear()
        threading.Thread(target=open_gate, daemon=True).start()
    asyncio.run(run())
""")


@contextmanager
def echo_server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """The process, its port, and its log until it was ready."""
    with subprocess.Popen(
        [sys.executable, "-c", ECHO_SERVER, *arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        log = []
        while not log or "ready" not in log[-1]:
            log.append(process.stderr.readline())
            assert log[-1], log
        try:
            yield process, int(re.search(r"gRPC on 127\.0\.0\.1:(\d+)", log[-1])[1]), log
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGTERM, 31), (signal.SIGINT, 30)])
def test_a_signal_finishes_what_was_accepted_and_exits_0(number, seconds):
    with echo_server("--gate", "--notice") as (process, port, log):
        assert re.search(
            r"ready: gRPC on 127\.0\.0\.1:\d+, metrics on 127\.0\.0\.1:\d+, models echo",
            log[-1],
        )
        with Client(f"127.0.0.1:{port}") as client:
            pending = client.submit("abc")
            assert process.stderr.readline() == "stepping\n"
            process.send_signal(number)
            assert f"draining for at most {seconds} seconds" in process.stderr.readline()
            process.stdin.write("\n")
            process.stdin.flush()
            assert pending.result().hypotheses[0].text == "abc"
        assert process.wait(20) == 0
        assert process.stderr.read().endswith("stopped\n")


def test_a_signal_while_models_load_ends_the_server():
    with subprocess.Popen(
        [sys.executable, "-c", ECHO_SERVER, "--never-loads"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read().endswith("stopped\n")


def test_a_burst_and_a_signal_answer_every_call_with_a_status_that_clients_retry():
    """GRPC by itself cancels calls that wait for their handler: beyond a thousand, and when it stops."""
    with echo_server() as (process, port, _):
        options = [("grpc.enable_retries", 0)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            stub = Seq2SeqStub(channel)
            request = GenerateRequest(sources=[Source(text="abc")])
            calls = [stub.Generate.future(request) for _ in range(1500)]
            calls[20].result()
            process.send_signal(signal.SIGTERM)
            codes = {call.code() for call in calls}
        assert process.wait(20) == 0
    overloaded, stopping = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE
    assert stopping in codes
    assert codes <= {grpc.StatusCode.OK, overloaded, stopping}


def test_streams_end_when_their_server_dies_before_their_first_piece():
    """A retried stream of gRPC's would wait for ever, whatever its deadline."""

    def read(client: Client) -> str:
        try:
            return "".join(message.piece.text for message in client.stream("abc", timeout_seconds=15))
        except ClientError as error:
            return error.code

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        process, port, _ = stack.enter_context(echo_server("--gate"))
        clients = [stack.enter_context(Client(f"127.0.0.1:{port}")) for _ in range(6)]
        reading = [pool.submit(read, client) for client in clients]
        assert process.stderr.readline() == "stepping\n"
        time.sleep(0.3)  # for the others to be accepted
        process.kill()
        assert {one.result(30) for one in reading} == {"UNAVAILABLE"}


def test_probes_answer_while_callers_have_every_connection_that_they_can():
    """They timed out, because the connections had taken every file that the process may open."""
    with echo_server("--few-files") as (_, port, log), ExitStack() as stack:
        metrics_port = int(re.search(r"metrics on 127\.0\.0\.1:(\d+)", log[-1])[1])
        connect = partial(socket.create_connection, ("127.0.0.1", port), 20)
        callers = [stack.enter_context(connect()) for _ in range(300)]
        greeted = [bool(caller.recv(1)) for caller in callers]
        assert 0 < sum(greeted) <= 256 * 7 // 8, "the others are closed at once"
        for path in ("/healthz", "/readyz", "/metrics"):
            status, _ = fetch(metrics_port, path)
            assert status == 200
        for caller in callers:
            caller.close()
        is_free = False
        while not is_free:  # until the server has seen that some have left
            with connect() as caller:
                is_free = bool(caller.recv(1))
        with Client(f"127.0.0.1:{port}") as client:
            assert client.generate("abc").hypotheses[0].text == "abc"


def test_a_second_signal_ends_at_once():
    with echo_server("--gate") as (process, port, _), Client(f"127.0.0.1:{port}") as client:
        pending = client.submit("abc")
        assert process.stderr.readline() == "stepping\n"
        process.send_signal(signal.SIGTERM)
        assert "a second signal ends at once" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        pending.cancel()


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code


def test_no_flag_means_the_defaults_of_the_configuration():
    assert parse_command(["bundles/demo"], {}).server == ServerConfig()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to serve: name a BUNDLE or a --repository"),
        (["b", "--port", "x"], "--port: it is 'x', and must be an integer\n"),
        (["b", "--port", "9464"], "port and metrics_port are both 9464, and must differ"),
        (["b", "--prot", "1"], "unrecognized arguments: --prot 1 (meant: --port?)"),
        (["b", "--port", "1", "c"], "unrecognized arguments: c\n"),  # it was meant to be -h
        (["--bundle", "b"], "unrecognized arguments: --bundle\n"),
        (["--model-name", "demo"], "argument --model-name: it is 'demo', and must be NAME=FOLDER"),
        (["b", "--tls-key", "k"], "--tls-certificate and --tls-key need each other: give both, or none"),
        (["b", "--tls-client-ca", "c"], "--tls-client-ca needs --tls-certificate and --tls-key"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_wrong(arguments, message, capsys):
    assert run_main(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_bundle_exits_1_with_the_reason(tmp_path, capsys):
    assert run_main(str(tmp_path / "none"), "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0") == 1
    [line] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: .*none is not a usable bundle: there is no such folder", line)


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_port_in_use_exits_1_with_one_line(flag, tmp_path, capsys):
    other = "--metrics-port" if flag == "--port" else "--port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_main(str(tmp_path), "--host", "127.0.0.1", flag, str(port), other, "0") == 1
    out, err = capsys.readouterr()
    [line] = err.splitlines()
    assert out == ""
    assert re.match(rf"error: .*port {port}.*in use.*choose another {flag}$", line)
