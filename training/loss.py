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


def label_smoothed_loss(
    states: Tensor, weight: Tensor, label_ids: Tensor, label_smoothing: float, r_drop: float = 0.0
) -> Tensor:
    """Mean cross-entropy (in nats) against (1 - e) of the label and e spread over the vocabulary.

    Szegedy et al. 2016, section 7, arXiv:1512.00567; Vaswani et al. 2017, section 5.4. The same number as
    `functional.cross_entropy(states @ weight.T, label_ids, label_smoothing=e)`, in half the time on a CPU.

    With R-Drop, states are those of two passes, and what the two predict shall agree: to the mean comes
    alpha / 4 times KL(p, q) + KL(q, p) of each label, which is half of equation 4 of Wu, Li et al. 2021,
    arXiv:2106.14448, because they add the cross-entropies of both passes.

    Args:
        states: What the output projection is given, (N, D); with R-Drop the first half is of one pass and the
            second of the other.
        weight: Of the output projection, (V, D).
        label_ids: (N,).
        label_smoothing: e.
        r_drop: alpha; 0 is none.
    """
    loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        states, weight, label_ids, label_smoothing, r_drop
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

    def forward(self, batch: Batch, label_smoothing: float, r_drop: float = 0.0) -> Tensor:
        """The loss, see `label_smoothed_loss`; with R-Drop the batch goes through the model twice at once."""
        num_passes = 2 if r_drop else 1
        ids = (batch.source_ids, batch.source_mask, batch.target_ids)
        is_lower = self.dtype != torch.float32
        with torch.autocast(batch.source_ids.device.type, self.dtype, enabled=is_lower):
            states = self._states(*(rows.repeat(num_passes, 1) for rows in ids))  # (passes * B, T, D)
            states = states.view(num_passes, -1, states.shape[-1])[:, batch.label_places]
            label_ids = batch.label_ids.repeat(num_passes)
            weight = self.model.output_weight
            return label_smoothed_loss(states.flatten(0, 1), weight, label_ids, label_smoothing, r_drop)

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
    The label's logit is taken from the same rounded logits as the sum, so that no loss is negative in any
    precision. The gradients of the second part need no logits, and only those of the first go through the
    vocabulary, where the rows of the two passes of R-Drop meet.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, label_ids: Tensor, label_smoothing: float, r_drop: float
    ) -> Tensor:
        N, (V, D) = len(states), weight.shape
        device_type = states.device.type
        is_lower = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_lower else states.dtype
        narrow_weight = weight.to(dtype)
        label_share = 1 - label_smoothing
        average = label_smoothing * weight.mean(dim=0)  # (D,)
        sums = [-(states.sum(dim=0, dtype=weight.dtype) @ average)]
        states_gradient = -label_share * weight[label_ids] - average  # (N, D)
        weight_gradient = (-label_smoothing / V * states.sum(dim=0)).expand_as(weight).float().clone()
        weight_gradient.index_add_(0, label_ids, states.float(), alpha=-label_share)
        num_passes = 2 if r_drop else 1
        by_pass, label_ids_by_pass = states.view(num_passes, -1, D), label_ids.view(num_passes, -1)
        gradient_by_pass = states_gradient.view_as(by_pass)
        chunk_rows = max(_CHUNK_VALUES[device_type] // V // num_passes, 1)
        for start in range(0, N // num_passes, chunk_rows):
            rows = by_pass[:, start : start + chunk_rows].flatten(0, 1)
            logits = (rows.to(dtype) @ narrow_weight.t()).float()  # (passes * rows, V)
            largest = logits.amax(dim=1, keepdim=True)
            logits -= largest
            row_labels = label_ids_by_pass[:, start : start + chunk_rows].reshape(-1, 1)
            label_logits = logits.gather(1, row_labels)  # (passes * rows, 1)
            log_ratios = logits[: len(logits) // 2] - logits[len(logits) // 2 :] if r_drop else None
            exponentials = logits.exp_()
            total = exponentials.sum(dim=1, keepdim=True)  # (passes * rows, 1)
            sums.append((total.log() - label_share * label_logits + label_smoothing * largest).sum())
            if log_ratios is not None:
                sums.append(_add_disagreement(exponentials, total, log_ratios, r_drop / 2))
            gradients = exponentials.to(dtype)
            rows_gradient = gradients @ narrow_weight / total
            gradient_by_pass[:, start : start + chunk_rows] += rows_gradient.view(num_passes, -1, D)
            if is_lower:
                weight_gradient += gradients.t() @ (rows / total).to(dtype)
            else:  # without a matrix in between, which costs more than the product where V is large
                weight_gradient.addmm_(gradients.t(), rows / total)
        ctx.save_for_backward(states_gradient / N, weight_gradient / N)
        return torch.stack(sums).sum() / N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states_gradient, weight_gradient = ctx.saved_tensors
        (gradient,) = gradients
        return states_gradient * gradient, weight_gradient * gradient, None, None, None


def _add_disagreement(exponentials: Tensor, total: Tensor, log_ratios: Tensor, scale: float) -> Tensor:
    """Turn what two passes predict into the gradients of `scale` times how far it is apart, too.

    With r = log(p / q) the gradients are p (r + 1 - KL(p, q)) - q of the first pass' logits, and
    q (1 - r - KL(q, p)) - p of the second's.

    Args:
        exponentials: Not normalised, the rows of the first pass and then those of the second, (2 R, V). They
            become gradients, and stay as large as `total` says.
        total: Their sums, (2 R, 1).
        log_ratios: The logits of the first pass less those of the second, (R, V). They are lost.
        scale: The weight of a row.

    Returns:
        The sum of `scale` times KL(p, q) + KL(q, p).
    """
    p, q = exponentials.chunk(2)
    p_total, q_total = total.chunk(2)
    log_ratios -= (p_total / q_total).log()
    p_divergence = (p * log_ratios).sum(dim=1, keepdim=True) / p_total  # (R, 1)
    q_divergence = (q * log_ratios).sum(dim=1, keepdim=True) / -q_total
    p_from_q, q_from_p = q * (scale * p_total / q_total), p * (scale * q_total / p_total)
    log_ratios *= scale
    p *= log_ratios + (1 + scale * (1 - p_divergence))
    p -= p_from_q
    q *= (1 + scale * (1 - q_divergence)) - log_ratios
    q -= q_from_p
    return scale * (p_divergence + q_divergence).sum()
