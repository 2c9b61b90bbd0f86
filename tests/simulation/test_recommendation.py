"""Recommendations: stage times worked out by hand, and choices that only one answer fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.planner.recommendation import (
    Division,
    divisions,
    ratio,
    recommend,
    stage_seconds,
    step_seconds,
)
from rlhf_cluster.simulation.cluster_model import ClusterModel, cluster_from_config

ROOT = Path(__file__).resolve().parents[2]


def config(*overrides: str) -> Config:
    """6 engines of one GPU and 2 ranks; batches of 8 groups of one answer."""
    changes = (
        "rollout.workers=6",
        "learner.ranks=2",
        "rollout.engine.max_num_seqs=8",
        "queue.groups_per_batch=8",
        "run.steps=20",
    )
    return load_config(ROOT / "configs" / "ppo_7b_single_node.yaml", [*changes, *overrides])


def cluster(described: Config, *, generate: float, train: float) -> ClusterModel:
    """One worker generates 8 answers of 100 tokens in ``generate`` s, the learner trains them in ``train`` s."""
    overlay: dict[str, Any] = {
        "rollout": {"tokens_per_s": 800 / generate, "tokens_per_s_alone": 800 / generate},
        "reward": {"tokens_per_s": 1e6},
        "reference": {"tokens_per_s": 1e6},
        "learner": {"tokens_per_s": 8 * 101 / train, "fixed_s": 0.0},
        "weights": {
            "gib": 1.0,
            "snapshot_gib_per_s": 1e3,
            "transfer_gib_per_s": 1e3,
            "load_gib_per_s": 1e3,
            "pause_s": 0.0,
        },
        "batch": {"prompt_tokens": 1},
        "lengths": {"kind": "constant", "tokens": 100},
    }
    return cluster_from_config(described, overlay)


def test_stage_seconds_are_work_over_speed() -> None:
    one = config("rollout.workers=1", "learner.ranks=1")
    generate, score, train = stage_seconds(cluster(one, generate=40.0, train=10.0))
    # A prompt token costs a twentieth of a generated one; a snapshot and loading take 1 ms each.
    assert generate == pytest.approx(40 * (100 + 1 / 20) / 100 + 0.001)
    assert score == pytest.approx(808 / 1e6)
    assert train == pytest.approx(10.001)


def test_stages_that_do_not_overlap_add_up() -> None:
    described = cluster(config("rollout.workers=1", "learner.ranks=1"), generate=40.0, train=10.0)
    assert step_seconds(described) == max(stage_seconds(described))
    assert step_seconds(described.synchronous()) == sum(stage_seconds(described.synchronous()))


def test_devices_are_divided_without_remainder() -> None:
    assert list(divisions(config())) == [Division(workers, 8 - workers) for workers in range(1, 8)]
    wide = config("rollout.workers=2", "rollout.engine.tensor_parallel=2", "learner.ranks=3")
    assert list(divisions(wide)) == [Division(1, 5), Division(2, 3), Division(3, 1)]
    assert (ratio(Division(6, 4)), ratio(Division(4, 4))) == ("3:2", "1:1")


def test_a_learner_that_is_short_of_ranks_gets_those_that_workers_do_not_need() -> None:
    described = config()
    found = recommend(described, cluster(described, generate=20.0, train=30.0))
    # One worker needs 20 s a batch, one rank 60 s: 2 workers and 6 ranks take 10 s each.
    assert found.best.division == Division(2, 6)
    assert found.current.division == Division(6, 2)
    assert found.ranks_fed_by_a_worker == pytest.approx(60 / 20, rel=0.01)
    assert found.best.speed > 2 * found.current.speed


def test_a_division_whose_memory_does_not_fit_is_not_recommended() -> None:
    described = config()
    model = cluster(described, generate=20.0, train=30.0)
    found = recommend(described, model, allowed=lambda division: division.ranks <= 4)
    assert found.best.division == Division(4, 4)


def test_the_smallest_staleness_that_is_as_fast_as_any_is_recommended() -> None:
    # Equal stages: with K=0 they take turns, with K=1 they overlap, and more changes nothing.
    described = config("rollout.workers=1", "learner.ranks=1", "queue.max_staleness=4")
    found = recommend(described, cluster(described, generate=20.0, train=20.0))
    assert [choice.max_staleness for choice in found.bounds] == [0, 1, 2, 4]
    assert found.best.max_staleness == 1
    # Next to no generation: nothing is gained by overlapping.
    found = recommend(described, cluster(described, generate=0.1, train=20.0))
    assert found.best.max_staleness == 0


def test_a_setting_under_which_a_run_would_fail_is_named_without_a_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    described = config(
        "rollout.timeout_s=1", "queue.group_deadline_s=5", "queue.groups_per_batch=1", "learner.minibatches=1"
    )
    found = recommend(described, cluster(described, generate=4000.0, train=1.0))
    assert found.current.prediction is None
    assert "was issued 1000 times" in found.current.failure
    assert found.best.prediction is None
    assert caplog.records == []
