"""The workloads of `benchmarks.peers`: models, requests that arrive all at once, and search settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.random_models import untrained
from seq2seq_serve.bundle.names import Precision
from seq2seq_serve.training.config import EOS_ID, UNK_ID, ModelConfig, TransformerConfig
from seq2seq_serve.training.data.text_files import read_lines
from seq2seq_serve.training.models.registry import make_model
from seq2seq_serve.training.presets import base
from seq2seq_serve.training.run import TrainedModel, load_run

BEAM_SIZE, IMPORTED_BEAM_SIZE = 5, 4
SOURCE_TOKENS, TARGET_TOKENS = 20, 32
VOCAB_SIZE = 32_000
_GREEDY_ROWS, _BEAM_REQUESTS = (1, 8, 32), (1, 32)
_MANY_SENTENCES = 1000
_SENTENCE_TOKENS = 14, 4.5  # about the mean and the standard deviation of the lengths in Multi30k
_IMPORTED_ROWS = 8
_IMPORTED_LENGTH = (
    64  # the engine's buffers for 32 rows of the largest model would take 6 GB at its own limits
)
FIRST_WORD, NUM_AFTER_WORDS = 700, 300  # ids between these are ordinary tokens of every checkpoint
_LABELS = ("greedy", 1), (f"beam {BEAM_SIZE}", BEAM_SIZE)
_MULTI30K_FILES = "tok/test_2016_flickr.lc.norm.tok.{}.gz"  # lower case, cut into words by Moses


@dataclass(frozen=True)
class Search:
    """Search settings, the same for every contender.

    A beam search ends when `beam_size` hypotheses are finished, the usual rule of all three libraries. The
    best hypothesis is the most probable one, without a length penalty, because the libraries' formulas for it
    differ.

    Attributes:
        beam_size: Number of hypotheses; 1 is greedy search.
        max_new_tokens: Most target tokens, with the end of sequence; None for as many as the source has.
        min_new_tokens: Least target tokens; the peers forbid the end of sequence before it.
    """

    beam_size: int
    max_new_tokens: int | None
    min_new_tokens: int = 0

    def most(self, source: Source) -> int:
        """Returns the most target tokens of a source."""
        return len(source) if self.max_new_tokens is None else self.max_new_tokens

    def groups(self, sources: Sequence[Source]) -> dict[int, list[int]]:
        """Returns the numbers of the sources with the same most target tokens, by it.

        A peer has one limit for a call. So it gets each group in a call of its own, in which no source is
        padded and no target ends before another.
        """
        groups: dict[int, list[int]] = {}
        for number, source in enumerate(sources):
            groups.setdefault(self.most(source), []).append(number)
        return groups


@dataclass(frozen=True)
class Work:
    """Requests that arrive all at once.

    Attributes:
        sources: Token ids of each source, with the end of sequence.
        references: Reference of each source; empty if quality cannot be scored.
        is_exact: Whether every target has exactly the most tokens that the search allows.
    """

    name: str
    sources: Sequence[Source]
    search: Search
    references: Sequence[str] = ()
    is_exact: bool = False

    @property
    def is_long(self) -> bool:
        """Whether it is left out for transformers, which would take minutes for a turn."""
        return len(self.sources) >= _MANY_SENTENCES

    @property
    def num_rows(self) -> int:
        """The number of hypotheses if all requests run together."""
        return len(self.sources) * self.search.beam_size


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of Hugging Face with random weights, which `benchmarks.peers.checkpoints` makes.

    Attributes:
        family: "marian", "t5", "nllb" or "whisper".
        sizes: The sizes of a published checkpoint.
        eos_id: The last token of every text.
    """

    family: str
    sizes: TransformerConfig
    eos_id: int


@dataclass(frozen=True)
class Suite:
    """A model and its works.

    Attributes:
        model: A model of this project, or a checkpoint to import.
        one_batch: Whether all requests are one batch on all cores; otherwise also one batch per core, which
            takes the memory of several models.
    """

    name: str
    model: TrainedModel | Checkpoint
    works: tuple[Work, ...]
    one_batch: bool = False

    @property
    def sizes(self) -> ModelConfig:
        """The sizes of the model."""
        return self.model.sizes if isinstance(self.model, Checkpoint) else self.model.config


@dataclass
class Clock:
    """Times within a translation.

    Attributes:
        step_seconds: Median duration of a step.
        runner_seconds: Time in encode calls and steps, as the mean over the instances.
    """

    step_seconds: float = 0.0
    runner_seconds: float = 0.0


Source = Sequence[int]
Translate = Callable[[Sequence[Source], Search], list[list[int]]]


@dataclass(frozen=True, eq=False)
class Contender:
    """A library with a precision and a thread setting; contenders are compared by identity.

    Attributes:
        library: "ours", "ctranslate2" or "transformers".
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
    model = make_model(config).eval()
    with torch.no_grad():
        # The logit of the end of sequence is 0, far below the best of many. So every target runs to its limit
        # in every contender, and none has to spend time on forbidding the end of sequence.
        model.embedding.weight[EOS_ID] = 0
    return untrained(model, config)


def base_works(vocab_size: int, num_new_tokens: int = TARGET_TOKENS) -> tuple[Work, ...]:
    """Returns works of random sources of `SOURCE_TOKENS`, with targets of exactly `num_new_tokens`."""
    sources = _random_sources(max(_GREEDY_ROWS + _BEAM_REQUESTS), UNK_ID + 1, vocab_size, EOS_ID)
    searches = [(1, number) for number in _GREEDY_ROWS] + [(BEAM_SIZE, number) for number in _BEAM_REQUESTS]
    return _exact_works("base", sources, searches, num_new_tokens)


def imported_suite(name: str, checkpoint: Checkpoint, num_new_tokens: int = TARGET_TOKENS) -> Suite:
    """Returns the suite of a checkpoint: greedy for 1 and 8 requests, and beams for 8."""
    last = checkpoint.sizes.vocab_size - NUM_AFTER_WORDS
    sources = _random_sources(_IMPORTED_ROWS, FIRST_WORD, last, checkpoint.eos_id)
    searches = [(1, 1), (1, _IMPORTED_ROWS), (IMPORTED_BEAM_SIZE, _IMPORTED_ROWS)]
    return Suite(name, checkpoint, _exact_works(name, sources, searches, num_new_tokens))


def imported_suites() -> list[Suite]:
    """Returns the suites of checkpoints in the sizes of published ones, the largest one last."""

    def sizes(V: int, D: int, F: int, H: int, L: int) -> TransformerConfig:
        return TransformerConfig(
            vocab_size=V,
            d_model=D,
            d_ff=F,
            num_heads=H,
            num_encoder_layers=L,
            num_decoder_layers=L,
            max_source_length=_IMPORTED_LENGTH,
            max_target_length=_IMPORTED_LENGTH,
        )

    checkpoints = {
        "opus-mt": Checkpoint("marian", sizes(58_101, 512, 2048, 8, 6), eos_id=0),
        "t5-base": Checkpoint("t5", sizes(32_128, 768, 3072, 12, 12), eos_id=1),
        "nllb-600M": Checkpoint("nllb", sizes(256_206, 1024, 4096, 16, 12), eos_id=2),
    }
    return [imported_suite(name, checkpoint) for name, checkpoint in checkpoints.items()]


def _random_sources(count: int, first_id: int, end_id: int, eos_id: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[*rng.integers(first_id, end_id, SOURCE_TOKENS - 1).tolist(), eos_id] for _ in range(count)]


def _exact_works(
    name: str, sources: Sequence[Source], searches: Sequence[tuple[int, int]], num_new_tokens: int
) -> tuple[Work, ...]:
    """Returns a work for each beam size and number of requests, with targets of exactly `num_new_tokens`."""
    return tuple(
        Work(
            f"{name}, {'greedy' if beam_size == 1 else f'beam {beam_size}'} x {number}",
            sources[:number],
            Search(beam_size, num_new_tokens),
            is_exact=True,
        )
        for beam_size, number in searches
    )


def base_suite() -> Suite:
    """Returns the suite of the `base` preset with random weights."""
    config = dataclasses.replace(base().model, vocab_size=VOCAB_SIZE)
    return Suite("base", random_model(config), base_works(VOCAB_SIZE))


def sentences_suite() -> Suite:
    """Returns the suite of the `base` preset and many sentences, whose targets are as long as they are."""
    config = dataclasses.replace(base().model, vocab_size=VOCAB_SIZE)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.normal(*_SENTENCE_TOKENS, _MANY_SENTENCES).round(), 5, 40).astype(int)
    sources = [[*rng.integers(UNK_ID + 1, VOCAB_SIZE, length - 1).tolist(), EOS_ID] for length in lengths]
    works = tuple(
        Work(f"base, {_MANY_SENTENCES} sentences, {label}", sources, Search(beam_size, None), is_exact=True)
        for label, beam_size in _LABELS
    )
    return Suite("base, many sentences", random_model(config), works)


def multi30k_suite(corpus: Path, run: Path) -> Suite:
    """Returns the suite of the test set of 2016, English to German, and a run trained on its Moses tokens.

    Args:
        corpus: Folder of the Multi30k task 1 data, with its `tok/`.
        run: Folder of a finished run.

    Raises:
        ValueError: The run cannot be read, or a sentence is longer than the model's limit.
        OSError: The corpus cannot be read.
    """
    trained = load_run(run)
    texts, references = (read_lines(corpus / _MULTI30K_FILES.format(language)) for language in ("en", "de"))
    sources = trained.tokenizer.encode_sources(texts)
    longest, limit = max(map(len, sources)), trained.config.max_source_length
    if longest > limit:
        raise ValueError(f"{run} takes at most {limit} source tokens, but a sentence has {longest}")
    works = tuple(
        Work(f"Multi30k, {label}", sources, Search(beam_size, trained.config.max_target_length), references)
        for label, beam_size in _LABELS
    )
    return Suite("Multi30k", trained, works)
