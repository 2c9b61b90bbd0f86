"""Speeds from timed events: what ``simulation.actors`` is described by, fitted to what a run showed. Numpy only.

Engine. With n sequences a step of all of them takes n / peak + c / peak seconds, c = peak / alone - 1 (see
``simulation.actors.EngineSpeed``): a straight line in n. A group's longest answer tells its number of steps, the other
groups of that worker its mean n; the line is fitted to all groups by least squares, weighted by steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PREFILL_TOKENS_PER_TOKEN = 20.0
"""As ``simulation.cluster_model.RolloutModel`` assumes it."""

# Points that differ less than this, as a share of their mean, fix no slope.
_LEAST_SPREAD = 0.1
_LEAST_POINTS = 4
_CONCURRENCY_BINS = 6

Interval = tuple[float, float]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimedGroup:
    """One group on an engine, seconds on one clock."""

    worker: int
    start: float
    end: float
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Generated tokens of each sequence."""

    @property
    def steps(self) -> float:
        """Engine steps its longest sequence took."""
        return max(self.lengths) + self.prompt_tokens / PREFILL_TOKENS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class EngineFit:
    alone: float
    """Tokens a second of one sequence alone."""
    peak: float
    """Tokens a second of very many together."""
    seen: tuple[tuple[float, float, int], ...]
    """(sequences, tokens a second of all together, groups), by rising concurrency."""


def fit_engine(groups: Sequence[TimedGroup], pauses: Sequence[Interval] = ()) -> EngineFit:
    """Speed of one engine; the time in ``pauses``, when generation stood still, does not count.

    Groups that all saw nearly the same concurrency fix one speed only. Half of a step is then taken to be shared by
    the sequences and half to grow with them, so the speed at that concurrency is exact and others are a guess.

    Raises:
        ValueError: no group generated anything in any time.
    """
    usable = [group for group in groups if group.steps > 0 and group.end > group.start and max(group.lengths) > 0]
    if not usable:
        raise ValueError("no group generated anything, so no speed can be told")
    running = {worker: _Running([g for g in usable if g.worker == worker]) for worker in {g.worker for g in usable}}
    steps = np.array([group.steps for group in usable])
    sequences = np.array([running[group.worker].mean(group.start, group.end) for group in usable])
    seconds = np.array([group.end - group.start - _overlap(group.start, group.end, pauses) for group in usable])
    a_step = np.maximum(seconds, 1e-9) / steps
    slope, fixed = _line(sequences, a_step, weights=steps)
    if slope <= 0:
        slope, fixed = _halves(sequences, a_step, steps)
    return EngineFit(1 / (slope + fixed), 1 / slope, _binned(sequences, a_step, steps))


def fit_tokens(tokens: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """(tokens a second, fixed seconds) of calls that took ``seconds`` for ``tokens``.

    Calls too few or too alike to tell the two apart have no fixed part. The mean call is always reproduced.

    Raises:
        ValueError: no tokens, or no time.
    """
    x, y = np.array(tokens, dtype=np.float64), np.array(seconds, dtype=np.float64)
    if not x.sum() > 0 or not y.sum() > 0:
        raise ValueError("nothing was timed, so no speed can be told")
    slope, fixed = _line(x, y, weights=np.ones_like(x))
    if slope <= 0:
        slope, fixed = float(y.sum() / x.sum()), 0.0
    return 1 / slope, fixed


def busy_seconds(intervals: Sequence[Interval]) -> float:
    """Seconds that lie in at least one interval."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return float(total)


class _Running:
    """How many sequences of one worker ran at any time, as its integral: exact between the events."""

    def __init__(self, groups: Sequence[TimedGroup]) -> None:
        prefill = [group.prompt_tokens / PREFILL_TOKENS_PER_TOKEN for group in groups]
        starts = [group.start for group in groups for _ in group.lengths]
        # All sequences of a group advance alike, so each ends at its share of the longest one's steps.
        ends = [
            group.start + (group.end - group.start) * (length + before) / group.steps
            for group, before in zip(groups, prefill, strict=True)
            for length in group.lengths
        ]
        times = np.array(starts + ends)
        changes = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        level = np.cumsum(changes[order])
        self._integral = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(self._times))])

    def mean(self, start: float, end: float) -> float:
        first, last = np.interp([start, end], self._times, self._integral)
        return float((last - first) / (end - start))


def _overlap(start: float, end: float, pauses: Sequence[Interval]) -> float:
    return sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in pauses)


def _line(x: Numbers, y: Numbers, *, weights: Numbers) -> tuple[float, float]:
    """(slope, intercept), both at least 0, of the weighted least squares line; slope 0 when the points fix none.

    A line forced through the origin or made flat keeps the weighted mean, so the mean case stays right.
    """
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    spread = np.sqrt(np.average((x - mean_x) ** 2, weights=weights))
    if len(x) < _LEAST_POINTS or spread < _LEAST_SPREAD * mean_x:
        return 0.0, float(mean_y)
    slope = np.average((x - mean_x) * (y - mean_y), weights=weights) / spread**2
    slope = float(np.clip(slope, 0.0, mean_y / mean_x))
    # Forced through the origin it may miss it by a rounding.
    return slope, max(0.0, float(mean_y - slope * mean_x))


def _halves(sequences: Numbers, a_step: Numbers, steps: Numbers) -> tuple[float, float]:
    mean = float(np.average(a_step, weights=steps))
    return mean / 2 / float(np.average(sequences, weights=steps)), mean / 2


def _binned(sequences: Numbers, a_step: Numbers, steps: Numbers) -> tuple[tuple[float, float, int], ...]:
    """Groups of like concurrency together, about equally many each."""
    order = np.argsort(sequences)
    parts = [part for part in np.array_split(order, min(_CONCURRENCY_BINS, len(order))) if len(part)]
    seen = []
    for part in parts:
        at_once = float(np.average(sequences[part], weights=steps[part]))
        seen.append((at_once, at_once / float(np.average(a_step[part], weights=steps[part])), len(part)))
    return tuple(seen)
