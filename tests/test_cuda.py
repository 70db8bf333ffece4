"""Tests that need a CUDA device: `pytest -m gpu`, or in `python -m benchmarks.gpu_check --parts tests`."""

import random
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from benchmarks.serving import serving
from seq2seq_serve.bundle.manifest import Bundle, load_bundle
from seq2seq_serve.bundle.names import SOURCE_IDS, Precision
from seq2seq_serve.client import Client
from seq2seq_serve.export.exporter import TOLERANCES, export_bundle
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.engine.request import Request
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.training.config import BOS_ID, EOS_ID
from seq2seq_serve.training.evaluation.search import greedy_search
from tests.server.driver import Driver

pytestmark = pytest.mark.gpu

PRECISIONS = [Precision.FP16, Precision.BF16]


@pytest.fixture(scope="module")
def cuda_bundle(trained_run, tmp_path_factory) -> Path:
    """The trained model in fp16 and bf16, proved on the device."""
    assert "CUDAExecutionProvider" in onnxruntime.get_available_providers(), "onnxruntime-gpu is needed"
    path = tmp_path_factory.mktemp("cuda") / "numbers"
    export_bundle(trained_run.trained, path, [Precision.FP16, Precision.BF16])
    return path


@pytest.fixture(scope="module")
def sources(trained_run) -> list[list[int]]:
    chance = random.Random(0)
    words = "하나", "둘", "셋", "넷", "다섯"
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 4))) for _ in range(60)]
    return trained_run.trained.tokenizer.encode_sources(texts)


def answers(
    bundle: Bundle, sources: list[list[int]], seed: int, *, is_captured: bool, **options
) -> list[list[int]]:
    """The tokens of all, who come one after another in any order."""
    config = RunnerConfig(provider="require", cuda_graphs=is_captured, **options)
    runner = OnnxRunner(bundle, config)
    runner.warm_up()
    assert runner.captures_steps is is_captured
    driver = Driver(runner, tick=1e-5)  # so that a turn has several steps
    requests = [
        Request("r", {SOURCE_IDS: np.array(source)}, len(source), 32, arrival=0.0) for source in sources
    ]
    waiting = list(requests)
    chance = random.Random(seed)
    chance.shuffle(waiting)
    while waiting:
        for _ in range(min(len(waiting), chance.randint(0, 5))):
            driver.submit(waiting.pop())
        driver.turn(chance.randint(0, 3))
    driver.finish()
    return [list(driver.results[request].best.token_ids) for request in requests]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graphs_are_proved_within_their_tolerance(precision, cuda_bundle):
    parity = load_bundle(cuda_bundle).manifest.variants[precision].parity
    assert 0 < parity.max_log_probability_difference <= TOLERANCES[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("num_slots", [1, 3, 16, 64])
def test_served_greedy_is_the_oracle_alone_and_in_any_batch(
    num_slots, is_captured, precision, trained_run, cuda_bundle, sources
):
    """Exactly, though in short floats: this model is sure of its tokens."""
    oracle = greedy_search(
        trained_run.trained.model, sources, bos_id=BOS_ID, eos_id=EOS_ID, max_new_tokens=32
    )
    bundle = load_bundle(cuda_bundle)
    options = {"precision": precision, "max_slots": num_slots, "is_captured": is_captured}
    for seed in range(2):
        assert answers(bundle, sources, seed, **options) == oracle


def test_a_real_server_translates_on_the_device(cuda_bundle):
    with (
        serving(cuda_bundle, ["--provider", "require"]) as server,
        Client(server.address) as client,
    ):
        [model] = client.models()
        assert model.provider == "cuda"
        assert client.translate("하나 둘 셋") == "one two three"
