"""Modelled workers, scorers and learner behind ``protocols``: they take the time that their speeds say, and never fail.

Everything they do depends on the sampling seeds and on virtual time only.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhf_cluster.protocols import (
    PublishReport,
    RolloutRequest,
    WeightSnapshot,
    WorkerFailed,
    WorkerSlot,
    WorkerStatus,
)
from rlhf_cluster.simulation.engine import Engine, Run, zero_floats
from rlhf_cluster.types import FinishReason, Floats, Prompt, Rollout, ScoredRollout, TrainBatch, UpdateResult

Length = Callable[[int, int], int]
"""(sampling seed, limit) -> tokens."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Tokens a second of an engine: ``alone`` with one sequence, towards ``peak`` over all with many.

    n sequences get peak * n / (n + peak / alone - 1) together, the usual curve of batched decoding.
    """

    alone: float
    peak: float

    def __call__(self, sequences: int) -> float:
        return self.peak / (sequences + self.peak / self.alone - 1)


@dataclass(slots=True, eq=False)
class Slot:
    """A worker as the router sees it."""

    index: int
    engine: Engine
    in_flight: int = 0
    fenced: bool = False
    down: bool = False
    stamp: int = 0
    """Changes with every change of its load; older entries of the router's heap are void."""

    @property
    def routable(self) -> bool:
        return not (self.down or self.fenced)


class ModelledWorkers:
    """``Generator`` and ``WeightSink``: ``workers`` engines, each with room for ``capacity`` groups.

    Args:
        speed: see ``EngineSpeed``.
        length: tokens of the answer with a given sampling seed.
        prefill_tokens_per_token: prompt tokens that cost an engine as much as one generated token.
        transfer_s: seconds until new weights lie at every worker, which generates meanwhile.
        pause_s: seconds a worker stands still to load them.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        workers: int,
        capacity: int,
        speed: EngineSpeed,
        length: Length,
        prefill_tokens_per_token: float = 20.0,
        transfer_s: float = 0.0,
        pause_s: float = 0.0,
    ) -> None:
        self._loop = loop
        self._capacity = capacity
        self._length = length
        self._prefill = prefill_tokens_per_token
        self._transfer_s = transfer_s
        self._pause_s = pause_s
        self._slots = [Slot(index, Engine(loop, speed)) for index in range(workers)]
        self._stamps = 0
        self._by_load: list[tuple[int, int, int]] = []  # (groups in flight, index, stamp): a heap
        for slot in self._slots:
            self._load_changed(slot)
        self.generated_tokens = 0
        """Every token sampled, those of abandoned groups too."""
        self.wasted_tokens = 0
        """Tokens of groups that were abandoned: evicted past their deadline, or failed."""
        self.offered_lengths = [0, 0]
        """Tokens and number of all answers that were asked for."""

    def choose(self) -> WorkerSlot | None:
        while self._by_load:
            in_flight, index, stamp = self._by_load[0]
            slot = self._slots[index]
            if stamp == slot.stamp and slot.routable:
                return WorkerSlot(index, slot.engine.version) if in_flight < self._capacity else None
            heapq.heappop(self._by_load)
        return None

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(slot.index, slot.routable, slot.engine.version, slot.in_flight) for slot in self._slots]

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        slot = self._slots[worker.index]
        if not slot.routable:
            raise WorkerFailed(f"rollout worker {slot.index} is down or fenced")
        self._load_changed(slot, 1)
        try:
            run = self._start(slot, request)
            await self._finish(slot, run)
            return self._answers(slot, run)
        finally:
            self._load_changed(slot, -1)

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        """All workers are alike, so their updates start and end together."""
        started = self._loop.time()
        await asyncio.sleep(self._transfer_s)
        for slot in self._slots:
            slot.engine.pause()
        await asyncio.sleep(self._pause_s)
        for slot in self._slots:
            slot.engine.resume(snapshot.version)
        applied = tuple(range(len(self._slots)))
        return PublishReport(snapshot.version, applied, {}, self._pause_s, self._loop.time() - started)

    def busy_s(self) -> tuple[float, float]:
        """Worker seconds spent with work, and of those seconds standing still for an update; summed over workers."""
        for slot in self._slots:
            slot.engine.settle()
        return sum(slot.engine.busy_s for slot in self._slots), sum(slot.engine.paused_s for slot in self._slots)

    def _start(self, slot: Slot, request: RolloutRequest, *, slowness: float = 1.0) -> Run:
        lengths = [self._length(sampling.seed, sampling.max_new_tokens) for sampling in request.sampling]
        self.offered_lengths[0] += sum(lengths)
        self.offered_lengths[1] += len(lengths)
        prefill = len(request.prompt.token_ids) / self._prefill
        return slot.engine.start(request, lengths, prefill=prefill, slowness=slowness)

    async def _finish(self, slot: Slot, run: Run) -> None:
        """Wait for all sequences; a group that is cancelled leaves its engine at once."""
        try:
            await run.done
        except BaseException:
            sampled = slot.engine.abandon(run)
            self.generated_tokens += sampled
            self.wasted_tokens += sampled
            raise
        self.generated_tokens += sum(run.lengths)

    def _answers(self, slot: Slot, run: Run) -> list[Rollout]:
        limits = [sampling.max_new_tokens for sampling in run.request.sampling]
        reasons: list[FinishReason] = [
            "length" if length >= limit else "stop" for length, limit in zip(run.lengths, limits, strict=True)
        ]
        return slot.engine.rollouts(run, reasons)

    def _load_changed(self, slot: Slot, by: int = 0) -> None:
        slot.in_flight += by
        self._stamps += 1
        slot.stamp = self._stamps
        heapq.heappush(self._by_load, (slot.in_flight, slot.index, slot.stamp))


class ScorerStage:
    """Replicas of one scorer model; each takes one group after the other, in order of arrival."""

    def __init__(self, *, replicas: int, tokens_per_s: float, overhead_s: float = 0.0) -> None:
        self._free_at = [0.0] * replicas
        self._tokens_per_s = tokens_per_s
        self._overhead_s = overhead_s
        self.replicas = replicas
        self.busy_s = 0.0
        """Replica seconds spent scoring, summed over replicas."""

    def finishes_at(self, now: float, tokens: int) -> float:
        """When a group of ``tokens`` (prompts included) that arrives now is scored; takes the place."""
        seconds = self._overhead_s + tokens / self._tokens_per_s
        finish = max(now, self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, finish)
        self.busy_s += seconds
        return finish


class ModelledScorers:
    """``Scorer``: every stage (reward, reference) scores a group side by side; every answer scores 0.0."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stages: Sequence[ScorerStage]) -> None:
        self._loop = loop
        self._stages = tuple(stages)

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        tokens = sum(rollout.n_tokens for rollout in rollouts) + len(rollouts) * len(prompt.token_ids)
        now = self._loop.time()
        await asyncio.sleep(max(stage.finishes_at(now, tokens) for stage in self._stages) - now)
        return [ScoredRollout(rollout, 0.0, {}, zero_floats(rollout.n_tokens)) for rollout in rollouts]


class ModelledLearner:
    """``Learner``: ``fixed_s`` and ``tokens_per_s`` make a step, ``snapshot_s`` a copy of the weights."""

    def __init__(self, *, tokens_per_s: float, fixed_s: float = 0.0, snapshot_s: float = 0.0, version: int = 0) -> None:
        self._tokens_per_s = tokens_per_s
        self._fixed_s = fixed_s
        self._snapshot_s = snapshot_s
        self.version = version
        self.busy_s = 0.0
        """Seconds in steps and snapshots."""
        self.trained_rollouts = 0
        self.trained_tokens = 0
        """Generated tokens that were trained; prompts are not counted."""

    async def train(self, batch: TrainBatch) -> UpdateResult:
        rollouts = [member.rollout for member in batch.rollouts]
        answers = sum(rollout.n_tokens for rollout in rollouts)
        prompts = sum(len(rollout.prompt_token_ids) for rollout in rollouts)
        await self._work(self._fixed_s + (answers + prompts) / self._tokens_per_s)
        self.trained_rollouts += len(rollouts)
        self.trained_tokens += answers
        self.version += 1
        return UpdateResult(self.version, True, {})

    async def snapshot(self) -> WeightSnapshot:
        await self._work(self._snapshot_s)
        return WeightSnapshot(self.version, Path("modelled"), {})

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[Floats]:
        return [np.array(rollout.behaviour_logprobs) for rollout in rollouts]

    async def save(self, folder: Path) -> None:
        raise NotImplementedError("a modelled learner has no tensors to save")

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.busy_s += seconds
