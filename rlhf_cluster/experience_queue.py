"""Versioned experience queue: admission, ordering, staleness, eviction, ledger.

B = groups_per_batch, K = max_staleness, v = learner version. A group is *due* at the version whose batch must train
it at the latest: its admitted start version + K while it is dispatched, its min_version + K once it was put. Each
version is a slot for B groups. Admission keeps the schedule feasible, so that earliest-due-first trains everything in
time: 0 <= v - min_version <= K for every token handed out, and at most (K+1)*B groups are outstanding.

Worked example, K=2, B=2, v=0. Four dispatched groups are due at 1, two ready groups at 2. The batch for 0 must hold
n(1) = 4 - (1-0)*2 = 2 groups due by 1; training the two ready ones would leave four groups for the single slot of
version 1. So ``next_batch`` waits for two of the four, although nothing is due now.

    admit --> dispatched -- put --> queued -- next_batch --> trained -- advance(v+1): closed
                  |                    |                        +------ advance(v), skipped step: failed
                  +---- retire --------+--> filtered, failed, aborted, surplus, stale

The queue is used from one event loop: only ``next_batch`` waits, and the controller is its only caller.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlhf_cluster.group_codec import group_from_json, group_to_json
from rlhf_cluster.ledger import RETIRE_REASONS, UNDELIVERED, Count, Ledger
from rlhf_cluster.protocols import Clock
from rlhf_cluster.schedule import Schedule
from rlhf_cluster.types import Prompt, ScoredGroup

# A timer that fires so much later than asked, as a share of the group deadline, was overtaken by a jump of the clock.
_STALL_SHARE = 0.1


class NotAdmissible(RuntimeError):
    """Admitting now would make the schedule infeasible; try again after ``advance``, ``retire`` or a newer worker."""


class BatchTimeout(TimeoutError):
    """The batch for ``version`` cannot form in time; ``group_ids`` are the overdue groups it waits for.

    No group ids: too few groups are outstanding to fill the batch, and for a whole deadline there was room and nothing
    was admitted.
    """

    def __init__(self, version: int, group_ids: tuple[str, ...]) -> None:
        self.version = version
        self.group_ids = group_ids
        waited_for = f"overdue groups {', '.join(group_ids)}" if group_ids else "new groups: nothing was admitted"
        super().__init__(f"batch for version {version}: deadline passed waiting for {waited_for}")


class PutResult(StrEnum):
    QUEUED = "queued"
    DUPLICATE = "duplicate"
    """A reply for an attempt that is over, or that was put already. Counted, never trained."""
    STALE = "stale"
    """Too old for every batch that is still open. The attempt is retired; its prompt may be re-issued."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One dispatch of one issue of a prompt; ``attempt`` counts from 0 per group id.

    ``start_version`` is what the chosen worker held at admission: a lower bound for every token of the group.
    ``draw`` counts the attempts before it that failed or came too late. Seeds go by it, so that what a stop or a lost
    learner took back is sampled again as it was.
    """

    group_id: str
    attempt: int
    start_version: int
    draw: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Entry:
    """An outstanding attempt, or one of the batch in training. ``order`` numbers admissions."""

    attempt: Attempt
    order: int
    admitted_at: float
    due: int
    group: ScoredGroup | None = None

    @property
    def state(self) -> str:
        return "dispatched" if self.group is None else "queued"

    @property
    def size(self) -> Count:
        if self.group is None:
            return UNDELIVERED
        return Count(1, len(self.group.rollouts), self.group.n_tokens)


class ExperienceQueue:
    """See the module docstring. The learner version starts at 0; ``advance`` sets it, also on resume.

    Args:
        groups_per_batch: B, groups trained by one learner step.
        max_staleness: K, versions; 0 is synchronous training.
        clock: where deadlines are measured.
        group_deadline_s: seconds from admission after which a group that the learner waits for is overdue.
    """

    def __init__(self, *, groups_per_batch: int, max_staleness: int, clock: Clock, group_deadline_s: float) -> None:
        if groups_per_batch < 1:
            raise ValueError(f"queue.groups_per_batch must be at least 1, got {groups_per_batch}")
        if max_staleness < 0:
            raise ValueError(f"queue.max_staleness must be 0 (synchronous) or more, got {max_staleness}")
        if not group_deadline_s > 0:
            raise ValueError(f"queue.group_deadline_s must be more than 0 seconds, got {group_deadline_s}")
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.group_deadline_s = group_deadline_s
        self.ledger = Ledger()
        self._clock = clock
        self._version = 0
        self._admissions = 0
        self._entries: dict[str, _Entry] = {}  # by group id
        self._dispatched: dict[str, _Entry] = {}  # those not yet put, in admission order: the oldest comes first
        self._in_training: dict[str, _Entry] | None = None  # by group id, in admission order
        self._last_attempt: dict[str, int] = {}  # highest attempt admitted per group id: tells late from unknown
        self._draws: dict[str, int] = {}  # attempts per group id that failed or came too late, if any
        self._places: dict[str, int] = {}  # the order that the next attempt of a group takes, when it has one already
        self._is_over: Callable[[str], bool] = lambda group_id: False  # true for what ``forget`` dropped from it
        self._schedule = Schedule(groups_per_batch, max_staleness)
        self._last_moved_at = -math.inf  # the last admission, or the last room made by a retirement
        self._waiting_since: float | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def learner_version(self) -> int:
        return self._version

    @property
    def outstanding(self) -> int:
        """Groups admitted and neither trained nor retired."""
        return len(self._entries)

    @property
    def in_training(self) -> int:
        """Groups of the batch that was handed out and is not closed yet."""
        return len(self._in_training or ())

    @property
    def queued(self) -> int:
        """Groups put and waiting to be trained."""
        return self.ledger.counts["queued"].groups

    @property
    def oldest_lag(self) -> int:
        """Versions between the learner and the oldest queued token; 0 when nothing is queued."""
        due = self._schedule.earliest_ready
        return 0 if due is None else self._version + self.max_staleness - due

    @property
    def first_open(self) -> int:
        """The first version whose batch is not taken yet: the next one while a batch is in training."""
        return self._version if self._in_training is None else self._version + 1

    def can_admit(self, start_version: int) -> bool:
        """Whether a group may start now on a worker that holds ``start_version`` (a lower bound)."""
        last = self._version + self.max_staleness
        fits = self._schedule.fits(start_version + self.max_staleness, self.first_open, last)
        return start_version >= 0 and fits

    def admit(self, prompt: Prompt, start_version: int, *, group_id: str | None = None) -> Attempt:
        """Take a slot for one dispatch of ``prompt``; the next attempt of its group id.

        ``group_id`` names one issue of a prompt in one epoch. Give it when prompt ids repeat between epochs;
        by default it is the prompt id.

        Raises:
            NotAdmissible: the schedule would not stay feasible (see ``can_admit``).
            ValueError: an attempt of this group id is outstanding or in the batch in training, or it was forgotten.
        """
        group_id = prompt.prompt_id if group_id is None else group_id
        if group_id in self._entries or group_id in (self._in_training or ()):
            current = self._last_attempt[group_id]
            raise ValueError(
                f"group {group_id}: attempt {current} is outstanding or in training; it must be retired, or its batch "
                "closed by advance(), before the prompt is issued again"
            )
        if not self.can_admit(start_version):
            raise NotAdmissible(
                f"group {group_id}: start version {start_version} is not admissible at learner version "
                f"{self._version} (first open batch {self.first_open}, max_staleness {self.max_staleness}, "
                f"{self.outstanding} groups outstanding, {self.groups_per_batch} a batch)"
            )
        last_attempt = self._last_attempt.get(group_id, -1)
        if last_attempt < 0 and self._is_over(group_id):
            raise ValueError(
                f"group {group_id} is over: forget() dropped its attempts, so a late reply could pass for a new one; "
                "forget only what no checkpoint that is still there may issue again"
            )
        attempt = Attempt(group_id, last_attempt + 1, start_version, self._draws.get(group_id, 0))
        self._last_attempt[group_id] = attempt.attempt
        self._last_moved_at = self._clock.now()
        order = self._places.pop(group_id, None)
        if order is None:
            order, self._admissions = self._admissions, self._admissions + 1
        self._insert(_Entry(attempt, order, self._last_moved_at, start_version + self.max_staleness))
        self.ledger.admit()
        self._settle()
        return attempt

    def put(self, group: ScoredGroup) -> PutResult:
        """Deliver the scored group of a dispatched attempt. Safe to repeat after a lost reply.

        Raises:
            ValueError: the group was never admitted, or its versions cannot be true (below the admitted start
                version, above the learner's). Nothing is queued and the attempt stays dispatched.
        """
        entry = self._entries.get(group.group_id)
        size = Count(1, len(group.rollouts), group.n_tokens)
        if entry is None or entry.attempt.attempt != group.attempt or entry.group is not None:
            last_attempt = self._last_attempt.get(group.group_id, -1)
            known = group.attempt <= last_attempt or (last_attempt < 0 and self._is_over(group.group_id))
            if not known or group.attempt < 0:
                raise ValueError(f"group {group.group_id}: attempt {group.attempt} was never admitted")
            self.ledger.duplicate(size)
            self._settle()
            return PutResult.DUPLICATE
        start_version = entry.attempt.start_version
        if group.min_version < start_version or group.max_version > self._version:
            raise ValueError(
                f"group {group.group_id}: sampled under versions {group.min_version} to {group.max_version}, which "
                f"must lie between its start version {start_version} and the learner version {self._version}; "
                "the worker reports versions it did not hold"
            )
        due = group.min_version + self.max_staleness
        if due < self.first_open:
            self._remove(entry)
            self._drawn_in_vain(group.group_id)
            self.ledger.deliver(size, "stale")
            self._settle()
            self._wake()
            return PutResult.STALE
        self._remove(entry)
        entry.due, entry.group = due, group
        self._insert(entry)
        self.ledger.deliver(size, "queued")
        self._settle()
        # A put or an admission that completes no batch changes nothing for a learner that waits: what is missing and
        # what may still supply it move together. Its timer looks at the deadlines.
        if self._waiter is not None and not self._schedule.unmet(self._version):
            self._wake()
        return PutResult.QUEUED

    def retire(self, group_id: str, attempt: int, reason: str) -> bool:
        """End an outstanding attempt without training it; its capacity is free at once.

        Returns False, and changes nothing, when that attempt is over already (trained, retired or superseded).

        Raises:
            ValueError: ``reason`` is not one of RETIRE_REASONS.
        """
        if reason not in RETIRE_REASONS:
            raise ValueError(f"retire reason {reason!r} of group {group_id} is not one of {RETIRE_REASONS}")
        entry = self._entries.get(group_id)
        if entry is None or entry.attempt.attempt != attempt:
            return False
        self.ledger.move(entry.size, entry.state, reason)
        self._remove(entry)
        if reason in ("failed", "stale"):
            self._drawn_in_vain(group_id)
        self._last_moved_at = self._clock.now()
        self._settle()
        self._wake()
        return True

    async def next_batch(self) -> list[ScoredGroup]:
        """The B groups that the learner trains at its current version, in admission order; they count as trained.

        Waits for the groups that the schedule needs. Cancelling it loses nothing.

        Raises:
            BatchTimeout: see there. Ready groups stay queued; retire the named ones, re-issue them, call again.
            RuntimeError: the batch before is not closed by ``advance``, or another call is waiting.
        """
        if self._in_training is not None:
            raise RuntimeError(f"the batch for version {self._version} is in training; close it with advance() first")
        if self._waiter is not None:
            raise RuntimeError("another next_batch() is waiting; the learner has one consumer")
        if self._waiting_since is None:
            self._waiting_since = self._clock.now()
        while unmet := self._schedule.unmet(self._version):
            asked_at = self._clock.now()
            seconds = self._next_deadline(unmet, self._waiting_since) - asked_at
            changed = await self._sleep_or_change(seconds)
            late = self._clock.now() - asked_at - seconds
            if late > (0 if changed else _STALL_SHARE * self.group_deadline_s):
                # The clock jumped, as after a suspended host: nobody else had that time to admit anything either.
                self._waiting_since = self._clock.now()
        return self._hand_out()

    def advance(self, learner_version: int) -> list[Attempt]:
        """Close the batch in training and move the learner to ``learner_version``; call it before publishing.

        A higher version: the batch stepped, it stays trained. The same version: the step was skipped, the batch is
        retired as failed and the slots of this version open again. Queued groups that no open batch may train any
        more are retired as stale (only a version that jumped, as after a learner failover, leaves any). A dispatched
        group stays until it is put, because in-flight updates may have made all its tokens newer than its start.

        Returns:
            The attempts that this call retired; their prompts may be re-issued.

        Raises:
            ValueError: the version would go back.
        """
        if learner_version < self._version:
            raise ValueError(f"learner version cannot go back from {self._version} to {learner_version}")
        retired = []
        if self._in_training is not None and learner_version == self._version:
            for entry in self._in_training.values():
                self.ledger.move(entry.size, "trained", "failed")
                retired.append(entry.attempt)
        self._in_training = None
        self._waiting_since = None
        self._version = learner_version
        earliest = self._schedule.earliest_ready
        if earliest is not None and earliest < self.first_open:
            for entry in list(self._entries.values()):
                if entry.group is not None and entry.due < self.first_open:
                    self.ledger.move(entry.size, "queued", "stale")
                    self._remove(entry)
                    retired.append(entry.attempt)
        for attempt in retired:
            self._drawn_in_vain(attempt.group_id)
        self._settle()
        self._wake()
        return retired

    def fail_over(self, learner_version: int) -> None:
        """The learner was restored from a checkpoint and goes on as ``learner_version``, above every version so far.

        Its batch in training is failed and every outstanding attempt aborted, so the cursor of the checkpoint issues
        their prompts again. Ledger and attempt numbers go on: a late reply from before is a duplicate.

        Raises:
            ValueError: ``learner_version`` is not above the version now.
        """
        if learner_version <= self._version:
            raise ValueError(f"a restored learner goes on above version {self._version}, got {learner_version}")
        draws = dict(self._draws)
        self.advance(self._version)
        for entry in list(self._entries.values()):
            self.retire(entry.attempt.group_id, entry.attempt.attempt, "aborted")
        self._places.clear()
        self.advance(learner_version)
        self._draws = draws

    def resume(self, learner_version: int) -> set[str]:
        """Go on from ``load_state_dict`` as ``learner_version``, at least the saved one.

        Nobody works on the dispatched attempts any more: they are aborted. Groups too old for ``learner_version`` leave
        as stale. The next attempt of each takes its place in the order of admission, so that batches form as they would
        have.

        Returns:
            The group ids that are still queued.
        """
        draws = dict(self._draws)
        places = {group_id: entry.order for group_id, entry in self._entries.items()}
        gone = self.dispatched()
        for attempt in gone:
            self.retire(attempt.group_id, attempt.attempt, "aborted")
        gone += self.advance(learner_version)
        self._places |= {attempt.group_id: places[attempt.group_id] for attempt in gone}
        self._draws = draws
        return set(self._entries)

    def forget(self, is_over: Callable[[str], bool]) -> int:
        """Drop the attempt numbers of ended groups for which ``is_over(group_id)`` holds; returns how many.

        Otherwise one number a group is kept for the whole run, here and in every state. What is over must never be
        issued again, not even by a run that goes back to a checkpoint: ``PromptCursor.passed`` with the frontier of
        the oldest checkpoint says that. Replies of forgotten groups still count as duplicates, and admitting one is
        refused, so nothing is trained twice. The last ``is_over`` given goes on telling them from unknown groups.
        """
        held = self._entries.keys() | (self._in_training or {}).keys()
        over = [group_id for group_id in self._last_attempt if group_id not in held and is_over(group_id)]
        for group_id in over:
            del self._last_attempt[group_id]
            self._draws.pop(group_id, None)
        self._is_over = is_over
        return len(over)

    def dispatched(self) -> list[Attempt]:
        """Attempts admitted and not yet put, in admission order."""
        return [entry.attempt for entry in self._dispatched.values()]

    def state_dict(self) -> dict[str, Any]:
        """A JSON-serialisable copy. A batch handed out but not closed is written as queued."""
        ledger = Ledger()
        ledger.load_state_dict(self.ledger.state_dict())
        in_training = (self._in_training or {}).values()
        for entry in in_training:
            ledger.move(entry.size, "trained", "queued")
        now = self._clock.now()
        return {
            "groups_per_batch": self.groups_per_batch,
            "max_staleness": self.max_staleness,
            "learner_version": self._version,
            "admissions": self._admissions,
            "last_attempt": dict(self._last_attempt),
            "draws": dict(self._draws),
            "places": dict(self._places),
            "ledger": ledger.state_dict(),
            "entries": [
                {
                    "group_id": entry.attempt.group_id,
                    "attempt": entry.attempt.attempt,
                    "start_version": entry.attempt.start_version,
                    "order": entry.order,
                    "age_s": now - entry.admitted_at,
                    "group": None if entry.group is None else group_to_json(entry.group),
                }
                for entry in [*in_training, *self._entries.values()]
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly; a group keeps the age it had, measured on this queue's clock.

        Raises:
            ValueError: the state was saved under another batch size or staleness bound, which its schedule rests on.
        """
        for name in ("groups_per_batch", "max_staleness"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"queue.{name} is {getattr(self, name)} but the saved queue was built with {state[name]}; "
                    "resume with the saved value"
                )
        self.ledger.load_state_dict(state["ledger"])
        self._version = state["learner_version"]
        self._admissions = state["admissions"]
        self._last_attempt = dict(state["last_attempt"])
        self._draws = dict(state.get("draws", {}))
        self._places = dict(state.get("places", {}))
        self._is_over = lambda group_id: False
        self._in_training = None
        self._last_moved_at = -math.inf
        self._waiting_since = None
        self._entries, self._dispatched = {}, {}
        self._schedule.clear()
        now = self._clock.now()
        for saved in state["entries"]:
            attempt = Attempt(saved["group_id"], saved["attempt"], saved["start_version"])
            group = None if saved["group"] is None else group_from_json(saved["group"])
            oldest = attempt.start_version if group is None else group.min_version
            entry = _Entry(attempt, saved["order"], now - saved["age_s"], oldest + self.max_staleness, group)
            self._insert(entry)
        self._settle()
        self._wake()

    def _next_deadline(self, unmet: list[tuple[float, int]], waiting_since: float) -> float:
        """When the wait must be looked at again if nothing changes. Raises BatchTimeout when it has no hope left.

        An overdue group is waited for when groups that are not overdue cannot supply what is missing without it.
        """
        now = self._clock.now()
        overdue: list[_Entry] = []
        first_fresh = math.inf
        for entry in self._dispatched.values():
            if now < entry.admitted_at + self.group_deadline_s:
                first_fresh = entry.admitted_at + self.group_deadline_s
                break
            overdue.append(entry)
        hopeless = [bound for bound, missing in unmet if overdue and self._fresh_by(bound, overdue) < missing]
        named = tuple(entry.attempt.group_id for entry in overdue if hopeless and entry.due <= max(hopeless))
        starved_at = max(waiting_since, self._last_moved_at) + self.group_deadline_s
        starved = self.outstanding < self.groups_per_batch
        if named or (starved and now >= starved_at):
            self._waiting_since = None
            raise BatchTimeout(self._version, named)
        return min(starved_at, first_fresh)

    def _fresh_by(self, bound: float, overdue: list[_Entry]) -> int:
        """Dispatched groups due by ``bound`` that are not overdue."""
        return self._schedule.unready(bound) - sum(entry.due <= bound for entry in overdue)

    async def _sleep_or_change(self, seconds: float) -> bool:
        """Whether the queue changed before the time was over."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        sleeper = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((waiter, sleeper), return_when=asyncio.FIRST_COMPLETED)
            if sleeper.done():
                sleeper.result()
            return not sleeper.done()
        finally:
            self._waiter = None
            waiter.cancel()
            sleeper.cancel()

    def _hand_out(self) -> list[ScoredGroup]:
        ready = [entry for entry in self._entries.values() if entry.group is not None]
        ready.sort(key=lambda entry: (entry.due, entry.order))
        batch = sorted(ready[: self.groups_per_batch], key=lambda entry: entry.order)
        for entry in batch:
            self.ledger.move(entry.size, "queued", "trained")
            self._remove(entry)
        self._in_training = {entry.attempt.group_id: entry for entry in batch}
        self._waiting_since = None
        self._settle()
        return [entry.group for entry in batch if entry.group is not None]

    def _drawn_in_vain(self, group_id: str) -> None:
        self._draws[group_id] = self._draws.get(group_id, 0) + 1

    def _insert(self, entry: _Entry) -> None:
        self._schedule.add(entry.due, ready=entry.group is not None)
        self._entries[entry.attempt.group_id] = entry
        if entry.group is None:
            self._dispatched[entry.attempt.group_id] = entry

    def _remove(self, entry: _Entry) -> None:
        self._schedule.remove(entry.due, ready=entry.group is not None)
        del self._entries[entry.attempt.group_id]
        if entry.group is None:
            del self._dispatched[entry.attempt.group_id]

    def _settle(self) -> None:
        """After every event: the ledger closes and agrees with the groups held."""
        self.ledger.check()
        held = self.ledger.counts["dispatched"].groups + self.queued
        if held != self.outstanding:
            raise AssertionError(f"ledger counts {held} outstanding groups, the queue holds {self.outstanding}")

    def _wake(self) -> None:
        """Let the waiting learner look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
