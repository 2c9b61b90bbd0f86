"""Twenty seeded drills: one process of a real run dies by SIGKILL at a random moment; the run ends as if it had not.

What each checks is in ``tests/drills/invariants.py``; ``make drills`` runs 500.
"""

from __future__ import annotations

import re

import pytest

from tests.drills.drill import Report
from tests.drills.plan import Plan, draw
from tests.drills.run import run_all

pytestmark = pytest.mark.timeout(400)

SEEDS = range(116, 136)
NO_REBUILD = Plan(1000, "learner_rank_1", "step", 6, 0.05, ("guardrails.max_learner_restarts=0",), exit_code=1)
NO_RESTART = Plan(
    1001, "rollout_worker_0", "step", 6, 0.05, ("rollout.workers=1", "supervision.restarts=0"), exit_code=1
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Report]:
    plans = [*(draw(seed) for seed in SEEDS), NO_REBUILD, NO_RESTART]
    return run_all(plans, tmp_path_factory.mktemp("drills"))


def test_the_seeds_kill_every_part_at_every_kind_of_moment() -> None:
    plans = [draw(seed) for seed in SEEDS]
    assert {plan.victim for plan in plans} >= {
        "reward_scorer_0", "reference_scorer_0", "learner_rank_0", "learner_rank_1", "driver",
    }  # fmt: skip
    assert any(plan.victim.startswith("rollout_worker") for plan in plans)
    assert {plan.moment for plan in plans} == {"start", "step", "save", "publication"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_loses_a_part_ends_as_if_it_had_not(reports: dict[int, Report], seed: int) -> None:
    report = reports[seed]
    assert not report.failures, str(report)


@pytest.mark.parametrize(
    ("plan", "cause"),
    [
        (NO_REBUILD, r"LearnerDied: learner rank 1 failed in '\w+': ActorDiedError \(pid: \d+\)"),
        (NO_RESTART, r"NoWorkersLeft: .* the first cause: rollout worker 0: ActorDiedError \(pid: \d+\)"),
    ],
)
def test_a_budget_that_is_used_up_ends_the_run_naming_the_first_cause(
    reports: dict[int, Report], plan: Plan, cause: str
) -> None:
    report = reports[plan.seed]
    assert not report.failures, str(report)
    assert report.hit
    assert re.match(f"failed: {cause}", report.last_words.splitlines()[-1])
