"""The recorder: the control loop's events in, one row of named numbers a learner step out.

    rollouts_generated, group_scored, batch_consumed, step_done, weights_published,     sinks:
    workers, queue_state, unscorable, restarted  --> sums and counts --> close_step --> prometheus, jsonl,
                                                                                        tensorboard, console

Means are kept as (sum, count) until the row closes, so they are means over tokens, rollouts or steps and never means
of means. A mean over nothing is left out of the row. Counters and histograms run over the whole run, resumes
included; everything else describes the last step.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.ledger import DUPLICATE, RETIRE_REASONS, Count
from rlhf_cluster.metrics import names
from rlhf_cluster.metrics.accumulators import Histogram, VersionWindow
from rlhf_cluster.metrics.series import series_key
from rlhf_cluster.metrics.sinks import Sink
from rlhf_cluster.protocols import Clock, PublishReport
from rlhf_cluster.types import Ratio, Rollout, ScoredGroup, TrainBatch, UpdateResult

log = logging.getLogger(__name__)

_LAG_METRIC = re.compile(r"kl_behaviour_lag(\d+)")
_UNSAFE_NAME = re.compile(r"[^a-z0-9_]")
_LARGEST_EXPONENT = 700.0
_STEPS_FOR_TIME_LEFT = 10


class WorkerStatus(Protocol):
    """What a rollout worker slot shows: its stable index, whether it takes requests, the version it serves."""

    @property
    def index(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def version(self) -> int: ...


class MetricsRecorder:
    """One call a thing that happened; ``close_step`` once a learner step.

    Args:
        max_staleness: K, versions; the lag histogram has the buckets 0..K.
        total_steps: learner steps the run plans, steps before a resume included.
        mismatch_alarm: nats a token between engine and learner, same version, above which a line is logged.
        clock: where rates and time left are measured.
        sinks: who gets the rows; the recorder closes them.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        total_steps: int,
        clock: Clock,
        sinks: Sequence[Sink],
        mismatch_alarm: float = math.inf,
    ) -> None:
        self.events = 0
        """Grows with everything that is recorded: a run whose count stands still does nothing."""
        self._mismatch_alarm = mismatch_alarm
        self._max_staleness = max_staleness
        self._total_steps = total_steps
        self._clock = clock
        self._sinks = tuple(sinks)
        self._started_at = clock.now()
        self._elapsed_before = 0.0
        self._step = 0
        self._version = 0
        self._interval_start: float | None = None
        self._intervals: deque[float] = deque(maxlen=_STEPS_FOR_TIME_LEFT)
        self._interval_tokens = dict.fromkeys(names.TOKEN_STAGES, 0)
        self._ratios: dict[str, Ratio] = {}
        self._gauges: dict[str, float] = {}
        self._live: dict[str, float] = {}
        self._last_row: dict[str, float] = {}
        self._versions = VersionWindow()
        self._lags = Histogram(range(max_staleness + 1))
        self._seconds = {stage: Histogram(names.STAGE_SECONDS_BOUNDS) for stage in names.TIMED_STAGES}
        self._counters = {
            series_key(metric.name, dict(zip(metric.labels, values, strict=True))): 0.0
            for metric in names.METRICS.values()
            if metric.kind == "counter"
            for values in (metric.closed or ((),))
        }
        self._set_live({series_key("rlhf_planned_steps"): float(total_steps)})

    def rollouts_generated(self, worker: int, rollouts: Sequence[Rollout], seconds: float) -> None:
        """One group came back from worker slot ``worker`` after ``seconds``."""
        if self._interval_start is None:
            self._interval_start = self._clock.now() - seconds
        self._passed("generated", sum(rollout.n_tokens for rollout in rollouts))
        for rollout in rollouts:
            self._count("rlhf_rollouts_total", 1, reason=rollout.finish_reason)
        self._seconds["rollout"].observe(seconds)

    def group_scored(self, group: ScoredGroup, seconds: float) -> None:
        """Scores of one group. Scores that are not finite enter no mean; report them with ``unscorable``."""
        self._passed("scored", group.n_tokens)
        self._seconds["score"].observe(seconds)
        scores = [member.score for member in group.rollouts if math.isfinite(member.score)]
        if scores:
            self._count("rlhf_scored_rollouts_total", len(scores))
            self._mean("rlhf_score_mean", Ratio(sum(scores), len(scores)))
            self._mean("rlhf_unscorable_fraction", Ratio(0, len(scores)))
        for member in group.rollouts:
            for component, value in member.score_components.items():
                if math.isfinite(value):
                    self._mean("rlhf_score_component_mean", Ratio(value, 1), component=component)

    def unscorable(self, count: int, reason: str) -> None:
        """``count`` rollouts got no score; a reason outside ``names.UNSCORABLE_REASONS`` counts as ``other``."""
        known = reason if reason in names.UNSCORABLE_REASONS else "other"
        self._count("rlhf_unscorable_total", count, reason=known)
        self._mean("rlhf_unscorable_fraction", Ratio(count, count))

    def batch_consumed(self, batch: TrainBatch, *, waited_s: float, overlapping_rollouts: int) -> None:
        """The learner took ``batch`` after waiting ``waited_s``; so many of its rollouts overlapped an update."""
        members = batch.rollouts
        self._seconds["wait"].observe(waited_s)
        self._gauge("rlhf_batch_rollouts", len(members))
        self._gauge("rlhf_batch_tokens", batch.n_tokens)
        self._gauge("rlhf_batch_overlapping_rollouts", overlapping_rollouts)
        self._mean("rlhf_overlapping_rollout_fraction", Ratio(overlapping_rollouts, len(members)))
        if not batch.n_tokens:
            return
        versions = np.concatenate([member.rollout.token_versions() for member in members])
        lags = batch.learner_version - versions
        behaviour = np.concatenate([member.rollout.behaviour_logprobs for member in members]).astype(np.float64)
        reference = np.concatenate([member.ref_logprobs for member in members]).astype(np.float64)
        self._versions.add(versions, lags, behaviour - reference)
        for lag, tokens in zip(*np.unique(lags, return_counts=True), strict=True):
            self._lags.observe(float(lag), int(tokens))
        self._mean("rlhf_batch_mean_lag", Ratio(float(lags.sum()), len(lags)))
        # A row holds two batches when the first one's step was skipped; neither may hide the other's lag.
        self._gauge("rlhf_batch_max_lag", max(int(lags.max()), self._gauges.get("rlhf_batch_max_lag", 0)))

    def step_done(self, result: UpdateResult, *, seconds: float) -> None:
        """The learner's answer. Its batch is the one of the last ``batch_consumed``."""
        self._seconds["train"].observe(seconds)
        self._count("rlhf_steps_total" if result.stepped else "rlhf_steps_skipped_total", 1)
        if result.stepped:
            self._passed("trained", int(self._gauges.get("rlhf_batch_tokens", 0)))
        for name, ratio in result.metrics.items():
            if name in names.LEARNER_COUNTERS:
                metric, labels = names.LEARNER_COUNTERS[name]
                self._count(metric, ratio.total, **labels)
            else:
                metric, labels = self._learner_gauge(name)
                self._mean(metric, ratio, **labels)
        # Tokens of the version that is trained: what older ones differ by is staleness, not a fault.
        mismatch = result.metrics.get("kl_behaviour_lag0")
        if mismatch is not None and mismatch.value > self._mismatch_alarm:
            log.warning(
                "version %d: engine and learner differ by %.4f nats a token on tokens of the same version "
                "(guardrails.mismatch_alarm %g); see rlhf_engine_mismatch_fraction",
                result.version,
                mismatch.value,
                self._mismatch_alarm,
            )

    def weights_published(self, report: PublishReport) -> None:
        """One publication to all workers."""
        self._seconds["publish"].observe(report.total_s)
        self._count("rlhf_publications_total", 1)
        self._count("rlhf_publish_failures_total", len(report.failed))
        self._set_live({"rlhf_publish_seconds": report.total_s, "rlhf_publish_paused_seconds": report.paused_s})

    def workers(self, statuses: Iterable[WorkerStatus]) -> None:
        """The state of every worker slot; a slot that is not listed has no series any more."""
        for key in [key for key in self._live if key.startswith("rlhf_worker_")]:
            del self._live[key]
        changed = {}
        for status in statuses:
            label = {"worker": status.index}
            changed[series_key("rlhf_worker_up", label)] = float(status.up)
            changed[series_key("rlhf_worker_policy_version", label)] = float(status.version)
        self._set_live(changed)

    def queue_state(self, queue: ExperienceQueue) -> None:
        """How full and how old the queue is, and where all attempts ended.

        The attempt counters are only as monotonic as the ledger, where a batch counts as trained until its step is
        skipped; call it after ``queue.advance``.
        """
        counts = queue.ledger.counts
        self._attempts("dispatched", "none", Count(queue.ledger.admitted, 0, queue.ledger.delivered.tokens))
        self._attempts("trained", "none", counts["trained"])
        for reason in (*RETIRE_REASONS, DUPLICATE):
            self._attempts("retired", reason, counts[reason])
        self._set_live(
            {
                "rlhf_queue_groups": float(queue.queued),
                "rlhf_outstanding_groups": float(queue.outstanding),
                "rlhf_queue_oldest_lag": float(queue.oldest_lag),
                "rlhf_policy_version": float(queue.learner_version),
            }
        )

    def restarted(self, kind: str) -> None:
        """An actor or the learner group was started again. Raises KeyError when not one of ``names.RESTART_KINDS``."""
        self._count("rlhf_restarts_total", 1, kind=kind)

    def supervision_event(self, kind: str, event: str) -> None:
        """Trouble with an actor of role ``kind``; what is not in ``names.SUPERVISION_EVENTS`` is ignored."""
        if event in names.SUPERVISION_EVENTS:
            # Not one of ``events``: parts that keep dying are no progress.
            self._counters[_key("rlhf_supervision_events_total", (("kind", kind), ("event", event)))] += 1

    def no_progress(self, seconds: float) -> None:
        """Nothing has moved for ``seconds``, says the watchdog."""
        self._set_live({"rlhf_no_progress_seconds": seconds})

    def checkpoint(self, *, saved: bool, blocked_s: float | None = None) -> None:
        """A save ended, with a durable set or without one, after training had waited ``blocked_s`` for it.

        None: it was saved before a resume.
        """
        self._count("rlhf_checkpoints_total", 1, outcome="saved" if saved else "failed")
        if blocked_s is not None:
            self._gauge("rlhf_checkpoint_blocked_seconds", blocked_s)

    def last(self, key: str) -> float | None:
        """The value of a series in the newest closed row, or None."""
        return self._last_row.get(key)

    def evaluated(self, name: str, values: Mapping[str, float]) -> None:
        """A held-out evaluation of the current version, under a name such as ``before``; no part of a row."""
        for sink in self._sinks:
            sink.evaluation(name, self._step, self._version, values)

    def close_step(self, version: int, step: int) -> dict[str, float]:
        """Close the row of learner step ``step`` (counted from 1), which left the learner at ``version``."""
        self._step, self._version = step, version
        self._gauge("rlhf_step", step)
        self._gauge("rlhf_elapsed_seconds", self._elapsed())
        self._set_live({"rlhf_policy_version": float(version)})
        self._close_interval()
        row = self._gauges | self._live
        row |= {key: _exported(key, ratio) for key, ratio in self._ratios.items() if ratio.count}
        row |= self._counters | self._versions.series() | self._lags.series("rlhf_staleness_versions", {})
        for stage, histogram in self._seconds.items():
            row |= histogram.series("rlhf_stage_seconds", {"stage": stage})
        self._ratios.clear()
        self._gauges.clear()
        self._last_row = row
        for sink in self._sinks:
            sink.step(step, version, row)
        return row

    def close(self) -> None:
        """Close every sink, also when one of them fails; the first failure is raised."""
        failures = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def state_dict(self) -> dict[str, Any]:
        """Everything that runs over the whole run, JSON-able; per-step sums are not part of it."""
        return {
            "step": self._step,
            "version": self._version,
            "elapsed_s": self._elapsed(),
            "counters": dict(self._counters),
            "versions": self._versions.state_dict(),
            "lags": self._lags.state_dict(),
            "seconds": {stage: histogram.state_dict() for stage, histogram in self._seconds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting where the saved run stopped."""
        self._step, self._version = int(state["step"]), int(state["version"])
        self._elapsed_before, self._started_at = float(state["elapsed_s"]), self._clock.now()
        self._counters.update({key: float(value) for key, value in state["counters"].items()})
        self._versions.load_state_dict(state["versions"])
        self._lags.load_state_dict(state["lags"])
        for stage, histogram in self._seconds.items():
            histogram.load_state_dict(state["seconds"][stage])

    def _elapsed(self) -> float:
        return self._elapsed_before + self._clock.now() - self._started_at

    def _close_interval(self) -> None:
        """Rates over the time since the last row only; the first interval begins with the first dispatch."""
        now = self._clock.now()
        if self._interval_start is not None and now > self._interval_start:
            seconds = now - self._interval_start
            self._intervals.append(seconds)
            self._gauge("rlhf_step_seconds", seconds)
            for stage, tokens in self._interval_tokens.items():
                self._gauge("rlhf_tokens_per_second", tokens / seconds, stage=stage)
            left = max(0, self._total_steps - self._step)
            self._gauge("rlhf_time_left_seconds", left * sum(self._intervals) / len(self._intervals))
        self._interval_start = now
        self._interval_tokens = dict.fromkeys(names.TOKEN_STAGES, 0)

    def _learner_gauge(self, name: str) -> tuple[str, dict[str, str]]:
        if name in names.LEARNER_GAUGES:
            return names.LEARNER_GAUGES[name]
        lag = _LAG_METRIC.fullmatch(name)
        if lag is not None and int(lag[1]) <= self._max_staleness:
            return "rlhf_kl_behaviour", {"lag": str(int(lag[1]))}
        return names.LEARNER_PREFIX + _UNSAFE_NAME.sub("_", name.lower()), {}

    def _attempts(self, state: str, reason: str, count: Count) -> None:
        labels = (("state", state), ("reason", reason))
        self._counters[_key("rlhf_attempts_total", labels)] = float(count.groups)
        self._counters[_key("rlhf_attempt_tokens_total", labels)] = float(count.tokens)

    def _passed(self, stage: str, tokens: int) -> None:
        self._interval_tokens[stage] += tokens
        self._count("rlhf_tokens_total", tokens, stage=stage)

    def _count(self, name: str, amount: float, **labels: str) -> None:
        self.events += 1
        self._counters[_key(name, tuple(labels.items()))] += amount

    def _mean(self, name: str, ratio: Ratio, **labels: str) -> None:
        key = _key(name, tuple(labels.items()))
        self._ratios[key] = self._ratios.get(key, Ratio(0, 0)) + ratio

    def _gauge(self, name: str, value: float, **labels: str) -> None:
        self._gauges[_key(name, tuple(labels.items()))] = float(value)

    def _set_live(self, values: Mapping[str, float]) -> None:
        self._live.update(values)
        for sink in self._sinks:
            sink.live(self._live)


@functools.lru_cache(maxsize=1024)
def _key(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """``series_key``, remembered: the same few are asked for at every rollout."""
    return series_key(name, dict(labels))


def _exported(key: str, ratio: Ratio) -> float:
    if key == "rlhf_perplexity":
        return math.exp(min(ratio.value, _LARGEST_EXPONENT))
    return ratio.value
