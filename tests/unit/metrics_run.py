"""A small recorded run for the metrics tests: real records, hand-set seconds, and a sink that keeps what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.metrics.sinks import Sink
from rlhf_cluster.types import Ratio, Rollout, Sampling, ScoredGroup, ScoredRollout, TrainBatch, UpdateResult
from tests.unit.builders import spans


class HandClock:
    """Seconds a test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class KeepingSink:
    """Keeps every row and every state of the live gauges."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []
        self.lives: list[dict[str, float]] = []
        self.closed = 0

    def step(self, step: int, version: int, row: Mapping[str, float]) -> None:
        self.rows.append(row)

    def live(self, values: Mapping[str, float]) -> None:
        self.lives.append(dict(values))

    def evaluation(self, name: str, step: int, version: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        self.closed += 1


def recorder(
    *sinks: Sink, clock: HandClock | None = None, max_staleness: int = 2, total_steps: int = 10
) -> MetricsRecorder:
    return MetricsRecorder(
        max_staleness=max_staleness, total_steps=total_steps, clock=clock or HandClock(), sinks=sinks
    )


def rollout(versions: Sequence[int], *, group_id: str = "g", start: int = 0, logprob: float = -1.0) -> Rollout:
    """One token per entry of ``versions``, each sampled with ``logprob``."""
    return Rollout(
        rollout_id=f"{group_id}/0/0",
        attempt=0,
        group_id=group_id,
        prompt_token_ids=np.arange(3),
        token_ids=np.arange(len(versions)),
        behaviour_logprobs=np.full(len(versions), logprob),
        version_spans=spans(versions, start),
        finish_reason="stop",
        sampling=Sampling(1.0, 64, 0),
    )


def group(
    versions: Sequence[int], log_ratios: Sequence[float] | None = None, *, score: float = 0.0, group_id: str = "g"
) -> ScoredGroup:
    """One rollout; ``log_ratios`` are behaviour minus reference log-probs of its tokens, in nats."""
    one = rollout(versions, group_id=group_id)
    ratios = np.zeros(len(versions)) if log_ratios is None else np.asarray(log_ratios)
    return ScoredGroup(group_id, (ScoredRollout(one, score, {"model": score}, one.behaviour_logprobs - ratios),))


def record_step(
    metrics: MetricsRecorder, version: int, token_versions: Sequence[int], log_ratios: Sequence[float] | None = None
) -> dict[str, float]:
    """One whole step on one group whose learner was at ``version``."""
    one = group(token_versions, log_ratios, group_id=f"g{version}")
    metrics.rollouts_generated(0, [member.rollout for member in one.rollouts], 1.0)
    metrics.group_scored(one, 0.5)
    metrics.batch_consumed(TrainBatch(version, (one,)), waited_s=0.2, overlapping_rollouts=1)
    metrics.step_done(UpdateResult(version + 1, True, {"clip_fraction": Ratio(1, 4)}), seconds=2.0)
    return metrics.close_step(version + 1, version + 1)
