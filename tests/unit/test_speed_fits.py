"""Speeds fitted to timed events: each case is built from a known speed and must give it back."""

from __future__ import annotations

import pytest

from rlhf_cluster.metrics.speed_fits import TimedGroup, busy_seconds, fit_engine, fit_tokens


def alone_and_together() -> list[TimedGroup]:
    """An engine of 50 tokens/s alone and 200 at most: n sequences get 200 / (n + 3) each.

    Worker 0 decodes one sequence of 100 tokens after another, 2 s each; worker 1 decodes 5 at once, 100 tokens in 4 s.
    """
    single = [TimedGroup(0, 2.0 * k, 2.0 * k + 2, 0, (100,)) for k in range(4)]
    five = [TimedGroup(1, 4.0 * k, 4.0 * k + 4, 0, (100,) * 5) for k in range(4)]
    return single + five


def test_two_concurrencies_tell_both_speeds_of_an_engine() -> None:
    fit = fit_engine(alone_and_together())
    assert fit.alone == pytest.approx(50)
    assert fit.peak == pytest.approx(200)
    assert fit.seen[0] == pytest.approx((1.0, 50.0, 2))
    assert fit.seen[-1][:2] == pytest.approx((5.0, 125.0))


def test_sequences_of_other_groups_on_the_same_worker_count_and_those_of_other_workers_do_not() -> None:
    # One group of each of five pairs of workers alone, then five groups of one sequence side by side on one worker.
    spread = [TimedGroup(k, 0.0, 2.0, 0, (100,)) for k in range(5)]
    together = [TimedGroup(9, 0.0, 4.0, 0, (100,)) for _ in range(5)]
    fit = fit_engine(spread + together)
    assert (fit.alone, fit.peak) == (pytest.approx(50), pytest.approx(200))


def test_a_short_member_leaves_the_engine_before_the_longest_one() -> None:
    # The second sequence runs for half of the time: 1.5 at once on average.
    fit = fit_engine([TimedGroup(0, 0.0, 10.0, 0, (100, 50))])
    assert fit.seen[0][:2] == pytest.approx((1.5, 15.0))


def test_time_in_which_generation_stood_still_is_no_speed() -> None:
    paused = [TimedGroup(0, 3.0 * k, 3.0 * k + 3, 0, (100,)) for k in range(4)]
    fit = fit_engine(paused, pauses=[(3.0 * k + 1, 3.0 * k + 2) for k in range(4)])
    assert fit.seen[0][1] == pytest.approx(50)


def test_a_prompt_costs_a_twentieth_of_a_generated_token_for_each_of_its_tokens() -> None:
    fit = fit_engine([TimedGroup(0, 0.0, 10.0, 400, (80,))])
    assert fit.seen[0][1] == pytest.approx(10.0)


def test_one_concurrency_gives_its_own_speed_exactly_and_splits_the_step_in_halves() -> None:
    fit = fit_engine([TimedGroup(0, 8.0 * k, 8.0 * k + 8, 0, (100,) * 4) for k in range(6)])
    # 4 sequences share 50 tokens/s: a step takes 80 ms, 40 ms of it fixed and 10 ms a sequence.
    assert fit.peak == pytest.approx(100)
    assert fit.alone == pytest.approx(20)
    assert fit.peak * 4 / (4 + fit.peak / fit.alone - 1) == pytest.approx(50)


def test_nothing_generated_has_no_speed() -> None:
    with pytest.raises(ValueError, match="no speed"):
        fit_engine([TimedGroup(0, 0.0, 1.0, 8, (0, 0))])


def test_calls_of_different_size_tell_the_fixed_seconds_from_those_a_token() -> None:
    tokens = [1000, 2000, 3000, 4000]
    assert fit_tokens(tokens, [1.5 + n / 400 for n in tokens]) == pytest.approx((400, 1.5))


def test_calls_that_are_too_alike_or_too_few_have_no_fixed_part_and_the_mean_is_right() -> None:
    assert fit_tokens([1000, 1010, 990, 1000], [2.0, 2.2, 1.8, 2.0]) == pytest.approx((500, 0.0))
    assert fit_tokens([1000, 3000], [2.0, 2.0]) == pytest.approx((1000, 0.0))


def test_a_line_with_a_negative_part_is_replaced_by_one_that_keeps_the_mean() -> None:
    speed, fixed = fit_tokens([1000, 2000, 3000, 4000], [1.0, 4.0, 7.0, 10.0])
    assert fixed == 0.0
    assert 2500 / speed == pytest.approx(5.5)


def test_a_line_through_the_origin_has_no_fixed_part_that_rounding_makes_negative() -> None:
    # Mean seconds minus slope times mean tokens is -8.9e-16 here.
    assert fit_tokens([46, 10, 6, 7, 36], [21.17, 1.01, 0.37, 0.5, 12.97])[1] == 0.0


def test_overlapping_intervals_count_once() -> None:
    assert busy_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.6)]) == pytest.approx(4.0)
    assert busy_seconds([]) == 0.0
