"""The interface of every family of models, and the embeddings that all families have.

Training, search, scoring and export use a model only through this class. Its verbs are `encode`, `decode` and
`step`; the search for a target is in `training.evaluation.search`.

Shapes: B batch rows, S source length, T target length, D d_model, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from seq2seq_serve.training.config import ModelConfig
from seq2seq_serve.training.data.sources import TOKENS, SourceKind
from seq2seq_serve.training.models.dropout import dropout

# The encoder's output for the decoder, and the decoder's values between two positions. The first dimension of
# each tensor is the row.
Memory = tuple[Tensor, ...]
State = tuple[Tensor, ...]
Trace = tuple[Tensor, ...]  # intermediate results of one pass over a batch, for `extra_loss`
Metric = Literal["bleu", "chrf", "accuracy", "cer", "likelihood"]


_Module = TypeVar("_Module", bound=nn.Module)


def select_rows(tensors: tuple[Tensor, ...], rows: Sequence[int] | Sequence[bool]) -> tuple[Tensor, ...]:
    """Rows of a memory or a state: by number, which may repeat, or by one flag per row."""
    return tuple(tensor[rows] for tensor in tensors)


class Layers(nn.ModuleList, Generic[_Module]):
    """A `ModuleList` with the type of its modules."""

    def __iter__(self) -> Iterator[_Module]:
        return super().__iter__()  # type: ignore[return-value]


class EncoderDecoder(nn.Module, ABC):
    """A model from sources to logits of target tokens.

    A batch of sources is a tuple of tensors with B rows (`training.data.sources`). The last one is the source
    mask (B, S): True at the S positions of the memory that a row has.

    One matrix embeds source and target and is the output projection (Vaswani et al. 2017, section 3.4),
    unless `config.tied` says otherwise; embeddings are multiplied by sqrt(D).

    Every family keeps two promises: `step` repeated returns the states of `decode_states`, and the result of
    a row depends neither on the other rows nor on padding at the end of its source or target.

    Attributes:
        origin: How messages call the model: it is trained here, or imported.
        is_compilable: Whether `torch.compile` can compile the model for all lengths at once.
        embedding: Embeds target tokens, and serves for all that is tied to it.
        source_embedding: None if `embedding` embeds source tokens, too.
        output: The projection to logits; None if the matrix of `embedding` projects them.
    """

    origin: str = "trained"
    is_compilable: ClassVar[bool] = True
    source_embedding: nn.Embedding | None
    output: nn.Linear | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        V, D = config.vocab_size, config.d_model
        self.embedding = nn.Embedding(V, D)
        self.source_embedding = None if config.tied == "all" else nn.Embedding(V, D)
        self.output = nn.Linear(D, V, bias=False) if config.tied == "none" else None

    @property
    def metric(self) -> Metric:
        """The score by which the best weights are chosen.

        "cer" is the character error rate, and "likelihood" the loss on dev: the lowest is best.
        """
        return "bleu"

    @classmethod
    def source_kind_of(cls, config: ModelConfig) -> SourceKind:  # noqa: ARG003
        """The kind of sources that a model of this config reads."""
        return TOKENS

    @property
    def source_kind(self) -> SourceKind:
        """The kind of sources that this model reads."""
        return self.source_kind_of(self.config)

    @classmethod
    def check_compilable(cls) -> None:
        """Raise ValueError unless `torch.compile` can compile the model for all lengths at once."""
        if not cls.is_compilable:
            raise ValueError(
                f"a {cls.__name__} model would be compiled again for each length: leave out --compile"
            )

    @property
    def source_weight(self) -> Tensor:
        """The matrix (V, D) that embeds source tokens."""
        return (self.source_embedding or self.embedding).weight

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) that turns decoder states into logits."""
        layer = self.output or self.embedding
        change = getattr(layer, "get_delta_weight", None)  # of peft, whose layers know their adapter's matrix
        return layer.weight if change is None else layer.weight + change("default")

    @abstractmethod
    def encode(self, *source: Tensor) -> Memory:
        """Turn a batch of sources, its mask last, into the memory, whose tensors have B rows."""

    def encode_with_attention(self, *source: Tensor) -> tuple[Memory, list[Tensor]]:
        """`encode`, and each layer's self-attention weights (B, H, S, S); an empty list by default."""
        return self.encode(*source), []

    @abstractmethod
    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        """`decode` before the output projection, (B, T, D), for callers that need few positions' logits."""

    def project(self, states: Tensor) -> Tensor:
        """Logits (..., V) of decoder states (..., D)."""
        return nn.functional.linear(states, self.output_weight)

    def logit_factors(self, states: Tensor) -> tuple[Tensor, Tensor] | None:
        """States (..., D) and a matrix (V, D) whose product is `project`; None if that is not a product."""
        return states, self.output_weight

    def decode(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each position of the target (B, T), which starts with bos."""
        return self.project(self.decode_states(target_ids, memory, source_mask))

    @abstractmethod
    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """`decode`, and the weights (B, H, T, S) of each attention over the source."""

    @abstractmethod
    def alignment(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The weights of `decode_with_attention` as one matrix (B, T, S); None without attention."""

    def reported_attention(self, weights: Sequence[Tensor]) -> Tensor | None:
        """The weights of `decode_with_attention` as a server answers with them; `alignment` by default.

        A model with several hops over its memory returns those of each, (B, T, hops, S).
        """
        return self.alignment(weights)

    @abstractmethod
    def start(self, memory: Memory, source_mask: Tensor) -> State:
        """The state before the first target position, B rows in each tensor."""

    @abstractmethod
    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        """Read one token (B,) of each target; return its decoder states (B, D) and the state after it."""

    def freeze(self, parts: str) -> None:
        """Let training leave parts as they are: the first words of the names of weights, with commas.

        Raises:
            ValueError: No weight has a name that begins so.
        """
        weights = dict(self.named_parameters())
        for part in parts.split(","):
            found = [weight for name, weight in weights.items() if f"{name}.".startswith(f"{part.strip()}.")]
            if not found:
                known = ", ".join(dict.fromkeys(name.partition(".")[0] for name in weights))
                raise ValueError(f"frozen has {part.strip()!r}, and the model's parts are {known}")
            for weight in found:
                weight.requires_grad_(False)
        if not any(weight.requires_grad for weight in weights.values()):
            raise ValueError("frozen has all parts of the model: nothing to train")

    def begin_step(self, step: int) -> None:
        """Prepare for a training step, counted from 1; training calls it before each step."""

    def finish_step(self, total: Callable[[list[float]], list[float]]) -> None:
        """Use what the pieces of a step's batch left; training calls it after all of them.

        `total` returns the sums of some numbers over all processes.
        """

    def decode_and_trace(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, Trace]:
        """`decode_states` in training, and the tensors that `extra_loss` needs."""
        return self.decode_states(target_ids, memory, source_mask), ()

    def extra_loss(self, trace: Trace, states: Tensor, label_ids: Tensor) -> Tensor | None:  # noqa: ARG002
        """The scalar that training adds to the batch's mean cross-entropy; None adds nothing.

        Args:
            trace: The tensors of `decode_and_trace`.
            states: The decoder states (B, T, D).
            label_ids: The label of each position (B, T); pad where a target has ended.
        """
        return None

    def forward(self, *source_and_target: Tensor) -> Tensor:
        """`encode`, then `decode`, of a batch of sources and the target (B, T): logits (B, T, V)."""
        *source, target_ids = source_and_target
        return self.decode(target_ids, self.encode(*source), source[-1])

    def _look_up(self, token_ids: Tensor, weight: Tensor, scale: float | None = None) -> Tensor:
        """Embeddings (..., D) of token ids (...) times sqrt(D), or another scale.

        `word_dropout` sets some of them to 0.
        """
        scale = math.sqrt(self.config.d_model) if scale is None else scale
        x = nn.functional.embedding(token_ids, weight)
        x = x.to(torch.promote_types(x.dtype, torch.float32)) * scale  # an adapter's base may be in bfloat16
        if self.training and self.config.word_dropout:
            is_word = torch.ones(*token_ids.shape, 1, device=x.device)
            x = x * dropout(is_word, self.config.word_dropout)
        return x

    def _initialise_embeddings(self) -> None:
        # With this size, embeddings times sqrt(D) start with variance 1, and logits with variance about 1.
        for matrix in (self.embedding, self.source_embedding, self.output):
            if matrix is not None:
                nn.init.normal_(matrix.weight, std=self.config.d_model**-0.5)
