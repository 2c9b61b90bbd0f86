"""Cost of the control plane: memory of a group, and that no operation looks at everything that is outstanding.

``benchmarks/control_plane.py`` measures the whole loop to 20 percent. Here each operation is timed alone, where a look
at ten thousand groups costs tens of times as much and a busy machine does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from benchmarks.control_plane import MAX_BYTES_A_GROUP, InstantScorer, InstantWorkers, bytes_a_group
from rlhf_cluster.clock import SystemClock
from rlhf_cluster.controller import Controller, ControllerSettings
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.types import Prompt, ScoredGroup
from tests.fakes import FakeLearner
from tests.unit.builders import async_test, make_group, make_queue, make_rollout, make_scored

FEW, MANY = 10, 20_000
TIMES = 200


def prompts() -> Iterator[Prompt]:
    return (Prompt(f"p{index}", (1,), "x") for index in range(2 * MANY))


def seconds(operation: Callable[[], object]) -> float:
    """CPU seconds of ``TIMES`` calls, the best of three."""
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        for _ in range(TIMES):
            operation()
        best = min(best, time.process_time() - started)
    return best


def assert_flat(cost: Callable[[int], float]) -> None:
    assert cost(MANY) < 4 * cost(FEW)


@pytest.mark.parametrize("samples", [1, 4])
def test_metadata_of_a_group_takes_less_than_4_kib(samples: int) -> None:
    used = bytes_a_group(1000, samples)
    assert 500 < used < MAX_BYTES_A_GROUP


def test_issuing_and_consuming_a_prompt_costs_the_same_however_many_are_out() -> None:
    def cost(outstanding: int) -> float:
        cursor = PromptCursor(list(prompts()), seed=0)
        for _ in range(outstanding):
            cursor.next()

        def one() -> None:
            issue = cursor.next()
            assert issue is not None
            cursor.consumed(issue.group_id)

        return seconds(one)

    assert_flat(cost)


@async_test
async def test_a_group_passes_the_queue_at_the_same_cost_however_many_are_out_or_in_training() -> None:
    costs = {}
    for batch in (FEW, MANY // 2):
        queue = make_queue(groups_per_batch=batch, max_staleness=2)
        source = prompts()
        for _ in range(batch):
            queue.put(make_group(queue.admit(next(source), 0)))
        await queue.next_batch()
        for _ in range(2 * batch - 1):
            queue.admit(next(source), 0)

        def one(queue=queue, source=source) -> None:
            attempt = queue.admit(next(source), 0)
            queue.put(make_group(attempt, samples=1))
            queue.retire(attempt.group_id, attempt.attempt, "filtered")

        costs[batch] = seconds(one)
    assert costs[MANY // 2] < 4 * costs[FEW]


def test_counting_what_cannot_be_scored_costs_the_same_however_large_the_batch() -> None:
    group = ScoredGroup("g", (make_scored(make_rollout("g")),))

    def cost(batch: int) -> float:
        clock = SystemClock()
        workers = InstantWorkers()
        controller = Controller(
            ControllerSettings(0, 1, batch, 1, 8, 1.0, 5, 0.1),
            cursor=PromptCursor([next(prompts())], seed=0),
            queue=make_queue(groups_per_batch=batch),
            generator=workers,
            scorer=InstantScorer(),
            learner=FakeLearner(),
            sink=workers,
            clock=clock,
            recorder=MetricsRecorder(max_staleness=1, total_steps=1, clock=clock, sinks=[]),
        )
        for _ in range(batch):
            controller._count_unscorable(group)
        return seconds(lambda: controller._count_unscorable(group))

    assert_flat(cost)
