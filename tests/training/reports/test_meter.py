import math

import pytest
import torch

from seq2seq_serve.training.ranks import Ranks
from seq2seq_serve.training.reports.meter import DivergenceGuard, Meter, StepMeans


def means(loss: float, num_skipped_now: int = 0) -> StepMeans:
    return StepMeans(
        loss=loss,
        gradient_norm=1.0,
        tokens_per_second=1.0,
        num_steps=20,
        num_skipped=num_skipped_now,
        num_skipped_now=num_skipped_now,
    )


def test_means_are_of_the_steps_that_were_not_skipped() -> None:
    meter = Meter()
    for loss, norm in ((2.0, 1.0), (math.nan, math.nan), (4.0, 3.0), (3.0, math.inf), (5.0, math.nan)):
        meter.add(torch.tensor(loss), torch.tensor(norm), num_tokens=10)
    found = meter.read(Ranks())
    assert (found.loss, found.gradient_norm) == (3.0, 2.0)
    assert (found.num_steps, found.num_skipped, found.num_skipped_now) == (5, 3, 2)
    assert found.tokens_per_second > 0


def test_the_mean_is_nan_where_every_step_was_skipped() -> None:
    meter = Meter()
    meter.add(torch.tensor(1.0), torch.tensor(math.nan), num_tokens=10)
    found = meter.read(Ranks())
    assert math.isnan(found.loss)
    assert found.num_skipped_now == 1


def test_a_few_skipped_steps_are_borne_and_ten_in_a_row_are_not() -> None:
    guard = DivergenceGuard(1000)
    guard.check(20, means(3.0, num_skipped_now=9))
    with pytest.raises(ValueError, match="gradients of the last 10 steps until step 40 were not finite"):
        guard.check(40, means(3.0, num_skipped_now=10))


def test_a_loss_far_above_its_best_for_long_is_divergence() -> None:
    guard = DivergenceGuard(1000)
    guard.check(20, means(3.0))
    for step in range(40, 1020, 20):
        guard.check(step, means(4.1))
    guard.check(1020, means(3.9))  # a report that is not far above begins the count anew
    for step in range(1040, 2020, 20):
        guard.check(step, means(4.1))
    with pytest.raises(
        ValueError, match=r"been 1 nat above its best, 3\.000, for 1000 steps until step 2020"
    ):
        guard.check(2020, means(4.1))


def test_a_loss_of_twice_that_of_guessing_is_hopeless_soon() -> None:
    guard = DivergenceGuard(1000)  # who guesses among 1000 tokens has a loss of 6.9
    for step in range(20, 200, 20):
        guard.check(step, means(13.8))
    for step in range(200, 280, 20):
        guard.check(step, means(95.0))
    with pytest.raises(
        ValueError, match=r"been above 13\.8, twice that of guessing, for 100 steps until step 280"
    ):
        guard.check(280, means(900.0))


def test_losses_before_the_first_judged_step_do_not_count() -> None:
    guard = DivergenceGuard(1000, first_step=301)
    for step in range(20, 301, 20):
        guard.check(step, means(0.5 if step == 20 else 2000.0))
    assert (guard.best_loss, guard.num_steps_above) == (math.inf, 0)
    with pytest.raises(ValueError, match="gradients of the last 10 steps"):
        guard.check(300, means(3.0, num_skipped_now=10))
    for step in range(320, 400, 20):
        guard.check(step, means(95.0))
    with pytest.raises(ValueError, match="for 100 steps until step 400"):
        guard.check(400, means(95.0))


def test_a_guard_goes_on_where_another_stopped() -> None:
    first = DivergenceGuard(1000)
    first.check(20, means(3.0))
    for step in range(40, 1020, 20):
        first.check(step, means(4.5))
    second = DivergenceGuard(1000, first.best_loss, first.num_steps_above)
    with pytest.raises(ValueError, match="for 1000 steps"):
        second.check(1020, means(4.5))


def test_a_report_without_a_mean_is_not_the_best() -> None:
    guard = DivergenceGuard(1000, best_loss=3.0)
    guard.check(20, means(math.nan, num_skipped_now=5))
    assert guard.best_loss == 3.0
