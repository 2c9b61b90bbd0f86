"""Do engine and learner agree about the same tokens under the same weights?

Names and checksums of parameters cannot see a stale packed copy of a tied head; log-probabilities can. The check runs
on a few rollouts at start-up and again after the first publication of trained weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_cluster.types import Floats, Ratio, Rollout

# Mean |engine - learner| in nats a token. Healthy pairs were seen at 0.0004 (float32) and 0.04 (bfloat16); a stale
# tied head at 0.17.
TOLERANCE_NATS = {"float32": 0.01, "bfloat16": 0.1}


class SelfCheckFailed(RuntimeError):
    """Engine and learner disagree about log-probabilities, so every importance weight would be wrong."""


def mean_disagreement(rollouts: Sequence[Rollout], learner_logprobs: Sequence[Floats]) -> Ratio:
    """Sum and count of |behaviour - learner| over all tokens, in nats."""
    total, count = 0.0, 0
    for rollout, logprobs in zip(rollouts, learner_logprobs, strict=True):
        difference = np.abs(rollout.behaviour_logprobs.astype(np.float64) - logprobs.astype(np.float64))
        total += float(difference.sum())
        count += rollout.n_tokens
    return Ratio(total, count)


def check(
    rollouts: Sequence[Rollout],
    learner_logprobs: Sequence[Floats],
    *,
    version: int,
    dtype: str,
    tolerance: float | None,
) -> float:
    """The mean disagreement in nats a token.

    Raises:
        SelfCheckFailed: above ``tolerance`` (by dtype when None), when a log-prob is not finite, or when there was no
            token to compare.
    """
    limit = TOLERANCE_NATS[dtype] if tolerance is None else tolerance
    mean = mean_disagreement(rollouts, learner_logprobs).value
    if not mean <= limit:
        raise SelfCheckFailed(
            f"self-check at version {version}: engine and learner differ by {mean:.4f} nats a token on the same tokens "
            f"(limit {limit}, guardrails.self_check_tolerance). The engine does not hold the learner's weights, or "
            "computes them differently; nothing it samples can be trained on"
        )
    return mean
