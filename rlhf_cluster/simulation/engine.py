"""One modelled inference engine: the sequences that run share its speed.

With n sequences running, each advances ``speed(n)`` tokens a second. ``progress`` is how many tokens a sequence has
advanced that has been running all the time, so a sequence that starts at progress p and needs w tokens of work ends at
progress p + w however often n changes: one heap and one timer an engine, O(log n) a sequence.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhf_cluster.protocols import RolloutRequest
from rlhf_cluster.types import FinishReason, Rollout, VersionSpan

_ROUNDING = 1e-9


@dataclass(slots=True, eq=False)
class Run:
    """One group on an engine. A token costs ``slowness`` tokens of progress, the prompt ``prefill``."""

    request: RolloutRequest
    lengths: list[int]
    started: float
    """Engine progress at the start."""
    prefill: float
    slowness: float
    left: int
    done: asyncio.Future[None]

    def sampled(self, length: int, progress: float) -> int:
        """Tokens of an answer of ``length`` tokens that were sampled when the engine's progress was ``progress``."""
        tokens = (progress - self.started - self.prefill) / self.slowness + _ROUNDING
        return max(0, min(length, int(tokens)))


class Engine:
    """``speed(n)`` is the tokens a second of one of n running sequences; ``version`` the weights it starts with."""

    def __init__(self, loop: asyncio.AbstractEventLoop, speed: Callable[[int], float], version: int = 0) -> None:
        self._loop = loop
        self._speed = speed
        self._progress = 0.0
        self._at = loop.time()
        self._ends: list[tuple[float, int, Run]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._updates: list[tuple[float, int]] = [(0.0, version)]  # (progress when it was applied, version)
        self.busy_s = 0.0
        """Seconds with a sequence running."""
        self.paused_s = 0.0
        """Seconds in which sequences stood still for an update of the weights."""

    @property
    def version(self) -> int:
        """The weights it holds."""
        return self._updates[-1][1]

    @property
    def running(self) -> int:
        """Sequences in progress."""
        return len(self._ends)

    def start(self, request: RolloutRequest, lengths: list[int], *, prefill: float = 0.0, slowness: float = 1.0) -> Run:
        """Begin a group: one sequence an entry of ``lengths``. Await ``run.done``."""
        self.settle()
        run = Run(request, lengths, self._progress, prefill, slowness, len(lengths), self._loop.create_future())
        for length in lengths:
            heapq.heappush(self._ends, (self._progress + prefill + length * slowness, next(self._order), run))
        self._set_timer()
        return run

    def abandon(self, run: Run) -> int:
        """Drop what is left of ``run``; returns the tokens it had sampled."""
        self.settle()
        if run.left:
            self._ends = [end for end in self._ends if end[2] is not run]
            heapq.heapify(self._ends)
            self._set_timer()
        return sum(run.sampled(length, self._progress) for length in run.lengths)

    def pause(self) -> None:
        """Sequences keep their place and stand still."""
        self.settle()
        self._paused = True
        self._set_timer()

    def resume(self, version: int | None = None) -> None:
        """Go on; with ``version``, under new weights."""
        self.settle()
        if version is not None:
            self._updates.append((self._progress, version))
        self._paused = False
        self._set_timer()

    def rollouts(self, run: Run, finish_reasons: list[FinishReason]) -> list[Rollout]:
        """The finished group as records; its token ids and log-probs are zeros."""
        request = run.request
        return [
            Rollout(
                rollout_id=f"{request.group_id}/{request.attempt}/{index}",
                attempt=request.attempt,
                group_id=request.group_id,
                prompt_token_ids=zero_ids(len(request.prompt.token_ids)),
                token_ids=zero_ids(length),
                behaviour_logprobs=zero_floats(length),
                version_spans=self._spans(run, length),
                finish_reason=reason,
                sampling=request.sampling[index],
            )
            for index, (length, reason) in enumerate(zip(run.lengths, finish_reasons, strict=True))
        ]

    def settle(self) -> None:
        """Bring progress and times up to now."""
        now = self._loop.time()
        elapsed, self._at = now - self._at, now
        if not self._ends:
            return
        self.busy_s += elapsed
        if self._paused:
            self.paused_s += elapsed
        else:
            self._progress += elapsed * self._speed(len(self._ends))

    def _spans(self, run: Run, length: int) -> tuple[VersionSpan, ...]:
        first = len(self._updates) - 1
        while self._updates[first][0] > run.started:
            first -= 1
        spans: list[VersionSpan] = []
        begun, version = 0, self._updates[first][1]
        for progress, newer in self._updates[first + 1 :]:
            sampled = run.sampled(length, progress)
            if sampled == length:
                break
            if sampled > begun:
                spans.append(VersionSpan(version, begun, sampled))
            begun, version = sampled, newer
        return (*spans, VersionSpan(version, begun, length))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends and not self._paused:
            left = max(0.0, self._ends[0][0] - self._progress)
            self._timer = self._loop.call_later(left / self._speed(len(self._ends)), self._end_sequences)

    def _end_sequences(self) -> None:
        """The timer of the earliest end: that sequence ends now, whatever rounding says, and those that tie with it."""
        self._timer = None
        self.settle()
        self._progress = max(self._progress, self._ends[0][0])
        while self._ends and self._ends[0][0] <= self._progress + _ROUNDING:
            _, _, run = heapq.heappop(self._ends)
            run.left -= 1
            if not run.left and not run.done.done():
                run.done.set_result(None)
        self._set_timer()


# Records need arrays of the right length; one buffer of zeros serves them all.
_IDS = np.zeros(1 << 14, dtype=np.int32)
_FLOATS = np.zeros(1 << 14, dtype=np.float32)


def zero_ids(length: int) -> np.ndarray:
    return _IDS[:length] if length <= len(_IDS) else np.zeros(length, dtype=np.int32)


def zero_floats(length: int) -> np.ndarray:
    return _FLOATS[:length] if length <= len(_FLOATS) else np.zeros(length, dtype=np.float32)
