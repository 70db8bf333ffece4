"""Rules, dashboard and metrics, by Prometheus' own programs, which Debian has as the package `prometheus`."""

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from tests.server.service.harness import Served, access_file, serving, serving_bundles
from tests.server.service.live.test_stream import answered, pcm, sound, start
from tests.server.service.seq2seq.test_windows import noise

DEPLOY = Path(__file__).parent.parent / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "seq2seq.json"

SCRAPE_SECONDS, MOST_SECONDS = 0.5, 60

needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool")
needs_prometheus = pytest.mark.skipif(not shutil.which("prometheus"), reason="there is no prometheus")


def promtool(*arguments: str, text: str = "") -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=text, capture_output=True, text=True, timeout=60, cwd=RULES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def rules(kind: str) -> dict[str, str]:
    """Expressions by the names of their recording or alert rules."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule[kind]: rule["expr"] for group in groups for rule in group["rules"] if kind in rule}


def panels() -> dict[str, list[str]]:
    """Expressions by panel."""
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
    }


@needs_promtool
def test_the_alerts_fire_when_they_should_and_only_then():
    promtool("test", "rules", "rules_test.yml")
    tested = yaml.safe_load((RULES.parent / "rules_test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tested for one in test["alert_rule_test"] if one.get("exp_alerts")}
    assert fired == rules("alert").keys()


@needs_promtool
def test_the_configuration_of_the_stack_is_sound():
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_the_metrics_are_named_as_prometheus_wants_them():
    async def run():
        async with serving() as served:
            await served.stub.Generate(pb.GenerateRequest(sources=[pb.Source(text="ab")]))
            return (await served.http("/metrics"))[1]

    assert promtool("check", "metrics", text=asyncio.run(run())) == ""


def test_every_alert_says_what_to_do_in_the_operations_guide():
    guide = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for name in rules("alert"):
        assert f"`{name}`" in guide


def parts_of_alert(expression: str) -> list[str]:
    """What an alert compares: the comparison itself is empty while all is well."""
    expression = re.sub(r"^absent\((.*) == 1\)$", r"\1", expression.strip())
    return [re.split(r" > | == ", part)[0] for part in re.split(r"\sand\s", expression)]


class Prometheus:
    """A real one that scrapes servers."""

    def __init__(self, folder: Path, servers: list[Served]) -> None:
        self.port = 19_000 + hash(folder) % 1000
        targets = [f"127.0.0.1:{served.app.http.port}" for served in servers]
        config = {
            "global": {"scrape_interval": f"{int(SCRAPE_SECONDS * 1000)}ms", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "seq2seq-serve", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def has_data(self, expression: str) -> bool:
        """Whether a query returns numbers, with the dashboard's variables filled in."""
        filled = expression.replace("$model_name", ".*").replace("$__rate_interval", "5s")
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": filled})
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError:
            raise
        except OSError:  # it has not started
            return False
        return any(one["value"][1] != "NaN" for one in result)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@needs_prometheus
@pytest.mark.timeout(4 * MOST_SECONDS)  # it names the queries without data before
def test_every_query_returns_data_from_servers_under_load(tmp_path, whisper_path):
    queries = {f"panel {title}, {i}": one for title, its in panels().items() for i, one in enumerate(its)}
    queries |= {f"rule {name}": expression for name, expression in rules("record").items()}
    for name, expression in rules("alert").items():
        queries |= {f"alert {name}, {i}": part for i, part in enumerate(parts_of_alert(expression))}

    file = access_file(tmp_path, ("shop", "secret", "predict"))

    async def drive(served, stopping: asyncio.Event) -> None:
        request = pb.GenerateRequest(sources=[pb.Source(text="abc")])
        token = (("authorization", "Bearer secret"),)
        while not stopping.is_set():
            await asyncio.gather(*(served.stub.Generate(request, metadata=token) for _ in range(4)))
            await asyncio.sleep(0.05)

    async def speak(served, stopping: asyncio.Event) -> None:
        pieces = [sound(pcm(noise(0.1, seed))) for seed in range(30)]
        while not stopping.is_set():
            await answered(served.stub, [start(), *pieces], pause=0.05)

    async def run() -> dict[str, str]:
        """The queries that are still without data."""
        async with (
            serving(access_file=file) as served,
            serving_bundles(whisper_path / "bundle") as listening,
        ):
            prometheus = Prometheus(tmp_path, [served, listening])
            stopping = asyncio.Event()
            driving = asyncio.gather(drive(served, stopping), speak(listening, stopping))
            missing, end = queries, time.monotonic() + MOST_SECONDS
            try:
                while missing and time.monotonic() < end:
                    await asyncio.sleep(1)
                    missing = {
                        name: expression
                        for name, expression in missing.items()
                        if not await asyncio.to_thread(prometheus.has_data, expression)
                    }
                return missing
            finally:
                stopping.set()
                await driving
                await asyncio.to_thread(prometheus.stop)

    assert len(queries) > 50
    assert asyncio.run(run()) == {}
