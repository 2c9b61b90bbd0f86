"""All scorers of one kind: routing, a cap on what one holds, repeats of what a death interrupted."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.supervisor import ActorMember, WorkerDied, all_or_cancel
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.protocols import ScorersBusy
from rlhf_cluster.supervision import Changes, Event, SupervisedSlot, SupervisionSettings, first_cause
from rlhf_cluster.watchdog import Wait

log = logging.getLogger(__name__)

# In a row, with no answer between them: one late answer is an accident, two are a scorer that hangs.
_TIMEOUTS_OF_A_DEAD_ONE = 2


@dataclass(frozen=True, slots=True)
class Retries:
    """``attempts``: calls of one group in all. ``backoff_s`` doubles from try to try, each drawn from 0.5 to 1.5 of it.

    ``max_in_flight``: calls a replica holds at once; further ones wait on the driver.
    """

    attempts: int = 3
    backoff_s: float = 0.5
    max_in_flight: int = 16


class NoScorersLeft(RuntimeError):
    """Every scorer of a kind is down and none comes back; the message names the first cause."""


class _Scorer(ActorMember):
    """One incarnation of a replica."""

    def __init__(self, name: str, incarnation: int, handle: Any, start_timeout_s: float) -> None:
        super().__init__(name, incarnation, handle)
        self.in_flight = 0
        self.timeouts = 0
        self._start_timeout_s = start_timeout_s

    async def start(self) -> None:
        # The first answer comes when the constructor has loaded the model.
        self.pulse = await self.call("ping", timeout_s=self._start_timeout_s, what="start")


class Replicas:
    """All scorers of one kind: picks one that is up and has room, and repeats what a death interrupted.

    Args:
        role: ``reward_scorer`` or ``reference_scorer``.
        create: makes the actor of one incarnation.
        timeout_s: seconds of one call, and seconds to wait for a replica with room or for the turn to be repeated.
    """

    def __init__(
        self,
        role: str,
        count: int,
        create: Callable[[], Any],
        *,
        timeout_s: float,
        supervision: SupervisionSettings,
        retries: Retries,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self._role = role
        self._count = count
        self._create = create
        self._timeout_s = timeout_s
        self._supervision = supervision
        self._retries = retries
        self._on_event = on_event
        self._clock = SystemClock()
        self._rng = random.Random()
        self._slots: list[SupervisedSlot[_Scorer]] = []
        self._changes = Changes()
        # A call that kills its scorer must not take others down with it again and again: repeats go one at a time.
        self._repeating = asyncio.Lock()
        self._waiting: list[Wait] = []
        """Calls that wait for their turn to be repeated."""

    async def start(self, timeout_s: float) -> None:
        """Create all replicas side by side and wait until each has loaded its model."""
        name = self._role.replace("_", " ")

        def slot(index: int) -> SupervisedSlot[_Scorer]:
            return SupervisedSlot(
                self._role,
                index,
                lambda incarnation: _Scorer(f"{name} {index}", incarnation, self._create(), timeout_s),
                settings=self._supervision,
                clock=self._clock,
                rng=self._rng,
                on_event=self._happened,
            )

        self._slots = [slot(index) for index in range(self._count)]
        await all_or_cancel(*(slot.start() for slot in self._slots))
        for started in self._slots:
            started.supervise()

    async def call(self, method: str, *args: Any) -> tuple[str, Any]:
        """(name of the replica, its reply).

        Raises:
            WorkerDied: replicas died in each of ``attempts`` tries. WorkerFailed: the replica raised; not repeated.
            TimeoutError: it did not answer in time. ScorersBusy: none had room or a turn for it in time.
            NoScorersLeft: none is up and none comes back.
        """
        try:
            return await self._once(method, *args)
        except WorkerDied as error:
            died = error
        for number in range(self._retries.attempts - 1):
            await self._clock.sleep(self._retries.backoff_s * 2.0**number * self._rng.uniform(0.5, 1.5))
            log.warning("%s is repeated (%d of %d): %s", method, number + 2, self._retries.attempts, died)
            await self._turn_to_repeat(method)
            try:
                return await self._once(method, *args)
            except WorkerDied as error:
                died = error
            finally:
                self._repeating.release()
        raise died

    async def _turn_to_repeat(self, method: str) -> None:
        turn = Wait(f"a repeat of {method}", self._names(), self._clock.now())
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._repeating.acquire()
        except TimeoutError:
            raise ScorersBusy(
                f"{method} had no turn to be repeated within {self._timeout_s:g} s, others are repeated on "
                f"{self._names()}"
            ) from None
        finally:
            self._waiting.remove(turn)

    async def _once(self, method: str, *args: Any) -> tuple[str, Any]:
        if not await self._changes.until(
            lambda: self._free() is not None, clock=self._clock, timeout_s=self._timeout_s
        ):
            raise ScorersBusy(f"no scorer had room for {method} within {self._timeout_s:g} s: {self._names()}")
        scorer = self._free()
        assert scorer is not None
        scorer.in_flight += 1
        try:
            reply = await scorer.call(method, *args, timeout_s=self._timeout_s, what=method)
            scorer.timeouts = 0
            return scorer.name, reply
        except TimeoutError as error:
            scorer.timeouts += 1
            if scorer.timeouts >= _TIMEOUTS_OF_A_DEAD_ONE:
                scorer.life.end(f"{scorer.timeouts} deadlines missed in a row, the last: {error}")
            raise
        finally:
            scorer.in_flight -= 1
            self._changes.tell()

    def _free(self) -> _Scorer | None:
        """The least busy replica that is up and has room."""
        up = self.members()
        if not up and not any(slot.coming_back for slot in self._slots):
            cause = first_cause(self._slots) if self._slots else "no scorer was started"
            raise NoScorersLeft(f"no {self._role.replace('_', ' ')} is left; the first cause: {cause}")
        free = [scorer for scorer in up if scorer.in_flight < self._retries.max_in_flight]
        return min(free, key=lambda scorer: scorer.in_flight, default=None)

    def _names(self) -> str:
        return ", ".join(slot.name for slot in self._slots)

    def members(self) -> list[_Scorer]:
        """The replicas that are up."""
        return [scorer for slot in self._slots if (scorer := slot.serving) is not None]

    def alive(self) -> list[_Scorer]:
        """The replicas that are up or starting."""
        return [s for slot in self._slots if (s := slot.latest) is not None and s.life.cause is None]

    def waits(self) -> list[Wait]:
        """Who waits for which replica, or for the repeat before it on one of them."""
        return [*self._waiting, *(wait for scorer in self.alive() for wait in scorer.waits())]

    async def close(self) -> None:
        """End every replica. Calls in flight fail."""
        await asyncio.gather(*(slot.end("it was closed") for slot in self._slots))

    def _happened(self, event: Event) -> None:
        self._changes.tell()
        if self._on_event is not None:
            self._on_event(event)
