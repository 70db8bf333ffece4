"""End-to-end memory networks: attention in several hops over the sentences of a story, for a question.

    sentence    x_i is the words x_i1 ... x_iJ, and embed(E, x_i) = sum_j l_j * E x_ij          section 2.1
    position    l_kj = 2 (1 - j/J) - 2 (k/D) (1 - 2j/J), or 1 without position encoding         section 4.1
    memories    m_i = embed(A, x_i) + T_A(i), c_i = embed(C, x_i) + T_C(i)                      section 4.1
    question    u = embed(B, q)                                                                 section 2.1
    hop         p_i = softmax_i(u^T m_i), o = sum_i p_i c_i                                     equations 1, 2
    empty       the softmax covers max_source_length places; m_i = c_i = 0 after the story
    adjacent    u' = u + o; the next A and T_A are this C and T_C, B = A^1, W^T = C^K           section 2.2
    layer-wise  u' = H u + o; all hops share A, T_A, C and T_C; B and W are other matrices      section 2.2
    answer      softmax(W u'), u' after the last hop                                            equation 3

Sukhbaatar et al. 2015, arXiv:1503.08895. The factors l are twice those of the paper's text, so that their
mean is 1, as without position encoding. T_A and T_C count sentences from the last one. The answer is one
token; the state of the position after it, which predicts eos, is a learned vector.

Shapes: B batch rows, N sentences, J words of a sentence, T target length, D d_model, V vocabulary, K hops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from seq2seq_serve.bundle.checked import checked
from seq2seq_serve.training.config import BOS_ID, PAD_ID, Count, ModelConfig, Share
from seq2seq_serve.training.data.sources import STORIES, SourceKind
from seq2seq_serve.training.models.base import EncoderDecoder, Layers, Memory, Metric, State
from seq2seq_serve.training.models.dropout import Dropout, dropout

Tying = Literal["adjacent", "layer-wise"]

_INITIAL_DEVIATION = 0.1  # section 4.2


@checked(strict=True)
class MemoryNetworkConfig(ModelConfig):
    """The sizes and the recipe of a memory network.

    `max_source_length` counts the sentences of a story. `dropout` applies to the embedded sentences and the
    embedded question. `tied` must be "all": `tying` says which matrices are shared.

    Attributes:
        num_hops: K.
        tying: How the matrices of the hops are shared, "adjacent" or "layer-wise".
        has_position_encoding: Whether l_kj depends on the place of a word in its sentence.
        time_noise: The number of empty memories that training inserts at random places of a story, as a
            share of its sentences, rounded up; they only shift T_A and T_C (section 4.1, "random noise").
        has_empty_memories: Whether the softmax also covers the empty places of a memory for
            `max_source_length` sentences. A hop can then find nothing: weights of
            the story's sentences sum to less than 1.
        num_linear_steps: The number of first training steps without the softmax of the memories (section
            4.2, "linear start"). Evaluation always has the softmax.
    """

    _: KW_ONLY
    dropout: Share = 0.0
    num_hops: Count = 3
    tying: Tying = "adjacent"
    has_position_encoding: bool = True
    has_empty_memories: bool = True
    time_noise: Share = 0.1
    num_linear_steps: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        self.require(self.tied == "all", "tied", '"all" for a memory network, whose `tying` decides')

    @property
    def free_in_a_child(self) -> tuple[str, ...]:
        """Not `max_source_length`, which is the number of rows of T_A and T_C."""
        return tuple(name for name in super().free_in_a_child if name != "max_source_length")

    @property
    def num_unstable_steps(self) -> int:
        # Without the softmax, the logits of a new model grow with the third power of a story's length.
        return self.num_linear_steps


class MemoryNetwork(EncoderDecoder):
    """The model of the module's docstring.

    The memory holds the story as each matrix embeds it, (B, N, D) each, and the question u (B, D). Adjacent
    tying has K + 1 of them, of which hop k has number k as m and number k + 1 as c; layer-wise tying has two.
    The state is empty. Pad words count as nothing, so the null symbol's embedding is zero.

    Attributes:
        embedding: W, and with adjacent tying the last C.
        words: The matrices that embed sentences, without the last C of adjacent tying: the K matrices A, or
            A and C.
        times: T_A and T_C of the memory's tensors, by the number of later sentences.
        query: B; None with adjacent tying.
        transition: H; None with adjacent tying.
        end: The state (D,) of every position after the first.
    """

    config: MemoryNetworkConfig
    query: nn.Embedding | None
    transition: nn.Linear | None

    def __init__(self, config: MemoryNetworkConfig) -> None:
        super().__init__(config)
        V, D = config.vocab_size, config.d_model
        is_adjacent = config.tying == "adjacent"
        self.words = Layers[nn.Embedding](
            nn.Embedding(V, D) for _ in range(config.num_hops if is_adjacent else 2)
        )
        num_stories = config.num_hops + 1 if is_adjacent else 2
        self.times = Layers[nn.Embedding](
            nn.Embedding(config.max_source_length, D) for _ in range(num_stories)
        )
        self.query = None if is_adjacent else nn.Embedding(V, D)
        self.transition = None if is_adjacent else nn.Linear(D, D, bias=False)
        self.end = nn.Parameter(torch.empty(D))
        self.dropout = Dropout(config.dropout)
        self._is_linear = False
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=_INITIAL_DEVIATION)

    @property
    def metric(self) -> Metric:
        return "accuracy"

    @classmethod
    def source_kind_of(cls, config: ModelConfig) -> SourceKind:  # noqa: ARG003
        return STORIES

    @property
    def source_weight(self) -> Tensor:
        """The matrix (V, D) that embeds the question."""
        return self.story_weights[0] if self.query is None else self.query.weight

    @property
    def story_weights(self) -> list[Tensor]:
        """The matrices (V, D) that embed the story, in the order of the memory."""
        last = [self.embedding] if self.config.tying == "adjacent" else []
        return [each.weight for each in (*self.words, *last)]

    def begin_step(self, step: int) -> None:
        """Choose between the linear start and the whole model, for the training step of that number."""
        self._is_linear = step <= self.config.num_linear_steps

    def encode(self, *source: Tensor) -> Memory:
        """Turn stories (B, N, J), questions (B, J) and the mask of sentences (B, N) into the memory."""
        story, question, source_mask = source
        B, N, _ = story.shape
        ages = self._ages(source_mask).clamp(max=self.config.max_source_length - 1)  # (B, N)
        # Stories of very different lengths share a batch, so their padding is not embedded.
        (real,) = source_mask.flatten().nonzero(as_tuple=True)  # (sentences,)
        sentences, their_ages = story.flatten(0, 1)[real], ages.flatten()[real]
        shares = self._shares(sentences)
        memory = []
        for weight, times in zip(self.story_weights, self.times, strict=True):
            embedded = self.dropout(embed(sentences, shares, weight) + times(their_ages))
            padded = embedded.new_zeros(B * N, embedded.shape[1]).index_copy(0, real, embedded)
            memory.append(padded.view(B, N, -1))
        return (*memory, self.dropout(embed(question, self._shares(question), self.source_weight)))

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        return self._states(target_ids, self._attend(memory, source_mask)[0])

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """`decode`, and the weights (B, 1, T, N) of each hop; every position has those of the answer."""
        answers, weights = self._attend(memory, source_mask)
        T = target_ids.shape[1]
        logits = self.project(self._states(target_ids, answers))
        return logits, [hop[:, None, None].expand(-1, 1, T, -1) for hop in weights]

    def alignment(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights of the last hop."""
        return weights[-1][:, 0]

    def reported_attention(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights of every hop (B, T, K, N); without K if it is 1."""
        hops = torch.stack([hop[:, 0] for hop in weights], dim=2)
        return hops if len(weights) > 1 else hops[:, :, 0]

    def start(self, memory: Memory, source_mask: Tensor) -> State:  # noqa: ARG002
        return ()

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        return self.decode_states(token_ids[:, None], memory, source_mask)[:, 0], state

    def _states(self, target_ids: Tensor, answers: Tensor) -> Tensor:
        """The states (B, T, D): the answer's (B, D) after bos, the vector `end` after every other token."""
        is_first = target_ids == BOS_ID  # (B, T)
        return torch.where(is_first[:, :, None], answers[:, None], self.end)

    def _attend(self, memory: Memory, source_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The last u' (B, D), and the weights p (B, N) of each hop."""
        *stories, u = memory
        all_weights = []
        for hop in range(self.config.num_hops):
            m, c = stories[hop : hop + 2] if self.config.tying == "adjacent" else stories
            if self.training and self._is_linear:
                weights = (m @ u[:, :, None])[:, :, 0].masked_fill(~source_mask, 0.0)  # (B, N)
            else:
                weights = attention_weights(u, m, source_mask, self.config)
            o = (weights[:, None] @ c)[:, 0]  # (B, D)
            u = o + (u if self.transition is None else self.transition(u))
            all_weights.append(weights)
        return u, all_weights

    def _ages(self, source_mask: Tensor) -> Tensor:
        """The number of later sentences (B, N), in training with those that `time_noise` inserts."""
        N = source_mask.shape[1]
        lengths = source_mask.sum(dim=1, keepdim=True)  # (B, 1)
        ages = (lengths - 1 - torch.arange(N, device=source_mask.device)).clamp(min=0)  # (B, N)
        share = self.config.time_noise
        if not self.training or not share:
            return ages
        numbers = torch.arange(math.ceil(share * N), device=source_mask.device)
        is_inserted = numbers < (share * lengths).ceil()  # (B, most empty memories)
        places = torch.rand(is_inserted.shape, device=source_mask.device) * (lengths + 1)
        # An empty memory at place p comes after p sentences, counted from the end.
        places = places.floor().masked_fill(~is_inserted, N + 1)
        return ages + (places[:, None] <= ages[:, :, None]).sum(dim=2)

    def _shares(self, ids: Tensor) -> Tensor:
        """`word_shares`, in training with word dropout."""
        shares = word_shares(ids, self.config)
        if self.training and self.config.word_dropout:
            kept = dropout(torch.ones(ids.shape, device=ids.device), self.config.word_dropout)
            shares = shares * kept.unsqueeze(-2)
        return shares


def word_shares(ids: Tensor, config: MemoryNetworkConfig) -> Tensor:
    """The shares of the words of sentences (…, J) in their embeddings, 0 at pads: see `embed`.

    They are 2 (1 - j/J) and 2 (1 - 2j/J) of the word at place j from 1, (…, 2, J); without position encoding
    1, (…, 1, J).
    """
    is_word = (ids != PAD_ID).unsqueeze(-2)
    if not config.has_position_encoding:
        return is_word.float()
    J = is_word.sum(dim=-1, keepdim=True).clamp(min=1)
    places = torch.arange(1, ids.shape[-1] + 1, device=ids.device) / J
    return torch.cat([2 * (1 - places), 2 * (1 - 2 * places)], dim=-2) * is_word


def embed(ids: Tensor, shares: Tensor, weight: Tensor) -> Tensor:
    """The embeddings (…, D) of sentences (…, J) by a matrix (V, D): sums of l_kj E x_j over the words."""
    sums = shares.to(weight.dtype) @ functional.embedding(ids, weight)  # (…, 1 or 2, D)
    if shares.shape[-2] == 1:
        return sums.squeeze(-2)
    D = weight.shape[1]
    units = (torch.arange(1, D + 1, device=ids.device) / D).to(weight.dtype)  # k/D
    return sums.select(-2, 0) - units * sums.select(-2, 1)


def attention_weights(u: Tensor, m: Tensor, source_mask: Tensor, config: MemoryNetworkConfig) -> Tensor:
    """The weights p (B, N) of a hop with the query u (B, D) over m (B, N, D).

    The mask (B, N) is True at the story's sentences. N may be more than `max_source_length`.
    """
    scores = (m @ u[:, :, None])[:, :, 0].masked_fill(~source_mask, -math.inf)  # (B, N)
    if not config.has_empty_memories:
        return scores.softmax(dim=1)
    # Each empty place has the score 0, so n of them together count as one with the score log n.
    num_empty = config.max_source_length - source_mask.sum(dim=1, keepdim=True)  # (B, 1)
    empty = num_empty.clamp(min=0).to(scores.dtype).log()
    return torch.cat([scores, empty], dim=1).softmax(dim=1)[:, :-1]
