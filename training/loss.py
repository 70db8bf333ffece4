"""The loss: its definition, and that of a batch in training.

`cross_entropy` is the definition. Training takes `fast_loss.label_smoothed_loss`, which computes the same
loss together with its gradients, so that it never holds the logits of a whole batch. (The extra loss of hard
attention projects the batch a second time, and holds them all: `models.captioner`.)

Shapes: N labels, V vocabulary, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from seq2seq_serve.training.data.batches import Batch
from seq2seq_serve.training.fast_loss import label_smoothed_loss
from seq2seq_serve.training.models.base import EncoderDecoder, Trace

Result = TypeVar("Result")


def cross_entropy(logits: Tensor, label_ids: Tensor, label_smoothing: float) -> Tensor:
    """Mean over the labels of -sum_v q(v) log p(v), in nats, with p = softmax(logits).

    q(v) is e / V for every token v of the vocabulary, plus 1 - e for the label; e is `label_smoothing`:
    Szegedy et al. 2016, section 7, arXiv:1512.00567; Vaswani et al. 2017, section 5.4. The logits are (N, V).
    """
    log_p = logits.log_softmax(dim=-1)  # (N, V)
    log_p_of_label = log_p.gather(1, label_ids[:, None]).squeeze(1)  # (N,)
    return -((1 - label_smoothing) * log_p_of_label + label_smoothing * log_p.mean(dim=-1)).mean()


class BatchLoss(nn.Module):
    """Computes the mean loss of a batch's target tokens, in one call that DistributedDataParallel can wrap.

    Matrices are multiplied in `dtype`; weights stay float32. With `is_compiled`, `torch.compile` compiles the
    model for all lengths at once; ValueError is raised if the model does not allow that.
    """

    def __init__(self, model: EncoderDecoder, dtype: torch.dtype, is_compiled: bool = False) -> None:
        super().__init__()
        if is_compiled:
            model.check_compilable()
        self.model = model
        self.dtype = dtype
        self._states = _compiled(self._decoder_states) if is_compiled else self._decoder_states

    def forward(self, batch: Batch, label_smoothing: float) -> Tensor:
        """Return `label_smoothed_loss`, in training with the gradients of the model's `extra_loss`.

        The value is without the extra loss, so that reports compare and the guard against divergence sees
        only how well labels are predicted: that of hard attention can be far below 0.
        """
        is_lower = self.dtype != torch.float32
        with torch.autocast(batch.target_ids.device.type, self.dtype, enabled=is_lower):
            states, trace = self._states(*batch.source, batch.target_ids)  # (B, T, D)
            rows = states.flatten(0, 1)[batch.label_places]
            factors = self.model.logit_factors(rows)
            if factors is None:
                logits = self.model.project(rows).float()
                return cross_entropy(logits, batch.label_ids, label_smoothing)
            loss = label_smoothed_loss(*factors, batch.label_ids, label_smoothing)
            if self.model.training:
                extra = self.model.extra_loss(trace, states, batch.padded_labels)
                loss = loss if extra is None else loss + (extra - extra.detach())
            return loss

    def _decoder_states(self, *inputs: Tensor) -> tuple[Tensor, Trace]:
        *source, target_ids = inputs
        return self.model.decode_and_trace(target_ids, self.model.encode(*source), source[-1])


def _compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function, compiled at its first call, which raises ValueError if that is not possible."""
    compiled = torch.compile(function, dynamic=True)

    def call(*inputs: Tensor) -> Result:
        try:
            return compiled(*inputs)
        except RuntimeError as error:
            if type(error).__name__ != "InductorError":
                raise
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"torch.compile does not work here ({reason}): "
                "install a C++ compiler such as g++, or leave out --compile"
            ) from error

    return call
