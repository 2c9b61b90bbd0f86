"""A recorder that also measures the run for ``calibration.json``: it looks at the events on their way and changes none.

recorder = CalibratingRecorder.for_run(config, folder.path / FILE_NAME, clock=clock, sinks=sinks)
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from rlhf_cluster.config import Config
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.calibration import (
    Calibration,
    Concurrency,
    EngineSpeed,
    LearnerSpeed,
    Lengths,
    Measured,
    PromptLength,
    ScorerSpeed,
    WeightsSpeed,
)
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.metrics.sinks import Sink
from rlhf_cluster.metrics.speed_fits import TimedGroup, busy_seconds, fit_engine, fit_tokens
from rlhf_cluster.planner.model_shapes import count_parameters
from rlhf_cluster.protocols import Clock, PublishReport
from rlhf_cluster.simulation.lengths import Empirical
from rlhf_cluster.types import Rollout, ScoredGroup, TrainBatch, UpdateResult

# The newest events of a long run describe it better than its first ones, and memory stays bounded.
_GROUPS = 4096
_STEPS = 512
_LENGTHS = 16384
_QUANTILES = 101
_BINS = 20
_WRITE_EVERY_S = 60.0
_LEAST_SECONDS = 1e-6
_STAGE_SUFFIX = "_seconds"

log = logging.getLogger(__name__)


class CalibratingRecorder(MetricsRecorder):
    """``MetricsRecorder`` that writes ``path`` now and then and when it is closed.

    A run too short to tell a speed writes no file. What was measured before a resume is not carried over.

    Args:
        weight_bytes: of the policy in engine dtype.
        reward_replicas: scorers with a reward model; 0: there is none.
        reference_replicas: reference scorers.
        recorder: arguments of ``MetricsRecorder``.
    """

    def __init__(
        self,
        path: Path,
        *,
        weight_bytes: int,
        reward_replicas: int,
        reference_replicas: int,
        clock: Clock,
        **recorder: Any,
    ) -> None:
        super().__init__(clock=clock, **recorder)
        self._now = clock.now
        self._path = path
        self._written_at = clock.now()
        self._weight_bytes = weight_bytes
        self._reward_replicas = reward_replicas
        self._reference_replicas = reference_replicas
        self._groups: deque[TimedGroup] = deque(maxlen=_GROUPS)
        self._scored: deque[tuple[float, float, int]] = deque(maxlen=_GROUPS)
        self._steps: deque[tuple[float, int]] = deque(maxlen=_STEPS)
        self._stages: deque[dict[str, float]] = deque(maxlen=_STEPS)
        self._waits: deque[float] = deque(maxlen=_STEPS)
        self._snapshots: deque[float] = deque(maxlen=_STEPS)
        self._publications: deque[tuple[float, float, float]] = deque(maxlen=_STEPS)
        self._answers: deque[int] = deque(maxlen=_LENGTHS)
        self._prompts: deque[int] = deque(maxlen=_LENGTHS)
        self._batch_tokens = 0
        self._trained_at: float | None = None
        self._first_dispatch = math.inf
        self._closed_steps = 0
        self._last_close = 0.0

    @classmethod
    def for_run(
        cls, config: Config, path: Path, *, clock: Clock, sinks: Sequence[Sink], **recorder: Any
    ) -> CalibratingRecorder:
        """The recorder of a training run of ``config``; ``recorder`` are further arguments of ``MetricsRecorder``."""
        element = 2 if config.model.dtype == "bfloat16" else 4
        return cls(
            path,
            weight_bytes=count_parameters(Path(config.model.policy)) * element,
            reward_replicas=config.scorers.reward_replicas if config.model.reward else 0,
            reference_replicas=config.scorers.reference_replicas,
            max_staleness=config.queue.max_staleness,
            total_steps=config.run.steps,
            clock=clock,
            sinks=sinks,
            **recorder,
        )

    def rollouts_generated(self, worker: int, rollouts: Sequence[Rollout], seconds: float) -> None:
        super().rollouts_generated(worker, rollouts, seconds)
        now = self._now()
        lengths = tuple(rollout.n_tokens for rollout in rollouts)
        if lengths:
            prompt = len(rollouts[0].prompt_token_ids)
            self._groups.append(TimedGroup(worker, now - seconds, now, prompt, lengths))
            self._prompts.append(prompt)
        self._answers.extend(lengths)
        self._first_dispatch = min(self._first_dispatch, now - seconds)

    def group_scored(self, group: ScoredGroup, seconds: float) -> None:
        super().group_scored(group, seconds)
        now = self._now()
        tokens = sum(len(member.rollout.prompt_token_ids) + member.rollout.n_tokens for member in group.rollouts)
        self._scored.append((now - seconds, now, tokens))

    def batch_consumed(self, batch: TrainBatch, *, waited_s: float, overlapping_rollouts: int) -> None:
        super().batch_consumed(batch, waited_s=waited_s, overlapping_rollouts=overlapping_rollouts)
        self._batch_tokens = batch.n_tokens + sum(len(member.rollout.prompt_token_ids) for member in batch.rollouts)
        self._waits.append(waited_s)

    def step_done(self, result: UpdateResult, *, seconds: float) -> None:
        super().step_done(result, seconds=seconds)
        stages = {
            name.removesuffix(_STAGE_SUFFIX): ratio.value
            for name, ratio in result.metrics.items()
            if name.endswith(_STAGE_SUFFIX) and name != "train_seconds" and ratio.count
        }
        self._stages.append(stages)
        # Pre-training of the critic happens once, however many steps are to come.
        self._steps.append((max(_LEAST_SECONDS, seconds - stages.get("critic_pretrain", 0.0)), self._batch_tokens))
        self._trained_at = self._now() if result.stepped else None

    def queue_state(self, queue: ExperienceQueue) -> None:
        super().queue_state(queue)
        # The first of these comes after the learner's snapshot of the step, whose time no other event tells.
        if self._trained_at is not None:
            self._snapshots.append(self._now() - self._trained_at)
            self._trained_at = None

    def weights_published(self, report: PublishReport) -> None:
        super().weights_published(report)
        now = self._now()
        self._publications.append((now, report.total_s, report.paused_s))

    def close_step(self, version: int, step: int) -> dict[str, float]:
        row = super().close_step(version, step)
        self._closed_steps += 1
        self._last_close = self._now()
        if self._last_close - self._written_at >= _WRITE_EVERY_S:
            self._write()
        return row

    def close(self) -> None:
        try:
            self._write()
        finally:
            super().close()

    def calibration(self) -> Calibration | None:
        """What was measured so far; None before a step has been closed and published."""
        groups, steps, publications = list(self._groups), list(self._steps), list(self._publications)
        enough = groups and self._scored and steps and publications and self._closed_steps and any(self._answers)
        if not enough:
            return None
        paused_s = max(_LEAST_SECONDS, median(paused for _, _, paused in publications))
        total_s = median(total for _, total, _ in publications)
        snapshot_s = max(_LEAST_SECONDS, median(self._snapshots)) if self._snapshots else _LEAST_SECONDS
        engine = fit_engine(groups, [(at - paused, at) for at, _, paused in publications])
        learner_speed, fixed_s = fit_tokens([tokens for _, tokens in steps], [seconds for seconds, _ in steps])
        scored_tokens = sum(tokens for _, _, tokens in self._scored)
        scoring_s = max(_LEAST_SECONDS, busy_seconds([(start, end) for start, end, _ in self._scored]))

        def scorer(replicas: int) -> ScorerSpeed:
            return ScorerSpeed(tokens_per_s=scored_tokens / scoring_s / replicas)

        gib = self._weight_bytes / 2**30
        seconds = max(_LEAST_SECONDS, self._last_close - self._first_dispatch)
        return Calibration(
            rollout=EngineSpeed(tokens_per_s=engine.peak, tokens_per_s_alone=engine.alone),
            reward=scorer(self._reward_replicas) if self._reward_replicas else None,
            reference=scorer(self._reference_replicas),
            learner=LearnerSpeed(tokens_per_s=learner_speed, fixed_s=fixed_s),
            weights=WeightsSpeed(
                gib=gib,
                snapshot_gib_per_s=gib / snapshot_s,
                transfer_gib_per_s=gib / max(_LEAST_SECONDS, total_s - paused_s),
                load_gib_per_s=gib / paused_s,
                pause_s=0.0,
            ),
            batch=PromptLength(prompt_tokens=max(1, round(fmean(self._prompts)))),
            lengths=Empirical(tokens=_quantiles(self._answers)),
            measured=Measured(
                steps=self._closed_steps,
                seconds=seconds,
                steps_per_hour=3600 * self._closed_steps / seconds,
                groups=len(groups),
                rollout_seconds=fmean(group.end - group.start for group in groups),
                rollout=tuple(Concurrency(sequences=n, tokens_per_s=speed, groups=k) for n, speed, k in engine.seen),
                score_seconds=fmean(end - start for start, end, _ in self._scored),
                wait_seconds=fmean(self._waits),
                train_seconds=fmean(seconds for seconds, _ in steps),
                train_tokens=fmean(tokens for _, tokens in steps),
                train_stages=_stage_means(list(self._stages)),
                snapshot_seconds=snapshot_s,
                publish_seconds=total_s,
                publish_paused_seconds=paused_s,
                publish_bytes=self._weight_bytes,
                answers=_lengths(self._answers),
                prompts=_lengths(self._prompts),
            ),
        )

    def _write(self) -> None:
        """A run is not worth less because its speeds cannot be told or written."""
        self._written_at = self._now()
        try:
            measured = self.calibration()
            if measured is not None:
                measured.write(self._path)
        except (ValueError, OSError) as error:
            log.warning("%s is not written: %s", self._path, error)


def _quantiles(lengths: Sequence[int]) -> tuple[int, ...]:
    """Evenly spaced quantiles, from the smallest to the largest; all lengths when they are few."""
    if len(lengths) <= _QUANTILES:
        return tuple(sorted(lengths))
    return tuple(int(value) for value in np.quantile(lengths, np.linspace(0, 1, _QUANTILES), method="nearest"))


def _lengths(lengths: Sequence[int]) -> Lengths:
    values = np.array(lengths)
    edges = np.unique(np.linspace(values.min(), values.max() + 1, _BINS + 1).astype(int))
    counts, _ = np.histogram(values, edges)
    return Lengths(
        count=len(values), mean=float(values.mean()), bounds=tuple(map(int, edges)), counts=tuple(map(int, counts))
    )


def _stage_means(stages: Sequence[dict[str, float]]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    for step in stages:
        sums.update(step)
    return {name: total / len(stages) for name, total in sorted(sums.items())}
