"""Ten steps of each family have the losses and the weights that were recorded.

They change with whatever learning depends on: the first weights, the order of the batches, dropout, the loss,
the optimizer and the recipe of the preset. A change that is meant comes with new numbers, which the failed
assertion shows.
"""

import dataclasses
from io import StringIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console

from seq2seq_serve.bundle.manifest import LengthBound
from seq2seq_serve.training.data.corpus import Corpus
from seq2seq_serve.training.data.text_files import SentencePair
from seq2seq_serve.training.loop import Trainer
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import preset_named
from seq2seq_serve.training.run import RunFolder

SMALL = {"d_model": 32, "batch_tokens": 60, "max_steps": 10, "checkpoint_interval_steps": 5}
TRANSFORMER = {"d_ff": 64, "num_heads": 2, "vocab_size": 300}
RECURRENT = {"d_hidden": 32, "vocab_size": 300}
STORIES = {"vocab_size": 100, "max_source_length": 9, "max_target_length": 4}
PICTURES = {"vocab_size": 300, "d_hidden": 32, "d_annotation": 16, "size": 16}
# Of each preset: its settings, and the loss of the first and of the tenth step, the distance of the weights
# from the first ones, and the length of the final weights, the mean of two checkpoints.
RECORDED: dict[str, tuple[dict[str, int], tuple[float, ...]]] = {
    "demo": (TRANSFORMER, (5.6199727, 5.2668862, 0.1879732, 42.141711)),
    "tiny": (TRANSFORMER, (6.3733001, 6.4861507, 0.02090109, 56.655322)),
    "base": (TRANSFORMER, (6.2712502, 6.20259, 0.0086201343, 67.67444)),
    "recurrent": (RECURRENT, (5.8143921, 5.7597523, 0.024605187, 26.867506)),
    "recurrent-dot": (RECURRENT, (5.7974939, 5.8179045, 0.023956448, 25.941988)),
    "recurrent-additive": (RECURRENT, (5.9944925, 5.9011998, 0.026585624, 28.00631)),
    "memory-network": (
        STORIES,
        (3.9493616, 3.9078107, 0.011790536, 9.1301829),
    ),
    "captioner": (
        PICTURES,
        (6.1338472, 6.061697, 0.13255263, 36.752238),
    ),
}


def corpus_for(preset: str, folder: Path) -> Corpus:
    """Forty pairs and four for dev."""
    words, colours = ("one", "two", "three", "four", "five"), ("red", "green", "blue")
    pairs = []
    for number in range(44):
        colour, first, second = colours[number % 3], words[number % 5], words[number * 7 % 5]
        if preset == "memory-network":
            story = f"Sam is in room {number}. Sam likes {colour}. What does Sam like?"
            pairs.append(SentencePair(story, colour))
        elif preset == "captioner":
            file = folder / f"{number}.png"
            Image.new("RGB", (16, 16), colour).save(file)
            pairs.append(SentencePair(str(file), f"a {colour} picture of {first}"))
        else:
            text = [first, second, *words[: number % 4]]
            pairs.append(SentencePair(" ".join(text), " ".join(text[::-1])))
    return Corpus("recorded", tuple(pairs[:40]), tuple(pairs[40:]))


def length(weights: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([weight.double().norm() for weight in weights.values()]).norm())


@pytest.mark.parametrize("preset", RECORDED)
def test_ten_steps_are_those_that_were_recorded(preset, tmp_path, monkeypatch):
    settings, recorded = RECORDED[preset]
    losses, before, after = [], {}, {}
    train_step = Trainer.train_step

    def record(trainer, share):
        weights = trainer.model.state_dict()
        if not before:
            before.update({name: weight.clone() for name, weight in weights.items()})
        loss, norm = train_step(trainer, share)
        losses.append(float(loss))
        after.update({name: weight.clone() for name, weight in weights.items()})
        return loss, norm

    monkeypatch.setattr(Trainer, "train_step", record)
    run = RunFolder(tmp_path / "run")
    chosen = preset_named(preset).changed(SMALL | {"eval_interval_steps": 10, "num_averaged": 2} | settings)
    start_run(run, dataclasses.replace(chosen, name=preset), corpus_for(preset, tmp_path))
    summary = continue_run(run, None, torch.device("cpu"), Console(file=StringIO()))
    assert summary.steps == len(losses) == 10
    final = torch.load(run.model_file, weights_only=True)["weights"]
    way = length({name: after[name] - before[name] for name in before})
    assert (losses[0], losses[-1], way, length(final)) == pytest.approx(recorded, rel=1e-4)
    bound = LengthBound(2.0, 10) if settings in (TRANSFORMER, RECURRENT) else None  # of texts
    assert run.read_config().length_bound == bound
