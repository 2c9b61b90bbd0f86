"""A run samples nothing for training before every worker was shown to hold the learner's version 0."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_cluster.controller import RunFailed
from rlhf_cluster.protocols import PublishReport, WeightSnapshot
from rlhf_cluster.training_run import TrainingRun
from tests.unit.builders import async_test


def fleet(failed: dict[int, str], died: frozenset[int] = frozenset()) -> tuple[Any, list[WeightSnapshot]]:
    published: list[WeightSnapshot] = []

    async def snapshot() -> WeightSnapshot:
        return WeightSnapshot(0, Path("v0"), {})

    async def publish(snapshot: WeightSnapshot) -> PublishReport:
        published.append(snapshot)
        return PublishReport(0, (0,), failed, 0.0, 0.0, died)

    return SimpleNamespace(learner=SimpleNamespace(snapshot=snapshot), sink=SimpleNamespace(publish=publish)), published


@async_test
async def test_version_0_of_the_learner_goes_to_every_worker() -> None:
    parts, published = fleet({})
    await TrainingRun._verify_start(SimpleNamespace(), parts)  # type: ignore[arg-type]
    assert [snapshot.version for snapshot in published] == [0]


@async_test
async def test_one_worker_that_does_not_hold_it_ends_the_run_by_name() -> None:
    parts, _ = fleet({1: "rollout worker 1: 3 parameters held differ"})
    with pytest.raises(RunFailed, match=r"do not hold the learner's version 0: .*rollout worker 1: 3 parameters held"):
        await TrainingRun._verify_start(SimpleNamespace(), parts)  # type: ignore[arg-type]


@async_test
async def test_one_that_died_excuses_no_other() -> None:
    parts, _ = fleet({0: "rollout worker 0 died", 1: "rollout worker 1: 3 parameters held differ"}, frozenset({0}))
    with pytest.raises(RunFailed, match=r"version 0: \{1: 'rollout worker 1: 3 parameters held differ'\}"):
        await TrainingRun._verify_start(SimpleNamespace(), parts)  # type: ignore[arg-type]


@async_test
async def test_one_that_died_meanwhile_is_left_to_its_supervisor() -> None:
    parts, _ = fleet({1: "rollout worker 1 died during the update to version 0"}, frozenset({1}))
    await TrainingRun._verify_start(SimpleNamespace(), parts)  # type: ignore[arg-type]
