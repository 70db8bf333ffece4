"""A server with a small Whisper, and a noise that it transcribes."""

import functools

import numpy as np
import pytest
import soundfile

from tests.server.service.harness import on_a_thread, serving_bundles

RATE = 16_000


@pytest.fixture(scope="module")
def server(whisper_path, bundle_path):
    with on_a_thread(serving_bundles(whisper_path / "bundle", bundle_path)) as served:
        yield served


@pytest.fixture
def run(run):
    """Run `transcribe`, without the model of voice activity, which is an extra."""
    return functools.partial(run, "transcribe", "--no-turn-detection")


def noise(seconds: float) -> np.ndarray:
    samples = np.random.default_rng(0).standard_normal(int(seconds * RATE)) * 0.1
    return (samples * 2**15).astype("<i2")


@pytest.fixture
def samples() -> bytes:
    return noise(1.5).tobytes()


@pytest.fixture
def write(tmp_path):
    """Write a noise of that many seconds."""

    def write(name: str, seconds: float = 1.5, **settings) -> None:
        soundfile.write(tmp_path / name, noise(seconds), RATE, **settings)

    return write
