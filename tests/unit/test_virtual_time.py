"""The event loop of simulations: time jumps, order is asyncio's, and a run that cannot end is reported."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlhf_cluster.simulation.virtual_time import Deadlock, VirtualClock, VirtualTimeLoop, run_virtual


def test_a_day_passes_in_no_time_and_sleepers_wake_in_order() -> None:
    loop = VirtualTimeLoop()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, loop.time()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 86_400.0), sleeper("early", 0.5), sleeper("middle", 3600.0))

    started = time.perf_counter()
    run_virtual(main(), loop)
    assert time.perf_counter() - started < 1
    assert woken == [("early", 0.5), ("middle", 3600.0), ("late", 86_400.0)]


def test_a_timer_beyond_a_day_is_reached_and_no_timer_is_reached_early() -> None:
    loop = VirtualTimeLoop()

    async def main() -> float:
        for _ in range(1000):
            before = loop.time()
            await asyncio.sleep(0.1)
            assert loop.time() >= before + 0.1
        await asyncio.sleep(1e6)
        return loop.time()

    assert run_virtual(main(), loop) == pytest.approx(100.0 + 1e6)


def test_a_wait_that_nothing_can_end_is_a_deadlock() -> None:
    loop = VirtualTimeLoop()

    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"deadlock at 2\.5"):
        run_virtual(main(), loop)


def test_tasks_that_keep_each_other_busy_in_one_instant_are_a_livelock() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="livelock"):
        run_virtual(main(), VirtualTimeLoop())


def test_what_the_run_leaves_behind_is_cancelled_and_its_error_passes_through() -> None:
    loop = VirtualTimeLoop()
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append("background")

    async def main() -> None:
        loop.create_task(background())
        await asyncio.sleep(1.0)
        raise KeyError("first cause")

    with pytest.raises(KeyError, match="first cause"):
        run_virtual(main(), loop)
    assert ended == ["background"]
    assert loop.time() == 1.0
    assert loop.is_closed()


def test_a_jump_moves_what_the_clock_shows_and_no_timer() -> None:
    loop = VirtualTimeLoop()
    clock = VirtualClock(loop)

    async def main() -> None:
        loop.call_later(1.0, clock.jump, 100.0)
        await clock.sleep(3.0)
        assert clock.now() == 103.0
        assert loop.time() == 3.0

    run_virtual(main(), loop)
