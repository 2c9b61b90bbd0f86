"""One seeded run of the production controller and queue through faults, crashes and resumes.

A run draws a world and its faults from the seed, and lives through as many *lives* as they take: a life is one
controller, and ends with the run, a stop, or a crash. What a driver would find on disk after a crash is all that the
next life gets. Everything is checked by ``invariants`` while it runs, and at the end:

    every prompt of the first issues was trained exactly once an epoch, or filtered; nothing is outstanding
    exactly the configured steps were taken, and the last version was published
    no task of the control loop is left

The same seed gives the same run to the bit: ``SimulationReport.digest`` covers every event and its time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rlhf_cluster import run_state
from rlhf_cluster.controller import Controller, ControllerSettings, RunFailed
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.simulation.faults import Faults, World, draw_world
from rlhf_cluster.simulation.faulty_actors import FaultyLearner, FaultyScorers, FaultyWorkers, LearnerDied
from rlhf_cluster.simulation.invariants import Invariants, InvariantViolated
from rlhf_cluster.simulation.quiet_logs import quiet_controller
from rlhf_cluster.simulation.quiet_recorder import QuietRecorder
from rlhf_cluster.simulation.report import SimulationReport
from rlhf_cluster.simulation.virtual_time import Deadlock, VirtualClock, VirtualTimeLoop, run_virtual
from rlhf_cluster.types import Prompt, ScoredGroup

# Without a closed step for so many group deadlines, a run with a bounded number of faults is stuck.
_DEADLINES_WITHOUT_PROGRESS = 40
_MOST_LIVES = 100
_LOOPS = ("feed", "poll", "rollout", "score", "train", "publish")


class _Crash(Exception):
    """The driver is gone."""


@dataclass(slots=True)
class _Saved:
    """What a checkpoint holds: the run state as JSON text, the learner's version, and what counted as done then."""

    state: str
    version: int
    step: int
    trained: int
    filtered: int


class FaultRun:
    """One run; ``run()`` it once. See ``search.run_seed`` for the arguments."""

    def __init__(
        self,
        seed: int,
        *,
        world: World | None = None,
        faults: Faults | None = None,
        without: Collection[str] = (),
        queue_class: type[ExperienceQueue] = ExperienceQueue,
        crash_at_event: int | None = None,
    ) -> None:
        self.seed = seed
        self.world = world or draw_world(seed)
        self.trace: list[str] = []
        self.faults = faults or Faults(seed, without=without)
        self.faults.note = self._note
        self._without = tuple(sorted(without))
        self._queue_class = queue_class
        self._crash_at_event = crash_at_event
        self._loop = VirtualTimeLoop()
        world = self.world
        self.invariants = Invariants(
            groups_per_batch=world.groups_per_batch,
            max_staleness=world.max_staleness,
            samples_per_prompt=world.samples_per_prompt,
            note=self._note_event,
        )
        self._prompts = [Prompt(f"p{index}", (1, 2, index), "") for index in range(world.prompts)]
        self.learner = FaultyLearner(world, self.faults, self.invariants)
        self._saved: _Saved | None = None
        self.lives = 0
        self._progress_at = 0.0
        self._broken: asyncio.Future[None] | None = None
        self.queue: ExperienceQueue | None = None
        self.workers: FaultyWorkers | None = None
        self.controller: Controller | None = None

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> SimulationReport:
        violation: BaseException | None = None
        with quiet_controller():
            try:
                run_virtual(self._live(), self._loop)
            except (InvariantViolated, Deadlock) as error:
                violation = error
            except Exception as error:
                violation = InvariantViolated("error", f"{type(error).__name__}: {error}")
        rule = getattr(violation, "rule", "deadlock") if violation else None
        if violation is not None:
            self._note(f"VIOLATION {violation}")
        return SimulationReport(
            seed=self.seed,
            violation=str(violation) if violation else None,
            rule=rule,
            steps=self.controller.step if self.controller else 0,
            lives=self.lives,
            seconds=self._loop.time(),
            events=self.invariants.events,
            faults=dict(sorted(self.faults.count.items())),
            lag_tokens=dict(sorted(self.invariants.lags.items())),
            digest=hashlib.sha256("\n".join(self.trace).encode()).hexdigest(),
            world=self.world,
            without=self._without,
            trace=tuple(self.trace),
        )

    async def _live(self) -> None:
        clock = VirtualClock(self._loop)
        ended: str | None = "crash"
        while ended is not None:
            self.lives += 1
            self._require("deadlock", self.lives <= _MOST_LIVES, f"{self.lives} lives and no end")
            self._note(f"life {self.lives} begins")
            if ended == "learner":
                await self._fail_over(clock)
            else:
                await self._start(clock)
            ended = await self._run_life(clock)
        self._check_end()
        assert self.workers is not None
        await self.workers.close()

    async def _start(self, clock: VirtualClock) -> None:
        """A new driver, with new workers: from the checkpoint when there is one."""
        world = self.world
        if self.workers is not None:
            await self.workers.close()
        cursor = PromptCursor(self._prompts, seed=self.seed)
        self.queue = self._queue_class(
            groups_per_batch=world.groups_per_batch,
            max_staleness=world.max_staleness,
            clock=clock,
            group_deadline_s=world.group_deadline_s,
        )
        self.workers = FaultyWorkers(self._loop, world, self.faults, self.invariants, self._note)
        self.cursor, step = cursor, 0
        saved = self._saved
        self._forget_what_came_after(saved)
        self.learner.version = saved.version if saved else 0
        self.workers.begin_at(self.learner.version)
        state = json.loads(saved.state) if saved else None
        self.invariants.restored(state["queue"] if state else self.queue.state_dict())
        self.invariants.watch(self.queue)
        if state is not None:
            step = run_state.restore(state, cursor=cursor, queue=self.queue)
            await self._publish_again()
        self.controller = self._controller(clock, step)

    async def _fail_over(self, clock: VirtualClock) -> None:
        """The learner is restored from the checkpoint; workers and queue live on, and so do the version numbers."""
        assert self.queue is not None
        saved = self._saved
        self._forget_what_came_after(saved)
        self.learner.version = max(self.queue.learner_version, self.learner.version) + 1
        self.queue.fail_over(self.learner.version)
        self.cursor = PromptCursor(self._prompts, seed=self.seed)
        if saved is not None:
            self.cursor.load_state_dict(json.loads(saved.state)["cursor"])
        await self._publish_again()
        self.controller = self._controller(clock, saved.step if saved else 0)

    async def _publish_again(self) -> None:
        """As a resume does: the engines hold the base weights, so the version goes out before anything is asked."""
        assert self.workers is not None
        if self.learner.version:
            await self.workers.publish(await super(FaultyLearner, self.learner).snapshot())

    def _forget_what_came_after(self, saved: _Saved | None) -> None:
        del self.learner.trained[saved.trained if saved else 0 :]
        del self.invariants.filtered[saved.filtered if saved else 0 :]

    def _controller(self, clock: VirtualClock, step: int) -> Controller:
        world = self.world
        assert self.queue is not None and self.workers is not None
        self._recorder = QuietRecorder(clock)
        return Controller(
            ControllerSettings(
                seed=self.seed,
                steps=world.steps,
                groups_per_batch=world.groups_per_batch,
                samples_per_prompt=world.samples_per_prompt,
                max_new_tokens=world.max_new_tokens,
                temperature=1.0,
                max_attempts=1000,
                max_unscorable_fraction=1.0,
            ),
            cursor=self.cursor,
            queue=self.queue,
            generator=self.workers,
            scorer=FaultyScorers(self._loop, world, self.faults, self._deliverer(self.queue)),
            learner=self.learner,
            sink=self.workers,
            clock=clock,
            recorder=self._recorder,
            step=step,
            after_step=self._after_step,
        )

    async def _run_life(self, clock: VirtualClock) -> str | None:
        """How the life ended: None when the run is complete, else what makes the next one necessary."""
        controller = self.controller
        assert controller is not None
        self._broken = self._loop.create_future()
        self._progress_at = self._loop.time()
        running = asyncio.ensure_future(controller.run())
        around = [asyncio.ensure_future(self._weather(clock, controller)), asyncio.ensure_future(self._watch())]
        try:
            await asyncio.wait([running, self._broken, *around], return_when=asyncio.FIRST_COMPLETED)
            for ended in (self._broken, *around, running):
                if ended.done():
                    ended.result()
        except _Crash:
            self._note("the driver is gone")
            return "crash"
        except LearnerDied as error:
            self._note(f"{error}")
            return "learner"
        except ValueError as error:
            if "cannot go back" not in str(error):
                raise
            self._note(f"refused: {error}")
            return "crash"
        except RunFailed as error:
            if "no rollout worker took version" not in str(error):
                raise
            self._note(f"ended: {error}")
            return "crash"
        finally:
            await _cancel_all([running, self._broken, *around])
        if controller.step == self.world.steps:
            return None
        self._note(f"stopped after step {controller.step}")
        self._save(controller.step)
        return "stop"

    async def _weather(self, clock: VirtualClock, controller: Controller) -> None:
        """What happens to a run from outside."""
        for tick in range(10**9):
            key = self.lives, tick
            await asyncio.sleep(0.1 + 3.0 * self.faults.fraction("tick", *key))
            if self.faults.strikes("clock_jump", *key):
                clock.jump(3.0 * self.world.group_deadline_s * self.faults.fraction("jump", *key))
            if self.faults.strikes("stop", *key):
                controller.stop()
            if self.faults.strikes("driver_crash", *key):
                raise _Crash

    async def _watch(self) -> None:
        """Time that passes without a learner step is bounded."""
        longest = _DEADLINES_WITHOUT_PROGRESS * self.world.group_deadline_s
        while True:
            await asyncio.sleep(self.world.group_deadline_s)
            idle = self._loop.time() - self._progress_at
            if idle > longest:
                raise InvariantViolated("deadlock", f"no learner step for {idle:.0f} virtual seconds")

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def _after_step(self, step: int) -> None:
        self._progress_at = self._loop.time()
        if step % self.world.checkpoint_every == 0 and step < self.world.steps:
            saved = self._snapshot(step)
            await asyncio.sleep(self.world.checkpoint_s)
            self._saved = saved
            self._note(f"checkpoint of step {step}")

    def _save(self, step: int) -> None:
        self._saved = self._snapshot(step)

    def _snapshot(self, step: int) -> _Saved:
        assert self.queue is not None
        state = run_state.snapshot(step, cursor=self.cursor, queue=self.queue, recorder=self._recorder)
        trained, filtered = len(self.learner.trained), len(self.invariants.filtered)
        return _Saved(json.dumps(state), self.learner.version, step, trained, filtered)

    # -- late deliveries ---------------------------------------------------------------------------------------------

    def _deliverer(self, queue: ExperienceQueue) -> Any:
        def deliver(group: ScoredGroup, seconds: float) -> None:
            self._loop.call_later(seconds, put, group)

        def put(group: ScoredGroup) -> None:
            if queue is not self.queue or self._broken is None or self._broken.done():
                return
            self._note(f"late delivery of {group.group_id}/{group.attempt}")
            try:
                queue.put(group)
            except Exception as error:
                self._broken.set_exception(error)

        return deliver

    # -- the end -----------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        queue, world = self.queue, self.world
        assert queue is not None and self.workers is not None and self.controller is not None
        left = sorted(task.get_name() for task in asyncio.all_tasks() if task.get_name() in _LOOPS)
        self._require("end", not left, f"tasks {left} are still running")
        self._require("end", self.controller.step == world.steps, f"{self.controller.step} of {world.steps} steps")
        self._require("end", queue.outstanding == 0, f"{queue.outstanding} groups are left")
        self._require("end", self.workers.latest == self.learner.version, f"published {self.workers.latest} last")
        done = Counter([*self.learner.trained, *self.invariants.filtered])
        twice = [group for group, times in done.items() if times > 1]
        self._require("exactly once", not twice, f"{twice} were done more than once")
        trained = len(self.learner.trained)
        self._require("end", trained == world.steps * world.groups_per_batch, f"{trained} groups were trained")
        plain = PromptCursor(self._prompts, seed=self.seed)
        issued = {issue.group_id for _ in done if (issue := plain.next()) is not None}
        self._require("exactly once", set(done) == issued, f"missing {issued - set(done)}, beyond {set(done) - issued}")

    @staticmethod
    def _require(rule: str, holds: bool, seen: str) -> None:
        if not holds:
            raise InvariantViolated(rule, seen)

    # -- the trace ---------------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.trace.append(f"{self._loop.time():.9f} {text}")

    def _note_event(self, text: str) -> None:
        self._note(text)
        if self._crash_at_event is not None and self.invariants.events >= self._crash_at_event:
            self._crash_at_event = None
            if self._broken is not None and not self._broken.done():
                self._broken.set_exception(_Crash())


async def _cancel_all(futures: list[asyncio.Future[Any]]) -> None:
    for future in futures:
        future.cancel()
    await asyncio.wait(futures)
    for future in futures:
        if not future.cancelled():
            future.exception()
