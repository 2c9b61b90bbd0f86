"""The queue alone as a state machine: hypothesis looks for histories in which a decision differs from brute force.

The model keeps due dates and ages and searches all batches; it shares no arithmetic with the queue.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlhf_cluster.experience_queue import Attempt, BatchTimeout, ExperienceQueue, PutResult
from tests.unit.builders import ManualClock, make_group, make_prompt
from tests.unit.test_experience_queue_model import feasible, possible_batches

DEADLINE_S = 10.0
# Admit, put, wait for a batch, close it after a step; the number says which, or how.
EVENTS = st.lists(st.tuples(st.sampled_from("aaapppws"), st.integers(0, 99)), min_size=20, max_size=60)


class QueueMachine(RuleBasedStateMachine):
    """Groups are named by prompt; ``due`` holds every outstanding one, ``ready`` those that were put."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.due: dict[str, int] = {}
        self.ready: set[str] = set()
        self.attempts: dict[str, Attempt] = {}
        self.admitted_at: dict[str, float] = {}
        self.order: list[str] = []
        self.training: list[str] = []
        self.over: list[Attempt] = []
        self.trained: set[tuple[str, int]] = set()
        self.waiting_since: float | None = None
        self.last_moved = -math.inf
        self.next_name = 0

    @initialize(batch=st.integers(1, 3), staleness=st.integers(0, 3), events=EVENTS)
    def make(self, batch: int, staleness: int, events: list[tuple[str, int]]) -> None:
        """Start with ordinary work: without it histories hardly get past the first version."""
        self.batch, self.staleness = batch, staleness
        self.clock = ManualClock()
        self.queue = self.new_queue()
        self.work(events)

    def new_queue(self) -> ExperienceQueue:
        return ExperienceQueue(
            groups_per_batch=self.batch,
            max_staleness=self.staleness,
            clock=self.clock,
            group_deadline_s=DEADLINE_S,
        )

    def teardown(self) -> None:
        self.loop.close()

    @property
    def version(self) -> int:
        return self.queue.learner_version

    @property
    def first_open(self) -> int:
        return self.version + bool(self.training)

    @property
    def unready(self) -> list[str]:
        return [name for name in self.order if name in self.due and name not in self.ready]

    # -- events ------------------------------------------------------------------------------------------------------

    @rule(events=EVENTS)
    def work(self, events: list[tuple[str, int]]) -> None:
        for event, number in events:
            if event == "a":
                self.admit(0 if number < 70 else number % 4, again=number % 3 == 0)
            elif event == "p" and self.unready:
                self.put(number, younger=0 if number < 70 else 1)
            elif event == "w" and not self.training:
                self.wait_for_a_batch(0.0)
            elif event == "s" and self.training:
                self.close(stepped=number < 90)

    @rule(age=st.integers(-1, 4), again=st.booleans())
    def admit(self, age: int, again: bool) -> None:
        """A worker ``age`` versions behind asks, for a new prompt or for one that failed before."""
        start = self.version - age
        due = start + self.staleness
        allowed = 0 <= start <= self.version and feasible([*self.due.values(), due], self.first_open, self.batch)
        assert self.queue.can_admit(start) == allowed
        if not allowed:
            return
        free = [attempt.group_id for attempt in self.over if attempt.group_id not in {*self.due, *self.training}]
        name = free[0] if again and free else f"p{self.next_name}"
        self.next_name += 1
        before = self.attempts.get(name)
        attempt = self.queue.admit(make_prompt(name), start)
        assert attempt == Attempt(name, before.attempt + 1 if before else 0, start)
        self.due[name], self.attempts[name] = due, attempt
        self.admitted_at[name] = self.last_moved = self.clock.now()
        self.order = [other for other in self.order if other != name] + [name]

    @precondition(lambda self: self.unready)
    @rule(which=st.integers(0, 99), younger=st.integers(0, 3))
    def put(self, which: int, younger: int) -> None:
        """A group comes back; in-flight updates may have made its oldest token younger than its admission."""
        name = self.unready[which % len(self.unready)]
        attempt = self.attempts[name]
        oldest = min(attempt.start_version + younger, self.version)
        assert self.queue.put(make_group(attempt, versions=[oldest, self.version])) is PutResult.QUEUED
        self.due[name] = oldest + self.staleness
        self.ready.add(name)

    @precondition(lambda self: self.over)
    @rule(which=st.integers(0, 99))
    def late_reply(self, which: int) -> None:
        attempt = self.over[which % len(self.over)]
        assert self.queue.put(make_group(attempt)) is PutResult.DUPLICATE
        assert not self.queue.retire(attempt.group_id, attempt.attempt, "failed")

    @precondition(lambda self: self.due)
    @rule(which=st.integers(0, 99), reason=st.sampled_from(["filtered", "failed", "aborted"]))
    def retire(self, which: int, reason: str) -> None:
        name = sorted(self.due)[which % len(self.due)]
        assert self.queue.retire(name, self.attempts[name].attempt, reason)
        self.forget(name)
        self.over.append(self.attempts[name])
        self.last_moved = self.clock.now()

    @precondition(lambda self: not self.training)
    @rule(seconds=st.sampled_from([0.0, 0.0, 3.0, 10.0, 25.0]))
    def wait_for_a_batch(self, seconds: float) -> None:
        """The learner waits so long, then is cancelled if nothing came of it."""
        ready = {name: self.due[name] for name in self.ready}
        unready = {name: self.due[name] for name in self.unready}
        possible = possible_batches(ready, unready, self.version, self.batch)
        if self.waiting_since is None:
            self.waiting_since = self.clock.now()
        outcome = self.loop.run_until_complete(self._wait(seconds))
        if possible:
            self.handed_out(outcome, possible)
            return
        assert outcome is None or isinstance(outcome, BatchTimeout), "no batch could be formed"
        now = self.clock.now()
        overdue = {name: due for name, due in unready.items() if now >= self.admitted_at[name] + DEADLINE_S}
        fresh = {name: due for name, due in unready.items() if name not in overdue}
        hopeless = bool(overdue) and not possible_batches(ready | fresh, overdue, self.version, self.batch)
        starved_at = max(self.waiting_since, self.last_moved) + DEADLINE_S
        starved = len(self.due) < self.batch and now >= starved_at
        assert isinstance(outcome, BatchTimeout) == (hopeless or starved)
        if isinstance(outcome, BatchTimeout):
            assert outcome.version == self.version
            assert set(outcome.group_ids) <= set(overdue)
            assert bool(outcome.group_ids) == hopeless
            self.waiting_since = None

    async def _wait(self, seconds: float) -> Any:
        waiting = asyncio.ensure_future(self.queue.next_batch())
        await self.clock.run_ready()
        if not waiting.done():
            await self.clock.advance(seconds)
        if not waiting.done():
            waiting.cancel()
        try:
            return await waiting
        except BatchTimeout as timeout:
            return timeout
        except asyncio.CancelledError:
            return None

    def handed_out(self, groups: Any, possible: list[set[str]]) -> None:
        names = [group.group_id for group in groups]
        assert set(names) in possible
        assert names == [name for name in self.order if name in names], "in admission order"
        assert max(self.due[name] for name in names) <= min(
            (self.due[name] for name in self.ready if name not in names), default=math.inf
        )
        for group in groups:
            key = group.group_id, group.attempt
            assert key not in self.trained
            assert 0 <= self.version - group.max_version <= self.version - group.min_version <= self.staleness
            self.trained.add(key)
            self.forget(group.group_id)
        self.training = names
        self.waiting_since = None

    @precondition(lambda self: self.training)
    @rule(stepped=st.sampled_from([True, True, True, False]))
    def close(self, stepped: bool) -> None:
        retired = self.queue.advance(self.version + stepped)
        assert [attempt.group_id for attempt in retired] == ([] if stepped else self.training)
        self.over += [self.attempts[name] for name in self.training]
        self.training = []
        self.waiting_since = None

    @rule()
    def save_and_load(self) -> None:
        """The batch in training comes back as queued, everything else as it was."""
        state = json.loads(json.dumps(self.queue.state_dict()))
        self.queue = self.new_queue()
        self.queue.load_state_dict(state)
        for name in self.training:
            entry = next(entry for entry in state["entries"] if entry["group_id"] == name)
            oldest = min(span[0] for member in entry["group"]["rollouts"] for span in member["version_spans"])
            self.due[name] = oldest + self.staleness
            self.ready.add(name)
            self.trained.discard((name, self.attempts[name].attempt))
        self.training = []
        self.waiting_since, self.last_moved = None, -math.inf

    @precondition(lambda self: self.version)
    @rule(back=st.integers(1, 2))
    def an_older_version_is_refused(self, back: int) -> None:
        with pytest.raises(ValueError, match="cannot go back"):
            self.queue.advance(self.version - back)

    @precondition(lambda self: self.version % 5 == 4)
    @rule(ahead=st.integers(1, 3))
    def learner_fails_over(self, ahead: int) -> None:
        self.queue.fail_over(self.version + ahead)
        if self.due:
            self.last_moved = self.clock.now()
        for name in [*self.due, *self.training]:
            self.over.append(self.attempts[name])
            self.forget(name)
        self.training = []
        self.waiting_since = None

    def forget(self, name: str) -> None:
        self.due.pop(name, None)
        self.ready.discard(name)

    # -- always ------------------------------------------------------------------------------------------------------

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert self.queue.outstanding == len(self.due) <= (self.staleness + 1) * self.batch
        assert self.queue.queued == len(self.ready)
        assert self.queue.in_training == len(self.training)
        assert [attempt.group_id for attempt in self.queue.dispatched()] == self.unready
        assert feasible(self.due.values(), self.first_open, self.batch)
        self.queue.ledger.check()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
