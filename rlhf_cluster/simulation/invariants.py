"""What must hold after every event: an independent model of the queue that watches the real one.

``watch(queue)`` wraps the queue's public methods. Each call is checked against the model, and after each call the
model's own picture of the world is checked: it keeps the groups by due date and searches the schedule by sorting, so
nothing here rests on the arithmetic under test.

    bound           0 <= learner version - version of the token <= K for every token handed out
    feasible        outstanding groups fit the slots to come, each in time (brute force over sorted dues)
    outstanding     at most (K+1)*B groups
    batch           B whole groups, earliest due first, in admission order, none trained twice
    attempts        only the current attempt of a group is queued; attempts count up; a late one is a duplicate
    stale           no admitted group becomes too old: its slot was promised
    versions        the learner version never goes back; nothing serves or publishes a version before it exists
    ledger          the states equal the model's own counts of groups, rollouts and tokens, all >= 0
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_cluster.experience_queue import Attempt, ExperienceQueue, PutResult
from rlhf_cluster.ledger import DUPLICATE, STATES, Count
from rlhf_cluster.types import ScoredGroup, TrainBatch


class InvariantViolated(AssertionError):
    """``rule`` names the invariant; the message says what was seen."""

    def __init__(self, rule: str, seen: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {seen}")


@dataclass(slots=True)
class _Held:
    """An outstanding group as the model knows it; ``size`` is None until it was put."""

    attempt: Attempt
    order: int
    due: int
    size: Count | None = None

    @property
    def ready(self) -> bool:
        return self.size is not None

    @property
    def counted(self) -> Count:
        return self.size or Count(groups=1)


def feasible(dues: Sequence[int], first_open: int, batch: int) -> bool:
    """Whether groups with these dues fit slots of ``batch`` from version ``first_open`` on, none after its due."""
    return all(due >= first_open + place // batch for place, due in enumerate(sorted(dues)))


class Invariants:
    """The model of one queue. ``note(text)`` is told every event, for the trace and the digest of the run."""

    def __init__(
        self,
        *,
        groups_per_batch: int,
        max_staleness: int,
        samples_per_prompt: int,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._batch = groups_per_batch
        self._staleness = max_staleness
        self._samples = samples_per_prompt
        self._note = note
        self._held: dict[str, _Held] = {}
        self._training: list[_Held] | None = None
        self._last_attempt: dict[str, int] = {}
        self._trained: set[tuple[str, int]] = set()
        self._counts = {state: Count() for state in (*STATES, DUPLICATE)}
        self._admitted = 0
        self._orders = 0
        self._places: dict[str, int] = {}
        self._version = 0
        self._published = -1
        self.events = 0
        self.lags: Counter[int] = Counter()
        """Tokens handed out, by lag."""
        self.filtered: list[str] = []
        """Group ids that left for a reason of their own, not of the infrastructure."""

    # -- the queue ---------------------------------------------------------------------------------------------------

    def watch(self, queue: ExperienceQueue) -> None:
        """Check every call of ``queue`` from here on; it must be as empty, or as full, as this model."""

        def wrap(name: str, check: Callable[..., None]) -> None:
            original = getattr(queue, name)

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                check(result, *args, **kwargs)
                self._settled(queue)
                return result

            setattr(queue, name, call)

        next_batch = queue.next_batch

        @functools.wraps(next_batch)
        async def watched_next_batch() -> list[ScoredGroup]:
            groups = await next_batch()
            self._handed_out(groups)
            self._settled(queue)
            return groups

        wrap("admit", self._admit)
        wrap("put", self._put)
        wrap("retire", self._retire)
        wrap("advance", self._advance)
        wrap("fail_over", self._failed_over)
        wrap("resume", self._resumed)
        setattr(queue, "next_batch", watched_next_batch)  # noqa: B010 -- mypy refuses to assign to a method

    def restored(self, state: dict[str, Any]) -> None:
        """The queue was loaded from ``state``: the model starts again from what it says, a new life of the run."""
        self._version = state["learner_version"]
        self._published = -1
        self._training = None
        self._trained.clear()
        self._last_attempt = dict(state["last_attempt"])
        self._admitted = state["ledger"]["admitted"]
        self._orders = state["admissions"]
        self._counts = {name: Count(**state["ledger"]["counts"][name]) for name in (*STATES, DUPLICATE)}
        self._places = dict(state["places"])
        self._held = {}
        for entry in state["entries"]:
            attempt = Attempt(entry["group_id"], entry["attempt"], entry["start_version"])
            size, oldest = None, attempt.start_version
            if entry["group"] is not None:
                members = entry["group"]["rollouts"]
                size = Count(1, len(members), sum(len(member["token_ids"]) for member in members))
                oldest = min(span[0] for member in members for span in member["version_spans"])
            self._held[attempt.group_id] = _Held(attempt, entry["order"], oldest + self._staleness, size)
        self._saved = dict(self._held)

    def _admit(self, attempt: Attempt, prompt: Any, start_version: int, **_: Any) -> None:
        group, expected = attempt.group_id, self._last_attempt.get(attempt.group_id, -1) + 1
        self._note(f"admit {group}/{attempt.attempt} from version {start_version}")
        self._require("attempts", attempt.attempt == expected, f"{attempt} follows attempt {expected - 1}")
        in_training = [held.attempt.group_id for held in self._training or ()]
        self._require("attempts", group not in self._held and group not in in_training, f"{group} is still out")
        self._require("versions", 0 <= start_version <= self._version, f"{attempt} at version {self._version}")
        self._last_attempt[group] = attempt.attempt
        order = self._places.pop(group, self._orders)
        self._held[group] = _Held(attempt, order, start_version + self._staleness)
        self._orders += order == self._orders
        self._admitted += 1
        self._counts["dispatched"] += Count(groups=1)

    def _put(self, result: PutResult, group: ScoredGroup) -> None:
        name, size = group.group_id, Count(1, len(group.rollouts), group.n_tokens)
        self._note(f"put {name}/{group.attempt} versions {group.min_version}..{group.max_version}: {result}")
        held = self._held.get(name)
        if held is None or held.attempt.attempt != group.attempt or held.ready:
            self._require("attempts", result is PutResult.DUPLICATE, f"late {name}/{group.attempt} was {result}")
            self._counts[DUPLICATE] += size
            return
        self._require("batch", len(group.rollouts) == self._samples, f"{name} has {len(group.rollouts)} samples")
        held.due = group.min_version + self._staleness
        self._require("stale", held.due >= self._first_open, f"{name}/{group.attempt} came too late for every batch")
        self._require("attempts", result is PutResult.QUEUED, f"current {name}/{group.attempt} was {result}")
        held.size = size
        self._counts["dispatched"] -= Count(groups=1)
        self._counts["queued"] += size

    def _retire(self, result: bool, group_id: str, attempt: int, reason: str) -> None:
        self._note(f"retire {group_id}/{attempt} as {reason}: {result}")
        held = self._held.get(group_id)
        current = held is not None and held.attempt.attempt == attempt
        self._require("attempts", result == current, f"retiring {group_id}/{attempt} answered {result}")
        if held is not None and current:
            self._counts["queued" if held.ready else "dispatched"] -= held.counted
            self._counts[reason] += held.counted
            del self._held[group_id]
            if reason == "filtered":
                self.filtered.append(group_id)

    def _handed_out(self, groups: list[ScoredGroup]) -> None:
        version = self._version
        names = [f"{group.group_id}/{group.attempt}" for group in groups]
        self._note(f"batch for version {version}: {' '.join(names)}")
        self._require("batch", self._training is None, "the batch before is not closed")
        self._require("batch", len(groups) == self._batch, f"{len(groups)} groups, {self._batch} make a batch")
        batch: list[_Held] = []
        for group in groups:
            held = self._held.pop(group.group_id, None)
            key = group.group_id, group.attempt
            self._require("attempts", key not in self._trained, f"{key} was trained before")
            if held is None or held.attempt.attempt != group.attempt or not held.ready:
                raise InvariantViolated("attempts", f"{key} was handed out; the model holds {held}")
            self._require("batch", len(group.rollouts) == self._samples, f"{key} has {len(group.rollouts)} samples")
            self._trained.add(key)
            batch.append(held)
            self._count_lags(group, version)
        self._require("batch", batch == sorted(batch, key=lambda held: held.order), f"{names} not in admission order")
        latest = max(held.due for held in batch)
        passed_over = [held.attempt for held in self._held.values() if held.ready and held.due < latest]
        self._require("batch", not passed_over, f"{passed_over} were due before {names}")
        self._training = batch
        for held in batch:
            self._counts["queued"] -= held.counted
            self._counts["trained"] += held.counted

    def _count_lags(self, group: ScoredGroup, version: int) -> None:
        for member in group.rollouts:
            for span in member.rollout.version_spans:
                lag = version - span.version
                seen = f"{group.group_id}/{group.attempt} has lag {lag} at version {version}"
                self._require("bound", 0 <= lag <= self._staleness, seen)
                self.lags[lag] += span.end - span.start

    def _advance(self, retired: list[Attempt], learner_version: int) -> None:
        self._note(f"advance from version {self._version} to {learner_version}")
        seen = f"the learner went from {self._version} to {learner_version}"
        self._require("versions", learner_version >= self._version, seen)
        lost: list[Attempt] = []
        if self._training is not None and learner_version == self._version:
            for held in self._training:
                self._counts["trained"] -= held.counted
                self._counts["failed"] += held.counted
                self._trained.discard((held.attempt.group_id, held.attempt.attempt))
                lost.append(held.attempt)
        self._training = None
        self._version = learner_version
        self._require("stale", retired == lost, f"advance retired {retired}, the skipped batch is {lost}")

    def _failed_over(self, _: None, learner_version: int) -> None:
        """Every step of it was checked on its way."""
        self._require("end", not self._held, f"{len(self._held)} groups outlive the learner")
        self._require("versions", self._version == learner_version, f"restored as {self._version}")

        self._places.clear()

    def _resumed(self, queued: set[str], learner_version: int) -> None:
        """What was not finished at the save keeps its place in the order of admission."""
        finished = {group for group, held in self._saved.items() if held.ready}
        self._require("end", queued == self._held.keys() == finished, f"{queued} are queued, the set has {finished}")
        self._places |= {group: held.order for group, held in self._saved.items() if not held.ready}

    # -- the world ---------------------------------------------------------------------------------------------------

    def publishing(self, version: int) -> None:
        """The controller hands ``version`` to the workers."""
        self._note(f"publish version {version}")
        seen = f"version {version} is published after {self._published}, the learner holds {self._version}"
        self._require("versions", self._published < version <= self._version, seen)
        self._published = version

    def serving(self, worker: int, claimed: int, held: int) -> None:
        """A dispatch reaches a worker that the router showed with ``claimed`` and that holds ``held``."""
        seen = f"worker {worker} holds {held}, was shown with {claimed}, published is {self._published}"
        self._require("versions", claimed <= held <= max(0, self._published), seen)

    def training(self, batch: TrainBatch) -> None:
        """The learner receives ``batch``."""
        held = [(entry.attempt.group_id, entry.attempt.attempt) for entry in self._training or ()]
        got = [(group.group_id, group.attempt) for group in batch.groups]
        self._require("batch", held == got, f"the learner got {got}, the queue handed out {held}")
        self._require("versions", batch.learner_version == self._version, f"batch for {batch.learner_version}")

    # -- after every event -------------------------------------------------------------------------------------------

    @property
    def _first_open(self) -> int:
        return self._version if self._training is None else self._version + 1

    def _settled(self, queue: ExperienceQueue) -> None:
        self.events += 1
        held, bound = len(self._held), (self._staleness + 1) * self._batch
        self._require("outstanding", held <= bound, f"{held} groups are outstanding, the bound is {bound}")
        dues = [entry.due for entry in self._held.values()]
        seen = f"dues {sorted(dues)} do not fit batches of {self._batch} from version {self._first_open} on"
        self._require("feasible", feasible(dues, self._first_open, self._batch), seen)
        counts = queue.ledger.counts
        if counts != self._counts or queue.ledger.admitted != self._admitted:
            wrong = {name: (counts[name], ours) for name, ours in self._counts.items() if counts[name] != ours}
            raise InvariantViolated("ledger", f"(queue, model) differ in {wrong}, admitted {queue.ledger.admitted}")
        self._require("ledger", queue.outstanding == held, f"queue holds {queue.outstanding}, model {held}")

    @staticmethod
    def _require(rule: str, holds: bool, seen: str) -> None:
        if not holds:
            raise InvariantViolated(rule, seen)
