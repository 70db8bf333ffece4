import functools
import signal
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.serving import free_ports
from seq2seq_serve.training import prepare
from seq2seq_serve.training.config import TrainingConfig, TransformerConfig
from seq2seq_serve.training.data.corpus import Corpus, SentencePair
from seq2seq_serve.training.models.transformer import Transformer
from seq2seq_serve.training.presets import Preset
from seq2seq_serve.training.reports import curves
from seq2seq_serve.training.reports.progress import Reporter
from tests.training.processes import Rank, start_rank

_commit = functools.cache(prepare.repository_commit)

_WORDS = ("하나", "둘", "셋", "넷"), ("one", "two", "three", "four")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of 20 steps take less time than what they begin and end with."""
    monkeypatch.setattr(prepare, "repository_commit", _commit)
    monkeypatch.setattr(curves, "save_learning_curve", lambda folder: None)


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO())


@pytest.fixture
def model_config() -> TransformerConfig:
    return TransformerConfig(
        vocab_size=300,
        d_model=32,
        d_ff=64,
        num_heads=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dropout=0.1,
        max_source_length=24,
        max_target_length=24,
    )


@pytest.fixture
def model(model_config: TransformerConfig) -> Transformer:
    torch.manual_seed(0)
    return Transformer(model_config).eval()


@pytest.fixture
def preset(model_config: TransformerConfig) -> Preset:
    training = TrainingConfig(
        max_steps=20,
        batch_tokens=60,
        warmup_steps=10,
        learning_rate_scale=0.2,
        eval_interval_steps=10,
        checkpoint_interval_steps=5,
        num_averaged=2,
        patience=None,
    )
    return Preset("toy", model_config, training)


@pytest.fixture
def corpus() -> Corpus:
    """Sentences of one, two and four of four words, and word by word; the dev pairs have four, for BLEU."""
    korean, english = _WORDS
    pairs = [
        SentencePair(" ".join(korean[i] for i in numbers), " ".join(english[i] for i in numbers))
        for a in range(4)
        for b in range(4)
        for numbers in ([a, b, 0, 1], [a, b], [a])
    ]
    pairs = sorted(dict.fromkeys(pairs), key=lambda pair: -len(pair.target.split()))
    return Corpus("toy", tuple(pairs[4:]), tuple(pairs[:4]), tuple(pairs[4:6]))


@pytest.fixture
def corpus_files(corpus: Corpus, tmp_path: Path) -> list[str]:
    """The toy corpus as files, as command-line flags."""
    flags = []
    for flag, lines in {
        "--source": [pair.source for pair in corpus.train],
        "--target": [pair.target for pair in corpus.train],
        "--dev-source": [pair.source for pair in corpus.dev],
        "--dev-target": [pair.target for pair in corpus.dev],
    }.items():
        path = tmp_path / f"{flag[2:]}.txt"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        flags += [flag, str(path)]
    return flags


@pytest.fixture
def press_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sends the signal, or another, during a step."""

    def arrange(at_step: int, signal_number: int = signal.SIGINT) -> None:
        advance = Reporter.advance

        def advance_and_interrupt(self: Reporter, step: int) -> None:
            advance(self, step)
            if step == at_step:
                signal.raise_signal(signal_number)

        monkeypatch.setattr(Reporter, "advance", advance_and_interrupt)

    return arrange


@pytest.fixture
def start_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Rank]]]:
    """Start `python -m training train` in as many processes as asked for, as torchrun would."""
    started = []

    def start(size: int, *arguments: str) -> list[Rank]:
        (port,) = free_ports(1)
        group = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ranks = []
        for rank in range(size):
            variables = group | {"RANK": rank, "LOCAL_RANK": rank} if size > 1 else {}
            environment = {name: str(value) for name, value in variables.items()}
            ranks.append(start_rank(environment, tmp_path_factory.mktemp("rank"), *arguments))
            started.append(ranks[-1])
        return ranks

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.join()
