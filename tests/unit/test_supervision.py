"""One slot through many lives, in time that only the test moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_cluster.supervision import (
    Changes,
    Death,
    Event,
    Life,
    RestartBudget,
    SupervisedSlot,
    SupervisionSettings,
    first_cause,
    within,
)
from tests.unit.builders import ManualClock, async_test

# Pings every 5 s, dead after 3 misses; restarts after 1, 2, 4 s and not a fourth time.
SETTINGS = SupervisionSettings(
    heartbeat_s=5, heartbeat_misses=3, restarts=3, window_s=100, backoff_s=1, backoff_max_s=8, jitter=0
)


class SkippingClock(ManualClock):
    """A clock that can show more than its sleepers have slept: a process that got no turn."""

    skipped = 0.0

    def now(self) -> float:
        return super().now() + self.skipped

    def skip(self, seconds: float) -> None:
        self.skipped += seconds


class FakeMember:
    """A member whose start and heartbeats do what the test says."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.life = Life()
        self.killed = 0
        self.start_error: Exception | None = None
        self.silent = False
        self.ping_error: Exception | None = None

    async def start(self) -> None:
        if self.start_error is not None:
            raise self.start_error

    async def ping(self) -> None:
        if self.ping_error is not None:
            raise self.ping_error
        if self.silent:
            await asyncio.Event().wait()

    def kill(self) -> None:
        self.killed += 1


class Bench:
    """A slot, its clock, every member it made and every event it told."""

    def __init__(self, settings: SupervisionSettings = SETTINGS, index: int = 0) -> None:
        self.clock = SkippingClock()
        self.members: list[FakeMember] = []
        self.events: list[Event] = []
        self.on_create: Callable[[FakeMember], None] = lambda member: None
        self.slot: SupervisedSlot[FakeMember] = SupervisedSlot(
            "rollout_worker",
            index,
            self._create,
            settings=settings,
            clock=self.clock,
            rng=random.Random(0),
            on_event=self.events.append,
        )

    def _create(self, incarnation: int) -> FakeMember:
        member = FakeMember(incarnation)
        self.members.append(member)
        self.on_create(member)
        return member

    async def up(self) -> FakeMember:
        await self.slot.start()
        self.slot.supervise()
        await self.clock.run_ready()
        return self.members[0]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@async_test
async def test_a_dead_member_is_killed_and_the_next_incarnation_takes_its_place_after_the_back_off() -> None:
    bench = Bench()
    first = await bench.up()
    assert bench.slot.serving is first
    first.life.end("SIGKILL")
    assert bench.slot.serving is None, "not routable from the instant its death is known"
    assert bench.slot.coming_back
    await bench.clock.advance(0.9)
    assert (first.killed, len(bench.members)) == (1, 1)
    await bench.clock.advance(0.2)
    second = bench.members[1]
    assert bench.slot.serving is second
    assert (first.incarnation, second.incarnation) == (1, 2)
    assert bench.kinds() == ["up", "down", "restart", "up"]
    assert [event.incarnation for event in bench.events] == [1, 1, 2, 2]
    assert bench.events[1].reason == "SIGKILL"
    await bench.slot.end("done")


@async_test
async def test_what_an_old_incarnation_still_says_does_not_touch_the_new_one() -> None:
    bench = Bench()
    first = await bench.up()
    first.life.end("SIGKILL")
    await bench.clock.advance(2)
    assert not first.life.end("a late failed call"), "the first cause stands"
    assert first.life.cause == "SIGKILL"
    await bench.clock.advance(20)
    assert bench.slot.serving is bench.members[1]
    assert len(bench.members) == 2
    await bench.slot.end("done")


@async_test
async def test_only_heartbeats_missed_in_a_row_are_a_death() -> None:
    bench = Bench()
    member = await bench.up()
    member.silent = True
    # Pings at 5 and 15 s (each waits its 5 s in vain), an answer at 25 s.
    await bench.clock.advance(24)
    member.silent = False
    await bench.clock.advance(6)
    assert [event.reason for event in bench.events if event.kind == "heartbeat_missed"] == ["1 of 3", "2 of 3"]
    member.silent = True
    await bench.clock.advance(25)
    assert bench.slot.serving is member
    # The third miss in a row ends at 30 s + 3 * (5 + 5) s.
    await bench.clock.advance(6)
    assert member.life.cause == "missed 3 heartbeats of 5 s in a row"
    assert member.killed == 1
    await bench.slot.end("done")


@async_test
async def test_a_driver_that_had_no_turn_blames_no_member_for_it() -> None:
    bench = Bench()
    member = await bench.up()
    member.silent = True
    for _ in range(5):
        await bench.clock.advance(6)
        # Sent at 5 s, its deadline at 10 s; the driver is asleep until long after it.
        bench.clock.skip(60)
        await bench.clock.advance(4)
    assert "heartbeat_missed" not in bench.kinds()
    assert bench.slot.serving is member
    await bench.slot.end("done")


@async_test
async def test_a_heartbeat_that_fails_is_a_death_at_once() -> None:
    bench = Bench()
    member = await bench.up()
    member.ping_error = RuntimeError("the engine process died")
    await bench.clock.advance(5.1)
    assert member.life.cause == "could not answer a heartbeat: the engine process died"
    await bench.slot.end("done")


@async_test
async def test_a_slot_that_keeps_dying_waits_longer_each_time_and_then_stays_down_with_the_first_cause() -> None:
    bench = Bench()
    waits = []
    (await bench.up()).life.end("out of memory")
    for _ in range(3):
        born = len(bench.members)
        await bench.clock.run_ready()
        died_at = bench.clock.now()
        while len(bench.members) == born:
            await bench.clock.advance(0.5)
        waits.append(bench.clock.now() - died_at)
        bench.members[-1].life.end("killed again")
    await bench.clock.advance(1000)
    assert waits == [1, 2, 4]
    assert len(bench.members) == 4
    assert (bench.slot.state, bench.slot.coming_back, bench.slot.serving) == ("exhausted", False, None)
    assert bench.events[-1].kind == "exhausted"
    assert bench.events[-1].reason.endswith("3 restarts did not help; the first cause: out of memory")
    assert first_cause([bench.slot]) == "rollout worker 0: out of memory"


@async_test
async def test_a_restart_that_fails_to_start_counts_and_is_tried_again() -> None:
    bench = Bench()
    first = await bench.up()

    def broken(member: FakeMember) -> None:
        if member.incarnation == 2:
            member.start_error = TimeoutError("no GPU within 600 s")

    bench.on_create = broken
    first.life.end("SIGKILL")
    await bench.clock.advance(1.1)
    assert bench.slot.serving is None
    assert bench.members[1].life.cause == "could not start: no GPU within 600 s"
    await bench.clock.advance(2.1)
    assert bench.slot.serving is bench.members[2]
    assert bench.members[1].killed == 1
    await bench.slot.end("done")


@async_test
async def test_a_first_start_that_fails_raises_and_is_not_repeated() -> None:
    bench = Bench()

    def broken(member: FakeMember) -> None:
        member.start_error = ValueError("no safetensors in the folder")

    bench.on_create = broken
    with pytest.raises(ValueError, match="no safetensors"):
        await bench.slot.start()
    assert bench.members[0].killed == 1
    assert bench.slot.state == "ended"
    assert not bench.slot.coming_back


@async_test
async def test_deaths_are_forgotten_by_seconds_served_and_not_by_seconds_waited() -> None:
    budget = RestartBudget(SETTINGS, random.Random(0))
    # Three deaths without ever serving, years apart: the fourth is still one too many.
    assert [budget.spend(Death(at, 0.0, "x")) for at in (0.0, 1e6, 2e6, 3e6)] == [1, 2, 4, None]
    served = RestartBudget(SETTINGS, random.Random(0))
    # Each life serves 60 s: the window of 100 s holds two deaths, so the wait never passes that of a second death.
    assert [served.spend(Death(0.0, 60.0 * n, "x")) for n in range(1, 7)] == [1, 2, 2, 2, 2, 2]


@async_test
async def test_back_offs_of_slots_that_died_together_differ_and_stay_within_the_jitter() -> None:
    settings = SupervisionSettings(backoff_s=10, jitter=0.25)
    waits = [RestartBudget(settings, random.Random(seed)).spend(Death(0.0, 0.0, "x")) for seed in range(200)]
    assert all(wait is not None and 7.5 <= wait <= 12.5 for wait in waits)
    assert len(set(waits)) == 200
    assert max(w for w in waits if w) - min(w for w in waits if w) > 4


@async_test
async def test_the_back_off_stops_growing_at_its_limit() -> None:
    settings = SupervisionSettings(restarts=6, backoff_s=1, backoff_max_s=8, jitter=0)
    budget = RestartBudget(settings, random.Random(0))
    assert [budget.spend(Death(0.0, 0.0, "x")) for _ in range(7)] == [1, 2, 4, 8, 8, 8, None]


@async_test
async def test_ending_a_slot_stops_its_restarts_and_tells_those_who_wait() -> None:
    bench = Bench()
    member = await bench.up()
    waiting = asyncio.ensure_future(asyncio.wait([member.life.told]))
    await bench.slot.end("it was scaled away")
    await waiting
    assert member.life.cause == "it was scaled away"
    assert member.killed == 1
    await bench.clock.advance(1000)
    assert len(bench.members) == 1
    assert bench.kinds() == ["up", "ended"]


@async_test
async def test_ending_a_slot_during_its_back_off_leaves_it_ended() -> None:
    bench = Bench()
    (await bench.up()).life.end("SIGKILL")
    await bench.clock.advance(0.5)
    await bench.slot.end("the pool was closed")
    await bench.clock.advance(1000)
    assert len(bench.members) == 1


@async_test
async def test_a_slot_that_may_not_restart_stays_down_after_its_death() -> None:
    bench = Bench()
    member = await bench.up()
    bench.slot.restarting_allowed = False
    member.life.end("SIGKILL")
    await bench.clock.advance(1000)
    assert len(bench.members) == 1
    assert bench.slot.state == "exhausted"


@async_test
async def test_the_first_cause_is_the_earliest_death_over_all_slots() -> None:
    early, late = Bench(SupervisionSettings(restarts=0), index=1), Bench(SupervisionSettings(restarts=0), index=0)
    for bench, seconds, cause in ((late, 30.0, "no worker is left to help"), (early, 10.0, "out of memory")):
        member = await bench.up()
        await bench.clock.advance(seconds)
        member.life.end(cause)
        await bench.clock.run_ready()
    assert first_cause([late.slot, early.slot]) == "rollout worker 1: out of memory"


@async_test
async def test_a_slot_whose_member_cannot_even_be_made_is_not_taken_for_one_that_comes_back() -> None:
    bench = Bench()
    member = await bench.up()

    def broken(_: FakeMember) -> None:
        raise RuntimeError("Ray is shut down")

    bench.on_create = broken
    member.life.end("SIGKILL")
    await bench.clock.advance(5)
    assert not bench.slot.coming_back
    assert "Ray is shut down" in bench.events[-1].reason


@async_test
async def test_changes_made_between_the_look_and_the_wait_are_not_lost() -> None:
    clock, changes = ManualClock(), Changes()
    seen: list[Any] = []

    async def wait(timeout_s: float | None) -> None:
        seen.append(await changes.until(lambda: bool(values), clock=clock, timeout_s=timeout_s))

    values: list[int] = []
    waiting = [asyncio.ensure_future(wait(None)), asyncio.ensure_future(wait(5))]
    await clock.run_ready()
    changes.tell()
    await clock.run_ready()
    assert seen == []
    values.append(1)
    changes.tell()
    await asyncio.gather(*waiting)
    assert seen == [True, True]


@async_test
async def test_a_wait_for_a_change_ends_at_its_deadline() -> None:
    clock, changes = ManualClock(), Changes()
    waiting = asyncio.ensure_future(changes.until(lambda: False, clock=clock, timeout_s=5))
    await clock.advance(4.9)
    assert not waiting.done()
    await clock.advance(0.2)
    assert await waiting is False


@async_test
async def test_a_deadline_cancels_what_it_bounds() -> None:
    clock, cancelled = ManualClock(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    bounded = asyncio.ensure_future(within(clock, 2, work()))
    await clock.advance(2.1)
    with pytest.raises(TimeoutError, match="2 s"):
        await bounded
    assert cancelled.is_set()
