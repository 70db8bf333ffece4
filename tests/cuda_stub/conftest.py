"""The stub, bundles that run on it, and what programs left in its log."""

from pathlib import Path

import pytest

from benchmarks.random_models import random_trained
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.training.config import TransformerConfig
from tests.cuda_stub.build import FOLDER, CannotBuildError, build
from tests.cuda_stub.run import Stub

PRECISIONS = [Precision.FP16, Precision.BF16]
_CONFIG = TransformerConfig(
    vocab_size=32_000,  # with a few hundred, ONNX Runtime runs other top-k kernels
    d_model=128,
    d_ff=256,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=2,
    max_source_length=128,
    max_target_length=160,
)


@pytest.fixture(scope="session")
def stub() -> Stub:
    try:
        build()
    except CannotBuildError as error:
        pytest.skip(f"the CUDA stub cannot be built: {error}")
    return Stub(FOLDER)


@pytest.fixture(scope="session")
def cuda_bundle(made_once) -> Path:
    """A random model in fp16 and bf16, without the proof: the stub computes nothing."""

    def make(folder: Path) -> None:
        export_bundle(random_trained(_CONFIG), folder / "random", PRECISIONS, proves=False)

    return made_once("cuda-bundle", make) / "random"


@pytest.fixture(scope="session")
def adapted_cuda_bundle(made_once) -> Path:
    """The same model in fp16, in graphs whose rows may name adapters."""

    def make(folder: Path) -> None:
        export_bundle(
            random_trained(_CONFIG), folder / "adapted", PRECISIONS[:1], proves=False, adapters=True
        )

    return made_once("adapted-cuda-bundle", make) / "adapted"
