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

BEAM_SIZE, _IMPORTED_BEAM_SIZE = 5, 4
_SOURCE_TOKENS, _TARGET_TOKENS = 20, 32
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
    """

    beam_size: int
    max_new_tokens: int | None

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
    """A model of this project, or a checkpoint to import, and its works."""

    name: str
    model: TrainedModel | Checkpoint
    works: tuple[Work, ...]

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


def base_suite() -> Suite:
    """Returns the `base` preset with random weights: few sources of one length, and many sentences."""
    config = dataclasses.replace(base().model, vocab_size=VOCAB_SIZE)
    ordinary = UNK_ID + 1, VOCAB_SIZE
    sources = _random_sources([_SOURCE_TOKENS] * max(_GREEDY_ROWS), *ordinary, EOS_ID)
    searches = [(1, number) for number in _GREEDY_ROWS] + [(BEAM_SIZE, number) for number in _BEAM_REQUESTS]
    lengths = np.random.default_rng(0).normal(*_SENTENCE_TOKENS, _MANY_SENTENCES).round().clip(5, 40)
    sentences = _random_sources(lengths.astype(int).tolist(), *ordinary, EOS_ID)
    many = tuple(
        Work(f"base, {_MANY_SENTENCES} sentences, {label}", sentences, Search(beam_size, None), is_exact=True)
        for label, beam_size in _LABELS
    )
    return Suite("base", random_model(config), (*_exact_works("base", sources, searches), *many))


def imported_suites() -> list[Suite]:
    """Returns the suites of checkpoints in the sizes of published ones, the largest one last.

    Each is greedy for 1 and 8 requests, and beams for 8.
    """

    def suite(name: str, family: str, eos_id: int, V: int, D: int, H: int, L: int) -> Suite:
        sizes = TransformerConfig(
            vocab_size=V,
            d_model=D,
            d_ff=4 * D,
            num_heads=H,
            num_encoder_layers=L,
            num_decoder_layers=L,
            max_source_length=_IMPORTED_LENGTH,
            max_target_length=_IMPORTED_LENGTH,
        )
        lengths = [_SOURCE_TOKENS] * _IMPORTED_ROWS
        sources = _random_sources(lengths, FIRST_WORD, V - NUM_AFTER_WORDS, eos_id)
        searches = [(1, 1), (1, _IMPORTED_ROWS), (_IMPORTED_BEAM_SIZE, _IMPORTED_ROWS)]
        return Suite(name, Checkpoint(family, sizes, eos_id), _exact_works(name, sources, searches))

    return [
        suite("opus-mt", "marian", 0, V=58_101, D=512, H=8, L=6),
        suite("t5-base", "t5", 1, V=32_128, D=768, H=12, L=12),
        suite("nllb-600M", "nllb", 2, V=256_206, D=1024, H=16, L=12),
    ]


def _random_sources(lengths: Sequence[int], first_id: int, end_id: int, eos_id: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[*rng.integers(first_id, end_id, length - 1).tolist(), eos_id] for length in lengths]


def _exact_works(
    name: str, sources: Sequence[Source], searches: Sequence[tuple[int, int]]
) -> tuple[Work, ...]:
    """Returns a work for each beam size and number of requests, with targets of exactly `_TARGET_TOKENS`."""
    return tuple(
        Work(
            f"{name}, {'greedy' if beam_size == 1 else f'beam {beam_size}'} x {number}",
            sources[:number],
            Search(beam_size, _TARGET_TOKENS),
            is_exact=True,
        )
        for beam_size, number in searches
    )


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
