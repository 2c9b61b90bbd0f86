"""Publication when the learner broadcasts to the workers: both sides at once, each with a deadline that names it.

    learner.broadcast(version) --- rank 0 ==(one collective)==> engines --- workers.publish(snapshot)

A collective needs every party and cannot be joined later, so it lives in a *transfer group* whose members never change:

    whoever lives is not the group  -> regroup: new rendezvous, next world size; then broadcast
    a worker failed, not the sender -> it is fenced or replaced; the others serve; the next publication regroups
    the sender failed or hangs      -> all are fenced, those in the collective replaced; ``SenderLost``: the learner is
                                       rebuilt and meets a new group
    a worker came back              -> it waits, fenced; as soon as the learner does not train, and if that made no new
                                       version, the version is broadcast again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rlhf_cluster.clock import SystemClock
from rlhf_cluster.protocols import Clock, LearnerLost, PublishReport, WeightSink, WeightSnapshot

log = logging.getLogger(__name__)

# Who failed first may be heard last: both sides notice at the same deadline.
_SECONDS_FOR_THE_OTHER_SIDE = 3.0
# How often a worker that waits asks whether the learner still trains, or whether those that refused were replaced.
_LOOK_S = 1.0


class SenderLost(LearnerLost):
    """The learner could not send a version; the message names each party that failed, and how."""


class Receivers(WeightSink, Protocol):
    """The rollout workers."""

    def receivers(self) -> Mapping[int, int]:
        """Slot -> incarnation of every worker that can be in a group: alive, fenced or not."""
        ...

    async def until_waiting(self) -> None:
        """Until a worker is alive and fenced. Raises when every worker is down for good."""
        ...

    def fence(self) -> None:
        """Send no more work to any worker, and replace those that are in the middle of an update."""
        ...


class Sender(Protocol):
    """The learner."""

    @property
    def version(self) -> int: ...

    @property
    def training(self) -> bool:
        """Whether the live weights are changing now."""
        ...

    async def regroup(self, members: Sequence[int]) -> Mapping[str, Any]:
        """Form another group for the next ``broadcast``; returns the transport that tells workers where to meet."""
        ...

    async def broadcast(self, version: int, *, timeout_s: float) -> None:
        """Send the live weights. Raises TimeoutError or another error that names the rank."""
        ...

    def hold_for(self, publication: asyncio.Future[Any]) -> None:
        """Change nothing before ``publication`` is over."""
        ...


class BroadcastSink:
    """Implements ``protocols.WeightSink``. ``timeout_s``: seconds for the sending; the workers have their own."""

    def __init__(self, workers: Receivers, learner: Sender, *, timeout_s: float, clock: Clock | None = None) -> None:
        self._workers = workers
        self._learner = learner
        self._timeout_s = timeout_s
        self._clock = clock or SystemClock()
        self._members: Mapping[int, int] = {}
        """Slot -> incarnation in a group whose last broadcast succeeded; empty: the next one needs another."""
        self._transport: Mapping[str, Any] = {}
        self._one_at_a_time = asyncio.Lock()
        self._readmitting: asyncio.Task[None] | None = None
        self._failed = asyncio.Event()
        self._failure: BaseException | None = None

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        """Run the workers' updates and the learner's broadcast side by side.

        When every worker died in it, those that come back get the same version.

        Raises:
            SenderLost: naming every party that failed or missed its deadline. Or what says that no worker is left.
        """
        self.stop_readmitting()
        self._failed.clear()
        report = await self._held(snapshot)
        self._readmitting = asyncio.ensure_future(self._readmit(snapshot))
        self._readmitting.add_done_callback(self._note_failure)
        return report

    def stop_readmitting(self) -> None:
        """Begin no broadcast to workers that come back before the next ``publish`` is over."""
        if self._readmitting is not None:
            self._readmitting.cancel()

    async def watch(self) -> None:
        """Returns never: raises what ended a broadcast between two publications, which no ``publish`` can raise.

        Every worker is fenced then, so that no batch may form and nobody come to the learner that is lost.

        Raises:
            LearnerLost: as ``SenderLost`` of ``publish``. Or what says that no worker is left.
        """
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def _note_failure(self, readmitting: asyncio.Task[None]) -> None:
        if not readmitting.cancelled() and (error := readmitting.exception()) is not None:
            log.warning("broadcasting the newest version again for workers that came back: %s", error)
            self._failure = error
            self._failed.set()

    def _held(self, snapshot: WeightSnapshot) -> asyncio.Future[PublishReport]:
        """The publication, which the learner waits for from now on."""
        publication = asyncio.ensure_future(self._until_applied(snapshot))
        self._learner.hold_for(publication)
        return publication

    async def _readmit(self, snapshot: WeightSnapshot) -> None:
        """Broadcast the version again for workers that come back, until the learner has another; its publication takes
        over from here."""
        refused: Mapping[int, int] = {}
        while True:
            await self._workers.until_waiting()
            if self._learner.version != snapshot.version:
                return
            members = dict(self._workers.receivers())
            # The learner may skip its step and stay at the version. Workers that live and refused would refuse again.
            if self._learner.training or members == refused:
                await self._clock.sleep(_LOOK_S)
                continue
            report = await asyncio.shield(self._held(snapshot))
            refused = members if report.failed else {}
            log.info("version %d was broadcast again: workers %s serve it", report.version, list(report.applied))

    async def _until_applied(self, snapshot: WeightSnapshot) -> PublishReport:
        async with self._one_at_a_time:
            while True:
                if not self._workers.receivers():
                    await self._workers.until_waiting()
                report = await self._once(snapshot)
                # Workers that live and refused would refuse again.
                if report.applied or self._workers.receivers():
                    return report

    async def _once(self, snapshot: WeightSnapshot) -> PublishReport:
        members = dict(self._workers.receivers())
        # A learner that was rebuilt knows nothing of the group that the one before it was in.
        usable = members == self._members and snapshot.transport == self._transport
        # A broadcast that anything breaks off, a cancellation too, may leave a party in the middle of a collective.
        self._members = {}
        while not usable:
            self._transport = await self._learner.regroup(sorted(members))
            log.info("transfer group of workers %s, for version %d", sorted(members), snapshot.version)
            # One may have died or been scaled away meanwhile.
            formed, members = members, dict(self._workers.receivers())
            while not members:
                await self._workers.until_waiting()
                members = dict(self._workers.receivers())
            usable = members == formed
        snapshot = replace(snapshot, transport=self._transport)
        sending = asyncio.ensure_future(self._learner.broadcast(snapshot.version, timeout_s=self._timeout_s))
        receiving = asyncio.ensure_future(self._workers.publish(snapshot))
        sides: list[asyncio.Future[Any]] = [receiving, sending]
        try:
            done, missing = await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(side.exception() is not None for side in done)
            if failed and missing:
                await asyncio.wait(missing, timeout=_SECONDS_FOR_THE_OTHER_SIDE)
            errors = [error for side in sides if side.done() and (error := side.exception()) is not None]
            report = receiving.result() if receiving.done() and receiving.exception() is None else None
            if errors:
                self._workers.fence()
                causes = [*(report.failed.values() if report is not None else ()), *(str(error) for error in errors)]
                raise _failure(snapshot.version, causes) from errors[0]
            assert report is not None
            if not report.failed:
                self._members = members
            return report
        finally:
            for side in sides:
                side.cancel()


def _failure(version: int, causes: Sequence[str]) -> SenderLost:
    return SenderLost(f"version {version} could not be broadcast: {'; '.join(causes)}")
