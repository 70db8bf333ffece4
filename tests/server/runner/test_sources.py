"""Sources that are not one row of tokens, and memory of another length than its source, in the real engine.

The graphs are toys without weights: the next token is an exact function of the memory, the state and the last
token. If any position of a row's memory is wrong, the row decodes other tokens.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import (
    Bundle,
    GraphSpec,
    LengthRule,
    Manifest,
    Parity,
    SpecialIds,
    TensorSpec,
    Variant,
    file_spec,
    load_bundle,
    write_manifest,
)
from seq2seq_serve.bundle.names import FORMAT_VERSION, TOKENIZER_FILE, Axis, Precision, Role, Verb
from seq2seq_serve.export import convert
from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.base import Graph, outs, token_specs
from seq2seq_serve.server.engine.records import Array, Request
from seq2seq_serve.server.runner.runner import OnnxRunner
from seq2seq_serve.server.runner.sizing import RunnerConfig, size_up
from tests.server.driver import Driver
from tests.server.service.harness import BOS, EOS, PAD, byte_tokenizer

VOCAB_SIZE = byte_tokenizer().vocab_size
MAX_TARGET_LENGTH = 10
MEMORY = TensorSpec(names.memory("sums"), "float32", (Axis.BATCH, Axis.MEMORY_CAPACITY, 1), Role.MEMORY)
STATE = TensorSpec(names.state("number"), "float32", (Axis.BATCH, 1), Role.STATE)


def source(name: str, dtype: str, *axes: int | str) -> TensorSpec:
    return TensorSpec(name, dtype, (Axis.BATCH, *axes), Role.SOURCE)


class Step(Graph):
    """The definition is `expected_tokens`."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (*token_specs(names.LAST_SOURCE_POSITIONS), MEMORY, STATE)
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, VOCAB_SIZE), Role.LOGITS)
        attention = TensorSpec(names.ATTENTION, "float32", (Axis.BATCH, Axis.MEMORY_CAPACITY), Role.ATTENTION)
        self.outputs = (logits, attention, *outs([STATE]))

    def forward(self, token_ids: Tensor, last: Tensor, memory: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(memory.shape[1])
        values = torch.where(places <= last[:, None], memory[:, :, 0], 0.0)  # (B, C)
        token = token_ids.to(torch.float32)
        total = (values * (places + 1)).sum(dim=1) + 7 * state[:, 0] + token
        following = EOS + 1 + total.remainder(VOCAB_SIZE - EOS - 1)
        logits = -((torch.arange(VOCAB_SIZE) - following[:, None]) ** 2)
        return logits, values, (3 * state + token[:, None]).remainder(101)


class _Encode(Graph):
    def __init__(self, *sources: TensorSpec) -> None:
        super().__init__()
        self.inputs = (*sources, MEMORY)
        self.outputs = tuple(outs([MEMORY, STATE]))


class EncodePicture(_Encode):
    """A position is a patch of 2 x 2 of 6 x 6 pixels."""

    def __init__(self) -> None:
        super().__init__(source("pixels", "uint8", 6, 6, 3))

    def forward(self, pixels: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        patches = pixels.to(torch.float32).view(-1, 3, 2, 3, 2, 3).sum(dim=(2, 4, 5)).reshape(-1, 9, 1)
        return operators.write_prefix(memory, patches, axis=1), torch.zeros_like(patches[:, 0])


class EncodeVideo(_Encode):
    """A position is two frames, or the last frame of an odd number."""

    def __init__(self) -> None:
        super().__init__(
            source("frames", "uint8", "clip_length", 2, 2, 3),
            source(names.lengths_of("clip_length"), "int32"),
        )

    def forward(self, frames: Tensor, num_frames: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        is_frame = torch.arange(frames.shape[1]) < num_frames[:, None]
        sums = torch.where(is_frame, frames.to(torch.float32).sum(dim=(2, 3, 4)), 0.0)  # (B, frames)
        padded = torch.nn.functional.pad(sums, (0, 1))
        pairs = padded[:, 0:-1:2] + padded[:, 1::2]
        state = num_frames[:, None].to(torch.float32)
        return operators.write_prefix(memory, pairs[:, :, None], axis=1), state


class EncodeStory(_Encode):
    """A position is a sentence; the question becomes the state."""

    def __init__(self) -> None:
        super().__init__(
            source("story_ids", "int64", "story_length", "sentence_length"),
            source("question_ids", "int64", "question_length"),
            source(names.lengths_of("story_length"), "int32"),
            source(names.lengths_of("question_length"), "int32"),
        )

    def forward(
        self, story: Tensor, question: Tensor, num_sentences: Tensor, question_lengths: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums = story.sum(dim=2).to(torch.float32)[:, :, None]
        numbers = (question.sum(dim=1) + 5 * question_lengths + 11 * num_sentences)[:, None]
        return operators.write_prefix(memory, sums, axis=1), numbers.to(torch.float32).remainder(101)


@dataclass(frozen=True)
class Kind:
    """A kind of source.

    Attributes:
        draw: Returns the sources of a request whose length is given.
        memory: Returns the request's memory and its first state, by definition.
    """

    encode: type[_Encode]
    rule: LengthRule
    max_source_length: int
    memory_capacity: int
    draw: Callable[[np.random.Generator, int], dict[str, Array]]
    memory: Callable[[dict[str, Array]], tuple[list[int], int]]


def picture_memory(sources: dict[str, Array]) -> tuple[list[int], int]:
    pixels = sources["pixels"].astype(int)
    return [pixels[y : y + 2, x : x + 2].sum() for y in (0, 2, 4) for x in (0, 2, 4)], 0


def video_memory(sources: dict[str, Array]) -> tuple[list[int], int]:
    frames = sources["frames"].astype(int)
    return [frames[i : i + 2].sum() for i in range(0, len(frames), 2)], len(frames)


def story_memory(sources: dict[str, Array]) -> tuple[list[int], int]:
    story, question = sources["story_ids"], sources["question_ids"]
    return story.sum(axis=1).tolist(), (question.sum() + 5 * len(question) + 11 * len(story)) % 101


def draw_story(rng: np.random.Generator, length: int) -> dict[str, Array]:
    shapes = {"story_ids": (length, rng.integers(1, 9)), "question_ids": (rng.integers(1, 30),)}
    return {name: rng.integers(1, 100, shape) for name, shape in shapes.items()}


KINDS = {
    "a constant": Kind(
        EncodePicture,
        LengthRule("pixels", constant=9),
        max_source_length=6,
        memory_capacity=9,
        draw=lambda rng, _: {"pixels": rng.integers(0, 9, (6, 6, 3), np.uint8)},
        memory=picture_memory,
    ),
    "a stride": Kind(
        EncodeVideo,
        LengthRule("frames", stride=2),
        max_source_length=41,
        memory_capacity=21,
        draw=lambda rng, length: {"frames": rng.integers(0, 9, (length, 2, 2, 3), np.uint8)},
        memory=video_memory,
    ),
    "two sources": Kind(
        EncodeStory,
        LengthRule("story_ids"),
        max_source_length=20,
        memory_capacity=20,
        draw=draw_story,
        memory=story_memory,
    ),
}


def expected_tokens(memory: list[int], state: int, count: int) -> list[int]:
    token, tokens = BOS, []
    for _ in range(count):
        total = sum(place * value for place, value in enumerate(memory, start=1)) + 7 * state + token
        state = (3 * state + token) % 101
        token = EOS + 1 + total % (VOCAB_SIZE - EOS - 1)
        tokens.append(token)
    return tokens


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def bundle(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Written as an export writes it, without a trained model and its proof."""
    folder: Path = tmp_path_factory.mktemp("toy")
    byte_tokenizer().save(folder / TOKENIZER_FILE)
    modules = {Verb.ENCODE: kind.encode(), Verb.STEP: Step()}
    sizes = {"clip_length": 6, "story_length": 6, "sentence_length": 8, "question_length": 10}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_EXAMPLE_SIZES", convert._EXAMPLE_SIZES | sizes)
        models = {verb: convert.convert(module) for verb, module in modules.items()}
    paths = convert.save(models, folder)
    graphs = {
        verb: GraphSpec(file_spec(folder, paths[verb].name), module.inputs, module.outputs)
        for verb, module in modules.items()
    }
    tokenizer, weights = (file_spec(folder, name) for name in (TOKENIZER_FILE, convert.WEIGHTS_FILE))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        kind="toy",
        sizes={"vocab_size": VOCAB_SIZE},
        special_ids=SpecialIds(PAD, BOS, EOS, unk_id=3, decoder_start_id=BOS),
        memory=kind.rule,
        max_source_length=kind.max_source_length,
        max_target_length=MAX_TARGET_LENGTH,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        variants={Precision.FP32: Variant(graphs, weights, Parity(0.0, 0.0, ()))},
    )
    write_manifest(folder, manifest)
    return load_bundle(folder)


def make_runner(bundle: Bundle, **options) -> OnnxRunner:
    return OnnxRunner(bundle, RunnerConfig(provider="cpu", num_threads=1, **options))


def test_each_request_gets_its_own_tokens_and_attention_alone_and_in_any_batch(kind, bundle):
    rng, chance = np.random.default_rng(0), random.Random(0)
    runner = make_runner(bundle, max_slots=5)
    runner.warm_up()
    requests = []
    for length in [1, kind.max_source_length, *rng.integers(1, kind.max_source_length + 1, 22)]:
        sources = kind.draw(rng, length)
        memory_length = kind.rule.memory_length({kind.rule.source: len(sources[kind.rule.source])})
        count = chance.randint(1, MAX_TARGET_LENGTH)
        requests.append(Request("r", sources, memory_length, count, 0.0, attention=chance.random() < 0.5))
    for batch, pauses in ((requests[:4], [MAX_TARGET_LENGTH + 1]), (requests[4:], [0, 0, 1, 3])):
        driver = Driver(runner)
        for request in batch:
            driver.submit(request)
            driver.turn(chance.choice(pauses))
        driver.finish()
        for request in batch:
            memory, state = kind.memory(request.sources)
            [hypothesis] = driver.results[request].hypotheses
            assert list(hypothesis.token_ids) == expected_tokens(memory, state, request.max_new_tokens)
            if request.attention:
                assert hypothesis.attention.tolist() == [memory] * request.max_new_tokens


def test_memory_has_room_for_the_longest_source_and_no_more(kind, bundle):
    sizing = size_up(bundle, RunnerConfig(provider="cpu", num_threads=1))
    assert sizing.sizes[Axis.MEMORY_CAPACITY] == kind.memory_capacity
    assert sizing.slot_bytes == 4 * (kind.memory_capacity + 2)  # the state has two copies
    runner = make_runner(bundle, max_slots=2, max_source_length=5)
    assert runner.max_source_length == 5
    assert runner.slot_bytes == 4 * (kind.rule.memory_length({kind.rule.source: 5}) + 2)
