"""Adapters by their names in every protocol, and the rights of tokens to them, on a real server."""

import asyncio
import json
import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from libretranslatepy import LibreTranslateAPI

from seq2seq_serve.bundle.manifest import load_bundle, write_manifest
from seq2seq_serve.client import Client, ClientError
from seq2seq_serve.client.__main__ import main
from seq2seq_serve.protos import open_inference_pb2 as pb
from seq2seq_serve.protos.open_inference_pb2_grpc import GRPCInferenceServiceStub
from seq2seq_serve.protos.seq2seq_v1_pb2 import VersionState
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.service.access import Access
from seq2seq_serve.server.telemetry.record import Caller, CallRecord
from tests.models import adapter_folder, random_adapter
from tests.server.service.harness import Served, entry, on_a_thread, serving_bundles
from tests.server.service.test_rest import ask, infer_body

TEXT = "나는 학생이다"
OPTIONS = {"max_new_tokens": 12}
TOKENS = {
    "all": None,
    "legal": ["ko-en/legal"],
    "adapters": ["ko-en/*"],
    "base": ["ko-en"],
    "late": ["ko-en/late"],
    "none": ["en-ko"],
}


@dataclass
class Adapted:
    """A server of the model `ko-en`, with `legal` loaded at the start, and `late` and `third` in a folder.

    Attributes:
        checksum: Of the maps that adapters change.
        access: The file of tokens; a token is its name.
    """

    served: Served
    folder: Path
    bundle: Any
    access: Path

    @property
    def port(self) -> int:
        return self.served.app.http.port

    def client(self, token: str = "all") -> Client:
        return Client(self.served.address, token=token)

    def add(self, name: str, seed: int) -> Path:
        """Writes an adapter into the folder, over one of that name."""
        shutil.rmtree(self.folder / name, ignore_errors=True)
        weights = random_adapter(self.bundle, seed, 4, scale=1.0)
        return adapter_folder(self.folder / name, self.bundle.manifest.adapted_checksum, weights)

    def ask(self, method: str, path: str, content=None, token: str = "all") -> tuple[int, Any]:
        status, _, answer = ask(self.port, method, path, content, authorization=f"Bearer {token}")
        return status, answer


def tokens(rights: dict[str, list[str] | None]) -> str:
    return "\n".join(
        entry(name, name, "predict", "admin") + (f"models = {json.dumps(models)}\n" if models else "")
        for name, models in rights.items()
    )


@pytest.fixture(scope="module")
def adapted(adapted_bundle, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapted")
    bundle = shutil.copytree(adapted_bundle.path, path / "ko-en")
    write_manifest(bundle, replace(adapted_bundle.manifest, source_language="ko", target_language="en"))
    access, folder = path / "access.toml", path / "adapters"
    access.write_text(tokens(TOKENS))
    made = Adapted(None, folder, load_bundle(bundle), access)  # type: ignore[arg-type]
    for seed, name in enumerate(("late", "third", "legal")):
        made.add(name, seed)
    legal = (folder / "legal").rename(path / "legal")
    runner = RunnerConfig(num_threads=1, max_adapters=2, max_rank=4, precision="fp32", max_slots=4)
    with on_a_thread(
        serving_bundles(
            bundle, runner=runner, access_file=access, named_adapters=(("legal", legal),), adapters=folder
        )
    ) as served:
        made.served = served
        yield made


def infer_message(model: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    source = message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    source.contents.bytes_contents.append(TEXT.encode())
    message.parameters["max_new_tokens"].int64_param = OPTIONS["max_new_tokens"]
    return message


@contextmanager
def triton(adapted: Adapted, token: str = "all"):
    """Yields a function that calls a method of the Open Inference Protocol."""
    metadata = (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(adapted.served.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        yield lambda method, message: getattr(stub, method)(message, metadata=metadata)


def target(adapted: Adapted, model: str = "", token: str = "all") -> str:
    with adapted.client(token) as client:
        return client.translate(TEXT, model=model, options=OPTIONS)


def test_every_protocol_takes_the_name_of_an_adapter_for_a_models(adapted):
    expected = {model: target(adapted, model) for model in ("ko-en", "ko-en/legal", "ko-en/late")}
    assert len(set(expected.values())) == 3
    score = {}
    with adapted.client() as client:
        for model, text in expected.items():
            *_, last = client.stream(TEXT, model=model, options=OPTIONS)
            assert last.result.hypotheses[0].text == text
            batch = client.generate_batch([TEXT, TEXT], model=model, options=OPTIONS)
            assert [one.text for _, one in batch] == [text, text]
            score[model] = client.score(TEXT, "I am", model=model).score
            assert client.model(model).name == model
        assert len(set(score.values())) == 3
        assert {one.name for one in client.models()} == expected.keys()
        versions = {one.name: one.version for one in client.models()}
    with triton(adapted) as call:
        for model, text in expected.items():
            answer = call("ModelInfer", infer_message(model))
            assert (answer.model_name, answer.model_version) == (model, versions[model])
            (whole,) = [one for one in answer.outputs if one.name == "text_output"]
            assert whole.contents.bytes_contents == [text.encode()]
            (streamed, *_) = call("ModelStreamInfer", iter([infer_message(model)]))
            assert streamed.infer_response.model_name == model
            for version, is_ready in (("", True), ("1", True), ("2", False)):
                assert call("ModelReady", pb.ModelReadyRequest(name=model, version=version)).ready is is_ready
        assert not call("ModelReady", pb.ModelReadyRequest(name="ko-en/none")).ready


@pytest.mark.parametrize("slash", ["/", "%2F", "%2f"])
def test_the_slash_of_an_adapters_name_may_be_in_a_path(adapted, slash):
    name, expected = f"ko-en{slash}legal", target(adapted, "ko-en/legal")
    page = f"/v2/models/{name}"
    for path in (page, f"{page}/versions/1"):
        status, answer = adapted.ask("POST", f"{path}/infer", infer_body(TEXT, **OPTIONS))
        assert (status, answer["model_name"]) == (200, "ko-en/legal")
        assert expected in json.dumps(answer, ensure_ascii=False)
        status, answer = adapted.ask("POST", f"{path}/generate", {"text_input": TEXT} | OPTIONS)
        assert (status, answer["text_output"]) == (200, expected)
        status, answer = adapted.ask("POST", f"{path}/generate_stream", {"text_input": TEXT} | OPTIONS)
        assert (status, answer.count(b"ko-en/legal") > 0) == (200, True)
        assert adapted.ask("GET", f"{path}/ready")[0] == 200
        assert adapted.ask("GET", path)[1]["name"] == "ko-en/legal"
        assert adapted.ask("GET", f"{path}/config")[1]["config"]["name"] == "ko-en/legal"
        assert adapted.ask("GET", f"{path}/stats")[1]["model_stats"][0]["name"] == "ko-en/legal"
    assert adapted.ask("GET", f"/v1/models/{name}")[1]["id"] == "ko-en/legal"
    assert adapted.ask("GET", f"/v2/models/ko-en{slash}none/ready")[0] == 404
    assert adapted.ask("GET", "/v2/models/ko-en/ready")[0] == 200
    for path in ("/v2/models/", "/v2/models//infer", "/v2/models/ko-en/legal/x/infer", "/v1/models/a/b/c"):
        assert adapted.ask("POST", path)[0] == 404
    assert adapted.ask("GET", "/v2/models/ko-en/infer")[0] == 405


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_the_command_line_takes_an_adapter_for_a_model(adapted, capsys, tmp_path, flags):
    (tmp_path / "token").write_text("all")
    connection = ["--address", adapted.served.address, "--token-file", str(tmp_path / "token")]
    given = [*connection, "--model", "ko-en/legal", "--max-new-tokens", "12", *flags, TEXT]
    assert main(["translate", *given]) == 0
    assert capsys.readouterr().out.rstrip("\n") == " ".join(target(adapted, "ko-en/legal").split("\n"))
    assert main(["models", *connection]) == 0
    assert "ko-en/legal" in capsys.readouterr().out


def test_the_command_line_does_not_wait_for_an_adapter_that_cannot_be_loaded(adapted, capsys, tmp_path):
    """It asked again for ten seconds, and the server always gave the same answer."""
    (tmp_path / "token").write_text("all")
    (adapted.add("broken", 7) / "adapter.bin").write_bytes(b"")
    connection = ["--address", adapted.served.address, "--token-file", str(tmp_path / "token")]
    assert main(["translate", *connection, "--model", "ko-en/broken", TEXT]) == 1
    error = capsys.readouterr().err
    assert "FAILED_PRECONDITION: the adapter ko-en/broken cannot be loaded" in error
    assert "again" not in error
    shutil.rmtree(adapted.folder / "broken")


def test_a_token_uses_and_sees_only_its_own_models(adapted):
    for name in ("legal", "late"):
        target(adapted, f"ko-en/{name}")
    for token, foreign in (
        ("legal", ("ko-en", "ko-en/late", "ko-en/none", "none")),
        ("adapters", ("ko-en", "none", "none/late", "ko-en/late/x")),
        ("base", ("ko-en/legal", "ko-en/late", "none")),
    ):
        rights = TOKENS[token]
        with adapted.client(token) as client, triton(adapted, token) as call:
            for name in foreign:
                for ask_it in (
                    lambda: client.translate(TEXT, model=name),  # noqa: B023
                    lambda: list(client.stream(TEXT, model=name)),  # noqa: B023
                    lambda: list(client.generate_batch([TEXT], model=name)),  # noqa: B023
                    lambda: client.score(TEXT, "I", model=name),  # noqa: B023
                    lambda: client.model(name),  # noqa: B023
                    lambda: client.load(name),  # noqa: B023
                    lambda: client.unload(name),  # noqa: B023
                    lambda: client.versions(name),  # noqa: B023
                ):
                    with pytest.raises(ClientError) as caught:
                        ask_it()
                    assert caught.value.code == "PERMISSION_DENIED"
                    assert caught.value.message == f"token {token} may not use the model {name!r}"
                for method, message in (
                    ("ModelInfer", infer_message(name)),
                    ("ModelReady", pb.ModelReadyRequest(name=name)),
                    ("ModelMetadata", pb.ModelMetadataRequest(name=name)),
                    ("ModelConfig", pb.ModelConfigRequest(name=name)),
                    ("ModelStatistics", pb.ModelStatisticsRequest(name=name)),
                    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name=name)),
                    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(repository_name=name)),
                    ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name)),
                ):
                    with pytest.raises(grpc.RpcError) as refused:
                        call(method, message)
                    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
                answers = call("ModelStreamInfer", iter([infer_message(name)]))
                assert [one.error_message for one in answers] == [
                    f"token {token} may not use the model {name!r}"
                ]
                if name.count("/") < 2:
                    for verb, path in (
                        ("POST", f"/v2/models/{name}/infer"),
                        ("GET", f"/v2/models/{name}/ready"),
                        ("GET", f"/v1/models/{name}"),
                    ):
                        body = infer_body(TEXT) if verb == "POST" else None
                        assert adapted.ask(verb, path, body, token)[0] == 403
            seen = {
                *(one.name for one in client.models()),
                *(one.model for one in client.versions()),
                *(one.name for one in call("RepositoryIndex", pb.RepositoryIndexRequest()).models),
                *(one.name for one in call("ModelStatistics", pb.ModelStatisticsRequest()).model_stats),
                *(one["id"] for one in adapted.ask("GET", "/v1/models", None, token)[1]["data"]),
            }
            if token == "adapters":
                assert seen == {"ko-en/legal", "ko-en/late", "ko-en/third"}
            else:
                assert seen == set(rights)


def test_without_a_name_a_token_gets_its_first_model(adapted):
    names = {"legal": "ko-en/legal", "late": "ko-en/late", "base": "ko-en", "all": "ko-en"}
    for token, name in names.items():
        if token == "late":
            target(adapted, "ko-en/third"), target(adapted, "ko-en/legal")  # it has left
        expected = target(adapted, name)
        assert target(adapted, token=token) == expected
        with adapted.client(token) as client:
            assert client.model().name == name
    with pytest.raises(ClientError, match="PERMISSION_DENIED"):
        target(adapted, token="none")


def test_libretranslate_translates_by_the_adapter_of_a_token(adapted):
    url = f"http://127.0.0.1:{adapted.port}"
    options = {"long_source": "split_always"}
    expected = {}
    with adapted.client() as client:
        for token, model in (("all", "ko-en"), ("legal", "ko-en/legal"), ("late", "ko-en/late")):
            expected[token] = client.translate(TEXT, model=model, options=options)
        client.translate(TEXT, model="ko-en/third")
        client.translate(TEXT, model="ko-en/legal")  # late has left
    for token, text in expected.items():
        assert LibreTranslateAPI(url, api_key=token).translate(TEXT, "ko", "en") == text
    assert len(set(expected.values())) == 3
    assert [one["code"] for one in LibreTranslateAPI(url).languages()] == ["en", "ko"]


def test_a_changed_file_of_tokens_takes_effect(adapted):
    target(adapted, "ko-en/legal", "legal")
    adapted.access.write_text(tokens(TOKENS | {"legal": ["ko-en/late"]}))
    adapted.served.app.calls.access.refresh()
    with pytest.raises(ClientError, match="PERMISSION_DENIED"):
        target(adapted, "ko-en/legal", "legal")
    assert target(adapted, token="legal") == target(adapted, "ko-en/late")
    adapted.access.write_text(tokens(TOKENS))
    adapted.served.app.calls.access.refresh()


@pytest.mark.parametrize("given", ['"ko-en"', "[]", "[1]", '[""]', "{}"])
def test_wrong_names_of_models_are_refused(tmp_path, given):
    path = tmp_path / "access.toml"
    path.write_text(entry("a", "a", "predict") + f"models = {given}\n")
    with pytest.raises(ValueError, match="token 1: models must be a list of the names of models"):
        Access(path)


def test_when_callers_use_all_places_another_adapter_is_refused_for_a_while(adapted):
    app, loop = adapted.served.app, adapted.served.turns.loop
    holding, done = threading.Event(), asyncio.Event()

    async def hold():
        record = CallRecord(request_id="", caller=Caller(""))
        async with app.models.use(record, "ko-en/legal"), app.models.use(record, "ko-en/third"):
            holding.set()
            await done.wait()

    held = asyncio.run_coroutine_threadsafe(hold(), loop)
    assert holding.wait(20)
    with pytest.raises(ClientError, match="RESOURCE_EXHAUSTED: all places for adapters of ko-en") as caught:
        target(adapted, "ko-en/late")
    assert caught.value.retry_after_seconds > 0
    status, headers, _ = ask(
        adapted.port, "POST", "/v2/models/ko-en/late/infer", infer_body(TEXT), authorization="Bearer all"
    )
    assert (status, headers["retry-after"]) == (429, "1")
    with triton(adapted) as call:
        # A probe loads nothing, so it does not see that.
        assert call("ModelReady", pb.ModelReadyRequest(name="ko-en/late")).ready
    assert target(adapted, "ko-en/third") != target(adapted)
    loop.call_soon_threadsafe(done.set)
    held.result(20)
    assert target(adapted, "ko-en/late")


def test_both_repository_services_list_load_replace_and_unload_adapters(adapted):
    with adapted.client() as client, triton(adapted) as call:

        def states() -> dict[str, str]:
            index = call("RepositoryIndex", pb.RepositoryIndexRequest()).models
            listed = {one.model: VersionState.Name(one.state) for one in client.versions()}
            assert listed == {one.name: f"VERSION_STATE_{one.state}" for one in index}
            return {one.name: one.state for one in index}

        adapted.add("new", 8)
        assert states()["ko-en/new"] == "UNAVAILABLE"
        assert client.load("ko-en/new").name == "ko-en/new"
        before, old = client.model("ko-en/new").version, target(adapted, "ko-en/new")
        adapted.add("new", 9)
        assert call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="ko-en/new")).is_loaded
        assert client.model("ko-en/new").version != before
        assert states()["ko-en/new"] == "READY"
        assert target(adapted, "ko-en/new") != old
        page = "/v2/repository/models/ko-en%2Fnew"
        assert adapted.ask("POST", f"{page}/unload") == (200, b"")
        for _ in range(2):
            with pytest.raises(ClientError, match="NOT_FOUND: no model is named 'ko-en/new'"):
                target(adapted, "ko-en/new")
        assert [one.reason for one in client.versions("ko-en/new")] == ["unloaded"]
        assert adapted.ask("POST", f"{page}/load".replace("%2F", "/")) == (200, b"")
        assert target(adapted, "ko-en/new")
        client.unload("ko-en/new")
        call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="ko-en/new"))
        call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="ko-en/new"))
        shutil.rmtree(adapted.folder / "new")
        assert "ko-en/new" not in states()
        with pytest.raises(ClientError, match="NOT_FOUND"):
            client.load("ko-en/new")


def test_no_call_fails_while_the_base_and_its_adapters_are_loaded_anew(adapted):
    old = target(adapted, "ko-en/third")
    done, seen = threading.Event(), set[str]()

    def call() -> int:
        num_calls = 0
        with adapted.client() as client:
            while not done.is_set():
                *_, last = client.stream(TEXT, model="ko-en/third", options=OPTIONS)
                seen.add(last.result.hypotheses[0].text)
                num_calls += 1
        return num_calls

    with ThreadPoolExecutor() as pool, adapted.client() as client:
        try:
            callers = [pool.submit(call) for _ in range(2)]
            client.load("ko-en")
            adapted.add("third", 7)
            client.load("ko-en/third")
            new = target(adapted, "ko-en/third")
        finally:
            done.set()
        assert all(caller.result() for caller in callers)
    assert seen <= {old, new}
    assert old != new


def test_metrics_and_log_have_the_names_of_adapters(adapted, caplog):
    caplog.set_level(logging.INFO)
    served = adapted.served
    before = {
        name: served.metric("seq2seq_requests_total", model_name=name, method="Generate", code="OK")
        for name in ("ko-en", "ko-en/legal")
    }
    num_ended = served.metric("seq2seq_request_success_total", model_name="ko-en")
    target(adapted, "ko-en/legal")
    with adapted.client() as client:
        version = client.model("ko-en/legal").version
    asyncio.run_coroutine_threadsafe(served.until_calls_are_over(), served.turns.loop).result(20)
    assert served.metric("seq2seq_model_info", model_name="ko-en/legal", version=version) == 1
    labels = {"method": "Generate", "code": "OK"}
    assert served.metric("seq2seq_requests_total", model_name="ko-en", **labels) == before["ko-en"]
    assert (
        served.metric("seq2seq_requests_total", model_name="ko-en/legal", **labels)
        == before["ko-en/legal"] + 1
    )
    assert served.metric("seq2seq_request_success_total", model_name="ko-en") == num_ended + 1
    assert served.metric("seq2seq_slots") == 4, "an engine is shown once"
    fields = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert any(one.get("model") == "ko-en/legal" and one["method"] == "Generate" for one in fields)
