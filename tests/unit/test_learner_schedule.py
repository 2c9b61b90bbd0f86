"""Learning rates: warm-up, then constant, cosine or linear decay, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from learner.schedule import Schedule


def rates(steps: int, **options: Any) -> list[float]:
    schedule = Schedule(8.0, **options)
    out = []
    for _ in range(steps):
        out.append(schedule.next_lr)
        schedule.applied += 1
    return out


def test_warm_up_rises_in_equal_steps_to_the_peak_and_a_constant_rate_stays_there() -> None:
    assert rates(6, warmup_steps=4, total_steps=6) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert rates(2, warmup_steps=0, total_steps=6) == [8.0, 8.0]


def test_a_linear_decay_reaches_its_end_when_all_steps_are_done_and_stays_there() -> None:
    assert rates(7, warmup_steps=2, total_steps=6, decay="linear") == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    assert rates(9, warmup_steps=2, total_steps=6, decay="linear", final_fraction=0.25)[2:] == [
        8.0,
        6.5,
        5.0,
        3.5,
        2.0,
        2.0,
        2.0,
    ]


def test_a_cosine_decay_is_half_way_down_in_the_middle() -> None:
    found = rates(5, warmup_steps=0, total_steps=4, decay="cosine", final_fraction=0.5)
    assert found == pytest.approx([8.0, 8 * (0.5 + 0.25 * (1 + 2**-0.5)), 6.0, 8 * (0.5 + 0.25 * (1 - 2**-0.5)), 4.0])


def test_a_skipped_step_does_not_advance_the_schedule() -> None:
    schedule = Schedule(8.0, warmup_steps=4, total_steps=6)
    assert [schedule.next_lr, schedule.next_lr] == [2.0, 2.0]


def test_a_run_that_is_all_warm_up_never_divides_by_zero() -> None:
    assert rates(4, warmup_steps=3, total_steps=3, decay="linear") == [8 / 3, 16 / 3, 8.0, 8.0]


@pytest.mark.parametrize("planned", [3, 6, 60])
def test_a_warm_up_that_is_over_does_not_begin_again_whatever_is_planned_then(planned: int) -> None:
    schedule = Schedule(8.0, warmup_steps=planned // 3, total_steps=planned)
    schedule.go_on(applied=2, warmup_steps=2)
    assert schedule.next_lr == 8.0


def test_a_warm_up_in_progress_is_not_stretched_by_a_longer_plan_and_ends_within_a_shorter_one() -> None:
    longer, shorter = (Schedule(8.0, warmup_steps=steps, total_steps=2 * steps) for steps in (40, 2))
    for schedule in (longer, shorter):
        schedule.go_on(applied=2, warmup_steps=4)
    assert (longer.next_lr, shorter.next_lr) == (6.0, 8.0)
