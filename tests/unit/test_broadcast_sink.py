"""Publications by broadcast: transfer groups of whoever lives, both sides at once, and what a failure costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_cluster import broadcast_sink
from rlhf_cluster.broadcast_sink import BroadcastSink, SenderLost
from rlhf_cluster.launch import Fleet
from rlhf_cluster.protocols import LearnerLost, PublishReport, WeightSnapshot
from tests.unit.builders import ManualClock, async_test


class World:
    """Workers and learner around one collective, which ends when every member of its group is in it.

    ``refuse``: slots that fail; ``die``: slots that die in the next collective. A worker that dies comes back when the
    test says so, as its next incarnation.
    """

    def __init__(self, *, workers: int = 3) -> None:
        self.alive = dict.fromkeys(range(workers), 1)
        self.fenced: set[int] = set()
        self.held: dict[int, int] = {}
        self.refuse: set[int] = set()
        self.die: set[int] = set()
        self.fences = 0
        self.learner_error: Exception | None = None
        self.version = 0
        self.training = False
        self.transport: Mapping[str, Any] = {"port": 100, "members": list(range(workers))}
        self.groups: list[list[int]] = []
        self.broadcasts: list[tuple[int, int]] = []
        self.publications: list[asyncio.Future[Any]] = []
        self._port = 100
        self._sending = asyncio.Event()
        self._received = asyncio.Event()
        self.changed = asyncio.Event()

    # the workers

    def receivers(self) -> dict[int, int]:
        return dict(self.alive)

    async def until_waiting(self) -> None:
        while not any(slot in self.fenced for slot in self.alive):
            self.changed.clear()
            await self.changed.wait()

    def fence(self) -> None:
        self.fences += 1
        self.fenced |= set(self.alive)

    def comes_back(self, slot: int, incarnation: int) -> None:
        self.alive[slot] = incarnation
        self.fenced.add(slot)
        self.changed.set()

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        failed = {}
        for slot in snapshot.transport["members"]:
            if slot in self.die:
                del self.alive[slot]
                failed[slot] = f"rollout worker {slot} died during the update"
            elif slot in self.refuse:
                self.fenced.add(slot)
                failed[slot] = f"rollout worker {slot} refused"
        self.die = set()
        self._received.set()
        await self._sending.wait()
        self._sending.clear()
        for slot in set(snapshot.transport["members"]) - set(failed):
            self.fenced.discard(slot)
            self.held[slot] = snapshot.version
        return PublishReport(snapshot.version, tuple(sorted(set(self.alive) - self.fenced)), failed, 0.25, 0.5)

    # the learner

    async def regroup(self, members: Sequence[int]) -> Mapping[str, Any]:
        self.groups.append(list(members))
        self._port += 1
        self.transport = {"port": self._port, "members": list(members)}
        return self.transport

    async def broadcast(self, version: int, *, timeout_s: float) -> None:
        assert version == self.version
        self.broadcasts.append((version, self.transport["port"]))
        if self.learner_error is not None:
            raise self.learner_error
        self._sending.set()
        try:
            await asyncio.wait_for(self._received.wait(), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"learner rank [0] did not answer 'broadcast' within {timeout_s:g} s") from None
        self._received.clear()

    def hold_for(self, publication: asyncio.Future[Any]) -> None:
        self.publications.append(publication)

    def next(self) -> WeightSnapshot:
        self.version += 1
        return WeightSnapshot(self.version, Path("nowhere"), {"tensors": {}}, self.transport)


async def settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@async_test
async def test_both_sides_run_at_once_in_one_group_and_the_learner_is_held_until_they_are_done() -> None:
    # Each side of the collective waits for the other, so one after the other would never end.
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    first = await asyncio.wait_for(sink.publish(world.next()), 5)
    await asyncio.wait_for(sink.publish(world.next()), 5)
    assert (first.applied, first.paused_s) == ((0, 1), 0.25)
    assert (world.groups, world.broadcasts) == ([[0, 1]], [(1, 101), (2, 101)])
    assert world.publications[0].result() is first


@async_test
async def test_a_worker_that_died_between_publications_is_left_out_of_a_new_group_and_taken_in_when_it_is_back() -> (
    None
):
    world = World()
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())
    del world.alive[1]
    report = await sink.publish(world.next())
    assert (report.applied, dict(report.failed)) == ((0, 2), {})
    world.training = True
    world.comes_back(1, incarnation=2)
    await settle()
    assert len(world.broadcasts) == 2, "while the learner trains its weights are no version"
    report = await sink.publish(world.next())
    assert report.applied == (0, 1, 2)
    # A new process in the same slot is a new member: the group is formed anew though the slots are those of the first.
    assert world.groups == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert world.broadcasts == [(1, 101), (2, 102), (3, 103)]


@async_test
async def test_a_worker_that_comes_back_while_the_learner_is_idle_gets_the_version_at_once() -> None:
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())
    del world.alive[0]
    del world.alive[1]
    world.comes_back(1, incarnation=2)
    await settle()
    assert world.broadcasts == [(1, 101), (1, 102)]
    assert (world.groups[-1], world.held[1], world.fenced) == ([1], 1, set())
    # Training does not begin before the second broadcast is over.
    assert len(world.publications) == 2


@async_test
async def test_a_worker_that_comes_back_during_a_step_that_is_skipped_gets_the_version_after_it() -> None:
    world, clock = World(workers=1), ManualClock()
    sink = BroadcastSink(world, world, timeout_s=5, clock=clock)
    await sink.publish(world.next())
    del world.alive[0]
    world.training = True
    world.comes_back(0, incarnation=2)
    await clock.advance(5)
    assert world.broadcasts == [(1, 101)]
    # No new version, so no publication.
    world.training = False
    await clock.advance(5)
    assert (world.broadcasts, world.fenced) == ([(1, 101), (1, 102)], set())


@async_test
async def test_one_that_dies_as_it_is_taken_in_is_taken_in_when_it_is_back_again() -> None:
    world, clock = World(workers=2), ManualClock()
    sink = BroadcastSink(world, world, timeout_s=5, clock=clock)
    await sink.publish(world.next())
    del world.alive[0]
    world.die = {0}
    world.comes_back(0, incarnation=2)
    await settle()
    assert (world.broadcasts, world.alive) == ([(1, 101), (1, 102)], {1: 1})
    world.comes_back(0, incarnation=3)
    await clock.advance(5)
    assert (world.broadcasts[2:], world.groups[-1], world.fenced) == ([(1, 103)], [0, 1], set())


@async_test
async def test_the_learner_is_held_from_the_moment_at_which_it_was_found_idle() -> None:
    world = World(workers=1)
    sink = BroadcastSink(world, world, timeout_s=5)
    waiting, held = world.until_waiting, []

    async def until_waiting_as_a_step_is_about_to_begin() -> None:
        await waiting()
        asyncio.get_running_loop().call_soon(lambda: held.append(not world.publications[-1].done()))

    world.until_waiting = until_waiting_as_a_step_is_about_to_begin  # type: ignore[method-assign]
    await sink.publish(world.next())
    del world.alive[0]
    world.comes_back(0, incarnation=2)
    await settle()
    assert (world.broadcasts, held) == ([(1, 101), (1, 102)], [True])


@async_test
async def test_weights_that_were_trained_on_since_are_not_broadcast_as_the_version_before() -> None:
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())
    del world.alive[1]
    # The step is over, its version not yet published.
    world.version = 2
    world.comes_back(1, incarnation=2)
    await settle()
    assert (world.groups, len(world.publications), world.fences) == ([[0, 1]], 1, 0)


@async_test
async def test_one_that_dies_in_the_broadcast_is_named_and_the_next_group_is_without_it() -> None:
    world = World()
    sink = BroadcastSink(world, world, timeout_s=5)
    world.die = {2}
    report = await sink.publish(world.next())
    assert (report.applied, dict(report.failed)) == ((0, 1), {2: "rollout worker 2 died during the update"})
    assert world.fences == 0
    await sink.publish(world.next())
    assert world.groups == [[0, 1, 2], [0, 1]]


@async_test
async def test_one_that_refuses_is_tried_once_more_in_a_new_group_and_then_waits_for_the_next_version() -> None:
    world, clock = World(workers=2), ManualClock()
    sink = BroadcastSink(world, world, timeout_s=5, clock=clock)
    world.refuse = {1}
    report = await sink.publish(world.next())
    assert (report.applied, dict(report.failed)) == ((0,), {1: "rollout worker 1 refused"})
    await settle()
    await clock.advance(60)
    assert world.broadcasts == [(1, 101), (1, 102)]
    world.refuse = set()
    assert (await sink.publish(world.next())).applied == (0, 1)


@async_test
async def test_when_every_worker_died_in_it_those_that_come_back_get_the_same_version() -> None:
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    world.die = {0, 1}
    publishing = asyncio.ensure_future(sink.publish(world.next()))
    await settle()
    assert not publishing.done()
    world.comes_back(0, incarnation=2)
    assert (await asyncio.wait_for(publishing, 5)).applied == (0,)
    assert (world.groups, world.held) == ([[0, 1], [0]], {0: 1})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_sink, "_SECONDS_FOR_THE_OTHER_SIDE", 0.02)


@pytest.mark.usefixtures("impatient")
@async_test
async def test_a_sender_that_hangs_is_named_and_the_learner_counts_as_lost() -> None:
    world = World(workers=2)

    async def stuck(snapshot: WeightSnapshot) -> PublishReport:
        return await asyncio.get_running_loop().create_future()

    sink = BroadcastSink(world, world, timeout_s=0.05)
    world.publish = stuck  # type: ignore[method-assign]
    with pytest.raises(LearnerLost) as raised:
        await sink.publish(world.next())
    assert str(raised.value) == (
        "version 1 could not be broadcast: learner rank [0] did not answer 'broadcast' within 0.05 s"
    )
    assert (world.fences, world.fenced) == (1, {0, 1})
    assert world.publications[0].exception() is raised.value


@pytest.mark.usefixtures("impatient")
@async_test
async def test_a_sender_that_failed_ends_the_publication_long_before_the_workers_deadline() -> None:
    world = World(workers=2)
    world.learner_error = RuntimeError("learner rank 0 failed in 'broadcast': out of memory")
    started = time.monotonic()
    with pytest.raises(SenderLost, match="version 1 could not be broadcast: learner rank 0 failed in 'broadcast'"):
        await BroadcastSink(world, world, timeout_s=5).publish(world.next())
    assert time.monotonic() - started < 2
    assert world.fences == 1


@async_test
async def test_a_learner_that_was_rebuilt_meets_the_same_workers_in_a_new_group() -> None:
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())
    # What a new rank 0 announces before anybody told it of a group.
    world.transport = {"port": 900, "members": [0, 1]}
    assert (await sink.publish(world.next())).applied == (0, 1)
    assert world.broadcasts == [(1, 101), (2, 102)]


@async_test
async def test_a_group_whose_broadcast_was_broken_off_is_not_used_again() -> None:
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())

    async def stuck(snapshot: WeightSnapshot) -> PublishReport:
        return await asyncio.get_running_loop().create_future()

    applying, world.publish = world.publish, stuck  # type: ignore[method-assign]
    publishing = asyncio.ensure_future(sink.publish(world.next()))
    await settle()
    publishing.cancel()
    await asyncio.wait([publishing])
    world.publish = applying  # type: ignore[method-assign]
    assert (await sink.publish(world.next())).applied == (0, 1)
    # Version 2 is in the middle of the group at port 101 for whoever had begun it.
    assert world.broadcasts == [(1, 101), (2, 101), (3, 102)]


@async_test
async def test_the_next_publication_breaks_off_no_broadcast_to_a_worker_that_came_back() -> None:
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())
    applying, go_on = world.publish, asyncio.Event()

    async def slow(snapshot: WeightSnapshot) -> PublishReport:
        await go_on.wait()
        return await applying(snapshot)

    world.publish = slow  # type: ignore[method-assign]
    world.comes_back(1, incarnation=2)
    await settle()
    publishing = asyncio.ensure_future(sink.publish(world.next()))
    await settle()
    go_on.set()
    assert (await publishing).applied == (0, 1)
    assert world.broadcasts == [(1, 101), (1, 102), (2, 102)], "the group is whole and used again"


@async_test
async def test_nothing_is_broadcast_again_by_a_sink_that_was_told_to_stop() -> None:
    world = World(workers=2)
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())
    sink.stop_readmitting()
    world.comes_back(1, incarnation=2)
    await settle()
    assert world.broadcasts == [(1, 101)]


async def sink_whose_readmission_failed(world: World) -> BroadcastSink:
    """Version 1 is published and cannot be sent again to worker 0, which came back."""
    sink = BroadcastSink(world, world, timeout_s=5)
    await sink.publish(world.next())
    del world.alive[0]
    world.learner_error = RuntimeError("learner rank 0 failed in 'broadcast': NCCL error")
    world.comes_back(0, incarnation=2)
    await asyncio.sleep(0.1)
    return sink


@pytest.mark.usefixtures("impatient")
@async_test
async def test_a_sender_that_fails_between_two_publications_is_told_to_who_watches() -> None:
    world = World(workers=1)
    sink = await sink_whose_readmission_failed(world)
    with pytest.raises(SenderLost, match="version 1 could not be broadcast: learner rank 0 failed in 'broadcast'"):
        await asyncio.wait_for(sink.watch(), 5)
    assert world.fenced == {0}, "no batch forms, so nobody else would come to the learner"


@pytest.mark.usefixtures("impatient")
@async_test
async def test_nobody_is_told_of_a_failure_again_when_the_rebuilt_learner_has_published() -> None:
    world = World(workers=1)
    sink = await sink_whose_readmission_failed(world)
    world.learner_error = None
    await sink.publish(world.next())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sink.watch(), 0.05)


@async_test
async def test_a_worker_that_leaves_while_the_group_forms_is_in_no_collective() -> None:
    class Leaving(World):
        async def regroup(self, members: Sequence[int]) -> Mapping[str, Any]:
            if len(self.groups) == 0:
                del self.alive[1]
            return await super().regroup(members)

    world = Leaving(workers=3)
    report = await asyncio.wait_for(BroadcastSink(world, world, timeout_s=5).publish(world.next()), 5)
    assert world.groups == [[0, 1, 2], [0, 2]]
    assert report.applied == (0, 2)


@async_test
async def test_a_group_whose_workers_all_leave_while_it_forms_waits_for_others() -> None:
    class Leaving(World):
        async def regroup(self, members: Sequence[int]) -> Mapping[str, Any]:
            if len(self.groups) == 0:
                self.alive.clear()
            return await super().regroup(members)

    world = Leaving(workers=1)
    publication = asyncio.ensure_future(BroadcastSink(world, world, timeout_s=5).publish(world.next()))
    await settle()
    assert not publication.done()
    world.comes_back(0, 2)
    report = await asyncio.wait_for(publication, 5)
    assert world.groups == [[0], [0]]
    assert report.applied == (0,)


@pytest.mark.usefixtures("impatient")
@async_test
async def test_a_run_that_watches_its_fleet_is_told_of_a_readmission_that_failed() -> None:
    fleet: Any = SimpleNamespace(sink=await sink_whose_readmission_failed(World(workers=1)))
    with pytest.raises(SenderLost, match="version 1 could not be broadcast"):
        await asyncio.wait_for(Fleet.watch(fleet), 5)
