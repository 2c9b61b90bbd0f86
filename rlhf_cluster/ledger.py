"""The ledger of the experience queue: where every admitted attempt is, in groups, rollouts and tokens.

Every attempt is in exactly one state. The states sum to what was admitted:

    admitted = dispatched + queued + trained + stale + filtered + failed + aborted + surplus

``duplicate`` stands beside that sum: it counts replies that came for an attempt that was over already.
How many rollouts and tokens an attempt has is known from its ``put`` on, so a dispatched attempt, and one retired
before its put, counts as one group with no rollouts and no tokens. The rollouts and tokens of all states therefore
sum to ``delivered``, the total of what arrived in time to be counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

RETIRE_REASONS: Final = ("stale", "filtered", "failed", "aborted", "surplus")
"""Why an attempt may end without being trained."""

STATES: Final = ("dispatched", "queued", "trained", *RETIRE_REASONS)
"""The states that sum to ``admitted``."""

DUPLICATE: Final = "duplicate"


@dataclass(frozen=True, slots=True)
class Count:
    """So many groups, with so many rollouts of so many generated tokens in all."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.groups + other.groups, self.rollouts + other.rollouts, self.tokens + other.tokens)

    def __sub__(self, other: Count) -> Count:
        return Count(self.groups - other.groups, self.rollouts - other.rollouts, self.tokens - other.tokens)


UNDELIVERED: Final = Count(groups=1)
"""An attempt that was never put: one group of unknown size."""


class Ledger:
    """Totals since the first admission of the run; they survive resume.

    ``admitted`` is a number of attempts (groups); ``counts[state]`` is a Count for each of STATES and ``duplicate``.
    """

    def __init__(self) -> None:
        self.admitted = 0
        self.delivered = Count()
        self.counts: dict[str, Count] = {state: Count() for state in (*STATES, DUPLICATE)}

    def admit(self) -> None:
        """A new attempt: dispatched."""
        self.admitted += 1
        self.counts["dispatched"] += UNDELIVERED

    def deliver(self, size: Count, target: str) -> None:
        """The first reply of a dispatched attempt; its size is known from here on."""
        self.delivered += size
        self.counts["dispatched"] -= UNDELIVERED
        self.counts[target] += size

    def move(self, size: Count, source: str, target: str) -> None:
        """An attempt changes state."""
        self.counts[source] -= size
        self.counts[target] += size

    def duplicate(self, size: Count) -> None:
        """A reply for an attempt that was over already."""
        self.counts[DUPLICATE] += size

    def check(self) -> None:
        """Raises AssertionError when a count is negative or the states do not sum to what came in."""
        # Runs after every event, so it compares plain integers instead of building a Count a state.
        counts = self.counts
        groups = rollouts = tokens = lowest = 0
        for state in STATES:
            count = counts[state]
            groups += count.groups
            rollouts += count.rollouts
            tokens += count.tokens
            lowest = min(lowest, count.groups, count.rollouts, count.tokens)
        late, delivered = counts[DUPLICATE], self.delivered
        closes = groups == self.admitted and rollouts == delivered.rollouts and tokens == delivered.tokens
        if not closes or min(lowest, late.groups, late.rollouts, late.tokens) < 0:
            expected = Count(self.admitted, delivered.rollouts, delivered.tokens)
            total = Count(groups, rollouts, tokens)
            raise AssertionError(f"ledger does not close: states sum to {total}, came in {expected}: {counts}")

    def state_dict(self) -> dict[str, Any]:
        """A JSON-serialisable copy."""
        return {
            "admitted": self.admitted,
            "delivered": asdict(self.delivered),
            "counts": {state: asdict(count) for state, count in self.counts.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.admitted = int(state["admitted"])
        self.delivered = Count(**state["delivered"])
        self.counts = {name: Count(**state["counts"][name]) for name in (*STATES, DUPLICATE)}
        self.check()
