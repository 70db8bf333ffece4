"""Drafts under the real engine: they change no token, whatever the model, the mode and the neighbours."""

import dataclasses
import random

import numpy as np
import pytest

from seq2seq_serve import kernels
from seq2seq_serve.bundle.manifest import load_bundle
from seq2seq_serve.bundle.names import SOUND, SOURCE_IDS, Precision
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.runner.sizing import source_specs
from tests.server.fakes import KnowingDrafter
from tests.server.runner.test_families import check_equal, everything
from tests.server.runner.test_selection import run

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="the operators are not compiled")


def check_drafts(bundle, requests, num_slots, precision=Precision.FP32):
    """Right and wrong drafts give the tokens that no drafts give."""
    copies = [dataclasses.replace(request, sources=dict(request.sources)) for request in requests]
    alone = run(bundle, copies, num_slots, precision=precision)
    targets = {
        request: [each.token_ids for each in result.hypotheses]
        for request, result in zip(requests, alone, strict=True)
    }
    drafter = KnowingDrafter(targets, bundle.manifest.target_vocab_size, seed=7)
    drafted = run(bundle, requests, num_slots, precision=precision, seed=1, drafter=drafter)
    check_equal(drafted, alone)
    num_drafted = sum(result.timings.draft_tokens for result in drafted)
    num_accepted = sum(result.timings.accepted_tokens for result in drafted)
    assert num_drafted / 4 < num_accepted < num_drafted


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8, Precision.INT4])
def test_drafts_change_no_answer(precision, random_bundle):
    check_drafts(random_bundle, everything(seed=4), num_slots=9, precision=precision)


@pytest.mark.parametrize(
    "case", ["bart", "whisper", *(pytest.param(case, marks=pytest.mark.slow) for case in ("marian", "nllb"))]
)
def test_drafts_change_no_answer_of_an_imported_model(case, imported):
    bundle = load_bundle(imported(case) / "bundle")
    chance, rng, requests = random.Random(3), np.random.default_rng(3), []
    spec = source_specs(bundle.manifest, Precision.FP32)[0]
    for _ in range(12):
        if spec.name == SOUND:
            sources = {SOUND: rng.standard_normal((spec.axes[1], chance.choice([20, 33, 64])), np.float32)}
        else:
            sources = {SOURCE_IDS: rng.integers(4, bundle.manifest.source_vocab_size, chance.randint(2, 20))}
        length = bundle.manifest.memory.memory_length_of(sources)
        requests.append(Request("r", sources, length, chance.randint(1, 12), 0.0))
    check_drafts(bundle, requests, num_slots=5)
