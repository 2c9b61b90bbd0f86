"""The no-progress watchdog in time that only the test moves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import pytest

from rlhf_cluster.watchdog import NoProgress, Wait, Watchdog, blame, own_stacks
from tests.unit.builders import ManualClock, async_test

WAITS = [Wait("group 7", "rollout worker 1", 3.0), Wait("train", "group 7", 2.0)]


class JumpingClock(ManualClock):
    """Shows ``jumped`` seconds more than its sleepers have slept, as after a suspended machine."""

    jumped = 0.0

    def now(self) -> float:
        return super().now() + self.jumped


class Bench:
    def __init__(self, waits: list[Wait] = WAITS) -> None:
        self.clock = JumpingClock()
        self.done = 0
        self.dumps = 0
        self.dump_hangs = False
        self.idle: list[float] = []
        self.watchdog = Watchdog(
            progress=lambda: self.done,
            waits=lambda: waits,
            deadline_s=100,
            clock=self.clock,
            dump_stacks=self._dump,
            dump_s=7,
            on_look=self.idle.append,
        )

    async def _dump(self) -> Mapping[str, str]:
        self.dumps += 1
        if self.dump_hangs:
            await asyncio.Event().wait()
        return {"rollout worker 1": "File engine.py, line 5, in step"}


@async_test
async def test_a_run_that_stands_still_is_explained_before_it_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with caplog.at_level(logging.ERROR, logger="rlhf_cluster.watchdog"):
        running = asyncio.ensure_future(bench.watchdog.run())
        await bench.clock.advance(99)
        assert not running.done()
        await bench.clock.advance(1)
        with pytest.raises(NoProgress) as raised:
            await running
    assert bench.idle == [5.0 * look for look in range(1, 21)]
    assert str(raised.value) == (
        "nothing moved for 100 s: train waits for group 7 since 98 s; group 7 waits for rollout worker 1 since 97 s. "
        "At the end of it stands rollout worker 1"
    )
    messages = [record.getMessage() for record in caplog.records]
    assert messages[:2] == [
        "no progress: train waits for group 7 since 98 s",
        "no progress: group 7 waits for rollout worker 1 since 97 s",
    ]
    assert messages[2] == "stacks of rollout worker 1:\nFile engine.py, line 5, in step"


@async_test
async def test_a_run_that_moves_now_and_then_is_left_alone() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.watchdog.run())
    for _ in range(20):
        await bench.clock.advance(95)
        bench.done += 1
    assert not running.done() and bench.dumps == 0
    running.cancel()


@async_test
async def test_a_dump_that_hangs_does_not_keep_the_verdict_back() -> None:
    bench = Bench()
    bench.dump_hangs = True
    running = asyncio.ensure_future(bench.watchdog.run())
    await bench.clock.advance(106)
    assert bench.dumps == 1 and not running.done()
    await bench.clock.advance(2)
    with pytest.raises(NoProgress):
        await running


@async_test
async def test_a_machine_that_slept_for_hours_has_not_stood_still() -> None:
    bench = Bench()
    running = asyncio.ensure_future(bench.watchdog.run())
    await bench.clock.advance(50)
    bench.clock.jumped = 7200
    await bench.clock.advance(10)
    assert not running.done()
    await bench.clock.advance(60)
    with pytest.raises(NoProgress):
        await running


def test_waits_that_close_a_circle_have_no_single_culprit() -> None:
    assert blame([Wait("feed", "train", 0.0), Wait("train", "feed", 0.0)]) == "They wait for each other in a circle"
    assert blame([]) == "Nothing is known to be waited for"


@async_test
async def test_stacks_of_this_process_name_threads_and_what_is_suspended_where() -> None:
    async def stuck_in_this_function() -> None:
        await asyncio.Event().wait()

    async def outer_function() -> None:
        await stuck_in_this_function()

    task = asyncio.create_task(outer_function())
    await asyncio.sleep(0)
    text = own_stacks()
    task.cancel()
    assert "thread MainThread" in text
    stack = text.partition("outer_function:\n")[2]
    assert 0 < stack.index("in outer_function") < stack.index("in stuck_in_this_function")
    assert text.count("in stuck_in_this_function") == 1
