"""The configurations of deploy/proxies: the proxies accept them."""

import subprocess

import pytest

from benchmarks.serving import RunningServer
from tests.soak.proxies import PROXIES, write


@pytest.mark.parametrize("name", PROXIES)
def test_the_proxy_accepts_its_configuration(name, tmp_path):
    proxy = PROXIES[name]
    if proxy.find() is None:
        pytest.skip(f"{proxy.package} installs {name}")
    servers = [RunningServer(None, f"127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}") for port in (1, 3, 5)]
    file = tmp_path / proxy.file
    write(proxy, file, 7, servers)
    assert "10.0.0." not in file.read_text()
    command = proxy.command(proxy.check, file)
    done = subprocess.run(command, env=proxy.environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
