import dataclasses
import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from seq2seq_serve.training import loop
from seq2seq_serve.training.checkpoint import (
    average_weights,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    load_tensors,
)
from seq2seq_serve.training.config import ModelConfig, TrainingConfig, TransformerConfig
from seq2seq_serve.training.data.batches import Batch, BatchShare
from seq2seq_serve.training.data.corpus import Corpus
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.evaluation import scoring
from seq2seq_serve.training.evaluation.scoring import Score, translate
from seq2seq_serve.training.interrupt import TrainingInterrupted
from seq2seq_serve.training.loop import Trainer, compute_dtype
from seq2seq_serve.training.models.captioner import CaptionerConfig
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.reports import curves, meter
from seq2seq_serve.training.reports.curves import save_learning_curve
from seq2seq_serve.training.run import RunFolder, Summary, load_run

CPU = torch.device("cpu")
Train = Callable[..., tuple[RunFolder, Summary]]
RECURRENT = RecurrentConfig(300, 16, 16, 2, 2, cell="lstm", max_source_length=24, max_target_length=24)


@pytest.fixture
def model_config(model_config: TransformerConfig) -> TransformerConfig:
    """One layer on each side: the loop does not know how many there are."""
    return dataclasses.replace(model_config, num_encoder_layers=1, num_decoder_layers=1)


@pytest.fixture
def train(tmp_path: Path, preset: Preset, corpus: Corpus, console: Console) -> Train:
    """Starts a run, or goes on with it where the name was there before."""

    def run(
        name: str, model: ModelConfig = preset.model, device: torch.device = CPU, **changes: object
    ) -> tuple[RunFolder, Summary]:
        folder = RunFolder(tmp_path / name)
        if not folder.is_run:
            recipe = dataclasses.replace(preset.training, **changes)
            start_run(folder, dataclasses.replace(preset, model=model, training=recipe), corpus)
        return folder, continue_run(folder, corpus, device, console)

    return run


def final_weights(folder: RunFolder) -> dict[str, Tensor]:
    return load_tensors(folder.model_file, keys=["weights"])["weights"]


def metrics(folder: RunFolder, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def assert_equal_weights(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize(
    ("at_step", "changes"),
    [
        (13, {"bpe_dropout": 0.2}),
        (15, {"micro_batch_tokens": 20}),
        (13, {"model": RECURRENT}),
    ],
)
def test_a_resumed_run_ends_in_the_same_weights_bit_for_bit(
    train: Train, press_ctrl_c: Callable[[int], None], at_step: int, changes: dict[str, Any]
) -> None:
    whole, whole_summary = train("whole", **changes)
    press_ctrl_c(at_step)
    with pytest.raises(TrainingInterrupted, match=f"interrupted at step {at_step}"):
        train("interrupted", **changes)
    interrupted, summary = train("interrupted")

    newest = [load_checkpoint(checkpoint_path(folder.checkpoints, 20)) for folder in (whole, interrupted)]
    assert_equal_weights(newest[0].model, newest[1].model)
    assert newest[0].batch_index == newest[1].batch_index
    for a, b in zip(*(list(each.optimizer["state"].values()) for each in newest), strict=True):
        assert torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
    assert_equal_weights(final_weights(whole), final_weights(interrupted))
    assert (summary.weights, summary.dev_bleu) == (whole_summary.weights, whole_summary.dev_bleu)
    losses = [[line["loss"] for line in metrics(folder, "dev")] for folder in (whole, interrupted)]
    assert losses[0] == losses[1]


def test_an_evaluation_is_interrupted_between_its_steps_and_made_again(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal waited for all of it."""
    whole, whole_summary = train("whole")
    steps: list[int] = []  # by the number of the evaluation
    number, of_final_weights = 0, 3

    def interrupted(*arguments: Any, before_step: Callable[[], None], **options: Any) -> list[str]:
        nonlocal number
        number += 1

        def counted() -> None:
            steps.append(number)
            if steps.count(of_final_weights) == 2:
                signal.raise_signal(signal.SIGTERM)
            before_step()

        return translate(*arguments, before_step=counted, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "translate", interrupted)
        with pytest.raises(TrainingInterrupted, match="interrupted at step 20"):
            train("interrupted")
    assert steps.count(of_final_weights) == 2
    folder, summary = train("interrupted")
    assert dataclasses.replace(summary, seconds=0.0) == dataclasses.replace(whole_summary, seconds=0.0)
    assert_equal_weights(final_weights(whole), final_weights(folder))
    lines = [[(line["step"], line["loss"]) for line in metrics(each, "dev")] for each in (whole, folder)]
    assert lines[0] == lines[1]


def test_an_interrupt_ends_the_loss_of_an_evaluation_too(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    make = scoring.batches_in_order

    def interrupted(*arguments: Any) -> Iterator[Batch]:
        for batch in make(*arguments):
            batches.append(batch)
            signal.raise_signal(signal.SIGTERM)
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "batches_in_order", interrupted)
        with pytest.raises(TrainingInterrupted, match="interrupted at step 10"):
            train("run", batch_tokens=10)
    assert len(batches) == 1
    folder, _ = train("run")
    assert [line["step"] for line in metrics(folder, "dev")] == [10, 20]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "damaged", "weights"),
    [
        (cut, [10], "average of the checkpoints at steps 15, 20"),  # the best one
        (flip_a_bit, [10, 15], "average of the checkpoints at steps 20"),
        (Path.unlink, [10, 15, 20], "weights of step 20"),
    ],
)
def test_a_run_is_finished_whatever_checkpoints_are_damaged(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    damaged: list[int],
    weights: str,
) -> None:
    """A damaged checkpoint of the best step made every --resume fail, with all training done."""
    values = iter([30.0, 20.0, 25.0])
    monkeypatch.setattr(loop, "score", lambda *_: Score(next(values), "b", 0.0, "c", 0.0, 0.0, 0.0))
    finish = Trainer._finish

    def damage_and_finish(self: Trainer) -> Summary:
        for step in damaged:
            damage(checkpoint_path(self.folder.checkpoints, step))
        return finish(self)

    monkeypatch.setattr(Trainer, "_finish", damage_and_finish)
    folder, summary = train("run")
    assert (summary.weights, summary.dev_bleu) == (weights, 25.0)
    assert load_run(folder.path).dev_score == 25.0
    for step in damaged if damage is not Path.unlink else [10]:
        assert re.search(rf"not considered for the final weights.*step-0*{step}\.pt: ", caplog.text)


def test_dropout_and_order_depend_on_the_seed(train: Train) -> None:
    first, _ = train("first")
    other, _ = train("other", seed=1)
    assert not torch.equal(final_weights(first)["embedding.weight"], final_weights(other)["embedding.weight"])


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_of_that_step_and_python_its_handlers(
    train: Train, press_ctrl_c: Callable[..., None], tmp_path: Path, signal_number: int
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    press_ctrl_c(7, signal_number)
    with pytest.raises(TrainingInterrupted) as caught:
        train("run")
    assert (caught.value.step, caught.value.signal_number) == (7, signal_number)
    folder = RunFolder(tmp_path / "run")
    assert load_checkpoint(list_checkpoints(folder.checkpoints)[-1]).step == 7
    assert not folder.is_finished
    assert not folder.model_file.exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_ends_at_once(train: Train, press_ctrl_c: Callable[[int], None]) -> None:
    press_ctrl_c(7)
    press_ctrl_c(7)
    with pytest.raises(KeyboardInterrupt) as caught:
        train("run")
    assert not isinstance(caught.value, TrainingInterrupted)


def test_final_weights_are_the_average_or_the_best_whichever_scores_better(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(*bleus: float) -> None:
        values = iter(bleus)
        monkeypatch.setattr(loop, "score", lambda *_: Score(next(values), "b", 0.0, "c", 0.0, 0.0, 0.0))

    # Two evaluations on the way, then the average, then the chosen one again if it is a single checkpoint.
    scores(30.0, 20.0, 40.0)
    folder, summary = train("average")
    assert summary.weights == "average of the checkpoints at steps 15, 20"
    assert summary.dev_bleu == 40.0
    paths = [checkpoint_path(folder.checkpoints, step) for step in (15, 20)]
    assert_equal_weights(final_weights(folder), average_weights(paths))

    scores(30.0, 20.0, 25.0, 30.0)
    folder, summary = train("best")
    assert summary.weights == "checkpoint at step 10"
    assert_equal_weights(
        final_weights(folder), load_checkpoint(checkpoint_path(folder.checkpoints, 10)).model
    )


def test_a_run_that_goes_on_keeps_what_was_better_before(
    train: Train, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    values = iter([30.0, 20.0, 40.0, 35.0, 39.0, 35.0, 41.0])
    monkeypatch.setattr(loop, "score", lambda *_: Score(next(values), "b", 0.0, "c", 0.0, 0.0, 0.0))
    folder, first = train("run")
    weights = final_weights(folder)
    second = continue_run(folder, None, CPU, console, {"max_steps": 22})
    assert second == dataclasses.replace(first, steps=22, seconds=second.seconds)
    assert load_run(folder.path).dev_score == 40.0
    assert_equal_weights(final_weights(folder), weights)
    third = continue_run(folder, None, CPU, console, {"max_steps": 24})
    assert (third.dev_bleu, third.steps) == (41.0, 24)
    assert not torch.equal(final_weights(folder)["embedding.weight"], weights["embedding.weight"])


def test_training_stops_when_the_dev_score_has_stopped_rising(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([10.0, 20.0, 15.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(loop, "score", lambda *_: Score(next(values), "b", 0.0, "c", 0.0, 0.0, 0.0))
    folder, summary = train("run", max_steps=100, eval_interval_steps=3, patience=2)
    assert summary.steps == 12
    assert [line["step"] for line in metrics(folder, "dev")] == [3, 6, 9, 12]


@pytest.mark.parametrize(("cooldown_share", "last_step"), [(0.0, 8), (0.1, 9), (0.2, 10), (0.6, 20)])
def test_patience_begins_the_cooldown_and_does_not_leave_it_out(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    press_ctrl_c: Callable[[int], None],
    cooldown_share: float,
    last_step: int,
) -> None:
    """With 0.6 a run of 40 steps cools from step 16 on, and one that ends at 20 from step 8 on."""
    monkeypatch.setattr(loop, "score", lambda *_: Score(next(values), "b", 0.0, "c", 0.0, 0.0, 0.0))
    monkeypatch.setattr(loop, "_REPORT_INTERVAL_STEPS", 1)
    recipe = {"max_steps": 40, "eval_interval_steps": 2, "patience": 3, "warmup_steps": 1}
    rates = []
    for name in ("whole", "interrupted"):
        values = iter([20.0, *[10.0] * 20])  # out of patience at step 8
        if name == "interrupted":
            press_ctrl_c(last_step - 1)
            with pytest.raises(TrainingInterrupted):
                train(name, **recipe, cooldown_share=cooldown_share)
        folder, summary = train(name, **recipe, cooldown_share=cooldown_share)
        assert summary.steps == last_step
        rates.append([line["learning_rate"] for line in metrics(folder, "train")])
    assert rates[0] == rates[1]
    num_cooled = last_step - 8
    undiminished = [rates[0][7] * (8 / step) ** 0.5 for step in range(9, last_step + 1)]
    shares = [rate / whole for rate, whole in zip(rates[0][8:], undiminished, strict=True)]
    assert shares == pytest.approx([left / num_cooled for left in range(num_cooled, 0, -1)])


def test_pieces_and_empty_shares_move_the_baseline_of_hard_attention_as_a_whole_batch_does(
    tmp_path: Path, console: Console
) -> None:
    """Each piece moved it, by the mean of that piece alone."""
    for number in range(12):
        np.save(tmp_path / f"{number}.npy", np.full((1, 3), number / 12, np.float32))  # one place to draw
    pairs = tuple(SentencePair(f"{n}.npy", "red " * (n % 3 + 1) + f"cross {n}") for n in range(12))
    corpus = Corpus("features", pairs[2:], pairs[:2], folder=tmp_path)
    model = CaptionerConfig(
        300,
        8,
        d_annotation=8,
        d_hidden=8,
        source="features",
        feature_width=3,
        attention="hard",
        soft_share=0.0,
        dropout=0.0,
        max_target_length=24,
    )
    recipe = TrainingConfig(max_steps=3, batch_tokens=200, max_length_ratio=None, warmup_steps=1)
    found = []
    for name, piece_tokens in (("whole", None), ("pieces", 30)):
        folder = RunFolder(tmp_path / name)
        recipe = dataclasses.replace(recipe, micro_batch_tokens=piece_tokens)
        start_run(folder, Preset("features", model, recipe), corpus)
        continue_run(folder, corpus, CPU, console)
        found.append(load_checkpoint(checkpoint_path(folder.checkpoints, 3)).model)
    assert found[0]["baseline"][:3].max() < -0.5
    torch.testing.assert_close(found[0]["baseline"], found[1]["baseline"])


def test_only_the_newest_and_the_best_checkpoints_are_kept(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([10.0, *[5.0] * 20])
    monkeypatch.setattr(loop, "score", lambda *_: Score(next(values), "b", 0.0, "c", 0.0, 0.0, 0.0))
    folder, _ = train("run", max_steps=30, eval_interval_steps=5)
    steps = [load_checkpoint(path).step for path in list_checkpoints(folder.checkpoints)]
    assert steps == [5, 25, 30]


def test_metrics_are_written_and_shown_in_tensorboard(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "save_learning_curve", save_learning_curve)
    folder, summary = train("run")
    (line,) = metrics(folder, "train")
    assert line["step"] == 20
    assert line["tokens_per_second"] > 0
    assert line["learning_rate"] == pytest.approx(0.2 * 32**-0.5 * 20**-0.5)
    assert [line["step"] for line in metrics(folder, "dev")] == [10, 20]
    assert list(folder.tensorboard.glob("events.out.tfevents.*"))
    assert folder.curve_file.read_bytes().startswith(b"\x89PNG")
    assert "tok:13a" in summary.bleu_signature


def test_a_loss_that_is_not_finite_ends_training_with_advice(train: Train) -> None:
    with pytest.raises(
        ValueError,
        match=r"gradients of the last 19 steps until step 20 were not finite: train again with a lower",
    ):
        train("run", learning_rate_scale=1e30, max_gradient_norm=1e30)


@pytest.mark.parametrize("bad_steps", [(4,), (7, 8, 9)])
def test_steps_without_finite_gradients_are_skipped_and_logged(
    train: Train,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bad_steps: tuple[int, ...],
) -> None:
    backward = Trainer._backward
    weights: dict[int, Tensor] = {}

    def spoilt(self: Trainer, share: BatchShare) -> Tensor:
        weights[self.step - 1] = self.model.embedding.weight.detach().clone()
        loss = backward(self, share)
        if self.step in bad_steps:
            self.model.decoder_layers[0].self_attention.query.bias.grad[0] = math.nan
        return loss

    monkeypatch.setattr(Trainer, "_backward", spoilt)
    folder, _ = train("run")
    for step in range(1, 20):
        assert torch.equal(weights[step - 1], weights[step]) == (step in bad_steps)
    (line,) = metrics(folder, "train")
    assert line["skipped_steps"] == len(bad_steps)
    assert math.isfinite(line["loss"])
    assert f"step 20: skipped {len(bad_steps)} of 20 steps, whose gradients were not finite" in caplog.text


def test_a_run_that_diverges_ends_with_advice_and_keeps_its_best_checkpoint(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(meter, "_DIVERGED_STEPS", 40)
    recipe = {"max_steps": 400, "eval_interval_steps": 20, "patience": None, "warmup_steps": 20}

    def rising(step: int, d_model: int, config: TrainingConfig, last_step: int) -> float:
        return 1e-3 if step < 100 else 0.25

    monkeypatch.setattr(loop, "learning_rate", rising)
    values = iter([10.0, 30.0, *[20.0] * 20])
    monkeypatch.setattr(loop, "score", lambda *_: Score(next(values), "b", 0.0, "c", 0.0, 0.0, 0.0))
    with pytest.raises(
        ValueError,
        match=r"loss has been 1 nat above its best, .*: train again .* best checkpoint, of step \d+, is kept",
    ) as caught:
        train("run", **recipe)
    step = int(str(caught.value).split("of step ")[1].split(",")[0])
    assert step == 40
    assert load_checkpoint(checkpoint_path(RunFolder(tmp_path / "run").checkpoints, step)).step == step


def test_a_run_that_ends_far_above_its_best_loss_logs_advice(
    train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "learning_rate", lambda step, *_: 1e-3 if step < 40 else 10.0)
    train("run", max_steps=80, eval_interval_steps=80)
    assert re.search(r"the training loss has been .* steps up to the last one: train again", caplog.text)
    assert "is kept" not in caplog.text  # the only evaluation came too late


def test_accumulated_pieces_are_one_batch(train: Train, preset: Preset) -> None:
    model = dataclasses.replace(preset.model, dropout=0.0)
    whole, _ = train("whole", model, learning_rate_scale=0.01)
    pieces, _ = train("pieces", model, learning_rate_scale=0.01, micro_batch_tokens=20)
    (a,), (b,) = metrics(whole, "train"), metrics(pieces, "train")
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-6)
    found = [load_checkpoint(checkpoint_path(each.checkpoints, 20)).model for each in (whole, pieces)]
    for name in found[0]:
        # Rounding, of which Adam makes more where a gradient is almost 0; 20 steps move weights by 1e-2.
        torch.testing.assert_close(found[0][name], found[1][name], rtol=0, atol=5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.02)])
def test_a_gpu_learns_what_a_cpu_learns(
    train: Train, preset: Preset, precision: str, tolerance: float
) -> None:
    model = dataclasses.replace(preset.model, dropout=0.0)
    cpu, _ = train("cpu", model)
    cuda, _ = train("cuda", model, torch.device("cuda"), precision=precision)
    for kind in ("train", "dev"):
        losses = [[line["loss"] for line in metrics(folder, kind)] for folder in (cpu, cuda)]
        assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def runs_an_lstm_in_bf16() -> bool:
    """Whether oneDNN has an LSTM in bf16 for this processor: it needs AVX-512."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(4, 4)(torch.zeros(2, 3, 4))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(
    "model",
    [
        None,
        dataclasses.replace(RECURRENT, cell="gru"),
        pytest.param(
            RECURRENT,
            marks=pytest.mark.skipif(not runs_an_lstm_in_bf16(), reason="refused on this processor"),
        ),
    ],
    ids=["transformer", "gru", "lstm"],
)
def test_precision_is_chosen_for_the_matrices_and_weights_stay_as_they_are(
    train: Train, preset: Preset, model: ModelConfig | None
) -> None:
    full, _ = train("full", model or preset.model)
    half, _ = train("half", model or preset.model, precision="bf16")
    losses = [metrics(folder, "train")[0]["loss"] for folder in (full, half)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # bf16 has 8 bits of precision
    assert {weight.dtype for weight in final_weights(half).values()} == {torch.float32}


def test_a_processor_without_an_lstm_in_bf16_is_refused_before_the_first_step(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in a RuntimeError of oneDNN at the first batch whose rows were all equally long."""
    forward = torch.nn.LSTM.forward

    def forward_without_avx512(self: torch.nn.LSTM, *inputs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation")
        return forward(self, *inputs)

    monkeypatch.setattr(torch.nn.LSTM, "forward", forward_without_avx512)
    message = "torch cannot run an LSTM layer in bf16 on this CPU: train with --precision fp32"
    with pytest.raises(ValueError, match=message):
        train("half", RECURRENT, precision="bf16")
    assert not RunFolder(tmp_path / "half").metrics_file.exists()
    _, summary = train("full", RECURRENT, max_steps=1)
    assert summary.steps == 1


def test_dev_loss_is_per_token_whatever_the_batches(
    tmp_path: Path, preset: Preset, corpus: Corpus, console: Console
) -> None:
    losses = []
    for name, batch_tokens in (("small", 30), ("large", 500)):
        folder = RunFolder(tmp_path / name)
        recipe = dataclasses.replace(preset.training, max_steps=1, learning_rate_scale=1e-9)
        start_run(folder, dataclasses.replace(preset, training=recipe), corpus)
        config = folder.read_config()
        config = dataclasses.replace(
            config, training=dataclasses.replace(config.training, batch_tokens=batch_tokens)
        )
        folder.write_config(config)
        continue_run(folder, corpus, CPU, console)
        losses.append(metrics(folder, "dev")[0]["loss"])
    assert math.isclose(losses[0], losses[1], rel_tol=1e-4)


@pytest.mark.parametrize(("has_units", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_multiplies_in_bf16_by_default_only_where_it_has_units_for_it(has_units, dtype, monkeypatch):
    """A T4 and a V100 emulate it, slower than float32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_units)
    assert compute_dtype(None, torch.device("cuda")) is dtype
    assert compute_dtype("bf16", torch.device("cuda")) is torch.bfloat16
    assert compute_dtype(None, torch.device("cpu")) is torch.float32
