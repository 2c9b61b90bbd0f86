"""A whole training run without models: `rlhf train` as it is, over parts in this process that learn nothing.

The toy learner's weights are the list of the group ids it was trained on, so a checkpoint says what went into it.
``hold`` names a phase in which one visit, counted from 1, reports itself and takes its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_cluster import launch
from rlhf_cluster.checkpoint_set import sets
from rlhf_cluster.config import Config
from rlhf_cluster.config_io import load_config
from rlhf_cluster.ending import guard
from rlhf_cluster.inputs import Inputs
from rlhf_cluster.protocols import LearnerLost, PublishReport, RolloutRequest, WeightSnapshot, WorkerSlot
from rlhf_cluster.types import Prompt, Rollout, TrainBatch, UpdateResult
from tests.fakes import FakeLearner, FakeScorer, FakeWorkers
from tests.tiny_models import build_tiny_policy

Report = Callable[[Any], None]


def toy_config(folder: Path, *overrides: str) -> Config:
    """The tiny config over a policy folder that is only looked at; its run is ``folder / "runs" / "tiny"``."""
    if not (folder / "policy").is_dir():
        build_tiny_policy(folder / "policy")
    base = [
        f"model.policy={folder / 'policy'}",
        f"model.reward={folder / 'policy'}",
        f"run.dir={folder / 'runs'}",
        "metrics.prometheus=null",
    ]
    return load_config(Path("configs/tiny_test.yaml"), [*base, *overrides])


def toy_inputs(prompts: int = 12) -> Inputs:
    class Tokenizer:
        def decode(self, ids: Sequence[int], **_: Any) -> str:
            return " ".join(map(str, ids))

    train = [Prompt(f"p{index}", (1, 2, index), f"question {index}") for index in range(prompts)]
    return Inputs(train, [Prompt("held-out", (1, 2, 3), "a held-out question")], Tokenizer())


@dataclass(frozen=True)
class Hold:
    """Where to stay: the ``visit``-th time ``phase`` is entered, for ``seconds``."""

    phase: str
    visit: int = 1
    seconds: float = 2.0


class Phases:
    def __init__(self, report: Report, hold: Hold | None) -> None:
        self._report = report
        self._hold = hold
        self._visits: Counter[str] = Counter()

    async def enter(self, phase: str) -> None:
        if self._is_held(phase):
            await asyncio.sleep(self._hold.seconds)  # type: ignore[union-attr]

    def enter_blocking(self, phase: str) -> None:
        if self._is_held(phase):
            time.sleep(self._hold.seconds)  # type: ignore[union-attr]

    def _is_held(self, phase: str) -> bool:
        self._visits[phase] += 1
        if self._hold is None or (phase, self._visits[phase]) != (self._hold.phase, self._hold.visit):
            return False
        self._report(phase)
        return True


class ToyWorkers(FakeWorkers):
    def __init__(self, phases: Phases, log: Path, capacity: int) -> None:
        super().__init__(capacity=capacity, seconds=lambda request: 0.002 + request.sampling[0].seed % 16 / 1000)
        self._phases = phases
        self._log = log

    async def generate(self, worker: WorkerSlot, request: RolloutRequest) -> list[Rollout]:
        kind = request.group_id.partition(":")[0]
        await self._phases.enter("generation" if kind.isdecimal() else kind)
        if kind.isdecimal():
            append(self._log, generated=request.group_id, pid=os.getpid())
        return await super().generate(worker, request)

    async def publish(self, snapshot: WeightSnapshot) -> PublishReport:
        verify = snapshot.manifest.get("verify", False)
        weights = snapshot.manifest["trained"]
        append(self._log, published=snapshot.version, weights=weights, verify=verify, pid=os.getpid())
        await self._phases.enter(f"publication of {snapshot.version}")
        return await super().publish(snapshot)

    async def scale(self, workers: int) -> str:
        raise ValueError("there is one worker")


class ToyLearner(FakeLearner):
    """Refuses a batch beyond the bound. ``lost(learner, call)`` says when a call finds the learner dead."""

    def __init__(self, phases: Phases, log: Path, max_staleness: int) -> None:
        super().__init__(seconds=0.02)
        self._phases = phases
        self._log = log
        self._max_staleness = max_staleness
        self.trained: list[str] = []
        self.lost: Callable[[str], bool] = lambda call: False

    async def train(self, batch: TrainBatch) -> UpdateResult:
        await self._phases.enter("training")
        self._check_alive("train")
        for member in batch.rollouts:
            lag = batch.learner_version - member.rollout.min_version
            assert 0 <= lag <= self._max_staleness, f"{member.rollout.rollout_id} has lag {lag}"
        result = await super().train(batch)
        self.trained += [group.group_id for group in batch.groups]
        seeds = [[member.rollout.sampling.seed for member in group.rollouts] for group in batch.groups]
        append(self._log, trained=[group.group_id for group in batch.groups], seeds=seeds, pid=os.getpid())
        return result

    async def snapshot(self) -> WeightSnapshot:
        self._check_alive("snapshot")
        return WeightSnapshot(self.version, Path("nowhere"), {"trained": list(self.trained)})

    async def save(self, folder: Path) -> None:
        await self._phases.enter("save")
        self._check_alive("save")
        folder.mkdir(parents=True)
        layout = {"learner.ranks": 2, "learner.zero_stage": 1, "model.dtype": "float32"}
        state = {"version": self.version, "trained": self.trained, "layout": layout}
        (folder / "learner.json").write_text(json.dumps(state))

    async def load(self, folder: Path, *, version: int | None = None) -> None:
        self._check_alive("load")
        state = json.loads((folder / "learner.json").read_text())
        self.trained = state["trained"]
        self.version = state["version"] if version is None else version

    async def restart(self, *, version: int) -> None:
        self.version, self.trained, self.batches = version, [], []

    def _check_alive(self, call: str) -> None:
        if self.lost(call):
            raise LearnerLost(f"learner rank 1 failed in {call!r}: it died")


class ToyFleet:
    """What ``TrainingRun`` needs of ``launch.Fleet``, and a process that ``close`` ends, or half a minute."""

    def __init__(self, config: Config, report: Report, hold: Hold | None) -> None:
        run = Path(config.run.dir) / config.run.name
        log = run / "events.jsonl"
        append(log, life="resumed" if sets(run / "checkpoints") else "fresh", pid=os.getpid())
        self.phases = Phases(report, hold)
        self.pool = self.sink = ToyWorkers(self.phases, log, capacity=config.queue.groups_per_batch * 2)
        self.scorers = FakeScorer()
        self.learner = ToyLearner(self.phases, log, config.queue.max_staleness)
        self._process = subprocess.Popen(["sleep", "30"])

    async def ready(self, *names: str) -> None:
        await self.phases.enter("start-up")

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def waits(self) -> list[Any]:
        return []

    async def dump_stacks(self) -> dict[str, str]:
        return {}

    async def close(self) -> None:
        try:
            await self.phases.enter("closing")
        finally:
            self._process.kill()
            self._process.wait()


def train(
    report: Report,
    config: Config,
    hold: Hold | None = None,
    real_ray: bool = False,
    change: Callable[[ToyFleet], None] | None = None,
    resume: str = "auto",
) -> int:
    """`rlhf train` over toy parts; returns the exit code. ``report`` gets the names of held phases.

    Phases: reading, start of Ray, start-up, evaluation, generation, training, publication of N, save, closing, end of
    Ray.
    With ``real_ray`` Ray starts and ends, and is reported.
    """
    phases = Phases(report, hold)

    def read_inputs(_: Config) -> Inputs:
        phases.enter_blocking("reading")
        return toy_inputs()

    def start_fleet(config: Config, **_: Any) -> ToyFleet:
        fleet = ToyFleet(config, report, hold)
        if change is not None:
            change(fleet)
        return fleet

    @contextlib.contextmanager
    def no_ray(_: Config) -> Iterator[None]:
        phases.enter_blocking("start of Ray")
        yield
        phases.enter_blocking("end of Ray")

    launch.read_inputs = read_inputs  # type: ignore[assignment]
    launch.Fleet = start_fleet  # type: ignore[assignment,misc]
    if real_ray:
        _report_ray(report)
    else:
        launch.ray_session = no_ray  # type: ignore[assignment]
    return guard(lambda: launch.train(config, resume=resume))


def _report_ray(report: Report) -> None:
    import ray

    init, shutdown = ray.init, ray.shutdown

    def reported_init(*args: Any, **kwargs: Any) -> Any:
        report("start of Ray")
        return init(*args, **kwargs)

    def reported_shutdown() -> None:
        report("end of Ray")
        time.sleep(0.3)
        shutdown()

    ray.init, ray.shutdown = reported_init, reported_shutdown


def append(path: Path, **event: Any) -> None:
    """One line that a kill leaves whole or absent."""
    line = json.dumps(event) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def events(config: Config) -> list[dict[str, Any]]:
    path = Path(config.run.dir) / config.run.name / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
