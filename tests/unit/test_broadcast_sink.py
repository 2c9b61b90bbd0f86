"""A publication by broadcast: workers and learner side by side, and what happens when either side fails."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_cluster import broadcast_sink
from rlhf_cluster.broadcast_sink import BroadcastSink, PublicationFailed
from rlhf_cluster.protocols import PublishReport, WeightSnapshot, WorkerStatus

SNAPSHOT = WeightSnapshot(4, Path("nowhere"), {"tensors": {}}, {"nccl": {}})


class Collective:
    """Both sides of a transfer that ends when both are in it. ``workers`` and ``learner`` say how one stays away."""

    def __init__(self, *, workers: dict[int, str] | None = None, learner: Exception | None = None) -> None:
        self._arrived = {"workers": asyncio.Event(), "learner": asyncio.Event()}
        self._workers, self._learner = workers or {}, learner
        self.up = [True, True]
        self.publication: asyncio.Future[Any] | None = None
        self.broadcasts: list[tuple[int, float]] = []

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(index, up, 3, 0) for index, up in enumerate(self.up)]

    def fence(self) -> None:
        self.up = [False, False]

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        if not self._workers:
            self._arrived["workers"].set()
            await self._arrived["learner"].wait()
        applied = tuple({0, 1} - set(self._workers))
        return PublishReport(snapshot.version, applied, self._workers, 0.25, 0.5)

    async def broadcast(self, version: int, *, timeout_s: float) -> None:
        self.broadcasts.append((version, timeout_s))
        if self._learner is not None:
            raise self._learner
        self._arrived["learner"].set()
        try:
            await asyncio.wait_for(self._arrived["workers"].wait(), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"learner rank [0] did not answer 'broadcast' within {timeout_s:g} s") from None

    def hold_for(self, publication: asyncio.Future[Any]) -> None:
        self.publication = publication


def publish(both: Collective, timeout_s: float = 5.0) -> PublishReport:
    async def body() -> PublishReport:
        return await asyncio.wait_for(BroadcastSink(both, both, timeout_s=timeout_s).publish(SNAPSHOT), 10)

    return asyncio.run(body())


def test_both_sides_run_at_once_and_the_learner_is_held_until_they_are_done() -> None:
    # Each side of the collective waits for the other, so one after the other would never end.
    both = Collective()
    report = publish(both)
    assert (report.applied, report.paused_s) == ((0, 1), 0.25)
    assert both.broadcasts == [(4, 5.0)]
    assert both.up == [True, True]
    assert both.publication is not None and both.publication.result() is report


def test_a_worker_that_failed_is_named_with_the_sender_that_waited_and_all_are_fenced() -> None:
    both = Collective(workers={1: "rollout worker 1 died during the update to version 4"})
    with pytest.raises(PublicationFailed) as raised:
        publish(both, timeout_s=0.05)
    assert str(raised.value) == (
        "version 4 did not reach every worker: rollout worker 1 died during the update to version 4; learner rank [0] "
        "did not answer 'broadcast' within 0.05 s. The NCCL group cannot go on without a member; resume from the "
        "newest checkpoint"
    )
    assert both.up == [False, False]
    assert both.publication is not None and both.publication.exception() is raised.value


def test_a_sender_that_failed_ends_the_publication_long_before_the_workers_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast_sink, "_SECONDS_FOR_THE_OTHER_SIDE", 0.02)
    both = Collective(learner=RuntimeError("learner rank 0 failed in 'broadcast': out of memory"))
    started = time.monotonic()
    with pytest.raises(PublicationFailed, match="every worker: learner rank 0 failed in 'broadcast': out of memory"):
        publish(both)
    assert time.monotonic() - started < 2
    assert both.up == [False, False]


def test_a_worker_that_is_down_is_named_before_anyone_enters_the_collective() -> None:
    both = Collective()
    both.up = [True, False]
    with pytest.raises(PublicationFailed, match="every worker: rollout worker 1 is down or fenced"):
        publish(both)
    assert both.broadcasts == []
