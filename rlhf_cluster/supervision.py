"""Keeping one slot alive through many lives: heartbeats, death told once, back-off, a budget of restarts.

    create(1) -> start -> up ..heartbeats.. dead -> back-off -> create(2) -> start -> up ...
                   |                         |
                   +--- failed to start ---->+---> budget used up: exhausted, for good

A slot is a stable place (``rollout worker 1``); a *member* is one incarnation in it. Members are different objects, so
what an old one still says (a late reply, a version it reports) can only change the old one. Pure asyncio over a
``Clock``: what a member is (a Ray actor, a model of one) is the caller's business.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from rlhf_cluster.protocols import Clock

log = logging.getLogger(__name__)

EventKind = Literal["up", "down", "restart", "heartbeat_missed", "fenced", "exhausted", "ended"]
SlotState = Literal["starting", "up", "waiting", "exhausted", "ended"]


@dataclass(frozen=True, slots=True)
class SupervisionSettings:
    """How fast a death is noticed, and how often a slot may come back.

    ``window_s`` counts seconds in which the slot was up: one that never comes up does not regain its budget by waiting.
    """

    heartbeat_s: float = 5.0
    """Seconds between two pings, and the deadline of one."""
    heartbeat_misses: int = 3
    """Pings in a row without an answer after which a member is dead."""
    restarts: int = 5
    """Deaths of a slot within ``window_s`` that are answered by a restart; the next one leaves it down."""
    window_s: float = 900.0
    backoff_s: float = 1.0
    """Seconds before the first restart; doubles with every death in the window."""
    backoff_max_s: float = 60.0
    jitter: float = 0.25
    """Each wait is longer or shorter by up to this share, so that slots that died together do not return together."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to a slot. ``role`` is ``rollout_worker``, ``reward_scorer``, ...; ``reason`` is one line."""

    kind: EventKind
    role: str
    slot: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Death:
    at: float
    """Clock seconds."""
    served_s: float
    """Seconds the slot had been up in all its lives."""
    cause: str


class RestartBudget:
    """Says after each death how long to wait before the next life, or that there is none.

    >>> budget = RestartBudget(SupervisionSettings(restarts=2, backoff_s=1, jitter=0), random.Random(0))
    >>> [budget.spend(Death(float(i), 0.0, "killed")) for i in range(3)]
    [1.0, 2.0, None]
    """

    def __init__(self, settings: SupervisionSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self._deaths: deque[Death] = deque()

    def spend(self, death: Death) -> float | None:
        """Seconds until the next life, None when the budget is used up."""
        settings = self._settings
        while self._deaths and death.served_s - self._deaths[0].served_s > settings.window_s:
            self._deaths.popleft()
        self._deaths.append(death)
        deaths = len(self._deaths)
        if deaths > settings.restarts:
            return None
        wait = min(settings.backoff_max_s, settings.backoff_s * 2.0 ** (deaths - 1))
        return float(wait * self._rng.uniform(1 - settings.jitter, 1 + settings.jitter))

    @property
    def first(self) -> Death | None:
        """The first death of the window: what began the trouble that the budget did not outlast."""
        return self._deaths[0] if self._deaths else None


class Life:
    """One incarnation's life. Its death is told once; who waits for ``told`` hears of it in the same instant."""

    def __init__(self) -> None:
        self.cause: str | None = None
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, cause: str) -> bool:
        """Tell the death. False when it was told before; the first cause stands."""
        if self.cause is not None:
            return False
        self.cause = cause
        if not self.told.done():
            self.told.set_result(None)
        return True


class Member(Protocol):
    """One incarnation: a process and what is known of it."""

    @property
    def life(self) -> Life: ...

    async def start(self) -> None:
        """Come up, complete: after it the member may serve. Owns its deadline; raises what kept it from starting."""
        ...

    async def ping(self) -> None:
        """Returns when the member answers. Ends ``life`` when it learns of the death."""
        ...

    def kill(self) -> None:
        """End the process now, whatever state it is in. Repeatable."""
        ...


M = TypeVar("M", bound=Member)


class SupervisedSlot(Generic[M]):
    """``await start()`` gives the first life; ``supervise()`` from then on every further one, until ``end()``.

    Args:
        create: makes the member of an incarnation (counted from 1) without waiting for it.
        on_event: told of every event, after it was logged.
    """

    def __init__(
        self,
        role: str,
        index: int,
        create: Callable[[int], M],
        *,
        settings: SupervisionSettings,
        clock: Clock,
        rng: random.Random,
        on_event: Callable[[Event], None],
    ) -> None:
        self.role = role
        self.index = index
        self.incarnation = 0
        self.state: SlotState = "starting"
        self.restarting_allowed = True
        self._create = create
        self._settings = settings
        self._clock = clock
        self._on_event = on_event
        self._budget = RestartBudget(settings, rng)
        self._member: M | None = None
        self._task: asyncio.Task[None] | None = None
        self._served_s = 0.0
        self._up_since = 0.0

    @property
    def name(self) -> str:
        return f"{self.role.replace('_', ' ')} {self.index}"

    @property
    def serving(self) -> M | None:
        """The member when it is up and not known to be dead."""
        member = self._member
        return member if self.state == "up" and member is not None and member.life.cause is None else None

    @property
    def latest(self) -> M | None:
        """The newest member, alive or not."""
        return self._member

    @property
    def coming_back(self) -> bool:
        """Whether it is not serving now but will, as far as anybody knows."""
        return self.serving is None and self.state in ("starting", "up", "waiting")

    @property
    def first_death(self) -> Death | None:
        """See ``RestartBudget.first``."""
        return self._budget.first

    async def start(self) -> None:
        """The first life.

        Raises:
            What the member's ``start`` raised; it is killed and the slot ended: a first start that fails is a mistake
            in the configuration more often than an accident.
        """
        member = self._begin()
        try:
            await member.start()
        except BaseException as error:
            member.life.end(f"could not start: {error}")
            member.kill()
            self.state = "ended"
            raise
        self._up(member)

    def supervise(self) -> None:
        """Watch the member and restart it from now on."""
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.role} {self.index}")
        self._task.add_done_callback(self._supervision_ended)

    async def end(self, reason: str) -> None:
        """No more lives: stop watching and kill what runs; its pending calls fail with ``reason``."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        ended, self.state = self.state == "ended", "ended"
        if self._member is not None:
            self._member.life.end(reason)
            self._member.kill()
        if not ended:
            self.emit("ended", reason)

    def emit(self, kind: EventKind, reason: str) -> None:
        """Log one line and tell the listener."""
        event = Event(kind, self.role, self.index, self.incarnation, reason)
        level = logging.INFO if kind in ("up", "ended") else logging.WARNING
        log.log(level, "%s, incarnation %d: %s: %s", self.name, event.incarnation, kind, reason)
        self._on_event(event)

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """A slot that nobody watches any more must not look as if it would come back."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._member is not None:
            self._member.life.end(f"its supervision failed: {error}")
            self._member.kill()
        self.state = "exhausted"
        self.emit("exhausted", f"its supervision failed: {type(error).__name__}: {error}")

    def _begin(self) -> M:
        self.incarnation += 1
        self.state = "starting"
        self._member = member = self._create(self.incarnation)
        return member

    def _up(self, member: M) -> None:
        self.state = "up"
        self._up_since = self._clock.now()
        self.emit("up", "serves")

    async def _supervise(self) -> None:
        member = self._member
        assert member is not None, "supervise() comes after start()"
        while True:
            cause = await self._until_dead(member)
            # Told to those who wait before the process is ended: they name this cause and not the kill.
            member.kill()
            now = self._clock.now()
            if self.state == "up":
                self._served_s += now - self._up_since
            self.state = "waiting"
            self.emit("down", cause)
            wait_s = self._budget.spend(Death(now, self._served_s, cause)) if self.restarting_allowed else None
            if wait_s is None:
                self.state = "exhausted"
                self.emit("exhausted", self._exhausted())
                return
            await self._clock.sleep(wait_s)
            member = self._begin()
            self.emit("restart", f"after {wait_s:.1f} s, because of: {cause}")
            try:
                await member.start()
            except Exception as error:  # whatever keeps it from starting is the cause of this death
                member.life.end(f"could not start: {error}")
            else:
                self._up(member)

    async def _until_dead(self, member: M) -> str:
        """Ping until ``member`` is dead; returns the cause."""
        misses, limit = 0, self._settings.heartbeat_misses
        while member.life.cause is None:
            await self._pause(member, self._settings.heartbeat_s)
            if member.life.cause is not None:
                break
            sent = self._clock.now()
            try:
                await within(self._clock, self._settings.heartbeat_s, member.ping())
            except TimeoutError:
                if self._clock.now() - sent > 2 * self._settings.heartbeat_s:
                    # It was this process that had no turn: the answer may be here already and unread.
                    continue
                misses += 1
                self.emit("heartbeat_missed", f"{misses} of {limit}")
                if misses >= limit:
                    member.life.end(f"missed {limit} heartbeats of {self._settings.heartbeat_s:g} s in a row")
            except Exception as error:
                member.life.end(f"could not answer a heartbeat: {error}")
            else:
                misses = 0
        return member.life.cause

    async def _pause(self, member: M, seconds: float) -> None:
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait([timer, member.life.told], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _exhausted(self) -> str:
        if not self.restarting_allowed:
            return "stays down: it was being scaled away"
        first = self._budget.first
        assert first is not None
        return f"stays down: {self._settings.restarts} restarts did not help; the first cause: {first.cause}"


def first_cause(slots: Iterable[SupervisedSlot[Any]]) -> str:
    """What began it: the earliest death among those that used up the budgets of ``slots``."""
    deaths = [(slot.first_death, slot.name) for slot in slots if slot.first_death is not None]
    if not deaths:
        return "it was closed"
    death, name = min(deaths, key=lambda item: item[0].at)
    return f"{name}: {death.cause}"


async def within(clock: Clock, seconds: float, work: Awaitable[Any]) -> Any:
    """``await work`` with a deadline on ``clock``. Raises TimeoutError; ``work`` is cancelled then."""
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait([task, timer], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError(f"not done within {seconds:g} s")
        return task.result()
    finally:
        timer.cancel()
        task.cancel()
        # An error that comes while the caller is being cancelled is nobody's: looked at, so that asyncio keeps quiet.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


class Changes:
    """Wakes everyone who waits whenever something changed; who waits looks for himself whether it was his."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def tell(self) -> None:
        told, self._next = self._next, None
        if told is not None and not told.done():
            told.set_result(None)

    async def until(self, holds: Callable[[], bool], *, clock: Clock, timeout_s: float | None = None) -> bool:
        """Wait until ``holds()``; False when it does not within ``timeout_s``. What it raises passes through."""
        deadline = None if timeout_s is None else asyncio.ensure_future(clock.sleep(timeout_s))
        try:
            while not holds():
                if deadline is not None and deadline.done():
                    return False
                # Taken before anything is awaited, so that no change between the look and the wait is lost.
                if self._next is None:
                    self._next = asyncio.get_running_loop().create_future()
                await asyncio.wait(
                    [self._next] if deadline is None else [self._next, deadline], return_when=asyncio.FIRST_COMPLETED
                )
            return True
        finally:
            if deadline is not None:
                deadline.cancel()
