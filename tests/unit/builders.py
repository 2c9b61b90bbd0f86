"""Small builders of real records, and a clock that moves only when a test says so."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from rlhf_cluster.experience_queue import Attempt, ExperienceQueue, PutResult
from rlhf_cluster.types import FinishReason, Prompt, Rollout, Sampling, ScoredGroup, ScoredRollout, VersionSpan


def async_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class ManualClock:
    """Seconds that pass only in ``advance``; sleepers wake in the order of their deadlines."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper = (self._now + seconds, asyncio.get_running_loop().create_future())
        self._sleepers.append(sleeper)
        try:
            await sleeper[1]
        finally:
            self._sleepers.remove(sleeper)

    async def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass; everything that becomes runnable on the way runs."""
        end = self._now + seconds
        await self.run_ready()
        while due := [sleeper for sleeper in self._sleepers if sleeper[0] <= end and not sleeper[1].done()]:
            self._now, future = min(due, key=lambda sleeper: sleeper[0])
            future.set_result(None)
            await self.run_ready()
        self._now = end
        await self.run_ready()

    @property
    def sleeping(self) -> int:
        """Tasks asleep on this clock."""
        return len(self._sleepers)

    @staticmethod
    async def run_ready() -> None:
        """Run every task that can go on without time passing (a chain of ten hand-overs is more than any test has)."""
        for _ in range(10):
            await asyncio.sleep(0)


def make_prompt(prompt_id: str = "p0", n_tokens: int = 3) -> Prompt:
    return Prompt(prompt_id, tuple(range(10, 10 + n_tokens)), f"text of {prompt_id}")


def spans(versions: Sequence[int], start_version: int = 0) -> tuple[VersionSpan, ...]:
    """The version spans of tokens sampled under ``versions``, one entry a token."""
    if not versions:
        return (VersionSpan(start_version, 0, 0),)
    edges = [0, *(t for t in range(1, len(versions)) if versions[t] != versions[t - 1]), len(versions)]
    return tuple(VersionSpan(versions[a], a, b) for a, b in itertools.pairwise(edges))


def make_rollout(
    group_id: str = "p0",
    attempt: int = 0,
    *,
    versions: Sequence[int] = (0, 0),
    start_version: int = 0,
    sample: int = 0,
    finish_reason: FinishReason = "stop",
    prompt_tokens: int = 3,
) -> Rollout:
    """A rollout with one token per entry of ``versions``; its token ids and log-probs differ between samples."""
    n_tokens = len(versions)
    return Rollout(
        rollout_id=f"{group_id}/{attempt}/{sample}",
        attempt=attempt,
        group_id=group_id,
        prompt_token_ids=np.arange(10, 10 + prompt_tokens, dtype=np.int32),
        token_ids=np.arange(n_tokens, dtype=np.int32) + 100 * (sample + 1),
        behaviour_logprobs=-np.linspace(0.1, 0.9, n_tokens, dtype=np.float32) - np.float32(sample),
        version_spans=spans(versions, start_version),
        finish_reason=finish_reason,
        sampling=Sampling(temperature=1.0, max_new_tokens=64, seed=sample),
    )


def make_scored(rollout: Rollout, score: float = 0.0) -> ScoredRollout:
    return ScoredRollout(rollout, score, {"model": score}, rollout.behaviour_logprobs - np.float32(0.05))


def make_group(attempt: Attempt, *, versions: Sequence[int] | None = None, samples: int = 2) -> ScoredGroup:
    """The finished group of ``attempt``: ``samples`` rollouts with one token per entry of ``versions`` each.

    By default two tokens a rollout, both sampled under the attempt's start version.
    """
    token_versions = (attempt.start_version, attempt.start_version) if versions is None else versions
    rollouts = [
        make_rollout(
            attempt.group_id,
            attempt.attempt,
            versions=token_versions,
            start_version=attempt.start_version,
            sample=sample,
        )
        for sample in range(samples)
    ]
    return ScoredGroup(attempt.group_id, tuple(make_scored(rollout, float(i)) for i, rollout in enumerate(rollouts)))


def make_queue(
    *,
    groups_per_batch: int = 2,
    max_staleness: int = 1,
    clock: ManualClock | None = None,
    group_deadline_s: float = 10.0,
) -> ExperienceQueue:
    return ExperienceQueue(
        groups_per_batch=groups_per_batch,
        max_staleness=max_staleness,
        clock=clock or ManualClock(),
        group_deadline_s=group_deadline_s,
    )


def admit_many(queue: ExperienceQueue, names: str, start_version: int) -> list[Attempt]:
    """One admission per letter of ``names``; the letter is the group id."""
    return [queue.admit(make_prompt(name), start_version) for name in names]


def put_all(queue: ExperienceQueue, attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        assert queue.put(make_group(attempt)) is PutResult.QUEUED


def ids(groups: Sequence[ScoredGroup]) -> str:
    """The one-letter group ids of a batch as one word."""
    return "".join(group.group_id for group in groups)
