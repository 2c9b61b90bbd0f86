"""An asyncio event loop in virtual time: when nothing is ready, the clock jumps to the next timer.

The library for this, looptime 0.9, is made for tests that mix simulated sleeps with real input and output: it polls a
real selector, runs 42 empty cycles before every jump, rounds times to a microsecond and knows no deadlock short of a
real-time limit. A simulation has no input from outside, so an empty schedule *is* a deadlock, and millions of jumps
must be cheap. What is left is small enough to own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# One instant in which so many loop cycles pass is a livelock; a thousand workers need a few hundred.
_CYCLES_AN_INSTANT = 200_000


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, or time stands still although the loop keeps running."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Callbacks run in asyncio's own order; timers of the same instant in the order of its heap. No threads, no I/O."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._cycles = 0
        self._selector = self

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Called by ``BaseEventLoop`` where others would sleep for ``timeout`` seconds.

        Raises:
            Deadlock: see there. It passes through ``run_until_complete``.
        """
        if timeout == 0:
            self._cycles += 1
            if self._cycles > _CYCLES_AN_INSTANT:
                raise Deadlock(f"livelock: {self._cycles} cycles at {self._now:.6f} s and time does not move")
            return []
        if timeout is None:
            raise Deadlock(f"deadlock at {self._now:.6f} s: no task is ready and no timer is set")
        # Not now + timeout: asyncio caps that at a day, and rounding could stop just short of the timer.
        self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        self._cycles = 0
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class VirtualClock:
    """``protocols.Clock`` on a virtual loop. ``jump`` moves what it shows, not the timers."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._offset = 0.0

    def now(self) -> float:
        return self._loop.time() + self._offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def jump(self, seconds: float) -> None:
        """From now on the clock is ``seconds`` (0 or more: it is monotonic) ahead of where it was."""
        self._offset += seconds


def run_virtual(main: Coroutine[Any, Any, T], loop: VirtualTimeLoop) -> T:
    """Run ``main`` to its end in virtual time; every task it leaves behind is cancelled.

    Raises:
        Deadlock: ``main`` can never end. Whatever ``main`` raises passes through.
    """
    task = loop.create_task(main)
    try:
        return loop.run_until_complete(task)
    finally:
        _end(loop)


def _end(loop: VirtualTimeLoop) -> None:
    """Cancel what is left; tasks that wait for each other for ever are given up."""
    loop._cycles = 0
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
        # The error of a task that was torn down is nobody's news.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        if left:
            loop.run_until_complete(asyncio.wait(left))
    except Deadlock:
        pass
    finally:
        loop.close()
