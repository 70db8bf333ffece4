"""The configurations of deploy/proxies, in the real programs; reliability/balance.py ends servers there."""

import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.serving import RunningServer
from reliability.proxies import PROXIES, proxying, write
from seq2seq_serve.client import Client, ClientError
from tests.server.service.harness import serving_on_a_thread


@pytest.fixture(params=PROXIES)
def name(request):
    proxy = PROXIES[request.param]
    if proxy.find() is None:
        pytest.skip(f"{proxy.package} installs {request.param}")
    return request.param


def test_the_proxy_accepts_its_configuration(name, tmp_path):
    proxy = PROXIES[name]
    servers = [RunningServer(None, f"127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}") for port in (1, 3, 5)]
    file = tmp_path / proxy.file
    write(proxy, file, 7, servers)
    assert "10.0.0." not in file.read_text()
    command = proxy.command(proxy.check, file)
    done = subprocess.run(command, env=proxy.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


def test_calls_streams_and_errors_pass_the_proxy_and_a_watch_of_health_does_not(name, tmp_path):
    with serving_on_a_thread() as served:
        server = RunningServer(None, served.address, f"http://127.0.0.1:{served.app.http.port}")
        with proxying(name, tmp_path, 3 * [server]) as proxy, Client(proxy.address) as client:
            assert client.generate("abc", request_id="r1").request_id == "r1"
            assert "".join(event.piece.text for event in client.stream("금요일")) == "금요일"
            with pytest.raises(ClientError, match="NOT_FOUND") as raised:
                client.generate("abc", model="nobody", request_id="r2")
            assert (raised.value.reason, raised.value.request_id) == ("UNKNOWN_MODEL", "r2")
            with grpc.insecure_channel(proxy.address) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
                with pytest.raises(grpc.RpcError) as refused:
                    next(watch)
                assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
