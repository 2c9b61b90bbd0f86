"""Which process a seed kills, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Victim = Literal[
    "rollout_worker_0", "rollout_worker_1", "reward_scorer_0", "reference_scorer_0", "learner_rank_0", "learner_rank_1",
    "driver",
]  # fmt: skip
Moment = Literal["start", "step", "save", "publication"]

STEPS = 24
SAVE_EVERY = 4
# Each part as often as the others; the two rollout workers share one turn.
_PARTS: tuple[tuple[Victim, ...], ...] = (
    ("rollout_worker_0", "rollout_worker_1"),
    ("reward_scorer_0",),
    ("reference_scorer_0",),
    ("learner_rank_0",),
    ("learner_rank_1",),
    ("driver",),
)
_LONGEST_START_S = 6.0


@dataclass(frozen=True, slots=True)
class Plan:
    """``victim`` is killed ``delay_s`` seconds after ``moment`` number ``number`` was seen.

    Moments: the driver was started; learner step ``number`` was closed; save ``number`` has begun; weight publication
    ``number`` was written.
    """

    seed: int
    victim: Victim
    moment: Moment
    number: int
    delay_s: float
    overrides: tuple[str, ...] = ()
    """Settings of the run beside those of every drill."""
    exit_code: int = 0
    """How the run should end; what it trained is looked at when that is 0."""

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.victim.replace('_', ' ')} is killed {self.delay_s * 1000:.0f} ms after "
            f"{self.moment} {self.number}"
        )


def draw(seed: int) -> Plan:
    """The plan of one seed."""
    rng = random.Random(seed)
    victim = rng.choice(rng.choice(_PARTS))
    moments: tuple[Moment, ...] = ("step", "step", "save", "publication")
    if victim == "driver":
        moments = (*moments, "start")
    moment = rng.choice(moments)
    first, last, longest_s = {
        "start": (0, 0, _LONGEST_START_S),
        "save": (1, STEPS // SAVE_EVERY, 0.02),
        # The first is version 0, while the run still starts.
        "publication": (1, STEPS, 0.03),
        "step": (1, STEPS - 1, 0.3),
    }[moment]
    # Worker 0 dies as the only one, so that everything waits for its successor; worker 1 beside another.
    overrides = ("rollout.workers=1",) if victim == "rollout_worker_0" else ()
    return Plan(seed, victim, moment, rng.randint(first, last), rng.uniform(0.0, longest_s), overrides)
