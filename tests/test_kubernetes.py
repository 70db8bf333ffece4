"""The manifests of deploy/kubernetes against the schema of Kubernetes, and against each other."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from seq2seq_serve.server.__main__ import _config, _parser
from seq2seq_serve.server.config import ServerConfig

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
OWN = {"app.kubernetes.io/name": "seq2seq-serve"}


@pytest.mark.parametrize("name", [name for name in MANIFESTS if name != "servicemonitor"])
def test_a_manifest_fits_the_schema(name):
    kubernetes_validate.validate(MANIFESTS[name], kubernetes_validate.latest_version(), strict=True)


def test_all_of_them_mean_the_same_pods():
    deployment = MANIFESTS["deployment"]["spec"]
    assert deployment["selector"]["matchLabels"] == OWN
    assert deployment["template"]["metadata"]["labels"] == OWN
    assert MANIFESTS["service"]["spec"]["selector"] == OWN
    assert MANIFESTS["service"]["metadata"]["labels"] == OWN
    for name in ("disruption-budget", "servicemonitor"):
        assert MANIFESTS[name]["spec"]["selector"]["matchLabels"] == OWN
    assert (
        MANIFESTS["autoscaler"]["spec"]["scaleTargetRef"]["name"]
        == MANIFESTS["deployment"]["metadata"]["name"]
    )


def test_ports_and_probes_are_those_of_the_server():
    (container,) = MANIFESTS["deployment"]["spec"]["template"]["spec"]["containers"]
    config = ServerConfig()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.port, "metrics": config.metrics_port}
    named = {
        port["name"]: (port["port"], port["targetPort"]) for port in MANIFESTS["service"]["spec"]["ports"]
    }
    assert named == {name: (port, name) for name, port in ports.items()}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"
    assert MANIFESTS["servicemonitor"]["spec"]["endpoints"][0]["port"] == "metrics"


def test_a_pod_has_time_to_drain_and_its_flags_are_the_servers():
    pod = MANIFESTS["deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = _config(_parser().parse_args(container["args"]))
    waited = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > config.notice_seconds + config.drain_seconds + waited
    assert str(config.repository) == container["volumeMounts"][0]["mountPath"]
