"""Rollout workers as Ray actors behind ``protocols.Generator`` and ``WeightSink``: routing, fences, restarts, scaling.

    choose -> generate --> slot 0: worker, incarnation 1     publish --> every worker that is up
                       \\-> slot 1: worker, incarnation 3 <-- restarted: engine, then newest version, then routable

A worker takes requests while it is alive, not fenced and not being scaled away. One that died (process gone, fatal
engine error, heartbeats missed, a deadline missed) fails its calls at once and is restarted by its supervisor; one
whose update was refused is fenced and opens again with the next update that succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import ray

from actors import placement
from actors.engine_weights import UpdateTiming
from actors.rollout_member import RolloutMember, SnapshotGone
from actors.rollout_worker import INITIAL_VERSION, RolloutWorker
from actors.supervisor import NO_RAY_RESTARTS, WorkerDied, all_or_cancel, dump_all
from rlhf_cluster.causes import first_line
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.config import Config
from rlhf_cluster.protocols import (
    PublishReport,
    RolloutRequest,
    WeightSnapshot,
    WorkerFailed,
    WorkerSlot,
    WorkerStatus,
)
from rlhf_cluster.seeds import derive_seed
from rlhf_cluster.supervision import Changes, Event, SupervisedSlot, SupervisionSettings, first_cause
from rlhf_cluster.types import Rollout
from rlhf_cluster.watchdog import Wait

log = logging.getLogger(__name__)

ROLE = "rollout_worker"
_CLOSE_TIMEOUT_S = 15.0


class NoWorkersLeft(RuntimeError):
    """Every rollout worker is down and none comes back; the message names the first cause."""


class RolloutPool:
    """``rollout.workers`` engines. ``await start(...)`` first; safe for many concurrent callers on one event loop.

    Args:
        supervision: heartbeats, back-off and restart budget of each worker.
        on_event: told of every start, death, restart, fence and missed heartbeat.
        worker_class: the class that becomes the actor; tests put an engine without weights here.
    """

    def __init__(
        self,
        config: Config,
        *,
        supervision: SupervisionSettings | None = None,
        on_event: Callable[[Event], None] | None = None,
        worker_class: type = RolloutWorker,
    ) -> None:
        self._config = config
        self._publishes_by_broadcast = config.publish.backend == "nccl"
        self._settings = supervision or SupervisionSettings()
        self._on_event = on_event
        self._worker_class = worker_class
        engine = config.rollout.engine
        self._capacity = max(1, engine.max_num_seqs // config.rollout.samples_per_prompt)
        self._clock = SystemClock()
        self._slots: dict[int, SupervisedSlot[RolloutMember]] = {}
        self._incarnations: dict[int, int] = {}
        """How many there were in slots that were given up."""
        self._draining: set[int] = set()
        self._newest: WeightSnapshot | None = None
        self._changes = Changes()
        self._scaling = asyncio.Lock()
        self._start_timeout_s = config.cluster.start_timeout_s
        self._answered = False

    async def start(self, timeout_s: float) -> None:
        """Create all workers side by side and wait until each serves the initial policy as version 0.

        Raises:
            WorkerFailed: a worker that could not start, with its reason. TimeoutError: names the worker.
        """
        self._start_timeout_s = timeout_s
        self._slots = {index: self._new_slot(index) for index in range(self._config.rollout.workers)}
        await all_or_cancel(*(slot.start() for slot in self._slots.values()))
        for slot in self._slots.values():
            slot.supervise()

    def _new_slot(self, index: int) -> SupervisedSlot[RolloutMember]:
        config = self._config
        actor = ray.remote(self._worker_class).options(**placement.rollout_options(config), **NO_RAY_RESTARTS)

        def create(incarnation: int) -> RolloutMember:
            handle = actor.remote(
                index=index,
                model=config.model.policy,
                dtype=config.model.dtype,
                engine=config.rollout.engine,
                max_model_len=config.max_model_len,
                seed=derive_seed(config.run.seed, "engine", index),
                device=config.cluster.device,
                publish=config.publish,
                trust_remote_code=config.model.trust_remote_code,
            )
            return RolloutMember(f"rollout worker {index}", incarnation, handle, self._bring_up)

        slot = SupervisedSlot(
            ROLE,
            index,
            create,
            settings=self._settings,
            clock=self._clock,
            # Not from the seed of the run: when a worker comes back is no part of what is reproduced.
            rng=random.Random(),
            on_event=self._happened,
        )
        slot.incarnation = self._incarnations.get(index, 0)
        return slot

    async def _bring_up(self, worker: RolloutMember) -> None:
        """Start the engine, then apply the newest version; until then the worker is fenced, so nothing is routed to it.

        A version that is published meanwhile is applied too: when this returns, none is newer. Where weights are
        broadcast the next broadcast brings them (``BroadcastSink``).
        """
        started = time.monotonic()
        sampling = await worker.call("start", timeout_s=self._start_timeout_s, what="start")
        if self._publishes_by_broadcast and self._newest is not None:
            log.info("%s stays fenced until it is in a transfer group and has received weights", worker.name)
            return
        while (newest := self._newest) is not None and newest.version != worker.applied:
            try:
                await worker.update(newest, self._config.publish.timeout_s)
            except WorkerFailed as error:
                if isinstance(error, SnapshotGone) and newest is self._newest:
                    log.warning("%s stays fenced until the next publication: %s", worker.name, error)
                    return
                # A version that was overtaken may have been removed under the reader.
                if newest is self._newest or worker.life.cause is not None:
                    raise
        worker.fenced = False
        log.info(
            "%s serves version %d after %.1f s; every request samples with %s",
            worker.name,
            worker.version,
            time.monotonic() - started,
            sampling,
        )

    def _happened(self, event: Event) -> None:
        self._changes.tell()
        if self._on_event is not None:
            self._on_event(event)

    def choose(self) -> WorkerSlot | None:
        """See ``protocols.Generator``. A worker holds at most ``max_num_seqs`` samples, at least one group.

        Raises:
            NoWorkersLeft: every worker is down, and none comes back.
        """
        self._check_any_left()
        free = [
            (slot.index, worker)
            for slot in self._slots.values()
            if (worker := self._open(slot)) is not None and worker.in_flight < self._capacity
        ]
        if not free:
            return None
        index, worker = min(free, key=lambda item: item[1].in_flight)
        return WorkerSlot(index, worker.version)

    def _open(self, slot: SupervisedSlot[RolloutMember] | None) -> RolloutMember | None:
        """The worker in ``slot`` when it takes requests."""
        worker = slot.serving if slot is not None and slot.index not in self._draining else None
        return worker if worker is not None and not worker.fenced else None

    def status(self) -> list[WorkerStatus]:
        """See ``protocols.Generator``. A worker that is not up serves no version; its slot shows the newest it had."""
        statuses = []
        for slot in self._slots.values():
            worker = slot.latest
            version, in_flight = (worker.version, worker.in_flight) if worker is not None else (INITIAL_VERSION, 0)
            statuses.append(WorkerStatus(slot.index, self._open(slot) is not None, version, in_flight))
        return statuses

    def waits(self) -> list[Wait]:
        """Who waits for which worker, those that are starting too, for the watchdog."""
        return [wait for worker in self._alive() for wait in worker.waits()]

    async def dump_stacks(self) -> dict[str, str]:
        """Stacks of every worker that is alive, by name."""
        return await dump_all(self._alive())

    def _alive(self) -> list[RolloutMember]:
        latest = (slot.latest for slot in self._slots.values())
        return [worker for worker in latest if worker is not None and worker.life.cause is None]

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        """See ``protocols.Generator``. The deadline is ``rollout.timeout_s``; a worker that misses it is ended."""
        chosen = self._open(self._slots.get(worker.index))
        if chosen is None:
            raise WorkerFailed(f"rollout worker {worker.index} is down or fenced")
        if chosen.version < worker.version:
            # The group was admitted for the version of an earlier incarnation.
            raise WorkerFailed(f"{chosen.name} was restarted and serves version {chosen.version} < {worker.version}")
        chosen.in_flight += 1
        try:
            rollouts: list[Rollout] = await chosen.call(
                "generate", request, timeout_s=self._config.rollout.timeout_s, what=f"group {request.group_id}"
            )
            if not self._answered:
                self._answered = True
                log.info("the first rollouts left %s", chosen.name)
            return rollouts
        except TimeoutError as error:
            chosen.life.end(str(error))
            raise
        finally:
            chosen.in_flight -= 1
            self._changes.tell()

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        """See ``protocols.WeightSink``. All workers side by side, each within ``publish.timeout_s``; with a transfer
        group in ``snapshot.transport`` its members only.

        Returns as soon as every worker that is up has answered and one serves the version. When none does because they
        died, it waits for one that comes back with it. ``paused_s`` is the longest any worker stood still. A worker
        that is not up is in neither list; it takes the version when it comes up.

        Raises:
            NoWorkersLeft: every worker is down, and none comes back.
        """
        started = time.monotonic()
        self._newest = snapshot
        timings: dict[int, UpdateTiming] = {}
        failed: dict[int, str] = {}
        died: set[int] = set()

        async def update(slot: SupervisedSlot[RolloutMember], worker: RolloutMember) -> None:
            try:
                timings[slot.index] = timing = await worker.update(snapshot, self._config.publish.timeout_s)
                if timing.verified:
                    log.info(
                        "%s was verified to hold version %d of the learner%s",
                        worker.name,
                        snapshot.version,
                        "" if timing.probe_nats is None else f"; {timing.probe_nats:.4f} nats a token on the probe",
                    )
            except WorkerDied as error:
                # Told now: the publication may wait for its successor, and then has nothing to report.
                log.warning("%s", error)
                failed[slot.index] = str(error)
                died.add(slot.index)
            except WorkerFailed as error:
                failed[slot.index] = str(error)
                slot.emit("fenced", str(error))
            finally:
                self._changes.tell()

        members = snapshot.transport.get("members", self._slots)
        up = [
            (slot, worker)
            for slot in self._slots.values()
            if (worker := slot.serving) is not None and slot.index in members
        ]
        await all_or_cancel(*(update(slot, worker) for slot, worker in up))
        if not self._publishes_by_broadcast:
            await self._changes.until(lambda: bool(self._serve(snapshot)) or self._nobody_returns(), clock=self._clock)
            self._check_any_left()
        applied = self._serve(snapshot)
        return PublishReport(
            version=snapshot.version,
            applied=applied,
            failed={index: cause for index, cause in failed.items() if index not in applied},
            paused_s=max((timing.paused_s for timing in timings.values()), default=0.0),
            total_s=time.monotonic() - started,
            died=frozenset(died.difference(applied)),
        )

    def _serve(self, snapshot: WeightSnapshot) -> tuple[int, ...]:
        """Slots whose worker holds ``snapshot``, those being scaled away too."""
        return tuple(
            slot.index
            for slot in self._slots.values()
            if (worker := slot.serving) is not None and not worker.fenced and worker.version == snapshot.version
        )

    def _nobody_returns(self) -> bool:
        return not any(slot.coming_back for slot in self._slots.values())

    def receivers(self) -> dict[int, int]:
        """Slot -> incarnation of every worker that can be in a transfer group: alive, fenced or not."""
        return {index: worker.incarnation for index, worker in self._receiving().items()}

    def _receiving(self) -> dict[int, RolloutMember]:
        return {
            slot.index: worker
            for slot in self._slots.values()
            if slot.index not in self._draining and (worker := slot.serving) is not None
        }

    async def until_waiting(self) -> None:
        """Until a worker that can be in a transfer group is fenced: it waits for weights.

        Raises:
            NoWorkersLeft: every worker is down, and none comes back.
        """
        await self._changes.until(
            lambda: (
                any(worker.fenced for worker in self._receiving().values())
                or (self._nobody_returns() and not self._workers())
            ),
            clock=self._clock,
        )
        self._check_any_left()

    def fence(self) -> None:
        """Send no more work to any worker: a broadcast that the learner broke off left its weights undefined.

        One that is in it may wait for the learner for ever; it is ended and comes back.
        """
        for slot in self._slots.values():
            if (worker := slot.serving) is not None:
                worker.fenced = True
                slot.emit("fenced", "the learner broke an update off")
                if worker.updating:
                    worker.life.end("it was in a broadcast that the learner broke off")

    async def scale(self, workers: int, *, drain_s: float | None = None) -> str:
        """Have ``workers`` of them; returns one line about it. One change at a time, later calls wait.

        New ones are started and brought to the newest version before they take requests. Those with the highest slots
        go: they take no more requests, finish what they run within ``drain_s`` (default ``rollout.timeout_s``), and
        end; what still runs then fails as WorkerFailed and is issued again. A slot whose restarts are used up is no
        worker: it goes first, and another worker takes its place.

        Raises:
            ValueError: fewer than one, or no room in the cluster.
            WorkerFailed, TimeoutError: a new worker did not start; the pool is as before.
        """
        if workers < 1:
            raise ValueError(f"a run needs at least 1 rollout worker; got {workers}")
        async with self._scaling:
            exhausted = {index: slot for index, slot in self._slots.items() if slot.state == "exhausted"}
            for index in exhausted:
                self._drop(index)
            before = sorted(self._slots)
            try:
                if workers > len(before):
                    await self._add(workers - len(before))
            except BaseException:
                # They tell why workers are missing, and when none is left what began it.
                self._slots = exhausted | self._slots
                raise
            if workers == len(before):
                return f"there are {workers} rollout workers already"
            leaving = before[workers:]
            timeout_s = self._config.rollout.timeout_s if drain_s is None else drain_s
            await asyncio.gather(*(self._remove(index, timeout_s) for index in leaving))
            return f"{len(before)} -> {len(self._slots)} rollout workers"

    async def _add(self, count: int) -> None:
        wanted = placement.rollout_options(self._config)
        free = ray.available_resources()
        for resource, option in (("CPU", "num_cpus"), ("GPU", "num_gpus")):
            if count * wanted[option] > free.get(resource, 0):
                raise ValueError(
                    f"{count} more rollout workers want {count * wanted[option]} {resource}, the Ray cluster has "
                    f"{free.get(resource, 0):g} free"
                )
        unused = [index for index in range(len(self._slots) + count) if index not in self._slots][:count]
        added = {index: self._new_slot(index) for index in unused}
        # Seen by status from the start, routable only once up and unfenced.
        self._slots.update(added)
        try:
            await all_or_cancel(*(slot.start() for slot in added.values()))
        except BaseException:
            for index, slot in added.items():
                await slot.end("another new worker did not start")
                self._drop(index)
            raise
        for slot in added.values():
            slot.supervise()
        self._changes.tell()

    async def _remove(self, index: int, drain_s: float) -> None:
        slot = self._slots[index]
        slot.restarting_allowed = False
        self._draining.add(index)
        try:
            drained = await self._changes.until(
                lambda: (worker := slot.serving) is None or worker.in_flight == 0, clock=self._clock, timeout_s=drain_s
            )
            if not drained:
                log.warning("%s still worked after %g s when it was scaled away", slot.name, drain_s)
            # An update has a deadline of its own. Who left a broadcast half way would stop the learner and the others.
            await self._changes.until(
                lambda: (worker := slot.serving) is None or not worker.updating, clock=self._clock
            )
            await self._end(slot, "it was scaled away")
        finally:
            # Whoever gave up waiting, too, leaves no worker behind that no slot knows.
            await slot.end("it was scaled away")
            self._draining.discard(index)
            self._drop(index)

    def _drop(self, index: int) -> None:
        """Give the slot up. Who gets its number later is no incarnation that there was."""
        if (slot := self._slots.pop(index, None)) is not None:
            self._incarnations[index] = slot.incarnation

    async def close(self) -> None:
        """Stop the engines, then end the actors. Requests in flight fail."""
        await asyncio.gather(*(self._end(slot, "the pool was closed") for slot in self._slots.values()))

    async def _end(self, slot: SupervisedSlot[RolloutMember], reason: str) -> None:
        slot.restarting_allowed = False
        if (worker := slot.serving) is not None:
            try:
                await worker.call("close", timeout_s=_CLOSE_TIMEOUT_S, what="close")
            except (WorkerFailed, TimeoutError) as error:
                log.warning("%s did not close cleanly: %s", slot.name, first_line(error))
        await slot.end(reason)

    def _workers(self) -> list[RolloutMember]:
        return [worker for slot in self._slots.values() if (worker := slot.serving) is not None]

    def _check_any_left(self) -> None:
        if self._slots and self._nobody_returns() and not self._workers():
            raise NoWorkersLeft(f"no rollout worker is left; the first cause: {first_cause(self._slots.values())}")
