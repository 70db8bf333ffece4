"""Captions of pictures and clips: the models of "Show, Attend and Tell" and of Yao et al. 2015.

    annotations  a_1 ... a_M of a picture's places or a clip's frames             Xu et al. 2015, 3.1.1
    start        h_0 = tanh(W mean(a)), c_0 likewise                              the same, 3.1.2
    attention    alpha_t = softmax(e_t), e_ti = v^T tanh(U a_i + W h_{t-1})       equations 4 and 5
    soft         z_t = b_t sum_i alpha_ti a_i                                     equation 13
    hard         z_t = b_t a_s, s drawn from alpha_t; served: the likeliest s     equations 8 and 9
    mean         z_t = b_t mean(a), without attention: "basic"                    Yao et al. 2015, 3.2
    gate         b_t = sigmoid(w^T h_{t-1} + c)                                   Xu et al. 2015, 4.2.1
    decoder      h_t = LSTM([E y_{t-1}; z_t], h_{t-1})                            equations 1 to 3
    output       o_t = tanh(E y_{t-1} + L_h h_t + L_z z_t), logits = L_o o_t      equation 7

Xu is arXiv:1502.03044, Yao arXiv:1502.08029. Equation 7 has no tanh, but its authors' program does. The
convolutional networks are small and trained with the decoder (`models.vision`); the papers' are pre-trained.
Features of a pre-trained network can be the source.

Shapes: B batch rows, T target length, M annotations, A d_annotation, D d_model, E d_hidden, G an LSTM's gates
(4 E), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from seq2seq_serve.bundle.checked import checked
from seq2seq_serve.training.config import PAD_ID, AtLeast0, Count, ModelConfig
from seq2seq_serve.training.data.sources import NOTHING, STRIDE, Clips, Features, Pictures, SourceKind
from seq2seq_serve.training.models.attention import AdditiveAttention
from seq2seq_serve.training.models.base import EncoderDecoder, Memory, Metric, State, Trace
from seq2seq_serve.training.models.dropout import Dropout
from seq2seq_serve.training.models.recurrent import LSTMCell
from seq2seq_serve.training.models.vision import (
    Annotations,
    ClipFeatures,
    PictureFeatures,
    grid_codes,
    line_codes,
)

SourceName = Literal["picture", "clip", "features", "nothing"]
AttentionName = Literal["soft", "hard", "mean"]

# Gain of the attention's score vector. With blurred attention, captions repeat frequent training phrases
# instead of describing the picture.
_GAIN = 10.0
_BASELINE_DECAY = 0.9  # Xu et al. 2015, section 4.1
_TINY = 1e-20  # the logarithm and its gradient are finite where a weight is 0


@checked(strict=True)
class CaptionerConfig(ModelConfig):
    """The sizes of a captioner, and the losses of its attention.

    `dropout` applies to the words' embeddings, to h_t before the output, and to o_t. No source has tokens, so
    `tied` is about the target's embeddings and the output projection only.

    Attributes:
        d_annotation: A, the width of the annotations and of the attention's hidden layer.
        d_hidden: E, the width of the LSTM.
        source: "picture" (a place is 4 x 4 pixels), "clip" (a frame), "features" (computed by the caller), or
            "nothing": a language model of captions, with whose decoder a captioner can start.
        size: Pixels per side of a picture or a clip's frame; features do not use it.
        feature_width: The width of features; None for the other sources.
        num_channels: The first convolution's outputs; the others have twice as many.
        attention: "soft", "hard" or "mean".
        is_local: Whether the annotation of a clip's frame also sees the two before it (Yao et al. 2015, 3.1).
        stochastic_penalty: Weight of sum_i (1 - sum_t alpha_ti)^2, by which every place is to be looked at
            about once (Xu et al. 2015, equation 14).
        soft_share: With hard attention, the share of training rows whose z is the soft one (section 4.1).
        reward_weight: With hard attention, the factor of REINFORCE's gradient; with 1 the whole gradient is
            that of the expected log-likelihood.
        entropy_weight: With hard attention, the factor of alpha's entropy, which training makes larger.
    """

    d_annotation: Count = 128
    d_hidden: Count = 256
    _: KW_ONLY
    source: SourceName = "picture"
    size: Annotated[int, Field(ge=2 * STRIDE)] = 56
    feature_width: Count | None = None
    num_channels: Annotated[int, Field(ge=2)] = 32
    attention: AttentionName = "soft"
    is_local: bool = False
    stochastic_penalty: AtLeast0 = 0.0
    soft_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    reward_weight: AtLeast0 = 1.0
    entropy_weight: AtLeast0 = 0.002

    def __post_init__(self) -> None:
        self.require(self.size % STRIDE == 0, "size", f"a multiple of {STRIDE}")
        if self.source == "picture":
            num_places = Pictures(self.size).num_places
            places = f"at least {num_places}, the places of {self.size} x {self.size} pixels"
            self.require(self.max_source_length >= num_places, "max_source_length", places)
        self.require(not self.is_local or self.source == "clip", "is_local", "false unless source is clip")
        if self.source == "features":
            self.require(self.feature_width is not None, "feature_width", "the width of the features")
        else:
            self.require(self.feature_width is None, "feature_width", "null unless source is features")

    @property
    def free_in_a_child(self) -> tuple[str, ...]:
        """Also the losses and hard instead of soft attention; all about the source if it is nothing."""
        free = *super().free_in_a_child, "attention", "stochastic_penalty"
        free = *free, "soft_share", "reward_weight", "entropy_weight"
        about_source = "source", "size", "feature_width", "num_channels", "is_local"
        return (*free, *about_source) if self.source == "nothing" else free


class Captioner(EncoderDecoder):
    """The model of the module's docstring.

    The memory is the annotations (B, M, A) and their keys (B, M, A); without attention it is only their mean
    (B, A). The state is h and c, (B, E) each. The attention that hard attention reports is alpha, not the
    place that was chosen.

    Attributes:
        features: Computes features of pixels; a linear map for a source that is features already.
        annotations: Adds the codes of places to normalised features.
        initial: Projects the mean annotation to h_0 and c_0.
        cell: Its input is E y_{t-1}; `context` adds the part of z_t to its gates.
        gate: Projects h to the logit of b.
        attention: None without attention.
        readout: Projects [h_t; z_t] to the part of o_t besides E y_{t-1}.
        baseline: (max_target_length,): for each position, a moving average of the log-probability of its
            label after sampled places. It moves once a step, however the batch is cut. Soft attention leaves
            it at 0, so that hard attention can start from a soft one's weights. It starts anew in a child
            with another max_target_length.
        rewards: (2, max_target_length): for each position the sum of these log-probabilities over the pieces
            of the step's batch, and their number.
    """

    is_compilable = False  # the loop over positions would be compiled again for each length
    config: CaptionerConfig
    features: PictureFeatures | ClipFeatures | nn.Linear
    attention: AdditiveAttention | None
    baseline: Tensor
    rewards: Tensor

    def __init__(self, config: CaptionerConfig) -> None:
        super().__init__(config)
        self.source_embedding = None  # sources have no tokens
        A, D, E = config.d_annotation, config.d_model, config.d_hidden
        if config.source == "picture":
            self.features = PictureFeatures(A, config.num_channels)
        elif config.source == "clip":
            self.features = ClipFeatures(config.size, A, config.num_channels, config.is_local)
        elif config.source == "features":
            assert config.feature_width is not None
            self.features = nn.Linear(config.feature_width, A)
        if config.source != "nothing":
            is_picture = config.source == "picture"
            codes = grid_codes(config.size // STRIDE) if is_picture else line_codes(config.max_source_length)
            self.annotations = Annotations(codes, A)
        self.initial = nn.Linear(A, 2 * E)
        self.cell = LSTMCell(D, E)
        self.context = nn.Linear(A, LSTMCell.num_gates * E, bias=False)
        self.gate = nn.Linear(E, 1)
        self.attention = None if config.attention == "mean" else AdditiveAttention(E, A, A, _GAIN)
        self.readout = nn.Linear(E + A, D)
        self.dropout = Dropout(config.dropout)
        self.register_buffer("baseline", torch.zeros(config.max_target_length))
        self.rewards = torch.zeros(2, config.max_target_length)  # not a buffer: each process has its own
        self._initialise()

    @classmethod
    def source_kind_of(cls, config: ModelConfig) -> SourceKind:
        assert isinstance(config, CaptionerConfig)
        if config.source == "nothing":
            return NOTHING
        if config.source == "features":
            assert config.feature_width is not None
            return Features(config.feature_width)
        return Pictures(config.size) if config.source == "picture" else Clips(config.size)

    @property
    def metric(self) -> Metric:
        return "likelihood" if self.config.source == "nothing" else "bleu"

    def encode(self, *source: Tensor) -> Memory:
        *pixels, mask = source
        if self.config.source == "nothing":
            annotations = self.embedding.weight.new_zeros(*mask.shape, self.config.d_annotation)
        else:
            annotations = self.annotations(self.features(*pixels))  # (B, M, A)
        if self.attention is None:
            return (mean_annotation(annotations, mask),)
        return annotations, self.attention.key(annotations)

    def decode_states(self, target_ids: Tensor, memory: Memory, source_mask: Tensor) -> Tensor:
        return self._run(target_ids, self.start(memory, source_mask), memory, source_mask)[0]

    def decode_with_attention(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        states, _, weights, _ = self._run(target_ids, self.start(memory, source_mask), memory, source_mask)
        return self.project(states), [torch.stack(weights, dim=1)[:, None]] if weights else []

    def alignment(self, weights: Sequence[Tensor]) -> Tensor | None:
        """alpha, or None without attention."""
        return weights[0][:, 0] if weights else None

    def start(self, memory: Memory, source_mask: Tensor) -> State:
        mean = memory[0] if self.attention is None else mean_annotation(memory[0], source_mask)
        return tuple(self.initial(mean).tanh().chunk(2, dim=-1))

    def step(
        self, token_ids: Tensor, state: State, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, State]:
        states, state, _, _ = self._run(token_ids[:, None], state, memory, source_mask)
        return states[:, 0], state

    def begin_step(self, step: int) -> None:  # noqa: ARG002
        self.rewards = torch.zeros_like(self.baseline).expand(2, -1).clone()

    def finish_step(self, total: Callable[[list[float]], list[float]]) -> None:
        """Move the baseline towards the mean log-probability of each position's labels in the whole batch."""
        if self.config.attention != "hard":
            return
        sums, numbers = torch.tensor(total(self.rewards.flatten().tolist())).view(2, -1).to(self.baseline)
        means = sums / numbers.clamp_min(1)
        moves = (numbers > 0) & means.isfinite()
        self.baseline.copy_(torch.where(moves, self.baseline.lerp(means, 1 - _BASELINE_DECAY), self.baseline))

    def decode_and_trace(
        self, target_ids: Tensor, memory: Memory, source_mask: Tensor
    ) -> tuple[Tensor, Trace]:
        """`decode_states` and, with attention, alpha (B, T, M) and the mask (B, M).

        With hard attention the trace also has log alpha (B, T) of the sampled places, and which rows sampled
        them (B, 1).
        """
        is_soft = self._draw_soft_rows(len(target_ids), source_mask.device)
        state = self.start(memory, source_mask)
        states, _, weights, log_chosen = self._run(target_ids, state, memory, source_mask, is_soft)
        if not weights:
            return states, ()
        trace = torch.stack(weights, dim=1), source_mask
        return states, trace if is_soft is None else (*trace, torch.stack(log_chosen, dim=1), ~is_soft)

    def extra_loss(self, trace: Trace, states: Tensor, label_ids: Tensor) -> Tensor | None:
        """The penalty of `stochastic_penalty` and, with hard attention, the loss of the sampled places.

        The gradient of the mean loss of N labels, L = -sum_t log p_t / N, has two parts. The cross-entropy
        gives the part for given places. The other part is that of the places' distribution: Xu et al. 2015,
        equation 12, here for each place with the labels that come after it, which are all it can change:

            sum_t -(sum_{t' >= t} log p_t' - baseline_t') grad log alpha_{t, s_t} / N

        With label smoothing only the cross-entropy is smoothed, and this part still rewards log p_t. The two
        parts are then the gradients of different losses.
        """
        if not trace:
            return None
        config = self.config
        weights, source_mask, *sampled = trace
        is_label = label_ids != PAD_ID  # (B, T)
        losses = list[Tensor]()
        if config.stochastic_penalty:
            looks = (weights * is_label[:, :, None]).sum(dim=1)  # (B, M)
            losses.append(config.stochastic_penalty * (1 - looks)[source_mask].square().sum())
        if sampled:
            log_chosen, is_hard = sampled
            is_place = is_label & is_hard
            advantages = self._advantages(states, label_ids, is_place)  # (B, T)
            losses.append(-config.reward_weight * (advantages * log_chosen).sum())
            entropy = -(weights * weights.clamp_min(_TINY).log()).sum(dim=-1)  # (B, T)
            losses.append(-config.entropy_weight * (entropy * is_label).sum())
        return torch.stack(losses).sum() / is_label.sum() if losses else None

    @torch.no_grad()
    def _advantages(self, states: Tensor, label_ids: Tensor, is_place: Tensor) -> Tensor:
        """The later labels' log-probabilities minus the baseline (B, T), 0 except at places.

        In training, `rewards` then gets the log-probabilities. This projects all states a second time, and
        unlike `label_smoothed_loss` it holds all logits at once.
        """
        log_p = self.project(states).float().log_softmax(dim=-1)  # (B, T, V)
        rewards = log_p.gather(2, label_ids[:, :, None]).squeeze(2)  # (B, T)
        T = label_ids.shape[1]
        surplus = (rewards - self.baseline[:T]) * is_place
        if self.training:
            self.rewards[:, :T] += torch.stack([(rewards * is_place).sum(dim=0), is_place.sum(dim=0)])
        return surplus.flip(1).cumsum(dim=1).flip(1) * is_place

    def _draw_soft_rows(self, num_rows: int, device: torch.device) -> Tensor | None:
        """With hard attention in training, which rows (B, 1) take the soft z; otherwise None."""
        if self.config.attention != "hard" or not self.training:
            return None
        return torch.rand(num_rows, 1, device=device) < self.config.soft_share

    def _draw_places(self, weights: Tensor) -> Tensor:
        """A place (B,) for each row of weights (B, M)."""
        return weights.multinomial(1)[:, 0]

    def _run(
        self,
        token_ids: Tensor,
        state: State,
        memory: Memory,
        source_mask: Tensor,
        is_soft: Tensor | None = None,
    ) -> tuple[Tensor, State, list[Tensor], list[Tensor]]:
        """Read T tokens.

        Returns:
            o_t (B, T, D); the state after them; alpha (B, M) of each position, if there is attention; and, if
            `is_soft` is given, log alpha (B,) of each position's sampled place.
        """
        words = self.dropout(self._look_up(token_ids, self.embedding.weight))  # (B, T, D)
        h, c = state
        tops, contexts, all_weights, log_chosen = [], [], list[Tensor](), list[Tensor]()
        for gates in self.cell.input(words).unbind(dim=1):  # (B, G)
            context = memory[0]  # (B, A) without attention
            if self.attention is not None:
                annotations, keys = memory
                soft, weights = self.attention(h[:, None], keys, annotations, source_mask[:, None])
                context, weights = soft[:, 0], weights[:, 0]  # (B, A), (B, M)
                all_weights.append(weights)
                if self.config.attention == "hard":
                    places = weights.argmax(dim=1) if is_soft is None else self._draw_places(weights)  # (B,)
                    rows = torch.arange(len(places), device=places.device)
                    context = _choose(is_soft, context, annotations[rows, places])
                    if is_soft is not None:
                        log_chosen.append(weights[rows, places].log())
            context = self.gate(h).sigmoid() * context
            h, c = self.cell(gates + self.context(context), (h, c))
            tops.append(h)
            contexts.append(context)
        top = self.dropout(torch.stack(tops, dim=1))
        read = torch.cat([top, torch.stack(contexts, dim=1)], dim=-1)  # (B, T, E + A)
        return self.dropout((words + self.readout(read)).tanh()), (h, c), all_weights, log_chosen

    def _initialise(self) -> None:
        # As in `models.recurrent`; convolutions keep the variance of what passes their ReLU (He et al. 2015).
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            if isinstance(module, nn.Conv2d | nn.Conv3d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for gate in self.cell.hidden.weight.data.chunk(LSTMCell.num_gates):
            nn.init.orthogonal_(gate)
        self._initialise_embeddings()


def mean_annotation(annotations: Tensor, mask: Tensor) -> Tensor:
    """The mean (B, A) of each row's own annotations (B, M, A)."""
    is_own = mask[:, :, None].to(annotations.dtype)
    return (annotations * is_own).sum(dim=1) / is_own.sum(dim=1)


def _choose(is_soft: Tensor | None, soft: Tensor, hard: Tensor) -> Tensor:
    """The soft rows (B, A) where `is_soft` (B, 1), and the hard ones elsewhere and without it."""
    return hard if is_soft is None else torch.where(is_soft, soft, hard)
