"""The workloads of `benchmarks.peers`: models, requests that arrive all at once, and search settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.server.runner.sizing import RunnerConfig
from seq2seq_serve.training.config import EOS_ID, UNK_ID, ModelConfig
from seq2seq_serve.training.data.text_files import read_lines
from seq2seq_serve.training.data.tokenizer import train_tokenizer
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.presets import base, recurrent, recurrent_additive, recurrent_dot
from seq2seq_serve.training.run import TrainedModel, load_run

BEAM_SIZE = 5
SOURCE_TOKENS, TARGET_TOKENS = 20, 32
VOCAB_SIZE = 32_000
_GREEDY_ROWS, _BEAM_REQUESTS = (1, 8, 32), (1, 32)
_RECURRENT_ROWS = (1, 32)
_MULTI30K_SLOTS = 80  # `tiny` is slower with 256 slots, whose caches do not fit into the processor's
_MULTI30K_FILES = "tok/test_2016_flickr.lc.norm.tok.{}.gz"  # lower case, cut into words by Moses


@dataclass(frozen=True)
class Search:
    """Search settings, the same for every contender.

    A beam search ends when `beam_size` hypotheses are finished, the usual rule of all three libraries. The
    best hypothesis is the most probable one, without a length penalty, because the libraries' formulas for it
    differ.

    Attributes:
        beam_size: Number of hypotheses; 1 is greedy search.
        max_new_tokens: Most target tokens, with the end of sequence.
        min_new_tokens: Least target tokens; the peers forbid the end of sequence before it.
    """

    beam_size: int
    max_new_tokens: int
    min_new_tokens: int = 0


@dataclass(frozen=True)
class Work:
    """Requests that arrive all at once.

    Attributes:
        sources: Token ids of each source, with the end of sequence.
        references: Reference of each source; empty if quality cannot be scored.
        is_exact: Whether every target has exactly `max_new_tokens`.
    """

    name: str
    sources: Sequence[Sequence[int]]
    search: Search
    references: Sequence[str] = ()
    is_exact: bool = False

    @property
    def num_rows(self) -> int:
        """The number of hypotheses if all requests run together."""
        return len(self.sources) * self.search.beam_size


@dataclass(frozen=True)
class Suite:
    """A model and its works.

    Attributes:
        max_slots: Most slots of all the engine's instances together.
    """

    name: str
    trained: TrainedModel
    works: tuple[Work, ...]
    max_slots: int = RunnerConfig.max_slots


@dataclass
class Clock:
    """Times within a translation.

    Attributes:
        step_seconds: Median duration of a step.
        graph_seconds: Time in ONNX Runtime, as the mean over the instances.
    """

    step_seconds: float = 0.0
    graph_seconds: float = 0.0


Translate = Callable[[Sequence[Sequence[int]], Search], list[list[int]]]


@dataclass(frozen=True, eq=False)
class Contender:
    """A library with a precision and a thread setting; contenders are compared by identity.

    Attributes:
        library: "ours", "ctranslate2", "transformers" or "torch".
        setting: Thread setting; the fastest setting of a library counts.
        translate: Returns the target of each source in order, without the end of sequence; includes encoding.
        clock: Times of the last translation; None if the library does not report them.
    """

    library: str
    precision: Precision
    setting: str
    translate: Translate
    clock: Clock | None = None

    @property
    def name(self) -> str:
        """The name in the tables and in the report."""
        return " ".join(part for part in (self.library, self.precision.value, self.setting) if part)


def random_model(config: ModelConfig) -> TrainedModel:
    """Returns a model with random weights that never ends a target before its limit."""
    torch.manual_seed(0)
    texts = ["the quick brown fox jumps over the lazy dog"]
    model = make_model(config).eval()
    with torch.no_grad():
        # The logit of the end of sequence is 0, far below the best of many. So every target runs to its limit
        # in every contender, and none has to spend time on forbidding the end of sequence.
        model.embedding.weight[EOS_ID] = 0
    provenance = {"corpus": "none: random weights"}
    dev = [(text, text) for text in texts] * 4
    return TrainedModel(model, train_tokenizer(texts, 300), config, provenance, dev, dev_score=0.0)


def base_works(
    vocab_size: int, num_new_tokens: int = TARGET_TOKENS, *, name: str = "base"
) -> tuple[Work, ...]:
    """Returns works of random sources of `SOURCE_TOKENS`, with targets of exactly `num_new_tokens`."""
    rng = np.random.default_rng(0)
    sources = [
        [*rng.integers(UNK_ID + 1, vocab_size, SOURCE_TOKENS - 1).tolist(), EOS_ID]
        for _ in range(max(_GREEDY_ROWS + _BEAM_REQUESTS))
    ]
    greedy, beam = Search(1, num_new_tokens), Search(BEAM_SIZE, num_new_tokens)
    return tuple(
        Work(f"{name}, {label} x {number}", sources[:number], search, is_exact=True)
        for label, search, numbers in (
            ("greedy", greedy, _GREEDY_ROWS),
            (f"beam {BEAM_SIZE}", beam, _BEAM_REQUESTS),
        )
        for number in numbers
    )


def base_suite() -> Suite:
    """Returns the suite of the `base` preset with random weights."""
    config = dataclasses.replace(base().model, vocab_size=VOCAB_SIZE)
    return Suite("base", random_model(config), base_works(VOCAB_SIZE))


def recurrent_suites(
    width: int = 512, vocab_size: int = VOCAB_SIZE, num_new_tokens: int = TARGET_TOKENS
) -> list[Suite]:
    """Returns suites of the recurrent presets with random weights and states of `width`.

    Their works are greedy, with one source and with 32 sources.
    """
    suites = []
    for preset in (recurrent(), recurrent_dot(), recurrent_additive()):
        config = preset.changed({"vocab_size": vocab_size, "d_model": width, "d_hidden": width}).model
        works = base_works(vocab_size, num_new_tokens, name=preset.name)
        chosen = tuple(w for w in works if w.search.beam_size == 1 and len(w.sources) in _RECURRENT_ROWS)
        suites.append(Suite(preset.name, random_model(config), chosen))
    return suites


def multi30k_suite(corpus: Path, run: Path, max_sentences: int | None = None) -> Suite:
    """Returns the suite of the test set of 2016, English to German, and a run trained on its Moses tokens.

    Args:
        corpus: Folder of the Multi30k task 1 data, with its `tok/`.
        run: Folder of a finished run.
        max_sentences: Number of sentences from the test set; None means all.

    Raises:
        ValueError: The run cannot be read, or a sentence is longer than the model's limit.
        OSError: The corpus cannot be read.
    """
    trained = load_run(run)
    texts, references = (
        read_lines(corpus / _MULTI30K_FILES.format(language))[:max_sentences] for language in ("en", "de")
    )
    sources = trained.tokenizer.encode_sources(texts)
    longest, limit = max(map(len, sources)), trained.config.max_source_length
    if longest > limit:
        raise ValueError(f"{run} takes at most {limit} source tokens, but a sentence has {longest}")
    works = tuple(
        Work(f"Multi30k, {label}", sources, Search(beam_size, trained.config.max_target_length), references)
        for label, beam_size in (("greedy", 1), (f"beam {BEAM_SIZE}", BEAM_SIZE))
    )
    return Suite("Multi30k", trained, works, max_slots=_MULTI30K_SLOTS)
