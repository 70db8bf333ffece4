"""Small graphs without weights whose answers are known exactly, for every form of source.

The next token is an exact function of the memory, the state and the last token. If any position of a row's
memory is wrong, the row decodes other tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import (
    GraphSpec,
    LengthRule,
    Manifest,
    Parity,
    SpecialIds,
    TensorSpec,
    TokenTemplate,
    Variant,
    file_spec,
    write_manifest,
)
from seq2seq_serve.bundle.names import FORMAT_VERSION, TOKENIZER_FILE, Axis, Form, Precision, Role, Verb
from seq2seq_serve.export import convert
from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.base import Graph, outs, token_specs
from seq2seq_serve.server.engine.request import Array, Request
from tests.server.service.harness import BOS, EOS, PAD, byte_tokenizer

VOCAB_SIZE = byte_tokenizer().vocab_size
MAX_TARGET_LENGTH = 10
MEMORY = TensorSpec(names.memory("sums"), "float32", (Axis.BATCH, Axis.MEMORY_CAPACITY, 1), Role.MEMORY)
STATE = TensorSpec(names.state("number"), "float32", (Axis.BATCH, 1), Role.STATE)


def source(name: str, dtype: str, *axes: int | str) -> TensorSpec:
    return TensorSpec(name, dtype, (Axis.BATCH, *axes), Role.SOURCE)


class Step(Graph):
    """The definition is `expected_tokens`. Its attention is the memory, that of a first hop the double."""

    def __init__(self, *, has_hops: bool) -> None:
        super().__init__()
        self.has_hops = has_hops
        self.inputs = (*token_specs(names.LAST_SOURCE_POSITIONS), MEMORY, STATE)
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, VOCAB_SIZE), Role.LOGITS)
        axes = (Axis.BATCH, *(2,) * has_hops, Axis.MEMORY_CAPACITY)
        attention = TensorSpec(names.ATTENTION, "float32", axes, Role.ATTENTION)
        self.outputs = (logits, attention, *outs([STATE]))

    def forward(self, token_ids: Tensor, last: Tensor, memory: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(memory.shape[1])
        values = torch.where(places <= last[:, None], memory[:, :, 0], 0.0)  # (B, C)
        token = token_ids.to(torch.float32)
        total = (values * (places + 1)).sum(dim=1) + 7 * state[:, 0] + token
        following = EOS + 1 + total.remainder(VOCAB_SIZE - EOS - 1)
        logits = -((torch.arange(VOCAB_SIZE) - following[:, None]) ** 2)
        attention = torch.stack((2 * values, values), dim=1) if self.has_hops else values
        return logits, attention, (3 * state + token[:, None]).remainder(101)


class _Encode(Graph):
    def __init__(self, *sources: TensorSpec) -> None:
        super().__init__()
        self.inputs = (*sources, MEMORY)
        self.outputs = tuple(outs([MEMORY, STATE]))


class EncodeText(_Encode):
    """A position is a token."""

    def __init__(self) -> None:
        super().__init__(source(names.SOURCE_IDS, "int64", Axis.SOURCE_LENGTH))

    def forward(self, ids: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        values = ids.to(torch.float32)[:, :, None]
        return operators.write_prefix(memory, values, axis=1), torch.zeros_like(values[:, 0])


class EncodePicture(_Encode):
    """A position is a patch of 2 x 2 of 6 x 6 pixels."""

    def __init__(self) -> None:
        super().__init__(source(names.PICTURE, "uint8", 6, 6, 3))

    def forward(self, pixels: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        patches = pixels.to(torch.float32).view(-1, 3, 2, 3, 2, 3).sum(dim=(2, 4, 5)).reshape(-1, 9, 1)
        return operators.write_prefix(memory, patches, axis=1), torch.zeros_like(patches[:, 0])


class EncodeClip(_Encode):
    """A position is two frames, or the last frame of an odd number."""

    def __init__(self) -> None:
        super().__init__(
            source(names.CLIP, "uint8", "clip_length", 2, 2, 3),
            source(names.lengths_of("clip_length"), "int32"),
        )

    def forward(self, frames: Tensor, num_frames: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        is_frame = torch.arange(frames.shape[1]) < num_frames[:, None]
        sums = torch.where(is_frame, frames.to(torch.float32).sum(dim=(2, 3, 4)), 0.0)  # (B, frames)
        padded = torch.nn.functional.pad(sums, (0, 1))
        pairs = padded[:, 0:-1:2] + padded[:, 1::2]
        state = num_frames[:, None].to(torch.float32)
        return operators.write_prefix(memory, pairs[:, :, None], axis=1), state


class EncodeFeatures(_Encode):
    """A position is an annotation of three numbers."""

    def __init__(self) -> None:
        super().__init__(
            source(names.FEATURES, "float32", "feature_length", 3),
            source(names.lengths_of("feature_length"), "int32"),
        )

    def forward(self, features: Tensor, lengths: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        sums = features.sum(dim=2, keepdim=True)
        return operators.write_prefix(memory, sums, axis=1), lengths[:, None].to(torch.float32)


class EncodeStory(_Encode):
    """A position is a sentence; the question becomes the state."""

    def __init__(self) -> None:
        super().__init__(
            source(names.STORY, "int64", "story_length", "sentence_length"),
            source(names.QUESTION, "int64", "question_length"),
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
    """A kind of model.

    Attributes:
        draw: Returns the sources of a request whose length is given.
        memory: Returns the request's memory and its first state, by definition.
        has_hops: Whether the step answers with the attention of two hops.
    """

    encode: type[_Encode]
    forms: dict[str, Form]
    rule: LengthRule
    max_source_length: int
    memory_capacity: int
    draw: Callable[[np.random.Generator, int], dict[str, Array]]
    memory: Callable[[dict[str, Array]], tuple[list[int], int]]
    has_hops: bool = False

    def request(self, sources: dict[str, Array], max_new_tokens: int, **options) -> Request:
        lengths = {name: len(array) for name, array in sources.items()}
        return Request("r", dict(sources), self.rule.memory_length(lengths), max_new_tokens, 0.0, **options)

    def attention(self, sources: dict[str, Array], count: int) -> list[list]:
        """The attention of a target of `count` tokens, by definition."""
        memory, _ = self.memory(sources)
        return [[[2 * value for value in memory], memory] if self.has_hops else memory] * count

    def tokens(self, sources: dict[str, Array], count: int) -> list[int]:
        """The first tokens of the target, by definition."""
        return expected_tokens(*self.memory(sources), count)


def picture_memory(sources: dict[str, Array]) -> tuple[list[int], int]:
    pixels = sources[names.PICTURE].astype(int)
    return [pixels[y : y + 2, x : x + 2].sum() for y in (0, 2, 4) for x in (0, 2, 4)], 0


def clip_memory(sources: dict[str, Array]) -> tuple[list[int], int]:
    frames = sources[names.CLIP].astype(int)
    return [frames[i : i + 2].sum() for i in range(0, len(frames), 2)], len(frames)


def story_memory(sources: dict[str, Array]) -> tuple[list[int], int]:
    story, question = sources[names.STORY], sources[names.QUESTION]
    return story.sum(axis=1).tolist(), (question.sum() + 5 * len(question) + 11 * len(story)) % 101


def draw_story(rng: np.random.Generator, length: int) -> dict[str, Array]:
    shapes = {names.STORY: (length, rng.integers(1, 9)), names.QUESTION: (rng.integers(1, 30),)}
    return {name: rng.integers(4, 100, shape) for name, shape in shapes.items()}


KINDS = {
    "text": Kind(
        EncodeText,
        {names.SOURCE_IDS: Form.TEXT},
        LengthRule(names.SOURCE_IDS),
        max_source_length=30,
        memory_capacity=30,
        draw=lambda rng, length: {names.SOURCE_IDS: rng.integers(4, 100, length)},
        memory=lambda sources: (sources[names.SOURCE_IDS].tolist(), 0),
    ),
    "picture": Kind(
        EncodePicture,
        {names.PICTURE: Form.PICTURE},
        LengthRule(names.PICTURE, constant=9),
        max_source_length=6,
        memory_capacity=9,
        draw=lambda rng, _: {names.PICTURE: rng.integers(0, 256, (6, 6, 3), np.uint8)},
        memory=picture_memory,
    ),
    "clip": Kind(
        EncodeClip,
        {names.CLIP: Form.CLIP},
        LengthRule(names.CLIP, stride=2),
        max_source_length=41,
        memory_capacity=21,
        draw=lambda rng, length: {names.CLIP: rng.integers(0, 256, (length, 2, 2, 3), np.uint8)},
        memory=clip_memory,
    ),
    "features": Kind(
        EncodeFeatures,
        {names.FEATURES: Form.FEATURES},
        LengthRule(names.FEATURES),
        max_source_length=25,
        memory_capacity=25,
        draw=lambda rng, length: {names.FEATURES: rng.integers(-50, 50, (length, 3)).astype(np.float32)},
        memory=lambda sources: (
            sources[names.FEATURES].sum(axis=1).astype(int).tolist(),
            len(sources[names.FEATURES]),
        ),
    ),
    "story": Kind(
        EncodeStory,
        {names.STORY: Form.SENTENCES, names.QUESTION: Form.TEXT},
        LengthRule(names.STORY),
        max_source_length=20,
        memory_capacity=20,
        draw=draw_story,
        memory=story_memory,
        has_hops=True,
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


@functools.cache
def _step(*, has_hops: bool) -> tuple[Step, ir.Model]:
    """The step that several kinds have, converted once."""
    step = Step(has_hops=has_hops)
    return step, convert.convert(step)


def write_toy(kind: Kind, folder: Path) -> None:
    """Writes a bundle as an export does, without a trained model and its proof."""
    byte_tokenizer().save(folder / TOKENIZER_FILE)
    step, step_model = _step(has_hops=kind.has_hops)
    modules = {Verb.ENCODE: kind.encode(), Verb.STEP: step}
    models = {Verb.ENCODE: convert.convert(modules[Verb.ENCODE]), Verb.STEP: step_model}
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
        source_vocab_size=VOCAB_SIZE,
        target_vocab_size=VOCAB_SIZE,
        special_ids=SpecialIds(PAD, (EOS,)),
        template=TokenTemplate(start=(BOS,), source_suffix=(EOS,)),
        sources=kind.forms,
        memory=kind.rule,
        max_source_length=kind.max_source_length,
        max_target_length=MAX_TARGET_LENGTH,
        source_tokenizer=tokenizer,
        target_tokenizer=tokenizer,
        variants={Precision.FP32: Variant(graphs, weights, Parity(0.0, 0.0, ()))},
    )
    write_manifest(folder, manifest)
