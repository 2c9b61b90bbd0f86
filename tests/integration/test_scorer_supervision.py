"""Scorers that are late, die, or raise: real actor processes, real SIGKILL, no models inside."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time

import numpy as np
import pytest
import ray

from actors.scorer_pool import ScorerPool
from actors.scorer_replicas import NoScorersLeft, Retries
from rlhf_cluster.config import ModelConfig, RewardConfig, ScorerConfig
from rlhf_cluster.protocols import WorkerFailed
from rlhf_cluster.supervision import SupervisionSettings
from rlhf_cluster.types import Prompt, Rollout, Sampling, VersionSpan
from tests.integration.fake_scorers import FakeReferenceScorer, FakeRewardScorer

RETRIES = Retries(attempts=3, backoff_s=1.0)
REWARD = RewardConfig(components=({"name": "model", "kind": "model"}, {"name": "length", "kind": "length"}))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def watched(scorers, *, restarts=5, retries=RETRIES):
    """A pool and the list of its events."""
    events = []
    # Twenty misses: on a busy machine a live scorer may be slow to answer.
    settings = SupervisionSettings(heartbeat_s=0.5, heartbeat_misses=20, restarts=restarts, backoff_s=0.1)
    pool = ScorerPool(
        ModelConfig(policy="nowhere", reward="nowhere"),
        REWARD,
        scorers,
        actor_options={"num_cpus": 0},
        supervision=settings,
        retries=retries,
        on_event=events.append,
        reward_actor=FakeRewardScorer,
        reference_actor=FakeReferenceScorer,
    )
    return pool, events


async def until(holds, seconds):
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


def prompt(text="hello"):
    return Prompt("p0", (1, 50, 51), text)


def rollouts(n):
    return [
        Rollout(
            f"p0/0/{k}", 0, "p0", np.array([1, 50, 51]), np.arange(60, 62 + k), np.zeros(2 + k, np.float32),
            (VersionSpan(0, 0, 2 + k),), "length", Sampling(0.7, 16, k),
        )
        for k in range(n)
    ]  # fmt: skip


def test_a_late_scorer_is_named_and_one_that_is_late_twice_in_a_row_is_replaced():
    async def run():
        pool, events = watched(ScorerConfig(timeout_s=1.5))
        await pool.start(timeout_s=120)
        started = time.monotonic()
        with pytest.raises(TimeoutError, match=r"reward scorer 0 did not finish score within 1\.5 s"):
            await pool.score(prompt("sleep"), rollouts(1))
        assert time.monotonic() - started < 10
        assert not [event for event in events if event.kind == "down"]
        with pytest.raises(TimeoutError):
            await pool.score(prompt("sleep"), rollouts(1))
        await until(lambda: [event.kind for event in events if event.role == "reward_scorer"][-1:] == ["up"], 60)
        assert "2 deadlines missed in a row" in next(event.reason for event in events if event.kind == "down")
        await pool.score(prompt(), rollouts(1))
        await pool.close()

    asyncio.run(run())


def test_a_scorer_killed_in_the_middle_of_its_work_is_replaced_and_its_groups_are_scored_as_before():
    async def run():
        pool, events = watched(ScorerConfig(timeout_s=60))
        await pool.start(timeout_s=120)
        before = await pool.score(prompt(), rollouts(2))
        held = [asyncio.ensure_future(pool.score(prompt("nap"), rollouts(2))) for _ in range(3)]
        await asyncio.sleep(0.2)
        for kind in (pool._rewards, pool._references):
            os.kill(kind.members()[0].pulse.pid, signal.SIGKILL)
        for group in await asyncio.gather(*held):
            assert [member.score for member in group] == [member.score for member in before] == [2.0, 3.0]
        await until(lambda: sum(event.kind == "restart" for event in events) == 2, 20)
        assert {event.role for event in events if event.kind == "restart"} == {"reward_scorer", "reference_scorer"}
        (answer,) = await pool.score(prompt(), rollouts(1))
        assert answer.ref_logprobs.tolist() == [-1.0, -1.0]
        await pool.close()

    asyncio.run(run())


def test_a_group_that_kills_every_scorer_it_meets_is_left_out_by_name_and_the_others_are_scored():
    async def run():
        # Repeats wait for the same restart: without turns they would all meet the killer again, and again.
        pool, events = watched(ScorerConfig(timeout_s=60), retries=Retries(attempts=3, backoff_s=0.2))
        await pool.start(timeout_s=120)
        poison = asyncio.ensure_future(pool.score(prompt("die"), rollouts(2)))
        innocent = [asyncio.ensure_future(pool.score(prompt("nap"), rollouts(2))) for _ in range(2)]
        excluded = await poison
        assert [member.unscorable for member in excluded] == ["scorer_died"] * 2
        assert all(math.isnan(member.score) for member in excluded), "never a score of 0"
        assert all(math.isnan(member.score_components[name]) for member in excluded for name in ("model", "length"))
        assert all(np.isfinite(member.ref_logprobs).all() for member in excluded)
        for group in await asyncio.gather(*innocent):
            assert all(member.finite for member in group)
        assert sum(event.kind == "down" for event in events) == 3
        await pool.close()

    asyncio.run(run())


def test_when_no_scorer_is_left_the_first_cause_is_named():
    async def run():
        pool, _ = watched(ScorerConfig(timeout_s=60), restarts=0)
        await pool.start(timeout_s=120)
        with pytest.raises(NoScorersLeft, match=r"no reward scorer is left; .* cause: reward scorer 0: ActorDied"):
            await pool.score(prompt("die"), rollouts(1))
        await pool.close()

    asyncio.run(run())


def test_what_a_scorer_raises_is_not_repeated():
    async def run():
        pool, _ = watched(ScorerConfig(timeout_s=60))
        await pool.start(timeout_s=120)
        started = time.monotonic()
        with pytest.raises(WorkerFailed, match="reward scorer 0, score: ValueError: the template does not render"):
            await pool.score(prompt("error"), rollouts(1))
        assert time.monotonic() - started < RETRIES.backoff_s * 0.5
        await pool.close()

    asyncio.run(run())


def test_a_replica_holds_no_more_calls_than_its_cap():
    async def run():
        pool, _ = watched(ScorerConfig(reward_replicas=2, timeout_s=60), retries=Retries(max_in_flight=2))
        await pool.start(timeout_s=120)
        calls = [asyncio.ensure_future(pool.score(prompt("nap"), rollouts(1))) for _ in range(9)]
        seen = set()
        while not all(call.done() for call in calls):
            seen.add(tuple(scorer.in_flight for scorer in pool._rewards.members()))
            await asyncio.sleep(0.01)
        assert (2, 2) in seen
        assert max(max(counts) for counts in seen) == 2
        assert all(call.result()[0].finite for call in calls)
        await pool.close()

    asyncio.run(run())
