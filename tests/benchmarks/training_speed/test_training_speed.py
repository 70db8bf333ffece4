import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training_speed import __main__ as training_speed
from benchmarks.training_speed.__main__ import Work, model_flops, our_trainer
from benchmarks.training_speed.plain_trainer import PlainTrainer
from seq2seq_serve.training.config import EOS_ID
from seq2seq_serve.training.data.batches import BatchShare, make_batch
from seq2seq_serve.training.data.encoded import EncodedPair
from seq2seq_serve.training.presets import PRESETS, Preset, preset_named


@pytest.fixture
def preset() -> Preset:
    sizes = {
        "vocab_size": 300,
        "d_model": 32,
        "d_ff": 64,
        "num_heads": 2,
        "batch_tokens": 200,
        "dropout": 0.0,
    }
    preset = preset_named("demo").changed(sizes)
    return dataclasses.replace(preset, name="toy")


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_plain_loop_learns_the_same_from_the_same_weights(
    preset: Preset, norm: str, tmp_path: Path
) -> None:
    preset = preset.changed({"norm": norm})
    work = Work(preset, steps=1, device=torch.device("cpu"))
    ours = our_trainer(work, tmp_path)
    plain = PlainTrainer(preset.model, preset.training, work.device, work.dtype)
    copy_weights(ours.model, plain.model)
    for _ in range(3):
        share = ours.batches.next_batch()
        loss, _ = ours.train_step(share)
        torch.testing.assert_close(plain.train_step(share), loss, rtol=1e-4, atol=1e-4)


def test_the_table_of_the_readme_is_that_of_the_results() -> None:
    root = Path(__file__).parents[3] / "benchmarks"
    rows = [
        row
        for file in sorted((root / "results").glob("*training-speed*.json"), reverse=True)
        for row in json.loads(file.read_text())["rows"]
    ]
    assert training_speed.table(rows) in (root / "README.md").read_text(encoding="utf-8")


def copy_weights(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    plain.embedding.load_state_dict(model.embedding.state_dict())
    torch_model = plain.transformer
    stacks = [
        (model.encoder_layers, torch_model.encoder.layers, model.encoder_norm, torch_model.encoder.norm),
        (model.decoder_layers, torch_model.decoder.layers, model.decoder_norm, torch_model.decoder.norm),
    ]
    for layers, torch_layers, norm, torch_norm in stacks:
        # torch ends a post-norm stack with a norm, too: of what is normalised already.
        if isinstance(norm, torch.nn.LayerNorm):
            torch_norm.load_state_dict(norm.state_dict())
        for ours, theirs in zip(layers, torch_layers, strict=True):
            attentions = [(ours.self_attention, theirs.self_attn)]
            norms = [ours.self_attention_norm]
            if hasattr(ours, "cross_attention"):
                attentions.append((ours.cross_attention, theirs.multihead_attn))
                norms.append(ours.cross_attention_norm)
            norms.append(ours.feed_forward_norm)
            for attention, torch_attention in attentions:
                parts = attention.query, attention.key, attention.value
                with torch.no_grad():
                    torch_attention.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
                    torch_attention.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
                torch_attention.out_proj.load_state_dict(attention.output.state_dict())
            for number, each in enumerate(norms, start=1):
                getattr(theirs, f"norm{number}").load_state_dict(each.state_dict())
            theirs.linear1.load_state_dict(ours.feed_forward.inner.state_dict())
            theirs.linear2.load_state_dict(ours.feed_forward.outer.state_dict())


def test_flops_are_those_that_are_counted_where_nothing_is_padded(preset: Preset, tmp_path: Path) -> None:
    preset = preset.changed({"num_encoder_layers": 3, "d_ff": 96})
    work = Work(preset, steps=1, device=torch.device("cpu"))
    pairs = [EncodedPair([*range(5, 17), EOS_ID], list(range(7, 16))) for _ in range(6)]
    share = BatchShare([make_batch(pairs)], num_labels=60, num_tokens=138)
    trainer = our_trainer(work, tmp_path)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(share)
    found = sum(model_flops(preset.model, piece) for piece in share.pieces)
    not_counted = 2 * 60 * 300 * 32  # torch counts no product that is added in place: the output's gradient
    assert found == counter.get_total_flops() + not_counted


@pytest.mark.parametrize(("bar", "code"), [(0.0, 0), (1e9, 1)])
def test_the_command_measures_prints_writes_and_judges(
    preset: Preset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bar: float,
    code: int,
) -> None:
    monkeypatch.setitem(PRESETS, "toy", lambda: preset)
    monkeypatch.setitem(training_speed._PEAK_SIZE, "cpu", 64)
    monkeypatch.setattr(training_speed, "_BAR", bar)
    out = tmp_path / "result.json"
    flags = ["--presets", "toy", "--rounds", "3", "--steps", "1", "--batch-tokens", "150", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["training_speed", *flags, "--precision", "bf16"])
    assert training_speed.main() == code
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    (row,) = result["rows"]
    assert (row["batch_tokens"], row["dtype"]) == (150, "bfloat16")
    assert [sorted(speeds) for speeds in row["rounds"]] == 3 * [["ours", "plain", "plain, oneDNN"]]
    # The faster of the plain loops counts.
    medians = {name: sorted(speeds[name] for speeds in row["rounds"])[1] for name in row["rounds"][0]}
    assert row["plain_tokens_per_second"] == max(medians["plain"], medians["plain, oneDNN"])
    ratios = [speeds["ours"] / speeds[row["plain"]] for speeds in row["rounds"]]
    assert row["ratio"] == pytest.approx(sorted(ratios)[1], rel=0.02)
