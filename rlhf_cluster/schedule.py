"""Arithmetic of bounded staleness: which groups fit the slots of the versions to come.

Every version is a slot for B groups. A group is due at the version whose batch must train it at the latest, at most K
versions ahead. Only the number of groups per due is kept, so a check costs K+1 additions however many groups there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator


class Schedule:
    """Outstanding groups and, among them, ready ones, counted by due. B = groups_per_batch, K = max_staleness."""

    def __init__(self, groups_per_batch: int, max_staleness: int) -> None:
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self._outstanding: Counter[int] = Counter()
        self._ready: Counter[int] = Counter()

    def add(self, due: int, *, ready: bool) -> None:
        self._change(due, 1, ready)

    def remove(self, due: int, *, ready: bool) -> None:
        self._change(due, -1, ready)

    def clear(self) -> None:
        self._outstanding.clear()
        self._ready.clear()

    @property
    def earliest_ready(self) -> int | None:
        """The earliest due of a ready group."""
        return min(self._ready, default=None)

    def unready(self, bound: float) -> int:
        """Outstanding groups with due <= ``bound`` that are not ready."""
        by_due = self._outstanding.items()
        return sum(groups - self._ready[due] for due, groups in by_due if due <= bound)

    def fits(self, new_due: int, first_open: int, last: int) -> bool:
        """Whether one more group leaves a feasible schedule: at most (d - first_open + 1)*B groups due by d, for every
        d from the first open slot to ``last``."""
        if not first_open <= new_due <= last:
            return False
        capacity = 0
        for due, outstanding in self._cumulative(self._outstanding, first_open, last):
            capacity += self.groups_per_batch
            if outstanding + (due >= new_due) > capacity:
                return False
        return True

    def unmet(self, version: int) -> list[tuple[float, int]]:
        """What the batch for ``version`` still lacks, as (due bound, ready groups missing with a due up to it).

        The batch needs B ready groups, and n(d) = outstanding(due <= d) - (d - version)*B of them due by d. Taking the
        earliest due first meets every n(d) that any choice meets, so it is enough to count. An n(d) above B (possible
        only after a jump of the version) is met by nothing: the batch is then filled with the earliest due.
        """
        unmet: list[tuple[float, int]] = []
        last = version + self.max_staleness
        later_slots = 0
        ready_by = dict(self._cumulative(self._ready, version, last))
        for due, outstanding in self._cumulative(self._outstanding, version, last):
            missing = min(outstanding - later_slots, self.groups_per_batch) - ready_by[due]
            if missing > 0:
                unmet.append((due, missing))
            later_slots += self.groups_per_batch
        if (missing := self.groups_per_batch - self._ready.total()) > 0:
            unmet.append((math.inf, missing))
        return unmet

    @staticmethod
    def _cumulative(by_due: Counter[int], first: int, last: int) -> Iterator[tuple[int, int]]:
        """(d, groups due by d) for every d from ``first`` to ``last``."""
        total = sum(groups for due, groups in by_due.items() if due < first)
        for due in range(first, last + 1):
            total += by_due[due]
            yield due, total

    def _change(self, due: int, by: int, ready: bool) -> None:
        for by_due in (self._outstanding, self._ready) if ready else (self._outstanding,):
            by_due[due] += by
            if not by_due[due]:
                del by_due[due]
