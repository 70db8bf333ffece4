"""What `benchmarks.peers` decodes: models, requests that come at once, and how targets are searched for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bundle.names import Precision
from server.sizing import RunnerConfig
from training.config import EOS_ID, UNK_ID, TransformerConfig
from training.presets import base
from training.run import TrainedModel, load_run
from training.text_files import read_lines
from training.tokenizer import train_tokenizer
from training.transformer import Transformer

BEAM_SIZE = 5
SOURCE_TOKENS, TARGET_TOKENS = 20, 32
VOCAB_SIZE = 32_000
_GREEDY_ROWS, _BEAM_REQUESTS = (1, 8, 32), (1, 32)
_MULTI30K_SLOTS = 80  # `tiny` in 256 slots is slower: the caches of so many rows spill out of the processor's
_MULTI30K_FILES = "tok/test_2016_flickr.lc.norm.tok.{}.gz"  # lower case, cut into words by Moses


@dataclass(frozen=True)
class Search:
    """How targets are searched for; the same rule at every contender.

    A beam ends with as many finished hypotheses as it is wide, the usual rule of all three libraries, and
    the best is the most probable: their length penalties are different formulas, which agree only at none.

    Attributes:
        beam_size: 1 is greedy.
        max_new_tokens: The end of sequence counts.
        min_new_tokens: The end of sequence is forbidden before so many, by the peers.
    """

    beam_size: int
    max_new_tokens: int
    min_new_tokens: int = 0


@dataclass(frozen=True)
class Work:
    """Requests that come all at once.

    Attributes:
        sources: Token ids, the end of sequence included.
        references: Of each source; empty where quality cannot be scored.
        is_exact: Whether every target has exactly `max_new_tokens`.
    """

    name: str
    sources: Sequence[Sequence[int]]
    search: Search
    references: Sequence[str] = ()
    is_exact: bool = False

    @property
    def num_rows(self) -> int:
        """Hypotheses at once, where all requests run together."""
        return len(self.sources) * self.search.beam_size


@dataclass(frozen=True)
class Suite:
    """A model, and what it is asked for.

    Attributes:
        max_slots: Of the engine, all instances together.
    """

    name: str
    trained: TrainedModel
    works: tuple[Work, ...]
    max_slots: int = RunnerConfig.max_slots


@dataclass
class Clock:
    """Where the time of a translation went.

    Attributes:
        step_seconds: Of a step, the median.
        graph_seconds: In ONNX Runtime, of an instance on average.
    """

    step_seconds: float = 0.0
    graph_seconds: float = 0.0


Translate = Callable[[Sequence[Sequence[int]], Search], list[list[int]]]


@dataclass(frozen=True, eq=False)
class Contender:
    """Who translates; compared by identity.

    Attributes:
        library: "ours", "ctranslate2" or "transformers".
        setting: Which of several settings of the library; the fastest one counts.
        translate: The target of each source in order, without the end of sequence; encoding included.
        clock: Of its last translation, if it tells.
    """

    library: str
    precision: Precision
    setting: str
    translate: Translate
    clock: Clock | None = None

    @property
    def name(self) -> str:
        """For people and for the report."""
        return " ".join(part for part in (self.library, self.precision.value, self.setting) if part)


def random_model(config: TransformerConfig) -> TrainedModel:
    """A model that nobody trained, and that never ends a target by itself."""
    torch.manual_seed(0)
    texts = ["the quick brown fox jumps over the lazy dog"]
    model = Transformer(config).eval()
    with torch.no_grad():
        # Its logit is 0, far below the best of many: every target runs to its limit, at every contender,
        # without a rule against the end of sequence that one of them would have to pay for.
        model.embedding.weight[EOS_ID] = 0
    provenance = {"preset": "base", "corpus": "none: random weights"}
    dev = [(text, text) for text in texts] * 4
    return TrainedModel(model, train_tokenizer(texts, 300), config, provenance, dev, dev_score=0.0)


def base_works(vocab_size: int, num_new_tokens: int = TARGET_TOKENS) -> tuple[Work, ...]:
    """Random sources of `SOURCE_TOKENS`, for targets of exactly `num_new_tokens`."""
    rng = np.random.default_rng(0)
    sources = [
        [*rng.integers(UNK_ID + 1, vocab_size, SOURCE_TOKENS - 1).tolist(), EOS_ID]
        for _ in range(max(_GREEDY_ROWS + _BEAM_REQUESTS))
    ]
    greedy, beam = Search(1, num_new_tokens), Search(BEAM_SIZE, num_new_tokens)
    return tuple(
        Work(f"base, {label} x {number}", sources[:number], search, is_exact=True)
        for label, search, numbers in (
            ("greedy", greedy, _GREEDY_ROWS),
            (f"beam {BEAM_SIZE}", beam, _BEAM_REQUESTS),
        )
        for number in numbers
    )


def base_suite() -> Suite:
    """The `base` preset with random weights."""
    config = dataclasses.replace(base().model, vocab_size=VOCAB_SIZE)
    return Suite("base", random_model(config), base_works(VOCAB_SIZE))


def multi30k_suite(corpus: Path, run: Path, max_sentences: int | None = None) -> Suite:
    """The test set of 2016, English to German, by a run that was trained on lower-cased Moses tokens.

    Args:
        corpus: The folder of the Multi30k task 1 data, with its `tok/`.
        run: A finished run.
        max_sentences: How many of the test set; None is all.

    Raises:
        ValueError: The run cannot be read, or a sentence is longer than its limit.
        OSError: The corpus cannot be read.
    """
    trained = load_run(run)
    texts, references = (
        read_lines(corpus / _MULTI30K_FILES.format(language))[:max_sentences] for language in ("en", "de")
    )
    sources = trained.tokenizer.encode_sources(texts)
    longest, limit = max(map(len, sources)), trained.config.max_source_length
    if longest > limit:
        raise ValueError(f"{run} takes {limit} source tokens, and a sentence has {longest}")
    works = tuple(
        Work(f"Multi30k, {label}", sources, Search(beam_size, trained.config.max_target_length), references)
        for label, beam_size in (("greedy", 1), (f"beam {BEAM_SIZE}", BEAM_SIZE))
    )
    return Suite("Multi30k", trained, works, max_slots=_MULTI30K_SLOTS)
