"""The no-progress watchdog: when nothing has moved for too long it says who waits for whom, dumps stacks, and ends it.

Every wait of the system has a deadline of its own that names the party. This is the net below them: it catches what
none of them sees (a lost wake-up, two parts that each wait politely for the other).
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cluster.protocols import Clock
from rlhf_cluster.supervision import within

log = logging.getLogger(__name__)

_LOOKS_A_DEADLINE = 20


@dataclass(frozen=True, slots=True)
class Wait:
    """``waiter`` has been waiting for ``party`` since ``since`` (clock seconds)."""

    waiter: str
    party: str
    since: float


class NoProgress(RuntimeError):
    """Nothing moved for a whole deadline; the message names the waits."""


class Watchdog:
    """``run`` returns never: it raises ``NoProgress``, or is cancelled.

    Args:
        progress: any value that changes when the run moves (steps, groups generated and scored, versions published).
        waits: who waits for whom at the moment.
        deadline_s: seconds without a change of ``progress`` after which the run is stuck.
        dump_stacks: name -> stacks of the parts that can be reached; it may hang or fail, the verdict stands.
        dump_s: seconds for ``dump_stacks``.
        on_look: told at every look for how many seconds nothing has moved.
    """

    def __init__(
        self,
        *,
        progress: Callable[[], Hashable],
        waits: Callable[[], Sequence[Wait]],
        deadline_s: float,
        clock: Clock,
        dump_stacks: Callable[[], Awaitable[Mapping[str, str]]],
        dump_s: float = 30.0,
        on_look: Callable[[float], None] = lambda idle_s: None,
    ) -> None:
        self._progress = progress
        self._waits = waits
        self._deadline_s = deadline_s
        self._clock = clock
        self._dump_stacks = dump_stacks
        self._dump_s = dump_s
        self._on_look = on_look

    async def run(self) -> None:
        """Look at ``progress`` some twenty times a deadline.

        Raises:
            NoProgress: after the waits and the stacks were logged.
        """
        look_s = self._deadline_s / _LOOKS_A_DEADLINE
        seen, idle_s, looked = self._progress(), 0.0, self._clock.now()
        while True:
            await self._clock.sleep(look_s)
            now = self._clock.now()
            # A machine that was suspended, or a driver that had no turn, has not watched: one look counts one interval.
            idle_s, looked = idle_s + min(now - looked, 2 * look_s), now
            current = self._progress()
            if current != seen:
                seen, idle_s = current, 0.0
            self._on_look(idle_s)
            if idle_s >= self._deadline_s:
                raise await self._verdict(now)

    async def _verdict(self, now: float) -> NoProgress:
        waits = list(self._waits())
        lines = describe(waits, now)
        for line in lines:
            log.error("no progress: %s", line)
        try:
            stacks = await within(self._clock, self._dump_s, self._dump_stacks())
        except Exception as error:  # the stacks only help to explain; without them the run is as stuck as before
            log.error("no stacks: %s: %s", type(error).__name__, error)
        else:
            for name, text in stacks.items():
                log.error("stacks of %s:\n%s", name, text)
        told = "; ".join(lines) or "and nobody says that he waits"
        return NoProgress(f"nothing moved for {self._deadline_s:g} s: {told}. {blame(waits)}")


def describe(waits: Sequence[Wait], now: float) -> list[str]:
    """One line a wait, the longest first.

    >>> describe([Wait("group 1", "worker 0", 2.0), Wait("train", "group 1", 1.0)], 9.0)
    ['train waits for group 1 since 8 s', 'group 1 waits for worker 0 since 7 s']
    """
    return [
        f"{wait.waiter} waits for {wait.party} since {now - wait.since:.0f} s"
        for wait in sorted(waits, key=lambda wait: wait.since)
    ]


def blame(waits: Sequence[Wait]) -> str:
    """The parties at the end of every chain, or that the chains close on themselves.

    >>> blame([Wait("train", "group 1", 0.0), Wait("group 1", "rollout worker 0", 0.0)])
    'At the end of it stands rollout worker 0'
    """
    waiters = {wait.waiter for wait in waits}
    ends = sorted({wait.party for wait in waits} - waiters)
    if ends:
        return f"At the end of it stands {', '.join(ends)}"
    return "They wait for each other in a circle" if waits else "Nothing is known to be waited for"


def own_stacks() -> str:
    """Python stacks of all threads of this process and of everything that is suspended in an ``await``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    parts += [f"suspended {chain[0].__qualname__}:\n{_where(chain)}" for chain in _suspended()]
    return "\n".join(parts)


def _suspended() -> list[list[Any]]:
    """Chains of coroutines, each awaiting the next, outermost first.

    Found through the garbage collector: ``Task.get_stack`` knows one frame of a suspended task, and tasks whose
    outermost coroutine is compiled, as in a Ray actor, show none at all.
    """
    waiting = [
        coroutine
        for coroutine in gc.get_objects()
        if type(coroutine) is types.CoroutineType and coroutine.cr_frame is not None and not coroutine.cr_running
    ]
    awaited = {id(coroutine.cr_await) for coroutine in waiting}
    chains = []
    for outermost in waiting:
        if id(outermost) in awaited:
            continue
        chain: list[Any] = [outermost]
        while type(inner := chain[-1].cr_await) is types.CoroutineType:
            chain.append(inner)
        chains.append(chain)
    return chains


def _where(chain: list[Any]) -> str:
    frames = [(coroutine.cr_frame, coroutine.cr_frame.f_lineno) for coroutine in chain if coroutine.cr_frame]
    return "".join(traceback.StackSummary.extract(iter(frames)).format())
