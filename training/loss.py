"""The loss, computed together with its gradient so that the logits of a whole batch never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from training.batches import Batch
from training.transformer import Transformer

# Logits at once: what stays in a CPU's cache and still fills a matrix product, and what fills a GPU.
_CHUNK_VALUES = {"cpu": 2**21, "cuda": 2**27}


def label_smoothed_loss(states: Tensor, weight: Tensor, label_ids: Tensor, label_smoothing: float) -> Tensor:
    """Mean cross-entropy (in nats) against (1 - e) of the label and e spread over the vocabulary.

    Szegedy et al. 2016, section 7, arXiv:1512.00567; Vaswani et al. 2017, section 5.4. The same number as
    `functional.cross_entropy(states @ weight.T, label_ids, label_smoothing=e)`, in half the time on a CPU.

    Args:
        states: What the output projection is given, (N, D).
        weight: Of the output projection, (V, D).
        label_ids: (N,).
        label_smoothing: e.
    """
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, weight, label_ids, label_smoothing
    )
    return loss


class BatchLoss(nn.Module):
    """From a batch to the mean loss of its target tokens, in one call that processes can share.

    Args:
        model: What is trained.
        dtype: What matrices are multiplied in; weights stay float32.
        is_compiled: Whether `torch.compile` compiles the model, for all lengths at once.
    """

    def __init__(self, model: Transformer, dtype: torch.dtype, is_compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self._states = _compiled(self._decoder_states) if is_compiled else self._decoder_states

    def forward(self, batch: Batch, label_smoothing: float) -> Tensor:
        """The loss, see `label_smoothed_loss`."""
        is_lower = self.dtype != torch.float32
        with torch.autocast(batch.source_ids.device.type, self.dtype, enabled=is_lower):
            states = self._states(batch.source_ids, batch.source_mask, batch.target_ids)  # (B, T, D)
            answers = states.flatten(0, 1)[batch.label_places]  # (labels, D)
            return label_smoothed_loss(answers, self.model.output_weight, batch.label_ids, label_smoothing)

    def _decoder_states(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        memory = self.model.encode(source_ids, source_mask)
        return self.model.decode_states(target_ids, memory, source_mask)


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, compiled at its first call; a ValueError says where that is not possible."""
    compiled = torch.compile(function, dynamic=True)

    def call(*inputs: Tensor) -> Tensor:
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


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Projects some rows at a time, and keeps of their logits only the gradients that they lead to.

    The loss of a row is log(sum(exp(logits))) less what its label says they should be; so are its gradients.
    The second part needs no logits, and only the first goes through the vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, label_ids: Tensor, label_smoothing: float
    ) -> Tensor:
        N, V = len(states), len(weight)
        share = 1 - label_smoothing
        average = label_smoothing * weight.mean(dim=0)  # (D,)
        labels = share * weight[label_ids]  # (N, D)
        sums = [-(states * (labels + average)).sum()]
        states_gradient = -labels - average  # (N, D)
        weight_gradient = (-label_smoothing / V * states.sum(dim=0)).expand_as(weight).float().clone()
        weight_gradient.index_add_(0, label_ids, states.float(), alpha=-share)
        chunk_rows = max(_CHUNK_VALUES[states.device.type] // V, 1)
        for start in range(0, N, chunk_rows):
            rows = states[start : start + chunk_rows]
            logits = (rows @ weight.t()).float()  # (rows, V)
            largest = logits.amax(dim=1, keepdim=True)
            exponentials = logits.sub_(largest).exp_()
            total = exponentials.sum(dim=1, keepdim=True)  # (rows, 1)
            sums.append((largest + total.log()).sum())
            exponentials = exponentials.to(rows.dtype)
            states_gradient[start : start + chunk_rows] += exponentials @ weight.to(rows.dtype) / total
            weight_gradient += exponentials.t() @ (rows / total).to(rows.dtype)
        ctx.save_for_backward(states_gradient / N, weight_gradient / N)
        return torch.stack(sums).sum() / N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states_gradient, weight_gradient = ctx.saved_tensors
        (gradient,) = gradients
        return states_gradient * gradient, weight_gradient * gradient, None, None
