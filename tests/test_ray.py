"""The application of deploy/ray in a Ray cluster on this machine, beside a server with the same bundle."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_status import rpc_status

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.protos.seq2seq_v1_pb2_grpc import Seq2SeqStub
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.service.seq2seq.batch import _LEAST_OPEN
from tests.server.fakes import sample_value
from tests.server.service.harness import on_a_thread, serving_bundles

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deploy" / "ray"
SLOTS, TEXTS = 8, ["오늘은 금요일입니다", "나는 학생이다", "비가 온다"]
MISSING = "needs Ray Serve: pip install 'ray[serve]'"
ID = (("x-request-id", "of-the-test"),)


def in_a_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test whose cluster starts in half a minute; Ray gives many warnings."""
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore")(test))


def watched_app(arguments: dict[str, Any]) -> Any:
    """The application, whose replica also counts the requests that its engine gave up."""
    import seq2seq_ray  # Ray's processes have the folder on their path
    from ray import serve

    class Seq2Seq(seq2seq_ray.Seq2Seq):
        def num_aborted(self) -> float:
            labels = {"finished_reason": "abort"}
            return sample_value(self._calls._journal._metrics, "seq2seq_request_success_total", labels) or 0.0

    return serve.deployment(Seq2Seq).bind(**arguments)


@dataclass
class Cluster:
    """A cluster of one node, and a plain server. Both serve a bundle, and the same one as an idle model.

    Attributes:
        ray: Calls the application through Ray's port.
        plain: Calls the server.
        replica: Ray's handle of the application.
    """

    ray: Seq2SeqStub
    plain: Seq2SeqStub
    replica: Any

    @property
    def both(self) -> tuple[Seq2SeqStub, Seq2SeqStub]:
        return self.ray, self.plain

    def load(self) -> float:
        return self.replica.record_autoscaling_stats.remote().result()["load"]


@pytest.fixture(scope="module")
def cluster(bundle_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    idle = shutil.copytree(bundle_path, tmp_path_factory.mktemp("bundles") / "idle")
    ports = [free_port() for _ in range(6)]
    sockets = tmp_path_factory.mktemp("haproxy")
    settings = dict(line.split("=") for line in (FOLDER / "settings.env").read_text().split()) | {
        "PYTHONPATH": f"{ROOT}:{FOLDER}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",  # for the handle, because a test does not have a loop
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        # The replica's own. Ray always begins with the same port, and two clusters would share it.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[4]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[4] + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(ports[5]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(ports[5] + 1),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(sockets / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(sockets),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(sockets / "server-state"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(sockets / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(sockets / "metrics.sock"),
    }
    config = yaml.safe_load((FOLDER / "serve.yaml").read_text())
    config["http_options"] = {"port": ports[2]}
    config["grpc_options"]["port"] = ports[3]
    (application,) = config["applications"]
    application["import_path"] = "tests.test_ray:watched_app"
    application["args"] = {"bundles": [str(bundle_path), str(idle)], "max_slots": SLOTS}
    application["deployments"][0]["ray_actor_options"]["num_cpus"] = 1
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        patch.syspath_prepend(FOLDER)
        # It reads the settings when it is imported.
        serve = pytest.importorskip("ray.serve", reason=MISSING, exc_type=ImportError)
        import ray
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        ray.init(address="local", num_cpus=2, include_dashboard=False)
        try:
            serve.start(config["proxy_location"], config["http_options"], grpc_options=config["grpc_options"])
            # As `serve run serve.yaml` does.
            _get_global_client().deploy_apps(ServeDeploySchema(**config), _blocking=True)
            runner = RunnerConfig(num_threads=1, max_slots=SLOTS)
            with (
                on_a_thread(serving_bundles(bundle_path, idle, runner=runner)) as served,
                grpc.insecure_channel(f"127.0.0.1:{ports[3]}") as through_ray,
                grpc.insecure_channel(served.address) as direct,
            ):
                Seq2SeqStub(through_ray).ListModels(pb.ListModelsRequest(), wait_for_ready=True, timeout=60)
                replica = serve.get_app_handle(application["name"])
                yield Cluster(Seq2SeqStub(through_ray), Seq2SeqStub(direct), replica)
        finally:
            ray.shutdown()


def test_the_manifest_of_kuberay_has_the_same_application_ports_and_bundles():
    config = yaml.safe_load((FOLDER / "serve.yaml").read_text())
    spec = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())["spec"]
    assert yaml.safe_load(spec["serveConfigV2"]) == config
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve-grpc"] == config["grpc_options"]["port"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"] == cluster["autoscalerOptions"]["securityContext"]
        assert container["env"] == [{"name": "PYTHONPATH", "value": mounts["adapter"]}]
        for bundle in config["applications"][0]["args"]["bundles"]:
            assert Path(bundle).is_relative_to(mounts["models"])
    (application,) = config["applications"]
    (deployment,) = application["deployments"]
    num_cpus = deployment["ray_actor_options"]["num_cpus"]
    assert container["resources"]["requests"]["cpu"] == str(num_cpus)
    assert application["args"]["max_slots"] == 32 * num_cpus  # `_TARGET_LOAD` is for them
    # The head's autoscaler starts pods; the workers run what callers send.
    assert workers["template"]["spec"]["automountServiceAccountToken"] is False
    assert "automountServiceAccountToken" not in cluster["headGroupSpec"]["template"]["spec"]
    assert workers["maxReplicas"] == deployment["autoscaling_config"]["max_replicas"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def request(text: str, **options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(sources=[pb.Source(text=text)], options=options)


def batch(texts: Sequence[str]) -> pb.GenerateBatchRequest:
    items = [pb.BatchItem(sources=[pb.Source(text=text)]) for text in texts]
    return pb.GenerateBatchRequest(items=items)


def untimed(answer: Any) -> Any:
    answer.ClearField("timings")
    return answer


@in_a_cluster
def test_answers_are_the_servers(cluster):
    for text in TEXTS:
        for options in ({}, {"beam_size": 4}, {"temperature": 1.0, "seed": 7}):
            message = request(text, **options)
            answers = [untimed(stub.Generate(message, metadata=ID)) for stub in cluster.both]
            assert answers[0] == answers[1]
    score = pb.ScoreRequest(sources=[pb.Source(text=TEXTS[0])], target=pb.Target(text="It rains."))
    answers = [untimed(stub.Score(score, metadata=ID)) for stub in cluster.both]
    assert answers[0] == answers[1]
    for answers in (
        [stub.ListModels(pb.ListModelsRequest()) for stub in cluster.both],
        [stub.GetModel(pb.GetModelRequest()) for stub in cluster.both],
    ):
        assert answers[0] == answers[1]


@in_a_cluster
def test_a_stream_has_the_servers_pieces_and_answer(cluster):
    *pieces, last = cluster.ray.GenerateStream(request(TEXTS[0]), metadata=ID)
    assert len(pieces) > 1
    assert "".join(each.piece.text for each in pieces) == last.result.hypotheses[0].text
    assert untimed(last.result) == untimed(cluster.plain.Generate(request(TEXTS[0]), metadata=ID))


@in_a_cluster
def test_a_batch_has_the_servers_answers(cluster):
    message = batch(TEXTS)
    by_index = []
    for stub in cluster.both:
        answers = list(stub.GenerateBatch(message, metadata=ID))
        by_index.append({each.index: untimed(each.response) for each in answers})
    assert by_index[0] == by_index[1]
    assert len(by_index[0]) == len(TEXTS)


@in_a_cluster
def test_a_refusal_has_the_servers_status_text_and_details(cluster):
    refused = [
        lambda stub: stub.Generate(request(TEXTS[0], beam_size=999), metadata=ID),
        lambda stub: list(stub.GenerateStream(request(TEXTS[0], beam_size=999), metadata=ID)),
        lambda stub: stub.GetModel(pb.GetModelRequest(model="absent"), metadata=ID),
    ]
    for call in refused:
        errors = []
        for stub in cluster.both:
            with pytest.raises(grpc.RpcError) as caught:
                call(stub)
            errors.append(caught.value)
        one, other = errors
        assert (one.code(), one.details()) == (other.code(), other.details())
        assert rpc_status.from_call(one) == rpc_status.from_call(other)
        assert dict(one.trailing_metadata())["x-request-id"] == "of-the-test"
    with pytest.raises(grpc.RpcError, match="the request id has 200 characters"):
        cluster.ray.GetModel(pb.GetModelRequest(), metadata=(("x-request-id", "x" * 200),))


@in_a_cluster
def test_a_caller_who_leaves_frees_the_slots(cluster):
    answers = cluster.ray.GenerateBatch(batch(TEXTS * 300))
    for _ in range(_LEAST_OPEN):
        next(answers)
    # The load is that of the busy model. Over the slots of both models it would be at most this.
    assert cluster.load() > _LEAST_OPEN / (2 * SLOTS)
    answers.cancel()
    deadline = time.monotonic() + 20
    while cluster.load() > 0:
        assert time.monotonic() < deadline, "the slots are not back"
        time.sleep(0.01)  # another process has no event for this one
    aborted = cluster.replica.num_aborted.remote().result()
    assert 0 < aborted < len(TEXTS * 300)
