"""The loss of `training.loss` in the form that training uses: with its gradients, a chunk of rows at a time.

Shapes: N labels, V vocabulary, D d_model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Logits computed at once: on a CPU few enough for its cache, on a GPU enough to occupy it.
_CHUNK_VALUES = {"cpu": 2**21, "cuda": 2**27}


def label_smoothed_loss(states: Tensor, weight: Tensor, label_ids: Tensor, label_smoothing: float) -> Tensor:
    """`cross_entropy(states @ weight.T, label_ids, label_smoothing)`, in half the time on a CPU.

    Args:
        states: The input of the output projection, (N, D).
        weight: The output projection's matrix, (V, D).
        label_ids: (N,).
        label_smoothing: e.
    """
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, weight, label_ids, label_smoothing
    )
    return loss


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Projects a chunk of rows at a time, and keeps only the gradients of its logits.

    The loss of a row is log(sum(exp(logits))) minus the logits weighted by q. The gradient of a logit is p
    minus q; the part of q that all tokens share needs no logits. The label's share is taken from p before
    this is rounded: where the model is confident, both are nearly 1. The label's logit is taken from the same
    rounded logits as the sum, so that no loss is negative in any precision.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, label_ids: Tensor, label_smoothing: float
    ) -> Tensor:
        N, V = len(states), len(weight)
        device_type = states.device.type
        is_lower = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_lower else states.dtype
        narrow_weight = weight.to(dtype)
        label_share = 1 - label_smoothing
        average = label_smoothing * weight.mean(dim=0, dtype=torch.float32)  # (D,)
        sums = [-(states.sum(dim=0, dtype=torch.float32) @ average)]
        states_gradient = (-average).repeat(N, 1)  # (N, D)
        weight_gradient = None
        if ctx.needs_input_grad[1]:  # not of a model with an adapter
            weight_gradient = (-label_smoothing / V * states.sum(dim=0)).expand_as(weight).float().clone()
        chunk_rows = max(_CHUNK_VALUES[device_type] // V, 1)
        for start in range(0, N, chunk_rows):
            chunk = slice(start, start + chunk_rows)
            rows, row_labels = states[chunk], label_ids[chunk, None]
            logits = (rows.to(dtype) @ narrow_weight.t()).float()  # (rows, V)
            largest = logits.amax(dim=1, keepdim=True)
            logits -= largest
            label_logits = logits.gather(1, row_labels)  # (rows, 1)
            exponentials = logits.exp_()
            total = exponentials.sum(dim=1, keepdim=True)  # (rows, 1)
            sums.append((total.log() - label_share * label_logits + label_smoothing * largest).sum())
            gradients = exponentials.scatter_add_(1, row_labels, -label_share * total).to(dtype)
            states_gradient[chunk] += gradients @ narrow_weight / total
            if weight_gradient is None:
                continue
            if is_lower:
                weight_gradient += gradients.t() @ (rows / total).to(dtype)
            else:  # in place: with a large V, a matrix in between costs more than the product
                weight_gradient.addmm_(gradients.t(), rows / total)
        ctx.save_for_backward(states_gradient / N, None if weight_gradient is None else weight_gradient / N)
        return torch.stack(sums).sum() / N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states_gradient, weight_gradient = ctx.saved_tensors
        (gradient,) = gradients
        of_weight = None if weight_gradient is None else weight_gradient * gradient
        return states_gradient * gradient, of_weight, None, None
