"""Captions are scored by the generators' own rules, and pointing by the places of what a word names."""

import random

import numpy as np
import pytest

from benchmarks.quality import captions
from seq2seq_serve.protos.seq2seq_v1_pb2 import FINISH_REASON_EOS, Attention, Hypothesis
from seq2seq_serve.training.__main__ import main as train
from seq2seq_serve.training.builtin import moving_shapes, shapes
from seq2seq_serve.training.data import built_in


def hypothesis_of(text: str, attention: Attention) -> Hypothesis:
    return Hypothesis(text=text, attention=attention, finish_reason=FINISH_REASON_EOS)


def attention_at(words: list[str], places: list[int], num_places: int) -> Attention:
    """All the weight of each word on one place; the end of sequence has more on another."""
    weights = np.zeros((len(words) + 1, num_places), np.float32)
    weights[np.arange(len(words)), places] = 1
    weights[-1, (places[-1] + 1) % num_places] = 2
    tokens = [word if number == 0 else f" {word}" for number, word in enumerate(words)]
    return Attention(target_tokens=[*tokens, "<eos>"], weights=weights.ravel().tolist())


def test_a_look_at_the_named_figure_is_a_hit_and_any_other_is_none():
    scene = next(scene for scene in shapes.generate(50, split="test") if len(scene.figures) > 1)
    text = shapes.caption(scene, random.Random(0))
    words = text.split()
    assert shapes.is_right(scene, text)
    named = shapes.named(scene, text)
    on = [0 if number is None else int(scene.places(number).argmax()) for number in named]
    off = [int((~scene.places(number or 0)).argmax()) for number in named]
    hits = captions.pointing(scene, hypothesis_of(text, attention_at(words, on, 196)))
    assert hits == [True] * sum(number is not None for number in named)
    assert not any(captions.pointing(scene, hypothesis_of(text, attention_at(words, off, 196))))


def test_the_frames_of_an_event_are_its_places():
    clip = next(iter(moving_shapes.generate(1, split="test")))
    text = moving_shapes.caption(clip, random.Random(0))
    named = moving_shapes.named(clip, text)
    on = [0 if number is None else clip.events[number].start for number in named]
    attention = attention_at(text.split(), on, len(clip.frames))
    hits = captions.pointing(clip, hypothesis_of(text, attention))
    assert hits
    assert all(hits)
    assert clip.places(0).sum() == clip.events[0].stop - clip.events[0].start


@pytest.mark.slow  # trainings, exports and servers
@pytest.mark.parametrize("preset", ["captioner", "clip-captioner"])
def test_a_run_is_served_and_scored(preset, tmp_path, capsys, monkeypatch):
    small = {"train": 40, "dev": 4, "test": 6}
    monkeypatch.setattr(built_in, "_NUM_PICTURES", small)
    monkeypatch.setattr(built_in, "_NUM_CLIPS", small)
    settings = ["eval_interval_steps=2", "checkpoint_interval_steps=2", "batch_tokens=800"]
    run = str(tmp_path / "run")
    assert train(["train", preset, "--out", run, "--max-steps", "2", "--set", *settings]) == 0
    assert captions.main([run]) == 0
    assert "| run | " in capsys.readouterr().out
