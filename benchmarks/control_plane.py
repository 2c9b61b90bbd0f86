"""Cost of control: the production controller, queue, cursor and recorder with instantaneous actors in one process.

The learner answers when N groups are outstanding and not before, so that many are held at every step. CPU seconds are
counted, so other work on the machine hardly shows. A run costs ``groups * r + steps * s``. Two runs with the same N and
different batch sizes tell r and s apart: few outstanding groups force small batches and hence many steps a group, which
is no cost of holding groups.

    .venv/bin/python -m benchmarks.control_plane [N ...]

prints rollouts a second, r and s for every N (default 10 100 1000 10000), r at the largest N against the smallest, and
the memory of a group: everything allocated in a run while 2,000 are outstanding, without the arrays (one set of them
serves all rollouts). Exit code 1 when a target is missed; the ratio counts for groups of one rollout.
"""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rlhf_cluster.clock import SystemClock
from rlhf_cluster.controller import Controller, ControllerSettings
from rlhf_cluster.data.cursor import PromptCursor
from rlhf_cluster.experience_queue import ExperienceQueue
from rlhf_cluster.metrics.recorder import MetricsRecorder
from rlhf_cluster.protocols import PublishReport, RolloutRequest, WeightSnapshot, WorkerSlot, WorkerStatus
from rlhf_cluster.types import Prompt, Ratio, Rollout, ScoredRollout, TrainBatch, UpdateResult, VersionSpan

TARGET_PER_S = 5000
FLAT = 0.2
MAX_BYTES_A_GROUP = 4096
MIN_GROUPS = 4000
REPEATS = 3

_TOKENS = 16
_PROMPT_IDS = np.arange(4, dtype=np.int32)
_TOKEN_IDS = np.zeros(_TOKENS, dtype=np.int32)
_LOGPROBS = np.zeros(_TOKENS, dtype=np.float32)


class InstantWorkers:
    """``Generator`` and ``WeightSink``: one worker without limits. ``on_dispatch`` is called for every group."""

    def __init__(self) -> None:
        self.on_dispatch: Callable[[], None] = lambda: None
        self._slot = WorkerSlot(0, 0)

    def choose(self) -> WorkerSlot:
        return self._slot

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(0, True, self._slot.version, 0)]

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        self.on_dispatch()
        span = VersionSpan(worker.version, 0, _TOKENS)
        group, attempt = request.group_id, request.attempt
        return [
            Rollout(
                f"{group}/{attempt}/{index}",
                attempt,
                group,
                _PROMPT_IDS,
                _TOKEN_IDS,
                _LOGPROBS,
                (span,),
                "stop",
                sampling,
            )
            for index, sampling in enumerate(request.sampling)
        ]

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        self._slot = WorkerSlot(0, snapshot.version)
        return PublishReport(snapshot.version, (0,), {}, 0.0, 0.0)


class InstantScorer:
    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        return [ScoredRollout(rollout, 1.0, {"model": 1.0}, _LOGPROBS) for rollout in rollouts]


class HoldingLearner:
    """Trains in no time, but not before ``held()`` says that enough groups are outstanding."""

    def __init__(self, held: Callable[[], bool], at_full: Callable[[], None]) -> None:
        self.version = 0
        self._held = held
        self._at_full = at_full
        self._full = asyncio.Event()

    def look(self) -> None:
        if self._held():
            self._full.set()

    async def train(self, batch: TrainBatch) -> UpdateResult:
        self._full.clear()
        self.look()
        await self._full.wait()
        self._at_full()
        self.version += 1
        return UpdateResult(self.version, True, {"policy_loss": Ratio(0.0, 1.0)})

    async def snapshot(self) -> WeightSnapshot:
        return WeightSnapshot(self.version, Path("nowhere"), {})

    async def logprobs(self, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        return [_LOGPROBS for _ in rollouts]

    async def save(self, folder: Path) -> None:
        raise NotImplementedError("the benchmark saves nothing")


@dataclass(frozen=True, slots=True)
class Load:
    """One run: ``staleness * batch`` groups are outstanding whenever the learner trains, as long as steps remain."""

    batch: int
    staleness: int
    samples: int
    steps: int


def run(load: Load, at_full: Callable[[ExperienceQueue], None] = lambda queue: None) -> float:
    """CPU seconds of the run; ``at_full`` is called once a step, when all groups are outstanding."""
    clock = SystemClock()
    queue = ExperienceQueue(
        groups_per_batch=load.batch, max_staleness=load.staleness, clock=clock, group_deadline_s=3600
    )
    workers = InstantWorkers()

    def held() -> bool:
        left = (load.steps - controller.step - 1) * load.batch
        return queue.outstanding >= min(load.staleness * load.batch, left)

    learner = HoldingLearner(held, partial(at_full, queue))
    workers.on_dispatch = learner.look
    controller = Controller(
        ControllerSettings(0, load.steps, load.batch, load.samples, 8, 1.0, 5, 0.1),
        cursor=PromptCursor([Prompt(str(i), (1, 2, 3, 4), "x") for i in range(1000)], seed=0),
        queue=queue,
        generator=workers,
        scorer=InstantScorer(),
        learner=learner,
        sink=workers,
        clock=clock,
        recorder=MetricsRecorder(max_staleness=load.staleness, total_steps=load.steps, clock=clock, sinks=[]),
    )
    gc.collect()
    started = time.process_time()
    asyncio.run(controller.run())
    return time.process_time() - started


def load(outstanding: int, staleness: int, samples: int) -> Load:
    """Batches of N / staleness groups, and enough steps for a steady state; ``staleness`` divides N."""
    batch = outstanding // staleness
    return Load(batch, staleness, samples, max(3 * staleness, MIN_GROUPS // batch))


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds. ``all_in``: a run with batches of N/2, divided by its groups. ``group``: the same without steps."""

    all_in: float
    group: float


def costs(sizes: Sequence[int], samples: int, repeats: int = REPEATS) -> tuple[dict[int, Cost], float]:
    """The cost of a group by N, and of a learner step, each the best of ``repeats``.

    The smallest N (a multiple of 10) runs with batches of N/2 and N/5 as well: what the smaller batches cost more is
    the cost of their additional steps.
    """
    few = min(sizes)
    loads = [*(load(n, 2, samples) for n in sizes), load(few, 5, samples)]
    best = [math.inf] * len(loads)
    # Round about, so that a busy moment of the machine does not hit one size alone.
    for _ in range(repeats):
        best = [min(so_far, run(each)) for so_far, each in zip(best, loads, strict=True)]
    a_group = [seconds / (each.steps * each.batch) for seconds, each in zip(best, loads, strict=True)]
    all_in = dict(zip(sizes, a_group, strict=False))
    step = max(0.0, (a_group[-1] - all_in[few]) / (5 / few - 2 / few))
    return {n: Cost(seconds, seconds - step * 2 / n) for n, seconds in all_in.items()}, step


def bytes_a_group(outstanding: int, samples: int) -> float:
    """Bytes allocated by the whole process for each group that is outstanding or in training."""
    seen: list[float] = []

    def at_full(queue: ExperienceQueue) -> None:
        gc.collect()
        seen.append((tracemalloc.get_traced_memory()[0] - before) / (queue.outstanding + queue.in_training))

    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run(Load(outstanding // 2, 2, samples, 4), at_full)
    finally:
        tracemalloc.stop()
    # The first step of the four: there is nothing yet that ended groups have left behind.
    return seen[0]


def main(sizes: Sequence[int]) -> int:
    missed = []
    for samples in (1, 4):
        by_size, step = costs(sizes, samples)
        print(f"{samples} rollout(s) a group; a learner step costs {step * 1e6:.0f} us")
        for n, cost in by_size.items():
            rate = samples / cost.all_in
            print(
                f"  {n:>6,} outstanding: {rate:>7,.0f} rollouts/s all in (batches of {n // 2:,} groups), "
                f"{cost.group * 1e6:.0f} us a group"
            )
            if rate < TARGET_PER_S:
                missed.append(f"{rate:,.0f} rollouts/s with {n:,} outstanding, {TARGET_PER_S:,} wanted")
        few, many = by_size[min(sizes)].group, by_size[max(sizes)].group
        memory = bytes_a_group(2000, samples)
        print(f"  a group costs {many / few:.2f} times as much with {max(sizes):,} outstanding as with {min(sizes):,}")
        print(f"  a group takes {memory:,.0f} bytes")
        # Held to groups of one: there a rollout costs the most control. The figures for four are printed beside it.
        if samples == 1 and abs(many / few - 1) > FLAT:
            missed.append(f"cost ratio {many / few:.2f}, {1 - FLAT:.1f} to {1 + FLAT:.1f} wanted")
        if memory > MAX_BYTES_A_GROUP:
            missed.append(f"{memory:,.0f} bytes a group, at most {MAX_BYTES_A_GROUP:,} wanted")
    for miss in missed:
        print(f"MISSED: {miss}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1:]] or [10, 100, 1000, 10000]))
