"""Rollout workers as Ray actors behind ``protocols.Generator`` and ``WeightSink``: routing, deadlines, fences.

A slot takes requests while its actor lives and it is not fenced. An actor that died, or let a group's deadline pass, is
down for good; a worker whose update failed is fenced and opens again with the next update that succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors import placement
from actors.rollout_worker import INITIAL_VERSION, EngineDied, RolloutWorker, UpdateTiming, WorkerFenced
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
from rlhf_cluster.types import Rollout

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 15.0


class NoWorkersLeft(RuntimeError):
    """Every rollout worker is down; the message names the first cause."""


@dataclass(slots=True)
class _Slot:
    index: int
    handle: Any
    version: int = INITIAL_VERSION
    in_flight: int = 0
    fenced: bool = True
    down: bool = False

    @property
    def name(self) -> str:
        return f"rollout worker {self.index}"

    @property
    def routable(self) -> bool:
        return not (self.down or self.fenced)


class RolloutPool:
    """``rollout.workers`` engines. ``await start(...)`` first; safe for many concurrent callers on one event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        engine = config.rollout.engine
        self._capacity = max(1, engine.max_num_seqs // config.rollout.samples_per_prompt)
        self._slots: list[_Slot] = []
        self._first_cause: str | None = None
        self._answered = False

    async def start(self, timeout_s: float) -> None:
        """Create all workers side by side and wait until each serves the initial policy as version 0.

        Raises:
            WorkerFailed: a worker that could not start, with its reason. TimeoutError: names the worker.
        """
        config = self._config
        actor = ray.remote(RolloutWorker).options(**placement.rollout_options(config))
        self._slots = [
            _Slot(
                index,
                actor.remote(
                    index=index,
                    model=config.model.policy,
                    dtype=config.model.dtype,
                    engine=config.rollout.engine,
                    max_model_len=config.max_model_len,
                    seed=derive_seed(config.run.seed, "engine", index),
                    device=config.cluster.device,
                    publish=config.publish,
                    trust_remote_code=config.model.trust_remote_code,
                ),
            )
            for index in range(config.rollout.workers)
        ]
        await _all([self._start(slot, timeout_s) for slot in self._slots])

    async def _start(self, slot: _Slot, timeout_s: float) -> None:
        started = time.monotonic()
        sampling = await self._call(slot, slot.handle.start.remote(), timeout_s, "start")
        slot.fenced = False
        log.info(
            "%s serves after %.1f s; every request samples with %s", slot.name, time.monotonic() - started, sampling
        )

    def choose(self) -> WorkerSlot | None:
        """See ``protocols.Generator``. A worker holds at most ``max_num_seqs`` samples, at least one group.

        Raises:
            NoWorkersLeft: every worker is down.
        """
        self._check_any_left()
        free = [slot for slot in self._slots if slot.routable and slot.in_flight < self._capacity]
        if not free:
            return None
        slot = min(free, key=lambda slot: slot.in_flight)
        return WorkerSlot(slot.index, slot.version)

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(slot.index, slot.routable, slot.version, slot.in_flight) for slot in self._slots]

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        """See ``protocols.Generator``. The deadline is ``rollout.timeout_s``; a worker that misses it is ended."""
        slot = self._slots[worker.index]
        if not slot.routable:
            raise WorkerFailed(f"{slot.name} is down or fenced")
        slot.in_flight += 1
        try:
            rollouts: list[Rollout] = await self._call(
                slot, slot.handle.generate.remote(request), self._config.rollout.timeout_s, f"group {request.group_id}"
            )
            if not self._answered:
                self._answered = True
                log.info("the first rollouts left %s", slot.name)
            return rollouts
        except TimeoutError as error:
            self._put_down(slot, str(error))
            raise
        finally:
            slot.in_flight -= 1

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        """See ``protocols.WeightSink``. All workers side by side, each within ``publish.timeout_s``.

        ``paused_s`` is the longest any worker stood still. A worker that is down is in neither list.

        Raises:
            NoWorkersLeft: every worker is down.
        """
        started = time.monotonic()
        timings: dict[int, UpdateTiming] = {}
        failed: dict[int, str] = {}

        async def update(slot: _Slot) -> None:
            reference = slot.handle.update_weights.remote(snapshot)
            try:
                timings[slot.index] = await self._call(
                    slot, reference, self._config.publish.timeout_s, f"the update to version {snapshot.version}"
                )
            except (WorkerFailed, TimeoutError) as error:
                slot.fenced = True
                failed[slot.index] = str(error)
            else:
                slot.version, slot.fenced = snapshot.version, False

        await _all([update(slot) for slot in self._slots if not slot.down])
        self._check_any_left()
        return PublishReport(
            version=snapshot.version,
            applied=tuple(sorted(timings)),
            failed=failed,
            paused_s=max((timing.paused_s for timing in timings.values()), default=0.0),
            total_s=time.monotonic() - started,
        )

    def fence(self) -> None:
        """Send no more work to any worker: an update that the learner broke off left its weights undefined."""
        for slot in self._slots:
            slot.fenced = True

    async def close(self) -> None:
        """Stop the engines, then end the actors. Requests in flight fail."""

        async def close(slot: _Slot) -> None:
            try:
                await asyncio.wait_for(slot.handle.close.remote(), _CLOSE_TIMEOUT_S)
            except (RayError, TimeoutError) as error:
                log.warning("%s did not close cleanly: %s", slot.name, _first_line(error))

        await asyncio.gather(*(close(slot) for slot in self._slots if not slot.down))
        for slot in self._slots:
            slot.down = True
            ray.kill(slot.handle, no_restart=True)

    async def _call(self, slot: _Slot, reference: Any, timeout_s: float, what: str) -> Any:
        """Await one actor call. Errors become WorkerFailed or TimeoutError, both naming the worker."""
        try:
            return await asyncio.wait_for(reference, timeout_s)
        except RayTaskError as error:  # before TimeoutError: an error raised in the actor may itself be one
            cause = error.cause if isinstance(error.cause, BaseException) else error
            slot.fenced |= isinstance(cause, WorkerFenced)
            if isinstance(cause, EngineDied):
                self._put_down(slot, f"{slot.name}: {_first_line(cause)}")
            raise WorkerFailed(f"{slot.name}, {what}: {type(cause).__name__}: {_first_line(cause)}") from error
        except RayActorError as error:
            self._put_down(slot, f"{slot.name} died: {_first_line(error)}")
            raise WorkerFailed(f"{slot.name} died during {what}: {_first_line(error)}") from error
        except RayError as error:
            raise WorkerFailed(f"{slot.name}, {what}: {_first_line(error)}") from error
        except TimeoutError:
            ray.cancel(reference)
            raise TimeoutError(f"{slot.name} did not finish {what} within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise

    def _put_down(self, slot: _Slot, cause: str) -> None:
        if slot.down:
            return
        slot.down = True
        self._first_cause = self._first_cause or cause
        log.error("%s is down: %s", slot.name, cause)
        ray.kill(slot.handle, no_restart=True)

    def _check_any_left(self) -> None:
        if self._slots and all(slot.down for slot in self._slots):
            raise NoWorkersLeft(f"no rollout worker is left; the first cause: {self._first_cause}")


async def _all(calls: Sequence[Awaitable[None]]) -> None:
    """Wait for all; the first error cancels the rest."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
