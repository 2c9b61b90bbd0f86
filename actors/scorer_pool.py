"""Reward and reference scorers as Ray actors behind ``protocols.Scorer``: routing, deadlines, checked replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from actors.reward_scorer import Reward
from rlhf_cluster.config import ModelConfig, RewardConfig, ScorerConfig
from rlhf_cluster.protocols import WorkerFailed
from rlhf_cluster.types import Floats, Prompt, Rollout, ScoredRollout

# Scoring is a pure function of its arguments, so Ray may restart a dead scorer and repeat the calls it held.
_RESTARTS: dict[str, Any] = {"max_restarts": 2, "max_task_retries": 2}


class NoScorersLeft(RuntimeError):
    """Every scorer of a kind is dead; issuing prompts again would not help. The message names the first cause."""


class RewardScorerActor:
    """One ``RewardScorer`` in its own process."""

    def __init__(self, model: ModelConfig, reward: RewardConfig, scorers: ScorerConfig, device: str) -> None:
        from actors.reward_scorer import RewardScorer

        _limit_threads(scorers, device)
        self._scorer = RewardScorer(model, reward, scorers, device=device)

    async def ready(self) -> None:
        """Returns once the constructor has."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Reward]:
        return await self._scorer.score(prompt, rollouts)


class ReferenceScorerActor:
    """One ``ReferenceScorer`` in its own process."""

    def __init__(self, model: ModelConfig, scorers: ScorerConfig, device: str) -> None:
        from actors.reference_scorer import ReferenceScorer

        _limit_threads(scorers, device)
        self._scorer = ReferenceScorer(model, scorers, device=device)

    async def ready(self) -> None:
        """Returns once the constructor has."""

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        return await self._scorer.logprobs(rollouts)


def _limit_threads(scorers: ScorerConfig, device: str) -> None:
    import torch

    if device == "cpu":
        torch.set_num_threads(scorers.cpu_threads)


@dataclass(slots=True)
class _Replica:
    name: str
    handle: Any
    in_flight: int = 0
    dead: bool = False
    cause: str = "it was closed"


class ScorerPool:
    """Implements ``protocols.Scorer``. ``start`` before the first ``score``.

    Args:
        device: ``cpu`` or ``cuda``.
        actor_options: passed to every actor's ``.options``: num_cpus, num_gpus, runtime_env with env_vars, ...
    """

    def __init__(
        self,
        model: ModelConfig,
        reward: RewardConfig,
        scorers: ScorerConfig,
        *,
        device: str = "cpu",
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._reward, self._scorers, self._device = model, reward, scorers, device
        self._options = {**_RESTARTS, **(actor_options or {})}
        self._rewards: list[_Replica] = []
        self._references: list[_Replica] = []

    async def start(self, timeout_s: float) -> None:
        """Create all replicas side by side and wait until each has loaded its model.

        Raises:
            WorkerFailed: a scorer that could not start, with its reason. TimeoutError: names the scorer.
        """
        reward_actor = ray.remote(RewardScorerActor).options(**self._options)
        reference_actor = ray.remote(ReferenceScorerActor).options(**self._options)
        self._rewards = [
            _Replica(
                f"reward scorer {index}",
                reward_actor.remote(self._model, self._reward, self._scorers, self._device),
            )
            for index in range(self._scorers.reward_replicas)
        ]
        self._references = [
            _Replica(f"reference scorer {index}", reference_actor.remote(self._model, self._scorers, self._device))
            for index in range(self._scorers.reference_replicas)
        ]
        await _all(*(_call(replica, "ready", timeout_s=timeout_s) for replica in [*self._rewards, *self._references]))

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """See ``protocols.Scorer``. Rewards and reference log-probs are computed side by side."""
        if not rollouts:
            return []
        rollouts = list(rollouts)
        reward_scorer, reference_scorer = _least_busy(self._rewards), _least_busy(self._references)
        timeout_s = self._scorers.timeout_s
        rewards, logprobs = await _all(
            _call(reward_scorer, "score", prompt, rollouts, timeout_s=timeout_s),
            _call(reference_scorer, "logprobs", rollouts, timeout_s=timeout_s),
        )
        _check_rewards(reward_scorer.name, rollouts, rewards)
        _check_logprobs(reference_scorer.name, rollouts, logprobs)
        return [
            ScoredRollout(rollout, reward.score, reward.components, ref_logprobs, reward.reason)
            for rollout, reward, ref_logprobs in zip(rollouts, rewards, logprobs, strict=True)
        ]

    async def close(self) -> None:
        """End every replica. Calls in flight fail."""
        for replica in [*self._rewards, *self._references]:
            replica.dead = True
            ray.kill(replica.handle, no_restart=True)


def _least_busy(replicas: Sequence[_Replica]) -> _Replica:
    alive = [replica for replica in replicas if not replica.dead]
    if not alive:
        causes = "; ".join(f"{replica.name}: {replica.cause}" for replica in replicas) or "no scorer was started"
        raise NoScorersLeft(f"no scorer is left alive: {causes}")
    return min(alive, key=lambda replica: replica.in_flight)


async def _call(replica: _Replica, method: str, *args: Any, timeout_s: float) -> Any:
    replica.in_flight += 1
    started = time.monotonic()
    reference = getattr(replica.handle, method).remote(*args)
    try:
        return await asyncio.wait_for(reference, timeout_s)
    except RayError as error:  # first: an error raised in the actor may itself be a TimeoutError
        if isinstance(error, ActorDiedError):
            replica.dead, replica.cause = True, _first_cause(error)
        raise WorkerFailed(f"{replica.name} failed in {method}: {_first_cause(error)}") from error
    except TimeoutError:
        ray.cancel(reference)
        raise TimeoutError(
            f"{replica.name} did not answer {method} within {time.monotonic() - started:.0f} s (limit {timeout_s:g} s)"
        ) from None
    except asyncio.CancelledError:
        ray.cancel(reference)
        raise
    finally:
        replica.in_flight -= 1


async def _all(*calls: Any) -> list[Any]:
    """All results; the first error cancels the other calls, so that no scorer works for nobody."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _first_cause(error: RayError) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause).strip() else 'no message'}"


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
