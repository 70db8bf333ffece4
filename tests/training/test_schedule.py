import pytest

from seq2seq_serve.training.config import TrainingConfig
from seq2seq_serve.training.schedule import learning_rate

PAPER = TrainingConfig()  # warm-up over 4000 steps, scale 1


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, 512**-0.5 * 4000**-1.5),
        (2000, 512**-0.5 * 4000**-0.5 / 2),
        (4000, 512**-0.5 * 4000**-0.5),
        (16000, 512**-0.5 * 4000**-0.5 / 2),
    ],
)
def test_rate_rises_linearly_and_falls_with_the_inverse_root(step: int, expected: float) -> None:
    assert learning_rate(step, 512, PAPER) == pytest.approx(expected)


def test_scale_multiplies_the_rate() -> None:
    scaled = TrainingConfig(learning_rate_scale=0.5)
    assert learning_rate(123, 512, scaled) == pytest.approx(learning_rate(123, 512, PAPER) / 2)


def test_rate_falls_to_zero_in_the_cooldown() -> None:
    cooled = TrainingConfig(max_steps=10_000, cooldown_share=0.4)
    ratios = [
        learning_rate(step, 512, cooled) / learning_rate(step, 512, PAPER)
        for step in (1, 6000, 6001, 8001, 10_000)
    ]
    assert ratios == pytest.approx([1, 1, 1, 1 / 2, 1 / 4000])
