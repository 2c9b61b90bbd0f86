"""Scorers without models: real actor processes behind the real methods, with faults on request, quick to start.

The prompt's text says what the reward scorer does: ``nap``: take a second; ``sleep``: take half a minute; ``die``:
SIGKILL itself; ``error``: raise. Scores are answer lengths, log-probs are -1.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from actors.health import Health
from rlhf_cluster.types import Floats, Prompt, Rollout


class FakeReward(NamedTuple):
    """Like ``actors.reward_scorer.Reward``, whose module loads torch."""

    rollout_id: str
    score: float
    components: dict[str, float]
    reason: str | None


class FakeRewardScorer(Health):
    def __init__(self, *_: Any) -> None: ...

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[FakeReward]:
        if prompt.text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt.text == "error":
            raise ValueError("the template does not render")
        await asyncio.sleep({"nap": 1.0, "sleep": 30.0}.get(prompt.text, 0.0))
        return [FakeReward(r.rollout_id, float(r.n_tokens), {"model": float(r.n_tokens)}, None) for r in rollouts]


class FakeReferenceScorer(Health):
    def __init__(self, *_: Any) -> None: ...

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        return [np.full(rollout.n_tokens, -1.0, np.float32) for rollout in rollouts]
