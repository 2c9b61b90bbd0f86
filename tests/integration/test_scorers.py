"""The scorer pool over real Ray actors with real models: matched replies, unscorable answers, failed starts."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import ray

from actors.reference_scorer import ReferenceScorer
from actors.reward_scorer import RewardScorer
from actors.scorer_pool import ScorerPool
from actors.scorer_replicas import NoScorersLeft
from rlhf_cluster.config import ModelConfig, RewardConfig, ScorerConfig
from rlhf_cluster.protocols import Scorer, WorkerFailed
from rlhf_cluster.types import Prompt, Rollout, Sampling, VersionSpan
from tests.tiny_models import build_tiny_policy, build_tiny_reward_model

OPTIONS = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}


def characters(prompt, answer, finish_reason):
    return float(len(answer))


REWARD = RewardConfig(
    components=(
        {"name": "model", "kind": "model"},
        {"name": "chars", "kind": "function", "function": f"{__name__}:characters", "weight": 0.1},
    )
)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(
        policy=str(build_tiny_policy(tmp_path_factory.mktemp("policy"))),
        reward=str(build_tiny_reward_model(tmp_path_factory.mktemp("reward"))),
        dtype="float32",
    )


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


def test_pool_scores_like_the_plain_classes_and_names_who_was_closed(model):
    scorers = ScorerConfig(reward_replicas=2, timeout_s=60)

    async def run():
        pool = ScorerPool(model, REWARD, scorers, actor_options=OPTIONS)
        protocol: Scorer = pool
        await pool.start(timeout_s=120)
        members = rollouts(4)
        groups = await asyncio.gather(*(protocol.score(prompt(), members[k:]) for k in range(4)))

        direct = await RewardScorer(model, REWARD, scorers).score(prompt(), members)
        logprobs = await ReferenceScorer(model, scorers).logprobs(members)
        for k, group in enumerate(groups):
            assert [scored.rollout.rollout_id for scored in group] == [f"p0/0/{i}" for i in range(k, 4)]
            for scored, reward, reference in zip(group, direct[k:], logprobs[k:], strict=True):
                assert scored.score == pytest.approx(reward.score, abs=1e-3)
                assert scored.score_components == pytest.approx(reward.components, abs=1e-3)
                np.testing.assert_allclose(scored.ref_logprobs, reference, atol=1e-3)
        assert all(scored.unscorable is None for group in groups for scored in group)
        await pool.close()
        with pytest.raises(NoScorersLeft, match="no reward scorer is left; the first cause: it was closed"):
            await pool.score(prompt(), members)

    asyncio.run(run())


def test_unscorable_rollouts_come_back_as_nan_and_are_counted(model):
    async def run():
        pool = ScorerPool(model, REWARD, ScorerConfig(max_tokens=1), actor_options=OPTIONS)
        await pool.start(timeout_s=120)
        scored = await pool.score(prompt(), rollouts(3))
        assert all(math.isnan(member.score) for member in scored) and not any(member.finite for member in scored)
        assert [member.score_components["chars"] for member in scored] == [2.0, 3.0, 4.0]
        assert [member.unscorable for member in scored] == ["too_long"] * 3
        await pool.close()

    asyncio.run(run())


def test_a_scorer_that_cannot_start_is_named_with_its_reason(model):
    async def run():
        broken = model.model_copy(update={"reward": model.policy})  # a language model: no trained score head
        pool = ScorerPool(broken, REWARD, ScorerConfig(), actor_options=OPTIONS)
        try:
            with pytest.raises(WorkerFailed, match=r"reward scorer 0 died during start: ValueError: .*no reward model"):
                await pool.start(timeout_s=120)
        finally:
            await pool.close()

    asyncio.run(run())
