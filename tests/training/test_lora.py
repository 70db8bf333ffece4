"""Adapters of own runs; those of published models are in tests/export/huggingface/test_tuning.py."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from seq2seq_serve.training import train
from seq2seq_serve.training.__main__ import main
from seq2seq_serve.training.checkpoint import checkpoint_path, list_checkpoints, load_checkpoint
from seq2seq_serve.training.config import BOS_ID, Lora, ModelConfig, TransformerConfig
from seq2seq_serve.training.data.corpus import Corpus
from seq2seq_serve.training.data.encoded import EncodedCorpus
from seq2seq_serve.training.interrupt import TrainingInterrupted
from seq2seq_serve.training.loop import Trainer
from seq2seq_serve.training.lora import (
    Base,
    add_adapter,
    chosen_layers,
    kept_weights,
    linear_layers,
    merged_weights,
    write_adapter,
)
from seq2seq_serve.training.models.captioner import CaptionerConfig
from seq2seq_serve.training.models.memory_network import MemoryNetworkConfig
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import PRESETS, Preset
from seq2seq_serve.training.run import RunFolder, base_of, load_checkpoints, load_run, write_weights

CPU = torch.device("cpu")
MACHINE = ["--threads", "1", "--device", "cpu"]
SETTINGS = {"learning_rate_scale": 0.2, "warmup_steps": 2}
SIZES = {"num_encoder_layers": 1, "num_decoder_layers": 1, "max_source_length": 16, "max_target_length": 16}
TRANSFORMER = TransformerConfig(300, 32, d_ff=64, num_heads=2, tied="none", **SIZES)
CAPTIONER = CaptionerConfig(
    300, 16, d_hidden=16, d_annotation=16, size=16, attention="hard", max_source_length=16
)


@pytest.fixture(autouse=True)
def _toy_preset(monkeypatch: pytest.MonkeyPatch, preset: Preset) -> None:
    monkeypatch.setitem(PRESETS, "toy", lambda: preset)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that are trained once, and that tests do not change."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def base(trained: Path, corpus_files: list[str]) -> Path:
    """A finished run."""
    folder = trained / "base"
    if not folder.exists():
        assert main(["train", "toy", "--out", str(folder), *corpus_files, *MACHINE]) == 0
    return folder


Adapt = Callable[..., RunFolder]


@pytest.fixture
def adapt(base: Path, corpus_files: list[str]) -> Adapt:
    """Trains an adapter of the finished run, or of another one."""

    def adapt(folder: Path, *flags: str, lora: str = "rank=4,dropout=0.1", parent: Path = base) -> RunFolder:
        arguments = ["--out", str(folder), "--from", str(parent), "--lora", lora, *corpus_files]
        settings = "--set", *(f"{name}={value}" for name, value in SETTINGS.items())
        assert main(["train", "toy", *arguments, *MACHINE, *settings, *flags]) == 0
        return RunFolder(folder)

    return adapt


@pytest.fixture
def run(trained: Path, adapt: Adapt) -> RunFolder:
    """An adapter of the finished run."""
    folder = trained / "run"
    return RunFolder(folder) if folder.exists() else adapt(folder)


def last(run: RunFolder) -> dict[str, Tensor]:
    return load_checkpoint(list_checkpoints(run.checkpoints)[-1]).model


def test_an_adapter_learns_and_its_base_stays_as_it_was(base: Path, adapt: Adapt, tmp_path: Path) -> None:
    def content() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}

    before = content()
    run = adapt(tmp_path / "run")
    assert content() == before
    losses = [line["loss"] for line in run.read_metrics() if line["kind"] == "dev"]
    assert losses[-1] < losses[0] < RunFolder(base).read_summary().dev_loss
    config = run.read_config()
    assert config.base is not None
    trainer = Trainer(
        config,
        run,
        run.read_tokenizer(),
        lambda _: EncodedCorpus(run.encoded),
        run.read_pairs("dev"),
        CPU,
        load_checkpoint(checkpoint_path(run.checkpoints, 15)),
    )
    trainer.train(Console(file=StringIO()))
    for name, weight in load_run(base).model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        found = f"{layer}.base_layer.{kind}" if layer in config.base.layers else name
        assert torch.equal(trainer.model.state_dict()[found], weight), name


def test_a_run_keeps_the_weights_of_its_adapter_alone(base: Path, run: RunFolder) -> None:
    config = run.read_config()
    assert config.base is not None
    assert config.training.lora == Lora(4, dropout=0.1)
    assert (config.base.folder, list(config.base.sha256)) == (str(base), ["model.pt"])
    assert len(config.base.layers) == 2 * 2 + 2 * 4  # query and value of each attention
    names = {f"{layer}.lora_{part}.default.weight" for layer in config.base.layers for part in "AB"}
    checkpoint = load_checkpoint(checkpoint_path(run.checkpoints, 20))
    assert checkpoint.model.keys() == names
    (group,) = checkpoint.optimizer["param_groups"]
    assert len(group["params"]) == len(checkpoint.optimizer["state"]) == len(names)
    assert not run.initial_file.exists()
    largest = max(
        file.stat().st_size for file in run.path.rglob("*") if file.suffix in (".pt", ".safetensors")
    )
    assert largest < RunFolder(base).model_file.stat().st_size / 2


def test_a_resumed_adapter_equals_an_uninterrupted_one(
    run: RunFolder, press_ctrl_c: Callable[..., None], tmp_path: Path
) -> None:
    shutil.copytree(run.path, tmp_path / "parts")
    parts = RunFolder(tmp_path / "parts")
    for file in (*list_checkpoints(parts.checkpoints), parts.summary_file, parts.model_file):
        file.unlink()
    shutil.rmtree(parts.adapter)
    press_ctrl_c(7)
    with pytest.raises(TrainingInterrupted):
        continue_run(parts, None, CPU, Console(file=StringIO()))
    continue_run(parts, None, CPU, Console(file=StringIO()))
    expected, found = last(run), last(parts)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert (parts.adapter / "adapter_model.safetensors").read_bytes() == (
        run.adapter / "adapter_model.safetensors"
    ).read_bytes()


def test_an_adapter_is_averaged_scored_and_tuned_further_as_other_runs_are(
    base: Path, run: RunFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus_files: list[str]
) -> None:
    summary = run.read_summary()
    assert main(["score", str(run.path), "--device", "cpu"]) == 0
    assert f"BLEU {summary.dev_bleu:.2f} " in capsys.readouterr().out
    assert main(["score", str(run.path), "--step", "20", "--device", "cpu"]) == 0
    mean = load_checkpoints(run.path, [15, 20])
    assert mean.provenance["weights"] == "average of the checkpoints at steps 15, 20"
    weights = load_run(base).model.state_dict()
    assert weights.keys() == mean.model.state_dict().keys()
    changed = {
        name for name, weight in mean.model.state_dict().items() if not torch.equal(weight, weights[name])
    }
    config = run.read_config()
    assert config.base is not None
    assert changed == {f"{layer}.weight" for layer in config.base.layers}
    whole = tmp_path / "whole"
    flags = ["--out", str(whole), "--from", str(run.path), "--max-steps", "2", *corpus_files, *MACHINE]
    assert main(["train", "toy", *flags]) == 0
    assert RunFolder(whole).read_config().base is None


def test_peft_loads_the_folder_into_the_model_of_the_base(base: Path, adapt: Adapt, tmp_path: Path) -> None:
    run = adapt(tmp_path / "run", "--max-steps", "5", lora="rank=2,alpha=8,targets=all-linear")
    theirs = peft.PeftModel.from_pretrained(load_run(base).model, run.adapter).eval()
    ours = load_run(run.path).model
    source = torch.randint(4, 20, (3, 9))
    inputs = source, source > 0, torch.randint(4, 20, (3, 7))
    with torch.inference_mode():
        torch.testing.assert_close(ours(*inputs), theirs(*inputs), rtol=0, atol=1e-4)
        assert (ours(*inputs) - load_run(base).model(*inputs)).abs().max() > 0.1
    settings = json.loads((run.adapter / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (2, 8)
    assert settings["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize(
    ("config", "targets", "count"),
    [
        (TRANSFORMER, "output", 3 + 1),  # with the projection to logits, which `all-linear` leaves out
        (TRANSFORMER, "all-linear", 3 * 4 + 2 * 2),
        (TRANSFORMER, "decoder_layers.0.cross_attention.query+inner", 1 + 2),
        (RecurrentConfig(300, 16, d_hidden=16, num_encoder_layers=1, num_decoder_layers=2), "all-linear", 9),
        (MemoryNetworkConfig(300, 16, max_source_length=9, tying="layer-wise"), "transition", 1),
        (CAPTIONER, "query+key+readout", 3),
    ],
)
def test_merged_weights_and_the_folder_compute_what_the_layers_compute(
    tmp_path: Path, config: ModelConfig, targets: str, count: int
) -> None:
    torch.manual_seed(0)
    model, lora = make_model(config).eval(), Lora(2, 6.0, targets=targets)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    layers = chosen_layers(linear_layers(model), targets)
    assert len(layers) == count
    add_adapter(model, lora, layers)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.3)
    kept = kept_weights(model)
    own = {f"{layer}.lora_{part}.default.weight" for layer in layers for part in "AB"}
    assert kept.keys() == own | ({"baseline"} if config is CAPTIONER else set())
    merged, loaded, unchanged = (make_model(config).eval() for _ in range(3))
    unchanged.load_state_dict(weights)
    merged.load_state_dict(merged_weights(weights, kept, lora, layers, tmp_path))
    loaded.load_state_dict(weights)
    write_adapter(tmp_path / "adapter", kept, lora, Base("base", {}, {name: name for name in layers}))
    theirs: nn.Module = peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter").eval()
    kind, rng = model.source_kind, np.random.default_rng(0)
    source = kind.tensors([kind.random(rng, length, 300) for length in (3, 5)])
    target = torch.randint(4, 300, (2, 6))
    target[:, 0] = BOS_ID
    with torch.inference_mode():
        expected = model(*source, target)
        for other in (merged, theirs):
            torch.testing.assert_close(other(*source, target), expected, rtol=0, atol=1e-4)
        assert not torch.allclose(expected, unchanged(*source, target), atol=1e-2)


def test_the_base_has_the_number_format_of_matrix_products(adapt: Adapt, tmp_path: Path) -> None:
    """By default that is bfloat16 on a GPU."""
    run = adapt(tmp_path / "run", "--precision", "bf16")
    losses = [line["loss"] for line in run.read_metrics() if line["kind"] == "dev"]
    assert losses[-1] < losses[0]
    assert {weight.dtype for weight in last(run).values()} == {torch.float32}
    config = run.read_config()
    pairs = run.read_pairs("dev")
    trainer = Trainer(config, run, run.read_tokenizer(), lambda _: EncodedCorpus(run.encoded), pairs, CPU)
    dtypes = {name: weight.dtype for name, weight in trainer.model.state_dict().items()}
    assert dtypes["embedding.weight"] == torch.bfloat16
    for layer in config.base.layers if config.base else ():
        assert dtypes[f"{layer}.base_layer.weight"] == torch.bfloat16
        assert dtypes[f"{layer}.lora_A.default.weight"] == torch.float32


def test_a_file_and_a_program_train_the_same_adapter(
    base: Path, adapt: Adapt, tmp_path: Path, corpus_files: list[str]
) -> None:
    command = adapt(tmp_path / "command", "--max-steps", "2", lora="rank=2,alpha=3")
    files = {flag[2:].replace("-", "_"): file for flag, file in zip(*[iter(corpus_files)] * 2, strict=True)}
    values = {
        "preset": "toy",
        "from": str(base),
        "lora": "rank=2,alpha=3",
        "max_steps": 2,
        **files,
        **SETTINGS,
    }
    file = tmp_path / "run.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "file"), *MACHINE]) == 0
    options: dict[str, Any] = {"max_steps": 2, "settings": SETTINGS, "progress": False, "threads": 1, **files}
    lora = {"rank": 2, "alpha": 3}
    program = train("toy", tmp_path / "program", parent=base, lora=lora, device="cpu", **options)
    expected = command.read_config()
    assert expected.training.lora == Lora(2, 3.0)
    for run in (RunFolder(tmp_path / "file"), RunFolder(program.folder)):
        assert run.read_config() == expected
        assert all(torch.equal(weight, last(command)[name]) for name, weight in last(run).items())
        assert load_file(run.adapter / "adapter_model.safetensors").keys()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("rank=0", "rank is 0, and must be at least 1"),
        ("rank=1.5", "rank is 1.5, and must be an integer"),
        ("alpha=0", "alpha is 0"),
        ("alpha=1e999", "alpha is inf"),
        ("alpha=nan", "alpha is 'nan', and must be a number"),
        ("dropout=1", "dropout is 1"),
        ("dropout=-0.1", "dropout is -0.1"),
        ("targets=3", "targets is 3, and must be a text"),
        ("width=3", "width is unknown"),
        ("16", "'16' is not NAME=VALUE"),
    ],
)
def test_a_wrong_value_is_refused_as_wrong_usage(
    lora: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "toy", "--out", str(tmp_path / "run"), "--from", "nowhere", "--lora", lora]
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert f"argument --lora: {message}" in capsys.readouterr().err


def test_what_cannot_be_adapted_is_refused_before_a_run_exists(
    base: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    corpus_files: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = ["train", "toy", "--out", str(tmp_path / "run"), *corpus_files, *MACHINE, "--lora"]
    origin = "--from", str(base)
    for flags, message in (
        (["rank=2"], "--lora needs --from: an adapter changes a finished run or a published model"),
        (
            ["targets=query+q_proj", *origin],
            "targets has 'q_proj', and the linear layers are inner, key, outer, output, query, value; "
            "all-linear is all",
        ),
        (["targets=embedding", *origin], "targets has 'embedding'"),
        (
            ["rank=2", *origin, "--set", "frozen=embedding"],
            "frozen is 'embedding', and must be None with lora",
        ),
    ):
        assert main([*start, *flags]) == 1
        assert message in caplog.messages[-1]
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match=r"peft is missing: .*\[huggingface\]"):
        main([*start, "rank=2", *origin])
    assert not (tmp_path / "run").exists()


def test_a_model_without_linear_layers_has_no_adapter() -> None:
    with pytest.raises(ValueError, match="the model has no linear layers"):
        chosen_layers(linear_layers(make_model(MemoryNetworkConfig(300, 16))), "all-linear")


def test_an_adapter_is_not_for_a_model_with_weights_that_its_base_lacks(
    base: Path, tmp_path: Path, corpus: Corpus, preset: Preset
) -> None:
    parent = load_run(base)
    lora = dataclasses.replace(preset.training, lora=Lora())
    del parent.model.get_submodule("encoder_layers.1").feed_forward
    changed = dataclasses.replace(preset, model=parent.config, training=lora)
    with pytest.raises(
        ValueError,
        match=r"encoder_layers\.1\.feed_forward\.\w+\.weight is not a weight of .*base.*leave --lora out",
    ):
        start_run(
            RunFolder(tmp_path / "run"), changed, corpus, None, parent, base=base_of(base, parent, "query")
        )


def test_another_base_or_none_is_refused_with_its_name(base: Path, adapt: Adapt, tmp_path: Path) -> None:
    base = Path(shutil.copytree(base, tmp_path / "base"))
    run = adapt(tmp_path / "run", "--max-steps", "2", parent=base)
    arguments = ["train", "toy", "--out", str(run.path), "--resume", "--max-steps", "3", *MACHINE]
    file = RunFolder(base).model_file
    content = file.read_bytes()
    write_weights(file, make_model(load_run(base).config).state_dict(), load_run(base).config)

    def message() -> str:
        with pytest.raises(ValueError, match="has an adapter of") as error:
            load_run(run.path)
        return str(error.value)

    assert message() == (
        f"{run.path} has an adapter of {base}, whose weights have changed since (model.pt): "
        "put the former ones back"
    )
    assert main(arguments) == 1
    base.rename(base.with_name("elsewhere"))
    assert message() == (
        f"{run.path} has an adapter of {base}, which cannot be read: put it back, or write its new folder "
        f"into config.json (there is no folder {base})"
    )
    base.with_name("elsewhere").rename(base)
    file.write_bytes(content)
    assert main(arguments) == 0


def test_a_resumed_adapter_keeps_its_settings(
    adapt: Adapt, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    run = adapt(tmp_path / "run", "--max-steps", "2")
    adapt(run.path, "--max-steps", "3", "--resume")
    arguments = ["train", "toy", "--out", str(run.path), "--resume", *MACHINE, "--lora", "rank=8"]
    assert main(arguments) == 1
    assert "cannot change lora from rank=4,dropout=0.1,targets=query+value to rank=8," in caplog.messages[-1]
