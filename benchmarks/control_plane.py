"""Cost of control: the production controller and queue with instantaneous actors in one process.

Prints rollouts a second for a small and a large number of outstanding groups and the ratio of the two costs, measured
in one run: a control plane whose cost grows with what is outstanding would show a ratio far above 1.
"""

from __future__ import annotations

import asyncio
import time

from rlhf_cluster.clock import SystemClock
from rlhf_cluster.controller import Controller, ControllerSettings
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.types import Prompt
from tests.fakes import FakeLearner, FakeScorer, FakeWorkers

GROUPS = 4000


def seconds_a_rollout(groups_per_batch: int) -> float:
    """Wall seconds a rollout when ``2 * groups_per_batch`` groups are outstanding."""
    clock = SystemClock()
    steps = GROUPS // groups_per_batch
    workers = FakeWorkers(capacity=10**9, seconds=lambda request: 0.0)
    learner = FakeLearner(seconds=0.0)
    controller = Controller(
        ControllerSettings(0, steps, groups_per_batch, 1, 8, 1.0, 5, 0.1),
        cursor=PromptCursor([Prompt(str(i), (1,), "x") for i in range(1000)], seed=0),
        queue=ExperienceQueue(groups_per_batch=groups_per_batch, max_staleness=1, clock=clock, group_deadline_s=60),
        generator=workers,
        scorer=FakeScorer(),
        learner=learner,
        sink=workers,
        clock=clock,
        recorder=MetricsRecorder(max_staleness=1, total_steps=steps, clock=clock, sinks=[]),
    )
    started = time.perf_counter()
    asyncio.run(controller.run())
    return (time.perf_counter() - started) / (steps * groups_per_batch)


if __name__ == "__main__":
    few, many = seconds_a_rollout(5), seconds_a_rollout(500)
    print(f"10 outstanding groups: {1 / few:,.0f} rollouts/s; 1,000 outstanding: {1 / many:,.0f} rollouts/s")
    print(f"cost ratio, 1,000 against 10 outstanding: {many / few:.2f}")
