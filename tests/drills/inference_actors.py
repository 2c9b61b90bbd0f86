"""A rollout worker and two scorers for drills: real actor processes with a numpy policy inside, quick to start.

A worker samples token by token with a pause after each, and takes an update tensor by tensor, so that a kill finds both
in the middle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from actors.health import Health
from actors.rollout_worker import UpdateTiming
from rlhf_cluster.protocols import RolloutRequest, WeightSnapshot
from rlhf_cluster.types import Floats, Prompt, Rollout, VersionSpan
from tests.drills.policy import check, initial_weights, kind_of, log_distribution, score
from tests.drills.processes import register
from tests.integration.fake_scorers import FakeReward

_TOKEN_S = 0.004
_TENSOR_S = 0.005


class DrillRolloutWorker(Health):
    def __init__(self, index: int, model: str, **_: Any) -> None:
        self._index = index
        self._folder = Path(model)
        self._version = 0
        self._weights = initial_weights()
        self._still = asyncio.Lock()
        register(self._folder, f"rollout_worker_{index}")

    async def start(self) -> dict[str, Any]:
        return {}

    async def generate(self, request: RolloutRequest) -> list[Rollout]:
        kind = kind_of(request.prompt.token_ids)
        generators = [np.random.default_rng(sampling.seed) for sampling in request.sampling]
        tokens: list[list[int]] = [[] for _ in generators]
        logprobs: list[list[float]] = [[] for _ in generators]
        spans: list[VersionSpan] = []
        for position in range(request.sampling[0].max_new_tokens):
            async with self._still:
                version = self._version
                distribution = log_distribution(self._weights, kind, request.sampling[0].temperature)
            _extend(spans, version, position)
            for generator, answer, values in zip(generators, tokens, logprobs, strict=True):
                token = int(generator.choice(len(distribution), p=np.exp(distribution)))
                answer.append(token)
                values.append(float(distribution[token]))
            await asyncio.sleep(_TOKEN_S)
        return [
            Rollout(
                rollout_id=f"{request.group_id}/{request.attempt}/{number}",
                attempt=request.attempt,
                group_id=request.group_id,
                prompt_token_ids=np.array(request.prompt.token_ids),
                token_ids=np.array(tokens[number]),
                behaviour_logprobs=np.array(logprobs[number]),
                version_spans=tuple(spans),
                finish_reason="length",
                sampling=sampling,
            )
            for number, sampling in enumerate(request.sampling)
        ]

    async def update_weights(self, snapshot: WeightSnapshot) -> UpdateTiming:
        weights = load_file(snapshot.path)
        check(weights, snapshot.manifest)
        async with self._still:
            for name, value in weights.items():
                self._weights[name] = value
                await asyncio.sleep(_TENSOR_S)
            self._version = snapshot.version
        return UpdateTiming(0.01, 0.01)

    async def close(self) -> None: ...


def _extend(spans: list[VersionSpan], version: int, position: int) -> None:
    if spans and spans[-1].version == version:
        spans[-1] = spans[-1]._replace(end=position + 1)
    else:
        spans.append(VersionSpan(version, position, position + 1))


class DrillRewardScorer(Health):
    def __init__(self, model: Any, *_: Any) -> None:
        register(Path(model.policy), "reward_scorer_0")

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[FakeReward]:
        await asyncio.sleep(_TOKEN_S)
        values = [score(rollout.token_ids) for rollout in rollouts]
        return [
            FakeReward(rollout.rollout_id, value, {"model": value}, None)
            for rollout, value in zip(rollouts, values, strict=True)
        ]


class DrillReferenceScorer(Health):
    def __init__(self, model: Any, *_: Any) -> None:
        register(Path(model.policy), "reference_scorer_0")

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        await asyncio.sleep(_TOKEN_S)
        return [_uniform(rollout) for rollout in rollouts]


def _uniform(rollout: Rollout) -> NDArray[np.float32]:
    distribution = log_distribution(initial_weights(), kind_of(rollout.prompt_token_ids), rollout.sampling.temperature)
    return distribution[rollout.token_ids].astype(np.float32)
