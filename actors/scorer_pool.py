"""Reward and reference scorers as Ray actors behind ``protocols.Scorer``: routing, retries, checked replies, restarts.

    score(prompt, rollouts) --> reward scorers    : one that is up and below its cap, again elsewhere when it dies
                            \\-> reference scorers : the same, side by side

Scoring is a pure function, so a call whose scorer died is repeated, a few times, with jitter. A call that scorers keep
dying over is given up: its rollouts come back unscorable with a reason, never with a score of 0. What a scorer *raised*
is not repeated: it would raise again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from actors.health import Health
from actors.reward_scorer import Reward
from actors.scorer_replicas import Replicas, Retries
from actors.supervisor import NO_RAY_RESTARTS, WorkerDied, all_or_cancel, dump_all
from rlhf_cluster.config import ModelConfig, RewardConfig, ScorerConfig
from rlhf_cluster.protocols import WorkerFailed
from rlhf_cluster.supervision import Event, SupervisionSettings
from rlhf_cluster.types import Floats, Prompt, Rollout, ScoredRollout
from rlhf_cluster.watchdog import Wait

log = logging.getLogger(__name__)


class RewardScorerActor(Health):
    """One ``RewardScorer`` in its own process."""

    def __init__(self, model: ModelConfig, reward: RewardConfig, scorers: ScorerConfig, device: str) -> None:
        from actors.reward_scorer import RewardScorer

        _limit_threads(scorers, device)
        self._scorer = RewardScorer(model, reward, scorers, device=device)

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Reward]:
        return await self._scorer.score(prompt, rollouts)


class ReferenceScorerActor(Health):
    """One ``ReferenceScorer`` in its own process."""

    def __init__(self, model: ModelConfig, scorers: ScorerConfig, device: str) -> None:
        from actors.reference_scorer import ReferenceScorer

        _limit_threads(scorers, device)
        self._scorer = ReferenceScorer(model, scorers, device=device)

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        return await self._scorer.logprobs(rollouts)


def _limit_threads(scorers: ScorerConfig, device: str) -> None:
    import torch

    if device == "cpu":
        torch.set_num_threads(scorers.cpu_threads)


class ScorerPool:
    """Implements ``protocols.Scorer``. ``start`` before the first ``score``.

    Args:
        device: ``cpu`` or ``cuda``.
        actor_options: passed to every actor's ``.options``: num_cpus, num_gpus, runtime_env with env_vars, ...
        supervision: heartbeats, back-off and restart budget of each replica.
        on_event: told of every start, death, restart and missed heartbeat.
        reward_actor, reference_actor: the classes that become actors; tests put some without models here.
    """

    def __init__(
        self,
        model: ModelConfig,
        reward: RewardConfig,
        scorers: ScorerConfig,
        *,
        device: str = "cpu",
        actor_options: Mapping[str, Any] | None = None,
        supervision: SupervisionSettings | None = None,
        retries: Retries | None = None,
        on_event: Callable[[Event], None] | None = None,
        reward_actor: type = RewardScorerActor,
        reference_actor: type = ReferenceScorerActor,
    ) -> None:
        options = {**(actor_options or {}), **NO_RAY_RESTARTS}
        new_reward = ray.remote(reward_actor).options(**options).remote
        new_reference = ray.remote(reference_actor).options(**options).remote
        self._components = tuple(component.name for component in reward.components)

        def replicas(role: str, count: int, create: Callable[[], Any]) -> Replicas:
            return Replicas(
                role,
                count,
                create,
                timeout_s=scorers.timeout_s,
                supervision=supervision or SupervisionSettings(),
                retries=retries or Retries(),
                on_event=on_event,
            )

        self._rewards = replicas(
            "reward_scorer", scorers.reward_replicas, lambda: new_reward(model, reward, scorers, device)
        )
        self._references = replicas(
            "reference_scorer", scorers.reference_replicas, lambda: new_reference(model, scorers, device)
        )

    async def start(self, timeout_s: float) -> None:
        """Create all replicas side by side and wait until each has loaded its model.

        Raises:
            WorkerFailed: a scorer that could not start, with its reason. TimeoutError: names the scorer.
        """
        await all_or_cancel(self._rewards.start(timeout_s), self._references.start(timeout_s))

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """See ``protocols.Scorer``. Rewards and reference log-probs are computed side by side.

        A rollout that its scorers died over has score NaN and the reason ``scorer_died``, or NaN log-probs.
        """
        if not rollouts:
            return []
        rollouts = list(rollouts)
        rewards, logprobs = await all_or_cancel(self._score_rewards(prompt, rollouts), self._score_references(rollouts))
        return [
            ScoredRollout(rollout, reward.score, reward.components, ref_logprobs, reward.reason)
            for rollout, reward, ref_logprobs in zip(rollouts, rewards, logprobs, strict=True)
        ]

    async def _score_rewards(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        try:
            name, rewards = await self._rewards.call("score", prompt, rollouts)
        except WorkerDied as error:
            log.error("group %s is left out, its scorers died over it: %s", rollouts[0].group_id, error)
            unscored = dict.fromkeys(self._components, math.nan)
            return [Reward(rollout.rollout_id, math.nan, dict(unscored), "scorer_died") for rollout in rollouts]
        _check_rewards(name, rollouts, rewards)
        return list(rewards)

    async def _score_references(self, rollouts: list[Rollout]) -> list[Floats]:
        try:
            name, logprobs = await self._references.call("logprobs", rollouts)
        except WorkerDied as error:
            log.error("group %s is left out, its scorers died over it: %s", rollouts[0].group_id, error)
            return [np.full(rollout.n_tokens, np.nan, np.float32) for rollout in rollouts]
        _check_logprobs(name, rollouts, logprobs)
        return list(logprobs)

    def waits(self) -> list[Wait]:
        """Who waits for which scorer, for the watchdog."""
        return [*self._rewards.waits(), *self._references.waits()]

    async def dump_stacks(self) -> dict[str, str]:
        """Stacks of every scorer that is alive, by name."""
        return await dump_all([*self._rewards.alive(), *self._references.alive()])

    async def close(self) -> None:
        """End every replica. Calls in flight fail."""
        await asyncio.gather(self._rewards.close(), self._references.close())


def _check_rewards(name: str, rollouts: Sequence[Rollout], rewards: Sequence[Reward]) -> None:
    expected = [rollout.rollout_id for rollout in rollouts]
    got = [reward.rollout_id for reward in rewards]
    if got != expected:
        raise WorkerFailed(f"{name} answered for rollouts {got}, asked for {expected}; one score each, in order")


def _check_logprobs(name: str, rollouts: Sequence[Rollout], logprobs: Sequence[Floats]) -> None:
    expected = [rollout.token_ids.shape for rollout in rollouts]
    got = [values.shape for values in logprobs]
    if got != expected:
        raise WorkerFailed(f"{name} answered with log-probs of shapes {got}, asked for {expected}")
