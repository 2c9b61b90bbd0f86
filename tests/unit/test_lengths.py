"""Length distributions against their closed forms."""

from __future__ import annotations

import math
import statistics

import pytest
from pydantic import BaseModel, ValidationError

from rlhf_cluster.simulation.lengths import Constant, Empirical, Lengths, LogNormal, Pareto, TwoClasses, uniform

N = 20_000


def draw(lengths: Lengths, limit: int = 10**9) -> list[int]:
    return [lengths.sample(seed, limit) for seed in range(N)]


def test_uniform_fills_the_interval_evenly_and_depends_on_the_seed_alone() -> None:
    values = [uniform(seed) for seed in range(N)]
    assert values == [uniform(seed) for seed in range(N)]
    assert 0 < min(values) < 0.001
    assert 0.999 < max(values) < 1
    assert statistics.fmean(values) == pytest.approx(0.5, abs=0.01)
    assert statistics.pvariance(values) == pytest.approx(1 / 12, rel=0.03)


def test_lognormal_has_its_median_and_the_mean_of_the_formula() -> None:
    lengths = draw(LogNormal(median=400, sigma=0.8))
    assert statistics.median(lengths) == pytest.approx(400, rel=0.02)
    assert statistics.fmean(lengths) == pytest.approx(400 * math.exp(0.8**2 / 2), rel=0.03)


def test_pareto_has_the_tail_of_the_formula() -> None:
    lengths = draw(Pareto(minimum=100, alpha=1.5))
    assert min(lengths) == 100
    for x in (200, 400, 1600):
        share = sum(length > x for length in lengths) / N
        assert share == pytest.approx((100 / x) ** 1.5, rel=0.1), f"P(length > {x})"


def test_two_classes_come_in_their_shares() -> None:
    lengths = draw(TwoClasses(short=30, long=900, long_share=0.2))
    assert set(lengths) == {30, 900}
    assert lengths.count(900) / N == pytest.approx(0.2, abs=0.01)


def test_empirical_draws_what_was_seen_alike_in_whatever_order_it_is_given() -> None:
    lengths = draw(Empirical(tokens=(900, 10, 10, 50)))
    assert set(lengths) == {10, 50, 900}
    for length, share in ((10, 0.5), (50, 0.25), (900, 0.25)):
        assert lengths.count(length) / N == pytest.approx(share, abs=0.01)
    assert Empirical(tokens=(3, 1, 2)).quantile(0.5) == Empirical(tokens=(1, 2, 3)).quantile(0.5) == 2


def test_no_answer_is_longer_than_the_limit_or_empty() -> None:
    assert set(draw(Constant(tokens=50), limit=40)) == {40}
    assert max(draw(Pareto(minimum=1, alpha=0.5), limit=512)) == 512
    assert draw(LogNormal(median=0.01))[0] >= 1


@pytest.mark.parametrize(
    "description",
    [
        {"kind": "constant"},
        {"kind": "lognormal", "median": -1},
        {"kind": "two_classes", "short": 1, "long": 2, "long_share": 1.5},
        {"kind": "empirical", "tokens": []},
        {"kind": "constant", "tokens": 3, "sigma": 1},
        {"kind": "normal"},
    ],
)
def test_a_description_that_makes_no_sense_is_refused(description: dict[str, object]) -> None:
    class Holder(BaseModel):
        lengths: Lengths

    with pytest.raises(ValidationError):
        Holder.model_validate({"lengths": description})
