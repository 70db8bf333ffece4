import os
import re
import shutil
from pathlib import Path

import pytest

from seq2seq_serve.bundle.adapters import adapter_version
from seq2seq_serve.server.__main__ import main, parse_command
from tests.models import adapter_folder, random_adapter


@pytest.fixture
def settings(tmp_path):
    """The settings that a file, an environment and a command line give."""

    def parse(text: str = "", environment=(), *arguments: str):
        file = tmp_path / "server.toml"
        file.write_text(text)
        flags = ["--config", str(file)] if text else []
        return parse_command([*flags, *arguments], {"SEQ2SEQ_REPOSITORY": "models", **dict(environment)})

    return parse


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(settings):
    file, environment = "max_slots = 1\nport = 1\nhost = 'a'", {"SEQ2SEQ_PORT": "2", "SEQ2SEQ_HOST": "b"}
    config = settings(file, {"SEQ2SEQ_INSECURE": "1", **environment}, "--host", "c").server
    assert (config.runner.max_slots, config.port, config.host) == (1, 2, "c")


def test_bundles_with_names_are_lists_everywhere(settings):
    named = (("a", Path("b")), ("c", Path("d=e")))
    flags = ["--model-name", "a=b", "--model-name", "c=d=e"]
    assert settings('model_name = ["a=b", "c=d=e"]').server.named_bundles == named
    assert settings("", {"SEQ2SEQ_MODEL_NAME": "a=b:c=d=e"}).server.named_bundles == named
    assert settings("", {}, *flags).server.named_bundles == named
    assert settings("", {"SEQ2SEQ_MODEL_NAME": "x=y"}, *flags).server.named_bundles == named


def test_every_kind_of_setting_can_come_from_either(settings, tmp_path):
    file = """
        bundles = ["one", "two"]
        max_slots_size = "2MiB"
        drain_seconds = 1.5
        insecure = true
        no_cuda_graphs = true
        provider = "cpu"
        access_file = "access.toml"
    """
    environment = {
        "SEQ2SEQ_BUNDLES": os.pathsep.join(["one", "two"]),
        "SEQ2SEQ_MAX_SLOTS_SIZE": "2MiB",
        "SEQ2SEQ_DRAIN_SECONDS": "1.5",
        "SEQ2SEQ_INSECURE": "1",
        "SEQ2SEQ_NO_CUDA_GRAPHS": "true",
        "SEQ2SEQ_PROVIDER": "cpu",
        "SEQ2SEQ_ACCESS_FILE": "access.toml",
    }
    flags = ["one", "two", "--max-slots-size", "2MiB", "--drain-seconds", "1.5", "--insecure"]
    flags += ["--no-cuda-graphs", "--provider", "cpu", "--access-file", "access.toml"]
    expected = settings("", (), *flags)
    assert expected.bundles == (Path("one"), Path("two"))
    assert expected.server.runner.cuda_graphs is False
    assert settings(file) == settings("", environment) == expected


def test_a_switch_can_be_switched_off(settings):
    assert not settings("insecure = false").server.is_insecure
    assert settings("no_reflection = false").server.has_reflection
    assert not settings("insecure = true", {"SEQ2SEQ_INSECURE": "false"}).server.is_insecure


def test_a_model_can_have_limits_of_its_own(settings):
    file = """
        max_slots = 16
        max_waiting_requests = 100
        [models.small]
        max_slots = 64
        precision = "int8"
        [models.'large-1']
        max_waiting_requests = 3
    """
    config = settings(file, {"SEQ2SEQ_MAX_SLOTS": "32"}).server
    assert config.of_model("other") == config
    small, large = config.of_model("small"), config.of_model("large-1")
    assert (config.runner.max_slots, small.runner.max_slots, large.runner.max_slots) == (32, 64, 32)
    assert (config.runner.precision, small.runner.precision) == (None, "int8")
    assert small.queue.max_waiting_requests == 100
    assert large.queue.max_waiting_requests == 3
    assert small.port == config.port


def test_the_variable_of_the_operators_causes_no_warning(settings, caplog):
    settings(environment={"SEQ2SEQ_ISA": "avx2"})
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "environment", "flags", "warning"),
    [
        ("memory_budget = '2MiB'", {}, [], "memory_budget is called max_slots_size now"),
        (
            "",
            {"SEQ2SEQ_MEMORY_BUDGET": "2MiB"},
            [],
            "SEQ2SEQ_MEMORY_BUDGET is called SEQ2SEQ_MAX_SLOTS_SIZE now",
        ),
        ("", {}, ["--memory-budget", "2MiB"], "--memory-budget is called --max-slots-size now"),
    ],
)
def test_a_former_name_works_with_a_warning(settings, caplog, text, environment, flags, warning):
    config = settings(text, environment, *flags)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(warning)
    assert config == settings("max_slots_size = '2MiB'") != settings()
    assert len(caplog.messages) == 1


def test_every_former_name_is_that_of_one_setting(settings, caplog):
    config = settings("[models.a]\nmemory_budget = '2MiB'", {"SEQ2SEQ_MEMORY_LIMIT": "4MiB"}).server
    assert config.of_model("a").runner.max_slots_size_bytes == 2**21
    assert config.max_models_size_bytes == 2**22
    assert caplog.messages[0].endswith("SEQ2SEQ_MEMORY_LIMIT is called SEQ2SEQ_MAX_MODELS_SIZE now")
    assert caplog.messages[1].endswith("server.toml: models.a.memory_budget is called max_slots_size now")


def test_a_new_name_comes_before_the_former_one(settings):
    environment = {"SEQ2SEQ_MAX_SLOTS_SIZE": "1MiB", "SEQ2SEQ_MEMORY_BUDGET": "2MiB"}
    assert settings("", environment) == settings("max_slots_size = '1MiB'")


def test_a_former_name_is_not_in_the_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--max-slots-size SIZE" in shown
    assert "memory-budget" not in shown


def test_a_variable_that_is_not_ours_is_left_alone(settings):
    environment = {"SEQ2SEQ_SERVICE_HOST": "10.0.0.1", "SEQ2SEQ_PORT_50051_TCP": "x"}
    assert settings("", environment) == settings()


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        (
            "slots = 3",
            {},
            "server.toml: slots: there is no such setting here, only bundles, check, model_name",
        ),
        ("port = 'x'", {}, "server.toml: port is 'x', and must be an integer"),
        ("bundles = 'one'", {}, "server.toml: bundles is 'one', and must be a list"),
        ("port = [1]", {}, r"server.toml: port is \[1\], and must be an integer"),
        ("port = true", {}, "server.toml: port is 'True', and must be an integer"),
        ("port = 65536", {}, "server.toml: port is 65536, and must be at most 65535"),
        ("drain_seconds = inf", {}, "server.toml: drain_seconds is inf, and must be a finite number"),
        ("insecure = 'maybe'", {}, "server.toml: insecure is 'maybe', and must be true or false"),
        ("tls_key = ''", {}, "server.toml: tls_key is empty"),
        ("provider = 'tpu'", {}, "server.toml: provider is 'tpu', and must be 'require', 'prefer' or 'cpu'"),
        (
            "allow_origins = 'x'",
            {},
            "server.toml: allow_origins is 'x', and must be origins such as https://",
        ),
        ("", {"SEQ2SEQ_MAX_SLOTS_SIZE": "MiB"}, "SEQ2SEQ_MAX_SLOTS_SIZE is 'MiB': could not parse"),
        ("", {"SEQ2SEQ_MAX_SLOTS_SIZE": "-1"}, "SEQ2SEQ_MAX_SLOTS_SIZE is '-1': could not parse"),
        ("", {"SEQ2SEQ_MODEL_NAME": "a=b:c"}, "SEQ2SEQ_MODEL_NAME is 'c', and must be NAME=FOLDER"),
        ("port = ", {}, "server.toml is not valid TOML"),
        ("max_slots = 0", {}, "server.toml: max_slots is 0, and must be at least 1"),
        ("port = " + "[" * 10_000, {}, "server.toml is not valid TOML"),
        ("models.a = 3", {}, r"write a table \[models.NAME\] for each model"),
        (
            "[models.a]\nport = 3",
            {},
            "server.toml: models.a.port: there is no such setting here, only provider, precision",
        ),
        (
            "",
            {"SEQ2SEQ_MAX_SLOT": "1"},
            "SEQ2SEQ_MAX_SLOT: there is no such setting; did you mean SEQ2SEQ_MAX_SLOTS",
        ),
        ("", {"SEQ2SEQ_CONFIG": "/none.toml"}, "/none.toml: No such file"),
    ],
)
def test_a_wrong_setting_exits_2_and_says_where(settings, text, environment, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        settings(text, environment)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), ("1048576", 2**20), ("512MiB", 512 * 2**20), ("2 GiB", 2**31), (" 4KiB ", 4096)],
)
def test_sizes_are_read_as_people_write_them(settings, text, num_bytes):
    assert settings("", {}, "--max-slots-size", text).server.runner.max_slots_size_bytes == num_bytes


def test_check_says_what_would_be_served(bundle_path, capsys):
    main(["--check", str(bundle_path), "--provider", "cpu", "--max-slots", "7"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("random: version ")
    assert "int8 on cpu" in line
    assert ", 7 slots, at most" in line


def test_check_takes_the_newest_version_that_can_be_served_as_the_start_does(bundle_path, tmp_path, capsys):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "good" / "1").symlink_to(bundle_path)
    for broken in ("good/2", "bad/1"):
        shutil.copytree(bundle_path, tmp_path / broken)
        (tmp_path / broken / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit, match="1"):  # it was 0
        main(["--check", "--repository", str(tmp_path), "--provider", "cpu"])
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert line.startswith("good: version 1, int8 on cpu")
    for problem in ("model good: version 2 cannot be served: ", "model bad: version 1 cannot be served: "):
        assert err.count(problem) == 1
    with pytest.raises(SystemExit, match="1"):
        main(["--check", str(tmp_path / "bad" / "1")])
    assert capsys.readouterr().err.count("is not a usable bundle") == 1  # the log had it, too


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-models-size", "1MiB"], " MiB, and may take 1.0 MiB: raise"),
        (["--max-slots-size", "1KiB"], "a slot takes"),
        (["--access-file", "none.toml"], "No such file"),
        (["--tls-certificate", "none.pem", "--tls-key", "none.key"], "No such file"),
    ],
)
def test_check_exits_1_for_what_would_fail(bundle_path, capsys, flags, message):
    with pytest.raises(SystemExit, match="1"):
        main(["--check", str(bundle_path), "--provider", "cpu", *flags])
    assert message in capsys.readouterr().err


def test_check_reads_adapters_for_every_model_and_counts_their_memory(
    adapted_bundle, bundle_path, tmp_path, capsys
):
    checksum = adapted_bundle.manifest.adapted_checksum
    legal = adapter_folder(tmp_path / "legal", checksum, random_adapter(adapted_bundle, 1, 3))
    adapter_folder(tmp_path / "all" / "late", checksum, random_adapter(adapted_bundle, 2, 2))
    bundles = ["--check", f"{adapted_bundle.path}", f"{bundle_path}", "--provider", "cpu"]
    given = ["--adapter", f"legal={legal}", "--adapters", f"{tmp_path / 'all'}"]
    num_bytes = []
    for flags in ([], given, [*given, "--max-adapters", "1000"]):
        main([*bundles, *flags])
        line, *adapters, other = capsys.readouterr().out.splitlines()
        assert line.startswith("b: version ")
        assert other.startswith("random: version ")
        num_bytes.append(int(re.search(r"at most (\d+) MiB", line)[1]))
        names = ("legal", "late") if flags else ()
        assert [one.partition(",")[0] for one in adapters] == [
            f"b/{name}: version {adapter_version(path)}"
            for name, path in zip(names, (legal, tmp_path / "all" / "late"), strict=False)
        ]
        assert all(re.search(", an adapter of rank [23]$", one) for one in adapters)
    assert num_bytes == sorted(set(num_bytes))
    for name, message in (
        ("legal", f"the adapter {legal} cannot be served: {legal} does not fit the model random: the model"),
        ("en/legal", "the adapter en/legal cannot be served: its model is not served, or"),
    ):
        with pytest.raises(SystemExit, match="1"):
            main(["--check", f"{bundle_path}", "--provider", "cpu", "--adapter", f"{name}={legal}"])
        assert message in capsys.readouterr().err
    (tmp_path / "all" / "late" / "adapter.bin").write_bytes(b"")
    for flags, message in (
        (given, "adapter.bin was changed"),
        ([*given, "--max-rank", "2"], "its rank is 3"),
    ):
        with pytest.raises(SystemExit, match="1"):
            main([*bundles, *flags])
        assert message in capsys.readouterr().err


def test_adapters_are_named_and_bounded_for_each_model(settings):
    file = """
adapter = ["legal=a", "ko-en/medical=b"]
max_adapters = 4

[models."ko-en"]
max_adapters = 2
max_rank = 8
"""
    command = settings(file, {"SEQ2SEQ_ADAPTERS": "all"})
    server = command.server
    assert server.named_adapters == (("legal", Path("a")), ("ko-en/medical", Path("b")))
    assert server.adapters == Path("all")
    sizes = {
        name: (runner.max_adapters, runner.max_rank, runner.has_adapters)
        for name in ("ko-en", "other")
        for runner in [server.of_model(name).model_runner]
    }
    assert sizes == {"ko-en": (2, 8, True), "other": (4, 64, True)}
    assert not settings().server.model_runner.has_adapters
