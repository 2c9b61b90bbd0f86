"""The modelled actors of ``actors.py`` with the faults of one seed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from rlhf_cluster.protocols import (
    PublishReport,
    RolloutRequest,
    WeightSnapshot,
    WorkerFailed,
    WorkerSlot,
)
from rlhf_cluster.simulation.actors import (
    EngineSpeed,
    ModelledLearner,
    ModelledScorers,
    ModelledWorkers,
    ScorerStage,
    Slot,
)
from rlhf_cluster.simulation.engine import Engine, Run
from rlhf_cluster.simulation.faults import Faults, World
from rlhf_cluster.simulation.invariants import Invariants
from rlhf_cluster.types import Prompt, Rollout, ScoredGroup, ScoredRollout, TrainBatch, UpdateResult


class LearnerDied(RuntimeError):
    """A learner rank is gone."""


class FaultyWorkers(ModelledWorkers):
    """Workers that die, hang, answer late or short, and refuse updates; the dead are restarted and synced again.

    ``note`` is told every fault; ``invariants`` what is dispatched and published.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        world: World,
        faults: Faults,
        invariants: Invariants,
        note: Callable[[str], None],
    ) -> None:
        self._speed = EngineSpeed(world.speed_alone, max(world.speed_alone, world.speed_peak))
        super().__init__(
            loop,
            workers=world.workers,
            capacity=world.capacity,
            speed=self._speed,
            length=world.lengths.sample,
            transfer_s=world.transfer_s,
            pause_s=world.pause_s,
        )
        self._world = world
        self._faults = faults
        self._invariants = invariants
        self._note = note
        self._runs: dict[int, list[Run]] = {slot.index: [] for slot in self._slots}
        self._restarts: set[asyncio.Task[None]] = set()
        self._incarnation = [0] * world.workers
        self.latest = 0
        """The newest version that was handed to the workers."""

    def begin_at(self, version: int) -> None:
        """A resumed run: the engines hold the base weights, so they are closed until ``version`` is there."""
        if version:
            for slot in self._slots:
                slot.fenced = True

    # -- rollouts ----------------------------------------------------------------------------------------------------

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        slot = self._slots[worker.index]
        if not slot.routable:
            raise WorkerFailed(f"rollout worker {slot.index} is down or fenced")
        if slot.in_flight >= self._capacity:
            raise AssertionError(f"worker {slot.index} is full and got {request.group_id}/{request.attempt}")
        self._invariants.serving(slot.index, worker.version, slot.engine.version)
        key = request.group_id, request.attempt
        if self._faults.strikes("crash_before", *key):
            self._crash(slot)
            raise WorkerFailed(f"rollout worker {slot.index} died when {request.group_id} came")
        self._load_changed(slot, 1)
        try:
            answers = await asyncio.wait_for(self._generate(slot, request, key), self._world.rollout_timeout_s)
        except TimeoutError:
            self._crash(slot)
            raise TimeoutError(f"rollout worker {slot.index} did not finish {request.group_id} in time") from None
        finally:
            self._load_changed(slot, -1)
        if self._faults.strikes("late_reply", *key):
            await self._delay(self._world.group_deadline_s * (0.5 + self._faults.fraction("late", *key)))
        return answers[1:] if self._faults.strikes("short_group", *key) else answers

    async def _generate(self, slot: Slot, request: RolloutRequest, key: tuple[str, int]) -> list[Rollout]:
        engine = slot.engine
        if self._faults.strikes("lost_reply", *key):
            await self._loop.create_future()
        slowness = 3.0 + 37.0 * self._faults.fraction("slow", *key) if self._faults.strikes("straggler", *key) else 1.0
        run = self._start(slot, request, slowness=slowness)
        self._runs[slot.index].append(run)
        if self._faults.strikes("crash_during", *key):
            after = self._faults.fraction("when", *key) * 2.0
            self._loop.call_later(after, lambda: self._crash(slot, engine))
        try:
            await self._finish_on(engine, run)
        finally:
            self._runs[slot.index].remove(run)
        answers = engine.rollouts(run, self._reasons(run, key))
        if self._faults.strikes("crash_after", *key):
            self._crash(slot, engine)
            raise WorkerFailed(f"rollout worker {slot.index} died before it answered")
        return answers

    async def _finish_on(self, engine: Engine, run: Run) -> None:
        try:
            await run.done
        except BaseException:
            engine.abandon(run)
            raise

    def _reasons(self, run: Run, key: tuple[str, int]) -> list[Any]:
        reasons: list[Any] = ["stop"] * len(run.lengths)
        if self._faults.strikes("aborted_sample", *key):
            reasons[-1] = "abort"
        return reasons

    async def _delay(self, seconds: float) -> None:
        """Wait, and do not listen to the first cancellation: the reply is on its way already."""
        until = self._loop.time() + seconds
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(until - self._loop.time())

    # -- deaths and restarts -----------------------------------------------------------------------------------------

    def _crash(self, slot: Slot, engine: Engine | None = None) -> None:
        """The process is gone; with ``engine``, only if it is still that one."""
        if slot.down or (engine is not None and engine is not slot.engine):
            return
        self._note(f"worker {slot.index} dies")
        slot.down = True
        self._incarnation[slot.index] += 1
        self._fail_runs(slot, "died")
        restart = asyncio.ensure_future(self._restart(slot))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    def _fail_runs(self, slot: Slot, how: str) -> None:
        for run in self._runs[slot.index]:
            if not run.done.done():
                run.done.set_exception(WorkerFailed(f"rollout worker {slot.index} {how}"))

    async def _restart(self, slot: Slot) -> None:
        """A new process with the base weights, closed until it holds the newest version."""
        await asyncio.sleep(self._world.restart_s)
        slot.engine = Engine(self._loop, self._speed)
        slot.fenced, slot.down = True, False
        incarnation = self._incarnation[slot.index]
        while slot.engine.version != self.latest:
            version = self.latest
            await asyncio.sleep(self._world.transfer_s + self._world.pause_s)
            if self._incarnation[slot.index] != incarnation:
                return
            if version > slot.engine.version:
                slot.engine.resume(version)
        self._open(slot)

    def _open(self, slot: Slot) -> None:
        if not slot.fenced:
            return
        slot.fenced = False
        self._note(f"worker {slot.index} serves version {slot.engine.version}")
        self._load_changed(slot)

    async def close(self) -> None:
        """End what runs in the background."""
        for restart in list(self._restarts):
            restart.cancel()
        if self._restarts:
            await asyncio.wait(self._restarts)

    # -- updates -----------------------------------------------------------------------------------------------------

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        version, started = snapshot.version, self._loop.time()
        self._invariants.publishing(version)
        self.latest = version
        up = [slot for slot in self._slots if not slot.down]
        outcomes = await asyncio.gather(*(self._update(slot, version, alone=len(up) == 1) for slot in up))
        failed = {slot.index: cause for slot, cause in zip(up, outcomes, strict=True) if cause is not None}
        applied = tuple(slot.index for slot, cause in zip(up, outcomes, strict=True) if cause is None)
        while not applied and self._restarts:
            # Those that are being restarted come back with this version.
            await asyncio.wait(self._restarts, return_when=asyncio.FIRST_COMPLETED)
            applied = tuple(s.index for s in self._slots if s.routable and s.engine.version == version)
        return PublishReport(version, applied, failed, self._pause_s, self._loop.time() - started)

    async def _update(self, slot: Slot, version: int, *, alone: bool) -> str | None:
        """Bring one worker to ``version``; the cause when it failed."""
        engine, world = slot.engine, self._world
        key = version, slot.index
        # Somebody must take the version, or the run ends: worker 0 has no such faults, nor has the last one that lives.
        spared = alone or slot.index == 0
        try:
            await asyncio.sleep(world.transfer_s * (0.5 + self._faults.fraction("transfer", *key)))
            engine.pause()
            if not spared and self._faults.strikes("update_timeout", *key):
                await asyncio.sleep(world.publish_timeout_s)
                return self._refuse(slot, engine, "update timed out")
            await asyncio.sleep(world.pause_s * (0.5 + self._faults.fraction("pause", *key)))
            if not spared and self._faults.strikes("update_failed", *key):
                return self._refuse(slot, engine, "refused tensor 50 of 100")
        except asyncio.CancelledError:
            # Whoever broke the update off left the weights undefined.
            self._refuse(slot, engine, "update broken off")
            raise
        if slot.engine is not engine or slot.down:
            return f"rollout worker {slot.index} died in the update"
        engine.resume(max(version, engine.version))
        self._open(slot)
        return None

    def _refuse(self, slot: Slot, engine: Engine, cause: str) -> str:
        if slot.engine is engine and not slot.down:
            slot.fenced = True
            self._note(f"worker {slot.index} is fenced: {cause}")
            self._fail_runs(slot, f"is fenced: {cause}")
        return f"rollout worker {slot.index}: {cause}"


class FaultyScorers(ModelledScorers):
    """Scorers that fail, miss deadlines and lose replies. ``deliver(group, seconds)`` puts a group later, unasked."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        world: World,
        faults: Faults,
        deliver: Callable[[ScoredGroup, float], None],
    ) -> None:
        stage = ScorerStage(replicas=world.scorer_replicas, tokens_per_s=1e9, overhead_s=world.scorer_s)
        super().__init__(loop, [stage])
        self._world = world
        self._faults = faults
        self._deliver = deliver

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        key = rollouts[0].group_id, rollouts[0].attempt
        if self._faults.strikes("scorer_error", *key):
            await asyncio.sleep(self._world.scorer_s * self._faults.fraction("error", *key))
            raise WorkerFailed("reward scorer 0: process died")
        if self._faults.strikes("scorer_timeout", *key):
            await asyncio.sleep(self._world.scorer_timeout_s)
            raise TimeoutError("reward scorer 0 did not answer in time")
        members = await super().score(prompt, rollouts)
        later = self._world.group_deadline_s * 1.5 * self._faults.fraction("later", *key)
        if self._faults.strikes("late_score", *key):
            self._deliver(ScoredGroup(rollouts[0].group_id, tuple(members)), later)
            raise TimeoutError("reward scorer 0: the reply was lost")
        if self._faults.strikes("repeated_put", *key):
            self._deliver(ScoredGroup(rollouts[0].group_id, tuple(members)), later)
        if self._faults.strikes("unscorable", *key):
            members[0] = replace(members[0], score=math.nan, unscorable="too_long")
        return members


class FaultyLearner(ModelledLearner):
    """A learner that skips steps, dies, or comes back with an older version.

    ``trained`` lists the group id of every group it stepped on.
    """

    def __init__(self, world: World, faults: Faults, invariants: Invariants) -> None:
        super().__init__(tokens_per_s=1e9, fixed_s=world.learner_s, snapshot_s=world.snapshot_s)
        self._faults = faults
        self._invariants = invariants
        self._calls = 0
        self.trained: list[str] = []

    async def train(self, batch: TrainBatch) -> UpdateResult:
        self._invariants.training(batch)
        self._calls += 1
        key = self.version, self._calls
        if self._faults.strikes("learner_crash", *key):
            await asyncio.sleep(self._fixed_s * self._faults.fraction("when", *key))
            raise LearnerDied("learner rank 0 died in a step")
        if self._faults.strikes("skipped_step", *key):
            await asyncio.sleep(self._fixed_s)
            return UpdateResult(self.version, False, {})
        if self.version and self._faults.strikes("version_goes_back", *key):
            self.version -= 1
            return UpdateResult(self.version, True, {})
        result = await super().train(batch)
        self.trained.extend(group.group_id for group in batch.groups)
        return result

    async def snapshot(self) -> WeightSnapshot:
        if self._faults.strikes("learner_crash", "snapshot", self.version, self._calls):
            raise LearnerDied("learner rank 0 died in a snapshot")
        return await super().snapshot()
