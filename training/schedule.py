"""The learning rate at each step."""

from __future__ import annotations

from seq2seq_serve.training.config import TrainingConfig


def learning_rate(step: int, d_model: int, config: TrainingConfig, last_step: int | None = None) -> float:
    """Scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), from step 1.

    Vaswani et al. 2017, equation 3, arXiv:1706.03762, where the scale is 1: linear warm-up, then the inverse
    square root. In the cool-down the rate is multiplied by a factor that falls linearly from 1 to 0 (Hägele
    et al. 2024, arXiv:2405.18392, whose rate is constant before). `last_step` None is the recipe's.
    """
    last_step = config.max_steps if last_step is None else last_step
    rate = config.learning_rate_scale * d_model**-0.5 * min(step**-0.5, step * config.warmup_steps**-1.5)
    num_left = last_step + 1 - step
    return float(rate * min(1.0, num_left / max(config.cooldown_steps(last_step), 1)))
