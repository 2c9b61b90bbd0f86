"""A learner rank dies by SIGKILL at a random moment: the group is rebuilt from the newest checkpoint, and the run goes
on to its last step by itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rlhf_cluster.checkpoint_set import newest_checkpoint, verify
from tests.integration.local_fleet import Harness, make_config

STEPS, GROUPS = 12, 4


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failover")


async def kill_at_random(harness: Harness, generator: random.Random, rank: int, after_step: int) -> None:
    while len(harness.versions) < after_step:
        await asyncio.sleep(0.01)
    assert harness.fleet is not None
    pids = await harness.fleet.rank_pids()
    await asyncio.sleep(generator.uniform(0.0, 0.3))
    os.kill(pids[rank], signal.SIGKILL)


def rows_of(harness: Harness) -> list[dict[str, Any]]:
    lines = (harness.folder.path / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == "step"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_killed_rank_costs_time_and_nothing_else(ray_here: None, models: Path, seed: int) -> None:
    generator = random.Random(seed)
    config = make_config(models, f"run.name=kill{seed}", f"run.steps={STEPS}", "checkpoint.every_steps=3")
    harness = Harness(config)
    rank, after_step = generator.randrange(2), generator.randrange(1, 10)
    print(f"seed {seed}: rank {rank} is killed after step {after_step} has begun")

    async def scenario() -> None:
        killer = asyncio.ensure_future(kill_at_random(harness, generator, rank, after_step))
        await harness.go()
        await killer

    asyncio.run(scenario())
    rows = rows_of(harness)
    assert rows[-1]["step"] == STEPS
    assert rows[-1]['rlhf_restarts_total{kind="learner"}'] == 1
    versions = [row["version"] for row in rows]
    assert versions == sorted(set(versions)), "a version is published once, also after the learner went back"
    assert max(row["rlhf_batch_max_lag"] for row in rows) <= config.queue.max_staleness
    # What the final weights were trained on: every step once, and within an epoch every prompt at most once.
    assert sorted(harness.trained) == list(range(1, STEPS + 1))
    trained = Counter(group for groups in harness.trained.values() for group in groups)
    assert len(trained) == STEPS * GROUPS
    assert set(trained.values()) == {1}
    newest = newest_checkpoint(harness.folder.path / "checkpoints")
    assert newest is not None
    assert newest.name == f"step_{STEPS:08d}"
    verify(newest)


@pytest.mark.timeout(120)
def test_a_learner_that_dies_too_often_ends_the_run_naming_the_first_cause(ray_here: None, models: Path) -> None:
    config = make_config(models, "run.name=toooften", "run.steps=6", "guardrails.max_learner_restarts=0")
    harness = Harness(config)

    async def scenario() -> None:
        killer = asyncio.ensure_future(kill_at_random(harness, random.Random(0), 1, 2))
        with pytest.raises(Exception, match=r"learner rank 1 failed in '\w+': .*died") as raised:
            await harness.go()
        assert "ActorDiedError" in str(raised.value)
        await killer

    asyncio.run(scenario())
