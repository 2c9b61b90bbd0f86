"""The queue with one rule of its protocol removed; each must be caught by the simulation."""

from __future__ import annotations

from typing import Any

from rlhf_cluster.experience_queue import Attempt, ExperienceQueue, PutResult
from rlhf_cluster.types import ScoredGroup


class NoAdmission(ExperienceQueue):
    """Admits whatever a worker could sample, feasible or not."""

    def can_admit(self, start_version: int) -> bool:
        return 0 <= start_version <= self.learner_version


class NoDueOrdering(ExperienceQueue):
    """Trains whatever was admitted first, not what is due first."""

    def _hand_out(self) -> list[ScoredGroup]:
        dues = {entry.attempt: entry.due for entry in self._entries.values()}
        for entry in self._entries.values():
            self._schedule.remove(entry.due, ready=entry.group is not None)
            entry.due = 0
            self._schedule.add(0, ready=entry.group is not None)
        batch = super()._hand_out()
        for entry in self._entries.values():
            self._schedule.remove(0, ready=entry.group is not None)
            entry.due = dues[entry.attempt]
            self._schedule.add(entry.due, ready=entry.group is not None)
        return batch


class NoWaiting(ExperienceQueue):
    """Trains as soon as any B groups are ready, whatever that leaves for later."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        unmet = self._schedule.unmet
        self._schedule.unmet = lambda version: [need for need in unmet(version) if need[0] == float("inf")]  # type: ignore[method-assign]


class NoAttemptCheck(ExperienceQueue):
    """Takes the reply of any attempt for that of the current one."""

    def put(self, group: ScoredGroup) -> PutResult:
        entry = self._entries.get(group.group_id)
        if entry is not None and entry.group is None:
            current = entry.attempt
            entry.attempt = Attempt(group.group_id, group.attempt, min(current.start_version, group.min_version))
        return super().put(group)


class NoCapacityFreeing(ExperienceQueue):
    """What is retired keeps its slot."""

    def retire(self, group_id: str, attempt: int, reason: str) -> bool:
        entry = self._entries.get(group_id)
        ended = super().retire(group_id, attempt, reason)
        if ended and entry is not None:
            self._schedule.add(entry.due, ready=False)
        return ended


class NoMonotonicCheck(ExperienceQueue):
    """Follows the learner wherever it goes, also back."""

    def advance(self, learner_version: int) -> list[Attempt]:
        if learner_version < self._version:
            self._version = learner_version
        return super().advance(learner_version)


MUTANTS = {
    "admission": NoAdmission,
    "due ordering": NoDueOrdering,
    "waiting": NoWaiting,
    "attempt check": NoAttemptCheck,
    "capacity freeing": NoCapacityFreeing,
    "monotonic check": NoMonotonicCheck,
}
"""Removed rule -> the queue without it."""
