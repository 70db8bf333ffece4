"""Models of stories, pictures, clips and features: the server's answers are the oracle's, in any batch."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Beam, Request
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from seq2seq_serve.training.data.sources import SourceKind
from seq2seq_serve.training.evaluation.search import beam_search
from seq2seq_serve.training.models.captioner import CaptionerConfig
from seq2seq_serve.training.models.memory_network import MemoryNetworkConfig
from tests.models import random_model
from tests.server.driver import Driver

CAPTIONER = {"d_model": 24, "d_hidden": 24, "d_annotation": 24, "size": 16}
MODELS = {
    "story": (MemoryNetworkConfig, {"d_model": 16, "num_hops": 2}),
    "story-layer-wise": (MemoryNetworkConfig, {"d_model": 16, "tying": "layer-wise", "num_hops": 2}),
    "picture-soft": (CaptionerConfig, CAPTIONER),
    "picture-hard": (CaptionerConfig, CAPTIONER | {"attention": "hard"}),
    "clip-both": (CaptionerConfig, CAPTIONER | {"source": "clip", "is_local": True}),
    "clip-basic": (CaptionerConfig, CAPTIONER | {"source": "clip", "attention": "mean"}),
    "features-soft": (CaptionerConfig, CAPTIONER | {"source": "features", "feature_width": 6}),
    "features-mean": (
        CaptionerConfig,
        CAPTIONER | {"source": "features", "feature_width": 6, "attention": "mean", "tied": "none"},
    ),
}
# Each source, tying and attention once; the tests of the graphs have them in other pairs.
QUICK = "story", "picture-hard", "clip-both", "features-mean"
LENGTHS = 1, 7, 3, 12, 5
BEAMS = 1, 2, 4, 1, 3


def encoded(kind: SourceKind, number: int, length: int, vocab_size: int, folder: Path) -> list[int]:
    """A random source as the kind encodes it."""
    inputs = kind.random(np.random.default_rng(number), length, vocab_size)
    if names.STORY in inputs:
        sentences = [[*sentence[sentence > 0], 0] for sentence in inputs[names.STORY]]
        return np.concatenate([*sentences, inputs[names.QUESTION]]).tolist()
    file = folder / str(number)
    [(name, array)] = inputs.items()
    if name == names.FEATURES:
        with file.open("wb") as stream:
            np.save(stream, array)
    else:
        first, *others = map(Image.fromarray, array if array.ndim == 4 else array[None])
        first.save(file, "PNG", save_all=True, append_images=others)
    return list(str(file).encode())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_answers_and_attention_are_the_oracles_alone_and_in_a_batch(name, tmp_path):
    config_class, settings = MODELS[name]
    trained = random_model(config_class, settings | {"max_source_length": 16})
    model, kind = trained.model, trained.model.source_kind
    export_bundle(trained, tmp_path / "bundle", [Precision.FP32])
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.manifest.sources == dict(kind.forms)
    driver = Driver(OnnxRunner(bundle, RunnerConfig(provider="cpu", num_threads=1, max_slots=12)))
    vocab_size = trained.config.vocab_size
    sources = [encoded(kind, i, length, vocab_size, tmp_path) for i, length in enumerate(LENGTHS)]
    has_attention = settings.get("attention") != "mean"

    def make(source, size):
        beam = Beam(size, alpha=0.6) if size > 1 else None
        attention = {"attention": True} if has_attention else {}
        return Request("r", kind.inputs(source), kind.length(source), 8, 0.0, beam=beam, **attention)

    requests = [make(source, size) for source, size in zip(sources, BEAMS, strict=True)]
    alone, together = make(sources[3], BEAMS[3]), random.Random(0).sample(requests, len(requests))
    driver.submit(alone)
    driver.finish()
    driver.submit(*together)
    driver.finish()
    assert driver.results[alone].best.token_ids == driver.results[requests[3]].best.token_ids
    for request, source in zip(requests, sources, strict=True):
        size = request.beam.size if request.beam else 1
        [expected, *_] = beam_search(
            model,
            source,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            beam_size=size,
            alpha=0.6 if request.beam else 0.0,
            max_new_tokens=8,
        )
        best = driver.results[request].best
        assert list(best.token_ids) == expected.token_ids
        if has_attention:
            target = torch.tensor([[BOS_ID, *expected.token_ids][: len(best.attention)]])
            with torch.inference_mode():
                batch = kind.collate([source])
                _, weights = model.decode_with_attention(target, model.encode(*batch), batch[-1])
                reported = model.reported_attention(weights)[0].numpy()
            np.testing.assert_allclose(best.attention, reported, atol=1e-5)
