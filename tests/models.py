"""Models and bundles that many tests read: made once for all processes of a session, and never written to."""

import fcntl
import functools
import gc
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from rich.console import Console
from torch.export import decomp_utils, exported_program
from torch.onnx._internal.exporter._registration import ONNXRegistry

from seq2seq_serve.bundle.adapters import (
    ADAPTER_VERSION,
    WEIGHTS_FILE,
    AdaptedShape,
    AdapterManifest,
    Weights,
    write_adapter,
)
from seq2seq_serve.bundle.manifest import Bundle, FileSpec, Parity, load_bundle
from seq2seq_serve.bundle.names import Precision, Verb
from seq2seq_serve.export import convert, exporter
from seq2seq_serve.export.__main__ import main as export_main
from seq2seq_serve.export.exporter import export_bundle
from seq2seq_serve.export.graphs.linear import FloatFactory
from seq2seq_serve.export.graphs.transformer import DecodeGraph, EncodeGraph, SharingStepGraph
from seq2seq_serve.training.config import ModelConfig, TrainingConfig, TransformerConfig
from seq2seq_serve.training.data.corpus import Corpus, SentencePair
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.prepare import continue_run, start_run
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.run import RunFolder, TrainedModel, load_run
from tests.conversions import FOLDER, Conversions

_KOREAN = "하나", "둘", "셋", "넷", "다섯"
_ENGLISH = "one", "two", "three", "four", "five"
_DEV = [
    ("오늘은 금요일입니다", "Today is Friday."),
    ("나는 학생이다", "I am a student."),
    ("드디어 금요일이다 🎉", "It is finally Friday 🎉"),
    ("비가 온다", "It rains."),
]


class _OneThread(onnxruntime.SessionOptions):
    """The options of a session that was not given a number of threads."""

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 1


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    # Matrices this small only wait for a second thread, ten times longer where the machine is busy.
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", _OneThread)
        yield


@pytest.fixture(autouse=True)
def _one_thread_again() -> Iterator[None]:
    """A command that runs in this process gives torch a thread for each core."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _few_collections() -> None:
    # The garbage collector would visit everything that torch imported and that other exports left in its
    # tables, a quarter of the time of an export.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_operators() -> Iterator[None]:
    # The exporter makes both tables anew for every graph, in a third of the time that a small graph takes.
    composite = functools.cache(exported_program._collect_all_valid_cia_ops)
    with pytest.MonkeyPatch.context() as patch:
        made_once = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
        patch.setattr(ONNXRegistry, "from_torchlib", made_once)
        for module in (exported_program, decomp_utils):
            patch.setattr(module, "_collect_all_valid_cia_ops", composite)
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_conversions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "convert", Conversions(FOLDER, convert.convert).convert)
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Fill a folder of that name once for all processes that share the tests; the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made_once(name: str, make: Callable[[Path], None]) -> Path:
        folder, whole = root / name, root / f"{name}-is-whole"
        with (root / f"{name}-lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
                folder.mkdir()
                make(folder)
                whole.touch()
        return folder

    return made_once


@pytest.fixture(scope="session")
def toy_paths(made_once: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, Path]:
    """The bundle of each kind of `tests.server.toys`, in a folder of the kind's name."""
    from tests.server.toys import KINDS, write_toy  # here, because only some tests need the exporter

    return {name: made_once(name, functools.partial(write_toy, kind)) for name, kind in KINDS.items()}


@pytest.fixture(scope="session")
def imported(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Callable[[str], Path]:
    """A folder with the `checkpoint` of a case, its `bundle`, and the export's `report`."""

    def make(case: str, folder: Path) -> None:
        from seq2seq_serve.export.huggingface.exporter import export_checkpoint  # imports transformers
        from tests.export.huggingface.checkpoints import SHALLOW, SOUNDS, Depth, make_checkpoint

        depth = Depth(2, 1) if case in SOUNDS else SHALLOW  # with one and one it writes too few times
        make_checkpoint(case, folder / "checkpoint", depth)
        lines: list[str] = []
        export_checkpoint(folder / "checkpoint", folder / "bundle", [Precision.FP32], report=lines.append)
        (folder / "report").write_text("\n".join(lines), encoding="utf-8")

    return lambda case: made_once(f"imported-{case}", functools.partial(make, case))


@pytest.fixture
def quick_checkpoint(imported, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """The checkpoint of `imported`; exports of it in fp32 take its graphs, whatever their other settings."""
    verbs = {EncodeGraph: Verb.ENCODE, SharingStepGraph: Verb.STEP, DecodeGraph: Verb.DECODE}

    def quick_checkpoint(case: str) -> Path:
        folder = imported(case)
        graphs = folder / "bundle" / "fp32"
        monkeypatch.setattr(convert, "convert", lambda graph: ir.load(graphs / f"{verbs[type(graph)]}.onnx"))
        return folder / "checkpoint"

    return quick_checkpoint


@pytest.fixture(scope="session")
def whisper_path(imported: Callable[[str], Path]) -> Path:
    return imported("whisper")


def random_model(config_class: type[ModelConfig], settings: dict[str, Any]) -> TrainedModel:
    """A model in which every weight, biases and norms included, is random, so that each of them matters."""
    tokenizer = train_tokenizer([text for pair in _DEV for text in pair], vocab_size=300)
    limits = {"max_source_length": 48, "max_target_length": 48}
    config = config_class(vocab_size=tokenizer.vocab_size, **limits | settings)
    model = make_model(config).eval()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=chance)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return TrainedModel(
        model,
        tokenizer,
        config,
        {"preset": "random"},
        _DEV,
        dev_score=0.0,
        source_language="ko",
        target_language="en",
    )


def make_random_trained(**sizes: Any) -> TrainedModel:
    """A Transformer of random weights."""
    settings = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
    return random_model(TransformerConfig, settings | sizes)


# Recurrent models that between them have everything that one can have.
RECURRENT: dict[str, dict[str, Any]] = {
    "additive": {},
    "dot": {"cell": "lstm", "attention": "dot", "num_decoder_layers": 2},
    "none": {"attention": "none", "reverses_source": True, "num_encoder_layers": 2},
    "one-way": {
        "cell": "lstm",
        "is_bidirectional": False,
        "reverses_source": True,
        "tied": "none",
        "num_decoder_layers": 2,
    },
}


def make_random_recurrent(name: str) -> TrainedModel:
    """One of `RECURRENT`."""
    settings = {"d_model": 32, "d_hidden": 48, "num_encoder_layers": 1, "num_decoder_layers": 1}
    return random_model(RecurrentConfig, settings | RECURRENT[name])


@pytest.fixture(scope="session")
def random_recurrent(made_once) -> Callable[[str], tuple[TrainedModel, Bundle]]:
    """One of `RECURRENT` with its bundle in fp32 and int8."""

    @functools.cache
    def random_recurrent(name: str) -> tuple[TrainedModel, Bundle]:
        trained = make_random_recurrent(name)
        precisions = [Precision.FP32, Precision.INT8]
        make = lambda folder: export_bundle(trained, folder / name, precisions)  # noqa: E731
        return trained, load_bundle(made_once(f"recurrent-{name}", make) / name)

    return random_recurrent


@pytest.fixture(scope="session")
def random_trained() -> TrainedModel:
    return make_random_trained(norm="post")


@pytest.fixture(scope="session")
def random_pre_norm() -> TrainedModel:
    return make_random_trained(norm="pre", num_encoder_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="session")
def one_layer_trained() -> TrainedModel:
    """The smallest that can be exported, for tests of the export itself."""
    return make_random_trained(num_encoder_layers=1, num_decoder_layers=1)


@pytest.fixture(scope="session")
def bundle_path(random_trained: TrainedModel, made_once) -> Path:
    """A bundle of random weights in fp32, int8 and int4; copy it to damage it."""
    precisions = [Precision.FP32, Precision.INT8, Precision.INT4]
    make = lambda folder: export_bundle(random_trained, folder / "random", precisions)  # noqa: E731
    return made_once("bundles", make) / "random"


@pytest.fixture(scope="session")
def random_bundle(bundle_path: Path) -> Bundle:
    return load_bundle(bundle_path)


@pytest.fixture(scope="session")
def adapted_bundle(random_trained: TrainedModel, made_once) -> Bundle:
    """The weights of `bundle_path`, in graphs whose rows may name adapters."""
    precisions = [Precision.FP32, Precision.INT8]
    make = lambda folder: export_bundle(random_trained, folder / "b", precisions, adapters=True)  # noqa: E731
    return load_bundle(made_once("adapted", make) / "b")


def random_adapter(bundle: Bundle, seed: int, rank: int = 3, *, scale: float = 0.3) -> dict[str, Any]:
    """The weights of an adapter of about half of the layers, with ranks from 1 to the given one."""
    rng = np.random.default_rng(seed)
    return {
        part.name: tuple(
            (rng.normal(size=(its_rank, width)) * scale).astype(np.float16)
            for its_rank in [int(rng.integers(1, rank + 1))]
            for width in (one.num_inputs, part.num_outputs)
        )
        for one in bundle.manifest.adapted_maps
        for part in one.parts
        if rng.random() < 0.6
    }


def adapter_folder(folder: Path, checksum: str, weights: Weights) -> Path:
    """Writes an adapter of the models whose adapted maps have this checksum."""
    parts = {name: AdaptedShape(len(a), a.shape[1], b.shape[1]) for name, (a, b) in weights.items()}
    nothing = FileSpec(WEIGHTS_FILE, "", 0)
    folder.mkdir(parents=True)
    manifest = AdapterManifest(ADAPTER_VERSION, "random", checksum, parts, nothing, Parity(0.0, None, ()))
    write_adapter(folder, manifest, weights)
    return folder


@contextmanager
def with_terms(model: Any, weights: dict[str, Any]) -> Iterator[Any]:
    """The model with an adapter's terms added to its weights."""
    before = {name: model.get_submodule(name).weight.data for name in weights}
    for name, (a, b) in weights.items():
        terms = torch.from_numpy(b.T.astype(np.float32) @ a.astype(np.float32))
        model.get_submodule(name).weight.data = before[name] + terms
    try:
        yield model
    finally:
        for name, weight in before.items():
            model.get_submodule(name).weight.data = weight


@pytest.fixture(scope="session")
def fused_bundle(random_trained: TrainedModel, made_once) -> Bundle:
    """The random weights in graphs of the form for CUDA, but in fp32, which the CPU runs exactly enough."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            fused = lambda dtype, is_fused: FloatFactory(dtype, is_fused=True)  # noqa: E731
            patch.setattr(exporter, "FloatFactory", fused)
            export_bundle(random_trained, folder / "fused", [Precision.FP32])

    return load_bundle(made_once("fused", make) / "fused")


@dataclass(frozen=True)
class TrainedRun:
    """A model that the real loop trained for seconds: number words from Korean to English, one by one.

    Attributes:
        run: The run's folder.
        corpus: What it was trained on.
        bundle: Exported from it in fp32 and int8, by the command.
        stdout: What the command printed as its result.
        stderr: What it told besides.
    """

    run: Path
    corpus: Corpus
    bundle: Path
    trained: TrainedModel
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def trained_run(made_once) -> TrainedRun:
    folder = made_once("trained", _train_and_export)
    run = folder / "run"
    told = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    return TrainedRun(run, _numbers(), folder / "numbers", load_run(run), *told)


def _train_and_export(folder: Path) -> None:
    run, corpus = RunFolder(folder / "run"), _numbers()
    start_run(run, _numbers_preset(), corpus)
    continue_run(run, corpus, torch.device("cpu"), Console(file=StringIO()))
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        assert export_main([str(run.path), str(folder / "numbers")]) == 0
    (folder / "stdout").write_text(stdout.getvalue(), encoding="utf-8")
    (folder / "stderr").write_text(stderr.getvalue(), encoding="utf-8")


def _numbers() -> Corpus:
    """Every sequence of one to four number words."""
    pairs = [
        SentencePair(" ".join(_KOREAN[i] for i in numbers), " ".join(_ENGLISH[i] for i in numbers))
        for length in range(1, 5)
        for numbers in product(range(len(_KOREAN)), repeat=length)
    ]
    held_out = pairs[60::23]
    train = [pair for pair in pairs if pair not in held_out]
    return Corpus("number words", tuple(train), tuple(held_out))


def _numbers_preset() -> Preset:
    # Of the other kind than the random bundle in every choice.
    model = TransformerConfig(
        vocab_size=290,
        d_model=64,
        d_ff=128,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=1,
        dropout=0.0,
        norm="pre",
        tied="none",
        max_source_length=32,
        max_target_length=32,
    )
    training = TrainingConfig(
        max_steps=400,  # fewer leave short sequences wrong on some processors
        batch_tokens=600,
        warmup_steps=60,
        learning_rate_scale=0.5,
        eval_interval_steps=400,
        checkpoint_interval_steps=50,
        num_averaged=2,
        patience=None,
        max_length_ratio=None,
    )
    return Preset("numbers", model, training)
