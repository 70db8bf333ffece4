"""The two graphs of a memory network; `training.models.memory_network` defines their computation.

There is no state and no `decode` graph: `step` computes the answer's state after bos, and after every other
token the vector that precedes eos. All hops run in every step, which answers with the attention of each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seq2seq_serve.bundle import names
from seq2seq_serve.bundle.manifest import TensorSpec
from seq2seq_serve.bundle.names import Axis, Role, Verb
from seq2seq_serve.export.graphs import operators
from seq2seq_serve.export.graphs.base import TYPE_NAMES, Graph, outs, token_specs
from seq2seq_serve.export.graphs.linear import LinearFactory
from seq2seq_serve.training.config import BOS_ID
from seq2seq_serve.training.models.memory_network import MemoryNetwork, attention_weights, embed, word_shares

# B batch rows   N sentences   J words of a sentence   D d_model   V vocabulary   C memory capacity

STORY_LENGTH, SENTENCE_LENGTH, QUESTION_LENGTH = "story_length", "sentence_length", "question_length"


def make_graphs(model: MemoryNetwork, linear: LinearFactory) -> dict[Verb, Graph]:
    """Create both graphs, with maps from the factory."""
    return {Verb.ENCODE: EncodeGraph(model, linear), Verb.STEP: StepGraph(model, linear)}


def _story_specs(model: MemoryNetwork, dtype: torch.dtype) -> list[TensorSpec]:
    """The story as each matrix embeds it."""
    axes = (Axis.BATCH, Axis.MEMORY_CAPACITY, model.config.d_model)
    places = range(len(model.times))
    return [TensorSpec(names.memory(f"story_{i}"), TYPE_NAMES[dtype], axes, Role.MEMORY) for i in places]


def _question_spec(model: MemoryNetwork, dtype: torch.dtype) -> TensorSpec:
    axes = (Axis.BATCH, model.config.d_model)
    return TensorSpec(names.memory("question"), TYPE_NAMES[dtype], axes, Role.MEMORY)


class EncodeGraph(Graph):
    """Embeds a story by each matrix, and its question."""

    def __init__(self, model: MemoryNetwork, linear: LinearFactory) -> None:
        super().__init__()
        self.config = model.config
        self.stories = _parameters(model.story_weights)
        self.times = _parameters([each.weight for each in model.times])
        self.question = nn.Parameter(model.source_weight.detach())
        memory = _story_specs(model, linear.dtype)
        self.inputs = (
            TensorSpec(names.STORY, "int64", (Axis.BATCH, STORY_LENGTH, SENTENCE_LENGTH), Role.SOURCE),
            TensorSpec(names.lengths_of(STORY_LENGTH), "int32", (Axis.BATCH,), Role.SOURCE),
            TensorSpec(names.QUESTION, "int64", (Axis.BATCH, QUESTION_LENGTH), Role.SOURCE),
            *memory,
        )
        self.outputs = (*outs(memory), _question_spec(model, linear.dtype))

    def forward(
        self, story: Tensor, story_lengths: Tensor, question: Tensor, *memory: Tensor
    ) -> tuple[Tensor, ...]:
        latest = self.config.max_source_length - 1
        ages = story_lengths.to(torch.int64)[:, None] - 1 - torch.arange(story.shape[1])  # (B, N)
        ages = ages.clamp(0, latest)
        shares = word_shares(story, self.config)  # (B, N, 1 or 2, J)
        written = []
        for buffer, weight, times in zip(memory, self.stories, self.times, strict=True):
            embedded = embed(story, shares, weight) + nn.functional.embedding(ages, times)
            written.append(operators.write_prefix(buffer, embedded, axis=1))
        return (*written, embed(question, word_shares(question, self.config), self.question))


class StepGraph(Graph):
    """One target position for all running rows: its logits, and the attention of each hop.

    The form for CUDA also writes the most probable tokens into the input of the next step.
    """

    def __init__(self, model: MemoryNetwork, linear: LinearFactory) -> None:
        super().__init__()
        config = self.config = model.config
        self.end = nn.Parameter(model.end.detach())
        transition = model.transition
        self.transition = None if transition is None else linear([transition])
        self.output = linear.output(model.output_weight)
        self.weight = nn.Parameter(model.output_weight.detach()) if self.output is None else None
        self.feeds_itself = linear.is_fused
        token_ids, last = token_specs(names.LAST_SOURCE_POSITIONS)
        self.inputs = (
            token_ids,
            last,
            *_story_specs(model, linear.dtype),
            _question_spec(model, linear.dtype),
        )
        logits = TensorSpec(names.LOGITS, "float32", (Axis.BATCH, config.vocab_size), Role.LOGITS)
        hops = (config.num_hops,) if config.num_hops > 1 else ()
        axes = (Axis.BATCH, *hops, Axis.MEMORY_CAPACITY)
        attention = TensorSpec(names.ATTENTION, "float32", axes, Role.ATTENTION)
        following = TensorSpec(token_ids.name, token_ids.dtype, (Axis.BATCH, 1), Role.TOKEN)
        self.outputs = (logits, attention, *(outs([following]) if self.feeds_itself else []))

    def forward(self, token_ids: Tensor, last: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        *stories, question = memory
        mask = torch.arange(stories[0].shape[1]) <= last[:, None]  # (B, C)
        u, hops = question, list[Tensor]()
        for hop in range(self.config.num_hops):
            m, c = stories[hop : hop + 2] if self.config.tying == "adjacent" else stories
            weights = attention_weights(u, m, mask, self.config)  # (B, C)
            hops.append(weights.to(torch.float32))
            u = (weights[:, None] @ c)[:, 0] + (u if self.transition is None else self.transition(u))
        state = torch.where((token_ids == BOS_ID)[:, None], u, self.end)
        logits = self._project(state)
        following = [operators.most_probable(logits)] if self.feeds_itself else []
        return (logits, torch.stack(hops, dim=1) if len(hops) > 1 else hops[0], *following)

    def _project(self, state: Tensor) -> Tensor:
        """float32 logits `(B, V)`."""
        if self.output is not None:
            return self.output(state)
        assert self.weight is not None
        return operators.gemm(state, self.weight, None, transposed=True).to(torch.float32)


def _parameters(weights: list[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(weight.detach()) for weight in weights)
