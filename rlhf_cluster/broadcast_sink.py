"""Publication when the learner broadcasts to the workers: both sides at once, each with a deadline that names it.

    learner.broadcast(version) --- rank 0 ==(one collective)==> engines --- workers.publish(snapshot)

A collective needs every party. When one fails, the others may be stuck in it and the group cannot be used again, so a
publication that any party missed fences all workers and ends the run; it goes on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from rlhf_cluster.protocols import PublishReport, WeightSink, WeightSnapshot, WorkerStatus

# Who failed first may be heard last: both sides notice at the same deadline.
_SECONDS_FOR_THE_OTHER_SIDE = 3.0


class PublicationFailed(RuntimeError):
    """A version did not reach every worker; the message names each party that failed, and how."""


class Receivers(WeightSink, Protocol):
    """The rollout workers."""

    def status(self) -> Sequence[WorkerStatus]: ...

    def fence(self) -> None:
        """Send no more work to any worker."""
        ...


class Sender(Protocol):
    """The learner."""

    async def broadcast(self, version: int, *, timeout_s: float) -> None:
        """Send the live weights. Raises TimeoutError or another error that names the rank."""
        ...

    def hold_for(self, publication: asyncio.Future[Any]) -> None:
        """Change nothing before ``publication`` is over."""
        ...


class BroadcastSink:
    """Implements ``protocols.WeightSink``. ``timeout_s``: seconds for the sending; the workers have their own."""

    def __init__(self, workers: Receivers, learner: Sender, *, timeout_s: float) -> None:
        self._workers = workers
        self._learner = learner
        self._timeout_s = timeout_s

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        """Run the workers' updates and the learner's broadcast side by side; every worker serves the version after it.

        Raises:
            PublicationFailed: naming every party that is down, failed or missed its deadline.
        """
        publication = asyncio.ensure_future(self._publish(snapshot))
        self._learner.hold_for(publication)
        return await publication

    async def _publish(self, snapshot: WeightSnapshot) -> PublishReport:
        down = [f"rollout worker {status.index}" for status in self._workers.status() if not status.up]
        if down:
            raise _failure(snapshot.version, [f"{name} is down or fenced" for name in down])
        sending = asyncio.ensure_future(self._learner.broadcast(snapshot.version, timeout_s=self._timeout_s))
        receiving = asyncio.ensure_future(self._receive(snapshot))
        sides = [receiving, sending]
        try:
            done, missing = await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
            failed = any(side.exception() is not None for side in done)
            if failed and missing:
                await asyncio.wait(missing, timeout=_SECONDS_FOR_THE_OTHER_SIDE)
            if failed:
                self._workers.fence()
                errors = [error for side in sides if side.done() and (error := side.exception()) is not None]
                raise _failure(snapshot.version, [str(error) for error in errors]) from errors[0]
            return receiving.result()
        finally:
            for side in sides:
                side.cancel()

    async def _receive(self, snapshot: WeightSnapshot) -> PublishReport:
        report = await self._workers.publish(snapshot)
        if report.failed:
            raise RuntimeError("; ".join(report.failed.values()))
        return report


def _failure(version: int, causes: Sequence[str]) -> PublicationFailed:
    return PublicationFailed(
        f"version {version} did not reach every worker: {'; '.join(causes)}. The NCCL group cannot go on without a "
        "member; resume from the newest checkpoint"
    )
