"""Which world and which faults a seed brings.

Every seed draws a small cluster and a random subset of the fault kinds with random rates (swarm testing, Groce et al.
2012: a kind that is switched off leaves room for histories that it would cut short). Whether a fault strikes depends on
the seed, its kind and the name of what it would strike, not on what happened before, so that switching one kind off
leaves the others where they are: that is how a failing run is made smaller.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

from rlhf_cluster.simulation.lengths import Constant, Lengths, LogNormal, Pareto, TwoClasses

FAULTS: Final = {
    "crash_before": "a worker dies when a group reaches it; so do all its groups",
    "crash_during": "a worker dies while it generates a group",
    "crash_after": "a worker dies with the finished group, before its reply",
    "lost_reply": "a worker never answers; its deadline ends it",
    "late_reply": "a worker's answer comes after the group's deadline, although it was cancelled",
    "straggler": "a group takes 3 to 40 times its time",
    "short_group": "one sample is missing",
    "aborted_sample": "one sample ends as aborted",
    "scorer_error": "a scorer dies",
    "scorer_timeout": "a scorer misses its deadline",
    "late_score": "a scored group counts as lost and reaches the queue all the same, any time later",
    "repeated_put": "a scored group reaches the queue a second time, any time later",
    "unscorable": "an answer cannot be scored",
    "update_failed": "the weights of a worker are refused half-way",
    "update_timeout": "a worker does not finish an update in time",
    "skipped_step": "the optimizer skips a step",
    "learner_crash": "the learner dies in a step or a snapshot and is restored from the checkpoint, versions going on",
    "version_goes_back": "the learner restarts by itself and reports an older version",
    "driver_crash": "the driver dies; a new one resumes from the checkpoint, with new workers",
    "stop": "the run is asked to stop, saves, and is resumed",
    "clock_jump": "the clock jumps ahead by up to three group deadlines",
}
"""Kind of fault -> what happens."""

_RATES = (0.02, 0.05, 0.1, 0.25)
_RARE: Final = {"version_goes_back": 0.02, "driver_crash": 0.03, "stop": 0.03, "clock_jump": 0.04}


@dataclass(frozen=True, slots=True)
class World:
    """The cluster of one fault run; times in seconds, lengths in tokens."""

    steps: int
    groups_per_batch: int
    max_staleness: int
    samples_per_prompt: int
    prompts: int
    workers: int
    capacity: int
    speed_alone: float
    speed_peak: float
    lengths: Lengths
    max_new_tokens: int
    scorer_replicas: int
    scorer_s: float
    learner_s: float
    snapshot_s: float
    transfer_s: float
    pause_s: float
    restart_s: float
    group_deadline_s: float
    rollout_timeout_s: float
    scorer_timeout_s: float
    publish_timeout_s: float
    checkpoint_every: int
    checkpoint_s: float


_MAX_NEW_TOKENS = 24


def draw_world(seed: int) -> World:
    """A cluster small enough to simulate in milliseconds and odd enough to be interesting.

    Its deadlines can be met: without faults the longest answer on a full worker takes a quarter of a group's deadline
    and scoring everything outstanding 0.3, and a worker that hangs is back, with the weights, before the deadline.
    A cluster that cannot keep its deadlines works for nothing whatever the queue does.
    """
    rng = random.Random(f"world {seed}")
    batch, staleness = rng.randint(1, 4), rng.choice([0, 0, 1, 1, 2, 3])
    steps, samples = rng.randint(3, 7), rng.randint(1, 3)
    deadline = rng.choice([12.0, 30.0, 60.0])
    workers, capacity, replicas = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 2)
    needed = _MAX_NEW_TOKENS / (0.25 * deadline)
    alone = max(rng.choice([4.0, 10.0]), 2 * needed)
    distributions: list[Lengths] = [
        Constant(tokens=6),
        LogNormal(median=5, sigma=0.8),
        Pareto(minimum=2, alpha=1.2),
        TwoClasses(short=3, long=20, long_share=0.2),
    ]
    lengths = rng.choice(distributions)
    return World(
        steps=steps,
        groups_per_batch=batch,
        max_staleness=staleness,
        samples_per_prompt=samples,
        prompts=max(1, rng.choice([batch - 1, steps * batch // 2, steps * batch, 3 * steps * batch])),
        workers=workers,
        capacity=capacity,
        speed_alone=alone,
        speed_peak=max(alone, rng.choice([12.0, 40.0]), 2 * needed * (capacity * samples - 1)),
        lengths=lengths,
        max_new_tokens=_MAX_NEW_TOKENS,
        scorer_replicas=replicas,
        scorer_s=min(rng.choice([0.0, 0.1, 1.0]), 0.3 * deadline * replicas / ((staleness + 1) * batch)),
        learner_s=rng.choice([0.0, 0.3, 2.0, 6.0]),
        snapshot_s=rng.choice([0.0, 0.2]),
        transfer_s=rng.choice([0.0, 0.1, 0.05 * deadline]),
        pause_s=rng.choice([0.0, 0.1, 0.02 * deadline]),
        restart_s=deadline * rng.choice([0.02, 0.1]),
        group_deadline_s=deadline,
        # Also longer than the group's: then the queue is the one that gives up first.
        rollout_timeout_s=deadline * rng.choice([0.5, 0.5, 2.0]),
        scorer_timeout_s=deadline * rng.choice([0.1, 0.3]),
        publish_timeout_s=deadline * 0.3,
        checkpoint_every=rng.randint(1, 3),
        checkpoint_s=rng.choice([0.0, 0.5]),
    )


class Faults:
    """The faults of one seed. ``strikes`` says whether one strikes here; ``count`` is what struck so far.

    ``note`` is told of each. At most ``budget`` faults strike in a run, so that every run can end.
    """

    def __init__(self, seed: int, *, without: Collection[str] = ()) -> None:
        self._seed = seed
        rng = random.Random(f"faults {seed}")
        self.note: Callable[[str], None] = lambda text: None
        self.budget = rng.choice([2, 6, 12, 25])
        self.rates: dict[str, float] = {}
        share = rng.choice([0.15, 0.4, 0.8])
        for kind in FAULTS:
            chosen, rate = rng.random() < share, _RARE.get(kind) or rng.choice(_RATES)
            if chosen and kind not in without:
                self.rates[kind] = rate
        self.count: Counter[str] = Counter()

    def strikes(self, kind: str, *where: object) -> bool:
        rate = self.rates.get(kind)
        if rate is None or self.count.total() >= self.budget or self.fraction(kind, *where) >= rate:
            return False
        self._struck(kind, where)
        return True

    def fraction(self, *purpose: object) -> float:
        """A number in [0, 1) that depends on the seed and ``purpose``."""
        return random.Random(f"{self._seed} {purpose}").random()

    def _struck(self, kind: str, where: tuple[object, ...]) -> None:
        self.count[kind] += 1
        self.note(f"fault {kind}: {' '.join(map(str, where))}")


class ScriptedFaults(Faults):
    """Exactly the faults of ``script``, each ``(kind, *where)``, once; ``moment`` in [0, 1) is when, for all of them.

    Where is (group id, attempt) for rollouts and scores, (version, worker) for updates, (version, call) for the
    learner's steps.
    """

    def __init__(self, script: Iterable[tuple[object, ...]] = (), *, moment: float = 0.5) -> None:
        super().__init__(0)
        self._script = set(script)
        self._moment = moment

    def strikes(self, kind: str, *where: object) -> bool:
        if (kind, *where) not in self._script:
            return False
        self._script.discard((kind, *where))
        self._struck(kind, where)
        return True

    def fraction(self, *purpose: object) -> float:
        return self._moment
